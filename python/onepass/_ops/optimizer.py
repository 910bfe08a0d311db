"""The optimizer family's ops and fakes; `onepass.optim.contract` makes their tables."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from onepass._devices import refuse_fakes, refuse_meta, require_one_device
from onepass._dispatch_log import logged
from onepass._mapping import refuse_mapped
from onepass._negative import refuse_where_written

_clip_grad_norm = torch.ops.onepass.clip_grad_norm.default
_gradient_norm = torch.ops.onepass.gradient_norm.default
optimizer_table = torch.ops.onepass.optimizer_table.default
optimizer_table_release = torch.ops.onepass.optimizer_table_release.default
_optimizer_step = torch.ops.onepass.optimizer_step.default

for _op in (_clip_grad_norm, optimizer_table):
    refuse_where_written(_op)
refuse_where_written(_optimizer_step, answer=False)  # as for gradients in another memory order
for _op in (
    _clip_grad_norm,
    _gradient_norm,
    optimizer_table,
    optimizer_table_release,
    _optimizer_step,
):
    refuse_mapped(_op)


@logged
def clip_grad_norm(
    gradients: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """The norm of all gradients together, which are scaled in place if it is above max_norm."""
    return _clip_grad_norm(gradients, max_norm, norm_type, error_if_nonfinite)


@logged
def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """0-dim float64 tensor, the 2-norm of all gradients together."""
    return _gradient_norm(gradients, 2.0)


@logged
def optimizer_step(
    ran: list[bool],
    algorithm: int,
    table,
    gradients: list[Tensor],
    hyper: Tensor,
    **options,
) -> bool:
    """One step of all parameters of a `StepTable`; `hyper` is (groups, settings) float64.

    False if the table is stale; then nothing was done. It is stale if a parameter has another
    shape, dtype or memory order than in the table, if one with a master has other memory, or if a
    gradient has another memory order than its parameter.

    The result is also appended to `ran`, even if an interrupt arrives: there is no bytecode between
    the two, hence `_op`, without OpOverload's Python around it.
    """
    step = functools.partial(_optimizer_step._op, algorithm, table.number, gradients, **options)
    ran.extend(map(step, (hyper,)))
    return ran[-1]


@logged
def optimizer_steps(ran: list[bool], calls: list[tuple], hyper: Tensor) -> bool:
    """Several steps as one: `calls` are (algorithm, table, gradients, options). All of them are
    checked before the first is made. False if a table is stale; then nothing was done."""
    steps = [
        functools.partial(_optimizer_step._op, algorithm, table.number, gradients, hyper, **options)
        for algorithm, table, gradients, options in calls
    ]
    if len(steps) > 1 and not all([step(checks_only=True) for step in steps]):
        return False
    ran.extend(map(functools.partial.__call__, steps))
    return all(ran[-len(calls) :])


@torch.library.register_fake("onepass::clip_grad_norm")
def _(gradients, max_norm, norm_type, error_if_nonfinite):
    require_one_device("clip_grad_norm_", gradients=gradients)
    dtypes = {gradient.dtype for gradient in gradients}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if torch.float64 in dtypes:
        dtype = torch.float64
    return gradients[0].new_empty((), dtype=dtype)


@torch.library.register_fake("onepass::gradient_norm")
def _(gradients, norm_type=2.0):
    require_one_device("gradient_norm", gradients=gradients)
    return gradients[0].new_empty((), dtype=torch.float64)


@torch.library.register_fake("onepass::optimizer_table")
def _(params, states, layout):
    require_one_device("optimizer_table", params=params, states=states, layout=layout)
    refuse_meta("optimizer_table", params=params, states=states)
    try:
        return torch.library.get_ctx().new_dynamic_size()
    except DynamicOutputShapeException:  # without a compiler, nothing calls the operator later
        refuse_fakes("optimizer_table", "params")


@torch.library.register_fake("onepass::optimizer_table_release")
def _(state, table):
    return None


@torch.library.register_fake("onepass::optimizer_step")
def _(algorithm, table, gradients, hyper, **options):
    # Settings may be on the host when gradients are not; but no table has "meta" parameters.
    require_one_device("optimizer_step", gradients=gradients, hyper=hyper, **options)
    refuse_meta("optimizer_step", gradients=gradients)
    return True
