"""Checks of an optimizer's tensors before a step, with errors that name the parameter."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from onepass._devices import refuse_fakes
from onepass._imported import are_dtensors, is_dtensor, is_fake
from onepass._library import no_cuda
from onepass.optim.flat_state import EMA, is_dense, local


def check_device(name: str, params: Sequence[Tensor]) -> None:
    """All parameters of a step must be on one device that has kernels."""
    if any(is_fake(local(param)) for param in params):
        refuse_fakes(name, "params")
    device = local(params[0]).device
    for param in params:
        if local(param).device != device:
            raise RuntimeError(
                f"{name}: params must be on one device, got {device} and {local(param).device}"
            )
    obstacle = no_cuda() if device.type == "cuda" else ""
    if device.type not in ("cpu", "cuda") or obstacle:
        raise RuntimeError(
            f"{name}: params must be on the CPU or a CUDA device, got {device}"
            + (f": {obstacle}" if obstacle else "")
        )


def refuse_mixed(name: str, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[bool]:
    """Refuses mixed lists as torch does, before any collective; returns which are DTensors."""
    distributed = are_dtensors(params)
    for i, is_one in enumerate(are_dtensors(gradients)):
        if is_one != distributed[i]:
            kinds = " for a ".join(type(tensor).__name__ for tensor in (gradients[i], params[i]))
            raise RuntimeError(
                f"{name}: gradients must be DTensors where their parameters are, got mixed "
                f"torch.Tensor and DTensor: a {kinds}"
            )
    return distributed


def refuse_partial(name: str, params: Sequence[Tensor]) -> None:
    """Refuses partial gradients: a step that is not linear cannot use parts of a sum."""
    for param in filter(is_dtensor, params):
        if any(placement.is_partial() for placement in param.placements):
            raise RuntimeError(
                f"{name}: params must not be partial sums, got placements {param.placements}"
            )


def check_shape(
    name: str, param: Tensor, key: str, value: Tensor, number: int | None = None
) -> None:
    """Whether a state has its parameter's shape, on its device."""
    here, tensor = local(param), local(value)
    if tensor.shape != here.shape or tensor.device != here.device:
        which = "a parameter" if number is None else f"parameter {number}"
        raise RuntimeError(
            f"{name}: {key} of {which} must have shape {tuple(here.shape)} on {here.device}, got "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )


def check_dtype(
    name: str, number: int, param: Tensor, key: str, dtype: torch.dtype, coded: bool
) -> None:
    """Whether the operator takes a state's dtype; coded: it has scales beside it."""
    if key == "remainder":
        fits, rule = dtype is torch.int16, "int16"
    elif key == "master":
        fits, rule = dtype is torch.float32, "float32"
    elif key == EMA:
        kinds = {torch.float32, param.dtype} if param.dtype.itemsize < 8 else {param.dtype}
        fits, rule = dtype in kinds, "float32, or the parameter's"
    elif coded:
        fits, rule = dtype is torch.uint8, "uint8 beside its scales"
    elif param.dtype is torch.float64:
        fits, rule = dtype is torch.float64, "float64 like the parameter"
    else:
        fits = dtype in (torch.float32, torch.bfloat16, torch.float16)
        rule = "float32, bfloat16 or float16"
    if not fits:
        raise RuntimeError(
            f"{name}: {key} of parameter {number} must have dtype {rule}, got {dtype}"
        )


def refuse_shared_memory(name: str, what: str, tensors: Sequence[Tensor]) -> None:
    """Refuses overlapping tensors: pieces of all tensors are written at the same time."""
    spans = []
    for number, here in enumerate(map(local, tensors)):
        if any(s == 0 and n > 1 for s, n in zip(here.stride(), here.shape, strict=True)):
            raise RuntimeError(
                f"{name}: {what} must not share memory, got strides {here.stride()} for shape "
                f"{tuple(here.shape)} in number {number} of those with gradients"
            )
        if here.numel():
            spans.append((here.data_ptr(), number, here))
    spans.sort(key=lambda span: span[:2])
    for (_, one, first), (_, other, second) in itertools.pairwise(spans):
        if _overlap(first, second):
            raise RuntimeError(
                f"{name}: {what} must not share memory, got numbers {min(one, other)} and "
                f"{max(one, other)} of those with gradients that do"
            )


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether a later tensor begins within an earlier one, and not merely in its gaps."""
    if first.data_ptr() + _extent(first) * first.element_size() <= second.data_ptr():
        return False
    if is_dense(first) and is_dense(second):
        return True
    ahead = second.data_ptr() - first.data_ptr()
    return _meet(_places(first), _places(second), ahead)


@functools.lru_cache(maxsize=1024)
def _meet(first: tuple, second: tuple, ahead: int) -> bool:
    """Whether two layouts share a byte, the second one `ahead` bytes after the first."""
    return bool(torch.isin(_bytes(*first), _bytes(*second) + ahead).any())


def _places(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), _extent(tensor), tensor.element_size()


def _extent(tensor: Tensor) -> int:
    """Elements from the first to after the last one."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes(shape: tuple, strides: tuple, extent: int, size: int) -> Tensor:
    """The places of all bytes, from the first element on."""
    places = torch.arange(extent, device="cpu").as_strided(shape, strides).flatten()
    return (places[:, None] * size + torch.arange(size, device="cpu")).flatten()


def refuse_freed(name: str, what: str, tensors: Sequence[Tensor]) -> None:
    """Refuses freed memory (`resize_(0)`, as in FSDP), which torch would read."""
    for here in map(local, tensors):
        if here.numel() > 0 and here.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"{name}: {what} must have memory, got shape {tuple(here.shape)} with a storage of "
                "0 bytes"
            )


def refuse_sparse(name: str, gradients: Sequence[Tensor]) -> None:
    """Refuses sparse gradients with torch's own message."""
    if any(gradient.is_sparse for gradient in gradients):
        raise RuntimeError(f"{name} does not support sparse gradients")


def check_like_torch(name: str, lr: float | Tensor, betas: tuple[float, float], **others) -> None:
    """ValueError as torch's constructors raise it; `others` by the names of their messages."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if len(betas) != 2:
        raise ValueError(f"{name}: betas must be two numbers, got {betas}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    for what, value in others.items():
        if not value >= 0.0:
            raise ValueError(f"Invalid {what} value: {value}")
