"""Optimizer moments in 8 bits, as csrc/core/code8.h defines them; here for state_dict alone."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from onepass.optim.contract import CODE_BLOCK as BLOCK

MIN_ELEMENTS = 4096  # smaller tensors save too little


def fits(param: Tensor) -> bool:
    """Whether a parameter's moments are kept as codes."""
    return param.numel() >= MIN_ELEMENTS and param.numel() % BLOCK == 0


@functools.cache
def _magnitudes(bits: int) -> Tensor:
    """(2^bits,) the values of the codes, ascending from 0 to 1."""
    values = [0.0, 8.0 ** (1 - bits)]
    for leading in range(1, bits):  # position of the leading one
        octave = 8.0 ** (leading - bits + 1)
        values += [octave * (0.125 + 0.875 * (j + 1) / 2**leading) for j in range(2**leading)]
    return torch.tensor(values, dtype=torch.float32, device="cpu")


@functools.cache
def _table(signed: bool) -> Tensor:
    """(256,) the value of each code."""
    if not signed:
        return _magnitudes(8)
    return torch.cat([_magnitudes(7), -_magnitudes(7)])


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """float32 values of `codes` (uint8) in any shape, in the memory order of their elements."""
    values = _table(signed).to(codes.device)[_flat(codes).int()]
    flat = (values.view(-1, BLOCK) * scales.view(-1, 1)).flatten()
    return torch.as_strided(flat, codes.shape, codes.stride())


def encode(values: Tensor, codes: Tensor, scales: Tensor, signed: bool) -> None:
    """Fills `codes` and `scales` with the nearest codes of `values`, which has codes' shape."""
    ordered = torch.empty_like(codes, dtype=torch.float32).copy_(values)
    blocks = _flat(ordered).view(-1, BLOCK)
    scales.copy_(blocks.abs().amax(dim=1))
    x = blocks / torch.where(scales == 0, 1.0, scales).view(-1, 1)
    table = _magnitudes(7 if signed else 8).to(codes.device)
    code = torch.bucketize(x.abs(), (table[1:] + table[:-1]) / 2)
    if signed:
        code += 128 * x.signbit()
    else:  # nonzero values stay nonzero, since they are in a denominator
        code = torch.where((code == 0) & (x > 0), 1, code)
    _flat(codes).copy_(code.flatten())


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in memory order."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,))
