"""Values and gradients of selective scans, by the numerics rule."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, numerics
from onepass.reference.selective_scan import selective_scan as formula
from tests.support.scans import even, results

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
WIDE = ("A", "D", "delta_bias", "initial_state")  # float32 beside 16 bits in models

pytestmark = pytest.mark.isa

dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
orders = pytest.mark.parametrize("last", [False, True], ids=["tokens dense", "channels dense"])


def drawn(
    shape, state, dtype, last=False, groups=0, without=(), wide=False, positive=False
) -> dict[str, Tensor]:
    """The tensors of a call; those of tokens are parts of a projection."""
    batch, channels, length = shape

    def of_tokens():
        if last:
            return even(batch, length, 2 * channels, dim=1).mT[:, channels:]
        return even(batch, 2 * channels, length)[:, :channels]

    factor = (batch, groups, state, length) if groups else (batch, state, length)
    tensors = {
        "u": of_tokens(),
        "delta": of_tokens().abs() - 3,
        # As models initialise it. States that hardly decay have tests of their own.
        "A": -torch.arange(1.0, state + 1).expand(channels, -1) * (1 + torch.rand(channels, 1)) / 2,
        "B": even(*factor),
        "C": even(*factor),
        "D": even(channels),
        "z": of_tokens(),
        "delta_bias": torch.rand(channels),
        "initial_state": even(batch, channels, state),
    }
    if positive:  # as a step without softplus is
        tensors["delta"], tensors["delta_bias"] = (
            torch.rand_like(tensors[n]) for n in ("delta", "delta_bias")
        )
    return {
        name: tensor.to(F32 if wide and name in WIDE else dtype)
        for name, tensor in tensors.items()
        if name not in without
    }


def ours(**options):
    return lambda **given: functional.selective_scan(**given, **options, return_last_state=True)


def token_by_token(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None, delta_softplus=False,
    cu_seqlens=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence as models without a kernel run it."""
    step = delta if delta_bias is None else delta + delta_bias[:, None]
    step = F.softplus(step) if delta_softplus else step
    B, C = (
        f[:, None] if f.dim() == 3 else f.repeat_interleave(len(A) // f.shape[1], 1) for f in (B, C)
    )
    ends = [0, u.shape[-1]] if cu_seqlens is None else cu_seqlens.tolist()
    of_tokens = list(zip(*(x.unbind(-1) for x in (u, step, B, C)), strict=True))
    outputs, states = [], []
    for i, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        h = u.new_zeros((len(u), *A.shape)) if initial_state is None else initial_state
        h = h if cu_seqlens is None else h[i : i + 1]
        for x, d, b, c in of_tokens[begin:end]:
            h = torch.exp(d[..., None] * A) * h + (d * x)[..., None] * b
            outputs.append((c * h).sum(-1))
        states.append(h)
    y = torch.stack(outputs, -1)
    y = y if D is None else y + D[:, None] * u
    return y if z is None else y * F.silu(z), torch.cat(states)


def base(**options):
    """Sums in float32 at least. The loop over tokens is what models run in torch without a kernel,
    and rounds a long memory once per token as the kernel does; the definition's rounds of doubling
    do so log2(64) times per chunk."""

    def run(**given):
        dtype = torch.promote_types(given["u"].dtype, F32)
        y, last = token_by_token(**{name: t.to(dtype) for name, t in given.items()}, **options)
        return y.to(given["u"].dtype), last

    return run


def check(shape, state, dtype, draws=4, softplus=True, lengths=None, step=None, **of):
    found, options = [], {"delta_softplus": softplus}
    if lengths is not None:
        options["cu_seqlens"] = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    for seed in range(draws):
        torch.manual_seed(seed)
        tensors = drawn(shape, state, dtype, positive=not softplus, **of)
        sequences = shape[0] if lengths is None else len(lengths)
        if lengths is not None and "initial_state" in tensors:
            tensors["initial_state"] = even(sequences, shape[1], state).to(dtype)
        if step is not None:
            tensors["delta"] = torch.full(shape, step, dtype=dtype)
            tensors["delta"][..., ::3] += 0.25
            tensors["delta_bias"].zero_()
        upstream = even(*shape).to(dtype), even(sequences, shape[1], state)
        found.append(
            (
                results(ours(**options), tensors, upstream),
                results(base(**options), tensors, upstream, F64),
                results(base(**options), tensors, upstream),
            )
        )
    for i, name in enumerate(("output", "last_state", *(f"d{name}" for name in tensors))):
        of_draws = zip(*([result[i] for result in draw] for draw in found), strict=True)
        numerics.assert_close(*map(list, of_draws), name)


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("softplus", [False, True])
def test_the_definition_is_the_recurrence(softplus, groups):
    tensors = drawn((2, 4, 150), 5, F64, groups=groups, positive=True)
    found, expected = (f(**tensors, delta_softplus=softplus) for f in (formula, token_by_token))
    for one, other in zip(found, expected, strict=True):
        numerics.assert_close([one], [other], [other], "the definition")


@dtypes
@orders
@pytest.mark.parametrize("state", [1, 3, 4, 16, 21])
@pytest.mark.grid(2)
def test_values_and_gradients(state, last, dtype):
    """More than a chunk of tokens and than a block of channels, with tails."""
    check((2, 37, 267), state, dtype, last=last)


@dtypes
@orders
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.grid(2)
def test_groups(groups, last, dtype):
    check((2, 42, 33), 4, dtype, last=last, groups=groups)


@dtypes
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("without", [("z",), ("D", "delta_bias"), NAMES[5:]], ids=str)
@pytest.mark.grid(2)
def test_what_is_not_given(without, softplus, dtype):
    check((1, 17, 140), 8, dtype, without=without, softplus=softplus)


@orders
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_parameters_in_float32(dtype, last):
    check((1, 40, 200), 16, dtype, last=last, wide=True)


@dtypes
@orders
@pytest.mark.parametrize("lengths", [(1,) * 9, (3, 0, 2, 30), (127, 1, 1, 129, 0)], ids=str)
@pytest.mark.grid(2)
def test_packed_sequences(lengths, last, dtype):
    check((1, 21, sum(lengths)), 4, dtype, last=last, lengths=lengths)


@dtypes
@pytest.mark.parametrize("length", [1, 2, 7, 128, 129])
@pytest.mark.grid
def test_lengths(length, dtype):
    check((1, 11, length), 4, dtype, draws=8)


@pytest.mark.parametrize("value", [0.0, 20.0], ids=str)
@pytest.mark.parametrize("softplus", [False, True])
def test_steps_that_forget_nothing_or_everything(softplus, value):
    """Of 0 and of 20, where exp underflows; without and with softplus's threshold."""
    check((1, 20, 150), 16, F32, draws=8, softplus=softplus, step=value)


@pytest.mark.slow
def test_a_long_sequence():
    check((1, 4, 32768), 4, F32, draws=1)


def test_growing_states_become_infinite():
    """exp of a large number is Inf, as in the formula."""
    tensors = drawn((1, 3, 4), 2, F32, without=NAMES[5:])
    tensors["delta"] = torch.full((1, 3, 4), 100.0)
    tensors["A"] = torch.tensor([[1.0, -1.0], [-1.0, -1.0], [0.5, 0.5]])
    found, expected = (f(**tensors)[0] for f in (ours(), token_by_token))
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert found[0, 1].isfinite().all() and not found[0, 0, 2:].isfinite().any()


@orders
@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("name", ["u", "delta", "z"])
def test_a_number_that_is_not_finite_reaches_its_channel_alone(name, value, last):
    tensors = drawn((1, 19, 20), 4, F32, last)
    run = ours(delta_softplus=True)
    clean = run(**tensors)[0]
    tensors[name][0, 18, 7] = value
    found = run(**tensors)[0]
    reached = torch.zeros_like(found, dtype=torch.bool)
    reached[0, 18, 7 : 8 if name == "z" else 20] = True
    assert not found[reached].isfinite().all() and not found[0, 18, 7].isfinite()
    assert torch.equal(found[~reached], clean[~reached])


def test_a_sum_over_more_than_a_chunk_stays_infinite():
    tensors = drawn((1, 8, 300), 4, F32, without=NAMES[5:])
    D = torch.ones(8, requires_grad=True)
    output = ours(delta_softplus=True)(**tensors, D=D)[0]
    upstream = tensors["u"].sign()
    upstream[0, 3, 5] = upstream[0, 3, 290] = float("inf") * tensors["u"][0, 3, 0].sign()
    (dD,) = torch.autograd.grad(output, D, upstream)
    assert dD[3] == float("inf") and dD.isfinite().sum() == 7


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_16_bit_results_are_unbiased(dtype):
    check((1, 64, 256), 16, dtype, wide=True, draws=2)
