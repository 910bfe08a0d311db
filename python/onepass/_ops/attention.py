"""The attention family's operators. One differentiable entry, `attention`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from onepass._mapping import run_each
from onepass._memory_order import empty_rows
from onepass._ops import tracing
from onepass._ops.decomposition import wide
from onepass._ops.derivatives import gradients_of, second_derivative
from onepass._ops.differentiation import (
    applied,
    constant,
    is_differentiated,
    is_differentiated_again,
)
from onepass._ops.entry import drawing_entry
from onepass._ops.operator import Raw
from onepass._random import draw_seed
from onepass.reference.attention import attention as reference

Options = dict[str, object]  # keywords of an operator

# Options that have gradients, in the order of attention_backward's dterms.
DIFFERENTIABLE = ("bias", "sinks", "alibi_slopes")
# Bits of its grad_mask, in the order of its results and of the formulas below.
BITS = tuple(1 << i for i in range(3 + len(DIFFERENTIABLE)))
_QUERY, _KEY, _VALUE, *_OF_TERMS = BITS
# Options that the definition does not have.
_OF_BACK_ENDS = ("out_bshd", "allow_tf32")


@drawing_entry
def attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """(output, lse) of the raw op. `options` are its keywords without the seed, which is drawn
    here; the dict belongs to this call, which changes it.
    """
    if _takes_tf32(query):
        options["allow_tf32"] = True
    if "dropout_p" in options:
        if torch.compiler.is_compiling():
            options["dropout_p"] = constant(options["dropout_p"])
        if options["dropout_p"] > 0.0:
            options["seed"] = draw_seed(query.device)
    differentiated = is_differentiated(query, key, value, *map(options.get, DIFFERENTIABLE))
    if differentiated and "block_table" in options:
        if not torch.compiler.is_compiling():
            _forward_check(query, key, value, **options)
        key, value = _unpage(key, value, options)
    if tracing.records():
        return _traced(query, key, value, **options, deterministic=deterministic)[:2]
    if differentiated:
        tensors = [query, key, value, *_taken(options)]
        if torch.compiler.is_compiling():
            tensors = _distinct(tensors)
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        # Options in one tuple: autograd inspects every argument.
        return _apply_attention(*tensors, (tuple(options.items()), deterministic))[:2]
    output, lse, _ = _forward(query, key, value, **options)
    return output, lse


def _outputs(query, value, out_bshd):
    accumulator = torch.float64 if query.dtype is torch.float64 else torch.float32
    if query.dim() == 4:
        rows = query.shape[:-1]
    else:
        rows = (query.shape[1], query.shape[0])
    output = empty_rows(query, (*query.shape[:-1], value.shape[-1]), query.dtype, out_bshd)
    lse, lse_rest = (query.new_empty(rows, dtype=accumulator) for _ in range(2))
    return output, lse, lse_rest


def _definition(query, key, value, **given):
    options = {name: option for name, option in given.items() if name not in _OF_BACK_ENDS}
    for name in DIFFERENTIABLE:
        if name in options:
            (options[name],) = wide(options[name])
    if query.dtype is torch.float64 and "alibi_slopes" in options:  # which are float32
        options["alibi_slopes"] = options["alibi_slopes"].double()
    output, lse = reference(*wide(query, key, value), **options)
    return output.to(query.dtype), lse, torch.zeros_like(lse)


def _empty_gradients(query, key, value, bias, sinks, alibi_slopes, grad_mask, out_bshd):
    def like(tensor, bit, default_dtype, bshd=False):
        if tensor is None or not grad_mask & bit:
            return query.new_empty(0, dtype=default_dtype if tensor is None else tensor.dtype)
        return empty_rows(query, tensor.shape, tensor.dtype, bshd)

    return (
        like(query, _QUERY, None, out_bshd),
        like(key, _KEY, None, out_bshd),
        like(value, _VALUE, None, out_bshd),
        [
            like(term, bit, query.dtype)
            for term, bit in zip((bias, sinks, alibi_slopes), _OF_TERMS, strict=True)
        ],
    )


_operator = Raw(
    "attention_forward",
    _outputs,
    _definition,
    unless=("seed", "cu_seq_q", "cu_seq_k", "seqused_k", "block_table"),
)
_forward, _forward_check = _operator.op, _operator.check
_backward = Raw("attention_backward", _empty_gradients).op
run_each(_backward)

# Tensor arguments of both after query, key and value: first those with gradients.
_TENSORS = DIFFERENTIABLE + tuple(
    name for name in _operator.tensors[3:] if name not in (*DIFFERENTIABLE, "block_table")
)


class _Attention(torch.autograd.Function):
    """Written by hand, because a call passes only the keywords that it has: each costs time."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, value, *others):
        *tensors, (options, _) = others
        return _forward(query, key, value, **_given(tensors), **dict(options))

    @staticmethod
    def formula(query, key, value, *others):
        *tensors, (options, _) = others
        return _operator.definition(query, key, value, **_given(tensors), **dict(options))

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        *tensors, (ctx.options, ctx.deterministic) = inputs
        ctx.set_materialize_grads(False)
        _, lse, lse_rest = outputs
        needs = ctx.needs_input_grad
        if needs[0] or needs[1] or any(needs[3 : len(BITS)]):
            ctx.mark_non_differentiable(lse_rest)
        else:  # lse depends on nothing that is trained
            ctx.mark_non_differentiable(lse, lse_rest)
        ctx.save_for_backward(*outputs, *tensors)

    @staticmethod
    def backward(ctx, doutput, dlse, _dlse_rest):
        needs = ctx.needs_input_grad
        mask = sum(bit for bit, need in zip(BITS, needs, strict=False) if need)
        if doutput is None and dlse is None:
            return (None,) * len(needs)
        output, lse, lse_rest, *tensors = ctx.saved_tensors
        # create_graph=True
        compute = _apply_backward if is_differentiated_again() else _gradients
        gradients = compute(
            doutput, dlse, output, lse, lse_rest, *tensors, ctx.options, mask, ctx.deterministic
        )
        wanted = [
            gradient if mask & bit else None for gradient, bit in zip(gradients, BITS, strict=True)
        ]
        return (*wanted, *(None,) * (len(needs) - len(wanted)))


