"""Cross entropy."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tests.support.calls.call import Call, public, randn, raw

SMOOTHING = 0.1
OPTIONS = {"ignore_index": -100, "label_smoothing": SMOOTHING, "softcap": 0.0}


def linear_calls() -> Iterator[Call]:
    def own():
        target = torch.tensor([3, 0, -100, 39, 7, 7])
        layer = {"linear_weight": randn(40, 8, seed=3), "linear_bias": randn(40, seed=2)}
        return {"input": randn(6, 8), **layer, "target": target, "weight": randn(40, seed=1).abs()}

    def stock(input, linear_weight, linear_bias, target, weight):
        logits = F.linear(input, linear_weight, linear_bias)
        return [F.cross_entropy(logits, target, weight, label_smoothing=SMOOTHING)]

    of = {"optional": ("linear_bias", "weight"), "differentiable": True, "constant": ("weight",)}
    # The products of a class of tensor are its own.
    options = {"label_smoothing": SMOOTHING}
    yield public("linear_cross_entropy", own, "", stock, options, **of, composed=True)

    def upstream():
        return own() | {"dloss": randn(6, seed=5)}

    yield from raw("linear_loss", upstream, optional=("linear_bias", "weight"), **OPTIONS,
                   z_loss=0.2, gradient_mask=7)  # fmt: skip


def calls() -> Iterator[Call]:
    def own():
        target = torch.tensor([3, 0, -100, 39, 7, 7])
        return {"input": randn(6, 40), "target": target, "weight": randn(40, seed=1).abs()}

    def stock(input, target, weight):
        return [F.cross_entropy(input, target, weight, label_smoothing=SMOOTHING)]

    of = {"optional": ("weight",), "differentiable": True, "constant": ("weight",)}
    yield public("cross_entropy", own, "", stock, {"label_smoothing": SMOOTHING}, **of)

    options = {"optional": ("weight",), "reduction_kind": 1, **OPTIONS}
    yield from raw("loss_forward", own, z_loss=0.2, **options)

    yield from linear_calls()

    def upstream():
        numbers = {"dloss": torch.tensor(0.5), "total_weight": torch.tensor(3.0)}
        return own() | numbers | {"statistics": randn(3, 6, seed=2).abs()}

    yield from raw("loss_backward", upstream, **options)
    yield from raw("loss_backward_inplace", upstream, written=("input",), **options)
