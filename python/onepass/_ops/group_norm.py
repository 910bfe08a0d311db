"""The group norm family's operator, and the order of the output's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.differentiation import constant
from onepass._ops.entry import entry
from onepass.reference import group_norm as reference

KINDS = reference.ACTIVATIONS
_NAMES = {number: name for name, number in KINDS.items()}


def has_channels_last(input: Tensor) -> bool:
    """Whether torch counts input's memory order as channels last; the output then has it too."""
    if input.dim() not in (4, 5) or input.is_contiguous():
        return False
    sizes, strides = input.shape, input.stride()
    if strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(input.dim() - 1, 1, -1), 0):
        if sizes[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * (sizes[d] if sizes[d] > 1 else 1)
    return True


@entry
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: int,
) -> Tensor:
    """activation(group_norm(input)); kind is a number of KINDS."""
    if torch.compiler.is_compiling():
        eps = constant(eps)
    out_dtype = None
    if input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype is not torch.float64:
        out_dtype = torch.float32  # as torch's
    channels_last = has_channels_last(input)
    return _group_norm.run(
        input, weight, bias, num_groups, eps, kind, channels_last, out_dtype, False
    )[0]


def _empty_like(input: Tensor, channels_last: bool, dtype: torch.dtype) -> Tensor:
    if not channels_last:
        return input.new_empty(input.shape, dtype=dtype)
    memory_format = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
    return torch.empty(input.shape, dtype=dtype, device=input.device, memory_format=memory_format)


def _outputs(input, num_groups, channels_last, out_dtype, save_statistics):
    kept = torch.float64 if input.dtype is torch.float64 else torch.float32
    statistics = (input.shape[0], num_groups) if save_statistics else (0,)
    return (
        _empty_like(input, channels_last, out_dtype or input.dtype),
        input.new_empty(statistics, dtype=kept),
        input.new_empty(statistics, dtype=kept),
    )


def _definition(input, weight, bias, num_groups, eps, activation_kind, out_dtype, save_statistics):
    x, weight, bias = wide(input, weight, bias)
    y = reference.group_norm(x, num_groups, weight, bias, eps, _NAMES[activation_kind])
    mean = rstd = x.new_empty(0)
    if save_statistics:
        mean, rstd = reference.statistics(x, num_groups, eps)
    return y.to(out_dtype or input.dtype), mean, rstd


def _gradients(input, weight, bias, channels_last, grad_mask):
    def of_channels(bit, tensor):
        is_wanted = bool(grad_mask & bit) and tensor is not None
        dtype = input.dtype if tensor is None else tensor.dtype
        return input.new_empty((input.shape[1] if is_wanted else 0,), dtype=dtype)

    dinput = input.new_empty(0)
    if grad_mask & 1:
        dinput = _empty_like(input, channels_last, input.dtype)
    return dinput, of_channels(2, weight), of_channels(4, bias)


_group_norm = differentiable("group_norm", _outputs, _definition, _gradients)
