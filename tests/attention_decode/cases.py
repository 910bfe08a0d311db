"""Attention against a KV cache under one description, as attention/cases.py is of attention."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.reference import attention_decode as reference
from tests.attention import cases as attention_cases
from tests.attention.cases import NAN, assert_same, equal, int32, within_window
from tests.attention.tensor_cores import lse_in_float32
from tests.support.calls.memory import bytes_of
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.results import bits

__all__ = ["BF16", "F16", "F32", "F64", "NAN", "assert_same", "equal", "int32"]

DTYPES = (F32, BF16, F16)
GUARD = 64  # elements around a cache that must not be written
LOCATED = ("cache_seqlens", "block_table", "cache_batch_idx", "cache_leftpad")
SCORED = ("alibi_slopes", "sinks")
ROTARY = ("rotary_cos", "rotary_sin")


@dataclass(frozen=True)
class Case:
    """One step of sequences that have `lengths` keys in their caches.

    The random numbers depend on sizes alone: storing the same keys in another way (`page_size`,
    `pads`, `scattered`, `room`) gives the same query, keys and values. Rows that are not keys are
    NaN.
    """

    dtype: torch.dtype = F32
    head_dim: int = 64
    value_dim: int = 0  # 0: head_dim
    heads: int = 4
    kv_heads: int = 2
    seq_q: int = 1
    lengths: tuple[int, ...] = (257, 0, 1, 70)
    new_rows: int = -1  # appended; -1: attention_decode, which appends none
    page_size: int = 0  # 0: dense caches
    pads: tuple[int, ...] = ()  # rows before the keys, by turns; (): no cache_leftpad
    scattered: bool = False  # dense: caches in any order, some of them unused
    room: int = 3  # dense: rows after those of the longest sequence
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi: str | None = None  # "" slopes per head, "b" per batch and head
    sinks: torch.dtype | None = None  # their dtype
    rotary: str | None = None  # "interleaved", "halves"
    rotary_dim: int = 0  # 0: all of head_dim that is even
    rotary_dtype: torch.dtype | None = None  # None: query's
    out_bshd: bool = False
    factor: float = 1.3  # of scale: not the default
    draw: int = 0  # which random numbers

    @property
    def scale(self) -> float:
        return self.factor / math.sqrt(self.head_dim)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def appends(self) -> int:
        return max(self.new_rows, 0)

    @property
    def used(self) -> list[int]:
        """Rows of each sequence's cache before the call, padding included."""
        return [pad + keys for pad, keys in zip(self.padding, self.lengths, strict=True)]

    @property
    def padding(self) -> list[int]:
        pads = self.pads or (0,)
        return [pads[b % len(pads)] for b in range(self.batch)]

    def seen(self, keys: int) -> Tensor:
        """(seq_q, keys) whether a row of the query sees a key."""
        distance = torch.arange(self.seq_q)[:, None] + keys - self.seq_q - torch.arange(keys)
        return within_window(self, distance)

    def options(self) -> dict:
        """The keyword arguments that are no tensors, of the reference too."""
        names = "window_left window_right scale softcap"
        return {name: getattr(self, name) for name in names.split()}

    def tensors(self) -> dict[str, Tensor]:
        """All arguments that are tensors."""
        generator = torch.Generator().manual_seed(self.draw)

        def normal(*shape, dtype=self.dtype):
            return torch.randn(shape, generator=generator).to(dtype)

        dims = dict(k_cache=self.head_dim, v_cache=self.value_dim or self.head_dim)
        t = dict(query=normal(self.batch, self.heads, self.seq_q, self.head_dim))
        keys = {
            name: [normal(self.kv_heads, length, dim) for length in self.lengths]
            for name, dim in dims.items()
        }
        if self.new_rows >= 0:
            for name, dim in (("key", dims["k_cache"]), ("value", dims["v_cache"])):
                t[name] = normal(self.batch, self.kv_heads, self.new_rows, dim)
        if self.alibi is not None:
            size = (self.batch, self.heads) if self.alibi == "b" else (self.heads,)
            # Exact in 16 bits, so that stock PyTorch's error contains no rounding of it.
            t["alibi_slopes"] = (torch.rand(size, generator=generator) / 16).bfloat16().float()
        if self.sinks is not None:
            t["sinks"] = normal(self.heads, dtype=BF16).to(self.sinks)
        pairs = (self.rotary_dim or self.head_dim) // 2
        if self.rotary is not None and pairs:
            by_row = self.window_left >= 0 or self.window_right >= 0
            rows = max(self.seq_q if by_row else 1, self.appends)
            angle = torch.arange(max(self.used, default=0) + rows)[:, None].double()
            angle = angle * 10000.0 ** (-torch.arange(pairs) / pairs)
            dtype = self.rotary_dtype or self.dtype
            t["rotary_cos"], t["rotary_sin"] = angle.cos().to(dtype), angle.sin().to(dtype)
        return t | self.stored(keys, dims)

    def stored(self, keys: dict[str, list[Tensor]], dims: dict[str, int]) -> dict[str, Tensor]:
        """Caches that hold (kv_heads, length, dim) keys and values, and where they do."""
        generator = torch.Generator().manual_seed(self.draw + 1)
        t = dict(cache_seqlens=int32(self.used))
        if self.pads:
            t["cache_leftpad"] = int32(self.padding)
        totals = [used + self.appends for used in self.used]
        if self.page_size:
            pages = [-(-total // self.page_size) for total in totals]
            order = torch.randperm(sum(pages) + 2, generator=generator).int()
            table = torch.full((self.batch, max(pages, default=0) + 1), -7, dtype=torch.int32)
            for b, own in enumerate(order[: sum(pages)].split(pages)):
                table[b, : len(own)] = own
            t["block_table"] = table
            size = (len(order), self.page_size, self.kv_heads)
        elif self.scattered:
            order = torch.randperm(self.batch + 2, generator=generator).int()
            t["cache_batch_idx"] = order[: self.batch].clone()
            size = (len(order), self.kv_heads, max(totals, default=0) + self.room)
        else:
            size = (self.batch, self.kv_heads, max(totals, default=0) + self.room)
        for name, dim in dims.items():
            t[name] = carved((*size, dim), self.dtype)
            for b, own in enumerate(keys[name]):
                write(t, name, b, self.padding[b], own)
        return t


def carved(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """NaNs inside a larger buffer, whose storage :func:`ours` compares as a whole."""
    count = math.prod(size)
    buffer = torch.full((count + 2 * GUARD,), NAN).to(dtype)
    return buffer[GUARD : GUARD + count].view(*size)


def located(t: dict[str, Tensor], name: str, b: int, first: int, last: int) -> tuple:
    return reference.rows(
        t[name], b, first, last, t.get("block_table"), t.get("cache_batch_idx")
    )  # fmt: skip


def read(t: dict[str, Tensor], name: str, b: int, first: int, last: int) -> Tensor:
    """(kv_heads, rows, dim) of a sequence's cache."""
    found = t[name][located(t, name, b, first, last)]
    return found.clone() if "block_table" not in t else found.transpose(0, 1)


def write(t: dict[str, Tensor], name: str, b: int, first: int, rows: Tensor) -> None:
    where = located(t, name, b, first, first + rows.shape[1])
    t[name][where] = (rows.transpose(0, 1) if "block_table" in t else rows).to(t[name].dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


def assert_bits(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other)


def assert_caches(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in ("k_cache", "v_cache"):
        assert same_bits(found[name], expected[name]), name


# ---- the three ways to compute a case ------------------------------------------------------------


def keywords(t: dict[str, Tensor]) -> dict[str, Tensor]:
    names = LOCATED + SCORED + (ROTARY if "key" in t else ())
    return {name: t[name] for name in names if name in t}


def call(case: Case, t: dict[str, Tensor], **changes) -> tuple[Tensor, Tensor]:
    """The raw op, which writes into t's own caches if there is a key."""
    arguments = case.options() | keywords(t) | dict(out_bshd=case.out_bshd)
    if "key" not in t:
        return torch.ops.onepass.attention_decode(
            t["query"], t["k_cache"], t["v_cache"], **arguments | changes
        )
    if "rotary_cos" in t:
        arguments["rotary_interleaved"] = case.rotary != "halves"
    return torch.ops.onepass.attention_decode_append(
        t["query"], t["k_cache"], t["v_cache"], t["key"], t["value"], **arguments | changes
    )


def with_copied_caches(t: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with caches of the same strides in copies of their storages."""
    copies = {
        name: t[name]
        .new_empty(0)
        .set_(t[name].untyped_storage().clone())
        .as_strided(t[name].shape, t[name].stride(), t[name].storage_offset())
        for name in ("k_cache", "v_cache")
    }
    return t | copies


def appended(case: Case, t: dict[str, Tensor], name: str) -> list[Tensor]:
    """(kv_heads, new_rows, dim) of each sequence, read from its cache after the old rows."""
    return [read(t, name, b, used, used + case.appends) for b, used in enumerate(case.used)]


def ours(case: Case, t: dict[str, Tensor] | None = None, **changes) -> dict[str, Tensor]:
    """Output, lse and the appended rows; asserts that nothing else has changed."""
    t = case.tensors() if t is None else t
    before = {name: x.clone() for name, x in t.items() if name not in ("k_cache", "v_cache")}
    after = with_copied_caches(t)
    output, lse = call(case, after, **changes)
    for name, x in before.items():
        assert equal(t[name], x), f"{name} was written"
    results = dict(output=output, lse=lse)
    for name in ("k_cache", "v_cache"):
        if "key" in t:
            new = appended(case, after, name)
            # Storages must be unchanged, except for the rows that were to be written.
            for b, used in enumerate(case.used):
                old = read(t, name, b, used, used + case.appends)
                write(after, name, b, used, old)
            results[name] = torch.stack(new) if new else t["key"].new_empty(0)
        now, then = bytes_of(after[name]), bytes_of(t[name])
        assert torch.equal(now, then), f"{name} was written where nothing is new"
    if "v_cache" in results and case.batch:
        assert same_bits(results["v_cache"], t["value"])
        if "rotary_cos" not in t:
            assert same_bits(results["k_cache"], t["key"])
    return results


def definition(case: Case, t: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The reference's formula in `dtype`."""
    arguments = case.options()
    # rotary_cos and _sin stay as they are: they are widened where they are used.
    arguments |= {name: x.to(dtype) if name in SCORED else x for name, x in keywords(t).items()}
    if "rotary_cos" in t:
        arguments["rotary_interleaved"] = case.rotary != "halves"
    wide = {
        name: t[name].to(dtype, copy=True)
        for name in ("query", "k_cache", "v_cache", "key", "value")
        if name in t
    }
    output, lse = reference.attention_decode(**wide, **arguments)
    results = dict(output=output, lse=lse)
    if "key" in t and case.batch:
        results |= {
            name: torch.stack(appended(case, t | wide, name)) for name in wide if "_" in name
        }
    return results


def base(case: Case, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """The formula in the input's dtype, the output by torch's own function where it has one.

    The lse, which is float32, as in attention's cases, of the rotated and appended rows.
    """
    results = definition(case, t, case.dtype)
    after = {name: x for name, x in t.items() if name not in ("key", "value", *ROTARY)}
    if "key" in t:
        after = with_copied_caches(after)
        after["cache_seqlens"] = t["cache_seqlens"] + case.appends
        for b, used in enumerate(case.used):
            for name in ("k_cache", "v_cache"):
                write(after, name, b, used, results[name][b])
        if "rotary_cos" in t and case.batch:
            after["query"] = rotated_query(case, t)
    if case.dtype is not F32:
        results["lse"] = lse_in_float32(lambda: definition(case, after, F32))
    return results | stock(case, after)


def rotated_query(case: Case, t: dict[str, Tensor]) -> Tensor:
    by_row = case.window_left >= 0 or case.window_right >= 0
    interleaved = case.rotary != "halves"
    return reference.rotate_at(
        t["query"], case.used, t["rotary_cos"], t["rotary_sin"], interleaved, by_row
    )


def stock(case: Case, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """torch's fused function on each sequence's gathered keys; nothing if it refuses the call."""
    if case.softcap or "sinks" in t or case.batch == 0:
        return {}
    outputs = []
    for b, (pad, used) in enumerate(zip(case.padding, t["cache_seqlens"].tolist(), strict=True)):
        key, value = (read(t, name, b, pad, used)[None] for name in ("k_cache", "v_cache"))
        keys, value_dim = key.shape[2], value.shape[3]
        if keys == 0:
            outputs.append(t["query"].new_zeros(1, case.heads, case.seq_q, value_dim))
            continue
        mask = seen = case.seen(keys)
        if "alibi_slopes" in t:
            slopes = t["alibi_slopes"] if case.alibi == "" else t["alibi_slopes"][b]
            distance = torch.arange(case.seq_q)[:, None] + keys - case.seq_q - torch.arange(keys)
            mask = -slopes[:, None, None] * distance.abs()
            mask = mask.masked_fill(~seen, -math.inf)[None]
        elif seen.all():
            mask = None
        # It is fused for one head dim: zeros pad the smaller.
        wider = max(case.head_dim, value_dim)
        query, key, value = (
            F.pad(x, (0, wider - x.shape[-1])) for x in (t["query"][b : b + 1], key, value)
        )
        output = F.scaled_dot_product_attention(
            query, key, value, mask, scale=case.scale, enable_gqa=case.heads != case.kv_heads
        )
        outputs.append(output[..., :value_dim])
    return dict(output=torch.cat(outputs))


# ---- is it right? --------------------------------------------------------------------------------


def draws(case: Case) -> int:
    """How many draws are pooled at first: a small attention needs several."""
    scores = case.heads * case.seq_q * (sum(case.lengths) + case.batch * case.appends)
    return max(2, min(10, 20_000 // max(scores, 1)))


def stages(case: Case) -> tuple[tuple[int, float], ...]:
    """As attention_cases.stages."""
    return attention_cases.stages(case, draws)


def compute(
    case: Case, change: Callable[[dict], dict] = lambda t: {}
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(ours, the definition in float64, the base) of one draw, its tensors changed by `change`."""
    t = case.tensors()
    t |= change(t)
    found = ours(case, t)
    order = found["output"].transpose(1, 2) if case.out_bshd else found["output"]
    assert order.is_contiguous() and found["lse"].is_contiguous()
    assert found["output"].dtype is case.dtype and found["lse"].dtype is F32
    return found, definition(case, t, F64), base(case, t)


def check_changed(case: Case, change: Callable[[dict], dict]) -> None:
    """As check, with every draw's tensors changed by `change`."""
    check(case, functools.partial(compute, change=change))


def check(case: Case, compute: Callable = compute) -> None:
    """Every result by the numerics rule."""
    attention_cases.judge(case, compute, stages(case))


# ---- batches ----------------------------------------------------------------------------------

# For CUDA: batches for each way of dividing the work.
BATCHES = {
    "chunks": Case(BF16, 64, lengths=(700, 130, 0, 300), new_rows=1),
    "rows": Case(F32, 40, 24, lengths=(500, 130, 0), seq_q=7, new_rows=7, window_right=0),
    "tiles": Case(F16, 64, heads=24, kv_heads=2, lengths=(300, 140), seq_q=3, new_rows=3,
                  rotary="halves", window_right=0, alibi="b", sinks=F32, softcap=3.0),
    "paged": Case(BF16, 59, 72, lengths=(700, 130, 0, 64), page_size=16, pads=(0, 3)),
    "runs": Case(BF16, 8, heads=8, kv_heads=8, lengths=(2500, 300, *range(15)), page_size=16),
    "whole sequences": Case(F32, 8, heads=16, kv_heads=16, lengths=(2500, 300, *range(62)),
                            page_size=16),
}  # fmt: skip
# The last has a thousand blocks.
quick_batches = [*list(BATCHES)[:-1], pytest.param("whole sequences", marks=pytest.mark.slow)]
