"""Norms, plain and after an add, those with a scale of their own for each sample, and calls whose
branch is scaled: tensors, and results by ours, by torch, in float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from tests.support.results import check_cases
from tests.support.seeds import drawn_seed, set_seed

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (F32, BF16, F16, F64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
# A modulated norm of the input, of its sum with a residual, of the sum with a gated input. Its
# scale belongs to a sample, with and without ones in its shape, or to a row.
MODULATED = ("plain", "added", "gated")
PER = ("sample", "ones", "row")
# After the sum with a scaled branch comes a norm or nothing; "alone" has no residual either. The
# scales are of columns, of rows, or both.
BRANCHES = ("layer", "rms", "add", "alone")
SCALES = ("columns", "rows", "both")
branches = pytest.mark.parametrize("form", BRANCHES)
RAW = torch.ops.onepass
INPUTS = ("input", "residual", "weight", "bias", "column_scale", "scale", "shift", "gate")
# Rows that are too long for the registers of a norm on CUDA.
LONG = {F32: 4104, BF16: 8200, F16: 8200, F64: 4104}
SEED = 5


@dataclass
class Case:
    """One call: its tensors by name, and the upstream gradients."""

    form: str
    tensors: dict[str, Tensor]
    gradients: tuple[Tensor, ...]
    rms: bool = False
    row_scale: Tensor | None = None
    p: float = 0.0
    offset: float = 0.0
    row_dims: int = 1
    eps: float = 1e-5

    @property
    def is_modulated(self) -> bool:
        return self.form in MODULATED

    @property
    def kind(self) -> str:
        return "rms_norm" if self.rms or "rms" in self.form else "layer_norm"

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.form in ("add", "alone"):
            return ("h",)
        return ("y",) if self.form in ("plain", "layer_norm", "rms_norm") else ("y", "h")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensors["input"].shape[-self.row_dims :])

    @property
    def text(self) -> str:
        named = self.tensors.items()
        dtypes = [f"{n}={str(t.dtype)[6:]}{tuple(t.shape)}" for n, t in named]
        return " ".join([self.form, self.kind, *dtypes])

    def ours(self, input, residual=None, weight=None, bias=None, column_scale=None, **modulators):
        if self.p:
            set_seed(SEED)
        if self.is_modulated:
            return self._modulated(functional, input, residual=residual, **modulators)
        scales = {"column_scale": column_scale, "row_scale": self.row_scale}
        if "y" not in self.outputs:
            return (functional.add_dropout(input, residual, self.p, **scales),)
        options = {"eps": self.eps}
        options |= {"weight_offset": self.offset} if self.kind == "rms_norm" else {"bias": bias}
        if "h" not in self.outputs:
            return (getattr(functional, self.kind)(input, self.shape, weight, **options),)
        norm, options = getattr(functional, f"add_{self.kind}"), options | {"dropout_p": self.p}
        return norm(input, residual, self.shape, weight, **options, **scales)

    def _modulated(self, module, input, scale, shift=None, **tensors):
        norm = getattr(module, f"modulated_{self.kind}")
        found = norm(input, self.shape, scale, shift, self.eps, **tensors)
        return found if isinstance(found, tuple) else (found,)

    def _sum(self, input, residual, column_scale, gate):
        """The residual and the scaled branch."""
        branch = input
        if self.p:
            branch = reference.dropout.dropout(branch, self.p, drawn_seed(SEED))
        row_scale = None if self.row_scale is None else self.row_scale.to(input.dtype)
        branch = reference.dropout.scaled(branch, column_scale, row_scale)
        if gate is not None:
            branch = reference.norm.for_rows(gate, input, self.shape) * branch
        return branch if residual is None else residual + branch

    def definition(self, input, residual=None, weight=None, bias=None, column_scale=None, **rest):
        """The reference, of the sum as the operator rounds it; its gradient passes through."""
        h = self._sum(input, residual, column_scale, rest.pop("gate", None))
        if "y" not in self.outputs:
            return (h,)
        if "h" in self.outputs:
            dtype = self.tensors["input" if residual is None else "residual"].dtype
            h = h + (h.detach().to(dtype).to(h.dtype) - h.detach())
        if self.is_modulated:
            y = self._modulated(reference.norm, h, **rest)
        else:
            y = (self._norm(reference.norm, h, weight, bias),)
        return (*y, h) if "h" in self.outputs else y

    def _norm(self, norms, h, weight, bias):
        if self.kind == "rms_norm":
            weight = None if weight is None else weight + self.offset
            return norms.rms_norm(h, self.shape, weight, self.eps)
        return norms.layer_norm(h, self.shape, weight, bias, self.eps)

    def torchs(self, input, residual=None, weight=None, bias=None, column_scale=None, **rest):
        """The composition that models use, with torch's norm."""
        h = self._sum(input, residual, column_scale, rest.get("gate"))
        h = h.to((input if residual is None else residual).dtype)
        if "y" not in self.outputs:
            return (h,)
        y = self._norm(F, h, *(None if t is None else t.to(h.dtype) for t in (weight, bias)))
        if self.is_modulated:
            y = y * (1 + reference.norm.for_rows(rest["scale"], input, self.shape))
            if (shift := rest.get("shift")) is not None:
                y = y + reference.norm.for_rows(shift, input, self.shape)
        return (y.to(input.dtype), h) if "h" in self.outputs else (y.to(input.dtype),)


