"""The quantised linear family's operator."""

from __future__ import annotations

from torch import Tensor

from onepass._arguments import refuse_activation
from onepass._dispatch_log import record_fallback
from onepass._mapping import run_as_rows
from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.entry import entry
from onepass._ops.linear import Activation
from onepass.reference import quantized_linear as reference
from onepass.reference.quantized_linear import Format


@entry
def quantized_linear(
    input: Tensor,
    codes: Tensor,
    scales: Tensor,
    shifts: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    format: Format,
    activation: Activation,
    quantize_input: bool,
) -> Tensor:
    """residual + activation(input weight^T + bias), in residual's dtype or input's; on CUDA torch's
    operators. With an activation it has no gradient."""
    of_call = (codes, scales, shifts, bias, residual, format, activation, quantize_input)
    if input.is_cuda:
        shape = " x ".join(map(str, input.shape))
        record_fallback("quantized_linear", shape, "torch's products", 2, "no kernel on CUDA")
        return _definition(input, *of_call)
    return _quantized_linear.run(input, *of_call)


def _outputs(input, scales, residual):
    shape = (*input.shape[:-1], scales.shape[1])
    return input.new_empty(shape, dtype=(input if residual is None else residual).dtype)


def _definition(
    input, codes, scales, shifts, bias, residual, format_kind, activation_kind, quantize_input
):
    activation = Activation(activation_kind)
    output = reference.quantized_linear(
        *wide(input),
        codes,
        scales,
        shifts,
        *wide(bias),
        Format(format_kind),
        None if activation == Activation.NONE else activation.name.lower(),
        residual,
        quantize_input,
    )
    return output.to((input if residual is None else residual).dtype)


def _gradients(doutput, in_features, input_dtype, bias_dtype):
    def gradient(dtype, shape):
        return doutput.new_empty((0,) if dtype is None else shape, dtype=dtype)

    return (
        gradient(input_dtype, (*doutput.shape[:-1], in_features)),
        gradient(bias_dtype, doutput.shape[-1:]),
    )


def _derivative(doutput, *, codes, scales, shifts, in_features, format_kind):
    of_weight = codes, scales, shifts, Format(format_kind), in_features
    rows = doutput.reshape(-1, doutput.shape[-1])
    return doutput @ reference.dequantize(*of_weight, doutput.dtype), rows.sum(0)


def _in_features(input, activation_kind):
    if activation_kind != Activation.NONE:
        refuse_activation("quantized_linear", activation_kind)
    return input.shape[-1]


_quantized_linear = differentiable(
    "quantized_linear",
    _outputs,
    _definition,
    _gradients,
    results=("dinput", "dbias"),
    derivative=_derivative,
    passed="residual",
    derived={"in_features": _in_features},
    refused={"scales": "quantized_linear", "shifts": "quantized_linear"},
)
run_as_rows(_quantized_linear.forward.op, 0, 5)
run_as_rows(_quantized_linear.backward.op, 0, unless=(7,))  # dbias is a sum over rows
