"""Cases of the decode family: attention of a few new queries against a KV cache.

What binds is reading keys and values, so the ceiling is a plain read. No call finds its KV cache in
the processor's: they take turns among 256 MiB of them, as the layers of a model do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass.bench.case import Case, Goal, Operator
from onepass.reference.attention_decode import attention_decode as reference

# (batch, heads, kv_heads, seq_q, keys, head_dim)
LONG = (1, 8, 2, 1, 8192, 128)
MULTI_HEAD = (1, 12, 12, 1, 1024, 64)
SEVERAL = (1, 8, 2, 8, 8192, 128)  # drafted tokens, checked at once
RAGGED = (16, 8, 2, 1, 4096, 128)
SHARES = (1, 1 / 8, 3 / 4, 1 / 4, 5 / 8, 3 / 8, 1 / 2, 3 / 8)  # of RAGGED's keys that are in use
OVERHEAD = (1, 2, 2, 1, 16, 8)
QUICK = (2, 4, 2, 1, 96, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGE_SIZE = 16

_LONG = Goal(2.0, share=0.70, others={"expanded": 3.0})
_LONG_FLOAT16 = Goal(2.0, others={"expanded": 3.0})
# A batch costs as much as all of its keys, not as the longest times their number; the rest is room
# for what a call costs whatever its length.
_PROPORTIONAL = 0.9

Shape = Sequence[int]


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases; `quick` keeps small shapes. There are none on CUDA, which has no kernels yet."""
    if device == "cuda":
        return
    for dtype in DTYPES:
        wanted = _LONG if dtype is not torch.float16 else _LONG_FLOAT16
        yield _case("grouped", LONG, dtype, quick, wanted, operator=partial(_read, expanded=True))
    for dtype in (torch.float32, torch.bfloat16):
        yield _case("multi-head", MULTI_HEAD, dtype, quick, operator=_read)
        yield _case("drafted", SEVERAL, dtype, quick, operator=_read)
        yield _case("append", LONG, dtype, quick, operator=_append)
        yield _case(f"pages-{PAGE_SIZE}", LONG, dtype, quick, operator=_paged)
        yield _ragged_case(dtype, quick)
    yield Case(
        _name("append", OVERHEAD, torch.float32),
        _append(OVERHEAD),
        partial(_tensors, OVERHEAD, torch.float32, new_rows=1),
        False,
        None,
        compiles=False,
    )


def _case(
    kind: str,
    shape: Shape,
    dtype: torch.dtype,
    quick: bool,
    wanted: Goal | None = None,
    *,
    operator: Callable[[Shape], Operator],
) -> Case:
    if quick:
        shape, wanted = QUICK, None
    new_rows = 1 if kind == "append" else 0
    return Case(
        _name(kind, shape, dtype),
        operator(shape),
        partial(_tensors, shape, dtype, new_rows=new_rows),
        False,
        None,
        wanted or Goal(),
        cold=not quick,
        compiles=False,
        reads=_bytes(shape, dtype, [shape[4]] * shape[0]),
    )


def _ragged_case(dtype: torch.dtype, quick: bool) -> Case:
    shape = QUICK if quick else RAGGED
    batch, keys = shape[0], shape[4]
    lengths = [int(keys * SHARES[b % len(SHARES)]) for b in range(batch)]
    goal = Goal(others={"all as long": _PROPORTIONAL * batch * keys / sum(lengths)})
    return Case(
        _name("ragged", shape, dtype),
        _ragged(shape, lengths),
        partial(_tensors, shape, dtype),
        False,
        None,
        Goal() if quick else goal,
        cold=not quick,
        compiles=False,
        reads=_bytes(shape, dtype, lengths),
    )


# ---- operators -----------------------------------------------------------------------------------


def _stock(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    return (F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1]),)


def _mask(shape: Shape) -> Tensor | None:
    """Of the last rows of a causal square, where there are several."""
    seq_q, keys = shape[3], shape[4]
    if seq_q == 1:
        return None
    return torch.ones(seq_q, keys, dtype=torch.bool).tril(keys - seq_q)


