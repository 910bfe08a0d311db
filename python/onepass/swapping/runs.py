"""Runs of a model for `Report.verify`: forward, loss and backward, and the tensors they give."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onepass._output import floating, loss_in
from onepass.swapping.undisturbed import Random, State
from onepass.swapping.verification import distance

_MASKS = ("attention_mask", "decoder_attention_mask")  # keywords: (batch, seq), 0 is padding


class Run(NamedTuple):
    loss: float
    tensors: dict[str, Tensor]  # "output", "output 1", ..., "loss", "gradient of NAME"
    unseen: dict[str, Tensor]  # of outputs: (batch, seq), rows of padding that no loss looks at
    random: Random  # the random state at the end
    projected: bool  # whether the loss is a projection of the output, which has none

    def visible(self, unseen: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, with zeros in the rows that do not count."""
        return {
            name: _without(tensor, unseen[name]) if name in unseen else tensor
            for name, tensor in self.tensors.items()
        }


def run(
    model: nn.Module,
    batch: tuple,
    loss_fn: Callable | None,
    flags: Sequence[bool] | None,
    inside: AbstractContextManager,
    moved: dict[str, Tensor] | None = None,
    hide: bool = False,
) -> Run:
    """One forward and backward, which leave the model and the random state unchanged.

    Args:
        flags: `training` of each of the model's modules; None is eval mode.
        inside: entered around forward and backward.
        moved: parameters in place of the model's.
        hide: rows of padding in the outputs get no gradient.
    """

    def forward_backward() -> Run:
        _set_training(model, flags)
        with torch.enable_grad(), inside:
            return _forward_backward(model, _fresh(batch), loss_fn, moved, hide)

    return State(model).around(forward_backward)


def _set_training(model: nn.Module, flags: Sequence[bool] | None) -> None:
    """Sets modes as a loop would: some models fill caches in eval mode and clear them in train
    mode."""
    model.train()
    if flags is None or not flags[0]:
        model.eval()
    for module, flag in zip(model.modules(), flags or (), strict=flags is not None):
        module.training = flag


def _fresh(batch: tuple) -> tuple:
    """A copy: a model may write into its arguments, or append to a cache in them."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # of foreign objects, and of tensors with a history
        return pytree.tree_map(
            lambda leaf: (
                leaf.detach().clone().requires_grad_(leaf.requires_grad)
                if isinstance(leaf, Tensor)
                else leaf
            ),
            batch,
        )


def _forward_backward(model, batch, loss_fn, moved, hide: bool) -> Run:
    parameters = dict(model.named_parameters()) if moved is None else moved
    named = {name: value for name, value in parameters.items() if value.requires_grad}
    inputs = {
        f"input {index}": leaf
        for index, leaf in enumerate(pytree.tree_leaves(batch))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    args, kwargs = batch[:-1], batch[-1]
    if moved is None:
        output = model(*args, **kwargs)
    else:
        output = torch.func.functional_call(model, moved, args, kwargs)
    leaves = {
        f"output {index}" if index else "output": leaf
        for index, leaf in enumerate(floating(output))
    }
    padding = _padding(kwargs, leaves)
    if hide:
        for name, rows in padding.items():
            if leaves[name].requires_grad:
                leaves[name].register_hook(functools.partial(_without, rows=rows))
    tensors = {name: leaf.detach() for name, leaf in leaves.items()}
    projected = False
    if loss_fn is not None:
        loss = _checked(loss_fn(output))
        tensors["loss"] = loss.detach()
    elif (loss := loss_in(output)) is None:
        if not leaves:
            raise RuntimeError(
                f"verify: model must return floating-point tensors, got {type(output).__name__}"
            )
        loss, hide, projected = _projection(leaves, padding), True, True
    looked_at = {name: leaves[name] for name in padding if not hide and leaves[name].requires_grad}
    wanted = {**named, **inputs}
    if not (loss.requires_grad and (wanted or looked_at)):
        return Run(float(loss.detach()), tensors, padding, Random(model), projected)
    of = [*wanted.values(), *looked_at.values()]
    gradients = iter(torch.autograd.grad(loss, of, allow_unused=True))
    for name, value in wanted.items():
        gradient = next(gradients)
        tensors[f"gradient of {name}"] = (
            torch.zeros_like(value.detach()) if gradient is None else gradient
        )
    seen = {name: g for name, g in zip(looked_at, gradients, strict=True) if g is not None}
    unseen = {
        name: rows & ~(seen[name] != 0).flatten(2).any(-1) if name in seen else rows
        for name, rows in padding.items()
    }
    return Run(float(loss.detach()), tensors, unseen, Random(model), projected)


def _checked(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise RuntimeError(f"verify: loss_fn must return a scalar tensor, got {got}")
    return loss


def _padding(kwargs: dict, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Masks by output: (batch, seq), True for rows of padding, if a mask of the batch has any."""
    masks = [kwargs[name] for name in _MASKS if isinstance(kwargs.get(name), Tensor)]
    padding = {}
    for name, output in outputs.items():
        fitting = [m == 0 for m in masks if output.dim() > 2 and m.shape == output.shape[:2]]
        if fitting and all(rows.any() for rows in fitting):
            padding[name] = functools.reduce(torch.logical_and, fitting).to(output.device)
    return padding


def _without(tensor: Tensor, rows: Tensor) -> Tensor:
    """The tensor with zeros in some rows, (batch, seq)."""
    return tensor.masked_fill(rows.reshape(*rows.shape, *(1,) * (tensor.dim() - 2)), 0.0)


def _projection(leaves: dict[str, Tensor], padding: dict[str, Tensor]) -> Tensor:
    """A fixed random projection of all floating tensors in the output, without rows of padding."""
    random = torch.Generator().manual_seed(20)
    terms = []
    for name, leaf in leaves.items():
        if name in padding:
            leaf = _without(leaf, padding[name])
        factors = torch.randn(leaf.shape, generator=random, dtype=torch.float64, device="cpu").to(
            leaf
        )
        terms.append((factors * leaf).sum() / max(leaf.numel(), 1) ** 0.5)
    return sum(terms)


def distances(run: Run, ref: Run, unseen: dict[str, Tensor]) -> dict[str, float]:
    """Distances by name of the reference's tensors; gradients of outputs that have lost their graph
    are 0."""
    tensors, refs = run.visible(unseen), ref.visible(unseen)
    return {
        name: distance(tensors.get(name, torch.zeros_like(ref)), ref) for name, ref in refs.items()
    }
