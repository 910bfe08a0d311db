"""The losses of transformers' models on onepass's cross entropy, which `onepass.swap` and `attach`
put in place of `loss_function`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from onepass.functional._internal import cross_entropy_gains, cross_entropy_in_float32
from onepass.integrations.transformers import lazy_logits
from onepass.swapping.changes import ABSENT, Edit
from onepass.swapping.classes import Swapped, is_swapped
from onepass.swapping.redirection import with_redirected_loss
from onepass.swapping.restored import ATTACHED, without
from onepass.swapping.walk import Choice, walk


def redirected(original: property) -> property:
    """A model's `loss_function` that applies `ours` to the original's result."""

    def loss_function(self) -> Callable:
        return ours(original.fget(self))

    return property(loss_function, original.fset)


def ours(function: Callable) -> Callable:
    """A function that computes the same loss on onepass's cross entropy."""
    if function is ForCausalLMLoss:
        return causal_lm_loss
    if function is ForMaskedLMLoss:
        return masked_lm_loss
    return functools.partial(with_redirected_loss, function)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **options: object,
) -> Tensor:
    """transformers' `ForCausalLMLoss`, without its float32 copy of 16-bit logits."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    return masked_lm_loss(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


def masked_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **options: object,
) -> Tensor:
    """transformers' `ForMaskedLMLoss`, without its float32 copy of 16-bit logits."""
    target = labels.view(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    if logits.shape[-1] == vocab_size:
        loss = lazy_logits.loss(logits, target, ignore_index, reduction)
        if loss is not None:
            return _of_items(loss, num_items_in_batch)
    rows = logits.view(-1, vocab_size)
    if logits.dtype is torch.float64 or not cross_entropy_gains(rows, target, None):
        return ForMaskedLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index)
    loss = cross_entropy_in_float32(rows, target, ignore_index, reduction)
    return _of_items(loss, num_items_in_batch)


def _of_items(loss: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """The Trainer's: a sum, divided by the items of all batches that are accumulated."""
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


# ---- attach and detach ---------------------------------------------------------------------------


def plan_attach(model: nn.Module, holders: list[nn.Module], lazy: bool):
    """The plan of a swap of the losses of these models of transformers, and its edits, with the
    records by which `unswap` leaves them and `detach` finds them."""
    from onepass.swapping.plan import Plan

    inside = {id(part) for holder in holders for part in holder.modules()}
    choice = Choice(None, None, None, lambda module, name: id(module) in inside)
    plan = Plan(model, ("loss",), choice, False, False, False, lazy)
    new = {id(change.module) for change in plan.classes}
    computed = [change.module for change in plan.report._changes] + [c.module for c in plan.classes]
    edits = plan.edits()
    for module in computed:
        if ATTACHED not in vars(module):
            edits.append(Edit(module, ATTACHED, "attach" if id(module) in new else "both"))
    return plan, edits


def changes_loss_function(cls: type) -> bool:
    """Whether a swapped class has another `loss_function`; others redirect F.cross_entropy."""
    return "loss_function" in getattr(cls, "_onepass_spec", ())


def attached(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of modules whose loss is ours since `attach`."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if ATTACHED in vars(module) and "loss" in getattr(module, "_onepass_to", ())
    ]


def plan_detach(model: nn.Module) -> list[Edit]:
    """The edits that give back the losses from before `attach`.

    Raises:
        RuntimeError: the model was sharded or parametrized since.
    """
    from onepass.swapping.engine import check_restorable

    found = [item for item in walk(model) if ATTACHED in vars(item.module)]
    check_restorable([item for item in found if isinstance(item.module, Swapped)], "detach")
    edits = [Edit(item.module, ATTACHED, ABSENT) for item in found]
    for module in (item.module for item in found):
        if is_swapped(type(module)) and vars(module)[ATTACHED] == "attach":
            edits.append(Edit(module, "__class__", without(type(module), "loss")))
    return edits
