"""Calls of the loss family: logits, targets, options; results by ours, by torch, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from tests.support.results import assert_close

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (F32, BF16, F16, F64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
RAW = torch.ops.onepass
IGNORED = -100

# Options that change a formula, alone and together; "weighted" gives the classes weights.
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weighted": {"weighted": True},
    "smoothed": {"label_smoothing": 0.1},
    "weighted, smoothed": {"weighted": True, "label_smoothing": 0.3},
    "softcap": {"softcap": 4.0},
    "z_loss": {"z_loss": 0.01},
    "all": {
        "weighted": True, "label_smoothing": 0.2, "softcap": 3.0, "z_loss": 0.1,
        "reduction": "none",
    },
}  # fmt: skip
options = pytest.mark.parametrize("option", OPTIONS)


@dataclass
class Case:
    """One call and the upstream gradient of its loss."""

    input: Tensor
    target: Tensor
    dloss: Tensor
    weight: Tensor | None = None
    options: dict = field(default_factory=dict)

    @property
    def text(self) -> str:
        return f"{self.input.dtype} {tuple(self.input.shape)} {self.options}"

    def ours(self, input: Tensor, weight: Tensor | None) -> Tensor:
        return functional.cross_entropy(input, self.target, weight, **self.options)

    def inplace(self, input: Tensor, weight: Tensor | None) -> Tensor:
        """Into a copy, since results() passes the same logits to all."""
        options = self.options | {"inplace_backward": True}
        return functional.cross_entropy(input.clone(), self.target, weight, **options)

    def formula(self, input: Tensor, weight: Tensor | None) -> Tensor:
        return reference.loss.cross_entropy(input, self.target, weight, **self.options)

    def torchs(self, input: Tensor, weight: Tensor | None) -> Tensor:
        if self.options.keys() & {"softcap", "z_loss"}:
            return self.formula(input, weight)
        return F.cross_entropy(input, self.target, weight, **self.options)


def make(
    rows: int,
    cols: int,
    dtype: torch.dtype = F32,
    *,
    ignored: bool = True,
    weighted: bool = False,
    seed: int = 0,
    **options,
) -> Case:
    """Random logits; the last row of several is ignored."""
    generator = torch.Generator().manual_seed(seed)
    input = torch.randn(rows, cols, generator=generator).mul(3).to(dtype)
    target = torch.randint(cols, (rows,), generator=generator)
    if ignored and rows > 1:
        target[-1] = options.get("ignore_index", IGNORED)
    weight = torch.rand(cols, generator=generator).add(0.5).to(dtype) if weighted else None
    shape = (rows,) if options.get("reduction") == "none" else ()
    dloss = torch.randn(shape, generator=generator)
    if dtype is F16:
        dloss *= 1024  # as scalers do: otherwise gradients would be subnormal
    return Case(input, target, dloss.to(dtype), weight, options)


def results(function, case: Case, *, double: bool = False) -> dict[str, Tensor]:
    """{"loss", "dinput"}."""
    dtype = F64 if double else case.input.dtype
    leaf = case.input.detach().to(dtype).requires_grad_()
    loss = function(leaf, None if case.weight is None else case.weight.to(dtype))
    (dinput,) = torch.autograd.grad(loss, leaf, case.dloss.to(loss.dtype))
    return {"loss": loss.detach(), "dinput": dinput}


def check(*cases: Case) -> None:
    """Loss and gradient of the cases, pooled, by the numerics rule."""
    draws = [
        (results(c.ours, c), results(c.formula, c, double=True), results(c.torchs, c))
        for c in cases
    ]
    assert_close(draws, cases[0].text)
