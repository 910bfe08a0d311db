"""Tensors and results of scans, for both families."""

import torch
from torch import Tensor


def even(*shape, dim=-1) -> Tensor:
    """Numbers of similar size, whose sign is the same along a dimension: of products and sums of
    normal numbers a single element would have the largest error, by luck ours or the loop's."""
    signs = torch.randn([1 if d == dim % len(shape) else n for d, n in enumerate(shape)]).sign()
    return signs * (0.5 + torch.rand(shape))


def results(compute, tensors, upstream, dtype=None) -> list[Tensor]:
    """(output, last states, gradients in the order of the tensors)."""
    leaves = {n: t.to(dtype or t.dtype).detach().requires_grad_() for n, t in tensors.items()}
    found = compute(**leaves)
    given = [d.to(y.dtype) for d, y in zip(upstream, found, strict=True)]
    return [*found, *torch.autograd.grad(found, list(leaves.values()), given)]
