"""Calls of the linear family: tensors of a layer, and its results by ours, by torch, in float64."""

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from tests.support.results import Results
from tests.support.results import assert_close as assert_draws_close
from tests.support.seeds import drawn_seed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

RAW = torch.ops.onepass
NAMES = ("input", "weight", "bias")
ALL_NAMES = (*NAMES, "residual")
ACTIVATIONS = reference.linear.ACTIVATIONS
SUBSETS = [names for count in range(4) for names in itertools.combinations(NAMES, count)]
subsets = pytest.mark.parametrize("wrt", SUBSETS, ids="+".join)
GRADIENTS = ("dinput", "dweight", "dbias")


@dataclass
class Case:
    """One layer: its tensors and the upstream gradient, in the output's dtype."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    doutput: Tensor
    residual: Tensor | None = None

    @property
    def text(self) -> str:
        def describe(tensor):
            return "-" if tensor is None else f"{str(tensor.dtype)[6:]}{tuple(tensor.shape)}"

        return " ".join(f"{name}={describe(getattr(self, name))}" for name in ALL_NAMES)

    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ALL_NAMES}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def make(
    rows,
    in_features: int,
    out_features: int,
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = True,
    weight_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    residual: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """A random layer of (*rows, in_features); `residual` is the dtype of one."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows,) if isinstance(rows, int) else tuple(rows)

    def random(shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    return Case(
        random((*size, in_features), dtype),
        random((out_features, in_features), weight_dtype or dtype),
        random((out_features,), bias_dtype or dtype) if bias else None,
        random((*size, out_features), dtype),
        None if residual is None else random((*size, out_features), residual),
    )


def stock(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; a mix of dtypes, which it refuses, in float32 and rounded once."""
    given = [tensor for tensor in (weight, bias) if tensor is not None]
    if all(tensor.dtype is input.dtype for tensor in given):
        return F.linear(input, weight, bias)
    wide = (tensor if tensor is None else tensor.float() for tensor in (input, weight, bias))
    return F.linear(*wide).to(input.dtype)


def composed(activation: str | None, p: float, seed: Tensor | None):
    """The epilogue by torch, step by step, with the elements dropped that ours drops."""

    def function(input, weight, bias=None, residual=None):
        output = stock(input, weight, bias)
        if activation is not None:
            output = ACTIVATIONS[activation](output)
        if p:
            output = reference.dropout.dropout(output, p, seed)
        return output if residual is None else (residual + output).to(residual.dtype)

    return function


def results(function, case: Case, *, double: bool = False, wrt=ALL_NAMES) -> Results:
    """{"output": ..., and the gradient of each tensor in wrt by its name}."""

    def leaf(name, tensor):
        tensor = tensor.detach()  # strided ones stay strided: only a change of dtype copies
        tensor = tensor.double() if double else tensor
        return tensor.requires_grad_(name in wrt)

    torch.manual_seed(7)
    leaves = {name: leaf(name, tensor) for name, tensor in case.tensors().items()}
    output = function(**leaves)
    asked = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    found = {"output": output.detach()}
    if asked:
        upstream = case.doutput.to(output.dtype)
        gradients = torch.autograd.grad(output, list(asked.values()), upstream)
        found |= dict(zip(asked, gradients, strict=True))
    return found


def check(*cases: Case, wrt=ALL_NAMES, activation: str | None = None, p: float = 0.0) -> None:
    """The output and every gradient of the cases, pooled, by the numerics rule."""
    ours = functools.partial(functional.linear, activation=activation, dropout_p=p)
    theirs = composed(activation, p, drawn_seed(7) if p else None)
    draws = []
    for case in cases:
        before = {name: tensor.clone() for name, tensor in case.tensors().items()}
        of_case = (results(ours, case, wrt=wrt), results(theirs, case, double=True, wrt=wrt))
        draws.append((*of_case, results(theirs, case, wrt=wrt)))
        for name, tensor in case.tensors().items():
            assert torch.equal(tensor, before[name]), f"{case.text}: {name} was written"
    first, found = cases[0], draws[0][0]
    assert set(found) == {"output", *set(wrt) & set(first.tensors())}
    stream = first.input if first.residual is None else first.residual
    assert found["output"].dtype is stream.dtype
    assert_draws_close(draws, f"{activation} {p} {first.text}")


def backward(doutput: Tensor, input=None, weight=None, **dtypes) -> tuple[Tensor, Tensor, Tensor]:
    """The operator itself; a gradient is computed if its tensor's dtype is given."""
    wanted = (dtypes.get(f"{name}_dtype") for name in NAMES)
    return RAW.linear_backward(doutput, input, weight, *wanted)


def layer_gradients(case: Case) -> dict[str, Tensor]:
    """All three by the operator, in input's dtype."""
    of = {f"{name}_dtype": case.input.dtype for name in NAMES}
    found = backward(case.doutput, case.input, case.weight, **of)
    return dict(zip(GRADIENTS, found, strict=True))