def _formula(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, ...]:
    return reference(q, k, v, window_right=0, **options)[:1]


def _read(shape: Shape, expanded: bool = False) -> Operator:
    mask, group = _mask(shape), shape[1] // shape[2]

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _stock(q, *(t.repeat_interleave(group, 1) for t in (k, v)), mask)

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _stock(q, k, v, mask)

    return Operator(
        lambda q, k, v: (functional.attention_with_kv_cache(q, k, v, is_causal=True),),
        stock,
        _formula,
        base=stock,
        others={"expanded": repeated} if expanded else {},
    )


def _append(shape: Shape) -> Operator:
    """A step: the new row goes behind those in use, one less than there are."""
    used = shape[4] - 1
    lengths = torch.full((shape[0],), used, dtype=torch.int32)

    def ours(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        attend = functional.attention_with_kv_cache
        return (attend(q, k, v, key, value, cache_seqlens=lengths, is_causal=True),)

    def stock(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        k[:, :, used:] = key
        v[:, :, used:] = value
        return _stock(q, k, v)

    def formula(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return _formula(q, k, v, key=key, value=value, cache_seqlens=lengths)

    return Operator(ours, stock, formula, base=stock)


def _paged(shape: Shape) -> Operator:
    """The caches as pages in random order; torch gathers them first."""
    batch, _, kv_heads, _, keys, head_dim = shape
    pages = keys // PAGE_SIZE
    table = torch.randperm(batch * pages).view(batch, pages).to(torch.int32)
    lengths = torch.full((batch,), keys, dtype=torch.int32)

    def pool(t: Tensor) -> Tensor:
        return t.view(batch * pages, PAGE_SIZE, kv_heads, head_dim)

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        gathered = (
            pool(t)[table].view(batch, keys, kv_heads, head_dim).transpose(1, 2) for t in (k, v)
        )
        return _stock(q, *gathered)

    options = {"cache_seqlens": lengths, "block_table": table}
    return Operator(
        lambda q, k, v: (functional.attention_with_kv_cache(q, pool(k), pool(v), **options),),
        stock,
        lambda q, k, v: _formula(q, pool(k), pool(v), **options),
        base=stock,
    )


def _ragged(shape: Shape, lengths: Sequence[int]) -> Operator:
    """Caches in use up to lengths of their own, which torch is told by a mask."""
    used = torch.tensor(lengths, dtype=torch.int32)
    mask = (torch.arange(shape[4]) < used[:, None])[:, None, None]
    attend = functional.attention_with_kv_cache

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _stock(q, k, v, mask)

    return Operator(
        lambda q, k, v: (attend(q, k, v, cache_seqlens=used),),
        stock,
        partial(_formula, cache_seqlens=used),
        base=stock,
        others={"all as long": lambda q, k, v: (attend(q, k, v),)},
    )


# ---- tensors -------------------------------------------------------------------------------------


def _tensors(shape: Shape, dtype: torch.dtype, new_rows: int = 0) -> list[Tensor]:
    """query, k_cache, v_cache, and key and value where there are new rows."""
    batch, heads, kv_heads, seq_q, keys, head_dim = shape
    caches = [(batch, kv_heads, keys, head_dim)] * 2
    new = [(batch, kv_heads, new_rows, head_dim)] * 2 if new_rows else []
    return [torch.randn(s).to(dtype) for s in [(batch, heads, seq_q, head_dim), *caches, *new]]


def _bytes(shape: Shape, dtype: torch.dtype, lengths: Sequence[int]) -> int:
    """Of the keys and values in use."""
    return 2 * sum(lengths) * shape[2] * shape[5] * dtype.itemsize


def _name(kind: str, shape: Shape, dtype: torch.dtype) -> str:
    batch, heads, kv_heads, seq_q, keys, head_dim = shape
    of_heads = f"{heads}on{kv_heads}" if heads != kv_heads else f"{heads}"
    sizes = f"{batch}x{of_heads}x{seq_q}x{keys}x{head_dim}"
    return f"decode/{kind}/{str(dtype).removeprefix('torch.')}/{sizes}"
