"""Inputs inside larger buffers, whose borders must not be written."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

BORDER = 64  # elements on each side


class Border:
    """Tensors carved from larger buffers, with copies of the borders and of the values."""

    def __init__(self, rng: Random):
        self.rng = rng
        self.buffers: dict[str, tuple[Tensor, Tensor]] = {}

    def carve(self, name: str, tensor: Tensor) -> Tensor:
        """The values in other strides, inside a buffer of random bits."""
        rng = self.rng
        order = list(range(tensor.dim()))
        if rng.random() < 0.3:
            rng.shuffle(order)
        permuted = tensor.permute(order)
        sizes, gaps = list(permuted.shape), [0] * permuted.dim()
        if sizes:
            gaps[-1] = rng.choice((0, 0, 0, 1, 3))
        padded = [size + gap for size, gap in zip(sizes, gaps, strict=True)]
        count = torch.Size(padded).numel()
        offset = BORDER + rng.randrange(8)
        buffer = torch.empty(count + offset + BORDER, dtype=tensor.dtype)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        size = (buffer.numel() * buffer.element_size(),)
        noise = torch.randint(0, 2, size, dtype=torch.uint8, generator=generator)
        buffer.view(torch.uint8).copy_(noise if tensor.dtype is torch.bool else 255 * noise)
        view = buffer[offset : offset + count].view(padded)
        for dim, size in enumerate(sizes):
            view = view.narrow(dim, 0, size)
        carved = view.copy_(permuted).permute([order.index(d) for d in range(tensor.dim())])
        self.buffers[name] = buffer, buffer.clone()
        return carved

    def check(self) -> None:
        for name, (buffer, before) in self.buffers.items():
            same = torch.equal(buffer.view(torch.uint8), before.view(torch.uint8))
            assert same, f"{name}, or what lies around it, was written"
