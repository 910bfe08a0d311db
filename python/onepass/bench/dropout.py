"""Cases of the dropout family, forward and backward, against torch's own dropout.

Tensors that must cross memory: the forward reads input and writes output, the backward reads the
upstream gradient and writes its own; a residual is one read more. No mask is stored between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from onepass import functional
from onepass._ops.random import draw_seed
from onepass.bench.case import Case, Goal, Operator
from onepass.reference import dropout as reference

SHAPE = (2048, 1024)
QUICK = (64, 96)
P = 0.1
# To reach on a machine with AVX2, two threads: (operator, dtype).
GOALS = {("dropout", torch.float32): Goal(eager=6.0)}


def _operator(ours, stock, formula) -> Operator:
    return Operator(ours, stock, formula, base=formula)


OPERATORS = {
    "dropout": _operator(
        lambda x: (functional.dropout(x, P),),
        lambda x: (F.dropout(x, P),),
        lambda x: (reference.dropout(x, P, draw_seed(x.device)),),
    ),
    "add_dropout": _operator(
        lambda x, r: (functional.add_dropout(x, r, P),),
        lambda x, r: (r + F.dropout(x, P),),
        lambda x, r: (reference.add_dropout(x, r, P, draw_seed(x.device)),),
    ),
}


def cases(quick: bool = False) -> Iterator[Case]:
    """All cases; `quick` keeps a small shape."""
    shape = QUICK if quick else SHAPE
    for name, operator in OPERATORS.items():
        inputs = 2 if name == "add_dropout" else 1
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(
                f"dropout/{name}/{str(dtype).removeprefix('torch.')}/"
                f"{shape[0]}x{shape[1]}/forward+backward",
                operator,
                lambda inputs=inputs, dtype=dtype: [
                    torch.randn(shape).to(dtype).requires_grad_() for _ in range(inputs)
                ],
                True,
                3 + inputs,
                Goal() if quick else GOALS.get((name, dtype), Goal()),
            )
