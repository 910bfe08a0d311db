"""Cases of Mamba 2's scan against the fallback of transformers.

Products of chunks are the limit: per token, head and column two of the state's size and half a
chunk forward, and as much again for the pairs of a group; backward four of the state's size and a
chunk. The ceiling is that of multiply-adds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from onepass.tools.bench.case import Case, Operator

SHAPE = (1, 2048, 32, 64)  # batch, tokens, heads, columns
QUICK = (1, 100, 2, 16)
STATE, QUICK_STATE = 128, 16
CHUNK = 64  # of the kernel
STOCK_CHUNK = 256  # of models


def _ours(*tensors: Tensor) -> tuple[Tensor]:
    return (functional.mamba_chunk_scan(*tensors[:5], STOCK_CHUNK, *tensors[5:]),)


def _formula(*tensors: Tensor) -> tuple[Tensor]:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    wide = [tensor.to(dtype) for tensor in tensors]
    output = reference.mamba_chunk_scan.mamba_chunk_scan(*wide)[0]
    return (output.to(tensors[0].dtype),)


def _fallback(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor]:
    """The fallback of transformers, which computes in float32 (in float64 for float64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    batch, length, heads, size = x.shape
    pad = -length % STOCK_CHUNK

    def of_chunks(tensor: Tensor) -> Tensor:
        padded = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, pad))
        return padded.reshape(batch, -1, STOCK_CHUNK, *tensor.shape[2:])

    dt = dt.clamp(min=0.0)
    wide_x = x.to(wide)
    B, C = (t.to(wide).repeat_interleave(heads // t.shape[2], 2) for t in (B, C))
    scaled, a = wide_x * dt[..., None].to(wide), A.to(wide) * dt.to(wide)
    scaled, a, B, C = map(of_chunks, (scaled, a, B, C))
    a = a.permute(0, 3, 1, 2)
    sums = a.cumsum(-1)
    decay = _segment_sums(a).exp()
    pairs = torch.einsum("bclhn,bcshn->bclsh", C, B) * decay.permute(0, 2, 3, 4, 1)
    y = torch.einsum("bclsh,bcshp->bclhp", pairs, scaled)
    left = (sums[..., -1:] - sums).exp()
    states = torch.einsum("bclhn,bclhp->bchpn", B * left.permute(0, 2, 3, 1)[..., None], scaled)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    between = _segment_sums(F.pad(sums[..., -1], (1, 0))).exp().transpose(1, 3)
    states = torch.einsum("bzch,bzhpn->bchpn", between, states)[:, :-1]
    from_before = torch.einsum("bclhn,bchpn->bclhp", C, states)
    y = y + from_before * sums.exp().permute(0, 2, 3, 1)[..., None]
    y = y.reshape(batch, -1, heads, size)[:, :length] + D[:, None] * wide_x
    return (y.to(x.dtype),)


def _segment_sums(a: Tensor) -> Tensor:
    """[..., t, s]: the sum of a over (s, t], or -Inf where s > t."""
    size = a.shape[-1]
    lower = torch.ones((size, size), dtype=torch.bool, device=a.device).tril()
    sums = a[..., None].expand(*a.shape, size).masked_fill(~lower.tril(-1), 0).cumsum(-2)
    return sums.masked_fill(~lower, float("-inf"))


OPERATOR = Operator(_ours, _fallback, _formula, _formula)


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a CPU; CUDA has no kernel. `quick` keeps a small shape."""
    if device != "cpu":
        return
    for dtype in (torch.float32, torch.bfloat16):
        for phase in ("forward", "forward+backward"):
            yield _case(QUICK if quick else SHAPE, QUICK_STATE if quick else STATE, dtype, phase)


def _case(shape: tuple[int, ...], state: int, dtype: torch.dtype, phase: str) -> Case:
    batch, length, heads, size = shape
    backward = phase != "forward"

    def make() -> list[Tensor]:
        # As parts of a projection and a convolution.
        wide = torch.randn(batch, length, heads * size + 2 * state, device="cpu").to(dtype)
        x, B, C = wide.split([heads * size, state, state], -1)
        steps = F.softplus(torch.randn(batch, length, heads, device="cpu") - 2).to(dtype)
        tensors = [x.unflatten(-1, (heads, size)), steps]
        tensors += [-torch.arange(1.0, heads + 1, device="cpu"), B[:, :, None], C[:, :, None]]
        tensors.append(torch.ones(heads, device="cpu"))
        return [tensor.detach().requires_grad_(backward) for tensor in tensors]

    products = heads * size * (2 * state + CHUNK / 2)
    pairs = state * CHUNK / 2
    if backward:
        products += heads * size * (4 * state + CHUNK)
        pairs += 2 * state * CHUNK / 2 + pairs
    return Case(
        f"mamba_chunk_scan/{str(dtype).removeprefix('torch.')}/{'x'.join(map(str, shape))}, "
        f"state {state}/{phase}",
        OPERATOR,
        make,
        backward,
        tensors=None,
        flops=round(2 * batch * length * (products + pairs)),
        compiles=False,
    )
