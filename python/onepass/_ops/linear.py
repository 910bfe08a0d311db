"""The linear family's ops on the CPU: fakes, autograd."""

from __future__ import annotations

import enum
import functools

import torch
from torch import Tensor

from onepass._mapping import run_as_rows, run_each
from onepass._ops import derivatives, fake_checks, tracing
from onepass._ops.decomposition import FORMULAS, decomposes, offer, wide
from onepass._ops.differentiation import applied, is_differentiated, is_differentiated_again
from onepass._ops.dispatch_log import logged
from onepass._ops.dropout import differentiable_dropout
from onepass._ops.placement import placed
from onepass._ops.random import draw_seed, puts_back
from onepass.reference import linear as reference
from onepass.reference.dropout import dropout as reference_dropout

_forward = torch.ops.onepass.linear_forward.default
_forward_check = torch.ops.onepass.linear_forward_check.default
_backward = torch.ops.onepass.linear_backward.default
_backward_check = torch.ops.onepass.linear_backward_check.default

_epilogue = torch.ops.onepass.linear_epilogue_forward.default
_epilogue_check = torch.ops.onepass.linear_epilogue_forward_check.default
_epilogue_backward = torch.ops.onepass.linear_epilogue_backward.default
_epilogue_backward_check = torch.ops.onepass.linear_epilogue_backward_check.default

for _check in (_forward_check, _backward_check, _epilogue_check, _epilogue_backward_check):
    run_each(_check)
run_as_rows(_forward, 0)
run_as_rows(_backward, 0, 1, unless=(4, 5))  # gradients of weight and bias: sums over rows
run_as_rows(_epilogue, 0, 3, unless=(4,))  # with a seed: dropout counts rows within a sample
run_as_rows(_epilogue_backward, 0, 1, unless=(2,))


class Activation(enum.IntEnum):
    """The activation after a product; the numbers of csrc/ops/linear.h."""

    NONE = 0
    RELU = 1
    SILU = 2
    GELU = 3
    GELU_TANH = 4


def _silu_backward(doutput: Tensor, preactivation: Tensor) -> Tensor:
    gate = preactivation.sigmoid()
    return doutput * gate * (1 + preactivation * (1 - gate))


# (doutput, preactivation) -> dpreactivation, in operators that torch can differentiate; torch's own
# backward of silu is not one.
_SLOPES = {
    Activation.RELU: functools.partial(torch.ops.aten.threshold_backward, threshold=0),
    Activation.SILU: _silu_backward,
    Activation.GELU: torch.ops.aten.gelu_backward,
    Activation.GELU_TANH: functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}


@logged
@placed
def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """input weight^T + bias in input's dtype."""
    if tracing.records():
        return _traced(input, weight, bias, None)
    return _compute(input, weight, bias, None)


@logged
@placed
@puts_back
def linear_epilogue(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: Activation,
    dropout_p: float,
) -> Tensor:
    """residual + dropout(activation(input weight^T + bias)), in residual's dtype or input's."""
    seed = draw_seed(input.device) if dropout_p > 0.0 else None
    arguments = (input, weight, bias, residual, seed, dropout_p, activation, False)
    if tracing.records():
        return _traced_epilogue(*arguments)[0]
    return _compute_epilogue(*arguments)[0]


def _compute_epilogue(input, weight, bias, residual, seed, dropout_p, activation, save):
    if is_differentiated(input, weight, bias, residual):
        has_slope = activation != Activation.NONE
        save = save or (has_slope and is_differentiated(input, weight, bias))
        return _apply_epilogue(input, weight, bias, residual, seed, dropout_p, activation, save)
    return _epilogue(input, weight, bias, residual, seed, dropout_p, activation, save)


def _compute(input, weight, bias, out_dtype):
    compute = _apply_linear if is_differentiated(input, weight, bias) else _forward
    return compute(input, weight, bias, out_dtype)


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, weight, bias, out_dtype):
        return _forward(input, weight, bias, out_dtype)

    @staticmethod
    def formula(input, weight, bias, out_dtype):
        return FORMULAS[_forward](input, weight, bias, out_dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*_operands(ctx, *inputs[:3]))

    @staticmethod
    def backward(ctx, doutput):
        return *_gradients(ctx, doutput, *ctx.saved_tensors), None


def _operands(ctx, input, weight, bias):
    """(input, weight); None where no gradient needs it: a frozen layer does not keep its input."""
    needs = ctx.needs_input_grad
    given = (input, weight, bias)
    ctx.dtypes = [t.dtype if need else None for t, need in zip(given, needs, strict=False)]
    return input if needs[1] else None, weight if needs[0] else None


def _gradients(ctx, doutput, input, weight):
    """Gradients of input, weight and bias; None where not wanted."""
    # The first with create_graph=True.
    compute = _apply_backward if is_differentiated_again() else _backward
    gradients = compute(doutput, input, weight, *ctx.dtypes)
    wanted = zip(gradients, ctx.dtypes, strict=True)
    return [None if dtype is None else gradient for gradient, dtype in wanted]


