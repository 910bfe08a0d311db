"""Calls of linear_cross_entropy: hidden states, a layer, targets; by ours, by torch, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from tests.loss.cases import F16, F32, F64, IGNORED
from tests.support.results import assert_close

OPERANDS = ("input", "linear_weight", "linear_bias")


@dataclass
class Case:
    """One call and the upstream gradient of its loss."""

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    dloss: Tensor
    weight: Tensor | None = None
    options: dict = field(default_factory=dict)

    @property
    def text(self) -> str:
        shapes = f"{tuple(self.input.shape)} by {tuple(self.linear_weight.shape)}"
        return f"{self.input.dtype} {shapes} {self.options}"

    @property
    def operands(self) -> dict[str, Tensor]:
        given = {name: getattr(self, name) for name in OPERANDS}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def ours(self, input, linear_weight, linear_bias=None, weight=None) -> Tensor:
        return functional.linear_cross_entropy(
            input,
            linear_weight,
            self.target,
            linear_bias=linear_bias,
            weight=weight,
            **self.options,
        )

    def formula(self, input, linear_weight, linear_bias=None, weight=None) -> Tensor:
        logits = reference.linear.linear(input, linear_weight, linear_bias)
        return reference.loss.cross_entropy(logits, self.target, weight, **self.options)

    def torchs(self, input, linear_weight, linear_bias=None, weight=None) -> Tensor:
        if self.options.keys() & {"softcap", "z_loss"}:
            return self.formula(input, linear_weight, linear_bias, weight)
        logits = F.linear(input, linear_weight, linear_bias)
        return F.cross_entropy(logits, self.target, weight, **self.options)


def make(
    rows: int,
    in_features: int,
    classes: int,
    dtype: torch.dtype = F32,
    *,
    bias: bool = True,
    ignored: bool = True,
    weighted: bool = False,
    seed: int = 0,
    **options,
) -> Case:
    """Logits of a few units; of several rows every fifth is ignored."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    input = randn(rows, in_features)
    linear_weight = randn(classes, in_features).mul(3 / in_features**0.5)
    linear_bias = randn(classes) if bias else None
    target = torch.randint(classes, (rows,), generator=generator)
    if ignored and rows > 1:
        target[4::5] = options.get("ignore_index", IGNORED)
    weight = torch.rand(classes, generator=generator).add(0.5) if weighted else None
    dloss = randn(*((rows,) if options.get("reduction") == "none" else ()))
    if dtype is F16:
        dloss *= 1024  # as scalers do
    given = (input, linear_weight, linear_bias, target, dloss, weight)
    return Case(
        *(t.to(dtype) if t is not None and t.is_floating_point() else t for t in given), options
    )


def results(function, case: Case, *, double: bool = False) -> dict[str, Tensor]:
    """{"loss", "dinput", "dlinear_weight", "dlinear_bias"}."""
    leaves = {
        name: tensor.detach().to(F64 if double else tensor.dtype).requires_grad_()
        for name, tensor in case.operands.items()
    }
    weight = case.weight
    if weight is not None:
        weight = weight.to(F64 if double else case.input.dtype)
    loss = function(**leaves, weight=weight)
    gradients = torch.autograd.grad(loss, list(leaves.values()), case.dloss.to(loss.dtype))
    return {"loss": loss.detach()} | {
        f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)
    }


def check(*cases: Case) -> None:
    """Loss and gradients of the cases, pooled, by the numerics rule."""
    draws = [
        (results(c.ours, c), results(c.formula, c, double=True), results(c.torchs, c))
        for c in cases
    ]
    assert_close(draws, cases[0].text)
