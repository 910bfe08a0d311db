"""Cross entropy in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.reference.linear import linear

REDUCTIONS = ("none", "mean", "sum")  # in the order of their numbers in csrc/ops/loss.h


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of logits (rows, classes) or (classes,) with the classes' indices.

    Szegedy, Vanhoucke, Ioffe, Shlens, Wojna, Rethinking the Inception architecture, 2015 (label
    smoothing); Chowdhery et al., PaLM, 2022 (z_loss); Gemma team, Gemma 2, 2024 (softcap).
    """
    ignored = target == ignore_index
    x = _softcapped(input.masked_fill(ignored[..., None], 0.0), softcap)
    index, of_target = _of_target(x, target, weight, ignored)
    below = -x.log_softmax(-1)
    loss = (1 - label_smoothing) * of_target * _at(below, index)
    if label_smoothing:
        weighted = below if weight is None else weight.to(x.dtype) * below
        loss = loss + label_smoothing / x.shape[-1] * weighted.sum(-1)
    if z_loss:  # apart from below: its gradient would round that of the target near certainty
        loss = loss + z_loss * of_target * x.logsumexp(-1).square()
    loss = loss.masked_fill(ignored, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / (of_target * ~ignored).sum() if reduction == "mean" else loss.sum()


def statistics(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """The statistics that the operator keeps: for each row, (3, rows), its maximum, the factor of
    exp(x - maximum) in its gradient, and the gradient at its target, 0 if it is ignored; and the
    sum of the targets' weights."""
    x = _softcapped(input, softcap)
    ignored = target == ignore_index
    index, of_target = _of_target(x, target, weight, ignored)
    maximum = x.amax(-1)
    terms = (x - maximum[..., None]).exp()
    exponentials, there = terms.sum(-1), _at(terms, index)
    mass = (1 - label_smoothing) * of_target
    share, total = label_smoothing / x.shape[-1], _sum_of_weights(x, weight)
    of_lse = 2 * z_loss * of_target * (maximum + exponentials.log())
    gradient = mass * (there - exponentials) + (share * total + of_lse) * there
    gradient = gradient / exponentials - share * of_target
    if softcap:
        gradient = gradient * (1 - torch.tanh(_at(input, index) / softcap).square())
    mass = mass + share * total + of_lse
    rows = torch.stack([maximum, mass / exponentials, gradient]).reshape(3, -1)
    return rows.masked_fill(ignored.reshape(1, -1), 0.0), (of_target * ~ignored).sum()


def cross_entropy_backward(dloss: Tensor, input: Tensor, target: Tensor, *options) -> Tensor:
    """dinput, which can be differentiated in turn."""
    loss = cross_entropy(input, target, *options)
    (dinput,) = torch.autograd.grad(loss, input, dloss, create_graph=True)
    return dinput


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *options,
    round_factors: bool = False,
) -> Tensor:
    """Cross entropy of input linear_weight^T + linear_bias; options are those of `cross_entropy`
    after target."""
    logits = linear(input, linear_weight, linear_bias, round_factors)
    return cross_entropy(logits, target, *options)


def linear_cross_entropy_backward(
    dloss: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    *options,
    round_factors: bool = False,
) -> tuple[Tensor | None, ...]:
    """(dinput, dlinear_weight, dlinear_bias), which can be differentiated in turn."""
    inputs = (input, linear_weight, linear_bias)
    operands = (input, linear_weight, target, linear_bias)
    loss = linear_cross_entropy(*operands, *options, round_factors=round_factors)
    given = [t for t in inputs if t is not None]
    found = iter(torch.autograd.grad(loss, given, dloss, create_graph=True))
    return tuple(None if t is None else next(found) for t in inputs)


def _softcapped(input: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(input / softcap) if softcap else input


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Each row's element at its index."""
    return x.gather(x.dim() - 1, index[..., None]).squeeze(-1)


def _of_target(
    x: Tensor, target: Tensor, weight: Tensor | None, ignored: Tensor
) -> tuple[Tensor, Tensor]:
    """Each row's class, 0 if it is ignored, and the weight of the class."""
    index = target.masked_fill(ignored, 0)
    return index, x.new_ones(target.shape) if weight is None else weight.to(x.dtype)[index]


def _sum_of_weights(x: Tensor, weight: Tensor | None) -> Tensor | int:
    return x.shape[-1] if weight is None else weight.to(x.dtype).sum()
