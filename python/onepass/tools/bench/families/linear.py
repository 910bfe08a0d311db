"""Cases of the linear family against torch's own products: forward, GELU after it, the gradient
of GELU, which is a pass of its own, that of the input, and those of weight and bias in one call.

Products are bound by arithmetic, so their ceiling is that of multiply-adds on all threads
(bfloat16: of dot products, where the CPU has an instruction for them). With few rows it is the
reading of the weight. "onednn" is torch's oneDNN product on the same tensors, if it takes
them. Cases named medium round float32 factors to bfloat16, where the CPU has dot products; torch's
then run under `torch.set_float32_matmul_precision("medium")`, and "float32" is ours without. Those
named int8 quantise float32 factors; torch's are float32, and "quantize_dynamic" is torch's layer
of a weight that was quantised before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass._ops.linear import Activation
from onepass._policy.precision import rounds_factors
from onepass.reference import linear as reference
from onepass.reference.products import INT8_FORWARD, INT8_INPUT, ROUNDED
from onepass.tools.bench.case import Case, Function, Operator
from onepass.tools.machine import medium_precision

# (rows, in_features, out_features)
SHAPES = (
    (2048, 384, 1536), (2048, 1536, 384), (512, 768, 3072), (64, 384, 384), (509, 771, 1025),
    (4096, 1024, 4096), (512, 2048, 8192),  # the last is Llama 3.2 1B's
)  # fmt: skip
LARGE = (1024, 768, 50257)  # GPT-2's logits
FEW_ROWS = ((1, 2048, 8192), (8, 2048, 8192), (8, 384, 1536))
# The weight stays in caches (two threads: of 1 MiB in 16 bits, 2 MiB in float32): what the loop
# takes where memory does not bind, to be compared with a read of memory.
FEW_ROWS_CACHED = ((1, 2048, 256), (8, 2048, 256))
SMALL = (4, 8, 8)  # the overhead of a call
QUICK = (24, 96, 80)
OF_MANY_ROWS = ("forward", "forward+gelu", "dgelu", "dinput", "dweight+dbias")
OF_FEW_ROWS = ("forward", "forward, weight transposed", "dinput")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEDIUM = ((2048, 384, 1536), (1024, 1024, 4096))
INT8 = (*MEDIUM, (256, 1024, 4096))
SLOW_IN_TORCH = 1 << 28  # multiply-adds that take torch's own loops a second


def _onednn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return (torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], ""),)


def _onednn_dinput(g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (torch.ops.mkldnn._linear_pointwise(g, w.t(), None, "none", [], ""),)


def _onednn_dweight(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    # The faster of the two orders.
    return torch.ops.mkldnn._linear_pointwise(x.t(), g.t(), None, "none", [], "").t(), g.sum(0)


_DYNAMIC: list = []  # the last weight, and the layer made of it


def _quantized_dynamically(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """torch.ao.quantization.quantize_dynamic: the weight was quantised before, per column."""
    if not _DYNAMIC or _DYNAMIC[0] is not w:
        layer = torch.nn.Linear(w.shape[1], w.shape[0], device="cpu")
        layer.weight.data, layer.bias.data = w.detach(), b.detach()
        layer.qconfig = torch.ao.quantization.per_channel_dynamic_qconfig
        _DYNAMIC[:] = w, torch.ao.nn.quantized.dynamic.Linear.from_float(layer)
    return (_DYNAMIC[1](x),)


def _own_dinput(g: Tensor, w: Tensor, mask: int = 0) -> tuple[Tensor, ...]:
    return torch.ops.onepass.linear_backward(g, None, w, g.dtype, None, None, mask)[:1]


def _own_dweight(g: Tensor, x: Tensor, mask: int = 0) -> tuple[Tensor, ...]:
    return torch.ops.onepass.linear_backward(g, x, None, None, g.dtype, g.dtype, mask)[1:]


def _torchs_dweight(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return g.t() @ x, g.sum(0)


def _torchs_gelu(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return (F.gelu(F.linear(x, w, b)),)


def _own_dgelu(g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    gelu = int(Activation.GELU)
    return (torch.ops.onepass.linear_epilogue_backward(g, h, None, 0.0, gelu, g.dtype),)


def _torchs_dgelu(g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    return (torch.ops.aten.gelu_backward(g, h),)


def _dinput(g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (g @ w,)


def _in_medium(function: Callable) -> Callable:
    """The same by torch, which may then multiply float32 matrices in bfloat16."""

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        with medium_precision():
            return function(*tensors)

    return call


# Each with the sizes of its tensors, of (rows, in_features, out_features).
PHASES = {
    "forward": (
        Operator(
            ours=lambda x, w, b: (functional.linear(x, w, b),),
            stock=lambda x, w, b: (F.linear(x, w, b),),
            formula=lambda x, w, b: (reference.linear(x, w, b),),
            base=lambda x, w, b: (F.linear(x, w, b),),
            optional={"onednn": _onednn},
        ),
        lambda m, k, n: ((m, k), (n, k), (n,)),
    ),
    "forward+gelu": (
        Operator(
            ours=lambda x, w, b: (functional.linear(x, w, b, activation="gelu"),),
            stock=_torchs_gelu,
            formula=_torchs_gelu,
            base=_torchs_gelu,
        ),
        lambda m, k, n: ((m, k), (n, k), (n,)),
    ),
    "forward, weight transposed": (  # as transformers' Conv1D has it
        Operator(
            ours=lambda x, w, b: (functional.linear(x, w.t(), b),),
            stock=lambda x, w, b: (torch.addmm(b, x, w),),
            formula=lambda x, w, b: (torch.addmm(b, x, w),),
            base=lambda x, w, b: (torch.addmm(b, x, w),),
        ),
        lambda m, k, n: ((m, k), (k, n), (n,)),
    ),
    "dgelu": (  # its memory: doutput and preactivation read, the gradient written
        Operator(_own_dgelu, _torchs_dgelu, _torchs_dgelu, _torchs_dgelu),
        lambda m, k, n: ((m, n), (m, n)),
    ),
    "dinput": (
        Operator(_own_dinput, _dinput, _dinput, _dinput, optional={"onednn": _onednn_dinput}),
        lambda m, k, n: ((m, n), (n, k)),
    ),
    "dweight+dbias": (
        Operator(
            ours=_own_dweight,
            stock=_torchs_dweight,
            formula=_torchs_dweight,
            base=_torchs_dweight,
            optional={"onednn": _onednn_dweight},
        ),
        lambda m, k, n: ((m, n), (m, k)),
    ),
}


# (by ours, by the definition) with a mask of factors, of reference/products.py.
BY_FACTORS = {
    "forward": (
        lambda mask, x, w, b: (torch.ops.onepass.linear_forward(x, w, b, None, mask),),
        lambda mask, x, w, b: (reference.linear(x, w, b, mask),),
    ),
    "dinput": (
        lambda mask, g, w: _own_dinput(g, w, mask),
        lambda mask, g, w: reference.linear_backward(g, None, w, factor_mask=mask)[:1],
    ),
    "dweight+dbias": (
        lambda mask, g, x: _own_dweight(g, x, mask),
        lambda mask, g, x: reference.linear_backward(g, x, None, factor_mask=mask)[1:],
    ),
}


def _add_phase(precision: str, phase: str, mask: int, **optional: Function) -> None:
    operator, sizes_of = PHASES[phase]
    ours, formula = BY_FACTORS[phase]
    PHASES[f"{precision} {phase}"] = (
        Operator(
            ours=partial(ours, mask),
            stock=_in_medium(operator.stock) if precision == "medium" else operator.stock,
            formula=partial(formula, mask),
            base=partial(formula, mask),
            others={"float32": partial(ours, 0)},
            optional=optional,
        ),
        sizes_of,
    )


for _phase in BY_FACTORS:
    _add_phase("medium", _phase, ROUNDED)
_add_phase("int8", "forward", INT8_FORWARD, quantize_dynamic=_quantized_dynamically)
_add_phase("int8", "dinput", INT8_INPUT)
OF_MEDIUM, OF_INT8 = (
    tuple(phase for phase in PHASES if phase.startswith(name)) for name in ("medium", "int8")
)


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of the CPU; on CUDA the products are torch's."""
    if device == "cuda":
        return
    of_medium = OF_MEDIUM if rounds_factors("medium") else ()
    if quick:
        phases = [phase for phase in PHASES if phase not in OF_MEDIUM + OF_INT8]
        yield from (_case(QUICK, dtype, phase) for dtype in DTYPES for phase in phases)
        yield from (_case(QUICK, torch.float32, phase) for phase in of_medium + OF_INT8)
        return
    for shape in MEDIUM:
        yield from (_case(shape, torch.float32, phase) for phase in of_medium)
    for shape in INT8:
        yield from (_case(shape, torch.float32, phase) for phase in OF_INT8)
    for dtype in DTYPES:
        for shape in SHAPES:
            rows, in_features, out_features = shape
            # Would take torch minutes, for a figure that a smaller product shows as well.
            slow = dtype is torch.float16 and rows * in_features * out_features > SLOW_IN_TORCH
            if not slow:
                yield from (_case(shape, dtype, phase) for phase in OF_MANY_ROWS)
        for shape in FEW_ROWS:
            yield from (_case(shape, dtype, phase) for phase in OF_FEW_ROWS)
        for shape in FEW_ROWS_CACHED:
            yield _case(shape, dtype, "forward")
    yield from (_case(SMALL, torch.float32, phase) for phase in OF_MANY_ROWS)
    yield _case(SMALL, torch.float32, "forward", graph=True)
    yield _case(SMALL, torch.float32, "forward", graph=True, backward=True)
    for dtype in (torch.float32, torch.bfloat16):
        yield _case(LARGE, dtype, "forward")


