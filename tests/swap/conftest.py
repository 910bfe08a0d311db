"""Fixtures of the tests of swap."""

import sys

import pytest
import torch
import torch.distributed

from onepass._policy import small_calls
from onepass.swapping import matchers, plan, verify
from tests.swap.linear_calls import SLOW, set_facts

BOUNDS = {  # a fixture of all tests removes them
    name: dict(getattr(small_calls, name))
    for name in ("LEAST_NORM", "LEAST_ATTENTION", "LEAST_LINEAR")
}


@pytest.fixture
def users_bounds(swapped_run_ours, monkeypatch):
    """Small calls are torch's, as for users."""
    for name, bound in BOUNDS.items():
        monkeypatch.setattr(small_calls, name, bound)


@pytest.fixture
def slow_products(monkeypatch):
    """Linear layers are swapped, as on AMD."""
    set_facts(monkeypatch, SLOW)


@pytest.fixture
def linear_layers_gain(monkeypatch):
    """Linear layers are swapped on every CPU and in every dtype."""
    monkeypatch.setattr(matchers, "_as_fast", lambda weights, small, precision: None)


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


@pytest.fixture
def group(tmp_path):
    """torch.distributed with one process."""
    if not torch.distributed.is_available() or sys.platform != "linux":
        pytest.skip("torch.distributed is not available")
    init_method = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def probed_once():
    """Other libraries' norms and blocks are proven once per file, where the proof is not tested."""
    with plan.verdicts_shared():
        yield
