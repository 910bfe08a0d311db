"""Cases of the attention family on CPU, against torch's fastest eager attention. Those of CUDA are
in attention_cuda.

Attention is bound by arithmetic, so its ceiling is that of multiply-adds on all threads (bfloat16:
of dot products, where the CPU has them), by useful operations: two products of head_dim
multiply-adds forward and five backward, for every pair of a query and a key that it may see. What a
kernel computes beyond the diagonal, a window or a sequence's end, and the softmax, does not count.

A backward alone is torch.autograd.grad on a graph that is kept. torch.compile is left out: it calls
the same attention kernel and has nothing to fuse around it. torch gets its masks as floats made
beforehand: of boolean ones it makes those in every call. Cases named medium round the factors of
float32 products to bfloat16, where the CPU has dot products.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, nn
from onepass._policy.precision import rounds_factors
from onepass.reference.attention import attention as reference
from onepass.reference.products import factors
from onepass.tools.bench import attention_cuda
from onepass.tools.bench.attention_parts import (
    FILL,
    P,
    case_of,
    dense,
    dropped,
    overhead_cases,
    pairs,
    randn,
    tensors,
)
from onepass.tools.bench.case import PHASES, Case, Operator

# (batch, heads, seq, head_dim)
CAUSAL = (
    (2, 8, 128, 64),
    (1, 8, 512, 64),
    (1, 8, 512, 128),
    (1, 8, 1024, 64),
    (1, 4, 1024, 128),
)
FULL = ((1, 8, 512, 64), (1, 4, 2048, 64), (1, 4, 2048, 128))
MEDIUM = ((1, 8, 1024, 64), (1, 4, 1024, 128))
DROPOUT = (1, 8, 1024, 64)
WINDOWED = (1, 2, 8192, 64)
STREAM = (1, 4, 4096, 64)  # of documents
ENCODER = (2, 8, 512, 64)  # bias, padding mask, grouped queries, nn.MultiheadAttention
PACKED = (8, 8, 512, 64)
QUICK = (1, 2, 48, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WINDOW, WIDER = 256, 1024  # the wider one is timed beside it: linear cost is four times as much
KV_HEADS = 2


# ---- operators -----------------------------------------------------------------------------------


def _as_bias(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, device="cpu").masked_fill(~mask, -math.inf)


@functools.lru_cache(maxsize=1)
def _band(seq: int) -> Tensor:
    return _as_bias(torch.ones(seq, seq, dtype=torch.bool, device="cpu").tril().triu(1 - WINDOW))


def _medium() -> Operator:
    """Causal attention whose products round their factors, beside that in float32."""

    def ours(precision: str) -> Callable[..., tuple[Tensor, ...]]:
        call = partial(functional.scaled_dot_product_attention, is_causal=True)
        return lambda q, k, v: (call(q, k, v, precision=precision),)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (reference(*factors(True, q, k, v), window_right=0)[0],)

    return Operator(
        ours("medium"),
        dense("causal").stock,
        exact,
        base=lambda q, k, v: (reference(q, k, v, window_right=0, round_factors=True)[0],),
        others={"float32": ours("highest")},
    )


def _windowed() -> Operator:
    def ours(width: int):
        window = (width - 1, 0)
        return lambda q, k, v: (
            functional.scaled_dot_product_attention(q, k, v, window_size=window),
        )

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (F.scaled_dot_product_attention(q, k, v, _band(q.shape[2])),)

    return Operator(
        ours(WINDOW),
        stock,
        lambda q, k, v: (reference(q, k, v, window_left=WINDOW - 1, window_right=0)[0],),
        base=stock,
        others={f"window {WIDER}": ours(WIDER)},
    )


def _biased() -> Operator:
    def stock(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return (F.scaled_dot_product_attention(q, k, v, bias),)

    return Operator(
        lambda q, k, v, bias: (functional.scaled_dot_product_attention(q, k, v, bias),),
        stock,
        lambda q, k, v, bias: (reference(q, k, v, bias=bias)[0],),
        base=stock,
    )


def _padded(lengths: Sequence[int], seq: int) -> Operator:
    """A batch whose sequences are padded to seq: the keys after their ends are masked out."""
    mask = (torch.arange(seq, device="cpu") < torch.tensor(lengths, device="cpu")[:, None])[
        :, None, None
    ]
    bias = _as_bias(mask)

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (F.scaled_dot_product_attention(q, k, v, bias),)

    return Operator(
        lambda q, k, v: (functional.scaled_dot_product_attention(q, k, v, mask),),
        stock,
        lambda q, k, v: (reference(q, k, v, mask=mask)[0],),
        base=stock,
    )


def _ends(seq: int) -> list[int]:
    """Ends of the documents in a stream of seq tokens, of as many lengths."""
    return (torch.tensor(FILL, device="cpu").cumsum(0) * seq / sum(FILL)).int().tolist()


@functools.lru_cache(maxsize=2)
def _documents(seq: int):
    """(BlockMask, mask, bias): causal within each document of a stream."""
    from torch.nn.attention.flex_attention import create_block_mask

    of = torch.bucketize(
        torch.arange(seq, device="cpu"), torch.tensor(_ends(seq), device="cpu"), right=True
    )

    def mask_mod(b, h, q, k):
        return (of[q] == of[k]) & (q >= k)

    mask = (of[:, None] == of).tril()
    return create_block_mask(mask_mod, None, None, seq, seq, "cpu"), mask, _as_bias(mask)


def _of_documents(with_flex: bool) -> Operator:
    attend = functional.scaled_dot_product_attention

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (F.scaled_dot_product_attention(q, k, v, _documents(q.shape[2])[2]),)

    flex = attention_cuda.Flex(lambda q: _documents(q.shape[2])[0])
    return Operator(
        lambda q, k, v: (attend(q, k, v, block_mask=_documents(q.shape[2])[0]),),
        stock,
        lambda q, k, v: (reference(q, k, v, mask=_documents(q.shape[2])[1])[0],),
        base=stock,
        others={"whole mask": lambda q, k, v: (attend(q, k, v, _documents(q.shape[2])[1]),)},
        optional={"flex": flex} if with_flex else {},
        compiled=frozenset({"flex"}),
    )


def _packed(lengths: Sequence[int], seq: int) -> Operator:
    """The same batch without its padding; torch's stays padded."""
    cu_seq = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (reference(q, k, v, cu_seq_q=cu_seq, cu_seq_k=cu_seq)[0],)

    return Operator(
        lambda q, k, v: (functional.varlen_attention(q, k, v, cu_seq, cu_seq, seq, seq),),
        _padded(lengths, seq).stock,
        formula,
        base=formula,
    )


