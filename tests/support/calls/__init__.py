"""One small call of every public function, module, optimizer and raw operator, by name.

`tensors()` are its tensor arguments, the same at every call; `run(**tensors)` takes any of them and
returns a flat list of tensors; `stock`, where torch has the function, returns torch's.
"""

from tests.support.calls import attention, classes, layers, loss, rotary
from tests.support.calls.call import Call, flat

PARTS = (layers, loss, attention, rotary, classes)
CALLS = {call.name: call for part in PARTS for call in part.calls()}

__all__ = ["CALLS", "Call", "flat"]
