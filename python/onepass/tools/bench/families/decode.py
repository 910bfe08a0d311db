"""Cases of the decode family: attention of a few new queries against a KV cache.

Reading keys and values binds, so the ceiling is a plain read; on CUDA an update in place, which
runs at the speed of a copy. No call finds its KV cache in the processor's cache: calls cycle
through 256 MiB of KV caches, as the layers of a model do. On CUDA calls are replays of graphs, as
in serving: a call from Python takes longer than the device's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass import functional
from onepass.reference.attention_decode import attention_decode as reference
from onepass.reference.attention_decode import quantize_rows
from onepass.tools.bench.attention_cuda import BACKENDS
from onepass.tools.bench.attention_parts import FILL
from onepass.tools.bench.case import Case, Operator

# (batch, heads, kv_heads, seq_q, keys, head_dim)
LONG = (1, 8, 2, 1, 8192, 128)
UNGROUPED = (1, 8, 8, 1, 8192, 128)
MULTI_HEAD = (1, 12, 12, 1, 1024, 64)
SEVERAL = (1, 8, 2, 8, 8192, 128)  # drafted tokens, checked at once
RAGGED = (16, 8, 2, 1, 4096, 128)
OVERHEAD = (1, 2, 2, 1, 16, 8)
QUICK = (2, 4, 2, 1, 96, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGE_SIZE = 16
SCALE_BYTES = 4  # of a row of a cache of 8 bits

# On CUDA: heads of 128, except where another number is the point.
CUDA_LONG = (1, 32, 8, 1, 32768, 128)
CUDA_SHAPES = (
    (1, 32, 32, 1, 32768, 128),
    (1, 32, 8, 1, 32768, 64),
    (1, 8, 2, 1, 32768, 256),
    (1, 16, 1, 1, 131072, 128),
    (8, 32, 8, 1, 4096, 128),
    (64, 32, 8, 1, 2048, 128),
)
CUDA_SEVERAL = (1, 32, 8, 8, 32768, 128)
CUDA_RAGGED = (32, 32, 8, 1, 8192, 128)
CUDA_PAGE_SIZES = (256, PAGE_SIZE)

Shape = Sequence[int]


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps small shapes."""
    if device == "cuda":
        yield from _cuda_cases(quick)
        return
    for dtype in DTYPES:
        yield _case("grouped", LONG, dtype, quick, operator=partial(_read, expanded=True))
    for dtype in (torch.float32, torch.bfloat16):
        yield _case("multi-head", MULTI_HEAD, dtype, quick, operator=_read)
        yield _case("drafted", SEVERAL, dtype, quick, operator=_read)
        yield _case("append", LONG, dtype, quick, operator=_append)
        yield _case(f"pages-{PAGE_SIZE}", LONG, dtype, quick, operator=_paged)
        yield _ragged_case(dtype, quick)
    for shape in (QUICK,) if quick else (LONG, UNGROUPED):
        yield _coded_case(shape, quick)
    yield _overhead_case()


def _cuda_cases(quick: bool) -> Iterator[Case]:
    """Sorted by importance: with a time limit the last are missing."""
    case = partial(_case, quick=quick, device="cuda")
    yield _overhead_case("cuda")
    for dtype in (torch.bfloat16, torch.float16):
        yield case("grouped", CUDA_LONG, dtype, operator=_read_on_cuda)
    dtype = torch.bfloat16
    yield case("append", CUDA_LONG, dtype, operator=_append)
    for page_size in (32, PAGE_SIZE) if quick else CUDA_PAGE_SIZES:
        paged = partial(_paged, page_size=page_size)
        yield case(f"pages-{page_size}", CUDA_LONG, dtype, operator=paged)
    yield case("drafted", CUDA_SEVERAL, dtype, operator=_read_on_cuda)
    yield _ragged_case(dtype, quick, "cuda")
    for shape in () if quick else CUDA_SHAPES:
        kind = "grouped" if shape[1] != shape[2] else "multi-head"
        yield case(kind, shape, dtype, operator=_read_on_cuda)
    yield case("append", CUDA_LONG, torch.float32, operator=_append)


def _overhead_case(device: str = "cpu") -> Case:
    return Case(
        _name("append", OVERHEAD, torch.float32),
        _append(OVERHEAD),
        partial(_tensors, OVERHEAD, torch.float32, new_rows=1, device=device),
        False,
        None,
        device=device,
        compiles=False,
    )


