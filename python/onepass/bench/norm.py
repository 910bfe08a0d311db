"""Cases of the norm family: forward, forward and backward, and the overhead of a call.

Tensors that must cross memory: a forward reads input and writes output; a backward reads the
upstream gradient and input, and writes the gradient. The residual add brings a read of residual and
a write of residual_out forward, a read of its upstream gradient backward; input and residual share
one gradient. Weights and statistics are small beside that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass.bench.case import Case, Goal, Operator
from onepass.reference import norm as reference

SHAPES = ((512, 768), (2048, 1024))
BEYOND_CACHE = (4096, 4096)
COLD = (2048, 384)  # a layer of the model that `onepass compare` trains
QUICK = (64, 96)
OVERHEAD = (4, 8)
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5

# To reach at SHAPES on a machine with AVX2, two threads: (operator, dtype, with backward).
_RMS_BFLOAT16 = Goal(2.5, 2.0), Goal(4.0, 3.0)
GOALS = {
    ("layer_norm", torch.float32): (Goal(1.4, 2.0, 0.50), Goal(1.3, 1.8, 0.30)),
    ("rms_norm", torch.float32): (Goal(3.0, 2.0, 0.55), Goal(5.0, 2.0, 0.30)),
    ("add_rms_norm", torch.float32): (Goal(3.0, 2.5, 0.55), Goal(5.0, 2.2, 0.30)),
    ("layer_norm", torch.bfloat16): (Goal(1.5, 2.0), Goal(1.5, 3.0)),
    ("rms_norm", torch.bfloat16): _RMS_BFLOAT16,
    ("add_rms_norm", torch.bfloat16): _RMS_BFLOAT16,
}


def _stock_add_layer_norm(x, residual, weight, bias):
    total = residual + x
    return F.layer_norm(total, total.shape[-1:], weight, bias, EPS), total


def _stock_add_rms_norm(x, residual, weight):
    total = residual + x
    return F.rms_norm(total, total.shape[-1:], weight, EPS), total


def _operator(ours, stock, formula) -> Operator:
    return Operator(ours, stock, formula, base=stock)


OPERATORS = {
    "layer_norm": _operator(
        lambda x, w, b: (functional.layer_norm(x, x.shape[-1:], w, b, EPS),),
        lambda x, w, b: (F.layer_norm(x, x.shape[-1:], w, b, EPS),),
        lambda x, w, b: (reference.layer_norm(x, x.shape[-1:], w, b, EPS),),
    ),
    "rms_norm": _operator(
        lambda x, w: (functional.rms_norm(x, x.shape[-1:], w, EPS),),
        lambda x, w: (F.rms_norm(x, x.shape[-1:], w, EPS),),
        lambda x, w: (reference.rms_norm(x, x.shape[-1:], w, EPS),),
    ),
    "add_layer_norm": _operator(
        lambda x, r, w, b: functional.add_layer_norm(x, r, x.shape[-1:], w, b, EPS),
        _stock_add_layer_norm,
        lambda x, r, w, b: reference.add_layer_norm(x, r, x.shape[-1:], w, b, EPS),
    ),
    "add_rms_norm": _operator(
        lambda x, r, w: functional.add_rms_norm(x, r, x.shape[-1:], w, EPS),
        _stock_add_rms_norm,
        lambda x, r, w: reference.add_rms_norm(x, r, x.shape[-1:], w, EPS),
    ),
}


def cases(quick: bool = False) -> Iterator[Case]:
    """All cases; `quick` keeps one small shape."""
    for shape in (QUICK,) if quick else SHAPES:
        for name in OPERATORS:
            for dtype in DTYPES:
                for backward in (False, True):
                    yield _case(name, shape, dtype, backward)
    if not quick:
        for fresh in (False, True):
            for name in ("layer_norm", "rms_norm"):
                for backward in (False, True):
                    yield _case(name, BEYOND_CACHE, torch.float32, backward, fresh=fresh)
        for name in ("layer_norm", "rms_norm"):
            for backward in (False, True):
                yield _case(name, COLD, torch.float32, backward, cold=True)
    for name in ("layer_norm", "rms_norm"):
        yield from _overhead(name)


def _case(
    name: str,
    shape: tuple,
    dtype: torch.dtype,
    backward: bool,
    *,
    fresh: bool = False,
    cold: bool = False,
) -> Case:
    adds = name.startswith("add_")
    tensors = 4 if adds else 2
    if backward:
        tensors += 4 if adds else 3
    goal = Goal()
    if shape in SHAPES:
        goal = GOALS.get((name, dtype), (goal, goal))[backward]
    phase = "forward+backward" if backward else "forward"
    return Case(
        f"norm/{name}/{_text(dtype)}/{shape[0]}x{shape[1]}/{phase}"
        + ("/fresh" if fresh else "")
        + ("/cold" if cold else ""),
        OPERATORS[name],
        lambda: _tensors(name, shape, dtype, backward),
        backward,
        tensors,
        goal,
        fresh,
        cold,
    )


def _overhead(name: str) -> Iterator[Case]:
    for phase in ("no grad", "forward under grad", "forward+backward"):
        grad = phase != "no grad"
        yield Case(
            f"norm/{name}/float32/{OVERHEAD[0]}x{OVERHEAD[1]}/{phase}",
            OPERATORS[name],
            lambda grad=grad: _tensors(name, OVERHEAD, torch.float32, grad),
            phase == "forward+backward",
            None,
        )


def _tensors(name: str, shape: tuple, dtype: torch.dtype, grad: bool) -> list[Tensor]:
    """input, (residual,) weight, (bias)."""
    sizes = [shape] * (2 if name.startswith("add_") else 1)
    sizes += [shape[-1:]] * (1 if name.endswith("rms_norm") else 2)
    return [torch.randn(size).to(dtype).requires_grad_(grad) for size in sizes]


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
