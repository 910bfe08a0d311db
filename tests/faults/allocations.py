"""Every operator, step, load, fuse, swap and attach with its n-th allocation failing, for every n.

A program, run with failing_allocations.cpp preloaded: `python -m tests.faults.allocations CASE...`
prints {case: {"allocations": how many, "complaints": [...]}} as JSON.
"""

import ctypes
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import onepass
from onepass.swapping import probe
from tests.optim.cases import FLAGS, MODES, made, snapshot, steps, stock
from tests.support import isolated
from tests.support.calls import CALLS, Call, flat
from tests.swap.foreign_norms import RMS

MOST = 3000  # allocations of a case; of one that makes more, as a proof, few fail
FEW = 12


@dataclass(frozen=True)
class Case:
    """`run` works on `make()`. `state(made)` is {name: bytes} of everything that a failure of `run`
    may not change, and in which two runs must agree."""

    make: Callable[[], object]
    run: Callable[[object], object]
    state: Callable[[object], dict[str, bytes]]


def bytes_of(tensors: dict) -> dict:
    """The bits of each tensor."""
    return {
        name: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, t in tensors.items()
    }


# ---- the cases -----------------------------------------------------------------------------------


def of_call(call: Call, backward: bool) -> Case:
    def make():
        tensors = call.tensors()
        if backward:
            for name, tensor in tensors.items():
                wants = tensor.is_floating_point() and name not in call.constant
                tensor.requires_grad_(wants)
        return tensors

    def run(tensors):
        torch.manual_seed(5)
        outputs = call.run(**tensors)
        if backward:
            outputs = [t for t in outputs if t.requires_grad]
            leaves = [t for t in tensors.values() if t.requires_grad]
            ones = [torch.ones_like(t) for t in outputs]
            return [*outputs, *torch.autograd.grad(outputs, leaves, ones, allow_unused=True)]
        return outputs

    return Case(make, run, bytes_of)


def of_optimizer(name: str, mode: str, before: int) -> Case:
    """A step after some."""

    def make():
        optimizer = made(name, [(6, 40), (4352,), (5,)], torch.bfloat16, **MODES[mode])
        steps(optimizer, before + 1)
        return optimizer

    return Case(make, lambda optimizer: optimizer.step(), state_of_optimizer)


def state_of_optimizer(optimizer) -> dict:
    found = {str(key): value for key, value in snapshot(optimizer).items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return bytes_of(found) | {"param_groups": repr(groups).encode()}


def loading(name: str, mode: str) -> Case:
    def make():
        source, target = (
            steps(made(name, [(6, 40), (4352,)], torch.bfloat16, **MODES[mode]), count)
            for count in (3, 1)
        )
        return target, source.state_dict()

    return Case(
        make, lambda both: both[0].load_state_dict(both[1]), lambda b: state_of_optimizer(b[0])
    )


def fusing(name: str) -> Case:
    def make():
        params = [torch.randn(40, generator=torch.Generator().manual_seed(0), requires_grad=True)]
        return steps(stock(name)(params, **FLAGS[name]), 2)

    def state(optimizer):
        return state_of_optimizer(optimizer) | {"class": type(optimizer).__name__.encode()}

    return Case(make, onepass.optim.fuse, state)


def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Linear(16, 16), layer, nn.Dropout(0.1), RMS(16)).eval()


def state_of_model(module: nn.Module) -> dict:
    found = bytes_of(module.state_dict())
    for name, part in module.named_modules():
        attributes = sorted(set(vars(part)) | set(part.__dict__))
        about = type(part).__qualname__, type(part).__module__, attributes, part.training
        found[f"{name} class"] = repr(about).encode()
    return found


def swapped_model() -> nn.Module:
    module = model()
    onepass.swap(module)
    return module


def transformers_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def state_of_transformers(module: nn.Module) -> dict:
    kind = repr(module.config._attn_implementation).encode()
    return state_of_model(module) | {"attention": kind}


def attach(module: nn.Module) -> None:
    from onepass.integrations import transformers

    transformers.attach(module)


# These raise their own errors, or return a table after the step, which may fail separately.
LEFT_OUT = ("ops.attention_forward scaled", "ops.attention_forward_check scaled")
LEFT_OUT += ("ops.optimizer_step",)
CASES: dict[str, Callable[[], Case]] = {}
for _name, _call in CALLS.items():
    is_module = _name.startswith(("nn.", "optim.")) and _name != "optim.clip_grad_norm_"
    if not is_module and _name not in LEFT_OUT:  # with its backward, if it has one
        CASES[_name] = lambda call=_call: of_call(call, call.differentiable)
