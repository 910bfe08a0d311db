"""The numeric proof that a norm of another library is one that onepass computes.

A twin of the module, with random weights, without hooks and on the CPU, is run next to the four
formulas that the fused operator knows (RMS or layer norm, weight or 1 + weight), in 2-D, 3-D and
4-D, on inputs of unit size, of the size of sqrt(eps) (which shows the place of eps) and large ones,
output and all gradients. Every case must satisfy two conditions:

1. The original is the formula: its error against float64 is as large as that of the same formula in
   plain PyTorch. Another formula is off by 1e-3 or more, another order of roundings by 1e-6.
2. onepass is not worse: the rule of `onepass.numerics` with the original as the base.

float32 and bfloat16 must pass. Other dtype combinations are tried as well, and those that pass join
the table by which the swapped module decides; with any other it runs the original.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import types
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onepass import numerics
from onepass._ops.norm import NormKind, norm
from onepass.reference import norm as reference
from onepass.swapping.facts import held
from onepass.swapping.specs import NormSpec, Structure
from onepass.swapping.trials import (
    Refused,
    attributes,
    distance,
    foreign_code,
    in_double,
    isolated,
    normals,
    outcome,
    twin,
)

_REQUIRED = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FORMULAS = tuple(
    itertools.product((NormKind.RMS, NormKind.LAYER), (0.0, 1.0))
)  # and weight_offset

# How much further than plain PyTorch the original may be from float64, per step 1 above. A wrong
# formula misses this by orders of magnitude in float32; 16-bit runs prove its casts, not itself.
_SLACK = {torch.float32: 8.0, torch.float64: 8.0, torch.bfloat16: 2.0, torch.float16: 2.0}


# Leading sizes of the 2-D, 3-D and 4-D inputs; and how many numbers a gradient of the weight must
# have, pooled over them and repeated draws, so that its largest error is meaningful.
_ROWS = ((5,), (2, 3), (2, 1, 3))
_POOLED = 512
_MOST_REPEATS = 16
_OTHER_EPS = 16.0  # times eps, in a copy of a forward that holds it


class _Size(NamedTuple):
    """Inputs are scale * (normal + shift)."""

    name: str
    scale: float
    shift: float


def probe(module: nn.Module, structure: Structure, *, forced: bool = False) -> NormSpec | str:
    """The formula of `module`, or the reason why it is not swapped. If it is forced, the nearest
    formula, with every combination of dtypes that both run. Of numbers that may be eps, the first
    that is proven.

    The module is only read: its tensors, gradients and hooks, and torch's random state, stay as
    they are.
    """
    reasons = []
    is_named = isinstance(structure.eps, str)
    with isolated():
        for eps in [getattr(module, structure.eps)] if is_named else structure.eps:
            try:
                probe = _Probe(module, structure, float(eps))
                return probe.run_forced() if forced and is_named else probe.run()
            except Refused as refusal:
                reasons.append(str(refusal))
    return reasons[0]


def configuration(module: nn.Module, structure: Structure) -> tuple:
    """Two modules with the same configuration get the same verdict. Valid while both are alive."""
    cls = type(module)
    shape = tuple(getattr(module, structure.weight).shape)
    return cls, cls.forward, structure, shape, tuple(sorted(attributes(module).items()))


class _Probe:
    def __init__(self, module: nn.Module, structure: Structure, eps: float):
        self.structure, self.eps = structure, eps
        self.forward = type(module).forward
        self.cols = getattr(module, structure.weight).shape[0]
        self.normal = normals(20)
        if self.cols == 0:
            raise Refused("its weight is empty")
        if not self.eps >= 0.0 or math.isinf(self.eps):
            raise Refused(f"its {structure.eps} is {self.eps}")
        self.twin = twin(module)
        self.held = held(module, besides=structure.eps if isinstance(structure.eps, str) else "")
        small = math.sqrt(self.eps) if self.eps > 0.0 else 1e-3
        self.unit = _Size("unit", 1.0, 0.3)
        self.sizes = (self.unit, _Size("small", small, 0.1), _Size("large", 500.0, 0.5))

    def run(self) -> NormSpec:
        self._check_pure()
        self.kind, self.weight_offset = self._nearest_formula(1e-3)
        self._check_computed()
        table = []
        for dtypes in _REQUIRED:
            for size in self.sizes:
                out_dtype = self._judge(size, *dtypes)
            table.append((*dtypes, out_dtype))
        if not isinstance(self.structure.eps, str):
            self._check_number()
        for dtypes in itertools.product(_DTYPES, _DTYPES):
            if dtypes not in _REQUIRED:
                with contextlib.suppress(Refused):
                    table.append((*dtypes, self._judge(self.unit, *dtypes)))
        return self._spec(table)

    def run_forced(self) -> NormSpec:
        self.kind, self.weight_offset = self._nearest_formula(math.inf)
        self._check_computed()
        table = []
        for dtypes in itertools.product(_DTYPES, _DTYPES):
            with contextlib.suppress(Refused):
                tensors = self._draw(_ROWS[0], self.unit, *dtypes)
                out_dtype = self._original(*tensors)[0].dtype
                self._ours(out_dtype, tensors, "inputs")
                table.append((*dtypes, out_dtype))
        return self._spec(table, forced=True)

    def _check_number(self) -> None:
        """The number in the code must be the eps: with another one there, another eps counts."""
        forward, eps = self.forward, self.eps
        code = forward.__code__
        self.eps *= _OTHER_EPS
        moved = tuple(self.eps if constant == eps else constant for constant in code.co_consts)
        self.forward = types.FunctionType(
            code.replace(co_consts=moved), forward.__globals__, forward.__name__,
            forward.__defaults__, forward.__closure__,
        )  # fmt: skip
        try:
            self._judge(self.sizes[1], *_REQUIRED[0])
        except Refused:
            raise Refused(f"its eps is no number in its forward, which holds {eps:g}") from None
        self.forward, self.eps = forward, eps

    def _check_computed(self) -> None:
        if self.kind == NormKind.RMS and self.structure.bias is not None:
            raise Refused("is an RMS norm with a bias, which onepass does not compute")

    def _spec(self, table: list, forced: bool = False) -> NormSpec:
        return NormSpec(
            kind=int(self.kind),
            weight_offset=self.weight_offset,
            weight=self.structure.weight,
            bias=self.structure.bias,
            eps=self.structure.eps if isinstance(self.structure.eps, str) else self.eps,
            argument=self.structure.argument,
            dtypes=tuple(table),
            forced=forced,
            held=self.held,
        )

    def _check_pure(self) -> None:
        """The output must be a function of input, weight and bias alone."""
        tensors = self._draw(_ROWS[0], self.unit, torch.float32, torch.float32)
        input = tensors[0].clone()
        state, before = torch.get_rng_state(), attributes(self.twin)
        first = self._original(*tensors)[0]
        if not torch.equal(torch.get_rng_state(), state):
            raise Refused("draws random numbers in training")
        second = self._original(*tensors)[0]
        for name, value in attributes(self.twin).items():
            if before.get(name) != value:
                raise Refused(f"keeps state: a call changes its attribute {name!r}")
        if self.twin._buffers or self.twin._modules:
            raise Refused("keeps state: a call adds to its buffers or modules")
        if not torch.equal(first, second):
            raise Refused("keeps state: two calls with the same input differ")
        self.twin.training = False
        evaluated = self._original(*tensors)[0]
        self.twin.training = True
        if not torch.equal(first, evaluated):
            raise Refused("differs between training and eval")
        if not torch.equal(tensors[0], input):
            raise Refused("changes its input")

    def _nearest_formula(self, most: float) -> tuple[bool, float]:
        tensors = self._draw(_ROWS[0], self.unit, torch.float32, torch.float32)
        output = self._original(*tensors)[0]
        errors = {}
        for self.kind, self.weight_offset in _FORMULAS:
            ref = self._formula(*map(in_double, tensors))[0]
            errors[self.kind, self.weight_offset] = distance(output, ref)
        (kind, offset), error = min(errors.items(), key=lambda item: item[1])
        if not error < most:
            raise Refused(
                "is no RMS or layer norm over the last dimension: nearest is "
                f"{_formula_name(kind, offset)}, off by {error:.2g}"
            )
        return kind, offset

    def _judge(self, size: _Size, input_dtype, weight_dtype) -> torch.dtype:
        """The original's output dtype, once both steps hold for inputs of this size and dtypes."""
        where = f"{size.name} inputs in {_dtype_name(input_dtype)}"
        if weight_dtype != input_dtype:
            where += f" with {_dtype_name(weight_dtype)} weight"
        draws = []
        repeats = min(math.ceil(_POOLED / len(_ROWS) / self.cols), _MOST_REPEATS)
        for rows in _ROWS * repeats:
            tensors = self._draw(rows, size, input_dtype, weight_dtype)
            original = self._original(*tensors)
            out_dtype = original[0].dtype
            ours = self._ours(out_dtype, tensors, where)
            ref = self._formula(*map(in_double, tensors))
            draws.append((ours, original, ref, self._formula(*tensors)))
        for index, name in enumerate(_OUTPUTS):
            if draws[0][0][index] is None:
                continue
            ours, original, ref, base = (
                [results[index] for results in column] for column in zip(*draws, strict=True)
            )
            if len({tensor.dtype for tensor in original}) > 1:
                raise Refused(f"the dtype of its result depends on the shape of {where}")
            verdict = numerics.compare(original, ref, base)
            allowed = _SLACK[input_dtype] * verdict.bound
            if not verdict.max_error <= allowed:
                raise Refused(
                    f"differs from {_formula_name(self.kind, self.weight_offset)} for {where}: "
                    f"{name} off by {verdict.max_error:.2g}, allowed {allowed:.2g}"
                )
            verdict = numerics.compare(ours, ref, original)
            if not verdict.ok:
                raise Refused(f"onepass would be less accurate for {where}: {name}: {verdict.text}")
        return out_dtype

    def _draw(self, rows, size: _Size, input_dtype, weight_dtype) -> tuple[Tensor | None, ...]:
        """(input, weight, bias, gradient of the output), the bias None where there is none."""

        shape = (*rows, self.cols)
        input = (size.scale * (self.normal(*shape) + size.shift)).to(input_dtype)
        weight = self.normal(self.cols, dtype=weight_dtype)
        has_bias = self.structure.bias is not None
        bias = self.normal(self.cols, dtype=weight_dtype) if has_bias else None
        return input, weight, bias, self.normal(*shape, dtype=torch.float32)

    def _original(self, input, weight, bias, dy) -> tuple[Tensor | None, ...]:
        def forward(input, weight, bias):
            self.twin._parameters[self.structure.weight] = weight
            if bias is not None:
                self.twin._parameters[self.structure.bias] = bias
            return self.forward(self.twin, input)

        dtypes = f"{_dtype_name(input.dtype)} input, {_dtype_name(weight.dtype)} weight"
        with foreign_code(f"fails on a {input.dim()}-D {dtypes}"):
            return self._gradients(forward, input, weight, bias, dy)

    def _gradients(self, forward, input, weight, bias, dy) -> tuple[Tensor | None, ...]:
        """(output, and the gradients of input, weight, bias) of a function of these three."""
        leaves = [None if x is None else nn.Parameter(x.clone()) for x in (input, weight, bias)]
        wanted = [leaf for leaf in leaves if leaf is not None]

        def call() -> Tensor:
            output = forward(*leaves)
            if not isinstance(output, Tensor) or output.shape != input.shape:
                got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise Refused(f"returns {got} for an input of shape {tuple(input.shape)}")
            return output

        output, *rest = outcome(call, wanted, lambda _: dy)
        gradients = iter(rest)
        return output, *(None if leaf is None else next(gradients) for leaf in leaves)

    def _ours(self, out_dtype, tensors, where: str) -> tuple[Tensor | None, ...]:
        try:
            return self._gradients(self._onepass(out_dtype), *tensors)
        except RuntimeError as error:
            raise Refused(f"onepass cannot run {where}: {error}") from None

    def _formula(self, input, weight, bias, dy) -> tuple[Tensor | None, ...]:
        def forward(input, weight, bias):
            if self.kind == NormKind.RMS:
                y = reference.rms_norm(
                    input, (self.cols,), weight, self.eps, weight_offset=self.weight_offset
                )
                return y if bias is None else y + bias  # a known form, refused by name
            return reference.layer_norm(
                input, (self.cols,), weight + self.weight_offset, bias, self.eps
            )

        return self._gradients(forward, input, weight, bias, dy)

    def _onepass(self, out_dtype):
        def forward(input, weight, bias):
            return norm(
                input,
                None,
                weight,
                bias,
                (self.cols,),
                kind=self.kind,
                eps=self.eps,
                weight_offset=self.weight_offset,
                out_dtype=out_dtype,
            )[0]

        return forward


_OUTPUTS = ("output", "gradient of the input", "gradient of the weight", "gradient of the bias")


def _formula_name(kind: NormKind, weight_offset: float) -> str:
    return ("rms_norm" if kind == NormKind.RMS else "layer_norm") + (
        " with 1 + weight" if weight_offset else ""
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
