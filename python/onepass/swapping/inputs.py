"""The tensors and devices that the operators take."""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor
from torch.autograd import forward_ad

from onepass._imported import is_dtensor
from onepass._ops.differentiation import are_transforms_active
from onepass._refusals import is_number
from onepass.swapping.scores import Scores

MOST_HEAD_DIM = 512  # of the attention operator
_OF_KIND = {
    "dropout": "norm",
    "mlp": "gate",
    "scan": "selective_scan",
}  # families whose kinds have other names


def has_kernels(device: str, kind: str = "norm") -> bool:
    """Whether this build registers a kind's operators for a device type."""
    if device in ("cpu", "meta"):
        return True
    ops = torch.ops.onepass
    op = getattr(ops, _OF_KIND.get(kind, kind) + "_forward").default
    key = getattr(torch._C.DispatchKey, device.upper(), None)
    return key is not None and op.has_kernel_for_dispatch_key(key)


def is_autocast(device: str) -> bool:
    """Whether autocast is on for a device type: torch raises where there is none, as for meta."""
    return device != "meta" and torch.is_autocast_enabled(device)


def is_plain(input: Tensor) -> bool:
    """Whether the operators take this tensor: nested ones run the original, and so do forward-mode
    differentiation and compiled transforms of torch.func.

    `nn.TransformerEncoder` makes nested tensors in eval mode with a padding mask.
    """
    if forward_ad._current_level >= 0:
        return False
    if torch.compiler.is_compiling() and are_transforms_active():
        return False
    if type(input) is Tensor:
        return not input.is_nested
    if not isinstance(input, Tensor):  # of torch.fx, or an input that the original refuses
        return False
    if isinstance(input, Scores):  # of attention by hand, which torch's functions are recorded on
        return False
    return not input.is_nested


def is_for_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: object) -> bool:
    """Whether torch's layer and group norms take these dtypes, and its kernel this eps."""
    if not is_number(eps):
        return False
    if weight is None:
        return bias is None
    dtype = weight.dtype
    return (dtype is input.dtype or (dtype is torch.float32 and input.dtype.itemsize == 2)) and (
        bias is None or bias.dtype is dtype
    )


def is_local(input: Tensor) -> bool:
    """The same of functions that torch computes on DTensors in ways of its own, as attention in
    `context_parallel`."""
    return is_plain(input) and not is_dtensor(input)


def is_for_loss(input: Tensor) -> bool:
    """The same of logits: also of DTensors of which classes alone are split, whose loss all
    processes then have, as torch's in `loss_parallel`."""
    if not is_dtensor(input):
        return is_plain(input)
    classes = input.dim() - 1
    split = [p.is_shard(classes) for p in input.placements]
    kept = zip(input.placements, split, strict=True)
    return any(split) and all(is_split or p.is_replicate() for p, is_split in kept)


_ATTENTION_DEVICES = frozenset(
    device for device in ("cpu", "cuda", "meta") if has_kernels(device, "attention")
)


def is_for_attention(input: Tensor) -> bool:
    """Whether attention takes this tensor: distributed tensors, and those on a device without
    kernels in this build, run the original."""
    if isinstance(input, torch.fx.Proxy):
        return False
    return input.device.type in _ATTENTION_DEVICES and not hasattr(input, "device_mesh")
