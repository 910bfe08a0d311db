"""Readers of what a model returns: its floating-point tensors, and its loss if it has one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.utils import _pytree as pytree


def floating(output: object) -> list[Tensor]:
    """Outputs of transformers are ordered dicts that torch's pytree may not know."""
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def loss_in(output: object) -> Tensor | None:
    """The output's `.loss` or `["loss"]` (its mean, if that is no scalar), else the first scalar.

    If tensors of the output have gradients, only they count. None: there is no loss.
    """
    named = getattr(output, "loss", None)
    if named is None and isinstance(output, Mapping):
        named = output.get("loss")
    leaves = floating(output)
    scalars = [leaf for leaf in leaves if leaf.dim() == 0]
    if isinstance(named, Tensor) and named.is_floating_point():
        scalars.insert(0, named if named.dim() == 0 else named.mean())
    trains = any(tensor.requires_grad for tensor in (*scalars, *leaves))
    return next((scalar for scalar in scalars if scalar.requires_grad or not trains), None)
