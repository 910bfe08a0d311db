"""Cases of the delta rule against the fallbacks of transformers.

Products of chunks are the limit: per token and head three of a key's size times a value's, and
pairs of tokens in half a chunk, of keys twice and of values twice; backward seven, of keys five
times and of values five times. The ceiling is that of multiply-adds.

Of an update the state must be read and written: the ceiling is an update in place. States lie in no
cache, as those of a model's layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from onepass.reference.delta_rule import l2norm
from onepass.tools.bench.case import Case, Operator

SHAPE = (1, 1024, 16, 128)  # batch, tokens, heads, columns of keys and values
LONG = (1, 32768, 2, 128)
QUICK = (1, 100, 2, 16)
CHECKED = (1, 160, 2, 40)
CHUNK = 64  # of the kernel and of the fallback
TOKENS, QUICK_TOKENS = (1, 16, 128), (1, 2, 16)  # of an update: batch, heads, columns
NORMED = {"use_qk_l2norm_in_kernel": True}


def _ours(*tensors: Tensor) -> tuple[Tensor]:
    by_channel = tensors[3].dim() == 4
    function = functional.chunk_kda if by_channel else functional.chunk_gated_delta_rule
    return (function(*tensors, **NORMED)[0],)


def _formula(*tensors: Tensor) -> tuple[Tensor]:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    wide = [tensor.to(dtype) for tensor in tensors]
    scale = tensors[0].shape[-1] ** -0.5
    output = reference.delta_rule.delta_rule(*wide, scale, qk_l2norm=True)[0]
    return (output.to(tensors[0].dtype),)


def _of_chunks(*tensors: Tensor) -> list[Tensor]:
    """Heads first, in float32 (float64 for float64), and padded to (..., chunks, tokens, ...)."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    chunks, pad = [], -tensors[0].shape[1] % CHUNK
    for tensor in tensors:
        heads = tensor.transpose(1, 2).to(wide, memory_format=torch.contiguous_format)
        padded = F.pad(heads, (0, 0) * (tensor.dim() - 3) + (0, pad))
        chunks.append(padded.unflatten(2, (-1, CHUNK)))
    return chunks


def _fallback(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor]:
    """The fallbacks of transformers: all chunks at once, but for their states."""
    by_channel, dtype, length = g.dim() == 4, v.dtype, q.shape[1]
    q, k, v, g, beta = _of_chunks(q, k, v, g, beta)
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    of_v, of_k = v * beta[..., None], k * beta[..., None]
    sums = g.cumsum(3)
    upper = torch.ones((CHUNK, CHUNK), dtype=torch.bool, device=q.device).triu(1)
    if by_channel:
        between = sums.unsqueeze(-2) - sums.unsqueeze(-3)
        decay = between.masked_fill(upper[..., None], float("-inf")).exp()
        attn = -(of_k.unsqueeze(-2) * k.unsqueeze(-3) * decay).sum(-1)
        attn = attn.masked_fill(~upper.T, 0)
        for i in range(1, CHUNK):
            row, before = attn[..., i, :i].clone(), attn[..., :i, :i].clone()
            attn[..., i, :i] = row + (row.unsqueeze(-1) * before).sum(-2)
        inverse = attn + torch.eye(CHUNK, dtype=attn.dtype, device=attn.device)
        values, keys = inverse @ of_v, inverse @ (of_k * sums.exp())
        before, after, left = sums.exp(), (sums[..., -1:, :] - sums).exp(), sums[..., -1, :].exp()
        left = left[..., None]
    else:
        decay = (sums.unsqueeze(4) - sums.unsqueeze(3)).masked_fill(upper, float("-inf")).exp()
        system, pairs = (of_k @ k.mT) * decay, (q @ k.mT) * decay
        keys = of_k * sums.exp()[..., None]
        values, keys = (
            torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)
            for x in (of_v, keys)
        )
        before, after = sums.exp()[..., None], (sums[..., -1:] - sums).exp()[..., None]
        left = sums[..., -1].exp()[..., None, None]
    state = v.new_zeros((*v.shape[:2], q.shape[-1], v.shape[-1]))
    output = torch.zeros_like(values)
    q_before, k_after = q * before, k * after
    for i in range(q.shape[2]):
        new = values[:, :, i] - keys[:, :, i] @ state
        if by_channel:
            of_pairs = (q[:, :, i].unsqueeze(-2) * k[:, :, i].unsqueeze(-3) * decay[:, :, i]).sum(
                -1
            )
            of_pairs = of_pairs.masked_fill(upper, 0)
        else:
            of_pairs = pairs[:, :, i]
        output[:, :, i] = q_before[:, :, i] @ state + of_pairs @ new
        state = state * left[:, :, i] + k_after[:, :, i].mT @ new
    output = output.flatten(2, 3)[:, :, :length].transpose(1, 2)
    return (output.to(dtype, memory_format=torch.contiguous_format),)


