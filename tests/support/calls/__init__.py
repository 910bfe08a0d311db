"""One small call of every public function, module, optimizer and raw operator, by name.

`tensors()` are its tensor arguments, the same at every call; `run(**tensors)` takes any of them and
returns a flat list of tensors; `stock`, where torch has the function, returns torch's.
"""

from tests.support.calls import attention, classes, layers, loss, rotary, variants
from tests.support.calls.call import Call, flat

PARTS = (layers, loss, attention, rotary, classes)
CALLS = {call.name: call for part in PARTS for call in part.calls()}
# What has derivatives, with every option that changes one.
SAMPLES = {name: call for name, call in CALLS.items() if call.differentiable}
SAMPLES |= {call.name: call for call in variants.variants()}
# All of them but modules, raw operators and optimizers.
FUNCTIONS = {n: c for n, c in (CALLS | SAMPLES).items() if not n.startswith(("nn.", "ops.", "opt"))}

__all__ = ["CALLS", "FUNCTIONS", "SAMPLES", "Call", "flat"]
