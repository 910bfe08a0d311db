"""Cases of the dropout family, forward and backward, against torch's own dropout.

Bytes: the forward reads input and writes output, the backward reads the upstream gradient and
writes its own; the residual add reads one tensor more. Nothing is stored between the two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from onepass import functional
from onepass.bench.case import Case

SHAPE = (2048, 1024)
P = 0.1
GOAL_FLOAT32 = (6.0, None, None)


def cases(quick: bool = False) -> Iterator[Case]:
    """All cases; `quick` keeps a small shape."""
    shape = (64, 96) if quick else SHAPE
    for dtype in (torch.float32, torch.bfloat16):
        for residual in (False, True):
            yield _case(shape, dtype, residual)


def _case(shape: tuple[int, int], dtype: torch.dtype, residual: bool) -> Case:
    count = 2 if residual else 1
    arguments = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(count)]
    upstream = torch.randn(shape).to(dtype)

    def runner(function):
        def run():
            output = function(*arguments)
            return (output.detach(), *torch.autograd.grad(output, arguments, upstream))

        return run

    if residual:
        ours, stock = (
            lambda x, r: functional.add_dropout(x, r, P),
            lambda x, r: r + F.dropout(x, P),
        )
    else:
        ours, stock = (lambda x: functional.dropout(x, P), lambda x: F.dropout(x, P))
    name = "add_dropout" if residual else "dropout"
    goal = GOAL_FLOAT32 if dtype == torch.float32 and not residual else (None, None, None)
    return Case(
        f"dropout/{name}/{str(dtype)[6:]}/{shape[0]}x{shape[1]}/forward+backward",
        runner(ours),
        runner(stock),
        runner(torch.compile(stock, dynamic=False)),
        None,
        (4 + residual) * upstream.nbytes,
        upstream,
        goal,
    )