def row_factors(batch: int, dtype: torch.dtype = F32) -> Tensor:
    """Factors of rows, every third of which is dropped."""
    keep = torch.arange(batch, dtype=dtype) % 3 != 1
    return keep.to(F64 if dtype == F64 else F32) * 1.25


def make(
    form: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = F32,
    scale: str = "",
    *,
    rms: bool = False,
    p: float = 0.0,
    offset: float = 0.0,
    affine: bool = True,
    residual: bool = True,
    shift: bool = True,
    scale_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """A random case of shape (batch, *, cols); its scale is of PER or SCALES; NORMS have none."""
    generator = torch.Generator().manual_seed(seed)
    scale_dtype, residual_dtype = scale_dtype or dtype, residual_dtype or dtype
    cols = shape[-1:]

    def random(size, dtype):
        return torch.randn(size, generator=generator).to(dtype)

    tensors, factors = {"input": random(shape, dtype)}, None
    if residual and form not in ("plain", "alone", "layer_norm", "rms_norm"):
        tensors["residual"] = random(shape, residual_dtype)
    if form in MODULATED:
        ones = (*shape[:1], *(1 for _ in shape[1:-1]), *cols)
        per = {"ones": ones, "row": shape}.get(scale, (*shape[:1], *cols))
        names = ["scale"] + ["shift"] * shift + ["gate"] * (form == "gated")
        tensors |= {name: random(per, scale_dtype) for name in names}
    else:
        if form not in ("add", "alone") and affine:
            names = ["weight"] + ["bias"] * ("layer" in form)
            tensors |= {name: random(cols, dtype) for name in names}
        if form not in NORMS and scale != "rows":
            tensors["column_scale"] = random(cols, scale_dtype)
        if form not in NORMS and scale != "columns":
            factors = row_factors(shape[0], dtype)
    case = Case(form, tensors, (), rms, factors, p, offset)
    of = {"y": dtype, "h": residual_dtype}
    case.gradients = tuple(random(shape, of[name]) for name in case.outputs)
    return case


def results(function, case: Case, *, double: bool = False, wrt=INPUTS) -> dict[str, Tensor]:
    """The outputs y and h, and the gradients of the inputs named in `wrt`."""
    leaves = {n: t.double() if double else t.detach() for n, t in case.tensors.items()}
    leaves = {name: leaf.requires_grad_(name in wrt) for name, leaf in leaves.items()}
    outputs = function(**leaves)
    asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    pairs = zip(outputs, case.gradients, strict=True)
    pairs = [(o, g.to(o.dtype)) for o, g in pairs if o.requires_grad]  # not h, for a scale alone
    differentiated, upstream = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(differentiated, list(asked.values()), upstream)
    named = dict(zip(case.outputs, (output.detach() for output in outputs), strict=True))
    return named | {f"d{n}": g for n, g in zip(asked, gradients, strict=True)}


def check(*cases: Case, wrt=INPUTS) -> None:
    check_cases(results, cases, "definition", wrt=wrt)


def check_draws(*arguments, draws: int, **keywords) -> None:
    check(*(make(*arguments, seed=seed, **keywords) for seed in range(draws)))


def every_form() -> Iterator[tuple]:
    """(form, scale, options) of every form by every scale."""
    for form in ("plain", "gated"):
        for scale in PER:
            for rms in (False, True):
                yield pytest.param(form, scale, {"rms": rms}, id=f"{form}-{scale}-{rms}")
    for form in BRANCHES:
        for scale in SCALES:
            for p in (0.0, 0.3):
                yield pytest.param(form, scale, {"p": p}, id=f"{form}-{scale}-{p}")


every = pytest.mark.parametrize("form, scale, options", list(every_form()))
each_form = pytest.mark.parametrize("form", (*NORMS, "plain", "gated", *BRANCHES))
