"""Calls whose branch is scaled: tensors, and results by ours, by torch, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from tests.support.results import assert_close
from tests.support.seeds import drawn_seed

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (F32, BF16, F16, F64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# After the sum comes a norm or nothing; "alone" has no residual either.
FORMS = ("layer", "rms", "add", "alone")
forms = pytest.mark.parametrize("form", FORMS)
# Which scales there are: of columns, of rows.
SCALES = ("columns", "rows", "both")
scales = pytest.mark.parametrize("scale", SCALES)
RAW = torch.ops.onepass
INPUTS = ("input", "residual", "weight", "bias", "column_scale")
# Rows that are too long for the registers of a norm on CUDA.
LONG = {F32: 4104, BF16: 8200, F16: 8200, F64: 4104}
SEED = 5


@dataclass
class Case:
    """One call: its tensors by name, and the upstream gradients."""

    form: str
    tensors: dict[str, Tensor]
    row_scale: Tensor | None
    gradients: tuple[Tensor, ...]
    p: float = 0.0
    offset: float = 0.0
    eps: float = 1e-5

    @property
    def is_norm(self) -> bool:
        return self.form in ("layer", "rms")

    @property
    def text(self) -> str:
        named = self.tensors.items()
        return " ".join([self.form, *(f"{n}={str(t.dtype)[6:]}{tuple(t.shape)}" for n, t in named)])

    def ours(self, input, residual=None, weight=None, bias=None, column_scale=None):
        if self.p:
            torch.manual_seed(SEED)
        scales = {"column_scale": column_scale, "row_scale": self.row_scale}
        if not self.is_norm:
            return (functional.add_dropout(input, residual, self.p, **scales),)
        shape, scales["dropout_p"] = input.shape[-1:], self.p
        if self.form == "rms":
            scales["weight_offset"] = self.offset
            return functional.add_rms_norm(input, residual, shape, weight, self.eps, **scales)
        return functional.add_layer_norm(input, residual, shape, weight, bias, self.eps, **scales)

    def _branch(self, input, column_scale):
        row_scale = None if self.row_scale is None else self.row_scale.to(input.dtype)
        if self.p:
            input = reference.dropout.dropout(input, self.p, drawn_seed(SEED))
        return reference.dropout.scaled(input, column_scale, row_scale)

    def _norm(self, norms, h, weight, bias):
        if self.form == "rms":
            weight = None if weight is None else weight + self.offset
            return norms.rms_norm(h, h.shape[-1:], weight, self.eps)
        return norms.layer_norm(h, h.shape[-1:], weight, bias, self.eps)

    def definition(self, input, residual=None, weight=None, bias=None, column_scale=None):
        """The reference, of the sum as the operator rounds it; its gradient passes through."""
        branch = self._branch(input, column_scale)
        h = branch if residual is None else residual + branch
        if not self.is_norm:
            return (h,)
        rounded = h.detach().to(self.tensors["residual"].dtype).to(h.dtype)
        h = h + (rounded - h.detach())
        return self._norm(reference.norm, h, weight, bias), h

    def torchs(self, input, residual=None, weight=None, bias=None, column_scale=None):
        """The composition that models use, with torch's norm."""
        branch = self._branch(input, column_scale)
        h = branch if residual is None else residual + branch
        h = h.to((input if residual is None else residual).dtype)
        if not self.is_norm:
            return (h,)
        wide = [None if t is None else t.to(h.dtype) for t in (weight, bias)]
        return self._norm(F, h, *wide).to(input.dtype), h


def row_factors(batch: int, dtype: torch.dtype = F32) -> Tensor:
    """Factors of rows, every third of which is dropped."""
    keep = torch.arange(batch, dtype=dtype) % 3 != 1
    return keep.to(F64 if dtype == F64 else F32) * 1.25


def make(
    form: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = F32,
    scale: str = "both",
    *,
    p: float = 0.0,
    offset: float = 0.0,
    affine: bool = True,
    scale_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """A random case of shape (batch, *, cols)."""
    generator = torch.Generator().manual_seed(seed)

    def random(size, dtype):
        return torch.randn(size, generator=generator).to(dtype)

    scale_dtype, residual_dtype = scale_dtype or dtype, residual_dtype or dtype
    tensors, cols = {"input": random(shape, dtype)}, shape[-1:]
    is_norm = form in ("layer", "rms")
    if form != "alone":
        tensors["residual"] = random(shape, residual_dtype)
    if is_norm and affine:
        tensors["weight"] = random(cols, dtype)
        if form == "layer":
            tensors["bias"] = random(cols, dtype)
    if scale != "rows":
        tensors["column_scale"] = random(cols, scale_dtype)
    factors = None if scale == "columns" else row_factors(shape[0], dtype)
    gradients = (random(shape, residual_dtype),)
    if is_norm:
        gradients = (random(shape, dtype), *gradients)
    return Case(form, tensors, factors, gradients, p, offset)


def results(function, case: Case, *, double: bool = False, wrt=INPUTS) -> dict[str, Tensor]:
    """The outputs, and the gradients of the inputs named in `wrt`."""
    leaves = {n: t.double() if double else t.detach() for n, t in case.tensors.items()}
    leaves = {name: leaf.requires_grad_(name in wrt) for name, leaf in leaves.items()}
    outputs = function(**leaves)
    asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    pairs = zip(outputs, case.gradients, strict=True)
    pairs = [(o, g.to(o.dtype)) for o, g in pairs if o.requires_grad]
    differentiated, upstream = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(differentiated, list(asked.values()), upstream)
    names = ("y", "h") if case.is_norm else ("h",)
    named = dict(zip(names, (output.detach() for output in outputs), strict=True))
    return named | {f"d{n}": g for n, g in zip(asked, gradients, strict=True)}


def check(*cases: Case, wrt=INPUTS) -> None:
    """Outputs and gradients of the cases, pooled, by the numerics rule."""
    draws = [
        (
            results(case.ours, case, wrt=wrt),
            results(case.definition, case, double=True, wrt=wrt),
            results(case.torchs, case, wrt=wrt),
        )
        for case in cases
    ]
    assert_close(draws, cases[0].text)


def check_draws(*arguments, draws: int, **keywords) -> None:
    check(*(make(*arguments, seed=seed, **keywords) for seed in range(draws)))