def _case(
    kind: str,
    shape: Shape,
    dtype: torch.dtype,
    quick: bool,
    *,
    operator: Callable[[Shape], Operator],
    device: str = "cpu",
) -> Case:
    if quick:
        shape = QUICK
    new_rows = 1 if kind == "append" else 0
    return Case(
        _name(kind, shape, dtype),
        operator(shape),
        partial(_tensors, shape, dtype, new_rows=new_rows, device=device),
        False,
        None,
        cold=not quick,
        compiles=False,
        **_memory(shape, dtype, [shape[4]] * shape[0], device),
    )


def _ragged_case(dtype: torch.dtype, quick: bool, device: str = "cpu") -> Case:
    shape = QUICK if quick else CUDA_RAGGED if device == "cuda" else RAGGED
    batch, keys = shape[0], shape[4]
    lengths = [int(keys * FILL[b % len(FILL)]) for b in range(batch)]
    return Case(
        _name("ragged", shape, dtype),
        _ragged(shape, lengths),
        partial(_tensors, shape, dtype, device=device),
        False,
        None,
        cold=not quick,
        compiles=False,
        **_memory(shape, dtype, lengths, device),
    )


def _coded_case(shape: Shape, quick: bool) -> Case:
    """A cache of 8 bits, against one of bfloat16: both ours and torch's."""
    dtype = torch.bfloat16
    rows = 2 * shape[0] * shape[2] * shape[4]
    return Case(
        _name("codes", shape, dtype),
        _coded(),
        partial(_coded_tensors, shape, dtype),
        False,
        None,
        cold=not quick,
        compiles=False,
        reads=rows * (shape[5] + SCALE_BYTES),
    )


def _memory(shape: Shape, dtype: torch.dtype, lengths: Sequence[int], device: str) -> dict:
    """The baseline of a case, and how it is called."""
    read = _bytes(shape, dtype, lengths)
    if device == "cuda":
        return {"device": device, "moved": read, "graphs": True}
    return {"reads": read}


# ---- operators -----------------------------------------------------------------------------------


def _stock(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    return (F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1]),)


def _mask(shape: Shape) -> Tensor | None:
    """The mask of the last rows of a causal square, if there are several."""
    seq_q, keys = shape[3], shape[4]
    if seq_q == 1:
        return None
    return torch.ones(seq_q, keys, dtype=torch.bool, device="cpu").tril(keys - seq_q)


def _formula(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, ...]:
    return reference(q, k, v, window_right=0, **options)[:1]


