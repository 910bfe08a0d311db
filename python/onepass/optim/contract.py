"""The numbers of csrc/ops/optimizer.h, and its operators' tables of parameters and settings."""

from __future__ import annotations

import collections
import functools
import weakref

import torch
from torch import Tensor

from onepass import _C
from onepass._ops import optimizer as _ops

_contract = _C.optimizer_contract()
ALGORITHMS: dict[str, int] = _contract["algorithms"]
LAYOUT: dict[str, int] = _contract["layout"]
CODE_BLOCK: int = _contract["code_block"]  # elements that share a scale
# A row of settings. `decoupled`: weight decay acts on the parameter, not on the gradient.
Hyper = collections.namedtuple(
    "Hyper", _contract["settings"], defaults=[0.0] * len(_contract["settings"])
)


class StepTable:
    """Parameters and the places of their states, passed once for many steps.

    Args:
        params: without gaps between their elements.
        states: the tensors that hold the states.
        layout: (parameters, columns) int64, see csrc/ops/optimizer.h.
    """

    def __init__(self, params: list[Tensor], states: list[Tensor], layout: Tensor):
        numbers: list[int] = []
        state = states[0].new_empty(0)  # for its device
        # A table holds its tensors until it is released: so the release is arranged before the
        # table is made, and no interrupt can come between the parts of either call.
        releases = map(functools.partial(_ops.optimizer_table_release._op, state), numbers)
        release = weakref.finalize(self, collections.deque, releases, 0)
        release.atexit = False  # memory ends with the process
        numbers.extend(map(functools.partial(_ops.optimizer_table._op, params, states), (layout,)))
        (self.number,) = numbers


class Settings:
    """The rows of all parameter groups, (groups, settings) float64, rewritten if one changes."""

    def __init__(self) -> None:
        self._rows: tuple[Hyper, ...] | None = None
        self.host: Tensor | None = None
        self.device: Tensor | None = None  # the same on the parameters' device, if not the CPU

    def write(self, rows: tuple[Hyper, ...], device: torch.device) -> None:
        """Makes these the settings, if they are not."""
        if rows == self._rows and (self.device is None) == (device.type == "cpu"):
            return
        self._rows = None  # if an interrupt arrives from here on, the next step writes them again
        self.host = torch.tensor(rows, dtype=torch.float64, device="cpu")
        self.device = on_device(self.host, device, self.device)
        self._rows = rows


def on_device(settings: Tensor, device: torch.device, before: Tensor | None) -> Tensor | None:
    """Settings as a kernel reads them, None on the CPU; in the memory of the previous ones, which a
    captured step continues to read."""
    if device.type == "cpu":
        return None
    if before is None or before.shape != settings.shape or before.device != device:
        before = torch.empty_like(settings, device=device)
    # The host does not wait for the device: the driver has copied the few numbers when it returns.
    # In a capture replays would read them again: there torch raises.
    waits = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return before.copy_(settings, non_blocking=not waits)
