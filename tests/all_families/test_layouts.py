"""What every operator promises of memory: arguments in any layout give the bits of dense ones,
nothing around them is read or written, and results are tensors of their own, without gaps."""

import re

import pytest
import torch
from torch import Tensor

from onepass import functional, numerics
from tests.emulator.executors import DEVICE, everywhere
from tests.support.calls import CALLS, FUNCTIONS, Call
from tests.support.calls.call import FLOAT32
from tests.support.calls.memory import bytes_of, clones, everything, samples, with_upstream
from tests.support.layouts import views
from tests.support.results import Results, same_bits

pytestmark = pytest.mark.isa
F32, F64 = torch.float32, torch.float64
DTYPES = (F32, torch.bfloat16, torch.float16, F64)
# Checks have no results; tests/optimizer lays out the tensors of optimizers.
RAW = [n for n in CALLS if n.startswith("ops.") and "_check" not in n and "optimizer" not in n]
# Every call in float32 and in one more dtype, every variant in one. A cache has no float64.
CASES = [(n, d) for i, n in enumerate(FUNCTIONS) for d in (F32, DTYPES[1 + i % 3]) if n in CALLS]
CASES = [(name, dtype) for name, dtype in CASES if "kv_cache" not in name or dtype is not F64]
CASES += [(name, DTYPES[i % 4]) for i, name in enumerate(FUNCTIONS) if name not in CALLS]
NOT_DENSE = re.compile("must (be|have) .*dense|must have no gaps")


def has_no_gaps(tensor: Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes) == tensor.numel()


def may_be_refused(name: str, argument: str) -> bool:
    """Seeds, what is written in place, and gradients that are clipped must be dense."""
    call = FUNCTIONS.get(name) or CALLS[name]
    return argument.endswith("seed") or argument in call.written or call.lists or "in place" in name


def check(name: str, given: Results, every: int = 1, *, is_exact: bool = True) -> None:
    """A call with each argument in each layout, or every few of these, beside dense calls."""
    call = FUNCTIONS.get(name) or CALLS[name]
    given = with_upstream(call, given)
    plain = everything(call, clones(given))
    pairs = [
        (n, *view) for n, t in given.items() for view in views(t, is_written=n in call.written)
    ]
    for argument, layout, laid_out in pairs[len(name) % every :: every]:
        text, view = f"{name}: {argument} {layout}", laid_out(given[argument])
        first, before = view.clone(), bytes_of(view).clone()
        laid = clones(given) | {argument: view}
        try:
            found = everything(call, laid)
        except RuntimeError as error:
            assert may_be_refused(name, argument) and NOT_DENSE.search(str(error)), text
            found = {}
        check_results(call, found, laid, text)
        if found and not same_bits(found, plain):
            compare(name, found, given | {argument: first}, argument, is_exact, text)
        if argument in call.written:
            view.copy_(first)
        assert torch.equal(bytes_of(view), before), f"{text}: other memory is written"


def compare(
    name: str, found: Results, given: Results, argument: str, is_exact: bool, text: str
) -> None:
    """With the argument dense: of images in either order, which is also the order of their sums."""
    call, plain = FUNCTIONS.get(name) or CALLS[name], given[argument].contiguous().resolve_neg()
    orders = [plain]
    if ("group_norm" in name or "causal_conv1d" in name) and plain.dim() > 2:
        orders.append(plain.movedim(1, -1).contiguous().movedim(-1, 1))
    right = [everything(call, clones(given) | {argument: dense}) for dense in orders]
    if any(same_bits(found, one) for one in right):
        return
    # The sums for its weights are in the order of query and key in memory.
    assert not is_exact or "rotary" in name, text
    wide = [n for n, t in given.items() if t.is_floating_point() and n not in FLOAT32]
    exact = everything(call, given | {name: given[name].double() for name in wide})
    for result, tensor in found.items():
        numerics.assert_close(tensor, exact[result], right[0][result], f"{text}: {result}")


def check_results(call: Call, found: Results, given: Results, text: str) -> None:
    """Results are tensors of their own, and neither they nor gradients have gaps."""
    place = {n: bytes_of(tensor).data_ptr() for n, tensor in given.items()}
    written = {place.pop(n) for n in call.written}
    for result, tensor in found.items():
        at = bytes_of(tensor).data_ptr() if tensor.numel() else None
        if result.startswith("result"):
            assert at not in place.values(), f"{text}: {result} is a view of an argument"
        if at not in written | {*place.values()} and not result.startswith("written"):
            assert has_no_gaps(tensor), f"{text}: {result} has gaps"


