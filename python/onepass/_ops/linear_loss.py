"""The loss of a linear layer's output, without all logits in memory at once: fakes, autograd.

Gradients for an upstream gradient of 1 are computed with the loss, in the accumulator's dtype, and
scaled in the backward. With reduction "none" each row's upstream gradient must be known: the
backward recomputes the logits. Second derivatives are those of the formula, which holds all
logits at once.
"""

from __future__ import annotations

import inspect
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass._arguments import refuse_gradient
from onepass._mapping import is_mapped
from onepass._ops import fake_checks, loss, tracing
from onepass._ops.decomposition import wide
from onepass._ops.derivatives import second_derivative
from onepass._ops.differentiation import (
    applied,
    are_transforms_active,
    constant,
    is_differentiated,
    is_differentiated_again,
)
from onepass._ops.entry import entry
from onepass._ops.operator import Raw
from onepass.reference import loss as reference

_NONE, _MEAN = loss.REDUCTIONS["none"], loss.REDUCTIONS["mean"]

# The largest factor on float16 gradients until the upstream gradient is known: without it the
# probabilities of 50,000 words are subnormal. A power of two, so it is exact.
_FLOAT16_SCALE = 1024.0
_FLOAT16_LARGEST = torch.finfo(torch.float16).max
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


@entry
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    reduction: int,
    cast: torch.dtype | None = None,
    cast_weight: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    round_factors: bool = False,
) -> Tensor:
    """The loss of input linear_weight^T + linear_bias.

    cast, cast_weight: the dtypes to which autocast casts input, and linear_weight with linear_bias;
    gradients are not rounded to them. out_dtype: the loss's; None: input's. round_factors: those of
    float32 products, to bfloat16.
    """
    (weight,) = wide(weight)
    if torch.compiler.is_compiling():
        label_smoothing, softcap = constant(label_smoothing), constant(softcap)
        z_loss = constant(z_loss)
    tensors = (input, linear_weight, target, linear_bias, weight)
    options = (ignore_index, label_smoothing, softcap, z_loss, reduction)
    compute = _traced if tracing.records() else _compute
    return compute(*tensors, *options, cast, cast_weight, out_dtype, round_factors)


def _compute(input, linear_weight, target, linear_bias, weight, *options):
    operands = (input, linear_weight, linear_bias)
    if not is_differentiated(*operands, weight):
        return _forward(*operands, target, weight, options, 0)[0]
    everything = are_transforms_active()  # inside vmap requires_grad is not known
    mask = sum(
        1 << place
        for place, tensor in enumerate(operands)
        if tensor is not None and (everything or tensor.requires_grad)
    )
    return _apply(*operands, target, weight, options, mask)[0]


def _forward(input, linear_weight, linear_bias, target, weight, options, mask):
    """(loss, gradients of the three operands for an upstream gradient of 1, the factor that float16
    gradients are scaled by; empty otherwise)."""
    *of_loss, reduction, cast, cast_weight, out_dtype, round_factors = options
    input, linear_weight, linear_bias = _cast(input, linear_weight, linear_bias, cast, cast_weight)
    dtype, total = input.dtype, 1.0
    accumulator = torch.float64 if dtype is torch.float64 else torch.float32
    unit = input.new_empty((0,), dtype=accumulator)
    if reduction == _NONE:
        mask = 0
    tensors = (input, linear_weight, target, linear_bias, weight)
    if not torch.compiler.is_compiling() and _PLAIN.issuperset(map(type, tensors)):
        fake_checks.check(_check, *tensors, *of_loss, None, 0)  # before torch reads a target
    if reduction == _MEAN:
        total = _total_weight(input, target, linear_weight, weight, of_loss[0])
    dloss = None
    if mask:
        one = input.new_ones((), dtype=torch.float64)
        if dtype is torch.float16:
            one = one * _float16_scale(input, linear_weight, weight, *of_loss[2:])
            if reduction == _MEAN:
                one = one * torch.where(total == 0, 1.0, total)
            unit = one.to(accumulator)
        dloss = (one / total).to(accumulator).expand(target.shape)
    losses, *gradients = _op(*tensors, *of_loss, dloss, mask, round_factors)
    if reduction != _NONE:
        losses = _sum_in_order(losses) / total
    return losses.to(out_dtype or dtype), *gradients, unit


def _cast(input, linear_weight, linear_bias, cast, cast_weight):
    if cast is not None:
        input = input.to(cast)
    if cast_weight is not None:
        linear_weight = linear_weight.to(cast_weight)
        linear_bias = None if linear_bias is None else linear_bias.to(cast_weight)
    return input, linear_weight, linear_bias


def _sum_in_order(numbers: Tensor) -> Tensor:
    """The sum in float64, on the CPU in order: torch's sum depends on the number of threads."""
    numbers = numbers.reshape(-1).double()
    return numbers.cumsum(0)[-1:].sum() if numbers.device.type == "cpu" else numbers.sum()


