"""Cases of the norm family: forward, backward, both in one call, and the overhead of a call.

Tensors that must cross memory: a forward reads input and writes output; a backward reads the
upstream gradient and input, and writes the gradient. The residual add brings a read of residual and
a write of residual_out forward, a read of its upstream gradient backward; input and residual share
one gradient, or, with a gate, have one each, for which input is read again. Weights, scales and
statistics are small in comparison.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass.reference import norm as reference
from onepass.tools.bench.case import PHASES, Case, Operator
from onepass.tools.bench.families.dropout import row_factors

SHAPES = ((512, 768), (2048, 1024))
BEYOND_CACHE = (4096, 4096)
COLD = (2048, 384)  # a layer of the model that `onepass compare` trains
QUICK = (64, 96)
OVERHEAD = (4, 8)
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5

# On CUDA every case is cold. A tensor of 2^26 elements is 128 MiB in bfloat16: more than the L2 of
# any device, and reading and writing it takes 90 us at 3 TB/s, against some 5 us for a launch.
CUDA_ELEMENTS = 1 << 26
CUDA_COLUMNS = (1024, 4096, 8192, 2048, 16384)  # with a time limit the last are missing
CUDA_FLOAT32 = ("layer_norm", "rms_norm")
CUDA_FEW_ROWS = ((2048, 4096), (4096, 4096), (8192, 4096))  # as a step of training has
CUDA_CHECKED_ELEMENTS = 1 << 19

# Samples of a modulated norm's rows: as many scales, shifts and gates.
BATCH = 8
GATED = ", gated"
# A branch with LayerScale and DropPath, whose factors are those of as many samples.
SCALED = "add_layer_norm, scaled"


def _stock_add_layer_norm(x, residual, weight, bias):
    total = residual + x
    return F.layer_norm(total, total.shape[-1:], weight, bias, EPS), total


def _stock_add_rms_norm(x, residual, weight):
    total = residual + x
    return F.rms_norm(total, total.shape[-1:], weight, EPS), total


def _stock_scaled(x, residual, weight, bias, gamma, factors):
    """The composition of vision transformers."""
    return _stock_add_layer_norm(
        x * gamma * factors.to(x.dtype)[:, None, None], residual, weight, bias
    )


def _scaled(module):
    def run(x, residual, weight, bias, gamma, factors):
        scales = {"column_scale": gamma, "row_scale": factors}
        return module.add_layer_norm(x, residual, x.shape[-1:], weight, bias, EPS, **scales)

    return run


def _stock_modulated(norm):
    """The composition of diffusion transformers."""

    def stock(x, scale, shift, residual=None, gate=None):
        scale, shift = scale[:, None], shift[:, None]
        if residual is None:
            return (norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift,)
        h = residual + gate[:, None] * x
        return norm(h, x.shape[-1:], eps=EPS) * (1 + scale) + shift, h

    return stock


def _modulated(kind: str) -> Operator:
    def call(module):
        def run(x, scale, shift, residual=None, gate=None):
            function = getattr(module, f"modulated_{kind}")
            found = function(x, x.shape[-1:], scale, shift, EPS, residual=residual, gate=gate)
            return found if residual is not None else (found,)

        return run

    return _operator(call(functional), _stock_modulated(getattr(F, kind)), call(reference))


def _operator(ours, stock, formula) -> Operator:
    return Operator(ours, stock, formula, base=stock)


OPERATORS = {
    "layer_norm": _operator(
        lambda x, w, b: (functional.layer_norm(x, x.shape[-1:], w, b, EPS),),
        lambda x, w, b: (F.layer_norm(x, x.shape[-1:], w, b, EPS),),
        lambda x, w, b: (reference.layer_norm(x, x.shape[-1:], w, b, EPS),),
    ),
    "rms_norm": _operator(
        lambda x, w: (functional.rms_norm(x, x.shape[-1:], w, EPS),),
        lambda x, w: (F.rms_norm(x, x.shape[-1:], w, EPS),),
        lambda x, w: (reference.rms_norm(x, x.shape[-1:], w, EPS),),
    ),
    "add_layer_norm": _operator(
        lambda x, r, w, b: functional.add_layer_norm(x, r, x.shape[-1:], w, b, EPS),
        _stock_add_layer_norm,
        lambda x, r, w, b: reference.add_layer_norm(x, r, x.shape[-1:], w, b, EPS),
    ),
    "add_rms_norm": _operator(
        lambda x, r, w: functional.add_rms_norm(x, r, x.shape[-1:], w, EPS),
        _stock_add_rms_norm,
        lambda x, r, w: reference.add_rms_norm(x, r, x.shape[-1:], w, EPS),
    ),
    "modulated_layer_norm": _modulated("layer_norm"),
    "modulated_rms_norm": _modulated("rms_norm"),
    f"modulated_layer_norm{GATED}": _modulated("layer_norm"),
    SCALED: _operator(_scaled(functional), _stock_scaled, _scaled(reference)),
}


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps one small shape."""
    if device == "cuda":
        yield from _cuda_cases(quick)
        return
    for shape in (QUICK,) if quick else SHAPES:
        for name in OPERATORS:
            for dtype in DTYPES:
                for phase in ("forward", "forward+backward"):
                    yield _case(name, shape, dtype, phase)
    if not quick:
        for fresh in (False, True):
            for name in ("layer_norm", "rms_norm"):
                for phase in ("forward", "forward+backward"):
                    yield _case(name, BEYOND_CACHE, torch.float32, phase, fresh=fresh)
        for name in ("layer_norm", "rms_norm"):
            for phase in ("forward", "forward+backward"):
                yield _case(name, COLD, torch.float32, phase, cold=True)
    for name in ("layer_norm", "rms_norm"):
        yield from _overhead(name)


