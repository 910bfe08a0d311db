"""Shared by the cases of attention on the CPU, on CUDA and of decoding: useful operations, dense
operators, tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass._random import draw_seed
from onepass.reference.attention import attention as reference
from onepass.tools.bench.case import Case, Operator

# Lengths of a batch's sequences, relative to the longest; half in all.
FILL = (1, 1 / 8, 3 / 4, 1 / 4, 5 / 8, 3 / 8, 1 / 2, 3 / 8)
OPERATIONS = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}  # of the forward's
P = 0.1  # of dropout
OVERHEAD = (1, 2, 4, 8)
CHECKED_SCORES = 1 << 22  # float64 references of more would take longer than the measurement


# ---- useful operations ---------------------------------------------------------------------------


def pairs(seq: int, causal: bool = False, window: int | None = None) -> int:
    """Pairs of a query and a key that it sees, among seq of each; window counts the query's own
    key."""
    if not causal:
        return seq * seq
    width = min(seq, window or seq)
    return seq * width - width * (width - 1) // 2


def flops(batch_pairs: int, heads: int, head_dim: int, phase: str) -> int:
    """Operations of a call; batch_pairs are the pairs of all sequences."""
    return int(4 * batch_pairs * heads * head_dim * OPERATIONS[phase])


# ---- operators -----------------------------------------------------------------------------------

_RIGHT = {"causal": 0, "full": -1}  # keys after its own that a query sees in the reference


def dense(kind: str, **torch_options) -> Operator:
    options = {"is_causal": kind == "causal", **torch_options}

    def stock(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (F.scaled_dot_product_attention(q, k, v, **options),)

    return Operator(
        lambda q, k, v: (functional.scaled_dot_product_attention(q, k, v, **options),),
        stock,
        lambda q, k, v: (reference(q, k, v, window_right=_RIGHT[kind])[0],),
        base=stock,
    )


def dropped(kind: str) -> Operator:
    options = {"dropout_p": P, "is_causal": kind == "causal"}

    def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        seed = draw_seed(q.device)
        return (reference(q, k, v, dropout_p=P, seed=seed, window_right=_RIGHT[kind])[0],)

    return Operator(
        lambda q, k, v: (functional.scaled_dot_product_attention(q, k, v, **options),),
        lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, **options),),
        formula,
        base=formula,  # torch draws other random numbers
        others={"no dropout": dense(kind).ours},
    )


# ---- cases ---------------------------------------------------------------------------------------


def overhead_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """The cost of a call beside its work."""
    for phase in ("no grad", "forward under grad", "forward+backward"):
        grad = phase != "no grad"
        yield Case(
            name_of("causal", OVERHEAD, dtype, phase),
            dense("causal"),
            partial(tensors, OVERHEAD, dtype=dtype, grad=grad, device=device),
            phase == "forward+backward",
            None,
            device=device,
            compiles=False,
        )


def case_of(
    kind: str,
    operator: Operator,
    shape: Sequence[int],
    phase: str,
    *,
    dtype: torch.dtype = torch.float32,
    batch_pairs: int | None = None,
    more_flops: int = 0,
    make: Callable[[], list[Tensor]] | None = None,
    make_stock: Callable[[], list[Tensor]] | None = None,
    checked: Callable[[], list[Tensor]] | None = None,
    device: str = "cpu",
    rounds: bool = False,
) -> Case:
    """`rounds`: factors of float32 products, to bfloat16."""
    batch, heads, seq, head_dim = shape
    if batch_pairs is None:
        batch_pairs = batch * pairs(seq, causal=kind.endswith("causal"))
    dots = rounds or dtype is torch.bfloat16 or (device == "cuda" and dtype is torch.float16)
    full = partial(tensors, dtype=dtype, grad=phase != "forward", device=device)
    if make is None and batch * heads * seq * seq > CHECKED_SCORES:
        # Fewer heads; of the longest sequences, only a part that fits the limit.
        checked = partial(full, (1, 1, min(seq, math.isqrt(CHECKED_SCORES)), head_dim))
    return Case(
        name_of(kind, shape, dtype, phase),
        operator,
        make or partial(full, shape),
        phase != "forward",
        None,
        backward_alone=phase == "backward",
        device=device,
        compiles=False,
        make_checked=checked,
        flops=flops(batch_pairs, heads, head_dim, phase) + more_flops,
        unit="bfloat16" if dots else "float32",
        make_stock=make_stock,
    )


def name_of(kind: str, shape: Sequence[int], dtype: torch.dtype, phase: str) -> str:
    sizes = "x".join(map(str, shape))
    return f"attention/{kind}/{str(dtype).removeprefix('torch.')}/{sizes}/{phase}"


def tensors(
    shape: Sequence[int],
    kv_heads: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    grad: bool = True,
    device: str = "cpu",
) -> list[Tensor]:
    """query, key, value."""
    batch, heads, seq, head_dim = shape
    of_kv = (batch, kv_heads or heads, seq, head_dim)
    query = randn(shape, dtype=dtype, grad=grad, device=device)
    return [*query, *randn(of_kv, 2, dtype=dtype, grad=grad, device=device)]


def randn(
    shape: Sequence[int],
    count: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    grad: bool = True,
    device: str = "cpu",
) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype).requires_grad_(grad) for _ in range(count)]
