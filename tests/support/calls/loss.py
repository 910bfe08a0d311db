"""Cross entropy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from onepass import functional
from tests.support.calls.call import RAW, Call, flat, randn

SMOOTHING = 0.1


def linear_calls() -> Iterator[Call]:
    def own():
        target = torch.tensor([3, 0, -100, 39, 7, 7])
        layer = {"linear_weight": randn(40, 8, seed=3), "linear_bias": randn(40, seed=2)}
        return {"input": randn(6, 8), **layer, "target": target, "weight": randn(40, seed=1).abs()}

    def ours(input, linear_weight, linear_bias, target, weight):
        options = dict(linear_bias=linear_bias, weight=weight, label_smoothing=SMOOTHING)
        return [functional.linear_cross_entropy(input, linear_weight, target, **options)]

    def stock(input, linear_weight, linear_bias, target, weight):
        logits = F.linear(input, linear_weight, linear_bias)
        return [F.cross_entropy(logits, target, weight, label_smoothing=SMOOTHING)]

    of = {"optional": ("linear_bias", "weight"), "differentiable": True, "constant": ("weight",)}
    # The products of a class of tensor are its own.
    yield Call("functional.linear_cross_entropy", own, ours, stock, **of, composed=True)

    def raw(op):
        def run(input, linear_weight, linear_bias, target, weight, dloss):
            tensors = (input, linear_weight, target, linear_bias, weight)
            return flat(op(*tensors, -100, SMOOTHING, 0.0, 0.2, dloss, 7))

        return run

    for op in (RAW.linear_loss, RAW.linear_loss_check):
        yield Call(
            f"ops.{op.__name__}",
            lambda: own() | {"dloss": randn(6, seed=5)},
            raw(op),
            optional=("linear_bias", "weight"),
        )


def calls() -> Iterator[Call]:
    def own():
        target = torch.tensor([3, 0, -100, 39, 7, 7])
        return {"input": randn(6, 40), "target": target, "weight": randn(40, seed=1).abs()}

    def by(function):
        def run(input, target, weight):
            return [function(input, target, weight, label_smoothing=SMOOTHING)]

        return run

    of = {"optional": ("weight",), "differentiable": True, "constant": ("weight",)}
    yield Call(
        "functional.cross_entropy", own, by(functional.cross_entropy), by(F.cross_entropy), **of
    )

    def forward(op):
        def run(input, target, weight):
            return flat(op(input, target, weight, -100, SMOOTHING, 0.0, 1, 0.2, None))

        return run

    for op in (RAW.loss_forward, RAW.loss_forward_check):
        yield Call(f"ops.{op.__name__}", own, forward(op), optional=("weight",))

    yield from linear_calls()

    def upstream():
        numbers = {"dloss": torch.tensor(0.5), "total_weight": torch.tensor(3.0)}
        return own() | numbers | {"statistics": randn(3, 6, seed=2).abs()}

    def backward(op):
        def run(input, target, weight, dloss, total_weight, statistics):
            of_loss = (-100, SMOOTHING, 0.0, 1, dloss, statistics, total_weight)
            return flat(op(input, target, weight, *of_loss))

        return run

    for name in ("loss_backward", "loss_backward_inplace"):
        for op in (getattr(RAW, name), getattr(RAW, f"{name}_check")):
            written = ("input",) if op is RAW.loss_backward_inplace else ()
            yield Call(
                f"ops.{op.__name__}", upstream, backward(op), written=written, optional=("weight",)
            )
