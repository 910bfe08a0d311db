"""The attention family's ops: fakes, autograd, seeds. One differentiable entry, `attention`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from onepass._ops import double_backward
from onepass._ops.attention_layout import empty_rows, is_bshd
from onepass._ops.differentiation import applied, is_differentiated
from onepass._ops.dispatch_log import logged
from onepass._ops.random import draw_seed
from onepass.reference.attention import attention as reference

_forward = torch.ops.onepass.attention_forward.default
_forward_check = torch.ops.onepass.attention_forward_check.default
_backward = torch.ops.onepass.attention_backward.default

# Bits of attention_backward's grad_mask, in the order of its results and of what is differentiated
# below.
_QUERY, _KEY, _VALUE, _BIAS, _SINKS, _SLOPES = 1, 2, 4, 8, 16, 32
_BITS = (_QUERY, _KEY, _VALUE, _BIAS, _SINKS, _SLOPES)
# Options that are no part of the definition.
_OF_BACK_ENDS = ("out_bshd", "num_splits", "allow_tf32")


@logged
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seq_q: Tensor | None = None,
    cu_seq_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    bottom_right: bool = False,
    num_splits: int = 0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """(output, lse) of the raw op, whose arguments these are, but for the seed, which is drawn.

    `scale` None is 1 / sqrt(head_dim); `window` is (window_left, window_right).
    """
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5
    if torch.compiler.is_compiling():
        # Constants: a float that Dynamo made symbolic cannot enter a second autograd.Function.
        scale, softcap, dropout_p = (
            float.fromhex(float(v).hex()) for v in (scale, softcap, dropout_p)
        )
    # Only what is not the default: every keyword costs the dispatcher a look.
    options: dict[str, object] = {"scale": scale}
    if window[0] != -1:
        options["window_left"] = window[0]
    if window[1] != -1:
        options["window_right"] = window[1]
    if softcap:
        options["softcap"] = softcap
    if bottom_right:
        options["bottom_right"] = True
    if is_bshd(query):
        options["out_bshd"] = True
    if num_splits:
        options["num_splits"] = num_splits
    if _takes_tf32(query):
        options["allow_tf32"] = True
    seed = None
    if dropout_p:
        options["dropout_p"] = dropout_p
        if dropout_p > 0.0:
            seed = draw_seed(query.device)
    differentiated = is_differentiated(query, key, value, bias, sinks, alibi_slopes)
    if differentiated and block_table is not None:
        if not torch.compiler.is_compiling():
            given = _given(
                bias, sinks, alibi_slopes, mask, cu_seq_q, cu_seq_k, seqused_q, seqused_k, seed
            )
            more = dict(block_table=block_table, max_q=max_q, max_k=max_k)
            _forward_check(query, key, value, **given, **more, **options)
        key, value, cu_seq_k = _unpaged(key, value, block_table, seqused_k, max_k)
        block_table = None
    if max_q:
        options["max_q"] = max_q
    if max_k:
        options["max_k"] = max_k
    tensors = (
        query, key, value, bias, sinks, alibi_slopes,
        mask, cu_seq_q, cu_seq_k, seqused_q, seqused_k, seed,
    )  # fmt: skip
    if differentiated:
        if torch.compiler.is_compiling():
            tensors = _distinct(tensors)
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        # One argument for all of them: autograd looks at each one it gets.
        return _apply_attention(*tensors, (tuple(options.items()), deterministic))[:2]
    given = _given(*tensors[3:])
    if block_table is not None:
        given["block_table"] = block_table
    output, lse, _ = _forward(query, key, value, **given, **options)
    return output, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(query, key, value, *others):
        *tensors, (options, _) = others
        return _forward(query, key, value, **_given(*tensors), **dict(options))

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        *tensors, (ctx.options, ctx.deterministic) = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(outputs[2])
        ctx.save_for_backward(*outputs, *tensors)

    @staticmethod
    def backward(ctx, doutput, dlse, _dlse_rest):
        needs = ctx.needs_input_grad
        mask = sum(bit for bit, need in zip(_BITS, needs, strict=False) if need)
        if doutput is None and dlse is None:
            return (None,) * len(needs)
        output, lse, lse_rest, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            constants = (ctx.options, mask, ctx.deterministic)
            gradients = _apply_backward(doutput, dlse, output, lse, lse_rest, *tensors, constants)
        else:
            query, key, value, *others = tensors
            gradients = _backward(
                doutput, dlse, query, key, value, output, lse, lse_rest, **_given(*others),
                **dict(ctx.options), grad_mask=mask, deterministic=ctx.deterministic,
            )  # fmt: skip
        wanted = [
            gradient if mask & bit else None for gradient, bit in zip(gradients, _BITS, strict=True)
        ]
        return (*wanted, *(None,) * (len(needs) - len(wanted)))


class _AttentionBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated once more."""

    @staticmethod
    def forward(doutput, dlse, output, lse, lse_rest, query, key, value, *others):
        *tensors, (options, mask, deterministic) = others
        return _backward(
            doutput, dlse, query, key, value, output, lse, lse_rest, **_given(*tensors),
            **dict(options), grad_mask=mask, deterministic=deterministic,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        doutput, dlse, _, _, _, *tensors, (ctx.options, ctx.mask, _) = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(doutput, dlse, *tensors)

    @staticmethod
    def backward(ctx, *second):
        doutput, dlse, query, key, value, bias, sinks, slopes, *others = ctx.saved_tensors
        options = {name: v for name, v in ctx.options if name not in _OF_BACK_ENDS}

        def formula(doutput, dlse, *leaves):
            given = _given(*leaves[3:], *others)
            results = reference(*leaves[:3], **given, **options)
            pairs = [
                (result, upstream)
                for result, upstream in zip(results, (doutput, dlse), strict=True)
                if upstream is not None
            ]
            gradients = iter(
                torch.autograd.grad(
                    [result for result, _ in pairs],
                    [leaf for leaf in leaves if leaf is not None],
                    [upstream for _, upstream in pairs],
                    create_graph=True,
                    materialize_grads=True,
                )
            )
            return [None if leaf is None else next(gradients) for leaf in leaves]

        gradients = double_backward.vjp(
            formula,
            (doutput, dlse, query, key, value, bias, sinks, slopes),
            [
                gradient if ctx.mask & bit else None
                for gradient, bit in zip(second, _BITS, strict=True)
            ],
        )
        of_upstream, of_inputs = gradients[:2], gradients[2:]
        return (*of_upstream, None, None, None, *of_inputs, *(None,) * (len(others) + 1))


_apply_attention = applied(_Attention)
_apply_backward = applied(_AttentionBackward)


def _takes_tf32(query: Tensor) -> bool:
    """Whether a call may: its backward then does, whatever torch allows by that time."""
    return query.is_cuda and query.dtype is torch.float32 and _tf32_is_allowed()


@torch.compiler.assume_constant_result
def _tf32_is_allowed() -> bool:
    """Whether torch would take TF32 for a float32 matrix product on CUDA: by `allow_tf32`,
    `set_float32_matmul_precision` or any `fp32_precision`, all of which this one knows of."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _given(bias, sinks, alibi_slopes, mask, cu_seq_q, cu_seq_k, seqused_q, seqused_k, seed):
    """Those of them that there are, by name."""
    return {name: tensor for name, tensor in locals().items() if tensor is not None}


def _distinct(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Dynamo hands no tensor to an autograd.Function twice: later ones become views."""
    distinct: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is not None and any(tensor is other for other in distinct):
            tensor = tensor.view_as(tensor)
        distinct.append(tensor)
    return distinct


def _unpaged(
    key: Tensor, value: Tensor, block_table: Tensor, seqused_k: Tensor, max_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(key, value, cu_seq_k) packed, with room for max_k keys in each sequence."""
    batch, max_pages = block_table.shape
    page_size = key.shape[1]
    rows = min(max_pages * page_size, max_k)
    first_key = torch.arange(max_pages, device=key.device) * page_size
    pages = torch.where(first_key < seqused_k[:, None], block_table, 0).flatten()

    def packed(pool):
        of_sequences = pool.index_select(0, pages).reshape(batch, -1, *pool.shape[2:])
        return of_sequences[:, :rows].flatten(0, 1)

    cu_seq_k = torch.arange(batch + 1, dtype=torch.int32, device=key.device) * rows
    return packed(key), packed(value), cu_seq_k


@torch.library.register_fake("onepass::attention_forward")
def _(query, key, value, **options):
    if type(query) in (Tensor, Parameter):  # a meta tensor, whose sizes are numbers
        _forward_check(query, key, value, **options)
    accumulator = torch.float64 if query.dtype is torch.float64 else torch.float32
    if query.dim() == 4:
        rows = query.shape[:-1]
    else:
        rows = (query.shape[1], query.shape[0])
    output = empty_rows(
        query, (*query.shape[:-1], value.shape[-1]), query.dtype, options.get("out_bshd")
    )
    lse, lse_rest = (query.new_empty(rows, dtype=accumulator) for _ in range(2))
    return output, lse, lse_rest


@torch.library.register_fake("onepass::attention_backward")
def _(doutput, dlse, query, key, value, output, lse, lse_rest, *, grad_mask, **options):
    def like(tensor, bit, default_dtype, bshd=False):
        if tensor is None or not grad_mask & bit:
            return query.new_empty(0, dtype=default_dtype if tensor is None else tensor.dtype)
        return empty_rows(query, tensor.shape, tensor.dtype, bshd)

    bshd = options.get("out_bshd")
    return (
        like(query, _QUERY, None, bshd),
        like(key, _KEY, None, bshd),
        like(value, _VALUE, None, bshd),
        like(options.get("bias"), _BIAS, query.dtype),
        like(options.get("sinks"), _SINKS, query.dtype),
        like(options.get("alibi_slopes"), _SLOPES, query.dtype),
    )