class _Held:
    """A tensor that every call reads, copied once to a device when it is first used."""

    def __init__(self, tensor: Tensor):
        self._copies = {tensor.device: tensor}

    def __call__(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = next(iter(self._copies.values())).to(device)
        return self._copies[device]


def _read(shape: Shape, expanded: bool = False) -> Operator:
    mask, group = _mask(shape), shape[1] // shape[2]
    held = _Held(mask) if mask is not None else lambda device: None

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _stock(q, *(t.repeat_interleave(group, 1) for t in (k, v)), held(q.device))

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _stock(q, k, v, held(q.device))

    return Operator(
        lambda q, k, v: (functional.attention_with_kv_cache(q, k, v, is_causal=True),),
        stock,
        _formula,
        base=stock,
        others={"expanded": repeated} if expanded else {},
    )


def _read_on_cuda(shape: Shape) -> Operator:
    """Besides torch's choice each of its back ends, and repeated heads, which all of them take."""
    read = _read(shape, expanded=shape[1] != shape[2])

    def through(backend: SDPBackend) -> Callable[..., tuple[Tensor, ...]]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            with sdpa_kernel(backend):
                return read.stock(q, k, v)

        return call

    optional = {name: through(backend) for name, backend in BACKENDS.items()} | read.others
    return Operator(read.ours, read.stock, read.formula, read.base, optional=optional)


def _coded() -> Operator:
    attend = functional.attention_with_kv_cache

    def ours(q: Tensor, k: Tensor, v: Tensor, *coded: Tensor) -> tuple[Tensor, ...]:
        k_codes, k_scale, v_codes, v_scale = coded
        return (attend(q, k_codes, v_codes, k_scale=k_scale, v_scale=v_scale),)

    def numbers(dtype: torch.dtype, codes: Tensor, scale: Tensor) -> Tensor:
        return (codes * scale[..., None]).to(dtype)

    def formula(q: Tensor, k: Tensor, v: Tensor, *coded: Tensor) -> tuple[Tensor, ...]:
        return _formula(q, coded[0], coded[2], k_scale=coded[1], v_scale=coded[3])

    return Operator(
        ours,
        lambda q, k, v, *_: _stock(q, k, v),
        formula,
        base=lambda q, k, v, *c: _stock(q, numbers(q.dtype, *c[:2]), numbers(q.dtype, *c[2:])),
        others={"ours, bfloat16": lambda q, k, v, *_: (attend(q, k, v),)},
    )


def _append(shape: Shape) -> Operator:
    """A step: the new row goes after the rows in use, which leave one row free."""
    used = shape[4] - 1
    lengths = _Held(torch.full((shape[0],), used, dtype=torch.int32, device="cpu"))

    def ours(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        attend = functional.attention_with_kv_cache
        return (attend(q, k, v, key, value, cache_seqlens=lengths(q.device), is_causal=True),)

    def stock(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        k[:, :, used:] = key
        v[:, :, used:] = value
        return _stock(q, k, v)

    def formula(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return _formula(q, k, v, key=key, value=value, cache_seqlens=lengths(q.device))

    return Operator(ours, stock, formula, base=stock)


def _paged(shape: Shape, page_size: int = PAGE_SIZE) -> Operator:
    """The caches as pages in random order; torch gathers them first."""
    batch, _, kv_heads, _, keys, head_dim = shape
    pages = keys // page_size
    table = _Held(torch.randperm(batch * pages, device="cpu").view(batch, pages).to(torch.int32))
    lengths = _Held(torch.full((batch,), keys, dtype=torch.int32, device="cpu"))

    def pool(t: Tensor) -> Tensor:
        return t.view(batch * pages, page_size, kv_heads, head_dim)

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        gathered = (
            pool(t)[table(t.device)].view(batch, keys, kv_heads, head_dim).transpose(1, 2)
            for t in (k, v)
        )
        return _stock(q, *gathered)

    def options(device: torch.device) -> dict[str, Tensor]:
        return {"cache_seqlens": lengths(device), "block_table": table(device)}

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (functional.attention_with_kv_cache(q, pool(k), pool(v), **options(q.device)),)

    return Operator(
        ours,
        stock,
        lambda q, k, v: _formula(q, pool(k), pool(v), **options(q.device)),
        base=stock,
    )


def _ragged(shape: Shape, lengths: Sequence[int]) -> Operator:
    """Caches in use up to different lengths, which torch gets as a mask."""
    of_sequences = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    mask = _Held((torch.arange(shape[4], device="cpu") < of_sequences[:, None])[:, None, None])
    used = _Held(of_sequences)
    attend = functional.attention_with_kv_cache

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _stock(q, k, v, mask(q.device))

    return Operator(
        lambda q, k, v: (attend(q, k, v, cache_seqlens=used(q.device)),),
        stock,
        lambda q, k, v: _formula(q, k, v, cache_seqlens=used(q.device)),
        base=stock,
        others={"all as long": lambda q, k, v: (attend(q, k, v),)},
    )


# ---- tensors -------------------------------------------------------------------------------------


def _tensors(
    shape: Shape, dtype: torch.dtype, new_rows: int = 0, device: str = "cpu"
) -> list[Tensor]:
    """query, k_cache, v_cache, and key and value where there are new rows."""
    batch, heads, kv_heads, seq_q, keys, head_dim = shape
    caches = [(batch, kv_heads, keys, head_dim)] * 2
    new = [(batch, kv_heads, new_rows, head_dim)] * 2 if new_rows else []
    sizes = [(batch, heads, seq_q, head_dim), *caches, *new]
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


def _coded_tensors(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """query, the caches, and the codes and scales of each."""
    query, *caches = _tensors(shape, dtype)
    return [query, *caches, *(tensor for cache in caches for tensor in quantize_rows(cache))]


def _bytes(shape: Shape, dtype: torch.dtype, lengths: Sequence[int]) -> int:
    """Bytes of the keys and values in use."""
    return 2 * sum(lengths) * shape[2] * shape[5] * dtype.itemsize


def _name(kind: str, shape: Shape, dtype: torch.dtype) -> str:
    batch, heads, kv_heads, seq_q, keys, head_dim = shape
    of_heads = f"{heads}on{kv_heads}" if heads != kv_heads else f"{heads}"
    sizes = f"{batch}x{of_heads}x{seq_q}x{keys}x{head_dim}"
    return f"decode/{kind}/{str(dtype).removeprefix('torch.')}/{sizes}"
