"""The numbers of csrc/ops/optimizer.h, and tables of parameters for its operators."""

from __future__ import annotations

import collections
import functools
import weakref

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