class _Epilogue(torch.autograd.Function):
    """(output, preactivation). The second is an output so that second derivatives reach it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input, weight, bias, residual, seed, dropout_p, activation, save):
        return _epilogue(input, weight, bias, residual, seed, dropout_p, activation, save)

    @staticmethod
    def formula(*arguments):
        return FORMULAS[_epilogue](*arguments)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.set_materialize_grads(False)
        input, weight, bias, _, seed, ctx.dropout_p, ctx.activation, _ = inputs
        ctx.input_dtype = input.dtype
        operands = _operands(ctx, input, weight, bias)
        if not any(ctx.needs_input_grad[:3]):  # residual alone: its gradient is doutput
            ctx.save_for_backward(*operands, None, None)
            return
        preactivation = None if ctx.activation == Activation.NONE else outputs[1]
        ctx.save_for_backward(*operands, preactivation, seed)

    @staticmethod
    def backward(ctx, doutput, dpreactivation):
        input, weight, preactivation, seed = ctx.saved_tensors
        gradients = [None] * 3
        if any(ctx.needs_input_grad[:3]):
            dsums = None
            if doutput is not None:
                dsums = _before_epilogue(ctx, doutput, preactivation, seed)
            # A compiled graph has no second derivative, and passes zeros here.
            if dpreactivation is not None and not torch.compiler.is_compiling():
                dsums = dpreactivation if dsums is None else dsums + dpreactivation
            if dsums is not None:
                gradients = _gradients(ctx, dsums, input, weight)
        dresidual = doutput if ctx.needs_input_grad[3] else None
        return *gradients, dresidual, None, None, None, None


def _before_epilogue(ctx, doutput, preactivation, seed):
    """The gradient of the sums, in input's dtype."""
    p, activation, dtype = ctx.dropout_p, ctx.activation, ctx.input_dtype
    if seed is None and preactivation is None:
        return doutput.to(dtype)
    if not is_differentiated_again():
        return _epilogue_backward(doutput, preactivation, seed, p, activation, dtype)
    # create_graph=True: by operators that can be differentiated.
    doutput, preactivation = wide(doutput, preactivation)
    if seed is not None:
        doutput = differentiable_dropout(doutput, None, seed, p, None)
    if preactivation is not None:
        doutput = _SLOPES[activation](doutput, preactivation)
    return doutput.to(dtype)


class _LinearBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(doutput, input, weight, *dtypes):
        return _backward(doutput, input, weight, *dtypes)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.set_materialize_grads(False)
        doutput, input, weight, *ctx.dtypes = inputs
        ctx.save_for_backward(doutput, input, weight)

    @staticmethod
    def backward(ctx, *second):
        wanted = zip(second, ctx.dtypes, strict=True)
        gradients = derivatives.vjp(
            reference.linear_backward,
            ctx.saved_tensors,
            [None if dtype is None else gradient for gradient, dtype in wanted],
        )
        return *gradients, None, None, None


_apply_linear = applied(_Linear)
_apply_epilogue = applied(_Epilogue)
_apply_backward = applied(_LinearBackward)
_traced = tracing.operator("linear", _forward, _compute)
_traced_epilogue = tracing.operator("linear_epilogue", _epilogue, _compute_epilogue)


@torch.library.register_fake("onepass::linear_forward")
def _(input, weight, bias, out_dtype):
    offer(_forward)
    fake_checks.check(_forward_check, input, weight, bias, out_dtype)
    return input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=out_dtype or input.dtype)


@torch.library.register_fake("onepass::linear_epilogue_forward")
def _(input, weight, bias, residual, seed, dropout_p, activation_kind, save_preactivation):
    offer(_epilogue)
    options = (residual, seed, dropout_p, activation_kind, save_preactivation)
    fake_checks.check(_epilogue_check, input, weight, bias, *options)
    shape = (*input.shape[:-1], weight.shape[0])
    output = input.new_empty(shape, dtype=(input if residual is None else residual).dtype)
    return output, input.new_empty(shape if save_preactivation else (0,))


@torch.library.register_fake("onepass::linear_epilogue_backward")
def _(doutput, preactivation, seed, dropout_p, activation_kind, out_dtype):
    arguments = (doutput, preactivation, seed, dropout_p, activation_kind, out_dtype)
    fake_checks.check(_epilogue_backward_check, *arguments)
    return doutput.new_empty(doutput.shape, dtype=out_dtype or doutput.dtype)


@torch.library.register_fake("onepass::linear_backward")
def _(doutput, input, weight, input_dtype, weight_dtype, bias_dtype):
    fake_checks.check(
        _backward_check, doutput, input, weight, input_dtype, weight_dtype, bias_dtype
    )

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


@decomposes(_forward)
def _(input, weight, bias, out_dtype):
    return reference.linear(*wide(input, weight, bias)).to(out_dtype or input.dtype)


@decomposes(_epilogue, unless=("seed",))
def _(input, weight, bias, residual, seed, dropout_p, activation_kind, save_preactivation):
    preactivation = output = reference.linear(*wide(input, weight, bias))
    if activation_kind != Activation.NONE:
        output = reference.ACTIVATIONS[Activation(activation_kind).name.lower()](output)
    if seed is not None:
        output = reference_dropout(output, dropout_p, seed)
    if residual is not None:
        output = residual + output
    kept = preactivation.to(input.dtype) if save_preactivation else input.new_empty((0,))
    return output.to((input if residual is None else residual).dtype), kept