def _total_weight(input, target, linear_weight, weight, ignore_index) -> Tensor:
    """Sum of the weights of rows that are not ignored. The operator refuses targets that are no
    class."""
    if target.device != input.device:
        return input.new_ones((), dtype=torch.float64)  # the operator refuses this too
    counted = target != ignore_index
    if not _are_weights(input, linear_weight, weight) or target.dtype is not torch.int64:
        return counted.sum().double()
    of_rows = weight.index_select(0, target.reshape(-1).clamp(0, weight.shape[0] - 1))
    return _sum_in_order(of_rows.masked_fill(~counted.reshape(-1), 0.0))


def _are_weights(input, linear_weight, weight) -> bool:
    """Whether weight fits the classes. The operator refuses another shape or device."""
    return (
        weight is not None
        and linear_weight.dim() == 2
        and linear_weight.shape[0] > 0
        and weight.shape == linear_weight.shape[:1]
        and weight.device == input.device
    )


def _float16_scale(input, linear_weight, weight, softcap, z_loss) -> float | Tensor:
    """A factor with which no gradient of a logit overflows float16. A row's gradients are at most
    its weight times 1 + 2 |z_loss lse|; lse is at most the largest logit + log(classes)."""
    largest_lse = min(softcap or _FLOAT16_LARGEST, _FLOAT16_LARGEST) + 20
    room = _FLOAT16_LARGEST / (2 + 4 * abs(z_loss) * largest_lse)
    room = min(_FLOAT16_SCALE, 2.0 ** math.floor(math.log2(room)))
    if not _are_weights(input, linear_weight, weight):
        return room
    # A weight that is not finite may be of a class that no row has.
    largest = weight.abs().nan_to_num(0.0, posinf=0.0).amax().double()
    return room * largest.clamp(min=1.0).log2().ceil().neg().exp2()


