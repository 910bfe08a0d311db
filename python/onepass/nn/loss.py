"""The loss as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import functional


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` by `onepass.functional.cross_entropy`.

    torch computes probabilities as targets and logits of more than two dimensions, unless an option
    is given that torch does not have.

    Args:
        softcap, z_loss, inplace_backward: as in `onepass.functional.cross_entropy`; the others as
            torch's.

    Examples:
        >>> loss = onepass.nn.CrossEntropyLoss(label_smoothing=0.1, softcap=30.0)
        >>> loss(torch.randn(4, 1000), torch.arange(4)).shape
        torch.Size([])
    """

    # For instances that `swap` made from torch's.
    softcap, z_loss, inplace_backward = 0.0, 0.0, False

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float = 0.0,
        z_loss: float = 0.0,
        inplace_backward: bool = False,
    ):
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.softcap = softcap
        self.z_loss = z_loss
        self.inplace_backward = inplace_backward

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        tensors = isinstance(input, Tensor) and isinstance(target, Tensor)
        of_torch = tensors and (target.is_floating_point() or input.dim() > 2)
        if of_torch and not (self.softcap or self.z_loss):
            return super().forward(input, target)
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            reduction=self.reduction,
            inplace_backward=self.inplace_backward,
        )

    def extra_repr(self) -> str:
        given = {name: getattr(self, name) for name in ("softcap", "z_loss", "inplace_backward")}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value)


class LinearCrossEntropyLoss(torch.nn.Module):
    """A linear layer and its cross entropy by `onepass.functional.linear_cross_entropy`, with the
    names of `torch.nn.LinearCrossEntropyLoss` (torch 2.13).

    Tied weights are a module's own: ``loss.linear.weight = embedding.weight``.

    Args:
        in_features, num_classes, bias, device, dtype: of the layer, `linear`.
        softcap, z_loss: as in `onepass.functional.cross_entropy`; the others as torch's.

    Examples:
        >>> loss = onepass.nn.LinearCrossEntropyLoss(64, 1000)
        >>> loss(torch.randn(4, 64), torch.arange(4)).shape
        torch.Size([])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        softcap: float = 0.0,
        z_loss: float = 0.0,
    ):
        super().__init__()
        self.linear = torch.nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.z_loss = z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            reduction=self.reduction,
        )
