"""Losses whose classes are split between processes: each has the logits of its own classes.

In each row a process finds its largest logit, the sum of exponentials relative to it and, if it
has the target's class, the logit of that class. Two all-reduces merge these into the numbers of the
whole row: one float32 per row for the largest, two for the sums (three with label smoothing),
float64 for float64. The gradient needs nothing else: each process computes that of its own
logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onepass._arguments import refuse_gradient
from onepass._ops import decomposition, linear_loss, loss
from onepass._ops.differentiation import is_differentiated_again

_NONE = loss.REDUCTIONS["none"]
_IGNORED = -100  # in place of a class's position, which is not negative
_CHUNK_OF_CLASS = 1 << 10  # bytes that a chunk of logits has of each class on the CPU


@dataclass
class Classes:
    """The classes of this process: `count` from `begin` on, of `total`.

    groups: the dimensions of meshes along which the classes are split.
    """

    begin: int
    count: int
    total: int
    groups: Sequence[tuple[DeviceMesh, int]]

    def reduced(self, numbers: Tensor, by: str) -> Tensor:
        """The sum, or the largest, over the processes that have the other classes."""
        for group in self.groups:
            numbers = collectives.wait_tensor(collectives.all_reduce(numbers, by, group))
        return numbers


@dataclass
class Options:
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float


@dataclass
class _Rows:
    """Facts of each row that follow from its target.

    Attributes:
        ignored: whether it does not count.
        here: whether the class is one of this process's.
        place: of the class among these, 0 where it is another's, _IGNORED where the row is.
        of_target: the weight of the class, 0 where the row is ignored, NaN where it is no class.
        weight: of this process's classes, or None: all are 1.
        total: the sum of the weights of all classes.
    """

    ignored: Tensor
    here: Tensor
    place: Tensor
    of_target: Tensor
    weight: Tensor | None
    total: Tensor | int

    @property
    def column(self) -> Tensor:
        """(rows, 1), the place as an index."""
        return self.place.clamp(min=0)[:, None]

    @property
    def of_column(self) -> Tensor | float:
        """The weight of the class at that place."""
        return 1.0 if self.weight is None else self.weight.double()[self.column[:, 0]]


@dataclass
class _Pieces:
    """Statistics of each row of this process's logits, in float64."""

    maximum: list[Tensor] = field(default_factory=list)
    exponentials: list[Tensor] = field(default_factory=list)  # relative to the maximum
    at_target: list[Tensor] = field(default_factory=list)  # the logit, without a softcap
    below: list[Tensor] = field(default_factory=list)  # sum_c w_c (lse - x_c), for smoothing


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: Classes,
    options: Options,
    inplace: bool,
) -> Tensor:
    """The loss of each row, in float32 (float64 for float64).

    Args:
        logits: (rows, classes.count) or (classes.count,).
        target: (rows,) or (), of all classes.
        weight: (classes.total,), or None.
        inplace: the backward writes the gradient over the logits.
    """
    (weight,) = decomposition.wide(weight)
    whole = logits.new_empty((*logits.shape[:-1], classes.total), device="meta")
    _check("cross_entropy", weight, options, whole, target)
    target = target.reshape(-1)
    logits = logits.reshape(target.shape[0], classes.count)
    return _OfLogits.apply(logits, target, weight, classes, options, inplace)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    classes: Classes,
    options: Options,
    casts: tuple[torch.dtype | None, torch.dtype | None],
) -> Tensor:
    """The same of input linear_weight^T + linear_bias, with the logits of a chunk of rows at a
    time; the backward computes them again.

    Args:
        input: (rows, in_features) or (in_features,).
        linear_weight, linear_bias: of this process's classes.
        casts: autocast's dtypes of input, and of linear_weight and linear_bias.
    """
    (weight,) = decomposition.wide(weight)
    layer = [
        None if t is None else t.new_empty((classes.total, *t.shape[1:])[: t.dim()], device="meta")
        for t in (linear_weight, linear_bias)
    ]
    _check("linear_cross_entropy", weight, options, input, layer[0], target, layer[1])
    target = target.reshape(-1)
    input = input.reshape(target.shape[0], input.shape[-1])
    operands = (input, linear_weight, linear_bias)
    return _OfProduct.apply(*operands, target, weight, classes, options, casts)


