"""Norms of random shapes, layouts, dtypes and options: beyond the grids of test_values.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.norm.cases import FLOATS, check, make, outputs_and_gradients

pytestmark = pytest.mark.isa
PERMUTATIONS = list(itertools.permutations(range(3)))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_combination(data):
    """In any layout a result is bitwise that of the dense tensors, which the rule judges."""
    rms, residual = data.draw(st.booleans()), data.draw(st.booleans())
    arguments = (
        rms,
        (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))),
        data.draw(st.integers(16, 90)),
        data.draw(st.sampled_from(FLOATS)),
    )
    keywords = dict(
        weight=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        residual=residual,
        weight_dtype=data.draw(st.sampled_from(FLOATS)),
        residual_in=data.draw(st.sampled_from(FLOATS)),
        dropout_p=data.draw(st.sampled_from((0.0, 0.5))) if residual else 0.0,
    )
    if rms and keywords["weight"]:
        keywords["weight_offset"] = data.draw(st.sampled_from((0.0, 1.0)))
    draws = [make(*arguments, **keywords, seed=seed) for seed in range(6)]
    check(*draws)
    case = draws[0]
    dense = outputs_and_gradients(case.ours, case)
    for name in ("input", "residual") if residual else ("input",):
        order = data.draw(st.sampled_from(PERMUTATIONS))
        tensor = getattr(case, name).permute(order).contiguous()
        setattr(case, name, tensor.permute([order.index(d) for d in range(3)]))
    other = outputs_and_gradients(case.ours, case)
    for expected, found in zip(dense, other, strict=True):
        for name in expected:
            same = (expected[name] is None and found[name] is None) or torch.equal(
                expected[name], found[name]
            )
            assert same, f"{case.text}: {name}"
