"""Values and gradients of Mamba 2's scans, by the numerics rule."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, numerics
from onepass.reference.mamba_chunk_scan import mamba_chunk_scan as formula
from tests.support.scans import even, results

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
WIDE = ("A", "D", "dt_bias", "initial_states")  # float32 beside 16 bits in models

pytestmark = pytest.mark.isa

dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)


def drawn(
    shape, state, dtype, groups=1, without=(), wide=False, positive=False, columns=False
) -> dict[str, Tensor]:
    """The tensors of a call, some of them parts of a projection; `columns`: a D for each."""
    batch, length, heads, size = shape
    projected = even(batch, length, heads * size + 2 * groups * state + heads, dim=1)
    parts = projected.split([heads * size, groups * state, groups * state, heads], -1)
    tensors = {
        "x": parts[0].unflatten(-1, (heads, size)),
        "dt": parts[3].abs() - 3,
        # States that hardly decay would have errors of single elements; they have a test.
        "A": -torch.linspace(1.0, 16.0, heads) * (1 + torch.rand(heads)) / 2,
        "B": parts[1].unflatten(-1, (groups, state)),
        "C": parts[2].unflatten(-1, (groups, state)),
        "D": even(heads, size) if columns else even(heads),
        "z": even(*shape, dim=1),
        "dt_bias": torch.rand(heads),
        "initial_states": even(batch, heads, size, state),
    }
    if positive:  # as a step without softplus is
        tensors["dt"], tensors["dt_bias"] = (torch.rand_like(tensors[n]) for n in ("dt", "dt_bias"))
    return {
        name: tensor.to(F32 if wide and name in WIDE else dtype)
        for name, tensor in tensors.items()
        if name not in without
    }


def ours(**options):
    options |= {"chunk_size": 256, "return_final_states": True}
    return lambda **given: functional.mamba_chunk_scan(**given, **options)


def token_by_token(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False,
    cu_seqlens=None, dt_limit=(0.0, float("inf")),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence."""
    step = dt if dt_bias is None else dt + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    B, C = (f.repeat_interleave(x.shape[2] // f.shape[2], 2) for f in (B, C))
    ends = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    of_tokens = list(zip(*(t.unbind(1) for t in (x, step, B, C)), strict=True))
    outputs, states = [], []
    for i, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        h = x.new_zeros((len(x), *x.shape[2:], B.shape[-1]))
        h = h if initial_states is None else initial_states
        h = h if cu_seqlens is None or initial_states is None else h[i : i + 1]
        for u, d, b, c in of_tokens[begin:end]:
            h = (
                torch.exp(d * A)[..., None, None] * h
                + (d[..., None] * u)[..., None] * b[:, :, None]
            )
            outputs.append((c[:, :, None] * h).sum(-1))
        states.append(h)
    y = torch.stack(outputs, 1)
    y = y if D is None else y + (D if D.dim() == 2 else D[:, None]) * x
    return y if z is None else y * F.silu(z), torch.cat(states)


def base(**options):
    """The definition, chunks as products of matrices, as models run them in torch without a kernel;
    sums in float32 at least."""

    def run(**given):
        dtype = torch.promote_types(given["x"].dtype, F32)
        y, last = formula(**{name: t.to(dtype) for name, t in given.items()}, **options)
        return y.to(given["x"].dtype), last

    return run


def check(
    shape,
    state,
    dtype,
    draws=8,
    softplus=True,
    lengths=None,
    step=None,
    limit=None,
    base=base,
    **of,
):
    found, options = [], {"dt_softplus": softplus}
    if limit is not None:
        options["dt_limit"] = limit
    if lengths is not None:
        options["cu_seqlens"] = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    for seed in range(draws):
        torch.manual_seed(seed)
        tensors = drawn(shape, state, dtype, positive=not softplus, **of)
        sequences = shape[0] if lengths is None else len(lengths)
        of_state = (sequences, *shape[2:], state)
        if lengths is not None and "initial_states" in tensors:
            tensors["initial_states"] = even(*of_state).to(dtype)
        if step is not None:
            tensors["dt"] = torch.full(shape[:3], step, dtype=dtype)
            tensors["dt"][:, ::3] += 0.25
            tensors["dt_bias"].zero_()
        upstream = even(*shape, dim=1).to(dtype), even(*of_state)
        found.append(
            (
                results(ours(**options), tensors, upstream),
                results(base(**options), tensors, upstream, F64),
                results(base(**options), tensors, upstream),
            )
        )
    for i, name in enumerate(("output", "final_states", *(f"d{name}" for name in tensors))):
        of_draws = zip(*([result[i] for result in draw] for draw in found), strict=True)
        numerics.assert_close(*map(list, of_draws), name)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("softplus", [False, True])
def test_the_definition_is_the_recurrence(softplus, groups):
    tensors = drawn((2, 150, 4, 3), 5, F64, groups=groups, positive=True)
    found, expected = (f(**tensors, dt_softplus=softplus) for f in (formula, token_by_token))
    for one, other in zip(found, expected, strict=True):
        numerics.assert_close([one], [other], [other], "the definition")


@dtypes
@pytest.mark.parametrize("state", [1, 3, 16, 21])
@pytest.mark.parametrize("size", [1, 8, 19])
@pytest.mark.grid(2)
def test_values_and_gradients(size, state, dtype):
    """More than a chunk of tokens, with tails."""
    check((2, 141, 3, size), state, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_sizes_of_models(dtype):
    check((1, 130, 2, 64), 128, dtype, wide=dtype is BF16)


@dtypes
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.grid(2)
def test_groups(groups, dtype):
    check((2, 70, 6, 5), 4, dtype, groups=groups)


def test_more_heads_than_parts():
    check((1, 70, 19, 4), 5, F32, draws=4)


@dtypes
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("without", [("z",), ("D", "dt_bias"), NAMES[5:]], ids=str)
@pytest.mark.grid(2)
def test_what_is_not_given(without, softplus, dtype):
    check((1, 70, 3, 7), 8, dtype, without=without, softplus=softplus)


@dtypes
def test_a_D_for_each_column(dtype):
    check((2, 70, 3, 7), 8, dtype, columns=True)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_parameters_in_float32(dtype):
    check((1, 130, 4, 10), 16, dtype, wide=True)


@dtypes
@pytest.mark.parametrize("lengths", [(1,) * 9, (3, 0, 2, 30), (63, 1, 1, 65, 0)], ids=str)
@pytest.mark.grid(2)
def test_packed_sequences(lengths, dtype):
    check((1, sum(lengths), 3, 9), 4, dtype, lengths=lengths)


@dtypes
@pytest.mark.parametrize("length", [1, 2, 7, 64, 65])
@pytest.mark.grid
def test_lengths(length, dtype):
    check((1, length, 2, 5), 4, dtype, draws=8)


@pytest.mark.parametrize("limit", [(0.0, 0.2), (0.1, 0.5)], ids=str)
@pytest.mark.parametrize("softplus", [False, True])
def test_limits_of_steps(softplus, limit):
    check((2, 70, 3, 7), 8, F32, softplus=softplus, limit=limit)


@pytest.mark.parametrize("value", [0.0, 20.0], ids=str)
@pytest.mark.parametrize("softplus", [False, True])
def test_steps_that_forget_nothing_or_everything(softplus, value):
    """Of 0 and of 20, where exp underflows; without and with softplus's threshold."""
    check((1, 150, 5, 8), 16, F32, draws=8, softplus=softplus, step=value)


def test_a_step_that_forgets_everything_among_small_ones():
    """After it, sums of logarithms from the chunk's begin on are large and their differences
    small."""
    found = []
    for seed in range(8):
        torch.manual_seed(seed)
        tensors = drawn((1, 128, 2, 8), 8, F32, without=NAMES[5:], positive=True)
        tensors["dt"] = tensors["dt"] / 64
        tensors["dt"][:, 5::40] = 1000.0
        upstream = torch.randn(1, 128, 2, 8), torch.randn(1, 2, 8, 8)
        upstream[0][:, 5::40] = 0.0  # its own output is large
        tensors["x"][:, 5::40] = 0.0
        computed = ((ours(), None), (base(), F64), (base(), None))
        found.append([results(f, tensors, upstream, dtype) for f, dtype in computed])
    for i, name in enumerate(("output", "final_states", "dx", "ddt", "dA", "dB", "dC")):
        of_draws = zip(*([result[i] for result in draw] for draw in found), strict=True)
        numerics.assert_close(*map(list, of_draws), name)


@pytest.mark.slow
def test_a_long_sequence():
    check((1, 32768, 4, 4), 4, F32, draws=1)


def test_growing_states_become_infinite():
    """exp of a large number is Inf, as in the recurrence."""
    tensors = drawn((1, 4, 3, 2), 2, F32, without=NAMES[5:])
    tensors["dt"] = torch.full((1, 4, 3), 100.0)
    tensors["A"] = torch.tensor([1.0, -1.0, 0.5])
    found, expected = (f(**tensors)[0] for f in (ours(), token_by_token))
    assert found[expected.isfinite()].isfinite().all()
    assert found[:, :, 1].isfinite().all() and not found[:, 2:, 0].isfinite().any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("name", ["x", "dt", "z", "B", "C"])
def test_a_number_that_is_not_finite_reaches_what_follows_alone(name, value):
    """Of its head, or its column, and no token before it."""
    tensors = drawn((1, 70, 3, 10), 4, F32, groups=3)
    run = ours(dt_softplus=True)
    clean = run(**tensors)[0]
    place = {"dt": (0, 17, 1), "B": (0, 17, 1, 2), "C": (0, 17, 1, 2)}.get(name, (0, 17, 1, 3))
    tensors[name][place] = value
    found = run(**tensors)[0]
    reached = torch.zeros_like(found, dtype=torch.bool)
    columns = slice(3, 4) if name in "xz" else slice(None)
    reached[0, 17 : 18 if name in "zC" else None, 1, columns] = True
    assert not found[0, 17, 1, columns].isfinite().any()
    assert torch.equal(found[~reached], clean[~reached])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_16_bit_results_are_unbiased(dtype):
    check((1, 128, 8, 16), 16, dtype, wide=True, draws=2)
