"""Dropout, DropPath and LayerScale as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import functional


class Dropout(torch.nn.Dropout):
    """`torch.nn.Dropout` that stores no mask; see `onepass.functional.dropout`.

    Tensors in channels_last keep that order: there an element's index is its place in memory.

    Examples:
        >>> dropout = onepass.nn.Dropout(0.5)
        >>> sorted(set(dropout(torch.ones(1000)).tolist()))
        [0.0, 2.0]
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.p > 0.0 and not self.inplace and isinstance(input, Tensor):
            if input.dim() in (4, 5) and _is_channels_last(input):
                rows = functional.dropout(input.movedim(1, -1), self.p)
                return rows.movedim(-1, 1)
        return functional.dropout(input, self.p, self.training, self.inplace)


class DropPath(torch.nn.Module):
    """timm's DropPath: drops whole samples of a branch (stochastic depth).

    Its factors come from `onepass.functional.drop_path_scale`. `row_scale` gives them alone, for
    the fused functions. Tensors in channels_last keep that order.

    Args:
        drop_prob: probability of dropping a sample while training.
        scale_by_keep: whether kept samples are divided by the chance of it.

    Examples:
        >>> drop_path = onepass.nn.DropPath(0.5)
        >>> sorted(set(drop_path(torch.ones(1000, 2))[:, 0].tolist()))
        [0.0, 2.0]
        >>> branch, stream = torch.randn(4, 9, 16), torch.randn(4, 9, 16)
        >>> y, stream = onepass.functional.add_layer_norm(
        ...     branch, stream, 16, row_scale=drop_path.row_scale(branch)
        ... )
    """

    def __init__(self, drop_prob: float = 0.0, scale_by_keep: bool = True):
        super().__init__()
        self.drop_prob = drop_prob
        self.scale_by_keep = scale_by_keep

    def row_scale(self, input: Tensor) -> Tensor | None:
        """The factor of each sample, drawn in each call; None if nothing is dropped."""
        return functional.drop_path_scale(input, self.drop_prob, self.training, self.scale_by_keep)

    def forward(self, input: Tensor) -> Tensor:
        scale = self.row_scale(input)
        if scale is None:
            return input
        if input.dim() in (4, 5) and _is_channels_last(input):
            rows = functional.add_dropout(input.movedim(1, -1), None, 0.0, row_scale=scale)
            return rows.movedim(-1, 1)
        return functional.add_dropout(input, None, 0.0, row_scale=scale)

    def extra_repr(self) -> str:
        return f"drop_prob={round(self.drop_prob, 3):0.3f}"


class LayerScale(torch.nn.Module):
    """timm's LayerScale: a learned scale for each of the last dimension's columns.

    The result has input's dtype. Its gradient is summed over the rows in a fixed order. As
    `column_scale`, `gamma` joins the residual add and the norm after it.

    Args:
        dim: size of the last dimension.
        init_values: the initial value of gamma's elements.
        inplace: writes the result into input.

    Examples:
        >>> scale = onepass.nn.LayerScale(16)
        >>> scale(torch.ones(2, 16)).shape
        torch.Size([2, 16])
        >>> branch, stream = torch.randn(4, 9, 16), torch.randn(4, 9, 16)
        >>> y, stream = onepass.functional.add_layer_norm(
        ...     branch, stream, 16, column_scale=scale.gamma
        ... )
    """

    def __init__(
        self, dim: int, init_values: float = 1e-5, inplace: bool = False, device=None, dtype=None
    ):
        super().__init__()
        self.init_values = init_values
        self.inplace = inplace
        self.gamma = torch.nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets gamma to its initial value."""
        torch.nn.init.constant_(self.gamma, self.init_values)

    def forward(self, input: Tensor) -> Tensor:
        output = functional.add_dropout(input, None, 0.0, column_scale=self.gamma)
        return input.copy_(output) if self.inplace else output


def _is_channels_last(input: Tensor) -> bool:
    """Whether it has that memory order, and not also the usual one (as with one channel)."""
    # Not by memory_format, which torch.vmap does not know.
    return not input.is_contiguous() and input.movedim(1, -1).is_contiguous()
