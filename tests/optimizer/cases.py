"""Lists of tensors for the optimizer ops, run by the CPU's op, emulated CUDA kernels or a device.

A `Tensors` holds one parameter with its gradient and states; `on_cpu` and `on_cuda` make a step of
a list of them in place.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.optim.contract import ALGORITHMS, Hyper
from onepass.optim.contract import CODE_BLOCK as BLOCK
from tests.emulator.executors import DEVICE, Emulated
from tests.support.dtypes import BF16, F16, F32, F64

INT8 = torch.uint8
ADAM, SGD, LION = map(ALGORITHMS.get, ("Adam", "SGD", "Lion"))
MOMENTS = {ADAM: 2, SGD: 1, LION: 1}
MOMENT_TYPES = (F32, BF16, F16, F64, INT8)
PIECE = 4096  # elements that a thread takes together
KERNELS = ("optimizer/step.cu", "optimizer/gradients.cu")

SETTINGS = Hyper(
    lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, momentum=0.9, decoupled=True,
    ema_decay=0.9,
)  # fmt: skip

# Settings of groups beside the defaults; amsgrad has a further moment.
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
    average: Tensor | None = None

    def changed(self, change: Callable) -> Tensors:
        """change(name, tensor) in the place of each tensor."""
        found = {}
        for name in ("param", "gradient", "master", "step", "average"):
            tensor = getattr(self, name)
            found[name] = None if tensor is None else change(name, tensor)
        for name in ("moments", "scales"):
            found[name] = [change(f"{name} {i}", t) for i, t in enumerate(getattr(self, name))]
        return dataclasses.replace(self, **found)

    def on(self, device: torch.device) -> Tensors:
        """A copy on a device; each operand keeps its distance to a multiple of 16 bytes."""

        def moved(_, tensor: Tensor) -> Tensor:
            ahead = tensor.data_ptr() % 16 // tensor.itemsize
            room = torch.empty(tensor.numel() + ahead, dtype=tensor.dtype, device=device)
            return room[ahead:].view(tensor.shape).copy_(tensor)

        return self.changed(moved)

    def all(self) -> list[Tensor]:
        others = [kept for kept in (self.master, self.average) if kept is not None]
        return [self.param, self.gradient, *self.moments, *self.scales, *others, self.step]


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
    grad_scale: float | None = None
    found_inf: float | None = None

    def copy(self) -> Step:
        return copy.deepcopy(self)


def shifted(tensor: Tensor) -> Tensor:
    """The same, 8 bytes beyond a multiple of 16."""
    ahead = 8 // tensor.itemsize
    memory = torch.empty(tensor.numel() + ahead, dtype=tensor.dtype)
    return memory[ahead:].view(tensor.shape).copy_(tensor)


def make(
    numel: int, param: torch.dtype = F32, gradient: torch.dtype | None = None,
    moment: torch.dtype | None = None, master: torch.dtype | None = None, *, moments: int = 2,
    step: int = 3, index: int = 0, group: int = 0, average: torch.dtype | None = None,
) -> Tensors:  # fmt: skip
    """Random tensors, with the magnitudes of real training, and some zeros."""
    value = torch.randn(numel, dtype=F64)
    scale = torch.tensor([0.0, 1e-5, 1e-2, 1.0], dtype=F64)
    drawn = torch.randn(numel, dtype=F64) * scale[torch.randint(4, (numel,))]
    held = max(numel, 1)  # an empty tensor has a null address, which would mean no state
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
        drawn_moment = torch.randn(held, dtype=F64) * 1e-2
        states.append((drawn_moment if which == 0 else drawn_moment.abs()).to(moment or param))
    return Tensors(
        value.to(param), drawn.to(gradient or param), states, scales, kept,
        torch.tensor(float(step)), index, group,
        None if average is None else torch.randn(held).to(average),
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
    """A tensor of each mix, every third one without an average. sizes: elements of those with
    codes, and of the others."""
    averages = [(None, F64 if mix[0] is F64 else F32, mix[0])[i % 3] for i, mix in enumerate(MIXES)]
    return [
        make(sizes[mix[2] is INT8], *mix, moments=moments, index=i, average=average, **options)
        for i, (mix, average) in enumerate(zip(MIXES, averages, strict=True))
    ]


def on_cpu(call: Step) -> None:
    make_step(call, torch.device("cpu"))


def make_step(call: Step, device: torch.device) -> None:
    """A step by the registered operators on tensors of this device; settings are passed twice, for
    CUDA too."""
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
        rows.append(row + place(t.master) + place(t.average))

    def scalar(value: float | None, dtype: torch.dtype = F32) -> Tensor | None:
        return None if value is None else torch.tensor(value, dtype=dtype, device=device)

    ops = torch.ops.onepass
    table = ops.optimizer_table([t.param for t in call.tensors], states, torch.tensor(rows))
    assert ops.optimizer_step(
        call.algorithm, table, [t.gradient for t in call.tensors], call.hyper, seed=call.seed,
        stochastic_params=call.stochastic_params, stochastic_moments=call.stochastic_moments,
        zero_gradients=call.zero_gradients, max_norm=call.max_norm,
        norm=scalar(call.norm, F64),
        grad_scale=scalar(call.grad_scale), found_inf=scalar(call.found_inf),
        device_hyper=call.hyper.to(device),
    )  # fmt: skip
    ops.optimizer_table_release(states[0], table)


def on_cuda(call: Step, emulator: Emulated | None) -> dict | None:
    """Under the emulator, or on the device. Returns the counts; the tensors change in place."""
    if emulator is not None:
        with emulator.under_the_package():
            on_cpu(call)
        return emulator.done[-1]
    there = dataclasses.replace(call, tensors=[t.on(DEVICE) for t in call.tensors])
    make_step(there, DEVICE)
    for t, moved in zip(call.tensors, there.tensors, strict=True):
        for here, found in zip(t.all(), moved.all(), strict=True):
            here.copy_(found)
    return None


def norm_on_cuda(gradients: list[Tensor], order: float, emulator: Emulated) -> Tensor:
    with emulator.under_the_package():
        return torch.ops.onepass.gradient_norm(gradients, order)


def clip_on_cuda(
    gradients: list[Tensor], max_norm: float, emulator: Emulated, order: float = 2.0
) -> tuple[Tensor, dict]:
    """The norm, and the counts of scaling the gradients in place."""
    with emulator.under_the_package():
        norm = torch.ops.onepass.clip_grad_norm(gradients, max_norm, order, False)
    return norm, emulator.done[-1]
