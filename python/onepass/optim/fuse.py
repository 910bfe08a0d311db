"""A torch optimizer in mid-training, exchanged for the one of this library."""

from __future__ import annotations

import weakref

import torch

from onepass.optim.adam import Adam, AdamW
from onepass.optim.optimizer import FlatOptimizer
from onepass.optim.sgd import SGD

_OURS = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam, torch.optim.SGD: SGD}


def fuse(
    optimizer: torch.optim.Optimizer,
    *,
    master: str | None = None,
    state_dtype: torch.dtype | str | None = None,
    max_grad_norm: float | None = None,
    zero_grads: bool = False,
) -> FlatOptimizer:
    """This library's optimizer in place of a torch one, on the same group dicts, with its state.

    A scheduler made for the old optimizer changes the settings of the new one, since both have the
    same groups. The old one's ``step`` raises from now on, its ``state_dict`` is the new one's, and
    its hooks go over.

    Args:
        optimizer: a `torch.optim.AdamW`, `Adam` or `SGD`; not a subclass.
        master, state_dtype, max_grad_norm, zero_grads: as in :class:`onepass.optim.AdamW`.

    Returns:
        The optimizer to go on with.

    Raises:
        TypeError: another optimizer.
        RuntimeError, ValueError: parameters or settings that :class:`onepass.optim.AdamW` refuses;
            the optimizer is as it was.
    """
    ours = _OURS.get(type(optimizer))
    if ours is None:
        names = ", ".join(f"torch.optim.{kind.__name__}" for kind in _OURS)
        raise TypeError(f"fuse: optimizer must be one of {names}, got {type(optimizer).__name__}")
    names = ("params", "param_names")
    defaults = {k: v for k, v in optimizer.defaults.items() if k not in _FIXED.get(ours, ())}
    groups = [
        {k: v if k not in names else list(v) for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    for group in groups:
        group_names = group.pop("param_names", None)
        if group_names is not None:
            group["params"] = list(zip(group_names, group["params"], strict=True))
    fused = ours(
        groups,
        **defaults,
        master=master,
        state_dtype=state_dtype,
        max_grad_norm=max_grad_norm,
        zero_grads=zero_grads,
    )
    fused._take_over(optimizer)
    for hooks in _HOOKS:
        getattr(fused, hooks).update(getattr(optimizer, hooks))
    optimizer.state = type(optimizer.state)(dict)
    optimizer.step = _refusal(type(optimizer).__name__)
    optimizer.state_dict = fused.state_dict
    optimizer.load_state_dict = fused.load_state_dict
    _lead(weakref.ref(optimizer), fused)
    return fused


def _lead(old: weakref.ref, fused: FlatOptimizer) -> None:
    """What a scheduler of the old optimizer sees there stays true: the groups whose settings it
    changes, for which torch's load_state_dict makes new dicts, and whether steps are made.
    """

    def stepped(*_) -> None:
        if (optimizer := old()) is not None:
            optimizer._opt_called = True

    def loaded(fused: FlatOptimizer) -> None:
        if (optimizer := old()) is not None:
            optimizer.param_groups = fused.param_groups

    old().step._wrapped_by_lr_sched = True
    fused.register_step_post_hook(stepped)
    fused.register_load_state_dict_post_hook(loaded)


_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_FIXED = {AdamW: ("decoupled_weight_decay",)}


def _refusal(name: str):
    def step(*_, **__):
        raise RuntimeError(
            f"this torch.optim.{name} was handed to onepass.optim.fuse: call step() of the "
            "optimizer that it returned"
        )

    return step
