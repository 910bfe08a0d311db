"""The operators composed of torch's own, for forward mode and exporters that take no others.

`torch.onnx.export(dynamo=True)` looks for them in the table of torch's decompositions; compilers
and `torch.export` have other tables, and keep the operators. If the environment has CI, inductor
refuses an operator that is in torch's table: so ours are removed when a program is compiled, until
the next export. They are there from the start, because a program from another process is given to
`torch.onnx.export` before anything runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._decomp import decomposition_table, meta_table

FORMULAS: dict[torch._ops.OpOverload, Callable] = {}
EXPORTED: dict[torch._ops.OpOverload, Callable] = {}


def register(op, formula: Callable, unless: Sequence[str]) -> None:
    """Makes `formula` the definition of `op` in torch's operators.

    Exporters keep the op if the function returns NotImplemented, or if one of the arguments in
    `unless` is given.
    """
    places = [argument.name for argument in op._schema.arguments]

    @functools.wraps(formula)
    def exported(*args, **kwargs):
        given = dict(zip(places, args, strict=False)) | kwargs
        if any(given.get(name) is not None for name in unless):
            return NotImplemented
        return formula(*args, **kwargs)

    FORMULAS[op] = formula
    EXPORTED[op] = exported
    _list(op, True)


def offer(op) -> None:
    """Puts the formula of `op` into torch's table, or removes it; called by fakes, which run
    whenever a program is exported or compiled."""
    _list(op, torch.compiler.is_exporting())


def _list(op, is_listed: bool) -> None:
    # The fake gives the shapes: with dynamic ones fake tensors would use the formula if it were not
    # in the table of meta functions too.
    for table in (decomposition_table, meta_table):
        if is_listed:
            table[op] = EXPORTED[op]
        else:
            table.pop(op, None)


def wide(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """16-bit tensors in float32: the operators compute in float32 and round once."""
    return tuple(
        t.float() if t is not None and t.dtype in (torch.bfloat16, torch.float16) else t
        for t in tensors
    )