def _check(op: str, weight: Tensor | None, options: Options, *tensors: Tensor | None) -> None:
    """Errors are those of the whole call: an operator gets a part of the classes.

    A fake operator checks compiled calls. It may know sizes as symbols, which the check itself
    does not take; nothing uses its results, so that no graph keeps it.
    """
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        refuse_gradient(op, "weight")
    compiling = torch.compiler.is_compiling()
    call = [None if t is None else t.to("meta") for t in (*tensors, weight)]
    *numbers, z_loss = vars(options).values()
    if op == "cross_entropy":
        check = loss._forward if compiling else loss._forward_check
        check(*call, *numbers, _NONE, z_loss, None)
    else:
        check = linear_loss._op if compiling else linear_loss._check
        check(*call, *numbers, z_loss, None, 0)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _rows(
    op: str, target: Tensor, weight: Tensor | None, classes: Classes, options: Options
) -> _Rows:
    ignored = target == options.ignore_index
    wrong = ~ignored & ((target < 0) | (target >= classes.total))
    if target.device.type == "cpu" and not torch.compiler.is_compiling() and wrong.any():
        raise RuntimeError(
            f"{op}: target must lie between 0 and {classes.total - 1} or be ignore_index, "
            f"{options.ignore_index}, got {int(target[wrong][0])}"
        )
    here = ~(ignored | wrong) & (target >= classes.begin)
    here = here & (target < classes.begin + classes.count)
    place = (target - classes.begin).where(here, 0).masked_fill(ignored, _IGNORED)
    if weight is None:
        of_target, total, mine = (~ignored).double(), classes.total, None
    else:
        index = target.where(~(ignored | wrong), 0)
        of_target = weight.double()[index].masked_fill(ignored, 0.0)
        total = weight.double().sum()
        mine = weight[classes.begin : classes.begin + classes.count].contiguous()
    return _Rows(ignored, here, place, of_target.masked_fill(wrong, math.nan), mine, total)


def _add_pieces(pieces: _Pieces, logits: Tensor, rows: _Rows, options: Options) -> None:
    wide, count = _accumulator(logits.dtype), logits.shape[1]
    if not count:
        nothing = logits.new_zeros(logits.shape[0], dtype=torch.float64)
        pieces.maximum.append(nothing.masked_fill(~rows.ignored, -math.inf))
        for numbers in (pieces.exponentials, pieces.at_target, pieces.below):
            numbers.append(nothing)
        return
    smooths, weight = options.label_smoothing != 0.0, rows.weight

    def run(weight: Tensor | None, smoothing: float) -> tuple[Tensor, Tensor]:
        of_loss = (_IGNORED, smoothing, options.softcap, _NONE, 0.0, wide)
        losses, statistics, _ = loss._forward(logits, rows.place, weight, *of_loss)
        return losses.double(), statistics.double()

    # With a smoothing of 1 the loss is the mean of w_c (lse - x_c) over the classes, whatever the
    # target. Without weights the factor that the operator keeps is 1 / exponentials.
    losses, (maximum, factor, _) = run(None, float(smooths))
    if smooths and weight is not None:
        losses, _ = run(weight, 1.0)
    pieces.maximum.append(maximum)
    pieces.exponentials.append(factor.reciprocal())
    at_target = logits.gather(1, rows.column)[:, 0].double()
    pieces.at_target.append(at_target)
    if not options.softcap:  # the operator adds 0 times that logit
        losses = torch.where(at_target == -math.inf, rows.of_column * math.inf, losses)
    pieces.below.append(losses * count)


