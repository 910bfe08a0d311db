"""Attention on a GPU that a swapped model leaves to torch.

From compute capability 9.0 on, torch gives dense 16-bit attention to cuDNN or FlashAttention, whose
kernels use instructions of those devices (wgmma, TMA) that onepass's do not. onepass's have not
been measured there. Until a figure says otherwise, swapped models, modules and attached models run
torch's where torch has such a kernel. Dropout, masks, biases, windows, softcaps, sinks and float32
have no such kernel and run onepass's, as the functions of `onepass.functional` always do.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from onepass import _dispatch_log
from onepass._compiling import constant_where_traced

TORCHS_FROM = (9, 0)
# Head dimensions that torch's fused kernels take.
_MOST_HEAD_DIM = 256
_HEAD_DIM_STEP = 8
NOTE = (
    "on GPUs of capability 9.0 or newer, 16-bit attention without mask and dropout runs torch's; "
    "onepass's has not been measured there (ONEPASS_CUDA_ATTENTION=always runs it)"
)


def is_torchs(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether attention without mask, dropout or other terms runs torch's here; logged. Tensors are
    (batch, heads, seq, head_dim)."""
    if not query.is_cuda:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    head_dim = query.shape[-1]
    if (
        dtype not in (torch.bfloat16, torch.float16)
        or head_dim > _MOST_HEAD_DIM
        or head_dim % _HEAD_DIM_STEP
        or not head_dim == key.shape[-1] == value.shape[-1]
        or not _leaves(query.device.index)
    ):
        return False
    if not torch.compiler.is_compiling() and _dispatch_log.is_recording():
        _dispatch_log.record_fallback(
            op="scaled_dot_product_attention",
            arguments=f"{tuple(query.shape)} by {tuple(key.shape)}, {str(dtype)[6:]}",
            kernel="torch.nn.functional.scaled_dot_product_attention",
            threads=1,
            reason="dense 16-bit attention on this device (ONEPASS_CUDA_ATTENTION=always: ours)",
        )
    return True


def leaves_some() -> bool:
    """Whether some attention is left to torch on the current GPU."""
    return torch.cuda.is_available() and _leaves(None)


@constant_where_traced
def _leaves(device: int | None) -> bool:
    """Whether a device is at least `TORCHS_FROM`, and the environment does not override it."""
    if os.environ.get("ONEPASS_CUDA_ATTENTION") == "always":
        return False
    return capability(device) >= TORCHS_FROM


def capability(device: int | None) -> tuple[int, int]:
    """The compute capability of a device; None is the current one."""
    return torch.cuda.get_device_capability(device)
