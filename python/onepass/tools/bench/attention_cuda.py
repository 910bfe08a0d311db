"""Cases of the attention family on CUDA: the shapes that attention is measured by, of 16,384 tokens
and heads that are 2,048 wide together, against each of torch's ways to compute it.

"eager" is F.scaled_dot_product_attention as it chooses by itself; flash, efficient and cudnn are
the back ends that it chooses among, flex is torch's compiled flex_attention. What a torch or a
device does not have is left out. Attention is bound by arithmetic, so its ceiling is torch's
product of large matrices, by useful operations, as on the CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass import functional
from onepass.reference.attention import attention as reference
from onepass.tools.bench.attention_parts import (
    FILL,
    case_of,
    dense,
    dropped,
    overhead_cases,
    pairs,
    randn,
    tensors,
)
from onepass.tools.bench.case import Case, Operator

TOKENS, WIDTH = 16384, 2048
# Where time runs out, the last are missing.
HEAD_DIMS = (128, 64, 256)
SEQS = (4096, 16384, 1024, 8192, 2048, 512)
FLEX_SEQ = 4096  # alone: compiling it takes seconds per case
PHASES = ("forward", "backward")
KINDS = ("causal", "full")
MASKED = (8, 16, 2048, 128)  # a mask, a bias or dropout beside none
GROUPED = (4, 16, 4096, 128)
KV_HEADS = 4
WINDOWED = (2, 16, 8192, 128)
WINDOW = 1024
PACKED = (len(FILL), 16, 4096, 128)  # of FILL's shares of 4,096: 16,384 tokens
FLOAT32 = (16, 16, 1024, 128)
QUICK = (1, 2, 64, 32)
LARGE = 1 << 22  # elements of a query: smaller ones are for a smoke run, and need not be cold

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


# ---- operators -----------------------------------------------------------------------------------


def _through(backend: SDPBackend, **options):
    """torch's function on one of its back ends."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        with sdpa_kernel(backend):
            return (F.scaled_dot_product_attention(q, k, v, **options),)

    return call


class Flex:
    """torch's flex_attention, compiled at the first call; blocks(query) is its BlockMask."""

    def __init__(self, blocks: Callable[[Tensor], object]):
        self._blocks = blocks
        self._compiled = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        from torch.nn.attention.flex_attention import flex_attention

        if self._compiled is None:
            # Compiled functions of one source share a cache of few entries; a full one means eager.
            torch._dynamo.reset()
            self._compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return (self._compiled(q, k, v, block_mask=self._blocks(q)),)


@functools.lru_cache(maxsize=1)
def _causal_blocks(seq: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, k: q >= k, None, None, seq, seq, device=str(device))


def flex_of(causal: bool) -> Flex:
    return Flex(lambda q: _causal_blocks(q.shape[2], q.device) if causal else None)


def _standard(kind: str, with_flex: bool) -> Operator:
    plain, causal = dense(kind), kind == "causal"
    optional = {name: _through(of, is_causal=causal) for name, of in BACKENDS.items()}
    if with_flex:
        optional["flex"] = flex_of(causal)
    return Operator(
        plain.ours,
        plain.stock,
        plain.formula,
        plain.base,
        optional=optional,
        compiled=frozenset({"flex"}),
    )


def _deterministic(kind: str) -> Operator:
    plain = dense(kind)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        options = {"is_causal": kind == "causal", "deterministic": True}
        return (functional.scaled_dot_product_attention(q, k, v, **options),)

    others = {"not deterministic": plain.ours}
    return Operator(ours, plain.stock, plain.formula, plain.base, others)


@functools.lru_cache(maxsize=2)
def _mask(seq: int, device: torch.device) -> Tensor:
    """One in eight is not allowed, of all heads alike."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(1, 1, seq, seq, generator=generator, device=device) > 1 / 8


@functools.lru_cache(maxsize=2)
def _band(seq: int, device: torch.device) -> Tensor:
    """WINDOW keys back, the own one included."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).tril().triu(1 - WINDOW)


def _masked() -> Operator:
    def variant(function):
        def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return (function(q, k, v, _mask(q.shape[2], q.device)),)

        return call

    stock = variant(F.scaled_dot_product_attention)
    return Operator(
        variant(functional.scaled_dot_product_attention),
        stock,
        variant(lambda q, k, v, mask: reference(q, k, v, mask=mask)[0]),
        base=stock,
        others={"none": dense("full").ours},
    )


