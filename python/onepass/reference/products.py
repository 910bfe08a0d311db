"""Products of matrices whose factors may be rounded to bfloat16 or to codes of 8 bits, in plain
PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.reference.dropout import random_halves

# How float32 factors of a linear layer's products are taken, the bits of a mask: those of
# csrc/ops/linear.h.
ROUNDED = 1  # to bfloat16, of all products that no other bit names
INT8_FORWARD, INT8_INPUT, INT8_WEIGHT = 2, 4, 8  # of output, dinput and dweight, quantised

MOST_DEPTH = 1 << 17  # longer sums of products of codes could overflow, so they stay float32
_MOST_CODE = 127
_LEAST_LARGEST = 1e-34  # a line of smaller numbers is zeros
_ROUNDING_STREAM = 1  # of Philox; dropout's is 0


class _StraightThrough(torch.autograd.Function):
    """A function of x whose derivative is taken to be 1; further arguments have none."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.further = len(inputs) - 1

    @staticmethod
    def backward(ctx, dx):
        return (dx, *[None] * ctx.further) if ctx.further else dx

    @staticmethod
    def jvp(ctx, dx, *_):
        return dx.clone()


class _Rounded(_StraightThrough):
    """x rounded to bfloat16, in its own dtype."""

    @staticmethod
    def forward(x):
        return x.to(torch.bfloat16).to(x.dtype)


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


class _Quantized(_StraightThrough):
    """x quantised along `dim`, in its own dtype."""

    @staticmethod
    def forward(x, dim, seed):
        number = x.to(torch.float32)
        largest = number.abs().amax(dim, keepdim=True)
        is_zero = largest < _LEAST_LARGEST
        most = torch.full_like(largest, _MOST_CODE)  # torch computes 127 / x as 127 * (1 / x)
        scaled = number * torch.where(is_zero, 0.0, most / largest)
        if seed is None:
            codes = scaled.round()
        else:
            uniform = random_halves(seed, x.numel(), x.device, _ROUNDING_STREAM) / 65536
            codes = (scaled + uniform.reshape(x.shape).to(torch.float32)).floor()
        scale = torch.where(is_zero, 0.0, largest / most)
        return codes.clamp(-_MOST_CODE, _MOST_CODE).to(x.dtype) * scale.to(x.dtype)


def quantize_rows(x: Tensor) -> Tensor:
    """x with each row, along its last dimension, quantised by its largest magnitude; rows that are
    not finite, and those longer than MOST_DEPTH, as they are."""
    if not 0 < x.shape[-1] <= MOST_DEPTH:
        return x
    return torch.where(x.isfinite().all(-1, keepdim=True), _Quantized.apply(x, -1, None), x)


def multiply(
    left: Tensor, right: Tensor, factor_mask: int, quantized: int, seed: Tensor | None = None
) -> Tensor:
    """``left right``, with its factors taken as the mask says if they are float32 or float64: as
    codes if it has the bit `quantized`.

    A row of left and a column of right are quantised by their largest magnitude each (SwitchBack,
    Wortsman et al. 2023); those that are not finite take the exact product. With a seed, int64[2],
    left is rounded to codes stochastically.
    """
    is_wide = left.dtype == right.dtype and left.itemsize > 2
    if not (is_wide and factor_mask & quantized and 0 < left.shape[-1] <= MOST_DEPTH):
        return torch.matmul(*factors(is_wide and bool(factor_mask & ROUNDED), left, right))
    output = _Quantized.apply(left, -1, seed) @ _Quantized.apply(right, -2, None)
    rows, columns = left.isfinite().all(-1), right.isfinite().all(-2)
    is_finite = (rows[..., None] if left.dim() > 1 else rows) & columns
    return torch.where(is_finite, output, left @ right)


def product(left: Tensor, right: Tensor, round_factors: bool = False) -> Tensor:
    """``left right``. With round_factors the factors of it and of its gradients' products are
    rounded to bfloat16, if they are float32 or float64."""
    output = torch.matmul(*factors(round_factors, left, right))
    return _GradientRounded.apply(output) if round_factors and output.itemsize > 2 else output
