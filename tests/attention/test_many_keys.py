"""Gradients where many keys share a row's probability: lse is large beside each score."""

import pytest
import torch
from torch import Tensor

from onepass import numerics
from onepass.functional import scaled_dot_product_attention

_DRAWS = 12


def _gradients(attention, tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    *inputs, doutput = (tensor.to(dtype) for tensor in tensors)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    return torch.autograd.grad(attention(*inputs), inputs, doutput)


def _formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("spread", (0.02, 0.3))
@pytest.mark.parametrize("masked", (False, True))
def test_scores_near_zero(spread, masked):
    """The rule holds in all but one draw; exp(score - lse) in float32 misses it in most of them."""
    keys, missed = 4096, 0
    mask = torch.ones(16, keys, dtype=torch.bool) if masked else None

    def ours(query, key, value):
        return scaled_dot_product_attention(query, key, value, mask)

    for seed in range(_DRAWS):
        torch.manual_seed(seed)
        sizes = (16, keys, keys, 16)
        scales = (spread, spread, 1.0, 1.0)
        tensors = [torch.randn(1, 4, n, 32) * by for n, by in zip(sizes, scales, strict=True)]
        exact = _gradients(_formula, tensors, torch.float64)
        base = _gradients(_formula, tensors, torch.float32)
        found = _gradients(ours, tensors, torch.float32)
        missed += any(
            not numerics.compare(*results).ok for results in zip(found, exact, base, strict=True)
        )
    assert missed <= 1