def _merged(
    pieces: _Pieces, rows: _Rows, classes: Classes, options: Options, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(losses, statistics of the operator (3, rows)) of all classes.

    The operator has a target in each row. Where the class is another process's, its gradient is
    that of the class in that place.
    """
    mine, exponentials, at_target, below = (
        torch.cat(numbers)
        for numbers in (pieces.maximum, pieces.exponentials, pieces.at_target, pieces.below)
    )
    maximum = classes.reduced(mine.to(wide), "max").double()
    capped, slope = _softcapped(at_target, options.softcap)
    sums = [exponentials * (mine - maximum).exp(), capped.where(rows.here, 0.0)]
    if options.label_smoothing:
        weights = mine.new_ones(classes.count) if rows.weight is None else rows.weight.double()
        relative = below + weights.sum() * (maximum - (mine + exponentials.log()))
        # Of classes whose exp(x) is all 0. An infinite distance, by a weight of 0, is NaN.
        sums.append(torch.where(mine == -math.inf, (weights * math.inf).sum(), relative))
    sums = [s.masked_fill(rows.ignored, 0.0) for s in sums]
    sums = classes.reduced(torch.stack(sums).to(wide), "sum").double()
    exponentials, of_class = sums[0], sums[1]
    logarithm, smoothing = exponentials.log(), options.label_smoothing
    lse = maximum + logarithm
    there = (capped - maximum).exp()
    probability = there / exponentials
    beside = torch.where(rows.here, (there - exponentials) / exponentials, probability)
    losses = (1 - smoothing) * rows.of_target * ((maximum - of_class) + logarithm)
    mass = (1 - smoothing) * rows.of_target
    gradient = mass * beside
    if smoothing:
        share = smoothing / classes.total
        losses = losses + share * (sums[2] + rows.total * logarithm)
        mass = mass + share * rows.total
        of_column = rows.of_column if classes.count else 0.0
        gradient = gradient + share * (rows.total * probability - of_column)
    if options.z_loss:
        losses = losses + options.z_loss * rows.of_target * lse.square()
        of_lse = 2 * options.z_loss * rows.of_target * lse
        mass, gradient = mass + of_lse, gradient + of_lse * probability
    losses = losses.masked_fill(rows.ignored, 0.0)
    statistics = torch.stack([maximum, mass / exponentials, gradient * slope])
    return losses.to(wide), statistics.masked_fill(rows.ignored, 0.0).to(wide)


def _softcapped(x: Tensor, softcap: float) -> tuple[Tensor, Tensor | float]:
    """x and its slope."""
    if not softcap:
        return x, 1.0
    tangent = (x / softcap).tanh()
    return softcap * tangent, 1 - tangent.square()


def _gradient(
    logits: Tensor,
    dlosses: Tensor,
    statistics: Tensor,
    rows: _Rows,
    classes: Classes,
    options: Options,
    inplace: bool,
) -> Tensor:
    """Gradient of this process's logits."""
    if not classes.count:
        return logits
    wide, smoothing = _accumulator(logits.dtype), options.label_smoothing
    # Smoothing is a share of all classes, not of these.
    share = smoothing * classes.count / classes.total
    weight = rows.weight if smoothing else None
    of_loss = (_IGNORED, share, options.softcap, _NONE)
    call = (logits, rows.place, weight, *of_loss, dlosses.to(wide), statistics)
    call += (logits.new_empty((0,), dtype=wide),)
    if inplace:
        loss._backward_inplace(*call)
        torch.autograd.graph.increment_version(logits)
        return logits.detach()
    return loss._backward(*call)


def _refuse_second_derivative(op: str, name: str) -> None:
    if is_differentiated_again():
        raise RuntimeError(
            f"{op}: {name} must be redistributed to whole classes for second derivatives, got "
            "classes that are split between processes"
        )


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, weight, classes, options, inplace):
        rows = _rows("cross_entropy", target, weight, classes, options)
        pieces = _Pieces()
        _add_pieces(pieces, logits, rows, options)
        wide = _accumulator(logits.dtype)
        losses, statistics = _merged(pieces, rows, classes, options, wide)
        ctx.save_for_backward(logits, target, weight, statistics)
        ctx.call = classes, options, inplace and not torch.compiler.is_compiling()
        return losses

    @staticmethod
    def backward(ctx, dlosses):
        _refuse_second_derivative("cross_entropy", "input")
        logits, target, weight, statistics = ctx.saved_tensors
        classes, options, inplace = ctx.call
        rows = _rows("cross_entropy", target, weight, classes, options)
        call = (statistics, rows, classes, options, inplace)
        return _gradient(logits, dlosses, *call), *(None,) * 5