def _gradients(doutput, dlse, output, lse, lse_rest, query, key, value, *others):
    """All gradients, in the order of `BITS`; one that is not wanted has size 0."""
    *tensors, options, grad_mask, deterministic = others
    dquery, dkey, dvalue, dterms = _backward(
        doutput, dlse, query, key, value, output, lse, lse_rest, **_given(tensors),
        **dict(options), grad_mask=grad_mask, deterministic=deterministic,
    )  # fmt: skip
    return dquery, dkey, dvalue, *dterms


def _derivative(
    doutput, dlse, query, key, value, bias, sinks, alibi_slopes, *,
    mask, cu_seq_q, cu_seq_k, seqused_k, seed, block_mask, options,
):  # fmt: skip
    results = reference(
        query, key, value, bias=bias, sinks=sinks, alibi_slopes=alibi_slopes, mask=mask,
        cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, seqused_k=seqused_k, seed=seed,
        block_mask=block_mask, **{x: v for x, v in options if x not in _OF_BACK_ENDS},
    )  # fmt: skip
    return gradients_of(results, (query, key, value, bias, sinks, alibi_slopes), (doutput, dlse))


_apply_attention = applied(_Attention)
_apply_backward = second_derivative(
    _gradients,
    ("doutput", "dlse", "output", "lse", "lse_rest", "query", "key", "value", *_TENSORS)
    + ("options", "grad_mask", "deterministic"),
    ("dquery", "dkey", "dvalue", *(f"d{name}" for name in DIFFERENTIABLE)),
    _derivative,
)


def _in_trace(query, key, value, *, deterministic=False, **given):
    if not is_differentiated(query, key, value, *map(given.get, DIFFERENTIABLE)):
        return _forward(query, key, value, **given)
    tensors = _taken(given)
    return _apply_attention(query, key, value, *tensors, (tuple(given.items()), deterministic))


_traced = tracing.operator("attention", _forward, _in_trace, "bool deterministic=False")


def _takes_tf32(query: Tensor) -> bool:
    """Whether a call uses TF32. Its backward then does too, whatever torch allows by that time."""
    return query.is_cuda and query.dtype is torch.float32 and _tf32_is_allowed()


def _tf32_is_allowed() -> bool:
    """Whether torch would use TF32 for a float32 matrix product on CUDA. The attribute also follows
    `allow_tf32`, `set_float32_matmul_precision` and the more general `fp32_precision`s."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# As by torch.compiler.assume_constant_result, which would import the compiler.
_tf32_is_allowed._dynamo_marked_constant = True


def _taken(options: Options) -> list[Tensor | None]:
    """Removes the tensors from options and returns them in the order of `_TENSORS`."""
    return [options.pop(name, None) for name in _TENSORS]


def _given(tensors: Iterable[Tensor | None]) -> Options:
    """Tensors in the order of `_TENSORS` as keywords again."""
    return {n: tensor for n, tensor in zip(_TENSORS, tensors, strict=True) if tensor is not None}


def _distinct(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Dynamo passes no tensor to an autograd.Function twice: repeated ones become views."""
    distinct: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is not None and any(tensor is other for other in distinct):
            tensor = tensor.view_as(tensor)
        distinct.append(tensor)
    return distinct


def _unpage(key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(key, value) packed, with room for max_k keys in each sequence; in options `cu_seq_k`
    replaces `block_table`."""
    block_table, seqused_k = options.pop("block_table"), options["seqused_k"]
    batch, max_pages = block_table.shape
    page_size = key.shape[1]
    rows = min(max_pages * page_size, options["max_k"])
    first_key = torch.arange(max_pages, device=key.device) * page_size
    pages = torch.where(first_key < seqused_k[:, None], block_table, 0).flatten()

    def packed(pool):
        of_sequences = pool.index_select(0, pages).reshape(batch, -1, *pool.shape[2:])
        return of_sequences[:, :rows].flatten(0, 1)

    ends = torch.arange(batch + 1, dtype=torch.int32, device=key.device)
    options["cu_seq_k"] = ends * rows
    return packed(key), packed(value)
