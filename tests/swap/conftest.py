"""Fixtures of the tests of swap."""

from __future__ import annotations

import pytest

from onepass._policy import small_calls
from onepass.swapping import matchers, verify
from tests.swap.linear_calls import SLOW, set_facts


@pytest.fixture
def slow_products(monkeypatch):
    """Linear layers are swapped, as on AMD."""
    set_facts(monkeypatch, SLOW)


@pytest.fixture
def linear_layers_gain(monkeypatch):
    """Linear layers are swapped on every CPU and in every dtype."""
    monkeypatch.setattr(matchers, "_as_fast", lambda weights, small=False: None)


@pytest.fixture
def every_loss_gains(monkeypatch):
    """Losses are ours at every size, in chunks of any."""
    monkeypatch.setattr(small_calls, "LEAST_LOSS_CALLS", 0)
    monkeypatch.setattr(small_calls, "CHUNK_OF_WORD", 0)


@pytest.fixture(params=["float64", "rounding"])
def judged(request, monkeypatch):
    """What `Report.verify` judges by, with memory for a copy in float64 and without."""
    if request.param == "rounding":
        monkeypatch.setattr(verify, "_room_for_double", lambda model: False)
    return request.param
