"""Cases of the optimizer family: clipping the gradients of a whole model.

``within`` the limit, gradients are only read; ``clipped``, they are written too. Both functions are
called as a training loop calls them, with parameters that have gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onepass import optim
from onepass.bench.case import Case, Goal, Operator
from onepass.reference import optimizer as reference

MANY_SMALL = (400, 768)
ONE_LARGE = (1, 1 << 24)
QUICK = (5, 96)
MAX_NORM = {"within": 1e6, "clipped": 0.5}
# To reach on two threads, against torch's own function.
GOALS = {MANY_SMALL: Goal(eager=10.0), ONE_LARGE: Goal(eager=1.5)}


class _Parameter:
    """What the functions ask of a parameter."""

    def __init__(self, grad: Tensor):
        self.grad = grad


_parameters: dict[int, list[_Parameter]] = {}  # by the first gradient, so that none are made anew


def _with(gradients: tuple[Tensor, ...]) -> list[_Parameter]:
    held = _parameters.get(id(gradients[0]))
    if held is None or held[0].grad is not gradients[0]:
        _parameters.clear()
        held = _parameters[id(gradients[0])] = [_Parameter(g) for g in gradients]
    return held


def _operator(max_norm: float) -> Operator:
    def formula(*gradients: Tensor) -> tuple[Tensor, ...]:
        norm, scaled = reference.clip_grad_norm(gradients, max_norm)
        return norm, *scaled

    def stock(*gradients: Tensor) -> tuple[Tensor, ...]:
        return torch.nn.utils.clip_grad_norm_(_with(gradients), max_norm), *gradients

    def ours(*gradients: Tensor) -> tuple[Tensor, ...]:
        return optim.clip_grad_norm_(_with(gradients), max_norm), *gradients

    return Operator(ours, stock, formula, base=stock)


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases; there are none on CUDA, where torch's own function is called."""
    if device == "cuda":
        return
    for count, numel in (QUICK,) if quick else (MANY_SMALL, ONE_LARGE):
        for phase, max_norm in MAX_NORM.items():
            large = (count, numel) == ONE_LARGE
            yield Case(
                f"optimizer/clip_grad_norm/float32/{count}x{numel}/{phase}",
                _operator(max_norm),
                lambda count=count, numel=numel: [torch.randn(numel) for _ in range(count)],
                False,
                (1 if phase == "within" else 3) if large else None,
                Goal() if quick else GOALS[count, numel],
            )
