"""Values and gradients of the delta rule, by the numerics rule."""

import pytest
import torch
from torch import Tensor

from onepass import functional, numerics
from onepass.reference import delta_rule as reference
from tests.support.scans import even, results

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INF = float("inf")

pytestmark = pytest.mark.isa

dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
decays = pytest.mark.parametrize("channels", [False, True], ids=["of heads", "of channels"])


def drawn(
    shape, value_dim, dtype, channels, key_heads=None, wide=False, state=True
) -> dict[str, Tensor]:
    """The tensors of a call, q, k and v parts of a projection. Keys have norms of about 1, or a
    state would grow; `wide`: g, beta and the state in float32, as models have them."""
    batch, length, heads, size = shape
    key_heads = key_heads or heads
    keys = key_heads * size
    projected = even(batch, length, 2 * keys + heads * value_dim, dim=1)
    q, k, v = projected.split([keys, keys, heads * value_dim], -1)
    of_g = (batch, length, heads, size) if channels else (batch, length, heads)
    tensors = {
        "q": q.unflatten(-1, (key_heads, size)),
        "k": k.unflatten(-1, (key_heads, size)) / size**0.5,
        "v": v.unflatten(-1, (heads, value_dim)),
        "g": -torch.rand(of_g) / 4,
        "beta": 0.1 + 0.8 * torch.rand(batch, length, heads),
        "initial_state": even(batch, heads, size, value_dim, dim=-2),
    }
    if not state:
        del tensors["initial_state"]
    kept = ("g", "beta", "initial_state") if wide else ()
    return {name: t.to(F32 if name in kept else dtype) for name, t in tensors.items()}


def function_of(channels, recurrent=False):
    if recurrent:
        return (
            functional.fused_recurrent_kda
            if channels
            else (functional.fused_recurrent_gated_delta_rule)
        )
    return functional.chunk_kda if channels else functional.chunk_gated_delta_rule


def ours(channels, **options):
    function = function_of(channels)
    return lambda **given: function(**given, output_final_state=True, **options)


def base(use_qk_l2norm_in_kernel=False, cu_seqlens=None, scale=None):
    """The definition by chunks, as models run it in torch without a kernel; sums in float32 at
    least."""

    def run(**given):
        dtype = torch.promote_types(given["q"].dtype, F32)
        tensors = {name: t.to(dtype) for name, t in given.items()}
        output, last = reference.delta_rule(
            **tensors, cu_seqlens=cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel,
            scale=given["q"].shape[-1] ** -0.5 if scale is None else scale,
        )  # fmt: skip
        return output.to(given["v"].dtype), last

    return run


def check(shape, value_dim, dtype, channels, draws=8, lengths=None, change=None, **options):
    of = {n: options.pop(n) for n in ("key_heads", "wide", "state") if n in options}
    if lengths is not None:
        options["cu_seqlens"] = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    batch, length, heads, size = shape
    of_state = (batch if lengths is None else len(lengths), heads, size, value_dim)
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        tensors = drawn(shape, value_dim, dtype, channels, **of)
        if lengths is not None and "initial_state" in tensors:
            tensors["initial_state"] = even(*of_state, dim=-2).to(dtype)
        if change is not None:
            change(tensors)
        upstream = even(batch, length, heads, value_dim, dim=1).to(dtype), even(*of_state)
        found.append(
            (
                results(ours(channels, **options), tensors, upstream),
                results(base(**options), tensors, upstream, F64),
                results(base(**options), tensors, upstream),
            )
        )
    for i, name in enumerate(("output", "final_state", *(f"d{name}" for name in tensors))):
        of_draws = zip(*([result[i] for result in draw] for draw in found), strict=True)
        numerics.assert_close(*map(list, of_draws), name)


@decays
@pytest.mark.parametrize("normed", [False, True])
def test_the_definition_is_the_recurrence(normed, channels):
    tensors = drawn((2, 150, 4, 6), 5, F64, channels, key_heads=2)
    of = {"scale": 0.3, "qk_l2norm": normed}
    found, expected = (f(**tensors, **of) for f in (reference.delta_rule, reference.recurrent))
    for one, other in zip(found, expected, strict=True):
        numerics.assert_close([one], [other], [other], "the definition")


