"""Every kind of tensor that a caller may pass, made from a plain one."""

import mmap
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

REAL = "real"  # has memory, and values that a plain tensor may have
BROKEN = "broken"  # has to be refused
FOREIGN = "foreign"  # belongs to another part of torch, which computes or refuses


@dataclass(frozen=True)
class InputClass:
    """`make(plain)` is a tensor of the class, or None where no such tensor exists of plain's
    shape and dtype. Of a real one `plain_of` gives an ordinary copy."""

    name: str
    kind: str
    make: Callable[[Tensor], object]
    written: bool = True  # whether an operator may be asked to write into one
    accepted: bool = False  # whether operators must take it where they only read it


class Plain(Tensor):
    """A subclass that changes nothing."""


class Wrapper(Tensor):
    """A subclass without memory of its own, whose operators run on the tensor inside."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor):
        self.held = inner

    def __repr__(self) -> str:  # torch's own would compute
        return f"Wrapper({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return value.held if isinstance(value, cls) else value

        def wrap(value):
            return cls(value) if isinstance(value, Tensor) else value

        args, kwargs = tree_map(unwrap, (args, kwargs or {}))
        return tree_map(wrap, func(*args, **kwargs))


def plain_of(tensor: Tensor) -> Tensor:
    """An ordinary tensor with the values."""
    held = getattr(tensor, "held", getattr(tensor, "_local_tensor", tensor)).detach()
    if held.is_nested:
        held = held.to_padded_tensor(0.0)
    held = held.to_dense() if held.layout is not torch.strided else held
    held = held.resolve_conj().resolve_neg()
    return torch.empty(held.shape, dtype=held.dtype).copy_(held.as_subclass(Tensor))


def _scalar(t: Tensor):
    return t.flatten()[0].clone() if t.numel() and t.dim() else None


def _empty(t: Tensor):
    return t[:0].clone() if t.dim() and len(t) else None


def _freed(t: Tensor):
    freed = t.clone()
    freed.untyped_storage().resize_(0)
    return freed if freed.numel() else None


def _negative_bit(t: Tensor):
    return None if t.dtype is torch.bool else torch._neg_view(-t)


def _conjugate(t: Tensor):
    if t.dtype not in (torch.float32, torch.float64):
        return None
    return torch.complex(t, t).conj()


def _expanded(t: Tensor):
    long = [d for d in range(t.dim()) if t.shape[d] > 1]
    return t.narrow(long[0], 0, 1).clone().expand_as(t) if long else None


def _overlapping(t: Tensor):
    """The rows of the last two dimensions share all but one element."""
    if t.dim() < 2 or min(t.shape[-2:]) < 2:
        return None
    strides = list(t.contiguous().stride())
    strides[-2] = 1
    return t.flatten().clone().as_strided(t.shape, strides)


def _transposed(t: Tensor):
    return t.mT.contiguous().mT if t.dim() > 1 and min(t.shape[-2:]) > 1 else None


def _gapped(t: Tensor):
    return torch.stack([t, t], -1).reshape(*t.shape[:-1], -1)[..., ::2] if t.dim() else None


def _bytes_of(t: Tensor) -> bytes:
    return bytes(t.contiguous().flatten().view(torch.uint8).tolist())


def _mapped(t: Tensor, access: int):
    if not t.numel() or not t.dim():
        return None
    file = tempfile.TemporaryFile()
    file.write(_bytes_of(t))
    file.flush()
    memory = mmap.mmap(file.fileno(), 0, access=access)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that is not writable, which is the point
        return torch.frombuffer(memory, dtype=t.dtype).view(t.shape)


def _numpy(t: Tensor):
    if t.dtype is torch.bfloat16:
        return None
    array = t.clone().numpy()
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def _mkldnn(t: Tensor):
    return t.to_mkldnn() if t.dim() and t.dtype is torch.float32 else None


def _nested(layout: torch.layout):
    def make(t: Tensor):
        if t.dim() < 2 or not t.is_floating_point():
            return None
        return torch.nested.nested_tensor(list(t.unbind(0)), layout=layout)

    return make


def single_process() -> None:
    """A process group of this process alone, whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def _distributed(t: Tensor):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(t, DeviceMesh("cpu", [0]), [Replicate()])


CLASSES = (
    InputClass("empty", REAL, _empty),
    InputClass("0-dim", REAL, _scalar),
    InputClass("freed", BROKEN, _freed),
    InputClass("None", BROKEN, lambda t: None),
    InputClass("a list", BROKEN, lambda t: t.tolist()),
    InputClass("negative-bit", REAL, _negative_bit, accepted=True),
    InputClass("conjugate", REAL, _conjugate),
    InputClass("expanded", REAL, _expanded, accepted=True),
    # Torch writes into these without noticing; it refuses expanded ones alone.
    InputClass("overlapping", REAL, _overlapping, False, True),
    InputClass("transposed", REAL, _transposed, accepted=True),
    InputClass("gapped", REAL, _gapped, accepted=True),
    # A write into this one is a segmentation fault, torch's own too.
    InputClass("read-only", REAL, lambda t: _mapped(t, mmap.ACCESS_READ), False, True),
    InputClass("read-only numpy", REAL, _numpy, accepted=True),
    InputClass("mapped file", REAL, lambda t: _mapped(t, mmap.ACCESS_COPY), accepted=True),
    InputClass("subclass", REAL, lambda t: t.clone().as_subclass(Plain), accepted=True),
    InputClass("wrapper subclass", FOREIGN, lambda t: Wrapper(t.clone())),
    InputClass("meta", FOREIGN, lambda t: t.to("meta")),
    InputClass("DTensor", FOREIGN, _distributed),
    InputClass("nested", FOREIGN, _nested(torch.strided)),
    InputClass("nested jagged", FOREIGN, _nested(torch.jagged)),
    InputClass("sparse", FOREIGN, lambda t: t.to_sparse() if t.dim() else None),
    InputClass("mkldnn", FOREIGN, _mkldnn),
)