OPERATOR = Operator(_ours, _fallback, _formula, _formula)


def _update(*tensors: Tensor) -> tuple[Tensor]:
    return (functional.delta_rule_update(*tensors, **NORMED),)


def _stock_update(state: Tensor, *tensors: Tensor) -> tuple[Tensor]:
    """The fallbacks of transformers; a model then copies the state into its cache."""
    dtype = tensors[2].dtype
    q, k, v, g, beta = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    after, outputs = state, []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        after = after * (decay[..., None] if g.dim() == 4 else decay[..., None, None])
        found = (after * k[:, t, ..., None]).sum(-2)
        new = (v[:, t] - found) * beta[:, t, :, None]
        after = after + k[:, t, ..., None] * new.unsqueeze(-2)
        outputs.append((after * q[:, t, ..., None]).sum(-2))
    state.copy_(after)
    return (torch.stack(outputs, 1).to(dtype),)


def _formula_of_update(*tensors: Tensor) -> tuple[Tensor]:
    dtype = torch.promote_types(tensors[1].dtype, torch.float32)
    state, *others = (tensor.to(dtype) for tensor in tensors)
    scale = others[0].shape[-1] ** -0.5
    output, _ = reference.delta_rule.recurrent(*others, scale, state, qk_l2norm=True)
    return (output.to(tensors[1].dtype),)


UPDATE = Operator(_update, _stock_update, _formula_of_update, _formula_of_update)


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a CPU; CUDA has no kernel. `quick` keeps a small shape."""
    if device != "cpu":
        return
    shape, dtypes = QUICK if quick else SHAPE, (torch.float32, torch.bfloat16)
    for by_channel in (False, True):
        for dtype in dtypes:
            for phase in ("forward", "forward+backward"):
                yield _case(shape, by_channel, dtype, phase)
    if not quick:
        for phase in ("forward", "forward+backward"):
            yield _case(LONG, False, torch.float32, phase)
    for by_channel in (False, True):
        for tokens in (1, 4):
            yield _update_case(QUICK_TOKENS if quick else TOKENS, tokens, by_channel)


def _name(by_channel: bool) -> str:
    return "kda" if by_channel else "gated delta rule"


def _drawn(batch: int, length: int, heads: int, size: int, by_channel: bool) -> list[Tensor]:
    """q, k and v as parts of a convolution, g and beta as gates make them."""
    wide = torch.randn(batch, length, 3 * heads * size, device="cpu")
    of_g = (batch, length, heads, size) if by_channel else (batch, length, heads)
    g = -F.softplus(torch.randn(of_g, device="cpu") - 2)
    parts = [part.unflatten(-1, (heads, size)) for part in wide.chunk(3, -1)]
    return [*parts, g, torch.rand(batch, length, heads, device="cpu")]


def _case(shape: tuple[int, ...], by_channel: bool, dtype: torch.dtype, phase: str) -> Case:
    batch, length, heads, size = shape
    backward = phase != "forward"

    def make(shape: tuple[int, ...] = shape) -> list[Tensor]:
        drawn = _drawn(*shape, by_channel)
        tensors = [tensor.to(dtype) for tensor in drawn[:3]] + drawn[3:]
        return [tensor.detach().requires_grad_(backward) for tensor in tensors]

    products = 3 * size * size + 4 * size * CHUNK // 2
    if backward:
        products += 7 * size * size + 10 * size * CHUNK // 2
    return Case(
        f"delta_rule/{_name(by_channel)}/{str(dtype).removeprefix('torch.')}/"
        f"{'x'.join(map(str, shape))}/{phase}",
        OPERATOR,
        make,
        backward,
        tensors=None,
        make_checked=None if shape == QUICK else partial(make, CHECKED),
        flops=2 * batch * length * heads * products,
        compiles=False,
    )


def _update_case(shape: tuple[int, int, int], tokens: int, by_channel: bool) -> Case:
    batch, heads, size = shape

    def make() -> list[Tensor]:
        state = torch.randn(batch, heads, size, size, device="cpu")
        return [state, *_drawn(batch, tokens, heads, size, by_channel)]

    return Case(
        f"delta_rule/update of {_name(by_channel)}/float32/{batch}x{tokens}x{heads}x{size}/forward",
        UPDATE,
        make,
        False,
        tensors=None,
        moved=2 * 4 * batch * heads * size * size,
        cold=True,
        compiles=False,
    )