def _biased(phase: str) -> Operator:
    """A learned bias for each head, of all sequences alike; none has no gradient for it."""

    def stock(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return (F.scaled_dot_product_attention(q, k, v, bias),)

    def none(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return (functional.scaled_dot_product_attention(q, k, v),)

    return Operator(
        lambda q, k, v, bias: (functional.scaled_dot_product_attention(q, k, v, bias),),
        stock,
        lambda q, k, v, bias: (reference(q, k, v, bias=bias)[0],),
        base=stock,
        others={"none": none} if phase == "forward" else {},
    )


def _windowed() -> Operator:
    window = (WINDOW - 1, 0)

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (F.scaled_dot_product_attention(q, k, v, _band(q.shape[2], q.device)),)

    return Operator(
        lambda q, k, v: (functional.scaled_dot_product_attention(q, k, v, window_size=window),),
        stock,
        lambda q, k, v: (reference(q, k, v, window_left=WINDOW - 1, window_right=0)[0],),
        base=stock,
        others={"no window": dense("causal").ours},
    )


@functools.lru_cache(maxsize=2)
def _ends(total: int, device: torch.device) -> tuple[Tensor, int]:
    """(cu_seq of sequences of FILL's shares that are `total` rows together, the longest)."""
    longest = int(total / sum(FILL))
    lengths = [int(longest * share) for share in FILL]
    return torch.tensor([0, *lengths], device="cpu").cumsum(0).to(device, torch.int32), longest


def _packed() -> Operator:
    """Against torch's function of the same name."""

    def variant(function):
        def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            ends, longest = _ends(len(q), q.device)
            return (function(q, k, v, ends, ends, longest, longest),)

        return call

    def stock(*arguments) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(*arguments)

    formula = variant(lambda q, k, v, ends, *_: reference(q, k, v, cu_seq_q=ends, cu_seq_k=ends)[0])
    return Operator(variant(functional.varlen_attention), variant(stock), formula, base=formula)


# ---- cases ---------------------------------------------------------------------------------------


def shape_of(seq: int, head_dim: int) -> tuple[int, int, int, int]:
    """(batch, heads, seq, head_dim) of TOKENS tokens and heads that are WIDTH wide together."""
    return TOKENS // seq, WIDTH // head_dim, seq, head_dim


def cases(quick: bool = False) -> Iterator[Case]:
    """All cases on CUDA; `quick` keeps small shapes."""
    yield from overhead_cases(torch.bfloat16, "cuda")
    if quick:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield from _standard_cases([QUICK], dtype)
        yield from _variants(quick=True)
        return
    first, *others = HEAD_DIMS
    yield from _standard_cases([shape_of(seq, first) for seq in SEQS], torch.bfloat16)
    yield from _variants()
    yield from _standard_cases([shape_of(FLEX_SEQ, dim) for dim in others], torch.bfloat16)
    rest = [shape_of(seq, dim) for dim in others for seq in SEQS if seq != FLEX_SEQ]
    yield from _standard_cases(rest, torch.bfloat16)
    every = [shape_of(seq, dim) for dim in HEAD_DIMS for seq in SEQS]
    yield from _standard_cases(every, torch.float16)
    yield from _standard_cases([FLOAT32], torch.float32)


def _standard_cases(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Iterator[Case]:
    for shape in shapes:
        with_flex = shape[2] == FLEX_SEQ and dtype is torch.bfloat16
        for kind in KINDS:
            for phase in PHASES:
                yield _on_cuda(kind, _standard(kind, with_flex), shape, phase, dtype=dtype)


def _variants(quick: bool = False) -> Iterator[Case]:
    """One case for each option, in bfloat16."""

    seq = QUICK[2] if quick else MASKED[2]
    of = QUICK if quick else MASKED

    def with_bias(shape: Sequence[int], phase: str) -> list[Tensor]:
        grad = {"dtype": torch.bfloat16, "grad": phase != "forward", "device": "cuda"}
        return [*tensors(shape, **grad), *randn((1, shape[1], seq, seq), **grad)]

    for kind in KINDS:
        shape = QUICK if quick else shape_of(FLEX_SEQ, HEAD_DIMS[0])
        name, operator = f"deterministic-{kind}", _deterministic(kind)
        yield _on_cuda(name, operator, shape, "backward")
    for phase in PHASES:
        yield _on_cuda("mask", _masked(), of, phase)
    for phase in PHASES:
        yield _on_cuda(
            "bias",
            _biased(phase),
            of,
            phase,
            make=partial(with_bias, of, phase),
            checked=partial(with_bias, (1, 1, *of[2:]), phase),
        )
    for phase in PHASES:
        yield _on_cuda("dropout-causal", dropped("causal"), of, phase)
    yield from _grouped_cases(QUICK if quick else GROUPED)
    yield from _windowed_cases((1, 2, 2 * WINDOW, 32) if quick else WINDOWED)
    yield from _packed_cases((len(FILL), 2, 64, 32) if quick else PACKED)


def _grouped_cases(shape: Sequence[int]) -> Iterator[Case]:
    batch, heads, seq, head_dim = shape
    kv_heads = min(KV_HEADS, heads // 2)
    for phase in PHASES:
        make = partial(tensors, dtype=torch.bfloat16, grad=phase != "forward", device="cuda")
        yield _on_cuda(
            f"grouped-{kv_heads}-causal",
            dense("causal", enable_gqa=True),
            shape,
            phase,
            make=partial(make, shape, kv_heads),
            checked=partial(make, (1, heads // kv_heads, min(seq, 512), head_dim), 1),
        )


def _windowed_cases(shape: Sequence[int]) -> Iterator[Case]:
    for phase in PHASES:
        batch_pairs = shape[0] * pairs(shape[2], True, WINDOW)
        yield _on_cuda(f"window-{WINDOW}", _windowed(), shape, phase, batch_pairs=batch_pairs)


def _packed_cases(shape: Sequence[int]) -> Iterator[Case]:
    _, heads, seq, head_dim = shape
    lengths = [int(seq * share) for share in FILL]
    for phase in PHASES:
        make = partial(randn, count=3, dtype=torch.bfloat16, grad=phase != "forward", device="cuda")
        few = 2048 if sum(lengths) > 2048 else sum(lengths)
        yield _on_cuda(
            "packed",
            _packed(),
            shape,
            phase,
            batch_pairs=sum(map(pairs, lengths)),
            make=partial(make, (sum(lengths), heads, head_dim)),
            checked=partial(make, (few, heads, head_dim)),
        )


def _on_cuda(
    kind: str,
    operator: Operator,
    shape: Sequence[int],
    phase: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **options,
) -> Case:
    case = case_of(kind, operator, shape, phase, dtype=dtype, device="cuda", **options)
    return replace(case, cold=math.prod(shape) >= LARGE)