class _OfProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, target, weight, classes, options, casts):
        rows = _rows("linear_cross_entropy", target, weight, classes, options)
        operands = linear_loss._cast(input, linear_weight, linear_bias, *casts)
        pieces = _Pieces()
        with torch.autocast(input.device.type, enabled=False):
            for chunk, logits in _chunks(*operands):
                _add_pieces(pieces, logits, _of_chunk(rows, chunk), options)
        wide = _accumulator(operands[0].dtype)
        losses, statistics = _merged(pieces, rows, classes, options, wide)
        tensors = (input, linear_weight, linear_bias, target, weight, statistics)
        ctx.save_for_backward(*tensors)
        ctx.call = classes, options, casts
        return losses

    @staticmethod
    def backward(ctx, dlosses):
        _refuse_second_derivative("linear_cross_entropy", "linear_weight")
        *given, target, weight, statistics = ctx.saved_tensors
        classes, options, casts = ctx.call
        rows = _rows("linear_cross_entropy", target, weight, classes, options)
        input, linear_weight, linear_bias = linear_loss._cast(*given, *casts)
        wide, needs = _accumulator(input.dtype), ctx.needs_input_grad
        dinput, dweight, dbias = [], None, None
        with torch.autocast(input.device.type, enabled=False):
            for chunk, logits in _chunks(input, linear_weight, linear_bias):
                if logits.dtype is torch.float16:  # a mean's gradients are subnormal there
                    logits = logits.float()
                saved = (dlosses[chunk], statistics[:, chunk])
                call = (*saved, _of_chunk(rows, chunk), classes, options)
                inplace = not torch.compiler.is_compiling()
                gradient = _gradient(logits, *call, inplace)
                if needs[0]:
                    dinput.append(_product(gradient, linear_weight, wide))
                if needs[1]:
                    dweight = _added(dweight, _product(gradient.t(), input[chunk], wide))
                if needs[2]:
                    dbias = _added(dbias, gradient.sum(0, dtype=wide))
        gradients = (torch.cat(dinput) if needs[0] else None, dweight, dbias)
        return (
            *(
                gradient.to(tensor.dtype) if wanted else None
                for gradient, tensor, wanted in zip(gradients, given, needs[:3], strict=True)
            ),
            *(None,) * 5,
        )


def _added(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total.add_(more)


def _product(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    dtype = torch.promote_types(left.dtype, right.dtype)
    return linear_loss._product(left.to(dtype), right.to(dtype), wide)


def _chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Rows, at least one chunk of them, and their logits."""
    linear_weight, linear_bias = (
        None if t is None else t.to(input.dtype) for t in (linear_weight, linear_bias)
    )
    step = _CHUNK_OF_CLASS // input.dtype.itemsize
    if not input.is_cpu:
        of_row = max(linear_weight.shape[0] * input.dtype.itemsize, 1)
        step = max(linear_loss.CHUNK_BYTES // of_row, linear_loss._FEWEST_ROWS)
    # Compiled, the number of chunks is fixed and that of rows is not: a range over the rows would
    # fix them.
    count = max(-(-input.shape[0] // step), 1)
    for number in range(count):
        chunk = slice(number * step, None if number == count - 1 else (number + 1) * step)
        yield chunk, F.linear(input[chunk], linear_weight, linear_bias)


def _of_chunk(rows: _Rows, chunk: slice) -> _Rows:
    of_rows = (rows.ignored, rows.here, rows.place, rows.of_target)
    return _Rows(*(numbers[chunk] for numbers in of_rows), rows.weight, rows.total)
