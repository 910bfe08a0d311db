"""Second derivatives from a first derivative written in plain torch ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def vjp(
    formula: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of `formula(*inputs)` for `inputs`, weighted by `cotangents`.

    16-bit inputs are computed in float32, and their gradients rounded once. The result can itself
    be differentiated when the caller runs under create_graph.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of tensors that have a history, to continue it; otherwise leaves, so that each
        # formula can take gradients with respect to them.
        leaves = [
            None
            if t is None
            else _wide(t.view_as(t))
            if create_graph and t.requires_grad
            else _wide(t.detach()).requires_grad_()
            for t in inputs
        ]
        pairs = [
            (output, cotangent.to(output.dtype))
            for output, cotangent in zip(formula(*leaves), cotangents, strict=True)
            if output is not None and cotangent is not None and output.requires_grad
        ]
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        if not pairs or not wanted:
            return [None] * len(inputs)
        gradients = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [cotangent for _, cotangent in pairs],
                allow_unused=True,
                create_graph=create_graph,
            )
        )
    result = []
    for source, leaf in zip(inputs, leaves, strict=True):
        gradient = next(gradients) if leaf is not None and leaf.requires_grad else None
        result.append(None if gradient is None else gradient.to(source.dtype))
    return result


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
