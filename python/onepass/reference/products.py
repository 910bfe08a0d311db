"""Products of matrices whose factors may be rounded to bfloat16, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


class _Rounded(torch.autograd.Function):
    """x rounded to bfloat16, in its own dtype; its derivative is taken to be 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        pass

    @staticmethod
    def backward(ctx, dx):
        return dx

    @staticmethod
    def jvp(ctx, dx):
        return dx.clone()


def factors(round_factors: bool, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The factors of products: with round_factors those in float32 or float64 are rounded to
    bfloat16."""
    if not round_factors:
        return tensors
    wide = (torch.float32, torch.float64)
    return tuple(_Rounded.apply(x) if x is not None and x.dtype in wide else x for x in tensors)


class _GradientRounded(_Rounded):
    """x as it is; its gradient is rounded to bfloat16, in its own dtype."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return _Rounded.apply(dx)


def product(left: Tensor, right: Tensor, round_factors: bool = False) -> Tensor:
    """``left right``. With round_factors the factors of it and of its gradients' products are
    rounded to bfloat16, if they are float32 or float64."""
    output = torch.matmul(*factors(round_factors, left, right))
    return _GradientRounded.apply(output) if round_factors and output.itemsize > 2 else output
