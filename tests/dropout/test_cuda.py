"""Dropout's CUDA kernel under the emulator: bitwise the CPU's, one pass, no races."""

from __future__ import annotations

import contextlib

import pytest
import torch

from onepass import functional
from tests.emulator import emulated
from tests.emulator.executors import all_instances

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = [1, 7, 64, 1000, 8192 + 8, 9001]


def both(emulator, function, x, residual=None):
    """(outputs and gradients on the CPU, the same on emulated CUDA), from one seed."""
    results = []
    for executor in (contextlib.nullcontext(), emulator.under_the_package()):
        with executor:
            tensors = [t.clone().requires_grad_() for t in (x, residual) if t is not None]
            torch.manual_seed(7)
            y = function(*tensors)
            results.append([y, *torch.autograd.grad(y, tensors, torch.ones_like(y))])
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_bitwise_as_on_the_cpu(emulator, dtype, size):
    x, residual = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    for p in (0.3, 1.0):
        cpu, cuda = both(emulator, lambda x, p=p: functional.dropout(x, p), x)
        assert all(torch.equal(one, two) for one, two in zip(cpu, cuda, strict=True))
    for p in (0.0, 0.3):
        add = lambda x, r, p=p: functional.add_dropout(x, r, p)  # noqa: E731
        cpu, cuda = both(emulator, add, x, residual)
        assert all(torch.equal(one, two) for one, two in zip(cpu, cuda, strict=True))


@pytest.mark.parametrize("size", [64, 1000, 1001])
def test_mixed_dtypes(emulator, size):
    x, residual = torch.randn(size).bfloat16(), torch.randn(size)
    cpu, cuda = both(emulator, lambda x, r: functional.add_dropout(x, r, 0.3), x, residual)
    assert all(torch.equal(one, two) for one, two in zip(cpu, cuda, strict=True))


def test_one_pass(cuda):
    x = torch.randn(8000)
    functional.dropout(x, 0.3)
    functional.add_dropout(x.bfloat16(), x, 0.3)
    plain, added = cuda.of("dropout_forward")
    seeds = [16 * 256 * call["splits"] for call in (plain, added)]  # read by every thread
    assert (plain["read"], plain["written"]) == (4 * 8000 + seeds[0], 4 * 8000)
    assert (added["read"], added["written"]) == ((2 + 4) * 8000 + seeds[1], 4 * 8000)


@pytest.mark.parametrize("build", emulated.BUILDS)
def test_each_instance(emulator, build):
    """Without races or bad accesses; none is left out."""
    add = lambda x, r: functional.add_dropout(x, r, 0.3)  # noqa: E731
    with emulator.sanitized(build, "dropout.cu"):
        # Races do not depend on the dtypes, and the thread sanitizer takes its time.
        for dtype in (*DTYPES, None)[:: 4 if build == "thread" else 1]:
            # All of them aligned, or all but the input, the residual or the output.
            for size, misaligned in ((1000, -1), (1001, -1), (1001, 0), (1000, 1), (1000, 3)):
                emulator.set(shift=0 if misaligned < 0 else 8, misaligned=misaligned)
                x, residual = torch.randn(size), torch.randn(size).to(dtype)
                x = x.to(dtype or torch.bfloat16)
                cpu, cuda = both(emulator, add, x, residual)
                assert all(torch.equal(one, two) for one, two in zip(cpu, cuda, strict=True))
    dropouts = {name for name in all_instances() if "dropout_" in name}
    assert dropouts == emulator.instances or build == "thread"
