"""Values and gradients of causal convolutions, by the numerics rule."""

import pytest
import torch
from torch import Tensor

from onepass import functional, numerics, reference

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NAMES = ("output", "dx", "dweight", "dbias", "dinitial_state")

pytestmark = pytest.mark.isa

dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
orders = pytest.mark.parametrize("last", [False, True], ids=["tokens dense", "channels dense"])


def drawn(shape, width, dtype, last, weight_dtype=None, state=False) -> list[Tensor | None]:
    """x, a part of a projection, weight, bias and initial state."""
    batch, channels, length = shape
    if last:
        x = torch.randn(batch, length, 2 * channels).transpose(1, 2)[:, channels:]
    else:
        x = torch.randn(batch, 2 * channels, length)[:, :channels]
    weight_dtype = weight_dtype or dtype
    own = (torch.randn(channels, width) / width**0.5, torch.randn(channels))
    before = torch.randn(batch, channels, width - 1).to(dtype) if state else None
    return [x.to(dtype), *(t.to(weight_dtype) for t in own), before]


def numbers_of(lengths) -> Tensor:
    """Each position's sequence, of sequences of these lengths."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def results(compute, tensors, doutput, dtype=None) -> list[Tensor]:
    leaves = [t if t is None else t.to(dtype or t.dtype).requires_grad_() for t in tensors]
    leaves = [t if t is None else t.detach().requires_grad_() for t in leaves]
    output = compute(*leaves)
    given = [t for t in leaves if t is not None]
    return [output, *torch.autograd.grad(output, given, doutput.to(output.dtype))]


def check(shape, width, dtype, last, activation=None, lengths=None, draws=4, **options):
    """Draws are pooled: sums for one channel are few numbers."""
    seq_idx = None if lengths is None else numbers_of(lengths).expand(shape[0], -1)

    def ours(x, weight, bias, state):
        return functional.causal_conv1d(
            x, weight, bias, activation=activation, initial_state=state, seq_idx=seq_idx
        )

    def formula(x, weight, bias, state):
        wide = [t if t is None else t.to(torch.promote_types(t.dtype, F32)) for t in (weight, bias)]
        before = None if state is None else state.to(wide[0].dtype)
        x_wide = x.to(wide[0].dtype)
        out = reference.causal_conv.causal_conv1d(x_wide, *wide, activation, before, seq_idx)
        return out.to(x.dtype)

    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        tensors = drawn(shape, width, dtype, last, **options)
        doutput = torch.randn(shape).to(dtype)
        found.append(
            (
                results(ours, tensors, doutput),
                results(formula, tensors, doutput, F64),
                results(formula, tensors, doutput),
            )
        )
    names = NAMES if options.get("state") else NAMES[:-1]
    for i, name in enumerate(names):
        of_draws = zip(*([result[i] for result in draw] for draw in found), strict=True)
        numerics.assert_close(*map(list, of_draws), name)


@dtypes
@orders
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.grid(2)
def test_values_and_gradients(width, activation, last, dtype):
    """More than a piece of tokens or of channels, with tails."""
    check((2, 37, 523), width, dtype, last, activation)
    check((1, 263, 19), width, dtype, last, activation)


@dtypes
@orders
@pytest.mark.parametrize("length", [1, 2, 3, 40, 600])
@pytest.mark.grid
def test_after_an_initial_state(length, last, dtype):
    check((2, 5, length), 4, dtype, last, "silu", state=True, draws=16)


@dtypes
@orders
@pytest.mark.parametrize(
    "lengths", [(1,) * 9, (3, 1, 2, 30), (510, 1, 1, 2, 511), (512, 512), (700, 1)], ids=str
)
@pytest.mark.grid
def test_packed_sequences(lengths, last, dtype):
    check((1, 21, sum(lengths)), 4, dtype, last, "silu", lengths)


@orders
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_weights_in_float32(dtype, last):
    check((2, 37, 100), 4, dtype, last, "silu", weight_dtype=F32)


@orders
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_16_bit_results_are_unbiased(dtype, last):
    check((1, 64, 512), 4, dtype, last, "silu")


@orders
@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
def test_a_number_that_is_not_finite_reaches_the_sums_that_read_it(value, last):
    x, weight, bias, _ = drawn((1, 3, 20), 4, F32, last)
    clean = functional.causal_conv1d(x, weight, bias)
    x[0, 1, 7] = value
    found = functional.causal_conv1d(x, weight, bias)
    reached = torch.zeros_like(found, dtype=torch.bool)
    reached[0, 1, 7:11] = True
    assert not found[reached].isfinite().any()
    assert torch.equal(found[~reached], clean[~reached])


@orders
def test_cu_seqlens_are_the_same_as_numbers(last):
    lengths = (3, 1, 40, 5)
    x, weight, bias, _ = drawn((1, 6, sum(lengths)), 4, F32, last)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    found = functional.causal_conv1d(x, weight, bias, cu_seqlens=ends)
    expected = functional.causal_conv1d(x, weight, bias, seq_idx=numbers_of(lengths))
    assert torch.equal(found, expected)


@orders
@pytest.mark.parametrize("length", [1, 2, 3, 10])
def test_calls_after_each_other_are_one_call(length, last):
    x, weight, bias, _ = drawn((2, 6, 12), 4, F32, last)
    whole, end = functional.causal_conv1d(x, weight, bias, return_final_state=True)
    state, outputs = None, []
    for part in x.split(length, -1):
        output, state = functional.causal_conv1d(
            part, weight, bias, initial_state=state, return_final_state=True
        )
        outputs.append(output)
    assert torch.equal(torch.cat(outputs, -1), whole)
    assert torch.equal(state, end)


@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_final_state_is_a_tensor_of_its_own_in_the_dtype_of_x(length):
    x, weight = torch.randn(2, 6, length), torch.randn(6, 4)
    with torch.autocast("cpu", dtype=BF16):
        output, state = functional.causal_conv1d(x, weight, return_final_state=True)
    assert output.dtype is BF16 and state.dtype is F32 and state.is_contiguous()
    before = x.clone()
    state.zero_()
    assert torch.equal(x, before)
