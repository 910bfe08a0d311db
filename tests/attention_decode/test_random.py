"""Attention against a KV cache: random combinations of everything, beyond the grids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_decode.cases import DTYPES, Case, assert_same, check, ours
from tests.support.dtypes import F32

pytestmark = pytest.mark.isa


@st.composite
def cases(draw) -> Case:
    dtype, kv_heads = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 3))
    new_rows = draw(st.integers(-1, 20))
    head_dim = draw(st.integers(1, 140))
    window = st.one_of(st.just(-1), st.integers(0, 250))
    return Case(
        dtype,
        head_dim,
        draw(st.one_of(st.just(0), st.integers(1, 140))),
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        seq_q=draw(st.integers(1, 20)),
        lengths=tuple(draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))),
        new_rows=new_rows,
        page_size=draw(st.sampled_from([0, 0, 1, 3, 16, 50])),
        pads=tuple(draw(st.lists(st.integers(0, 90), max_size=3))),
        scattered=draw(st.booleans()),
        room=draw(st.integers(0, 9)),
        window_left=draw(window),
        window_right=draw(st.one_of(st.just(0), window)),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        alibi=draw(st.sampled_from([None, "", "b"])),
        sinks=draw(st.sampled_from([None, dtype, F32])),
        rotary=draw(st.sampled_from([None, "interleaved", "halves"])) if new_rows >= 0 else None,
        rotary_dim=2 * draw(st.integers(0, head_dim // 2)),
        rotary_dtype=draw(st.sampled_from([None, F32])),
        out_bshd=draw(st.booleans()),
        factor=draw(st.sampled_from([0.3, 1.0, 1.3])),
        draw=draw(st.integers(0, 1000)),
    )


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_any_combination(case):
    check(case)


def check_any_storage(case, data):
    """The same keys in other rows, caches or pages: the same bits, for any number of threads."""
    case = replace(case, pads=(), rotary=None)
    other = replace(
        case,
        page_size=data.draw(st.integers(0, 40)),
        pads=tuple(data.draw(st.lists(st.integers(0, 70), max_size=3))),
        scattered=data.draw(st.booleans()),
        room=data.draw(st.integers(0, 200)),
        out_bshd=data.draw(st.booleans()),
    )
    expected = ours(case)
    torch.set_num_threads(data.draw(st.sampled_from([1, 1, 1, 3])))
    assert_same(ours(other), expected)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(case=cases(), data=st.data())
def test_any_storage(case, data):
    check_any_storage(case, data)
