"""The group norm family's operator, and the order of the output's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._memory_order import has_channels_last
from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.differentiation import constant
from onepass._ops.entry import entry
from onepass.reference import group_norm as reference

KINDS = reference.ACTIVATIONS
_NAMES = {number: name for name, number in KINDS.items()}


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
