"""Replacing a torch optimizer in mid-training."""

from __future__ import annotations

import inspect
import weakref

import torch
from torch.optim import lr_scheduler

from onepass.optim import checkpoints
from onepass.optim.atomic import as_before
from onepass.optim.optimizer import FlatOptimizer
from onepass.optim.options import Options, with_options


def fuse(optimizer: torch.optim.Optimizer, **options) -> FlatOptimizer:
    """Makes this library's optimizer from a torch one, on the same group dicts, with its state.

    A scheduler made for the old optimizer changes the settings of the new one, since both have the
    same groups. The old one's ``step`` raises from now on, its ``state_dict`` is the new one's, and
    its hooks move to it. Called again with the same options, it returns the same optimizer. An
    optimizer of this library is returned unchanged.

    Args:
        optimizer: a `torch.optim.AdamW`, `Adam`, `SGD`, `Muon` or `Adafactor`, not a subclass; or
            one of this library, with the options that it has, if any.
        master, state_dtype, max_grad_norm, zero_grads, ema_decay, ema_dtype: as in
            `onepass.optim.AdamW`.

    Returns:
        The optimizer to continue with.

    Raises:
        TypeError: another optimizer.
        RuntimeError, ValueError: parameters or settings that `onepass.optim.AdamW` refuses,
            an optimizer fused before with other options, or whose own `step`, `zero_grad`,
            `state_dict`, `load_state_dict` or `add_param_group` replaces its class's (torch's
            schedulers may wrap `step`); the optimizer is as it was.

    Examples:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> optimizer = onepass.optim.fuse(optimizer, max_grad_norm=1.0)
        >>> type(optimizer)
        <class 'onepass.optim.adam.AdamW'>
    """
    if isinstance(optimizer, FlatOptimizer):
        has = {name: getattr(optimizer, name) for name in Options._fields}
        if Options(**has | options).checked("fuse") != Options(**has):
            raise _refused(has)
        return optimizer
    ours = _ours().get(type(optimizer))
    if ours is None:
        names = ", ".join(f"torch.optim.{kind.__name__}" for kind in _ours())
        raise TypeError(f"fuse: optimizer must be one of {names}, got {type(optimizer).__name__}")
    options = Options(**options)._asdict()
    done = getattr(optimizer.__dict__.get("step"), "fused", None)
    if done is not None:
        if done[1] != options:
            raise _refused(done[1])
        return done[0]
    for method in _METHODS:
        if not _is_of_class(optimizer, method):
            raise RuntimeError(
                f"fuse: optimizer must have the {method} of its class, got one of its own, which "
                "would not be called"
            )
    before = dict(optimizer.__dict__)
    groups_before = [dict(group) for group in optimizer.param_groups]
    try:
        fused = _made(ours, optimizer, **options)
        checkpoints.take_over(fused, optimizer)
        for hooks in _HOOKS:
            getattr(fused, hooks).update(getattr(optimizer, hooks))
        fused._led = weakref.ref(optimizer)
        fused.register_step_post_hook(_stepped)
        optimizer.state = type(optimizer.state)(dict)
        optimizer.state_dict = fused.state_dict
        optimizer.load_state_dict = fused.load_state_dict
        optimizer.step = _refusal(type(optimizer).__name__, fused, options)
    except BaseException:
        as_before(optimizer, before)
        for group, settings in zip(optimizer.param_groups, groups_before, strict=True):
            group.clear()
            group.update(settings)
        raise
    return fused


fuse = with_options(fuse, after=fuse)


def _refused(options: dict) -> RuntimeError:
    return RuntimeError(
        f"fuse: optimizer must be one that was not fused with other options, got {options}"
    )


def _ours() -> dict[type, type[FlatOptimizer]]:
    """This library's optimizers, by torch's classes."""
    kinds: list[type] = [FlatOptimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {
        base: kind
        for kind in kinds
        if kind.__module__.startswith("onepass.optim.")
        for base in kind.__bases__
        if base.__module__.startswith("torch.optim")
    }


def _made(ours: type, optimizer: torch.optim.Optimizer, **options) -> FlatOptimizer:
    """One of ours with the settings of a torch optimizer, on copies of its groups."""
    names = ("params", "param_names")
    taken = inspect.signature(ours).parameters  # AdamW fixes the kind of weight decay
    defaults = {k: v for k, v in optimizer.defaults.items() if k in taken}
    groups = [
        {k: v if k not in names else list(v) for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    for group in groups:
        group_names = group.pop("param_names", None)
        if group_names is not None:
            group["params"] = list(zip(group_names, group["params"], strict=True))
    return ours(groups, **defaults, **options)


def _stepped(fused: FlatOptimizer, *_) -> None:
    """Tells a scheduler of the old optimizer that steps are made."""
    led = fused._led and fused._led()
    if led is not None:
        led._opt_called = True


_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


_METHODS = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


def _is_of_class(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Whether a method is that of the class, also if torch's schedulers wrap it."""
    method = vars(optimizer).get(name, getattr(type(optimizer), name))
    while True:
        function = getattr(method, "__func__", method)
        if function is getattr(type(optimizer), name):
            return True
        if getattr(function, "__globals__", None) is not vars(lr_scheduler):
            return False
        method = function.__wrapped__


def _refusal(name: str, fused: FlatOptimizer, options: dict):
    def step(*_, **__):
        raise RuntimeError(
            f"this torch.optim.{name} was handed to onepass.optim.fuse: call step() of the "
            "optimizer that it returned"
        )

    step._wrapped_by_lr_sched = True  # or schedulers would warn
    step.fused = fused, options
    return step
