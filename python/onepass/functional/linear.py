"""The linear layer and its epilogues: activation, dropout, residual."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import check_arguments
from onepass._imported import is_a, is_dtensor, is_fake
from onepass._ops import dropout as _dropout
from onepass._ops import linear as _linear
from onepass._policy import products
from onepass._policy.precision import HAS_PAIR_PRODUCTS, check_precision, factors_of
from onepass.functional.attention import _autocast, _cast
from onepass.functional.dropout import _check_p
from onepass.reference.linear import ACTIVATIONS

_F = torch.nn.functional
_ACTIVATIONS = {a.name.lower(): a for a in _linear.Activation if a != _linear.Activation.NONE}
_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dropout_p: float = 0.0,
    residual: Tensor | None = None,
    training: bool = True,
    precision: str | None = None,
) -> Tensor:
    """``residual + dropout(activation(input weight^T + bias))``, as `F.linear` without the options.

    On a CPU the products are onepass's own, computed in float32 (float64 for float64) and rounded
    once: the bits of a row of the output do not depend on the other rows or on the number of
    threads. The following steps are computed while the products are in the cache; training keeps
    the input and, with an activation, its argument. On CUDA the products are torch's, and so are
    those of tensor subclasses (quantised weights); there each further step is a separate pass.

    Args:
        input: (..., in_features); float32, bfloat16, float16 or float64. A last dimension that is
            not dense is copied once.
        weight: (out_features, in_features), in any of these dtypes (float64 with float64 alone).
        bias: (out_features,), likewise, or None.
        activation: None, "relu", "silu", "gelu" or "gelu_tanh".
        dropout_p: probability of dropping an element; see `dropout`.
        residual: the output's shape; it is added at the end, and gives the output its dtype.
        training: False turns dropout off.
        precision: of products of two float32 factors on a CPU; sums, outputs and gradients are
            float32. "medium", on a CPU with dot products of bfloat16, whose level `onepass doctor`
            calls avx512_bf16: the factors are rounded to bfloat16 while they are packed; other CPUs
            compute in float32. "int8": the factors of the output and of input's gradient are
            quantised to 8 bits while they are packed, each row of input (and of the output's
            gradient) and each row of weight (column, for input's gradient) by its largest
            magnitude, as in SwitchBackQ (Wortsman et al. 2023). "int8:" and some of output, dinput,
            dweight, joined by "+", quantises these products; with "+stochastic" the output's
            gradient is rounded to codes stochastically for input's, by a seed that each call draws
            from torch's generator. Products that are not named, and sums over more than 131,072
            products, are computed as with "medium". Quantised products have the same bits on all
            CPUs; those with VNNI are fast. A line with Inf or NaN gives what float32 gives; one
            whose numbers are all below 1e-34 counts as zeros.
            "high", "highest": float32, as three products of bfloat16 are no faster than one of
            float32 here. None: as torch's global setting says
            (`torch.set_float32_matmul_precision`, or
            `torch.backends.mkldnn.matmul.fp32_precision`, where "bf16" is "medium"). Under autocast
            the factors have 16 bits already, and are taken so.

    Returns:
        Tensor of shape (..., out_features) in input's dtype (under autocast: in autocast's).

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: activation or precision is none of these, or dropout_p is outside [0, 1].

    Examples:
        >>> x, weight, bias = torch.randn(8, 64), torch.randn(256, 64), torch.zeros(256)
        >>> y = onepass.functional.linear(x, weight, bias, activation="gelu", dropout_p=0.1)
        >>> y.shape
        torch.Size([8, 256])
    """
    try:
        if activation is not None and activation not in _ACTIVATIONS:
            names = ", ".join(map(repr, _ACTIVATIONS))
            raise ValueError(
                f"linear: activation must be None or one of {names}, got {activation!r}"
            )
        check_precision("linear", precision)
        _check_p("linear", "dropout_p", dropout_p)
        if type(training) is not bool:
            raise TypeError  # which check_arguments names
        p = dropout_p if training else 0.0
        if not _is_ours(input, weight, bias):
            return _composed(_torchs(input, weight, bias), activation, p, residual)
        operands = _autocast_operands(input, weight, bias)
        are_wide = operands[0].dtype is torch.float32 is operands[1].dtype
        mask, rounds_randomly = factors_of(precision) if are_wide else (0, False)
        if activation is None and p == 0.0 and residual is None and not rounds_randomly:
            return _linear.linear(*operands, mask)
        kind = _ACTIVATIONS.get(activation, _linear.Activation.NONE)
        return _linear.linear_epilogue(*operands, residual, kind, p, mask, rounds_randomly)
    except Exception:
        check_arguments(linear, locals())
        raise


def _is_ours(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return not input.is_cuda and not any(map(_has_products, (input, weight, bias)))


def _autocast_operands(
    input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if torch.is_autocast_enabled("cpu"):
        (input,) = _autocast(input)
        # Without an instruction for pairs the products read weights as they are, in any dtype,
        # and no copy is made of them in each call.
        if input.dtype is torch.bfloat16 and HAS_PAIR_PRODUCTS:
            weight, bias = _cast(torch.bfloat16, weight, bias)
    return input, weight, bias


def _torchs(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    reason = "torch's products on CUDA" if input.is_cuda else "a subclass of Tensor"
    products.record_fallback(input.shape, input.dtype, reason)
    return _F.linear(input, weight, bias)


def _composed(
    output: Tensor,
    activation: str | None = None,
    dropout_p: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Activation, dropout and residual after a product, by a pass for each."""
    if activation is not None:
        output = ACTIVATIONS[activation](output)
    if residual is not None and dropout_p:
        return _dropout.add_dropout(output, residual, dropout_p)
    if residual is not None:
        return (residual + output).to(residual.dtype)
    return _dropout.dropout(output, dropout_p) if dropout_p else output


def _has_products(tensor: Tensor | None) -> bool:
    """Whether the tensor's class may have its own products."""
    if type(tensor) in _PLAIN:
        return False
    if is_dtensor(tensor):  # each process computes with a part of it
        return _has_products(tensor._local_tensor)
    return not (
        is_fake(tensor) or is_a(tensor, "torch._subclasses.functional_tensor", "FunctionalTensor")
    )
