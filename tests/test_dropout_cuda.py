"""Dropout's CUDA kernel under the emulator: bitwise the CPU's, one pass, no races."""

from __future__ import annotations

import emulated
import pytest
import torch
from emulated_ops import all_instances, on_emulated_cuda

from onepass import functional

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = [1, 7, 64, 1000, 8192 + 8, 9001]


def both(monkeypatch, function, x, residual=None, **options):
    """(outputs and gradients on the CPU, the same on emulated CUDA), from one seed."""
    results = []
    for emulate in (False, True):
        with monkeypatch.context() as patch:
            if emulate:
                on_emulated_cuda(patch, **options)
            tensors = [t.clone().requires_grad_() for t in (x, residual) if t is not None]
            torch.manual_seed(7)
            y = function(*tensors)
            results.append([y, *torch.autograd.grad(y, tensors, torch.ones_like(y))])
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_bitwise_as_on_the_cpu(monkeypatch, dtype, size):
    x, residual = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    for p in (0.3, 1.0):
        cpu, cuda = both(monkeypatch, lambda x, p=p: functional.dropout(x, p), x)
        assert all(torch.equal(one, two) for one, two in zip(cpu, cuda, strict=True))
    for p in (0.0, 0.3):
        add = lambda x, r, p=p: functional.add_dropout(x, r, p)  # noqa: E731
        cpu, cuda = both(monkeypatch, add, x, residual)
        assert all(torch.equal(one, two) for one, two in zip(cpu, cuda, strict=True))


@pytest.mark.parametrize("size", [64, 1000, 1001])
def test_mixed_dtypes(monkeypatch, size):
    x, residual = torch.randn(size).bfloat16(), torch.randn(size)
    cpu, cuda = both(monkeypatch, lambda x, r: functional.add_dropout(x, r, 0.3), x, residual)
    assert all(torch.equal(one, two) for one, two in zip(cpu, cuda, strict=True))


def test_one_pass(monkeypatch):
    calls = on_emulated_cuda(monkeypatch)
    x = torch.randn(8000)
    functional.dropout(x, 0.3)
    functional.add_dropout(x.bfloat16(), x, 0.3)
    plain, added = calls.of("dropout_forward")
    seeds = [16 * 256 * call["splits"] for call in (plain, added)]  # read by every thread
    assert (plain["read"], plain["written"]) == (4 * 8000 + seeds[0], 4 * 8000)
    assert (added["read"], added["written"]) == ((2 + 4) * 8000 + seeds[1], 4 * 8000)


@pytest.mark.parametrize("build", emulated.BUILDS)
def test_each_instance(monkeypatch, build):
    """Without races or bad accesses; none is left out."""
    instances = set()
    for dtype in (*DTYPES, None):
        for size, misaligned in ((1000, ""), (1001, ""), (1001, "input"), (1000, "output")):
            x, residual = torch.randn(size), torch.randn(size).to(dtype)
            x = x.to(dtype or torch.bfloat16)
            add = lambda x, r: functional.add_dropout(x, r, 0.3)  # noqa: E731
            cpu, cuda = both(
                monkeypatch, add, x, residual, build=build, misalign=8, misaligned=misaligned,
                instances=instances,
            )  # fmt: skip
            assert all(torch.equal(one, two) for one, two in zip(cpu, cuda, strict=True))
    assert {name for name in all_instances(build) if "dropout_" in name} == instances
