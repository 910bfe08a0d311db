"""The linear family's operators on the CPU: the product, and the product with an epilogue."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from onepass._mapping import run_as_rows
from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.derivatives import gradients_of, second_derivative
from onepass._ops.differentiation import is_differentiated_again
from onepass._ops.entry import drawing_entry, entry
from onepass._ops.operator import Operator, Raw
from onepass._random import draw_seed
from onepass.reference import linear as reference
from onepass.reference.dropout import dropped


class Activation(enum.IntEnum):
    """The activation after a product; the numbers of csrc/ops/linear.h."""

    NONE = 0
    RELU = 1
    SILU = 2
    GELU = 3
    GELU_TANH = 4


@entry
def linear(input: Tensor, weight: Tensor, bias: Tensor | None, factor_mask: int = 0) -> Tensor:
    """input weight^T + bias in input's dtype. factor_mask: bits of
    reference/products.py; factors that are not both float32 are taken as they are."""
    return _linear.run(input, weight, bias, None, factor_mask)


@drawing_entry
def linear_epilogue(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: Activation,
    dropout_p: float,
    factor_mask: int = 0,
    rounds_randomly: bool = False,
) -> Tensor:
    """residual + dropout(activation(input weight^T + bias)), in residual's dtype or input's."""
    seed = draw_seed(input.device) if dropout_p > 0.0 else None
    rounding_seed = draw_seed(input.device) if rounds_randomly else None
    of_epilogue = (residual, seed, dropout_p, activation, False)
    return _epilogue.run(input, weight, bias, *of_epilogue, factor_mask, rounding_seed)[0]


class _Epilogue(torch.autograd.Function):
    """(output, preactivation). The second is an output so that second derivatives reach it. The
    backward is two operators: that of the epilogue, and then that of the product."""

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.set_materialize_grads(False)
        input, weight, bias, _, seed, rounding_seed, constants = inputs
        ctx.dropout_p, ctx.activation, ctx.factor_mask, _ = constants
        ctx.input_dtype = input.dtype
        needs = ctx.needs_input_grad
        # A frozen layer does not keep its input.
        operands = input if needs[1] else None, weight if needs[0] else None
        given = (input, weight, bias)
        ctx.dtypes = [t.dtype if need else None for t, need in zip(given, needs, strict=False)]
        if not any(needs[:3]):  # residual alone: its gradient is doutput
            ctx.save_for_backward(*operands, None, None, None)
            return
        preactivation = None if ctx.activation == Activation.NONE else outputs[1]
        ctx.save_for_backward(*operands, preactivation, seed, rounding_seed)

    @staticmethod
    def backward(ctx, doutput, dpreactivation):
        input, weight, preactivation, seed, rounding_seed = ctx.saved_tensors
        gradients = [None] * 3
        if any(ctx.needs_input_grad[:3]):
            dsums = None
            if doutput is not None:
                dsums = _before_epilogue(ctx, doutput, preactivation, seed)
            # A compiled graph has no second derivative, and passes zeros here.
            if dpreactivation is not None and not torch.compiler.is_compiling():
                dsums = dpreactivation if dsums is None else dsums + dpreactivation
            if dsums is not None:
                again = is_differentiated_again()  # create_graph=True
                compute = _linear.apply_backward if again else _backward
                found = compute(dsums, input, weight, *ctx.dtypes, ctx.factor_mask, rounding_seed)
                gradients = [
                    None if dtype is None else gradient
                    for gradient, dtype in zip(found, ctx.dtypes, strict=True)
                ]
        dresidual = doutput if ctx.needs_input_grad[3] else None
        return *gradients, dresidual, None, None, None


def _before_epilogue(ctx, doutput, preactivation, seed):
    """The gradient of the sums, in input's dtype."""
    if seed is None and preactivation is None:
        return doutput.to(ctx.input_dtype)
    # create_graph=True
    compute = _apply_epilogue_backward if is_differentiated_again() else _epilogue_backward.op
    return compute(doutput, preactivation, seed, ctx.dropout_p, ctx.activation, ctx.input_dtype)


def _outputs(input, weight, out_dtype):
    return input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=out_dtype or input.dtype)


def _definition(input, weight, bias, out_dtype, factor_mask):
    mask = _of_factors(input, weight, factor_mask)
    output = reference.linear(*wide(input, weight, bias), mask)
    return output.to(out_dtype or input.dtype)


