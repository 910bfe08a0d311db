"""Attention: values and gradients of every option and of their combinations.

Every result is held to the reference in float64 by the numerics rule; `base` is torch's function
where it has one.
"""

from dataclasses import replace

import pytest
import torch

from tests.attention import cases as attention_cases
from tests.attention.cases import (
    DTYPES,
    GRADIENTS,
    Case,
    assert_same,
    backward,
    check,
    forward,
    ours,
)
from tests.attention.cuda_cases import KINDS, of_kind
from tests.emulator.executors import Executor, each, everywhere
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.pairs import drawn, every_third, pairwise

pytestmark = [pytest.mark.isa, pytest.mark.emulator_grid]

CAUSAL = dict(window_right=0, bottom_right=True)
kinds = each("kind", cpu=DTYPES, cuda=KINDS)
half_and_float = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)

# Around one, one vector, one tile (64, 96 or 128 rows) and several, and some that no tile divides.
LENGTHS = [(n, n) for n in (1, 7, 113, 128, 129, 257)]
LENGTHS += [(128, 96), (127, 95), (129, 97), (127, 63), (129, 65), (64, 128), (64, 192), (192, 64)]
LENGTHS += [(1, 385), (385, 1), (385, 5), (7, 300), (300, 7), (150, 230)]
# One element, one vector of each level, dimensions that no vector divides, the common ones, the
# longest; on CUDA each bucket of tiles, filled and not, and dimensions without tiles.
HEAD_DIMS = (1, 8, 40, 59, 64, 72, 96, 111, 128, 160, 192, 256, 264, 512)


def one_head(executor: Executor) -> dict:
    """The emulator is slow."""
    return dict(batch=1, heads=1) if executor.name == "emulated" else {}


# ---- one thing at a time ------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.grid
def test_lengths(executor, lengths, kind):
    seq_q, seq_k = lengths
    case = Case(seq_q=seq_q, seq_k=seq_k, **one_head(executor), **of_kind(kind))
    windows = [{}, dict(window_right=0), CAUSAL, dict(window_left=40, **CAUSAL)]
    for window in windows[::3] if executor.name == "emulated" else windows:
        # With one key all gradients of scores are cancellation, see attention_cases.pool.
        if seq_k > 1 or (case.dtype is not F32 and not window):
            check(replace(case, **window))


@kinds
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.grid(2)
@pytest.mark.emulator_grid
def test_head_dims(executor, head_dim, kind):
    case = Case(head_dim=head_dim, batch=1, seq_q=66, seq_k=130, dlse=True, **CAUSAL)
    check(replace(case, **one_head(executor), **of_kind(kind)))


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "terms",
    [dict(window_right=0), dict(window_left=60, window_right=20), dict(alibi="b"),
     dict(dropout_p=0.3), dict(bias="hq", **CAUSAL),
     dict(window_right=0, alibi="", mask="bq", dropout_p=0.3, softcap=3.0)],
    ids=str,
)  # fmt: skip
@pytest.mark.grid(2)
@pytest.mark.emulator_grid
def test_positions_of_a_shard(terms, dtype):
    """Shards of ring attention: before, on and after the diagonal, far beyond 32 bits, and
    beginning within the eight keys that share random numbers."""
    case = Case(dtype, 40, batch=1, heads=2, kv_heads=1, seq_q=70, seq_k=130, dlse=True, **terms)
    for query, key in ((0, 3), (40, 50), (13, 117), (2**33 + 205, 2**33 + 77)):
        check(replace(case, query_offset=query, key_offset=key))


@everywhere
@half_and_float
@pytest.mark.parametrize("value_dim", [1, 24, 59, 72, 128, 200, 512])
@pytest.mark.parametrize("head_dim", [1, 8, 64, 136, 192])
@pytest.mark.grid(2)
def test_value_dims(head_dim, value_dim, dtype):
    check(Case(dtype, head_dim, value_dim, batch=1, heads=1, seq_q=40, seq_k=110))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("seq_k", [2, 3])
@pytest.mark.parametrize("seq_q", [70, 385])
def test_many_queries_of_few_keys(seq_q, seq_k, dtype):
    """The first queries of a tile see fewer keys than the others, or none. Not in float32."""
    for bottom_right in (False, True):
        for left, right in ((-1, 0), (-1, 1), (1, 0), (0, 0)):
            check(
                Case(dtype, 32, seq_q=seq_q, seq_k=seq_k, window_left=left, window_right=right,
                     bottom_right=bottom_right, batch=1)
            )  # fmt: skip


@everywhere
@pytest.mark.emulator_grid(2)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("other", [F32, BF16, F16], ids=str)
def test_dtypes_of_bias_and_sinks(dtype, other):
    check(Case(dtype, 32, heads=1, seq_q=60, seq_k=90, bias="hq", bias_dtype=other))
    if other in (F32, dtype):
        check(Case(dtype, 32, heads=3, seq_q=60, seq_k=90, sinks=other, dlse=True))
        check(Case(dtype, 32, heads=3, seq_q=60, seq_k=40, sinks=other, alibi="b", **CAUSAL))


@kinds
@pytest.mark.parametrize(
    "options",
    [dict(softcap=20.0, factor=9.0), dict(dropout_p=0.3, dlse=True, bias="q"), dict(factor=-0.7),
     dict(factor=0.0)],
    ids=str,
)  # fmt: skip
@pytest.mark.grid(2)
def test_options(executor, options, kind):
    case = Case(heads=2, kv_heads=1, seq_q=70, seq_k=200, **of_kind(kind))
    check(replace(case, **options))


# ---- everything with everything -----------------------------------------------------------------

