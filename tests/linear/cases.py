"""Calls of the linear family: tensors of a layer, and its results by ours, by torch, in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, numerics

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

RAW = torch.ops.onepass
NAMES = ("input", "weight", "bias")
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

    @property
    def text(self) -> str:
        def describe(tensor):
            return "-" if tensor is None else f"{str(tensor.dtype)[6:]}{tuple(tensor.shape)}"

        return " ".join(f"{name}={describe(getattr(self, name))}" for name in NAMES)

    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in NAMES}
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
    seed: int = 0,
) -> Case:
    """A random layer of (*rows, in_features)."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows,) if isinstance(rows, int) else tuple(rows)

    def random(shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    return Case(
        random((*size, in_features), dtype),
        random((out_features, in_features), weight_dtype or dtype),
        random((out_features,), bias_dtype or dtype) if bias else None,
        random((*size, out_features), dtype),
    )


def stock(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; a mix of dtypes, which it refuses, in float32 and rounded once."""
    given = [tensor for tensor in (weight, bias) if tensor is not None]
    if all(tensor.dtype is input.dtype for tensor in given):
        return F.linear(input, weight, bias)
    wide = (tensor if tensor is None else tensor.float() for tensor in (input, weight, bias))
    return F.linear(*wide).to(input.dtype)


def results(function, case: Case, *, double: bool = False, wrt=NAMES) -> dict[str, Tensor]:
    """{"output": ..., and the gradient of each tensor in wrt by its name}."""

    def leaf(name, tensor):
        tensor = tensor.detach()  # strided ones stay strided: only a change of dtype copies
        tensor = tensor.double() if double else tensor
        return tensor.requires_grad_(name in wrt)

    leaves = {name: leaf(name, tensor) for name, tensor in case.tensors().items()}
    output = function(**leaves)
    asked = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    found = {"output": output.detach()}
    if asked:
        upstream = case.doutput.to(output.dtype)
        gradients = torch.autograd.grad(output, list(asked.values()), upstream)
        found |= dict(zip(asked, gradients, strict=True))
    return found


def check(*cases: Case, wrt=NAMES) -> None:
    """The output and every gradient of the cases, pooled, by the numerics rule."""
    draws = []
    for case in cases:
        before = {name: tensor.clone() for name, tensor in case.tensors().items()}
        ours = results(functional.linear, case, wrt=wrt)
        ref = results(F.linear, case, double=True, wrt=wrt)
        draws.append((ours, ref, results(stock, case, wrt=wrt)))
        for name, tensor in case.tensors().items():
            assert torch.equal(tensor, before[name]), f"{case.text}: {name} was written"
    first = cases[0]
    assert set(draws[0][0]) == {"output", *set(wrt) & set(first.tensors())}
    for name, found in draws[0][0].items():
        of = first.input if name == "output" else getattr(first, name)
        assert found.dtype == of.dtype, f"{first.text}: {name} is {found.dtype}"
        three = ([draw[index][name] for draw in draws] for index in range(3))
        numerics.assert_close(*three, f"{first.text}: {name}")


def backward(doutput: Tensor, input=None, weight=None, **dtypes) -> tuple[Tensor, Tensor, Tensor]:
    """The operator itself; a gradient is computed if its tensor's dtype is given."""
    wanted = (dtypes.get(f"{name}_dtype") for name in NAMES)
    return RAW.linear_backward(doutput, input, weight, *wanted)


def layer_gradients(case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All three by the operator, in dtype or input's."""
    dtype = dtype or case.input.dtype
    of = {f"{name}_dtype": dtype for name in NAMES}
    found = backward(case.doutput, case.input, case.weight, **of)
    return dict(zip(GRADIENTS, found, strict=True))