class _LinearLoss(torch.autograd.Function):
    """Written by hand: its forward is several operators, and computes the gradients too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input, linear_weight, linear_bias, target, weight, options, mask):
        return _forward(input, linear_weight, linear_bias, target, weight, options, mask)

    @staticmethod
    def formula(input, linear_weight, linear_bias, target, weight, options, mask):
        *of_loss, reduction, cast, cast_weight, out_dtype, round_factors = options
        operands = _cast(input, linear_weight, linear_bias, cast, cast_weight)
        dtype = out_dtype or operands[0].dtype
        input, linear_weight, linear_bias = wide(*operands)
        of_loss = (weight, *of_loss, reference.REDUCTIONS[reduction])
        loss = reference.linear_cross_entropy(
            input, linear_weight, target, linear_bias, *of_loss, round_factors=round_factors
        )
        return (loss.to(dtype),)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        *tensors, ctx.options, ctx.mask = inputs
        if ctx.needs_input_grad[4]:
            refuse_gradient("linear_cross_entropy", "weight")
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.save_for_backward(*tensors, *outputs[1:])

    @staticmethod
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * 7
        saved = ctx.saved_tensors
        if is_differentiated_again():  # create_graph=True
            gradients = _apply_backward(dloss, *saved, ctx.options, ctx.mask)
        else:
            inplace = _are_last_read() and not is_mapped(dloss)  # batched gradients are several
            gradients = _gradients(dloss, *saved, ctx.options, ctx.mask, inplace)
        wanted = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(gradient if needs else None for gradient, needs in wanted), *(None,) * 4


def _are_last_read() -> bool:
    """Whether the gradients computed with the loss may be overwritten: in an eager backward without
    retain_graph=True."""
    if torch.compiler.is_compiling() or are_transforms_active():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def _gradients(
    dloss, input, linear_weight, linear_bias, target, weight, dinput, dlinear_weight, dlinear_bias,
    unit, options, grad_mask, inplace=False,
):  # fmt: skip
    """Gradients of input, linear_weight and linear_bias in their dtypes; empty if not wanted."""
    operands = (input, linear_weight, linear_bias)
    *of_loss, reduction, cast, cast_weight, _, round_factors = options
    if reduction == _NONE:
        rows, matrix, bias = _cast(*operands, cast, cast_weight)
        call = (rows, matrix, target, bias, weight, *of_loss, dloss, grad_mask, round_factors)
        _, *gradients = _op(*call)
    else:
        gradients = (dinput, dlinear_weight, dlinear_bias)
        factor = dloss.to(dinput.dtype)
        if unit.numel():
            factor = factor / unit
        gradients = [g.mul_(factor) if inplace else g * factor for g in gradients]
    return tuple(
        gradient if tensor is None else gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients, operands, strict=True)
    )


def _derivative(dloss, input, linear_weight, linear_bias, *, target, weight, options):
    *of_loss, reduction, _, _, _, round_factors = options
    of_loss = (weight, *of_loss, reference.REDUCTIONS[reduction])
    return reference.linear_cross_entropy_backward(
        dloss, input, linear_weight, linear_bias, target, *of_loss, round_factors=round_factors
    )


_apply = applied(_LinearLoss)
_apply_backward = second_derivative(
    _gradients,
    list(inspect.signature(_gradients).parameters)[:-1],  # not inplace
    ("dinput", "dlinear_weight", "dlinear_bias"),
    _derivative,
)
_traced = tracing.operator(
    "linear_cross_entropy",
    "(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, "
    "SymInt ignore_index, float label_smoothing, float softcap, float z_loss, int reduction_kind, "
    "ScalarType? cast, ScalarType? cast_weight, ScalarType? out_dtype, bool round_factors) "
    "-> Tensor",
    _compute,
)


def _outputs(input, linear_weight, target, gradient_mask):
    accumulator = torch.float64 if input.dtype is torch.float64 else torch.float32

    def made(wanted, shape):
        return input.new_empty(shape if wanted else (0,), dtype=accumulator)

    return (
        made(True, target.shape),
        made(gradient_mask & 1, input.shape),
        made(gradient_mask & 2, linear_weight.shape),
        made(gradient_mask & 4, linear_weight.shape[:1]),
    )


def _definition(
    input, linear_weight, target, linear_bias, weight,
    ignore_index, label_smoothing, softcap, z_loss, gradient_mask, round_factors,
):  # fmt: skip
    if gradient_mask:
        return NotImplemented
    operands = wide(input, linear_weight, linear_bias)
    of_loss = (weight, ignore_index, label_smoothing, softcap, z_loss, "none")
    losses = reference.linear_cross_entropy(
        *operands[:2], target, operands[2], *of_loss, round_factors=round_factors
    )
    return losses, *(operands[0].new_empty((0,)) for _ in range(3))


_operator = Raw("linear_loss", _outputs, _definition)
_op, _check = _operator.op, _operator.check


# ---- on CUDA, where products are torch's -------------------------------------------------------

# Bytes of a chunk of logits on CUDA.
CHUNK_BYTES = 1 << 28
_FEWEST_ROWS = 256


def on_torchs_products(
    input, linear_weight, target, linear_bias, weight,
    ignore_index, label_smoothing, softcap, z_loss, dloss, gradient_mask, round_factors=False,
):  # fmt: skip
    """`onepass::linear_loss` composed of torch's products and the loss family's kernels.

    round_factors: ignored; torch's own setting decides on a device.
    """
    tensors = (input, linear_weight, target, linear_bias, weight)
    options = (ignore_index, label_smoothing, softcap, z_loss)
    _check(*tensors, *options, dloss, gradient_mask)
    accumulator = torch.float64 if input.dtype is torch.float64 else torch.float32
    classes, in_features = linear_weight.shape
    rows, targets = input.reshape(-1, in_features), target.reshape(-1)
    upstream = None if dloss is None else dloss.reshape(-1)
    linear_weight, linear_bias = (
        None if t is None else t.to(input.dtype) for t in (linear_weight, linear_bias)
    )

    def made(bit, shape):
        return input.new_zeros(shape if gradient_mask & bit else (0,), dtype=accumulator)

    losses = input.new_empty(targets.shape, dtype=accumulator)
    dinput, dweight = made(1, rows.shape), made(2, (classes, in_features))
    dbias = made(4, (classes,))
    step = max(CHUNK_BYTES // max(classes * input.dtype.itemsize, 1), _FEWEST_ROWS)
    with torch.autocast(input.device.type, enabled=False):
        for begin in range(0, len(rows), step):
            chunk = slice(begin, begin + step)
            logits = F.linear(rows[chunk], linear_weight, linear_bias)
            of_loss = (targets[chunk], weight, ignore_index, label_smoothing, softcap, _NONE)
            losses[chunk], *kept = loss._forward(logits, *of_loss, z_loss, accumulator)
            if not gradient_mask:
                continue
            loss._backward_inplace(logits, *of_loss, upstream[chunk], *kept)
            if gradient_mask & 1:
                dinput[chunk] = _product(logits, linear_weight, accumulator)
            if gradient_mask & 2:
                dweight += _product(logits.t(), rows[chunk], accumulator)
            if gradient_mask & 4:
                dbias += logits.sum(0, dtype=accumulator)
    dinput = dinput.reshape(input.shape) if gradient_mask & 1 else dinput
    return losses.reshape(target.shape), dinput, dweight, dbias


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in dtype, not rounded to float16: scaled sums of many rows would overflow it."""
    if left.dtype is dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)  # torch has out_dtype on CUDA alone


# If imported again in this process: the registration of the first import stays.
if not torch._C._dispatch_has_kernel_for_dispatch_key("onepass::linear_loss", "CUDA"):
    _library = torch.library.Library("onepass", "FRAGMENT")
    _library.impl("linear_loss", on_torchs_products, "CUDA")
