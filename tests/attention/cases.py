"""The attention family under one description, so that a test body serves every combination."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import numerics
from onepass.reference import attention as reference_module
from onepass.reference.products import factors
from tests.attention.tensor_cores import Tf32Products, lse_in_float32
from tests.support.dtypes import BF16, F16, F32, F64

reference, weigh = reference_module.attention, reference_module._weigh

DTYPES = (F32, BF16, F16, F64)
NAN = float("nan")

# Bits of attention_backward's grad_mask, and the names of its gradients, in their order.
GRADIENTS = dict(query=1, key=2, value=4, bias=8, sinks=16, alibi_slopes=32)
OPTIONAL = ("bias", "mask", "cu_seq_q", "cu_seq_k", "seqused_k", "block_table")
OPTIONAL += ("alibi_slopes", "sinks", "seed", "block_mask")


def within_window(case, distance: Tensor) -> Tensor:
    """Whether a query sees the key `distance` places before it, by a case's window."""
    seen = torch.ones_like(distance, dtype=torch.bool)
    if case.window_left >= 0:
        seen &= distance <= case.window_left
    if case.window_right >= 0:
        seen &= -distance <= case.window_right
    return seen


@dataclass(frozen=True)
class Case:
    """One attention; `storage` is the layout of its sequences in memory.

    dense   (batch, heads, seq, dim), all of one length
    used    the same, with seqused_k; keys that are not used are NaN. All have seq_q queries
    packed  (total, heads, dim) and cu_seq_*
    packed used  with seqused_k as well; keys that are not used are NaN
    paged   keys in pages and seqused_k; rows that no sequence uses are NaN. No gradients
    """

    dtype: torch.dtype = F32
    head_dim: int = 64
    value_dim: int = 0  # 0: head_dim
    batch: int = 2
    heads: int = 2
    kv_heads: int = 0  # 0: heads
    seq_q: int = 129
    seq_k: int = 129
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False
    bias: str | None = None  # which of b(atch), h(eads), q(ueries) are not broadcast
    bias_dtype: torch.dtype | None = None
    mask: str | None = None  # likewise
    alibi: str | None = None  # "" slopes per head, "b" per batch and head
    sinks: torch.dtype | None = None  # their dtype
    softcap: float = 0.0
    dropout_p: float = 0.0
    dlse: bool = False  # the gradient of the lse as well
    storage: str = "dense"
    lengths: tuple[tuple[int, int], ...] = ()  # (queries, keys) of each sequence; (): a few kinds
    page_size: int = 16
    query_offset: int = 0
    key_offset: int = 0
    factor: float = 1.3  # of scale: not the default
    tf32: bool = False  # torch allows it: for float32 on CUDA
    rounded: bool = False  # the factors of products, to bfloat16: for float32 on the CPU
    draw: int = 0  # which random numbers

    @property
    def scale(self) -> float:
        return self.factor / math.sqrt(self.head_dim)

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        q, k = self.seq_q, self.seq_k
        if self.storage == "dense" and not self.lengths:
            return ((q, k),) * self.batch
        lengths = self.lengths or (
            (q, (k + 1) // 2), ((q + 2) // 3, k), (0, k // 2), (q // 2, k // 3),
        )  # fmt: skip
        if self.storage == "used":
            most = max(queries for queries, _ in lengths)
            return tuple((most, keys) for _, keys in lengths)
        return lengths

    @property
    def stored(self) -> tuple[list[int], list[int]]:
        """How many queries and keys of each sequence there are in memory, used or not."""
        queries, keys = (
            list(n) for n in (zip(*self.sequences, strict=True) if self.sequences else ((), ()))
        )
        if "used" in self.storage:
            keys = [n + 1 + 2 * b for b, n in enumerate(keys)]
        return queries, keys

    @property
    def packed(self) -> bool:
        return self.storage.startswith("packed") or self.storage == "paged"

    def allowed(self) -> Tensor:
        """(seq_q, seq_k) whether a query of a dense call sees a key, masks aside."""
        query = torch.arange(self.seq_q)[:, None] + self.query_offset
        distance = query - torch.arange(self.seq_k) - self.key_offset
        distance = distance + (self.seq_k - self.seq_q if self.bottom_right else 0)
        return within_window(self, distance)

    def options(self) -> dict:
        """The keyword arguments that are no tensors."""
        names = "window_left window_right bottom_right softcap dropout_p scale query_offset "
        names += "key_offset"
        numbers = {name: getattr(self, name) for name in names.split()}
        if self.rounded:
            numbers["round_factors"] = True
        if self.packed:
            numbers["max_q"], numbers["max_k"] = (max(n) for n in self.stored)
        return numbers

    def permissions(self) -> dict:
        """The keyword arguments that the definition does not have."""
        return dict(allow_tf32=True) if self.tf32 else {}

    def tensors(self) -> dict[str, Tensor]:
        """All arguments that are tensors, and the gradients of the outputs: doutput, dlse."""
        generator = torch.Generator().manual_seed(self.draw)
        wide = F64 if self.dtype is F64 else F32

        def normal(*shape, dtype=self.dtype):
            return torch.randn(shape, generator=generator).to(dtype)

        stored_q, stored_k = self.stored
        seq_q, seq_k = (max(n, default=0) for n in self.stored)
        if self.storage == "dense":
            seq_q, seq_k = self.seq_q, self.seq_k  # of no batch, too
        batch, heads, kv_heads = len(stored_q), self.heads, self.kv_heads or self.heads
        value_dim = self.value_dim or self.head_dim
        t = {}
        if self.packed:
            t["query"] = normal(sum(stored_q), heads, self.head_dim)
            t["key"] = normal(sum(stored_k), kv_heads, self.head_dim)
            t["value"] = normal(sum(stored_k), kv_heads, value_dim)
            t["doutput"] = normal(sum(stored_q), heads, value_dim)
            dlse = normal(heads, sum(stored_q), dtype=wide)
            t["cu_seq_q"] = cumulated(stored_q)
            if self.storage != "paged":
                t["cu_seq_k"] = cumulated(stored_k)
        else:
            t["query"] = normal(batch, heads, seq_q, self.head_dim)
            t["key"] = normal(batch, kv_heads, seq_k, self.head_dim)
            t["value"] = normal(batch, kv_heads, seq_k, value_dim)
            t["doutput"] = normal(batch, heads, seq_q, value_dim)
            dlse = normal(batch, heads, seq_q, dtype=wide)
        if self.dlse:
            t["dlse"] = dlse
        if "used" in self.storage:
            keys = [n for _, n in self.sequences]
            t["seqused_k"] = int32(keys)
            for b, length in enumerate(keys):
                for name in ("key", "value"):
                    sequence_rows(t, name, b)[length:] = NAN
        elif self.storage == "paged":
            paginate(t, stored_k, self.page_size, generator)

        full = dict(b=batch, h=heads, q=seq_q)
        if self.bias is not None:
            size = (n if name in self.bias else 1 for name, n in full.items())
            # Exact in 16 bits, so that its rounding is no part of what stock PyTorch may err by.
            t["bias"] = normal(*size, seq_k, dtype=BF16).to(self.bias_dtype or self.dtype)
        if self.mask is not None:
            size = [n if name in self.mask else 1 for name, n in full.items()]
            mask = torch.rand((*size, seq_k), generator=generator) < 0.7
            mask[..., 1:2, :] &= size[2] == 1  # a row without keys
            mask[..., 64:192] = False  # whole tiles
            t["mask"] = mask
        if self.alibi is not None:
            size = (batch, heads) if self.alibi == "b" else (heads,)
            slopes = torch.rand(size, generator=generator) / 16
            t["alibi_slopes"] = slopes.bfloat16().float()
        if self.sinks is not None:
            t["sinks"] = normal(heads, dtype=BF16).to(self.sinks)
        if self.dropout_p:
            t["seed"] = torch.tensor([-0x0123456789ABCDEF + self.draw, 2**40 + 5])
        return t


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def cumulated(lengths: Sequence[int]) -> Tensor:
    """cu_seq_* of sequences of these lengths."""
    return int32([0, *itertools.accumulate(lengths)])


def sequence_rows(tensors: dict[str, Tensor], name: str, sequence: int) -> Tensor:
    """(seq, heads, dim) the rows of one sequence of the query, key or value."""
    bounds = tensors.get("cu_seq_q" if name == "query" else "cu_seq_k")
    if bounds is None:
        return tensors[name][sequence].transpose(0, 1)
    return tensors[name][bounds[sequence] : bounds[sequence + 1]]


def paginate(t: dict[str, Tensor], keys: list[int], page_size: int, generator) -> None:
    """Distributes packed keys and values over shuffled pages; the rest of the pages is NaN."""
    pages = [-(-length // page_size) for length in keys]
    order = torch.randperm(sum(pages) + 2, generator=generator).tolist()
    table = torch.zeros(len(keys), max(pages) + 1, dtype=torch.int32)
    bounds = [0, *itertools.accumulate(keys)]
    for name in ("key", "value"):
        _, heads, dim = t[name].shape
        pool = torch.full((len(order), page_size, heads, dim), NAN, dtype=t[name].dtype)
        free = iter(order)
        for b, count in enumerate(pages):
            rows = t[name][bounds[b] : bounds[b + 1]]
            for page, part in enumerate(rows.split(page_size)[:count]):
                table[b, page] = next(free)
                pool[table[b, page], : len(part)] = part
        t[name] = pool
    t["block_table"], t["seqused_k"] = table, int32(keys)


# ---- the three ways to compute a case ------------------------------------------------------------


def keywords(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in OPTIONAL if name in tensors}


class Results(dict):
    """By name; lse_rest is no result of its own, but the backward wants it."""

    def __init__(self, results, lse_rest):
        super().__init__(results)
        self.lse_rest = lse_rest


def forward(case: Case, t: dict[str, Tensor], **changes) -> dict[str, Tensor]:
    """The raw op."""
    arguments = case.options() | case.permissions() | keywords(t) | changes
    output, lse, lse_rest = torch.ops.onepass.attention_forward(
        t["query"], t["key"], t["value"], **arguments
    )
    return Results(dict(output=output, lse=lse), lse_rest)


def backward(
    case: Case, t: dict[str, Tensor], outputs: dict[str, Tensor], wanted=GRADIENTS, **changes
) -> dict[str, Tensor]:
    """The raw op; gradients that are not wanted have size 0."""
    wanted = [name for name in wanted if name in t]
    arguments = case.options() | case.permissions() | keywords(t) | changes
    *of_inputs, of_terms = torch.ops.onepass.attention_backward(
        t.get("doutput"), t.get("dlse"), t["query"], t["key"], t["value"], outputs["output"],
        outputs["lse"], getattr(outputs, "lse_rest", None),
        grad_mask=sum(GRADIENTS[name] for name in wanted), **arguments,
    )  # fmt: skip
    named = dict(zip(GRADIENTS, (*of_inputs, *of_terms), strict=True))
    for name, gradient in named.items():
        if name not in wanted:
            assert gradient.numel() == 0, f"d{name} was not asked for"
    return {f"d{name}": named[name] for name in wanted}


def ours(case: Case, t: dict[str, Tensor] | None = None, **changes) -> dict[str, Tensor]:
    """Outputs and all gradients of the raw ops, as the reference has them."""
    t = case.tensors() if t is None else t
    results = forward(case, t, **changes)
    if case.storage != "paged":
        results |= backward(case, t, results, **changes)
    return results


def leaves(case: Case, t: dict[str, Tensor], dtype=None) -> dict[str, Tensor]:
    wanted = () if case.storage == "paged" else GRADIENTS
    return {
        name: tensor.detach().to(dtype or tensor.dtype).requires_grad_(name in wanted)
        for name, tensor in t.items()
        if name in GRADIENTS
    }


def differentiated(of: dict[str, Tensor], t: dict[str, Tensor], wrt: dict[str, Tensor]):
    """`of` and the gradients of `wrt`, by their names."""
    results = {name: result.detach() for name, result in of.items()}
    wrt = {name: tensor for name, tensor in wrt.items() if tensor.requires_grad}
    pairs = [
        (result, t[f"d{name}"].to(result.dtype))
        for name, result in of.items()
        if f"d{name}" in t and result.requires_grad
    ]
    if wrt and pairs:
        gradients = torch.autograd.grad(
            [result for result, _ in pairs], list(wrt.values()), [up for _, up in pairs],
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        results |= {f"d{n}": gradient for n, gradient in zip(wrt, gradients, strict=True)}
    return results


def definition(case: Case, t: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The reference's formula in `dtype`."""
    wrt = leaves(case, t, dtype)
    arguments = case.options() | keywords(t) | {n: wrt[n] for n in wrt if n in OPTIONAL}
    output, lse = reference(wrt["query"], wrt["key"], wrt["value"], **arguments)
    return differentiated(dict(output=output, lse=lse), t, wrt)


class WeighFromSaved(torch.autograd.Function):
    """The reference's softmax and product with a backward that takes the sum of P dP from the
    output, which is rounded to its dtype. numerics.EXCEPTIONS says why.
    """

    @staticmethod
    def forward(ctx, score, value, factor, round_factors):
        output, lse = weigh(score, value, factor, round_factors)
        (value,) = factors(round_factors, value)
        ctx.save_for_backward(score, value, factor, output)
        ctx.round_factors = round_factors
        return output, lse

    @staticmethod
    def backward(ctx, doutput, dlse):
        score, value, factor, output = ctx.saved_tensors
        p = score.softmax(-1).nan_to_num(0.0)
        (doutput,) = factors(ctx.round_factors, doutput)
        delta = (doutput * output).sum(-1) - dlse
        dp, kept = doutput @ value.mT, p[..., : value.shape[2]]
        if factor is not None:
            dp, kept = dp * factor, kept * factor
        dp = F.pad(dp, (0, p.shape[-1] - dp.shape[-1]))  # the sink has no value
        (kept,) = factors(ctx.round_factors, kept)
        return p * (dp - delta[..., None]), kept.mT @ doutput, None, None


def from_saved(case: Case, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """The definition in the input's dtype, its backward with the saved output."""
    with mock.patch.object(reference_module, "_weigh", WeighFromSaved.apply):
        return definition(case, t, case.dtype)


def exact(case: Case, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """The definition in float64. Where factors are rounded, those that are given are, and weights
    are not: kernels round them before or after the division by their sum."""
    if not case.rounded:
        return definition(case, t, F64)
    given = (name for name in ("query", "key", "value", "doutput") if name in t)
    factors = {name: t[name].bfloat16().to(t[name].dtype) for name in given}
    return definition(replace(case, rounded=False), t | factors, F64)


def stock(case: Case, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results of torch's own fused function: all but the gradients of bias and slopes,
    the output alone, or nothing.

    It is fused for masks without gradient and for one head dim: zeros pad the smaller. Elsewhere
    torch is no base for 16-bit results: it keeps the whole square in float32.
    """
    if case.storage != "dense" or case.softcap or case.sinks or case.dropout_p:
        return {}
    wrt = leaves(case, t)
    mask = None
    causal = bool(case.window_right == 0 and case.window_left < 0 and not case.bottom_right)
    plain = case.bias is None and case.mask is None and case.alibi is None
    causal &= plain and case.query_offset == case.key_offset
    if not causal and not (plain and case.allowed().all()):
        mask = case.allowed() & t.get("mask", torch.tensor(True))
        if case.bias is not None or case.alibi is not None:
            score = t.get("bias", torch.zeros(()))
            if case.alibi is not None:
                query = torch.arange(case.seq_q)[:, None] + case.query_offset
                query = query + (case.seq_k - case.seq_q if case.bottom_right else 0)
                distance = (query - torch.arange(case.seq_k) - case.key_offset).abs()
                score = score - t["alibi_slopes"][..., None, None] * distance
            if score.dtype != case.dtype:  # torch takes query's dtype or float32
                score = score.to(F64 if case.dtype is F64 else F32)
            mask = score.masked_fill(~mask, -math.inf)
    wrt = {name: wrt[name] for name in ("query", "key", "value")}
    value_dim = t["value"].shape[-1]
    wider = max(case.head_dim, value_dim)
    query, key, value = (F.pad(tensor, (0, wider - tensor.shape[-1])) for tensor in wrt.values())
    output = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=case.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )[..., :value_dim]  # fmt: skip
    if case.dlse:
        return dict(output=output.detach())
    return differentiated(dict(output=output), t, wrt)


def base(case: Case, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """torch's own function where it has one, else the formula in the input's dtype.

    The lse, which is float32 for all but float64, by the formula in float32; where operators run
    on CUDA, its products of 16-bit factors are summed as tensor cores do.
    """
    if case.tf32:
        with Tf32Products():
            return from_saved(case, t)
    if case.rounded:
        return from_saved(case, t)
    torchs = stock(case, t)
    upstream = t.keys() & {"doutput", "dlse"}
    wanted = {"output", *(f"d{name}" for name in GRADIENTS if name in t and upstream)}
    formula = from_saved(case, t) if wanted - torchs.keys() else {}
    if case.dtype not in (F32, F64) or not formula:
        with torch.no_grad():
            formula["lse"] = (
                definition(case, t, F64)["lse"]
                if case.dtype is F64
                else lse_in_float32(lambda: definition(case, t, F32))
            )
    return formula | torchs


def expected_dtypes(case: Case, t: dict[str, Tensor]) -> dict[str, torch.dtype]:
    outputs = dict(output=case.dtype, lse=F64 if case.dtype is F64 else F32)
    return outputs | {f"d{name}": t[name].dtype for name in GRADIENTS if name in t}


def draws(case: Case) -> int:
    """The number of draws that are pooled. One says little about a small attention, or a gradient
    that is one number per head. float64's bound does not depend on chance."""
    scores = case.heads * sum(q * k for q, k in case.sequences)
    if scores == 0:
        return 1
    numbers = case.sinks is not None or case.alibi is not None
    few, many = (1, 2) if case.dtype is F64 else (4 if numbers else 2, 10)
    return max(few, min(many, 200_000 // scores))


# The share of the rule's bound that a result may take by the fewest draws. Most take half.
CLEARLY = 0.75


def stages(case: Case, draws=draws) -> tuple[tuple[int, float], ...]:
    """(draws that a case is judged by, share of the bounds that it may take): first a few draws,
    then more if it fails.

    The largest error of 32 columns and 385 rows still halves or doubles from 50 draws to 250.
    """
    most = draws(case)
    return (min(most, 2), CLEARLY), (most, 1.0), (5 * most, 1.0), (25 * most, 1.0)


def pool(case: Case) -> tuple[Case, ...]:
    """If every row has one key, P is 1 and gradients of scores are 0 up to cancellation, which may
    be exact in torch. So a case of more keys is pooled with it."""
    if case.storage == "dense" and case.seq_k == 1:
        return case, replace(case, seq_k=3)
    if case.seq_q == 1 and case.window_right == 0 and not case.bottom_right:
        return case, replace(case, bottom_right=True)
    return (case,)


def compute(
    case: Case, change: Callable[[dict], dict] = lambda t: {}
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(ours, the definition in float64, the base of the rule) of one draw, whose tensors
    `change` has changed."""
    t = case.tensors()
    t |= change(t)
    before = {name: tensor.clone() for name, tensor in t.items()}
    found, ref = ours(case, t), exact(case, t)
    for name, tensor in t.items():
        assert equal(tensor, before[name]), f"{name} was written"
    assert found.keys() == ref.keys()
    for name, dtype in expected_dtypes(case, t).items():
        assert name not in found or found[name].dtype == dtype, f"{case}: {name}"
    return found, ref, ref if case.dtype is F64 else base(case, t)


def check_changed(case: Case, change: Callable[[dict], dict]) -> None:
    """As check, with every draw's tensors changed by `change`."""
    check(case, functools.partial(compute, change=change))


def check(case: Case, compute=compute) -> None:
    """Every output and gradient by the numerics rule."""
    judge(case, compute, stages(case), pool(case))


def judge(case, compute, stages, pool=None) -> None:
    """Every result of `compute` by the numerics rule, for draws of the case, or of those of `pool`.

    The largest of few errors is a matter of chance, in ours and in the base. Some of several
    hundred cases fail by it: they are judged by more draws, in which a real error remains.
    """
    pool, results = pool or (case,), []
    for count, share in stages:
        numbers = range(len(results) // len(pool), count)
        results += [compute(replace(c, draw=draw)) for draw in numbers for c in pool]
        pooled = {
            name: [[result[i][name] for result in results] for i in range(3)]
            for name in results[0][1]
        }
        if all(takes_at_most(share, numerics.compare(*t)) for t in pooled.values()):
            return
    for name, tensors in pooled.items():
        numerics.assert_close(*tensors, f"{case}: {name}")


def takes_at_most(share: float, found: numerics.Comparison) -> bool:
    pairs = (found.max_error, found.bound), (found.bias, found.bias_bound)
    return found.ok and all(taken <= share * bound for taken, bound in pairs)


def reserved(numel: int, dtype: torch.dtype) -> Tensor:
    """A buffer beyond 2^31 elements, of which a test touches few pages."""
    assert numel > 2**31
    try:
        return torch.empty(numel, dtype=dtype)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        pytest.skip(
            f"{numel * dtype.itemsize >> 30} GiB, of which few pages are touched, cannot be "
            "reserved: limited by ulimit -v or vm.overcommit_memory"
        )


def equal(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, except the kind of NaN."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], text: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, result in expected.items():
        assert equal(found[name], result), f"{text} {name}"


def combination(row: dict) -> Case:
    """The case of a row of `pairwise`."""
    row = dict(row)
    (seq_q, seq_k), (heads, kv_heads) = row.pop("length"), row.pop("group")
    left, right, bottom_right = row.pop("window")
    sinks = row.pop("sinks")
    if sinks is not None:
        sinks = row["dtype"] if sinks == "dtype" or row["dtype"] is F64 else sinks
    # A float64 bias goes with float64 alone; elsewhere it has query's dtype here.
    return Case(
        seq_q=seq_q, seq_k=seq_k, heads=heads, kv_heads=kv_heads, window_left=left,
        window_right=right, bottom_right=bottom_right, sinks=sinks, **row,
    )  # fmt: skip
