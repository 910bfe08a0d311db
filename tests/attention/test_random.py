"""Attention: random combinations of all options.

The grids hold pairs of options; here three and more meet, with any sizes, windows and layouts.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.cases import DTYPES, Case, check
from tests.support.dtypes import BF16, F32, F64

pytestmark = pytest.mark.isa

PATTERNS = st.sampled_from(["", "b", "h", "q", "bh", "bq", "hq", "bhq"])


@st.composite
def cases(draw, dense: bool = False) -> Case:
    dtype = draw(st.sampled_from(DTYPES))
    kv_heads = draw(st.integers(1, 3))
    lengths = st.tuples(st.integers(0, 150), st.integers(0, 150))
    storage = "dense" if dense else draw(
        st.sampled_from(["dense", "used", "packed", "packed used", "paged"])
    )  # fmt: skip
    return Case(
        dtype=dtype,
        head_dim=draw(st.integers(8, 80)),
        value_dim=draw(st.one_of(st.just(0), st.integers(8, 80))),
        batch=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        # Few keys need pooled draws, see attention_cases.pool; they are in the grids.
        seq_q=draw(st.integers(16, 200)),
        seq_k=draw(st.integers(16, 200)),
        window_left=draw(st.one_of(st.just(-1), st.integers(0, 220))),
        window_right=draw(st.one_of(st.just(-1), st.just(0), st.integers(0, 220))),
        bottom_right=draw(st.booleans()),
        bias=draw(st.one_of(st.none(), PATTERNS)),
        bias_dtype=F64 if dtype is F64 else draw(st.sampled_from([dtype, F32, BF16])),
        mask=draw(st.one_of(st.none(), PATTERNS)),
        alibi=draw(st.sampled_from([None, "", "b"])),
        sinks=draw(st.sampled_from([None, dtype, F32])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.1, 0.45])),
        dlse=draw(st.booleans()),
        storage=storage,
        lengths=() if storage == "dense" else tuple(
            draw(st.lists(lengths, min_size=1, max_size=4))
        ),
        page_size=draw(st.sampled_from([1, 3, 16, 64])),
        factor=draw(st.sampled_from([0.3, 1.0, 1.3])),
        draw=draw(st.integers(0, 1000)),
    )  # fmt: skip


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_any_combination(case):
    check(case)