def _multihead(embed_dim: int, heads: int) -> Operator:
    """The module, called with its input and its parameters."""

    def variant(cls: type) -> Callable[..., tuple[Tensor, ...]]:
        module = cls(embed_dim, heads, dropout=P, batch_first=True, device="meta")
        names = [name for name, _ in module.named_parameters()]

        def call(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
            named = dict(zip(names, parameters, strict=True))
            options = {"need_weights": False}
            return torch.func.functional_call(module, named, (x, x, x), options)[:1]

        return call

    inner = _inner(heads, dropped("full").formula)

    def formula(x, in_weight, in_bias, out_weight, out_bias) -> tuple[Tensor, ...]:
        return (F.linear(*inner(F.linear(x, in_weight, in_bias)), out_weight, out_bias),)

    ours, stock = (variant(module.MultiheadAttention) for module in (nn, torch.nn))
    return Operator(ours, stock, formula, base=formula)


def _inner(heads: int, function: Callable) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Attention as nn.MultiheadAttention has it, between the two projections."""

    def call(projected: Tensor) -> tuple[Tensor, ...]:  # (batch, seq, 3 * heads * head_dim)
        query, key, value = projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return (function(query, key, value)[0].transpose(1, 2).flatten(2),)

    return call


# ---- cases ---------------------------------------------------------------------------------------


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps small shapes."""
    if device == "cuda":
        yield from attention_cuda.cases(quick)
        return
    for kind, shapes in (("causal", CAUSAL), ("full", FULL)):
        for shape in (QUICK,) if quick else shapes:
            for dtype in DTYPES:
                for phase in PHASES:
                    yield case_of(kind, dense(kind), shape, phase, dtype=dtype)
    if rounds_factors("medium"):
        for shape in (QUICK,) if quick else MEDIUM:
            for phase in PHASES:
                yield case_of("medium-causal", _medium(), shape, phase, rounds=True)
    yield from _dropout_cases(quick)
    yield from _window_cases(quick)
    yield from _mask_cases(quick)
    yield from _document_cases(quick)
    yield from _packed_cases(quick)
    yield from _module_cases(quick)
    yield from overhead_cases(torch.float32, "cpu")


def _dropout_cases(quick: bool) -> Iterator[Case]:
    shape = QUICK if quick else DROPOUT
    for kind in ("causal", "full"):
        for phase in PHASES:
            yield case_of(f"dropout-{kind}", dropped(kind), shape, phase)


def _window_cases(quick: bool) -> Iterator[Case]:
    batch, heads, seq, head_dim = shape = (1, 1, 2 * WINDOW, 16) if quick else WINDOWED
    for phase in ("forward", "forward+backward"):
        yield case_of(
            f"window-{WINDOW}",
            _windowed(),
            shape,
            phase,
            batch_pairs=batch * pairs(seq, True, WINDOW),
        )


def _mask_cases(quick: bool) -> Iterator[Case]:
    """A learned bias, grouped queries and a padding mask."""
    batch, heads, seq, head_dim = shape = QUICK if quick else ENCODER
    phase = "forward+backward"

    def with_bias(shape: Sequence[int]) -> list[Tensor]:
        bias = torch.randn(1, *shape[1:3], shape[2], requires_grad=True, device="cpu")
        return [*tensors(shape), bias]

    yield case_of("bias", _biased(), shape, phase, make=partial(with_bias, shape))
    for phase in PHASES:
        yield case_of(
            f"grouped-{KV_HEADS}",
            dense("causal", enable_gqa=True),
            shape,
            phase,
            batch_pairs=batch * pairs(seq, causal=True),
            make=partial(tensors, shape, KV_HEADS, grad=phase != "forward"),
        )
    lengths = [seq - seq // 4 * (b % 2) for b in range(1, batch + 1)]
    for phase in PHASES:
        yield case_of(
            "padding-mask",
            _padded(lengths, seq),
            shape,
            phase,
            batch_pairs=seq * sum(lengths),
        )


def _document_cases(quick: bool) -> Iterator[Case]:
    """A BlockMask of a stream of documents."""
    batch, heads, seq, head_dim = shape = QUICK if quick else STREAM
    ends = [0, *_ends(seq)]
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    for dtype in (torch.float32, torch.bfloat16):
        for phase in PHASES:
            yield case_of(
                "documents",
                # torch's has no backward on a CPU.
                _of_documents(with_flex=phase == "forward" and not quick),
                shape,
                phase,
                dtype=dtype,
                batch_pairs=batch * sum(pairs(length, True) for length in lengths),
            )


def _packed_cases(quick: bool) -> Iterator[Case]:
    _, heads, seq, head_dim = shape = (len(FILL), *QUICK[1:]) if quick else PACKED
    lengths = [int(seq * share) for share in FILL]
    for phase in ("forward", "forward+backward"):
        grad = phase != "forward"
        yield case_of(
            "packed",
            _packed(lengths, seq),
            shape,
            phase,
            batch_pairs=sum(map(pairs, lengths)),
            make=partial(randn, (sum(lengths), heads, head_dim), 3, grad=grad),
            make_stock=partial(tensors, shape, grad=grad),
        )


def _module_cases(quick: bool) -> Iterator[Case]:
    """A training step of nn.MultiheadAttention with dropout, and the attention in it alone."""
    batch, heads, seq, head_dim = shape = QUICK if quick else ENCODER
    embed_dim, phase = heads * head_dim, "forward+backward"

    def make() -> list[Tensor]:
        sizes = (3 * embed_dim, embed_dim), (3 * embed_dim,), (embed_dim, embed_dim), (embed_dim,)
        parameters = [
            (torch.randn(size, device="cpu") / embed_dim**0.5).requires_grad_() for size in sizes
        ]
        return [*randn((batch, seq, embed_dim)), *parameters]

    attention = dropped("full")
    inner = Operator(
        *(_inner(heads, f) for f in (attention.ours, attention.stock, attention.formula)),
        base=_inner(heads, attention.formula),
    )
    yield case_of(
        "multihead-inner",
        inner,
        shape,
        phase,
        make=partial(randn, (batch, seq, 3 * embed_dim)),
    )
    projections = 3 * 2 * batch * seq * 4 * embed_dim**2  # forward, and twice that backward
    yield case_of(
        "multihead",
        _multihead(embed_dim, heads),
        shape,
        phase,
        make=make,
        more_flops=projections,
    )
