"""Gradients taken while backward computes them: summed in float32, or stepped at once, and
freed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from onepass._imported import is_dtensor
from onepass._ops import optimizer as _ops
from onepass.optim.checks import refuse_sparse
from onepass.optim.contract import ALGORITHMS, LAYOUT, Hyper, StepTable
from onepass.optim.flat_state import Numbers, Places, Request, laid_like, layout_row
from onepass.optim.optimizer import FlatOptimizer

_ADD = torch.tensor([Hyper(-1.0)], dtype=torch.float64, device="cpu")  # sum - lr gradient
NORM_WEIGHT = 0.1  # of a backward's norm in the running one


def fused_accumulate(
    optimizer: FlatOptimizer,
    *,
    in_backward: bool = False,
    clip_value: float | None = None,
    clip_norm: float | None = None,
) -> FusedAccumulate:
    """Takes each gradient as soon as backward has computed it, and frees it.

    16-bit gradients are added to float32 sums, one pass each: the parameter's own ``.grad`` would
    be a 16-bit sum. ``optimizer.step()`` steps with the sums, as a loop would that adds float32
    copies of the gradients. Gradients in float32 stay in ``.grad``, where torch adds them: they
    still need ``optimizer.zero_grad()``, which clears the sums too. A step clears only the sums,
    and ``model.zero_grad()`` only ``.grad``. Not for models in DistributedDataParallel, which
    averages gradients after these hooks; DTensors are refused. So is the step of a
    `torch.amp.GradScaler`, which finds none of these gradients. Copies and pickles of the optimizer
    have no hooks, and are refused while there are sums, which they would lose.

    With `in_backward` each parameter is stepped as soon as its gradient is computed, and the
    gradient is freed: no two gradients are held at a time. The results are those of a loop that
    steps after backward; the first step makes the states of all parameters that have a hook.
    ``optimizer.step()`` then ends the round: it counts averages (`ema_decay`) and the running norm,
    and schedulers wait for it. Run backwards that only add to the sums in ``accumulating()``.

    Args:
        optimizer: one of onepass's; its `max_grad_norm` clips sums, and is refused with
            `in_backward`, since the global norm is known only after the last gradient. Other
            code that reads ``.grad``, such as `torch.nn.utils.clip_grad_norm_`, finds None.
        in_backward: step in backward.
        clip_value: gradients are limited to [-clip_value, clip_value], as by
            `torch.nn.utils.clip_grad_value_`; with `in_backward`.
        clip_norm: gradients are scaled by min(1, clip_norm / norm), where norm is the larger of a
            running average of the global norms of the backwards before (the last one weighs 0.1)
            and the norm of all gradients of this one so far; with `in_backward`. A gradient that
            is not finite makes no step. The running average is not part of checkpoints.

    Returns:
        The owner of the hooks: ``remove()`` removes them, ``accumulating()`` is above.

    Raises:
        TypeError: not one of onepass's optimizers.
        ValueError: options that exclude each other, or out of range.
        RuntimeError: DTensor parameters; an optimizer that has such hooks.

    Examples:
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = onepass.optim.AdamW(model.parameters(), master="fp32", max_grad_norm=1.0)
        >>> sums = onepass.optim.fused_accumulate(optimizer)
        >>> for _ in range(4):
        ...     model(torch.randn(8, 64).bfloat16()).sum().backward()
        >>> model.weight.grad is None, sums.sum_of(model.weight).dtype
        (True, torch.float32)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> sums.remove()
    """
    if not isinstance(optimizer, FlatOptimizer):
        raise TypeError(
            "fused_accumulate: optimizer must be one of onepass.optim, got "
            f"{type(optimizer).__name__}"
        )
    if optimizer._accumulation is not None:
        raise RuntimeError(
            "fused_accumulate: optimizer must have no such hooks, got one that has: remove() them"
        )
    if in_backward and optimizer.max_grad_norm is not None:
        raise ValueError(
            "fused_accumulate: in_backward must be False with max_grad_norm, got True: the global "
            "norm is known after the last gradient only; clip_norm goes by a running norm"
        )
    for name, value in (("clip_value", clip_value), ("clip_norm", clip_norm)):
        if value is None:
            continue
        if not in_backward:
            raise ValueError(
                f"fused_accumulate: {name} must be None without in_backward, got {value}"
            )
        if not value > 0:
            raise ValueError(f"fused_accumulate: {name} must be positive, got {value}")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(is_dtensor, params)):
        raise RuntimeError("fused_accumulate: params must not be DTensors, got one")
    return FusedAccumulate(optimizer, params, in_backward, clip_value, clip_norm)


class FusedAccumulate:
    """The hooks of `fused_accumulate`."""

    def __init__(self, optimizer, params, in_backward, clip_value, clip_norm):
        self._optimizer = optimizer
        self._steps = in_backward
        self._clip_value, self._clip_norm = clip_value, clip_norm
        self._is_adding = False
        self._sums: dict[Tensor, Tensor] = {}
        self._tables: dict[Tensor, StepTable] = {}
        self._full: set[Tensor] = set()  # whose sums hold something
        self._numbers: dict[Tensor, int] = {}  # in the optimizer, as of the last step
        self._stepped: tuple[Tensor, Tensor] | None = None  # (parameter, gradient) in a hook
        # This round's averages, by the group's id: (ema_decay, steps before, the decay's value).
        self.decays: dict[int, tuple] = {}
        self._square = 0.0  # of the norm of this backward's gradients so far
        self.running_norm: float | None = None
        """The running average of the gradients' global norms; None before the first step."""
        self._hooked = {p for p in params if p.requires_grad and (in_backward or _is_narrow(p))}
        self._handles = [p.register_post_accumulate_grad_hook(self._take) for p in self._hooked]
        optimizer._accumulation = self

    def remove(self) -> None:
        """Removes the hooks; sums that no step has used are lost."""
        for handle in self._handles:
            handle.remove()
        self.clear()
        self._sums.clear()
        self._tables.clear()
        if self._optimizer._accumulation is self:
            self._optimizer._accumulation = None

    def __getstate__(self):
        raise RuntimeError(
            "fused_accumulate: hooks must not be copied or pickled, got a call: call "
            "fused_accumulate with the copy of the optimizer"
        )

    def refuse_copies(self) -> None:
        """Raises if there are sums, which a copy of the optimizer would lose."""
        if self._full:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}: copy and pickle must not be called while "
                f"fused_accumulate holds sums of gradients, got a call with {len(self._full)}: "
                "call step or zero_grad before"
            )

    def sum_of(self, param: Tensor) -> Tensor | None:
        """A 16-bit parameter's float32 sum of gradients; None if there is none."""
        return self._sums[param] if param in self._full else None

    def clear(self) -> None:
        """Clears the sums, and forgets this round's norm; ``.grad`` stays."""
        self._full.clear()
        self._square = 0.0

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Lets backwards inside only add gradients, without steps, under `in_backward`."""
        before, self._is_adding = self._is_adding, True
        try:
            yield
        finally:
            self._is_adding = before

    # ---- for the optimizer -----------------------------------------------------------------------

    def gradients(
        self, params: list[Tensor], gradients: list[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients to step with: sums if there are any."""
        if self._steps:  # parameters added later have no hook
            pairs = zip(params, gradients, strict=True)
            return [None if p in self._hooked else g for p, g in pairs]
        return [
            self.sum_of(p) if p in self._full else g for p, g in zip(params, gradients, strict=True)
        ]

    def only(self, params: list[Tensor]) -> tuple[int, Tensor]:
        """(number, gradient) of the single parameter that is stepped in a hook."""
        param, gradient = self._stepped
        number = self._numbers.get(param, len(params))
        if number >= len(params) or params[number] is not param:
            self._numbers = {p: i for i, p in enumerate(params)}
            number = self._numbers[param]
        return number, gradient

    def to_come(self, params: list[Tensor]) -> Numbers:
        """All parameters that hooks step, on the device of the current one: tables and states are
        made for all at once, instead of one in each hook of the first backward."""
        device = self._stepped[0].device
        return tuple([i for i, p in enumerate(params) if p in self._hooked and p.device == device])

    def is_in_hook(self) -> bool:
        return self._stepped is not None

    def end_round(self) -> None:
        """After optimizer.step()."""
        self.decays.clear()
        if self._steps:
            norm = math.sqrt(self._square)
            if self._square and math.isfinite(norm):
                before = norm if self.running_norm is None else self.running_norm
                self.running_norm = before + NORM_WEIGHT * (norm - before)
            self._square = 0.0
        else:
            self.clear()

    # ---- the hook --------------------------------------------------------------------------------

    @torch.no_grad()
    def _take(self, param: Tensor) -> None:
        gradient, narrow = param.grad, _is_narrow(param)
        if gradient is None:
            return
        refuse_sparse("fused_accumulate", [gradient])
        adds = narrow and (self._is_adding or not self._steps or param in self._full)
        if adds:
            self._add(param, gradient)
            gradient = self._sums[param]
        if self._steps and not self._is_adding:
            self._step(param, gradient)
            param.grad = None
            self._full.discard(param)
        elif adds:
            param.grad = None

    def _add(self, param: Tensor, gradient: Tensor) -> None:
        total = self._sums.get(param)
        if total is None or total.shape != param.shape or total.device != param.device:
            (total,) = Places().make([Request(param, "sum", torch.float32)])
            self._sums[param] = total
            self._tables.pop(param, None)
            self._full.discard(param)
        if param not in self._full:
            total.copy_(gradient)
            self._full.add(param)
            return
        table = self._tables.get(param)
        if table is None:
            table = self._tables[param] = _table_of(total)
        gradient = laid_like(total, gradient)
        hyper, options = _ADD, {}
        if total.device.type != "cpu":
            options["device_hyper"] = _ADD.to(total.device)
        ran: list[bool] = []
        _ops.optimizer_step(ran, ALGORITHMS["SGD"], table, [gradient], hyper, **options)

    def _step(self, param: Tensor, gradient: Tensor) -> None:
        if self._clip_value is not None:
            gradient.clamp_(-self._clip_value, self._clip_value)
        if self._clip_norm is not None:
            norm = float(_ops.gradient_norm([gradient.contiguous()]))
            if not math.isfinite(norm):
                return
            self._square += norm * norm
            norm = max(math.sqrt(self._square), self.running_norm or 0.0)
            if norm > self._clip_norm:
                gradient.mul_(self._clip_norm / norm)
        self._stepped = param, gradient
        try:
            self._optimizer._step()
        finally:
            self._stepped = None


def _is_narrow(param: Tensor) -> bool:
    return param.is_floating_point() and param.dtype.itemsize == 2


def _table_of(total: Tensor) -> StepTable:
    """The table of a sum, which a step of SGD without momentum updates."""
    step = torch.zeros((), dtype=torch.float32, device=total.device)
    row = layout_row(0, 0, {LAYOUT["step"]: step}, Places(), {})
    return StepTable([total], [step], torch.tensor([row], device="cpu"))
