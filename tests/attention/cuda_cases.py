"""Shared by the tests of attention's CUDA kernels: small cases, and the list of kernels.

The shapes are chosen by the tiles of csrc/cuda/attention/table.h, which have up to 128 queries and
96 keys: 150 queries on 230 keys are two tiles of queries and at least three of keys, the last of
each cut off. Under a diagonal some have masked and unmasked scores, some only one kind. Each
bucket of head dims (64, 128, 256) has dims that fill it, that leave out slabs of columns, and whose
rows are no multiple of 16 bytes.
"""

from dataclasses import replace

import pytest

from tests.attention import cases as attention_cases
from tests.attention.cases import Case
from tests.attention_decode import cases as attention_decode_cases
from tests.support.dtypes import BF16, F16, F32, F64

TILED_KERNELS = (
    "attention/backend.cu", "attention/forward.cu", "attention/backward.cu",
    "attention/backward_bias.cu", "attention/backward_ends.cu",
)  # fmt: skip
KERNELS = (*TILED_KERNELS, "attention/plain_forward.cu", "attention/plain_backward.cu")
DECODE_KERNELS = ("attention/decode.cu",)

TILED, PLAIN = (BF16, F16), (F32, F64)
DTYPES = TILED + PLAIN

CAUSAL = dict(window_right=0, bottom_right=True)
# Of nothing, of one row, of less than a tile and of more; more keys than queries and fewer.
SEQUENCES = ((1, 1), (129, 64), (0, 7), (64, 200), (7, 0), (0, 0), (33, 33))

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
half_and_float = pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
# Dtypes, and float32 whose products may be of TF32.
KINDS = (*DTYPES, "tf32")
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def of_kind(kind) -> dict:
    """The fields that make a case one of this kind."""
    return dict(dtype=F32, tf32=True) if kind == "tf32" else dict(dtype=kind)


def judge_one_draw_first(monkeypatch) -> None:
    """More draws of a case only if the first one fails; see attention_cases.check."""
    for cases in (attention_cases, attention_decode_cases):
        stages = tuple((count, 1.0) for count in (1, 6, 30, 150))
        monkeypatch.setattr(cases, "stages", lambda case: stages)


# ---- traffic -------------------------------------------------------------------------------------


def once_per_tile(case: Case, rows: int) -> tuple[int, int]:
    """(bytes of Q, bytes of K and V) that a forward of one sequence reads: each query once, and for
    each tile of so many queries the keys and values that any of them sees.
    """
    head_dim, value_dim = case.head_dim, case.value_dim or case.head_dim
    queries = keys = 0
    for tile in case.allowed().split(rows):
        seen = int(tile.any(0).sum())
        queries += len(tile) * head_dim if seen else 0
        keys += seen * (head_dim + value_dim)
    size = case.batch * case.heads * case.dtype.itemsize
    return queries * size, keys * size


# For both directions.
ONE_PASS = {
    "64": Case(BF16, 64, batch=1, heads=2, kv_heads=1, seq_q=150, seq_k=400),
    "64, causal": Case(F16, 64, batch=2, heads=2, seq_q=300, seq_k=300, window_right=0),
    "40 and 72": Case(BF16, 40, 72, batch=1, heads=4, kv_heads=2, seq_q=150, seq_k=230, **CAUSAL),
    "128, window": Case(F16, 128, batch=1, seq_q=300, seq_k=200, window_left=20, window_right=5),
    "256": Case(BF16, 256, batch=1, seq_q=150, seq_k=100, window_right=0),
    "36 and 70": Case(BF16, 36, 70, batch=1, seq_q=150, seq_k=130),  # rows in pieces of 8 and 4
    "float32": Case(F32, 64, batch=1, heads=2, kv_heads=1, seq_q=150, seq_k=230, **CAUSAL),
    "float64": Case(F64, 64, batch=1, seq_q=70, seq_k=100),
}  # fmt: skip
ONE_PASS["float32 as TF32"] = replace(ONE_PASS["float32"], tf32=True)


# ---- every instance, in every build --------------------------------------------------------------

# By dtype and bucket, without and with terms of scores; rows that no 16 bytes divide among them,
# and rows as long as the bucket, keys of which may be in pages.
INSTANCES = [
    Case(dtype, head_dim, batch=1, heads=2, kv_heads=1, seq_q=70, seq_k=110, **CAUSAL, **terms)
    for dtype in TILED
    for terms in ({}, dict(bias="q", dropout_p=0.3, alibi="", sinks=F32))
    for head_dim in (61, 72, 160)
]
INSTANCES += [
    replace(INSTANCES[0], dtype=dtype, head_dim=head_dim, **storage)
    for dtype in TILED
    for head_dim in (64, 128, 256)
    for storage in ({}, dict(storage="paged", lengths=((70, 110),), page_size=7))
]
INSTANCES += [
    Case(dtype, 40, batch=1, heads=2, kv_heads=1, seq_q=40, seq_k=70, bias="q", sinks=dtype,
         alibi="", **CAUSAL)
    for dtype in PLAIN
]  # fmt: skip
INSTANCES += [replace(INSTANCES[-2], tf32=True)]
INSTANCES += [Case(BF16, 264, batch=1, heads=1, seq_q=20, seq_k=40, bias="q")]
# One row of bias for more queries than a tile has, whose gradient is added up in parts.
INSTANCES += [Case(BF16, 40, batch=1, heads=1, seq_q=150, seq_k=40, bias="")]

# The branches within an instance that those do not take.
BRANCHES = {
    "packed": dict(storage="packed used", lengths=SEQUENCES, sinks=F32, dlse=True),
    "paged": dict(storage="paged", lengths=((9, 40), (70, 130), (1, 0)), page_size=7),
    "unaligned pages": dict(
        head_dim=37, value_dim=50, storage="paged", lengths=((9, 40), (70, 130)), page_size=7
    ),
    "used": dict(storage="used", lengths=((1, 5), (70, 90), (0, 3)), mask="b", window_left=20),
    # Whose first tile begins before the rows of the mask.
    "masks": dict(
        seq_q=70, seq_k=200, mask="bhq", bias="h", softcap=3.0, dropout_p=0.2, key_offset=12
    ),
    "long": dict(seq_q=150, seq_k=230, heads=1, batch=1, window_left=90, window_right=50),
    "shard": dict(seq_q=70, seq_k=100, key_offset=13, query_offset=40, dropout_p=0.3, alibi="b"),
    "one": dict(seq_q=1, seq_k=1, dlse=True, bias=""),
    "unaligned": dict(head_dim=37, value_dim=50, seq_q=30, seq_k=70),
    "no keys": dict(seq_q=33, seq_k=0, sinks=F32),
}

# In TF32 those that depend on which thread has which score.
BRANCHES_OF_KINDS = [(name, kind) for name in BRANCHES for kind in (BF16, F32)]
BRANCHES_OF_KINDS += [(name, "tf32") for name in ("paged", "masks", "unaligned")]
branches = pytest.mark.parametrize("name, kind", BRANCHES_OF_KINDS, ids=str)
