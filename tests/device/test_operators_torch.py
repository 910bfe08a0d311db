"""The operators on a CUDA device inside torch: streams, graphs, sizes beyond 32 bits."""

import pytest
import torch

from onepass import functional, reference
from tests.device.common import (
    DEVICE,
    ON_CUDA,
    assert_equal,
    captured,
    late,
    make,
    needs_device,
    needs_gigabytes,
    on_cuda_only,
    randn,
)
from tests.norm import cases as norm_cases
from tests.norm.cases import Case, check, kinds
from tests.support.dtypes import BF16
from tests.support.seeds import drawn_seed

pytestmark = needs_device


def step(case: Case):
    """A function that runs forward and backward of a case on the very same tensors each time."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in case.tensors().items()}
    upstream = [torch.randn_like(leaves["input"]) for _ in range(2 if "residual" in leaves else 1)]

    def run():
        rest = [case.shape, leaves["weight"], *([leaves["bias"]] if "bias" in leaves else [])]
        first = [leaves[name] for name in ("input", "residual") if name in leaves]
        outputs = getattr(functional, case.name)(*first, *rest)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return *outputs, *torch.autograd.grad(outputs, list(leaves.values()), upstream)

    return leaves, run


@on_cuda_only
@kinds
def test_work_is_on_the_current_stream(rms, residual):
    leaves, run = step(make(rms, 300, 1000, residual=residual))
    expected = run()
    assert_equal(expected, late([leaves["input"]], run))


@on_cuda_only
@kinds
@pytest.mark.parametrize("cols", [1000, 2056, 16395])
def test_cuda_graph_of_forward_and_backward(rms, residual, cols):
    leaves, run = step(make(rms, 64, cols, residual=residual))
    graph, found = captured(run)
    for seed in (1, 2):
        with torch.no_grad():
            torch.manual_seed(seed)
            for leaf in leaves.values():
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        replayed = [tensor.clone() for tensor in found]
        assert_equal(run(), replayed, f"{seed=}")


@on_cuda_only
def test_each_replay_of_a_graph_drops_other_elements():
    x = torch.ones(10_000, device=DEVICE, requires_grad=True)

    def run():
        y = functional.dropout(x, 0.5)
        return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

    graph, (y, dx) = captured(run)
    masks = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, dx) and set(y.unique().tolist()) == {0.0, 2.0}
        masks.append(y.detach().clone())
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.skipif(not ON_CUDA or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    check(*(norm_cases.make(False, 33, 1000, seed=seed, device=last) for seed in range(4)))
    x = torch.ones(1000, device=last)
    assert functional.dropout(x, 0.5).device == last and torch.cuda.current_device() == 0


@pytest.mark.parametrize("rms", [False, True])
def test_norm_of_more_than_2_31_elements(rms):
    needs_gigabytes(16)
    cols = 4096
    rows = 2**31 // cols + 3 if ON_CUDA else 30
    x = torch.empty(rows, cols, dtype=BF16, device=DEVICE).normal_().requires_grad_()
    weight = randn(cols, dtype=BF16)
    norm = functional.rms_norm if rms else functional.layer_norm
    y = norm(x, cols, weight)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    for part in (slice(0, 5), slice(rows - 5, rows)):  # rows do not depend on their batch
        few = x[part].detach().clone().requires_grad_()
        expected = norm(few, cols, weight)
        (gradient,) = torch.autograd.grad(expected, few, few.detach())
        assert torch.equal(y[part], expected) and torch.equal(dx[part], gradient)


@on_cuda_only
def test_offsets_beyond_32_bits():
    needs_gigabytes(6)
    buffer = torch.empty(2**31 + 5 + 64, dtype=BF16, device=DEVICE)
    case = Case(False, buffer.as_strided((2, 64), (2**31 + 5, 1)), weight=randn(64))
    case.input.copy_(randn(2, 64))
    check(case)


def test_dropout_of_more_than_2_31_elements():
    needs_gigabytes(10)
    count, tail = 2**31 + 4096 if ON_CUDA else 12_288, 4096
    seed = drawn_seed(5, DEVICE)
    torch.manual_seed(5)
    y = functional.dropout(torch.ones(count, dtype=BF16, device=DEVICE), 0.5)
    low, high = (int(value) & 0xFFFFFFFFFFFFFFFF for value in seed)
    block = torch.arange((count - tail) // 8, count // 8, device=DEVICE)
    zero = torch.zeros_like(block)
    words = reference.dropout.philox4x32(
        (low & 0xFFFFFFFF, low >> 32), (block, zero, zero, zero + (high & 0xFFFFFFFF))
    )
    halves = [(word >> shift) & 0xFFFF for word in words for shift in (0, 16)]
    kept = torch.stack(halves, dim=1).flatten() >= 32768
    assert torch.equal(y[-tail:], kept.to(BF16) * 2)
