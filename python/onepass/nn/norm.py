"""Layer norm and RMS norm as modules, and the residual add fused with each."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from onepass import functional


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` in one pass over memory; see `onepass.functional.layer_norm`.

    Examples:
        >>> norm = onepass.nn.LayerNorm(512)
        >>> norm(torch.randn(4, 512)).shape
        torch.Size([4, 512])
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` in one pass over memory; see `onepass.functional.rms_norm`.

    Examples:
        >>> norm = onepass.nn.RMSNorm(512)
        >>> norm(torch.randn(4, 512)).shape
        torch.Size([4, 512])
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class AddLayerNorm(torch.nn.LayerNorm):
    """Residual add and layer norm in one pass; see `onepass.functional.add_layer_norm`.

    Parameters and state_dict keys are those of `torch.nn.LayerNorm`; called with (input, residual)
    and, where the branch has them, column_scale and row_scale, returns (y, residual_out). A
    residual of None is as in the function.

    Args:
        dropout_p: probability of dropping an element of input before the add, while training.
        residual_dtype: dtype of residual_out; None is residual's.

    Examples:
        >>> norm = onepass.nn.AddLayerNorm(512, dropout_p=0.1)
        >>> y, stream = norm(torch.randn(4, 512), torch.randn(4, 512))
        >>> y.shape, stream.shape
        (torch.Size([4, 512]), torch.Size([4, 512]))
    """

    def __init__(
        self, *args, dropout_p: float = 0.0, residual_dtype: torch.dtype | None = None, **kwargs
    ):
        super().__init__(*args, **kwargs)
        self.dropout_p = dropout_p
        self.residual_dtype = residual_dtype

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None,
        column_scale: Tensor | None = None,
        row_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return functional.add_layer_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            dropout_p=self.dropout_p,
            training=self.training,
            residual_dtype=self.residual_dtype,
            column_scale=column_scale,
            row_scale=row_scale,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}"


class AddRMSNorm(torch.nn.RMSNorm):
    """Residual add and RMS norm in one pass; see `onepass.functional.add_rms_norm`.

    Parameters and state_dict keys are those of `torch.nn.RMSNorm`; called with (input, residual)
    and, where the branch has them, column_scale and row_scale, returns (y, residual_out). A
    residual of None is as in the function.

    Args:
        weight_offset: added to the weight: 1.0 for models that store the weight minus one.
            Must be 0 without a weight.
        dropout_p: probability of dropping an element of input before the add, while training.
        residual_dtype: dtype of residual_out; None is residual's.

    Examples:
        >>> norm = onepass.nn.AddRMSNorm(512, residual_dtype=torch.float32)
        >>> y, stream = norm(torch.randn(4, 512).bfloat16(), None)
        >>> y.dtype, stream.dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(
        self,
        *args,
        weight_offset: float = 0.0,
        dropout_p: float = 0.0,
        residual_dtype: torch.dtype | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.weight_offset = weight_offset
        self.dropout_p = dropout_p
        self.residual_dtype = residual_dtype

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None,
        column_scale: Tensor | None = None,
        row_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return functional.add_rms_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,
            weight_offset=self.weight_offset,
            dropout_p=self.dropout_p,
            training=self.training,
            residual_dtype=self.residual_dtype,
            column_scale=column_scale,
            row_scale=row_scale,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}"


class ModulatedLayerNorm(torch.nn.Module):
    """Layer norm with the batch's scale and shift; see `onepass.functional.modulated_layer_norm`.

    Called with (input, scale, shift), returns y; with a residual, and a gate, (y, h). It has no
    parameters.

    Args:
        normalized_shape: the trailing dimensions that form a row.
        eps: added to the variance.

    Examples:
        >>> norm = onepass.nn.ModulatedLayerNorm(64, eps=1e-6)
        >>> norm(torch.randn(2, 16, 64), torch.randn(2, 64), torch.randn(2, 64)).shape
        torch.Size([2, 16, 64])
    """

    _function = staticmethod(functional.modulated_layer_norm)

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None = 1e-5):
        super().__init__()
        is_size = isinstance(normalized_shape, numbers.Integral)
        self.normalized_shape = (normalized_shape,) if is_size else tuple(normalized_shape)
        self.eps = eps

    def forward(
        self,
        input: Tensor,
        scale: Tensor,
        shift: Tensor | None = None,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return self._function(
            input, self.normalized_shape, scale, shift, self.eps, residual=residual, gate=gate
        )

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class ModulatedRMSNorm(ModulatedLayerNorm):
    """RMS norm with the batch's scale and shift; see `onepass.functional.modulated_rms_norm`.

    As `ModulatedLayerNorm`, with an eps of None as in `onepass.functional.rms_norm`.

    Examples:
        >>> norm = onepass.nn.ModulatedRMSNorm(64)
        >>> y, h = norm(torch.randn(2, 16, 64), torch.randn(2, 64), residual=torch.ones(2, 16, 64))
        >>> y.shape, h.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 16, 64]))
    """

    _function = staticmethod(functional.modulated_rms_norm)

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None = None):
        super().__init__(normalized_shape, eps)
