"""Quantised weights, and what a call of them must give."""

import torch
from torch import Tensor
from torch.nn import functional as F

from onepass import functional, numerics
from onepass.reference import quantized_linear as reference
from onepass.reference.linear import ACTIVATIONS
from onepass.reference.products import quantize_rows
from onepass.reference.quantized_linear import Format, QuantizedWeight

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NAMES = ("output", "dinput", "dbias", "dresidual")
# (format, numbers in a group; None: a whole row)
LAYOUTS = [
    (Format.INT8, None),
    (Format.INT8, 32),
    (Format.INT4, 32),
    (Format.INT4, None),
    (Format.NF4, 64),
    (Format.MXFP4, 32),
]


def layout_id(layout) -> str:
    return f"{layout[0].name.lower()}-{layout[1] or 'row'}"


def quantized(
    format: Format, group: int | None, out_features: int, in_features: int, scales=F32, shifts=None
) -> QuantizedWeight:
    """A drawn weight's; `shifts` adds them where the format has none, and takes them away."""
    weight = torch.randn(out_features, in_features) + 0.3
    made, _ = reference.quantize(weight, format, group or in_features, scales)
    if shifts is None:
        return made
    return made._replace(shifts=torch.randn_like(made.scales) if shifts else None)


def results(compute, tensors: list[Tensor | None], doutput: Tensor, dtype=None) -> list[Tensor]:
    """Output and gradients, of leaves in `dtype`."""
    leaves = [t if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    output = compute(*leaves)
    given = [t for t in leaves if t is not None]
    return [output.detach(), *torch.autograd.grad(output, given, doutput.to(output.dtype))]


def check(
    layout,
    shape: tuple[int, int, int],
    dtype=F32,
    activation=None,
    residual=False,
    draws: int = 3,
    activations=None,
    **of_weight,
) -> None:
    """By the numerics rule, with gradients and without. The reference is the product with the
    dequantised weight in float64; torch's has that weight in `dtype`. Draws are pooled."""
    rows, out_features, in_features = shape
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        own = quantized(*layout, out_features, in_features, **of_weight)
        weight = reference.dequantize(*own, layout[0], in_features, F64)
        tensors = [torch.randn(rows, in_features), torch.randn(out_features)]
        tensors += [torch.randn(rows, out_features) if residual else None]
        tensors = [t if t is None else t.to(dtype) for t in tensors]
        doutput = torch.randn(rows, out_features).to(dtype)

        def ours(input, bias, residual, own=own):
            return functional.quantized_linear(
                input, *own, bias, weights=layout[0].name.lower(), activations=activations,
                activation=activation, residual=residual,
            )  # fmt: skip

        def formula(input, bias, residual, weight=weight):
            if activations is not None:
                input = quantize_rows(input)
            output = F.linear(input, weight.to(input.dtype), bias)
            output = output if activation is None else ACTIVATIONS[activation](output)
            return output if residual is None else residual + output

        with torch.no_grad():
            alone = ours(*tensors)
        ref, base = results(formula, tensors, doutput, F64), results(formula, tensors, doutput)
        own_results = results(ours, tensors, doutput)
        found.append(([alone, *own_results], [ref[0], *ref], [base[0], *base]))
    for i, name in enumerate(("output without gradients", *NAMES)[: len(found[0][0])]):
        of_draws = zip(*([result[i] for result in draw] for draw in found), strict=True)
        numerics.assert_close(*map(list, of_draws), name)
