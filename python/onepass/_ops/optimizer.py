"""The optimizer family's ops: fakes, and which tensors they take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass._ops.dispatch_log import logged

_clip_grad_norm = torch.ops.onepass.clip_grad_norm.default

NORM_TYPES = (1.0, 2.0, float("inf"))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def takes(gradients: Sequence[Tensor]) -> bool:
    """Whether the ops take all of these: plain float tensors on the CPU, without gaps."""
    return all(
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.dtype in _DTYPES
        and gradient.layout is torch.strided
        and (gradient.is_contiguous() or _is_dense(gradient))
        for gradient in gradients
    )


def _is_dense(tensor: Tensor) -> bool:
    within = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != within:
            return False
        within *= size
    return True


@logged
def clip_grad_norm(
    gradients: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """The norm of all gradients together, which are scaled in place where it is above max_norm."""
    return _clip_grad_norm(gradients, max_norm, norm_type, error_if_nonfinite)


@torch.library.register_fake("onepass::clip_grad_norm")
def _(gradients, max_norm, norm_type, error_if_nonfinite):
    dtypes = {gradient.dtype for gradient in gradients}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if torch.float64 in dtypes:
        dtype = torch.float64
    return gradients[0].new_empty((), dtype=dtype)
