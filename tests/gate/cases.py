"""Calls of the gate family: factors, and results by ours, by torch, in float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from onepass import functional, reference
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.results import check_cases

DTYPES = (F32, BF16, F16, F64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ACTIVATIONS = tuple(reference.gate.ACTIVATIONS)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
FORMS = ("two", "halves", "halves, gate last")
forms = pytest.mark.parametrize("form", FORMS)
RAW = torch.ops.onepass


@dataclass
class Case:
    """One call: its factors, one tensor or two, and the upstream gradient."""

    factors: list[Tensor]
    doutput: Tensor
    activation: str = "silu"
    gate_last: bool = False

    @property
    def text(self) -> str:
        factors = " ".join(f"{str(t.dtype)[6:]}{tuple(t.shape)}" for t in self.factors)
        return f"{self.activation} {factors} {self.gate_last=}"

    def ours(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return functional.gated_activation(
            gate, up, activation=self.activation, gate_last=self.gate_last
        )

    def torchs(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return reference.gate.gated_activation(gate, up, self.activation, self.gate_last)


def make(
    rows,
    cols: int,
    dtype: torch.dtype = F32,
    activation: str = "silu",
    form: str = "two",
    *,
    up_dtype: torch.dtype | None = None,
    doutput_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """Random factors whose product has shape (*rows, cols)."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows,) if isinstance(rows, int) else tuple(rows)

    def random(cols, dtype):
        return torch.randn((*size, cols), generator=generator).mul(2).to(dtype)

    if form == "two":
        factors = [random(cols, dtype), random(cols, up_dtype or dtype)]
    else:
        factors = [random(2 * cols, dtype)]
    out_dtype = torch.promote_types(factors[0].dtype, factors[-1].dtype)
    doutput = random(cols, doutput_dtype or out_dtype)
    return Case(factors, doutput, activation, form.endswith("last"))


def results(function, case: Case, *, double: bool = False) -> dict[str, Tensor]:
    """{"output", "dgate" and, with two factors, "dup"}."""
    leaves = [t.double() if double else t.detach() for t in case.factors]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output = function(*leaves)
    gradients = torch.autograd.grad(output, leaves, case.doutput.to(output.dtype))
    named = zip(("output", "dgate", "dup"), (output.detach(), *gradients), strict=False)
    return dict(named)


def check(*cases: Case) -> None:
    check_cases(results, cases)