def _case(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    phase: str,
    graph: bool = False,
    backward: bool = False,
) -> Case:
    """`graph`: a call records what a backward needs."""
    rows, in_features, out_features = shape
    operator, sizes_of = PHASES[phase]
    if graph:
        operator = replace(operator, optional={})  # oneDNN's has no gradient
    few = shape in FEW_ROWS + FEW_ROWS_CACHED
    elementwise = phase == "dgelu"
    multiplies = not (few or elementwise or shape == SMALL)
    has_dots = dtype is torch.bfloat16 or phase in OF_MEDIUM
    recorded = "+backward" if backward else "+graph" if graph else ""
    return Case(
        f"linear/{str(dtype).removeprefix('torch.')}/{rows}x{in_features}x{out_features}/{phase}"
        f"{recorded}",
        operator,
        lambda: [
            torch.randn(s, device="cpu").to(dtype).requires_grad_(graph) for s in sizes_of(*shape)
        ],
        backward=backward,
        tensors=3 if elementwise and shape != SMALL else None,
        cold=shape in FEW_ROWS,
        reads=in_features * out_features * dtype.itemsize if few else None,
        flops=2 * rows * in_features * out_features if multiplies else None,
        unit="int8" if phase in OF_INT8 else "bfloat16" if has_dots else "float32",
    )
