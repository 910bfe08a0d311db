"""What the tests of attention's CUDA kernels share: small cases, and which kernels there are.

The shapes are chosen by the tiles of csrc/cuda/attention/table.h, which have up to 128 queries and
96 keys: 150 queries on 230 keys are two tiles of queries and at least three of keys, the last of
each cut off; under a diagonal some of them have masked and unmasked scores, some only the one or
the other. Each bucket of head dims (64, 128, 256) has dims that fill it, that leave out slabs of
columns, and that no 16 bytes divide.
"""

from __future__ import annotations

import attention_cases
import attention_decode_cases
import pytest
from attention_cases import (
    BF16,
    F16,
    F32,
    F64,
    Case,
    base,
    definition,
    equal,
    forward,
)
from emulated_attention import AttentionCalls, on_emulated_cuda

TILED, PLAIN = (BF16, F16), (F32, F64)
DTYPES = TILED + PLAIN
TILED_DIMS = (1, 8, 40, 64, 72, 96, 128, 160, 256)
LONG_DIMS = (264, 512)  # for which there are no tiles

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
half_and_float = pytest.mark.parametrize("dtype", [BF16, F32], ids=str)


def on_cuda(monkeypatch, **options) -> AttentionCalls:
    """Of a case one draw is judged at first, and no more if it is right; see `check`."""
    for cases in (attention_cases, attention_decode_cases):
        monkeypatch.setattr(cases, "stages", lambda case: (1, 6, 30))
    return on_emulated_cuda(monkeypatch, **options)


def check(case: Case) -> None:
    """The forward's results by the numerics rule."""

    def compute(drawn: Case):
        t = drawn.tensors()
        t = {name: tensor for name, tensor in t.items() if name not in ("doutput", "dlse")}
        before = {name: tensor.clone() for name, tensor in t.items()}
        found, ref = forward(drawn, t), definition(drawn, t, F64)
        for name, tensor in t.items():
            assert equal(tensor, before[name]), f"{name} was written"
        assert found["output"].dtype is drawn.dtype
        assert found["lse"].dtype is found.lse_rest.dtype is (F64 if drawn.dtype is F64 else F32)
        return found, ref, ref if drawn.dtype is F64 else base(drawn, t)

    attention_cases.check(case, compute)


# Any two values of any two options occur together at least once.
AXES = dict(
    head_dim=(8, 40, 64, 72, 128, 160, 256, 264),
    length=[(150, 230), (1, 200), (130, 3), (33, 97), (96, 64)],
    bias=[None, "", "b", "h", "q", "bhq"],
    mask=[None, "", "h", "bq", "bhq"],
    window=[(-1, -1, False), (-1, 0, False), (-1, 0, True), (60, 0, True), (33, 17, False)],
    storage=["dense", "dense", "used", "packed", "packed used", "paged"],
    dtype=DTYPES,
    group=[(2, 2), (4, 2), (3, 1)],
    alibi=[None, "", "b"],
    sinks=[None, F32, "dtype"],
    dropout_p=[0.0, 0.3],
    softcap=[0.0, 2.0],
    dlse=[False, True],
    value_dim=[0, 24, 72],
)  # fmt: skip


def combination(row: dict) -> Case:
    row = dict(row)
    (seq_q, seq_k), (heads, kv_heads) = row.pop("length"), row.pop("group")
    left, right, bottom_right = row.pop("window")
    sinks = row.pop("sinks")
    if sinks is not None:
        sinks = row["dtype"] if sinks == "dtype" or row["dtype"] is F64 else sinks
    return Case(
        seq_q=seq_q, seq_k=seq_k, heads=heads, kv_heads=kv_heads, window_left=left,
        window_right=right, bottom_right=bottom_right, sinks=sinks, **row,
    )  # fmt: skip