def _of_factors(input: Tensor, weight: Tensor, factor_mask: int) -> int:
    """How factors are taken: as they are unless both are float32, or the float64 of a
    reference."""
    return factor_mask if input.dtype == weight.dtype and input.dtype.itemsize > 2 else 0


def _gradients(doutput, input, weight, input_dtype, weight_dtype, bias_dtype):
    def gradient(dtype, shape):
        return doutput.new_empty((0,) if dtype is None else shape(), dtype=dtype)

    # dweight is laid out as the weight.
    transposed = weight is not None and weight.stride(0) == 1 and weight.stride(1) != 1
    if weight_dtype is not None and transposed:
        dweight = gradient(weight_dtype, lambda: (input.shape[-1], doutput.shape[-1])).t()
    else:
        dweight = gradient(weight_dtype, lambda: (doutput.shape[-1], input.shape[-1]))
    return (
        gradient(input_dtype, lambda: (*doutput.shape[:-1], weight.shape[1])),
        dweight,
        gradient(bias_dtype, lambda: (doutput.shape[-1],)),
    )


_linear = differentiable(
    "linear",
    _outputs,
    _definition,
    _gradients,
    results=("dinput", "dweight", "dbias"),
    derivative=reference.linear_backward,
    derived={  # a frozen layer does not keep its input
        "input": lambda input, needs_weight: input if needs_weight else None,
        "weight": lambda weight, needs_input: weight if needs_input else None,
        "rounding_seed": lambda: None,  # the epilogue's operator has one
    },
)
_backward = _linear.backward.op
run_as_rows(_linear.forward.op, 0)
# Gradients of weight and bias are sums over rows; with a seed rows are counted within a sample.
run_as_rows(_backward, 0, 1, unless=(4, 5, 7))


def _epilogue_outputs(input, weight, residual, save_preactivation):
    shape = (*input.shape[:-1], weight.shape[0])
    output = input.new_empty(shape, dtype=(input if residual is None else residual).dtype)
    return output, input.new_empty(shape if save_preactivation else (0,))


def _activated(x, activation_kind):
    if activation_kind == Activation.NONE:
        return x
    return reference.ACTIVATIONS[Activation(activation_kind).name.lower()](x)


def _epilogue_definition(
    input, weight, bias, residual, seed, dropout_p, activation_kind, save_preactivation,
    factor_mask, rounding_seed,
):  # fmt: skip
    of_factors = _of_factors(input, weight, factor_mask), rounding_seed
    preactivation = reference.linear(*wide(input, weight, bias), *of_factors)
    output = dropped(_activated(preactivation, activation_kind), dropout_p, seed)
    if residual is not None:
        output = residual + output
    kept = preactivation.to(input.dtype) if save_preactivation else input.new_empty((0,))
    return output.to((input if residual is None else residual).dtype), kept


def _epilogue_gradient(doutput, out_dtype):
    return doutput.new_empty(doutput.shape, dtype=out_dtype or doutput.dtype)


def _epilogue_derivative(doutput, preactivation, *, seed, dropout_p, activation_kind):
    doutput = dropped(doutput, dropout_p, seed)
    if preactivation is None:
        return (doutput,)
    output = _activated(preactivation, activation_kind)
    return gradients_of([output], [preactivation], [doutput])


_epilogue = Operator(
    "linear_epilogue",
    Raw("linear_epilogue_forward", _epilogue_outputs, _epilogue_definition, unless=("seed",)),
    _Epilogue,
    ("input", "weight", "bias", "residual"),
    saved_if={
        "save_preactivation": "save_preactivation or "
        "(activation_kind != 0 and is_differentiated(input, weight, bias))"
    },
)
_epilogue_backward = Raw("linear_epilogue_backward", _epilogue_gradient, results=("dsums",))
_apply_epilogue_backward = second_derivative(
    _epilogue_backward,
    _epilogue_backward.arguments,
    _epilogue_backward.results,
    _epilogue_derivative,
)
# With a seed not: dropout counts rows within a sample.
run_as_rows(_epilogue.forward.op, 0, 3, unless=(4,))
run_as_rows(_epilogue_backward.op, 0, 1, unless=(2,))
