"""Lists of tensors for the optimizer ops, run by the CPU's op and by the emulated CUDA kernels.

A `Tensors` holds one parameter and all that belongs to it; `on_cpu` and `on_cuda` make a step of a
list of them in place.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import torch
from emulated_ops import DTYPES, Calls, run
from torch import Tensor

from onepass._ops.optimizer import ALGORITHMS, Hyper
from onepass._ops.optimizer import CODE_BLOCK as BLOCK

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INT8 = torch.uint8
ADAM, SGD, LION = map(ALGORITHMS.get, ("Adam", "SGD", "Lion"))
MOMENTS = {ADAM: 2, SGD: 1, LION: 1}
MOMENT_TYPES = {F32: 0, BF16: 1, F16: 3, F64: 4, INT8: 5}
STOCHASTIC_BF16 = 2
NONE, MASTER, REMAINDER, STOCHASTIC = range(4)
PIECE = 4096
PROGRAM = ("optimizer", "optimizer/step.cu", "optimizer/gradients.cu")

SETTINGS = Hyper(
    lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, momentum=0.9, decoupled=True
)  # fmt: skip

# Beside the defaults, what a group may ask for; amsgrad has a moment more.
GROUPS = {
    ADAM: [
        {}, {"decoupled": False}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.0},
        {"beta1": 0.3, "eps": 0.0, "decoupled": False, "amsgrad": True, "maximize": True},
    ],
    SGD: [
        {}, {"decoupled": False, "nesterov": True}, {"momentum": 0.0, "maximize": True},
        {"dampening": 0.25, "decoupled": False}, {"momentum": 0.0, "decoupled": False},
    ],
    LION: [{}, {"beta1": 0.4, "beta2": 0.3}, {"maximize": True, "weight_decay": 0.0}],
}  # fmt: skip


def hyper(*groups: dict) -> Tensor:
    return torch.tensor([SETTINGS._replace(**group) for group in groups], dtype=F64)


@dataclass
class Tensors:
    param: Tensor
    gradient: Tensor
    moments: list[Tensor]
    scales: list[Tensor]
    master: Tensor | None
    step: Tensor
    index: int = 0
    group: int = 0

    def all(self) -> list[Tensor]:
        master = [] if self.master is None else [self.master]
        return [self.param, self.gradient, *self.moments, *self.scales, *master, self.step]


@dataclass
class Step:
    """A call of the op."""

    algorithm: int
    tensors: list[Tensors]
    hyper: Tensor
    seed: int = 0x123456789ABCDEF
    stochastic_params: bool = False
    stochastic_moments: bool = False
    zero_gradients: bool = False
    max_norm: float | None = None
    norm: float | None = None
    norm_dtype: torch.dtype = F64
    grad_scale: float | None = None
    found_inf: float | None = None

    def copy(self) -> Step:
        return copy.deepcopy(self)


def make(
    numel: int, param: torch.dtype = F32, gradient: torch.dtype | None = None,
    moment: torch.dtype | None = None, master: torch.dtype | None = None, *, moments: int = 2,
    step: int = 3, index: int = 0, group: int = 0,
) -> Tensors:  # fmt: skip
    """Random ones, in float32's range of magnitudes that a training has, and some zeros."""
    value = torch.randn(numel, dtype=F64)
    scale = torch.tensor([0.0, 1e-5, 1e-2, 1.0], dtype=F64)
    drawn = torch.randn(numel, dtype=F64) * scale[torch.randint(4, (numel,))]
    held = max(numel, 1)  # an empty tensor has no address, which stands for no state
    kept = None
    if master is F32:
        kept = torch.randn(held) if numel == 0 else value.to(F32)
    elif master is torch.int16:
        kept = torch.randint(-32768, 32768, (held,), dtype=torch.int16)
    states, scales = [], []
    for which in range(moments):
        if moment is INT8:
            codes = torch.randint(256, (held,), dtype=torch.uint8)
            codes[::BLOCK] = 127 if which == 0 else 255  # the scale is the largest magnitude
            states.append(codes)
            scales.append(torch.rand(-(-held // BLOCK)) * 1e-2)
            continue
        average = torch.randn(held, dtype=F64) * 1e-2
        states.append((average if which == 0 else average.abs()).to(moment or param))
    return Tensors(
        value.to(param), drawn.to(gradient or param), states, scales, kept,
        torch.tensor(float(step)), index, group,
    )  # fmt: skip


# Every mix of dtypes that a list may hold, as (param, gradient, moment, master).
NARROW = (F32, BF16, F16)
MIXES = [
    (param, gradient, moment, master)
    for param, gradient, moment in itertools.product(NARROW, NARROW, MOMENT_TYPES)
    for master in (None, F32, torch.int16)
    if moment is not F64
    and (param is not F32 or master is None)
    and (param is BF16 or master is not torch.int16)
] + [(F64, F64, F64, None)]  # fmt: skip


def make_mixes(sizes: dict, moments: int, **options) -> list[Tensors]:
    """A tensor of each mix. sizes: elements of those with codes, and of the others."""
    return [
        make(sizes[mix[2] is INT8], *mix, moments=moments, index=i, **options)
        for i, mix in enumerate(MIXES)
    ]


def on_cpu(call: Step) -> None:
    states: list[Tensor] = []
    rows = []

    def place(tensor: Tensor | None) -> list[int]:
        if tensor is None:
            return [-1, 0]
        states.append(tensor)
        return [len(states) - 1, 0]

    for t in call.tensors:
        row = [t.index, t.group, *place(t.step)]
        for kind in (t.moments, t.scales):
            for which in range(3):
                row += place(kind[which] if which < len(kind) else None)
        rows.append(row + place(t.master))
    scalar = lambda value: None if value is None else torch.tensor(value)  # noqa: E731
    ops = torch.ops.onepass
    table = ops.optimizer_table([t.param for t in call.tensors], states, torch.tensor(rows))
    ops.optimizer_step(
        call.algorithm, table, [t.gradient for t in call.tensors], call.hyper, seed=call.seed,
        stochastic_params=call.stochastic_params, stochastic_moments=call.stochastic_moments,
        zero_gradients=call.zero_gradients, max_norm=call.max_norm,
        norm=None if call.norm is None else torch.tensor(call.norm, dtype=call.norm_dtype),
        grad_scale=scalar(call.grad_scale), found_inf=scalar(call.found_inf),
    )  # fmt: skip
    ops.optimizer_table_release(states[0], table)


@dataclass
class OptimizerCalls(Calls):
    program: tuple[str, ...] = PROGRAM


def on_cuda(call: Step, calls: Calls | None = None) -> dict:
    """What was counted; the tensors change in place."""
    calls = calls or OptimizerCalls()
    numbers = dict(
        count=len(call.tensors), algorithm=call.algorithm, zero_gradients=call.zero_gradients,
        seed=call.seed, max_norm=float("inf") if call.max_norm is None else call.max_norm,
        norm_dtype=call.norm_dtype,
    )  # fmt: skip
    tensors: dict[str, Tensor | None] = {"hyper": call.hyper}
    for name, dtype in (("norm", call.norm_dtype), ("grad_scale", F32), ("found_inf", F32)):
        value = getattr(call, name)
        tensors[name] = None if value is None else torch.tensor(value, dtype=dtype)
    for i, t in enumerate(call.tensors):
        numbers |= {
            f"numel{i}": t.param.numel(), f"param_dtype{i}": t.param.dtype,
            f"gradient_dtype{i}": t.gradient.dtype, f"moment_type{i}": _moment_type(call, t),
            f"master_kind{i}": _master_kind(call, t), f"index{i}": t.index, f"group{i}": t.group,
        }  # fmt: skip
        tensors |= {f"param{i}": t.param, f"gradient{i}": t.gradient, f"master{i}": t.master}
        tensors[f"step{i}"] = t.step
        tensors |= {f"moment{which}_{i}": m for which, m in enumerate(t.moments)}
        tensors |= {f"scale{which}_{i}": s for which, s in enumerate(t.scales)}
    run(calls, "optimizer_step", numbers, tensors)
    return calls.done[-1]


def _moment_type(call: Step, t: Tensors) -> int:
    dtype = t.moments[0].dtype if t.moments else F64 if t.param.dtype is F64 else F32
    if dtype is BF16 and call.stochastic_moments:
        return STOCHASTIC_BF16
    return MOMENT_TYPES[dtype]


def _master_kind(call: Step, t: Tensors) -> int:
    if t.master is not None:
        return MASTER if t.master.dtype is F32 else REMAINDER
    narrow = t.param.dtype in (BF16, F16)
    return STOCHASTIC if narrow and call.stochastic_params else NONE


def gradient_numbers(gradients: list[Tensor]) -> tuple[dict, dict]:
    """Numbers and tensors of a list of gradients."""
    numbers: dict = {"count": len(gradients)}
    for i, gradient in enumerate(gradients):
        numbers |= {f"numel{i}": gradient.numel(), f"gradient_dtype{i}": gradient.dtype}
    return numbers, {f"gradient{i}": gradient for i, gradient in enumerate(gradients)}


def norm_on_cuda(
    gradients: list[Tensor], order: float, calls: Calls | None = None, total: Tensor | None = None
) -> float:
    """The norm; `total` gets it rounded."""
    calls = calls or OptimizerCalls()
    numbers, tensors = gradient_numbers(gradients)
    norm = torch.full((), float("nan"), dtype=F64)
    numbers |= dict(
        order=order, wide=any(gradient.dtype is F64 for gradient in gradients),
        total_dtype=F32 if total is None else total.dtype,
    )  # fmt: skip
    run(calls, "gradient_norm", numbers, tensors | {"norm": norm, "total": total})
    return norm.item()


def scale_on_cuda(
    gradients: list[Tensor], factor: float, norm: float | None = None, max_norm: float = 0.0,
    calls: Calls | None = None,
) -> dict:  # fmt: skip
    calls = calls or OptimizerCalls()
    numbers, tensors = gradient_numbers(gradients)
    tensors["norm"] = None if norm is None else torch.tensor(norm, dtype=F64)
    run(calls, "scale_gradients", numbers | dict(factor=factor, max_norm=max_norm), tensors)
    return calls.done[-1]


assert DTYPES == (F32, BF16, F16, F64)