# Memory is that of the options; the formula of a step makes no difference. Without Muon: torch's
# products abort the process without memory.
STEPS = {"AdamW": MODES, "Adam": ["all"], "SGD": ["stochastic"], "Lion": ["all"]}
LOADS = {"AdamW": ("own state", "remainder16", "fp32, int8"), "SGD": ["own state"]}
for _name, _modes in STEPS.items():
    for _mode in _modes:
        for _before in (0, 2):  # the states are made in the first step
            _key = f"{_name} {_mode}, step {_before + 1}"
            CASES[_key] = lambda n=_name, m=_mode, b=_before: of_optimizer(n, m, b)
for _name, _modes in LOADS.items():
    for _mode in _modes:
        CASES[f"{_name} {_mode}, load"] = lambda n=_name, m=_mode: loading(n, m)
for _name in ("AdamW", "Adam", "SGD"):
    CASES[f"fuse {_name}"] = lambda n=_name: fusing(n)
CASES["swap"] = lambda: Case(model, onepass.swap, state_of_model)
CASES["unswap"] = lambda: Case(swapped_model, onepass.unswap, state_of_model)
CASES["attach"] = lambda: Case(transformers_model, attach, state_of_transformers)


# ---- failing -------------------------------------------------------------------------------------


class Allocations:
    """The switch of failing_allocations.cpp."""

    def __init__(self):
        self._library = ctypes.CDLL(None)
        self._library.failing_allocations_begin.argtypes = [ctypes.c_long]
        if self._library.failing_allocations_find() == 0:
            raise RuntimeError("none of onepass's libraries is loaded")

    def run(self, function: Callable, argument, at: int):
        """(result, exception, number of allocations, whether one failed)."""
        failed, result, raised = ctypes.c_long(0), None, None
        self._library.failing_allocations_begin(at)
        try:
            result = function(argument)
        except Exception as error:
            raised = error
        count = self._library.failing_allocations_end(ctypes.byref(failed))
        return result, raised, count, bool(failed.value)


def outcome(case: Case, made, result) -> dict:
    numbered = {f"result {i}": t for i, t in enumerate(flat(result)) if t is not None}
    return bytes_of(numbered) | case.state(made)


def changes(before: dict, after: dict) -> list[str]:
    return [str(key) for key in {**before, **after} if before.get(key) != after.get(key)]


def judge(name: str) -> dict:
    """Complaints about a case."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    probe._MOST_REPEATS = 3  # as in all tests (tests/conftest.py)
    allocations, case, complaints = Allocations(), CASES[name](), []
    made = case.make()
    case.run(made)  # makes the objects that exist once per process
    made = case.make()
    result, error, count, _ = allocations.run(case.run, made, 0)
    if error is not None:
        return {"allocations": count, "complaints": [f"fails by itself: {error!r}"]}
    expected = outcome(case, made, result)
    made, before = case.make(), None
    step = 1 if count < MOST else count // FEW
    for at in range(1, max(MOST, 2 * count), step):
        before = case.state(made) if before is None else before
        result, error, _, failed = allocations.run(case.run, made, at)
        if error is None:
            different = changes(expected, outcome(case, made, result))
            if different:
                complaints.append(f"allocation {at} failed, unsaid, and {different[:4]} differ")
            if not failed:
                return {"allocations": at - 1, "complaints": complaints}
            made, before = case.make(), None
            continue
        if not isinstance(error, (RuntimeError, MemoryError)) or not is_told(error):
            complaints.append(f"allocation {at}: {error!r}")
        different = changes(before, case.state(made))
        if different:
            complaints.append(f"allocation {at} failed, and {different[:4]} changed: {error!r}")
            made, before = case.make(), None
    return {"allocations": MOST, "complaints": ["never ran to its end"]}


OURS = re.compile(r"\w+: .*(can't allocate memory|out of memory).* \d+ bytes$")
OUR_LISTS = re.compile(r"\w+: out of memory for the lists of the call$")
TORCHS = re.compile(r"DefaultCPUAllocator: can't allocate memory: you tried to allocate \d+ bytes")


def is_told(error: Exception) -> bool:
    """Whether an error names the operator and the bytes; for torch's own tensors the bytes; for our
    lists the operator alone, as std::bad_alloc knows no bytes."""
    text = str(error)
    if isinstance(error, MemoryError):
        return bool(OUR_LISTS.match(text))
    return bool(OURS.match(text) or TORCHS.search(text))


if __name__ == "__main__":
    print(json.dumps(isolated.each(judge, sys.argv[1:] or CASES, seconds=120)))
