"""Cases of linear layers with quantised weights against torch's linear layer, whose weight has the
input's dtype. `benchmarks/peers/quantized.py` compares with other libraries' quantised weights.

With one row the ceiling is the reading of codes, scales and shifts, on all threads; they are in no
cache. With more rows it is arithmetic: multiply-adds; dot products of bfloat16, where the CPU has
them and input is bfloat16; dot products of 8 bits, where input is quantised too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass._policy.precision import HAS_PAIR_PRODUCTS
from onepass.nn import QuantizedLinear
from onepass.reference import quantized_linear as reference
from onepass.tools.bench.case import Case, Operator

SHAPES = ((4096, 4096), (2048, 8192))  # (in_features, out_features); the last is Llama 3.2 1B's
FEW_ROWS, MANY_ROWS = (1, 4, 16), 256
QUICK = ((1, 128, 80), (24, 128, 80))
FORMATS = ("int8", "int4", "nf4", "mxfp4")
DTYPES = (torch.float32, torch.bfloat16)


def _ours(weights: str, activations: str | None, x: Tensor, *own: Tensor) -> tuple[Tensor]:
    options = {"weights": weights, "activations": activations}
    return (functional.quantized_linear(x, *own, **options),)


def _formula(layer: QuantizedLinear, quantizes: bool, x: Tensor, *own: Tensor) -> tuple[Tensor]:
    codes, scales, shifts = (*own, None)[:3]
    return (
        reference.quantized_linear(
            x, codes, scales, shifts, None, layer.format, quantize_input=quantizes
        ),
    )


def _dinput(weights: str, g: Tensor, *own: Tensor) -> tuple[Tensor]:
    layer, (codes, scales, shifts) = _layer(weights, 0, 0), (*own, None)[:3]
    backward = torch.ops.onepass.quantized_linear_backward
    in_features = codes.shape[1] * (32 // layer.format.bits)
    return backward(g, codes, scales, shifts, in_features, layer.format, g.dtype, None)[:1]


def _dinput_formula(weights: str, g: Tensor, *own: Tensor) -> tuple[Tensor]:
    layer, (codes, scales, shifts) = _layer(weights, 0, 0), (*own, None)[:3]
    in_features = codes.shape[1] * (32 // layer.format.bits)
    return (g @ reference.dequantize(codes, scales, shifts, layer.format, in_features, g.dtype),)


def _layer(weights: str, in_features: int, out_features: int) -> QuantizedLinear:
    return QuantizedLinear(in_features, out_features, False, weights=weights, device="meta")


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a CPU; CUDA has no kernel."""
    if device != "cpu":
        return
    if quick:
        for shape in QUICK:
            yield from (_case(shape, torch.float32, weights) for weights in FORMATS)
        yield _case(QUICK[1], torch.float32, "int8", "int8")
        yield _case(QUICK[1], torch.float32, "nf4", phase="dinput")
        return
    for dtype in DTYPES:
        for weights in FORMATS:
            for shape in SHAPES:
                yield from (_case((rows, *shape), dtype, weights) for rows in FEW_ROWS)
            yield _case((MANY_ROWS, *SHAPES[0]), dtype, weights)
        yield _case((MANY_ROWS, *SHAPES[0]), dtype, "nf4", phase="dinput")
        yield from (_case((rows, *SHAPES[0]), dtype, "int8", "int8") for rows in (16, MANY_ROWS))


def _case(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    weights: str,
    activations: str | None = None,
    phase: str = "forward",
) -> Case:
    rows, in_features, out_features = shape
    layer = _layer(weights, in_features, out_features)
    is_forward = phase == "forward"
    first = (rows, in_features if is_forward else out_features)
    of_weight = sum(buffer.nbytes for buffer in layer.buffers())

    def make() -> list[Tensor]:
        weight = torch.randn(out_features, in_features, device="cpu") / in_features**0.5
        own, _ = reference.quantize(weight, layer.format, layer.group_size, layer.scales.dtype)
        x = torch.randn(first, device="cpu").to(dtype)
        return [x, *(tensor for tensor in own if tensor is not None)]

    def make_stock() -> list[Tensor]:
        weight = torch.randn(out_features, in_features, device="cpu") / in_features**0.5
        return [torch.randn(first, device="cpu").to(dtype), weight.to(dtype)]

    if is_forward:
        formula = partial(_formula, layer, activations is not None)
        ours, stock = partial(_ours, weights, activations), lambda x, w: (F.linear(x, w),)
    else:
        formula, ours = partial(_dinput_formula, weights), partial(_dinput, weights)
        stock = lambda g, w: (g @ w,)  # noqa: E731
    by = f"{weights} by int8" if activations else weights
    has_dots = dtype is torch.bfloat16 and HAS_PAIR_PRODUCTS
    reads = rows == 1
    return Case(
        f"quantized_linear/{by}/{str(dtype).removeprefix('torch.')}/"
        f"{rows}x{in_features}x{out_features}/{phase}",
        Operator(ours, stock, formula, formula),
        make,
        backward=False,
        tensors=None,
        cold=rows <= FEW_ROWS[-1],
        reads=of_weight if reads else None,
        flops=None if reads else 2 * rows * in_features * out_features,
        unit="int8" if activations else "bfloat16" if has_dots else "float32",
        make_stock=make_stock,
    )