@pytest.mark.parametrize("name, dtype", CASES, ids=str)
def test_layouts(executor, name, dtype):
    """Every layout of each argument of a call in float32, fewer of variants and other dtypes."""
    call, every = FUNCTIONS[name], 1 if name in CALLS and dtype is F32 else 4
    runs_on_cuda = executor.name == "emulated" or executor.is_cuda and DEVICE.type == "cuda"
    if runs_on_cuda and name.endswith(" codes"):
        with pytest.raises(RuntimeError, match="k_scale must not be given on CUDA"):
            call.results(call.typed(dtype))
        return
    if executor.is_cuda:
        every = 60 if "attention" in name else 4 * every
    check(name, call.typed(dtype), every, is_exact=not executor.is_cuda and not call.composed)


@pytest.mark.parametrize("name", RAW)
def test_layouts_of_raw_calls(name):
    check(name, CALLS[name].tensors())


# Strides of single elements mean nothing; columns that are single; rows that overlap; one row for
# all; dimensions none of which merge.
ODD = [((1, 4, 1, 16), (999, 16, 777, 1)), ((4, 16, 1), (16, 1, 55)), ((6, 16), (3, 1)),
       ((6, 2), (0, 7)), ((2,) * 10, (512, 1, 2, 256, 4, 128, 8, 64, 16, 32))]  # fmt: skip
OF_ONE = {
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-2:]),
    "add_rms_norm": lambda x: functional.add_rms_norm(x, x, x.shape[-1:])[0],
    "modulated_layer_norm": lambda x: functional.modulated_layer_norm(x, x.shape[-1:], x, x),
    "dropout": lambda x: functional.dropout(x, 0.0),
    "add_dropout": lambda x: functional.add_dropout(
        x, x, 0.0, column_scale=x.flatten()[: x.shape[-1]]
    ),
    "gated_activation": lambda x: functional.gated_activation(torch.cat([x, x], -1)),
    "silu_mul": lambda x: functional.silu_mul(x, x),
    "linear": lambda x: functional.linear(x, torch.linspace(-1, 1, 9 * x.shape[-1]).view(9, -1)),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "cross_entropy": lambda x: functional.cross_entropy(
        x.flatten(0, -2), torch.zeros(x.shape[:-1], dtype=torch.int64).flatten(), reduction="none"
    ),
}


@everywhere
@pytest.mark.parametrize("size, stride", ODD)
@pytest.mark.parametrize("name", OF_ONE)
def test_odd_strides(name, size, stride):
    x = torch.randn(1024).as_strided(size, stride)
    dense = x.clone(memory_format=torch.contiguous_format)
    torch.testing.assert_close(OF_ONE[name](x), OF_ONE[name](dense))


@pytest.mark.parametrize("name", [n for n in CALLS if n in FUNCTIONS and "varlen" not in n])
def test_offsets_beyond_32_bits(name):
    """Two samples 2^31 + 5 elements apart; the memory between them is never touched."""
    try:
        memory = torch.empty(2**31 + 5 + 4096, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("no address space for 4 GiB")
    call = FUNCTIONS[name]
    given = with_upstream(call, samples(call.typed(torch.bfloat16), slice(2)))
    expected = everything(call, clones(given))
    for argument, tensor in given.items():
        if tensor.dtype is torch.bfloat16 and tensor.dim() > 1 and len(tensor) == 2:
            strides = (2**31 + 5, *tensor[0].contiguous().stride())
            far = memory.as_strided(tensor.shape, strides).copy_(tensor)
            found = everything(call, clones(given) | {argument: far})
            assert same_bits(found, expected), f"{name}: {argument}"


@pytest.mark.parametrize("name", [n for n in CALLS if n in FUNCTIONS and CALLS[n].differentiable])
def test_accumulated_gradients_are_tensors_of_their_own(name):
    """A write into one changes no other, no argument and no upstream gradient."""
    call = CALLS[name]
    given = with_upstream(call, call.tensors())
    leaves = {n: given[n].requires_grad_() for n in call.wanted(call.tensors())}
    outputs = call.run(**{n: t for n, t in given.items() if not n.startswith("upstream")})
    pairs = [(y, given[f"upstream {i}"]) for i, y in enumerate(outputs) if y.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    tensors = [*given.values(), *(leaf.grad for leaf in leaves.values())]
    assert len({bytes_of(tensor).data_ptr() for tensor in tensors}) == len(tensors)