@dtypes
@decays
@pytest.mark.parametrize("value_dim", [1, 8, 19])
@pytest.mark.parametrize("size", [3, 16, 21])
@pytest.mark.grid(2)
def test_values_and_gradients(size, value_dim, channels, dtype):
    """More than a chunk of tokens, with tails."""
    check((2, 141, 3, size), value_dim, dtype, channels)


@decays
@pytest.mark.parametrize("sizes", [(24, 56), (40, 72), (72, 40)], ids=str)
def test_odd_sizes(sizes, channels):
    check((1, 100, 2, sizes[0]), sizes[1], F32, channels, draws=4)


@decays
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_sizes_of_models(dtype, channels):
    """q and k are normalised, g and beta are in float32."""
    options = {"wide": dtype is BF16, "use_qk_l2norm_in_kernel": True}
    check((1, 130, 2, 128), 128, dtype, channels, draws=2, **options)


@decays
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("size", [256, 576])
def test_few_tokens_of_wide_keys(size, length, channels):
    """The gradient of g has a sum over all keys and values of the state."""
    check((1, length, 2, size), 64, F32, channels, draws=4, use_qk_l2norm_in_kernel=True)


@dtypes
@decays
@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.grid(2)
def test_heads_that_share_keys(key_heads, channels, dtype):
    check((2, 70, 6, 5), 4, dtype, channels, key_heads=key_heads)


@dtypes
@decays
@pytest.mark.grid(2)
def test_normalised_keys(channels, dtype):
    check((2, 100, 3, 12), 7, dtype, channels, use_qk_l2norm_in_kernel=True)


@decays
def test_zero_keys_are_normalised_to_zero(channels):
    def change(tensors):
        tensors["q"][:, 3:5] = 0
        tensors["k"][:, 4:7] = 0

    check((1, 80, 2, 8), 8, F32, channels, change=change, use_qk_l2norm_in_kernel=True)


@decays
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_without_a_state_and_with_a_scale(dtype, channels):
    check((2, 70, 3, 7), 8, dtype, channels, state=False, scale=-0.7)


@dtypes
@decays
@pytest.mark.parametrize("lengths", [(1,) * 9, (3, 0, 2, 30), (63, 1, 1, 65, 0)], ids=str)
@pytest.mark.grid(2)
def test_packed_sequences(lengths, channels, dtype):
    check((1, sum(lengths), 3, 9), 4, dtype, channels, lengths=lengths)


@dtypes
@decays
@pytest.mark.parametrize("length", [1, 2, 7, 16, 17, 64, 65])
@pytest.mark.grid
def test_lengths(length, channels, dtype):
    check((1, length, 2, 5), 4, dtype, channels)


@decays
@pytest.mark.parametrize("value", [0.0, -30.0, -1e4, -INF], ids=str)
def test_decays_that_forget_nothing_or_everything(value, channels):
    def change(tensors):
        tensors["g"].fill_(value)

    check((1, 150, 2, 8), 8, F32, channels, change=change, use_qk_l2norm_in_kernel=True)


@decays
@pytest.mark.parametrize("value", [-60.0, -1e4, -INF], ids=str)
def test_a_token_that_forgets_everything_among_others(value, channels):
    """After it, sums of g from the chunk's begin on are large and their differences small."""

    def change(tensors):
        tensors["g"] /= 16
        tensors["g"][:, 5::20, ..., :1] = value

    check((1, 150, 2, 8), 8, F32, channels, change=change)


@decays
@pytest.mark.parametrize("value", [0.0, 1.0], ids=str)
def test_values_that_are_not_written_or_overwrite(value, channels):
    def change(tensors):
        tensors["beta"].fill_(value)

    check((1, 150, 2, 8), 8, F32, channels, change=change, use_qk_l2norm_in_kernel=True)


