"""Products as tensor cores compute them, for results that are held to stock PyTorch's formula."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulator import executors
from tests.support.dtypes import F32


class Tf32Products(TorchDispatchMode):
    """Matrix products of factors that are rounded to tf32, as tensor cores take float32."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            # To nearest, ties away from zero: 13 bits are dropped.
            bits = [factor.contiguous().view(torch.int32) for factor in arguments]
            arguments = [((n + 0x1000) & -0x2000).view(F32) for n in bits]
        return function(*arguments, **(keywords or {}))


class TensorCoreSums(TorchDispatchMode):
    """Matrix products in float32 that are summed as a tensor core sums those of 16-bit factors:
    16 columns at a time, each sum cut off to float32 (tests/cuda_emulator/device.h)."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function not in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            return function(*arguments, **(keywords or {}))
        left, right = (factor.double() for factor in arguments)
        total = left.new_zeros(*left.shape[:-1], right.shape[-1])
        for a, b in zip(left.split(16, -1), right.split(16, -2), strict=True):
            total = total + a @ b
            nearest = total.to(F32)
            beyond = nearest.double().abs() > total.abs()
            total = nearest.where(~beyond, nearest.nextafter(torch.zeros(()))).double()
        return total.to(F32)


def lse_in_float32(definition: Callable[[], dict[str, Tensor]]) -> Tensor:
    """The lse of the definition in float32, its sums by the hardware that runs the operators."""
    with TensorCoreSums() if executors.are_cuda() else nullcontext():
        return definition()["lse"]
