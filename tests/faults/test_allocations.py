"""Out of memory at any allocation: an error, and nothing has changed; see allocations.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onepass
from onepass._ops import optimizer

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{case: {"allocations": how many, "complaints": [...]}, or how its process ended}."""
    library = tmp_path_factory.mktemp("allocations") / "failing_allocations.so"
    source = HERE / "failing_allocations.cpp"
    build = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(build, check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    command = [sys.executable, "-m", "tests.faults.allocations"]
    run = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_nothing_changes_when_an_allocation_fails(outcomes):
    bad = {
        name: result if isinstance(result, str) else result["complaints"][:3]
        for name, result in outcomes.items()
        if isinstance(result, str) or result["complaints"]
    }
    assert not bad, json.dumps(bad, indent=1)


def test_allocations_were_made_to_fail(outcomes):
    """For every operator that makes an output, first steps and loads."""
    idle = {name for name, result in outcomes.items() if result["allocations"] == 0}
    idle -= {"attach", "unswap"}  # which make no tensor
    assert all(name.split()[0].endswith("_check") for name in idle), sorted(idle)
    assert sum(result["allocations"] for result in outcomes.values()) > 1000


def test_clipping_that_lacks_memory_is_not_left_to_torch(monkeypatch):
    text = "clip_grad_norm_: DefaultCPUAllocator: can't allocate memory: tried to allocate 8 bytes"

    def no_memory(*_):
        raise RuntimeError(text)

    monkeypatch.setattr(optimizer, "_clip_grad_norm", no_memory)
    param = torch.zeros(4, requires_grad=True)
    param.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="^clip_grad_norm_: .* 8 bytes$"):
        onepass.optim.clip_grad_norm_([param], 1.0)
    assert torch.equal(param.grad, torch.ones(4))