def _cuda_cases(quick: bool) -> Iterator[Case]:
    for name in ("layer_norm", "rms_norm"):
        yield from _overhead(name, "cuda")
    shapes = [(CUDA_ELEMENTS // cols, cols) for cols in CUDA_COLUMNS]
    for shape in () if quick else CUDA_FEW_ROWS:
        for name in ("layer_norm", "rms_norm"):
            for phase in ("forward", "backward"):
                yield _case(name, shape, torch.bfloat16, phase, cold=True, device="cuda")
    for shape in (QUICK,) if quick else shapes:
        for name in OPERATORS:
            for dtype in (torch.bfloat16, torch.float32):
                if dtype is torch.bfloat16 or name in CUDA_FLOAT32:
                    for phase in PHASES:
                        yield _case(name, shape, dtype, phase, cold=not quick, device="cuda")


def _case(
    name: str,
    shape: tuple,
    dtype: torch.dtype,
    phase: str,
    *,
    fresh: bool = False,
    cold: bool = False,
    device: str = "cpu",
) -> Case:
    adds, gated, backward = name.startswith("add_"), name.endswith(GATED), phase != "forward"
    tensors = 0 if phase == "backward" else 4 if adds or gated else 2
    if backward:
        tensors += 6 if gated or name == SCALED else 4 if adds else 3
    on_cuda = device == "cuda"
    make_checked = None
    if on_cuda and shape != QUICK:
        few = (CUDA_CHECKED_ELEMENTS // shape[1], shape[1])
        make_checked = lambda: _tensors(name, few, dtype, backward, device)  # noqa: E731
    return Case(
        f"norm/{name}/{_text(dtype)}/{shape[0]}x{shape[1]}/{phase}"
        + ("/fresh" if fresh else "")
        + ("/cold" if cold and not on_cuda else ""),
        OPERATORS[name],
        lambda: _tensors(name, shape, dtype, backward, device),
        backward,
        tensors,
        fresh,
        cold,
        backward_alone=phase == "backward",
        device=device,
        make_checked=make_checked,
    )


def _overhead(name: str, device: str = "cpu") -> Iterator[Case]:
    for phase in ("no grad", "forward under grad", "forward+backward"):
        grad = phase != "no grad"
        yield Case(
            f"norm/{name}/float32/{OVERHEAD[0]}x{OVERHEAD[1]}/{phase}",
            OPERATORS[name],
            lambda grad=grad: _tensors(name, OVERHEAD, torch.float32, grad, device),
            phase == "forward+backward",
            None,
            device=device,
        )


def _tensors(
    name: str, shape: tuple, dtype: torch.dtype, grad: bool, device: str = "cpu"
) -> list[Tensor]:
    """input, (residual,) weight, (bias), or input, scale, shift(, residual, gate)."""
    if name.startswith("modulated_"):
        rows, each = (BATCH, shape[0] // BATCH, shape[1]), (BATCH, shape[1])
        sizes = [rows, each, each] + ([rows, each] if name.endswith(GATED) else [])
        drawn = (torch.randn(size, device=device).to(dtype) for size in sizes)
        return [tensor.requires_grad_(grad) for tensor in drawn]
    if name == SCALED:
        sizes = [(BATCH, shape[0] // BATCH, shape[1])] * 2 + [shape[-1:]] * 3
        drawn = [torch.randn(size, device=device).to(dtype) for size in sizes]
        return [tensor.requires_grad_(grad) for tensor in drawn] + [row_factors(BATCH, device)]
    sizes = [shape] * (2 if name.startswith("add_") else 1)
    sizes += [shape[-1:]] * (1 if name.endswith("rms_norm") else 2)
    return [torch.randn(size, device=device).to(dtype).requires_grad_(grad) for size in sizes]


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
