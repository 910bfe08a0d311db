"""Layer norms too small to gain run torch's own kernel, and the record says so."""

from __future__ import annotations

import pytest
import torch
from foreign_norms import LayerNormOverridden
from torch import nn

import onepass
from onepass._ops import dispatch_log
from onepass.swapping import small_norms

LEAST = dict(small_norms.LEAST_ELEMENTS)  # the fixture of all tests takes them away
TRAINING, INFERENCE = LEAST[torch.float32]


@pytest.fixture(autouse=True)
def real_bounds(norms_run_ours, monkeypatch):
    monkeypatch.setattr(small_norms, "LEAST_ELEMENTS", LEAST)


def kernel_of(module, *args) -> str:
    (call,) = onepass.explain(module, *args).calls
    return call["kernel"]


def ours(module, rows: int, dtype=torch.float32, training: bool = True) -> bool:
    cols = module.weight.shape[0]
    with torch.set_grad_enabled(training):
        kernel = kernel_of(module, torch.randn(rows, cols, dtype=dtype))
    assert kernel in ("norm_forward_kernel", "torch.nn.functional.layer_norm"), kernel
    return kernel == "norm_forward_kernel"


@pytest.mark.parametrize("make", [nn.LayerNorm, LayerNormOverridden])
def test_the_bound(make):
    module = make(256)
    report = onepass.swap(module)
    assert report.swapped and any("torch's own kernel" in note for note in report.notes)
    assert ours(module, TRAINING // 256) and not ours(module, TRAINING // 256 - 1)
    assert ours(module, INFERENCE // 256, training=False)
    assert not ours(module, INFERENCE // 256 - 1, training=False)


def test_the_bound_of_16_bits_and_of_threads():
    module = nn.LayerNorm(256)
    onepass.swap(module)
    rows = LEAST[torch.bfloat16][0] // 256
    assert ours(module.bfloat16(), rows, torch.bfloat16)
    assert not ours(module, rows - 1, torch.bfloat16)
    torch.set_num_threads(2)
    assert not ours(module, 2 * rows - 1, torch.bfloat16)
    assert ours(module, 2 * rows, torch.bfloat16)


def test_small_calls_are_torchs_bit_for_bit():
    stock, module = nn.LayerNorm(48), nn.LayerNorm(48)
    onepass.swap(module)
    x = torch.randn(5, 48)
    gradients = []
    for norm in (stock, module):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        y.backward(torch.ones_like(y))
        gradients.append((y.detach(), leaf.grad, norm.weight.grad, norm.bias.grad))
    assert all(map(torch.equal, *gradients))


def test_others_run_ours_at_every_size():
    module = nn.RMSNorm(8)
    assert not any("torch's own kernel" in note for note in onepass.swap(module).notes)
    assert kernel_of(module, torch.randn(2, 8)) == "norm_forward_kernel"
    assert kernel_of(onepass.nn.LayerNorm(8), torch.randn(2, 8)) == "norm_forward_kernel"


def test_the_record_tells_it():

    module = nn.LayerNorm(8)
    onepass.swap(module)
    with dispatch_log.record() as calls:
        module(torch.randn(2, 8))
    (call,) = calls
    assert "too small to gain" in call["reason"]
    assert dispatch_log.line(call) == (
        "layer_norm (2 x 8, float32): torch.nn.functional.layer_norm, torch's own, 1 thread; "
        f"too small to gain: fewer elements than {TRAINING} per thread"
    )
    module(torch.randn(2, 8))
    with dispatch_log.record() as calls:
        pass
    assert not calls  # nothing is kept while nobody records
