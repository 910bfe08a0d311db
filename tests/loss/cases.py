"""Calls of the loss family: logits or a layer's input, targets, options; results by ours, by torch,
in float64."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.results import check_cases

dtypes = pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=str)
RAW = torch.ops.onepass
IGNORED = -100
OPERANDS = ("input", "linear_weight", "linear_bias")

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
    """One call, of linear_cross_entropy if there is a layer, and its loss's upstream gradient."""

    input: Tensor
    target: Tensor
    dloss: Tensor
    weight: Tensor | None = None
    options: dict = field(default_factory=dict)
    linear_weight: Tensor | None = None
    linear_bias: Tensor | None = None

    @property
    def text(self) -> str:
        shapes = [tuple(tensor.shape) for tensor in self.operands.values()]
        return f"{self.input.dtype} {shapes} {self.options}"

    @property
    def operands(self) -> dict[str, Tensor]:
        """The tensors that get a gradient."""
        given = {name: getattr(self, name) for name in OPERANDS}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def ours(self, input, linear_weight=None, linear_bias=None, weight=None, **more) -> Tensor:
        options = self.options | {"weight": weight} | more
        if linear_weight is None:
            return functional.cross_entropy(input, self.target, **options)
        options["linear_bias"] = linear_bias
        return functional.linear_cross_entropy(input, linear_weight, self.target, **options)

    def inplace(self, input, weight=None) -> Tensor:
        """Into a copy, since results() passes the same logits to all."""
        return self.ours(input.clone(), weight=weight, inplace_backward=True)

    def formula(self, input, linear_weight=None, linear_bias=None, weight=None) -> Tensor:
        if linear_weight is not None:
            input = reference.linear.linear(input, linear_weight, linear_bias)
        return reference.loss.cross_entropy(input, self.target, weight, **self.options)

    def torchs(self, input, linear_weight=None, linear_bias=None, weight=None) -> Tensor:
        if self.options.keys() & {"softcap", "z_loss"}:
            return self.formula(input, linear_weight, linear_bias, weight)
        if linear_weight is not None:
            input = F.linear(input, linear_weight, linear_bias)
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
    return Case(input, target, _upstream(rows, dtype, options, generator), weight, options)


def make_linear(
    rows: int, in_features: int, classes: int, dtype: torch.dtype = F32, *, bias: bool = True,
    ignored: bool = True, weighted: bool = False, seed: int = 0, **options,
) -> Case:  # fmt: skip
    """Logits of a few units; of several rows every fifth is ignored."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    input = randn(rows, in_features).to(dtype)
    linear_weight = randn(classes, in_features).mul(3 / in_features**0.5).to(dtype)
    linear_bias = randn(classes).to(dtype) if bias else None
    target = torch.randint(classes, (rows,), generator=generator)
    if ignored and rows > 1:
        target[4::5] = options.get("ignore_index", IGNORED)
    weight = torch.rand(classes, generator=generator).add(0.5).to(dtype) if weighted else None
    dloss = _upstream(rows, dtype, options, generator)
    return Case(input, target, dloss, weight, options, linear_weight, linear_bias)


def _upstream(rows: int, dtype: torch.dtype, options: dict, generator) -> Tensor:
    shape = (rows,) if options.get("reduction") == "none" else ()
    dloss = torch.randn(shape, generator=generator)
    if dtype is F16:
        dloss *= 1024  # as scalers do: otherwise gradients would be subnormal
    return dloss.to(dtype)


def small_logits(**options) -> Case:
    return make(10, 30, **options)


def small_layer(**options) -> Case:
    return make_linear(10, 8, 30, **options)


small = pytest.mark.parametrize("small", [small_logits, small_layer])  # for tests of both functions


def leaves(case: Case) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_() for name, t in case.operands.items()}


def results(function, case: Case, *, double: bool = False) -> dict[str, Tensor]:
    """{"loss", "dinput", "dlinear_weight", "dlinear_bias"}, the last two of a layer."""
    dtype, weight = F64 if double else None, case.weight
    given = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in case.operands.items()}
    if weight is not None:
        weight = weight.to(dtype or case.input.dtype)
    loss = function(**given, weight=weight)
    gradients = torch.autograd.grad(loss, list(given.values()), case.dloss.to(loss.dtype))
    names = [f"d{name}" for name in given]
    return {"loss": loss.detach()} | dict(zip(names, gradients, strict=True))


def check(*cases: Case) -> None:
    check_cases(results, cases, "formula")