# Any two values of any two options occur together at least once, also of lengths, head dims and
# dtypes: kernels fail mostly where two options meet. Combinations of three are left to chance: each
# row has many, some rows are drawn, and tests/faults/fuzz.py draws others.
AXES = dict(
    head_dim=(1, 8, 40, 59, 64, 96, 128, 160, 256, 512),
    length=[(1, 7), (7, 113), (113, 203), (127, 127), (129, 128), (203, 113), (129, 385), (192, 2)],
    bias=[None, "", "b", "h", "q", "bh", "bq", "hq", "bhq"],
    mask=[None, "", "b", "h", "q", "bh", "bq", "hq", "bhq"],
    # Of one key, beyond the keys, after the diagonal; narrower and wider than a tile.
    window=[(-1, -1, False), (-1, 0, False), (-1, 0, True), (60, 0, True), (33, 17, False),
            (3, 130, True), (0, 0, False), (0, -1, True), (-1, 5, False), (1000, 0, False)],
    storage=["dense", "dense", "used", "packed", "packed used", "paged"],
    dtype=DTYPES,
    group=[(2, 2), (4, 2), (3, 1)],
    alibi=[None, "", "b"],
    sinks=[None, F32, "dtype"],
    dropout_p=[0.0, 0.3],
    softcap=[0.0, 2.0],
    dlse=[False, True],
    value_dim=[0, 24],
)  # fmt: skip


@pytest.mark.parametrize("row", every_third(pairwise(AXES) + drawn(AXES, 9)))
def test_pairs_of_options(row):
    check(attention_cases.combination(row))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lse_rest_is_what_rounding_took_from_the_lse(executor, dtype):
    """The backward adds lse_rest to the lse of each row; without it, it uses the lse alone.

    In float32 every gradient is then less exact; in 16 bits rounding hides the difference.
    """
    case = Case(dtype, 32, seq_q=70, seq_k=90, bias="", window_right=0)
    t = case.tensors()
    t["bias"] = (t["bias"].double() - 1000).to(dtype)
    found, exact = forward(case, t), attention_cases.definition(case, t, F64)
    lse, rest = found["lse"], found.lse_rest
    assert (rest.shape, rest.dtype) == (lse.shape, lse.dtype)
    assert rest.any()

    def error(result, name):
        return float((result.double() - exact[name]).abs().max())

    with_rest, without = backward(case, t, found), backward(case, t, dict(found))
    zero = attention_cases.Results(found, torch.zeros_like(rest))
    assert_same(backward(case, t, zero), without)
    if dtype is not F64:
        assert error(lse.double() + rest.double(), "lse") < error(lse, "lse")
    if dtype is F32 and not executor.is_cuda:
        for name, gradient in without.items():
            assert error(with_rest[name], name) < error(gradient, name), name


# ---- which gradients ----------------------------------------------------------------------------

EVERYTHING = Case(
    F32, 24, 40, heads=4, kv_heads=2, seq_q=70, seq_k=150, window_left=100, window_right=0,
    bottom_right=True, bias="hq", mask="b", alibi="b", sinks=F32, softcap=3.0, dropout_p=0.25,
    dlse=True,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_each_gradient_alone(executor, dtype):
    case = replace(EVERYTHING, dtype=dtype)
    case = replace(case, heads=2, kv_heads=1) if executor.name == "emulated" else case
    t = case.tensors()
    outputs = forward(case, t)
    every = backward(case, t, outputs)
    several = (("query", "value"), ("key", "bias"), ("sinks", "alibi_slopes"), ())
    for names in (*((name,) for name in GRADIENTS), *several):
        expected = {f"d{name}": every[f"d{name}"] for name in GRADIENTS if name in names}
        assert_same(backward(case, t, outputs, wanted=names), expected, str(names))


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_gradients_of_the_lse_alone(dtype):
    case = Case(dtype, 32, seq_q=66, seq_k=80, window_right=0, bias="q", sinks=dtype, dlse=True)

    def compute(drawn: Case):
        t = {name: x for name, x in drawn.tensors().items() if name != "doutput"}
        found = ours(drawn, t)
        assert not found["dvalue"].any()
        zero = torch.zeros_like(drawn.tensors()["doutput"])
        assert_same(ours(drawn, t | dict(doutput=zero)), found)
        return found, attention_cases.definition(drawn, t, F64), attention_cases.base(drawn, t)

    check(case, compute)


@everywhere
@half_and_float
def test_a_call_without_gradients_of_outputs_gives_zeros(dtype):
    case = Case(dtype, seq_q=20, seq_k=20, sinks=F32, bias="")
    t = {name: tensor for name, tensor in case.tensors().items() if name != "doutput"}
    gradients = backward(case, t, forward(case, t))
    assert all(not gradient.any() for gradient in gradients.values())
    assert {name[1:]: g.shape for name, g in gradients.items()} == {
        name: t[name].shape for name in GRADIENTS if name in t
    }


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("options", [{}, dict(window_right=0), dict(kv_heads=1)], ids=str)
def test_16_bit_gradients_are_accumulated_in_float32(executor, options, dtype):
    """As in torch's unfused function; its fused one, the base of other tests, does not."""
    heads, seq = (2, 300) if executor.name == "emulated" else (4, 512)
    case = Case(dtype, 64, batch=1, heads=heads, seq_q=seq, seq_k=seq, **options)
    t = case.tensors()
    found, ref = ours(case, t), attention_cases.definition(case, t, F64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        unfused = attention_cases.stock(case, t)
    for name, result in unfused.items():
        attention_cases.numerics.assert_close(found[name], ref[name], result, name)
