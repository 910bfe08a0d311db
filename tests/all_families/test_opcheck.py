"""torch.library.opcheck of the raw operators, with the arguments that calls and their backwards
hand them: schemas, fakes, and what AOT dispatch makes of both."""

import collections

import pytest
import torch
from torch import Tensor
from torch._prims_common import clone_preserve_strides
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from tests.all_families.test_layouts import OF_ONE
from tests.support.calls import CALLS, SAMPLES
from tests.test_conventions import declared_ops

NAMES = [n for n in SAMPLES if not n.startswith("nn.")]
# Those of optimizers take lists, which AOT dispatch refuses; tests/optimizer has their opchecks.
RAW = [name for name in CALLS if name.startswith("ops.") and not name.startswith("ops.optimizer")]


class Recorded(TorchDispatchMode):
    """Keeps the calls of onepass's operators, but of those that only check."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "onepass" and (op._schema.returns or op._schema.is_mutable):
            # As they are before the operator writes into them.
            self.calls.append((op, *torch.utils._pytree.tree_map(_copied, (args, kwargs or {}))))
        return op(*args, **kwargs or {})


def _copied(value):
    """With the same strides, but without overlaps: fakes cannot write into these."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value.contiguous() if 0 in value.stride() else clone_preserve_strides(value)


def strided(tensor: Tensor) -> Tensor:
    """The same in another memory order; of one dimension with gaps."""
    if tensor.dim() < 2:
        return tensor.repeat_interleave(2, -1)[::2] if tensor.dim() else tensor
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


# Without AOT dispatch, which takes a tenth of a second.
CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")
checked = set()
dispatched = collections.Counter()  # by operator: a few calls are enough


def check(calls, *, is_cheap: bool = False) -> None:
    """Each call once whose tensors and options differ; sizes and numbers count as zero or not."""
    for op, args, kwargs in calls:
        names = [argument.name for argument in op._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        key = (op, *((name, *_facts(name, value)) for name, value in given.items()))
        if key not in checked:
            dispatched[op] += not is_cheap
            few = {"test_utils": CHEAP} if is_cheap or dispatched[op] > 2 else {}
            torch.library.opcheck(op, args, kwargs, **few)
            checked.add(key)


def _facts(name: str, value) -> tuple:
    if isinstance(value, Tensor):
        return value.dtype, value.is_contiguous(), value.numel() > 0
    if isinstance(value, list):
        return (len(value),)
    is_number = isinstance(value, int | float) and name not in ("kind", "grad_mask")
    return (bool(value) if is_number else str(value),)


@pytest.mark.parametrize(
    "name, layout",
    [(name, lambda t: t) for name in NAMES] + [(name, strided) for name in NAMES if name in CALLS],
    ids=lambda value: value if isinstance(value, str) else "strided" * (value is strided),
)
def test_calls_and_their_backwards(name, layout):
    call, is_cheap = SAMPLES[name], name not in CALLS or layout is strided
    given = {n: layout(t) for n, t in call.tensors().items()}
    names = call.wanted(given)
    with Recorded() as recorded:
        for wanted in (names,) if is_cheap else (names, names[1:] or names):
            leaves = {n: given[n].detach().requires_grad_() for n in wanted}
            outputs = [y for y in call.results(given | leaves) if y.requires_grad]
            upstream = [layout(torch.ones_like(y)) for y in outputs]
            torch.autograd.grad(outputs, list(leaves.values()), upstream)
    check(recorded.calls, is_cheap=is_cheap)


@pytest.mark.parametrize("name", RAW)
def test_raw_calls(name):
    call = CALLS[name]
    with Recorded() as recorded:
        call.run(**call.tensors())
    check(recorded.calls)


def test_every_operator_is_checked():
    found = {name.partition(" ")[0] for name in RAW}
    declared = {name.replace("onepass::", "ops.") for name in declared_ops()}
    assert all(name.startswith("ops.optimizer") for name in declared - found)


# Those without gradients too, but for writes into leaves.
FUNCTIONS = [n for n, c in CALLS.items() if n.startswith("functional.") and not c.differentiable]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [lambda t: t, strided], ids=["dense", "strided"])
@pytest.mark.parametrize("name", NAMES + FUNCTIONS)
@pytest.mark.grid
def test_calls_without_data(name, layout, dtype):
    """Results and gradients of meta tensors and of fakes: shapes, dtypes and strides."""
    call = SAMPLES.get(name) or CALLS[name]
    given = call.typed(dtype)
    if "in place" not in name:  # which takes dense rows alone
        given |= {n: layout(t) for n, t in given.items() if n not in call.written}

    def facts(convert):
        own = {n: convert(t) for n, t in given.items()}
        wanted = call.wanted(own) if call.differentiable else []
        leaves = {n: own[n].detach().requires_grad_() for n in wanted}
        found = call.results(own | leaves)
        if leaves:
            found += torch.autograd.grad([y.sum() for y in found], list(leaves.values()))
        return [(t.shape, t.dtype, t.stride()) for t in found]

    with FakeTensorMode() as mode:
        fake = facts(mode.from_tensor)
    assert fake == facts(lambda t: t)
    assert facts(lambda t: t.to("meta")) == fake


@pytest.mark.parametrize("name", OF_ONE)
def test_sizes_that_only_the_run_tells_are_left_to_it(name):
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.randn(4, 6, 8)
        some = x[x[:, 0, 0] > 0]
        y = OF_ONE[name](some)
    assert some.shape[0].node.hint is None and y.shape[0].node.hint is None
