"""Calls of modulated norms: tensors, and results by ours, by torch, in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from tests.support.results import assert_close

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (F32, BF16, F16, F64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
KINDS = list(itertools.product((False, True), ("plain", "gated")))
kinds = pytest.mark.parametrize("rms, form", KINDS)
# A scale belongs to a sample, with and without ones in its shape, or to a row.
PER = ("sample", "ones", "row")
pers = pytest.mark.parametrize("per", PER)
RAW = torch.ops.onepass
INPUTS = ("input", "scale", "shift", "residual", "gate")
# Rows that are too long for CUDA's registers: a multiple of 16 bytes, and one column more.
LONG = {F32: 4104, BF16: 8200, F16: 8200, F64: 4104}


@dataclass
class Case:
    """One call: which norm, its tensors by name, and the upstream gradients."""

    rms: bool
    tensors: dict[str, Tensor]
    gradients: tuple[Tensor, ...]
    row_dims: int = 1
    eps: float = 1e-5

    @property
    def name(self) -> str:
        return "modulated_rms_norm" if self.rms else "modulated_layer_norm"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensors["input"].shape[-self.row_dims :])

    @property
    def text(self) -> str:
        named = self.tensors.items()
        return " ".join([self.name, *(f"{n}={str(t.dtype)[6:]}{tuple(t.shape)}" for n, t in named)])

    def _call(self, module, input, scale, shift=None, residual=None, gate=None):
        function = getattr(module, self.name)
        found = function(input, self.shape, scale, shift, self.eps, residual=residual, gate=gate)
        return found if isinstance(found, tuple) else (found,)

    def ours(self, **tensors):
        return self._call(functional, **tensors)

    def definition(self, **tensors):
        """The reference, of the sum as the operator rounds it; its gradient passes through."""
        if "residual" not in tensors:
            return self._call(reference.norm, **tensors)
        input, residual, gate = (
            tensors.pop("input"),
            tensors.pop("residual"),
            tensors.pop("gate", None),
        )
        h = reference.norm.gated_add(input, residual, gate, self.shape)
        rounded = h.detach().to(self.tensors["residual"].dtype).to(h.dtype)
        h = h + (rounded - h.detach())
        return *self._call(reference.norm, h, **tensors), h

    def torchs(self, input, scale, shift=None, residual=None, gate=None):
        """The composition that models use, with torch's norm."""
        x, each = input, lambda t: reference.norm.for_rows(t, input, self.shape)
        if residual is not None:
            x = input if gate is None else each(gate) * input
            x = (residual + x).to(residual.dtype)
        norm = F.rms_norm if self.rms else F.layer_norm
        y = norm(x, self.shape, eps=self.eps) * (1 + each(scale))
        y = (y if shift is None else y + each(shift)).to(input.dtype)
        return (y,) if residual is None else (y, x)


def make(
    rms: bool,
    batch: int,
    tokens,
    cols: int,
    dtype: torch.dtype = F32,
    per: str = "sample",
    form: str = "plain",
    *,
    shift: bool = True,
    scale_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """A random case of shape (batch, *tokens, cols); form: "plain", "add" or "gated"."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    size = (batch, *tokens, cols)
    of_scale = {
        "sample": (batch, cols),
        "ones": (batch, *(1 for _ in tokens), cols),
        "row": size,
    }[per]

    def random(size, dtype):
        return torch.randn(size, generator=generator).to(dtype)

    scale_dtype, residual_dtype = scale_dtype or dtype, residual_dtype or dtype
    tensors = {"input": random(size, dtype), "scale": random(of_scale, scale_dtype)}
    if shift:
        tensors["shift"] = random(of_scale, scale_dtype)
    gradients = [random(size, dtype)]
    if form != "plain":
        tensors["residual"] = random(size, residual_dtype)
        gradients.append(random(size, residual_dtype))
    if form == "gated":
        tensors["gate"] = random(of_scale, scale_dtype)
    return Case(rms, tensors, tuple(gradients))


def results(function, case: Case, *, double: bool = False, wrt=INPUTS) -> dict[str, Tensor]:
    """Outputs y and h, and the gradients of the inputs named in `wrt`."""
    leaves = {n: t.double() if double else t.detach() for n, t in case.tensors.items()}
    leaves = {name: leaf.requires_grad_(name in wrt) for name, leaf in leaves.items()}
    outputs = function(**leaves)
    asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    pairs = zip(outputs, case.gradients, strict=True)
    pairs = [(o, g.to(o.dtype)) for o, g in pairs if o.requires_grad]  # not h, for a scale alone
    differentiated, upstream = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(differentiated, list(asked.values()), upstream)
    named = dict(zip(("y", "h"), (output.detach() for output in outputs), strict=False))
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


def raw_forward(input: Tensor, scale: Tensor, **arguments):
    """The raw operator; tensors that are not given are left out, the row is the last dimension."""
    defaults = dict.fromkeys(("shift", "residual", "gate", "out_dtype"))
    defaults |= dict(normalized_shape=list(input.shape[-1:]), kind=0, eps=1e-5)
    defaults |= dict(save_statistics=True)
    return RAW.modulated_norm_forward(**defaults | {"input": input, "scale": scale} | arguments)


def raw_backward(x: Tensor, scale: Tensor, **arguments):
    """As :func:`raw_forward`, with every gradient."""
    defaults = dict.fromkeys(("doutput", "dresidual_out", "shift", "branch", "gate"))
    defaults |= dict.fromkeys(("input_dtype", "residual_dtype"))
    defaults |= dict(normalized_shape=list(x.shape[-1:]), kind=0, grad_mask=31)
    return RAW.modulated_norm_backward(**defaults | {"x": x, "scale": scale} | arguments)
