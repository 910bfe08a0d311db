"""Rotary embedding: values and gradients, in every dtype, of both pairings."""

import pytest
import torch

from onepass import functional
from tests.emulator.executors import everywhere
from tests.rotary.cases import BOTH, DTYPES, Case, check, check_tensors, outputs_and_gradients
from tests.support.dtypes import BF16, F16, F32

pytestmark = [everywhere, pytest.mark.isa]
pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
widths = pytest.mark.parametrize("half_width", [False, True], ids=["columns", "pairs"])


# Rotated columns: packs of 8 on CUDA, one alone, vectors of every level with and without a tail.
@pairings
@widths
@pytest.mark.grid(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [0, 2, 6, 16, 30, 32, 64, 70, 128])
def test_values_and_gradients(dtype, rotary_dim, half_width, interleaved):
    """The halves of cos and sin differ, as do those of a pair."""
    case = Case(dtype, head_dim=max(rotary_dim, 2), half_width=half_width, interleaved=interleaved)
    check(case)
    check(case, head_dim=rotary_dim + 24, rotary_dim=rotary_dim)  # the others are copied


@pairings
@pytest.mark.parametrize("table_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_tables_of_another_dtype(dtype, table_dtype, interleaved):
    for half_width in (False, True):
        check(Case(dtype, table_dtype, interleaved=interleaved, half_width=half_width))


@pairings
@pytest.mark.parametrize("positions", ["tokens", "batch"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_positions(positions, kind, interleaved):
    case = Case(F32, positions=positions, interleaved=interleaved)
    tensors = case.tensors()
    tensors["positions"] = tensors["positions"].to(kind)
    check_tensors(case, tensors)


@pairings
@pytest.mark.parametrize("table_batch", [0, 1, 3])
def test_tables_of_a_batch(table_batch, interleaved):
    check(Case(batch=3, table_batch=table_batch, interleaved=interleaved))


def test_packed_sequences():
    """Tokens of all sequences one after the other, with positions that restart."""
    query, key = torch.randn(12, 4, 16), torch.randn(12, 2, 16)
    cos, sin = torch.randn(7, 16), torch.randn(7, 16)
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    options = {"seq_first": True, "positions": positions}
    found = functional.rotary_embedding(query, key, cos, sin, **options)
    for x, y in zip((query, key), found, strict=True):
        for rows in (slice(0, 5), slice(5, 12)):
            length = rows.stop - rows.start
            one, _ = functional.rotary_embedding(
                x[None, rows], None, cos[:length], sin[:length], seq_first=True
            )
            assert torch.equal(one[0], y[rows])


# ---- norms before the rotation -------------------------------------------------------------------


@pairings
@pytest.mark.grid(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [0, 2, 6, 16, 30, 32, 64, 70, 128])
@pytest.mark.parametrize("rest", [0, 3, 24])  # columns that are normalised and not rotated
def test_norms(dtype, rotary_dim, rest, interleaved):
    """Seven tokens of six heads: blocks of four rows and a remainder."""
    case = Case(dtype, tokens=7, head_dim=max(rotary_dim + rest, 3), interleaved=interleaved,
                norms=BOTH)  # fmt: skip
    check(case, rotary_dim=rotary_dim)
    check(case, rotary_dim=rotary_dim, half_width=True, weight_offset=1.0)


@pytest.mark.parametrize("norms", [("query",), ("key",)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_of_one_alone(dtype, norms):
    check(Case(dtype, norms=norms, head_dim=48, rotary_dim=32))
    check(Case(dtype, norms=norms, head_dim=20, rotary_dim=6, interleaved=True))


@pytest.mark.parametrize("eps", [None, 0.0, 1e-6, 0.1])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0, -0.25])
def test_epsilon_and_offset(eps, weight_offset):
    check(Case(norms=BOTH, eps=eps, weight_offset=weight_offset))
    check(Case(BF16, weight_dtype=F32, norms=BOTH, eps=eps, weight_offset=weight_offset))


@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_weights_of_another_dtype(dtype, weight_dtype):
    for head_dim in (32, 27):  # 16-byte accesses on CUDA, and not
        check(Case(dtype, rotary_dim=26, head_dim=head_dim, norms=BOTH, weight_dtype=weight_dtype))
    check(Case(dtype, norms=BOTH, weight_dtype=weight_dtype, table_dtype=F32, weight_offset=1.0))


@pytest.mark.parametrize("head_dim", [2, 256, 512])
def test_norms_of_narrow_and_wide_heads(head_dim):
    check(Case(head_dim=head_dim, rotary_dim=head_dim // 2 * 2, norms=BOTH))
    check(Case(BF16, head_dim=head_dim, rotary_dim=head_dim // 4 * 2, norms=BOTH))


# ---- with and without norms ----------------------------------------------------------------------

normed = pytest.mark.parametrize("norms", [(), BOTH], ids=["alone", "normed"])


@normed
@pytest.mark.parametrize("heads, key_heads", [(1, 1), (3, 0), (9, 8), (2, 5), (40, 1)])
def test_any_number_of_heads(heads, key_heads, norms):
    norms = norms if key_heads else norms[:1]
    check(Case(heads=heads, key_heads=key_heads, norms=norms, positions="batch"))


@normed
@pytest.mark.grid(2)
@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_many_rows(executor, dtype, tokens_first, norms):
    """Several chunks of several blocks and runs, the last incomplete; sums for the weights, too,
    are the same bits for any number of threads. Enough for the bias of 16-bit results."""
    case = Case(dtype, batch=3, heads=9, key_heads=3, tokens=177, head_dim=64, norms=norms,
                tokens_first=tokens_first)  # fmt: skip
    tensors = case.tensors()
    check_tensors(case, tensors)
    expected = outputs_and_gradients(functional.rotary_embedding, case, tensors)
    for threads in (2, 3, 5) if not executor.is_cuda else ():
        torch.set_num_threads(threads)
        found = outputs_and_gradients(functional.rotary_embedding, case, tensors)
        assert all(map(torch.equal, found, expected))
