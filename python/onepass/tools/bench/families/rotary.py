"""Cases of the rotary family against the usual composition, `x * cos + rotate_half(x) * sin`, and
after RMS norms of query and key, as in Qwen3: forward, and forward and backward in
one call, on CUDA the backward alone as well.

Tensors that must cross memory: query and key are read and written once by the forward, and so are
their gradients by the backward, after norms query and key again. cos and sin are read once for all
heads, a fortieth of that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onepass import functional
from onepass.reference import rotary as reference
from onepass.tools.bench.case import Case, Operator

SHAPE = (1, 32, 2048, 128)  # of the query
QUICK = (1, 4, 16, 32)
HEADS_PER_KEY = 4
CUDA_SHAPE = (4, 32, 8192, 128)
CUDA_CHECKED = (1, 32, 64, 128)
LAYOUTS = ("heads", "tokens")  # the first dimension in memory


def _operator(interleaved: bool) -> Operator:
    def ours(*tensors: Tensor) -> tuple[Tensor, ...]:
        return functional.rotary_embedding(*tensors, interleaved=interleaved)

    def stock(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return tuple(x * cos + reference.partners(x, interleaved) * sin for x in (query, key))

    def formula(*tensors: Tensor) -> tuple[Tensor, ...]:
        return reference.rotary_embedding(*tensors, interleaved=interleaved)

    return Operator(ours, stock, formula, formula)


def _normed() -> Operator:
    eps = 1e-6

    def fused(function):
        def of(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor):
            named = dict(zip(("query_weight", "key_weight"), weights, strict=True))
            return function(query, key, cos, sin, **named, eps=eps)

        return of

    def norm(x: Tensor, weight: Tensor) -> Tensor:  # as models of transformers write it
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def stock(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor):
        query, key = (norm(x, w) for x, w in zip((query, key), weights, strict=True))
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return tuple(x * cos + reference.partners(x, False) * sin for x in (query, key))

    formula = fused(reference.rotary_embedding)
    return Operator(fused(functional.rotary_embedding), stock, formula, formula)


OPERATORS = {
    "halves": _operator(False),
    "interleaved": _operator(True),
    "normed": _normed(),
}


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps a small shape."""
    on_cuda = device == "cuda"
    phases = ("forward", "backward", "forward+backward") if on_cuda else (
        "forward", "forward+backward")  # fmt: skip
    shape = QUICK if quick else CUDA_SHAPE if on_cuda else SHAPE
    for name in OPERATORS:
        for first in LAYOUTS[:1] if name == "interleaved" else LAYOUTS:
            for dtype in (torch.float32, torch.bfloat16):
                for phase in phases:
                    yield _case(name, shape, first, dtype, phase, device)


def _case(name: str, shape: tuple, first: str, dtype: torch.dtype, phase: str, device: str) -> Case:
    backward = phase != "forward"

    def tensors(shape: tuple) -> list[Tensor]:
        batch, heads, tokens, head_dim = shape

        def drawn(heads: int) -> Tensor:
            if first == "heads":
                rows = torch.randn(batch, heads, tokens, head_dim, device=device).to(dtype)
            else:
                rows = torch.randn(batch, tokens, heads, head_dim, device=device).to(dtype)
                rows = rows.transpose(1, 2)
            return rows.requires_grad_(backward)

        angle = torch.randn(1, tokens, head_dim // 2, device=device)
        angle = angle.repeat_interleave(2, -1) if name == "interleaved" else angle.repeat(1, 1, 2)
        query, key = drawn(heads), drawn(heads // HEADS_PER_KEY)
        found = [query, key, angle.cos().to(dtype), angle.sin().to(dtype)]
        if name == "normed":
            weights = (torch.randn(head_dim, device=device).to(dtype) for _ in range(2))
            found += [weight.requires_grad_(backward) for weight in weights]
        return found

    large = shape == CUDA_SHAPE
    times = 2 if phase == "forward+backward" else 1
    if name == "normed" and backward:
        times += 0.5  # the rows once more
    sizes = "x".join(map(str, shape))
    return Case(
        f"rotary/{name}/{str(dtype).removeprefix('torch.')}/{sizes}-{first}/{phase}",
        OPERATORS[name],
        lambda: tensors(shape),
        backward,
        times * 2 * (1 + 1 / HEADS_PER_KEY),
        cold=large,
        backward_alone=phase == "backward",
        device=device,
        make_checked=(lambda: tensors(CUDA_CHECKED)) if large else None,
    )
