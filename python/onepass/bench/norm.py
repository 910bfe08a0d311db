"""Cases of the norm family: forward, forward and backward, and the overhead of a call.

Baselines are torch's own functions; before an add+norm stands torch's add. Bytes by element, each
tensor once: a forward reads input and writes output; a backward reads the upstream gradient and
input, and writes its gradient; the residual add reads and writes one tensor more.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from onepass.bench.case import Case

SHAPES = ((512, 768), (2048, 1024))
BEYOND_CACHE = (4096, 4096)
OVERHEAD = (4, 8)
DTYPES = (torch.float32, torch.bfloat16)
KINDS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
EPS = 1e-5

# (against eager, against torch.compile, share of a copy of that size) to reach with AVX2 on two
# threads: (kind, dtype, with backward).
_RMS32, _RMS16 = (3.0, 2.0, 0.55), (2.5, 2.0, None)
GOALS = {
    ("layer_norm", torch.float32, False): (1.4, 2.0, 0.50),
    ("layer_norm", torch.float32, True): (1.3, 1.8, 0.30),
    ("rms_norm", torch.float32, False): _RMS32,
    ("rms_norm", torch.float32, True): (5.0, 2.0, 0.30),
    ("add_rms_norm", torch.float32, False): (3.0, 2.5, 0.55),
    ("add_rms_norm", torch.float32, True): (5.0, 2.2, 0.30),
    ("layer_norm", torch.bfloat16, False): (1.5, 2.0, None),
    ("layer_norm", torch.bfloat16, True): (1.5, 3.0, None),
    ("rms_norm", torch.bfloat16, False): _RMS16,
    ("rms_norm", torch.bfloat16, True): (4.0, 3.0, None),
    ("add_rms_norm", torch.bfloat16, False): _RMS16,
    ("add_rms_norm", torch.bfloat16, True): (4.0, 3.0, None),
}


def cases(quick: bool = False) -> Iterator[Case]:
    """All cases; `quick` keeps one small shape."""
    for shape in ((64, 96),) if quick else (*SHAPES, BEYOND_CACHE):
        for kind in KINDS[:2] if shape == BEYOND_CACHE else KINDS:
            for dtype in DTYPES:
                for backward in (False, True):
                    yield _case(kind, shape, dtype, backward)
    for kind in KINDS[:2]:
        yield from _overhead(kind)


def _case(kind: str, shape: tuple[int, int], dtype: torch.dtype, backward: bool) -> Case:
    arguments = _arguments(kind, shape, dtype, backward)
    upstream = torch.randn(shape).to(dtype)
    phase = "forward+backward" if backward else "forward"
    name = f"norm/{kind}/{str(dtype)[6:]}/{shape[0]}x{shape[1]}/{phase}"
    goal = (
        GOALS.get((kind, dtype, backward), (None, None, None)) if shape in SHAPES else (None,) * 3
    )

    def runner(function, arguments=arguments, upstream=upstream):
        if not backward:
            return lambda: function(*arguments)

        def run():
            outputs = function(*arguments)
            gradients = torch.autograd.grad(outputs, arguments, [upstream] * len(outputs))
            return (*(output.detach() for output in outputs), *gradients)

        return run

    def formula():
        wide = [t.detach().double().requires_grad_(backward) for t in arguments]
        return runner(FORMULAS[kind], wide, upstream.double())()

    tensors = (4 if kind.startswith("add_") else 2) + (
        0 if not backward else 4 if kind.startswith("add_") else 3
    )
    return Case(
        name,
        runner(OURS[kind]),
        runner(STOCK[kind]),
        runner(torch.compile(STOCK[kind], dynamic=False)),
        formula,
        tensors * upstream.nbytes,
        upstream,
        goal,
    )


def _arguments(kind: str, shape, dtype: torch.dtype, grad: bool) -> list[Tensor]:
    """input, (residual,) weight, (bias)."""
    sizes = [shape] * (2 if kind.startswith("add_") else 1)
    sizes += [shape[-1:]] * (1 if kind.endswith("rms_norm") else 2)
    return [torch.randn(size).to(dtype).requires_grad_(grad) for size in sizes]


def _overhead(kind: str) -> Iterator[Case]:
    for phase in ("no grad", "forward under grad", "forward+backward"):
        arguments = _arguments(kind, OVERHEAD, torch.float32, phase != "no grad")
        upstream = torch.randn(OVERHEAD)

        def runner(function, arguments=arguments, upstream=upstream, phase=phase):
            if phase != "forward+backward":
                return lambda: tuple(output.detach() for output in function(*arguments))
            return lambda: torch.autograd.grad(function(*arguments), arguments, [upstream])

        yield Case(
            f"norm/{kind}/overhead/4x8/{phase}",
            runner(OURS[kind]),
            runner(STOCK[kind]),
            None,
            None,
            None,
            upstream,
        )


def _last(x: Tensor) -> tuple[int]:
    return (x.shape[-1],)


OURS = {
    "layer_norm": lambda x, w, b: (functional.layer_norm(x, _last(x), w, b, EPS),),
    "rms_norm": lambda x, w: (functional.rms_norm(x, _last(x), w, EPS),),
    "add_layer_norm": lambda x, r, w, b: functional.add_layer_norm(x, r, _last(x), w, b, EPS),
    "add_rms_norm": lambda x, r, w: functional.add_rms_norm(x, r, _last(x), w, EPS),
}


def _stock_add_layer_norm(x, r, w, b):
    total = r + x
    return F.layer_norm(total, _last(x), w, b, EPS), total


def _stock_add_rms_norm(x, r, w):
    total = r + x
    return F.rms_norm(total, _last(x), w, EPS), total


STOCK = {
    "layer_norm": lambda x, w, b: (F.layer_norm(x, _last(x), w, b, EPS),),
    "rms_norm": lambda x, w: (F.rms_norm(x, _last(x), w, EPS),),
    "add_layer_norm": _stock_add_layer_norm,
    "add_rms_norm": _stock_add_rms_norm,
}

FORMULAS = {
    "layer_norm": lambda x, w, b: (reference.norm.layer_norm(x, _last(x), w, b, EPS),),
    "rms_norm": lambda x, w: (reference.norm.rms_norm(x, _last(x), w, EPS),),
    "add_layer_norm": lambda x, r, w, b: reference.norm.add_layer_norm(x, r, _last(x), w, b, EPS),
    "add_rms_norm": lambda x, r, w: reference.norm.add_rms_norm(x, r, _last(x), w, EPS),
}