@decays
def test_a_longer_sequence(channels):
    check((1, 4096, 2, 8), 8, F32, channels, draws=1, use_qk_l2norm_in_kernel=True)


@pytest.mark.slow
@decays
def test_a_long_sequence(channels):
    check((1, 32768, 2, 8), 8, F32, channels, draws=1, use_qk_l2norm_in_kernel=True)


@decays
@pytest.mark.parametrize("value", [INF, float("nan")], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_a_number_that_is_not_finite_reaches_what_follows_alone(name, value, channels):
    """Of its head, or its column, and no token before it."""
    tensors = drawn((1, 70, 3, 12), 10, F32, channels)
    clean = ours(channels)(**tensors)[0]
    place = {"beta": (0, 17, 1), "g": (0, 17, 1, 3)[: tensors["g"].dim()]}.get(name, (0, 17, 1, 3))
    tensors[name][place] = value
    found = ours(channels)(**tensors)[0]
    reached = torch.zeros_like(found, dtype=torch.bool)
    columns = slice(3, 4) if name == "v" else slice(None)
    reached[0, 17 : 18 if name == "q" else None, 1, columns] = True
    assert not found[0, 17, 1, columns].isfinite().any()
    assert torch.equal(found[~reached], clean[~reached])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@decays
def test_16_bit_results_are_unbiased(channels, dtype):
    check((1, 128, 8, 16), 16, dtype, channels, wide=True, draws=2)


# ---- few tokens ---------------------------------------------------------------------------------


def check_update(shape, value_dim, dtype, channels, draws=8, lengths=None, **options):
    """fused_recurrent and the update in place, whose state may have another dtype."""
    of = {n: options.pop(n) for n in ("key_heads", "wide") if n in options}
    given = dict(options)
    if lengths is not None:
        given["cu_seqlens"] = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        tensors = drawn(shape, value_dim, dtype, channels, **of)
        if lengths is not None:
            of_state = (len(lengths), *tensors["initial_state"].shape[1:])
            tensors["initial_state"] = even(*of_state, dim=-2).to(dtype)
        mine = function_of(channels, True)(**tensors, output_final_state=True, **given)
        others = {n: t for n, t in tensors.items() if n != "initial_state"}
        state = tensors["initial_state"].to(mine[1].dtype, copy=True)
        again = functional.delta_rule_update(state, **others, **given)
        assert torch.equal(again, mine[0]) and torch.equal(state, mine[1])
        double = base(**given)(**{n: t.double() for n, t in tensors.items()})
        found.append((mine, double, base(**given)(**tensors)))
    for i, name in enumerate(("output", "final_state")):
        of_draws = zip(*([result[i] for result in draw] for draw in found), strict=True)
        numerics.assert_close(*map(list, of_draws), name)


@dtypes
@decays
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("sizes", [(5, 3), (16, 8), (24, 56), (40, 72)], ids=str)
@pytest.mark.grid(2)
def test_few_tokens(sizes, tokens, channels, dtype):
    check_update((2, tokens, 4, sizes[0]), sizes[1], dtype, channels, key_heads=2)


@decays
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_decoding_of_models(dtype, channels):
    options = {"wide": dtype is BF16, "use_qk_l2norm_in_kernel": True, "draws": 4}
    check_update((2, 1, 4, 128), 128, dtype, channels, **options)


@decays
def test_more_tokens_than_a_chunk(channels):
    check_update((1, 150, 3, 8), 12, F32, channels, draws=4)


@decays
def test_few_tokens_of_packed_sequences(channels):
    check_update((1, 7, 3, 8), 12, F32, channels, lengths=(1, 0, 4, 2))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_state_in_16_bits(dtype):
    """Rounded once for a token, from what the float32 state would be."""
    tensors = drawn((2, 1, 3, 16), 24, F32, False)
    state = tensors.pop("initial_state").to(dtype)
    wide = state.float()
    output = functional.delta_rule_update(state, **tensors)
    assert torch.equal(output, functional.delta_rule_update(wide, **tensors))
    assert torch.equal(state, wide.to(dtype))
