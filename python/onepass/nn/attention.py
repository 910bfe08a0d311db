"""Multi-head attention as a module."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass._policy.precision import precision_of
from onepass.functional._internal import (
    fits,
    is_mask,
    linear_where_it_gains,
    masked_attention,
)
from onepass.nn._nested import is_packed, like_packed, rows_of


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` without the matrix of weights in memory.

    With need_weights=False the projections' outputs are read in place by
    `onepass.functional.scaled_dot_product_attention`, a padding mask and an attention mask
    side by side; dropout works on the weights as they are computed. With need_weights=True
    (torch's default, which asks for that matrix) torch's operators compute it, and torch's own
    forward serves whatever it would refuse.

    The is_causal hint is trusted: with it attn_mask is not read, as in torch, nor a square
    attn_mask beside a padding mask. Rows that may attend to nothing are 0, where torch's forward
    has NaN with need_weights=True, and so are their gradients. A nested tensor of
    strided layout, which `torch.nn.TransformerEncoder` makes of a padding mask, is computed as a
    packed batch.

    Examples:
        >>> attention = onepass.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> y, _ = attention(x, x, x, need_weights=False)
        >>> y.shape
        torch.Size([2, 10, 64])
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        # The module may be of any class (see onepass.swapping): no method of this one is called.
        masks = key_padding_mask, attn_mask
        if not need_weights and is_packed(query):
            if query is key is value and not is_causal and all(mask is None for mask in masks):
                return _packed(self, query), None
        elif not need_weights and _is_well_formed(self, query, key, value, *masks, is_causal):
            return _dense(self, query, key, value, *masks, is_causal), None
        elif need_weights and _may_leave_rows_without_keys(self, query, key, value, *masks):
            return _with_weights(self, query, key, value, *masks, average_attn_weights)
        return torch.nn.MultiheadAttention.forward(
            self,
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )


def _is_well_formed(module, query, key, value, key_padding_mask, attn_mask, is_causal) -> bool:
    """Whether torch takes these shapes and dtypes too; if not, its own forward raises."""
    dims = query.dim()
    if dims not in (2, 3) or key.dim() != dims or value.dim() != dims:
        return False
    if any(x.is_nested for x in (query, key, value)) or not _has_usual_parts(module, query):
        return False
    if (query.shape[-1], key.shape[-1]) != (module.embed_dim, module.kdim):
        return False
    if key.shape[:-1] != value.shape[:-1] or value.shape[-1] != module.vdim:
        return False
    along = 0 if dims == 2 or not module.batch_first else 1
    batch = (query.shape[1 - along], key.shape[1 - along]) if dims == 3 else ()
    if batch and batch[0] != batch[1]:
        return False
    seq_q, seq_k = query.shape[along], key.shape[along]
    if not (is_mask(key_padding_mask, query) and is_mask(attn_mask, query)):
        return False
    if key_padding_mask is not None and key_padding_mask.shape != (*batch[:1], seq_k):
        return False
    if attn_mask is None:
        return is_causal is False
    entries = (batch[0] if batch else 1) * module.num_heads
    return type(is_causal) is bool and (
        attn_mask.shape in ((seq_q, seq_k), (entries, seq_q, seq_k))
    )


def _has_usual_parts(module, query: Tensor) -> bool:
    """Whether the parameters have the shapes that the constructor gives them, the biases query's
    dtype, and the sizes of heads fit."""
    width, heads = module.embed_dim, module.num_heads
    if not type(width) is type(heads) is int or heads < 1 or module.head_dim != width / heads:
        return False
    if module._qkv_same_embed_dim and module._parameters.get("in_proj_weight", width) is None:
        return False
    for bias, size in ((module.in_proj_bias, 3 * width), (module.out_proj.bias, width)):
        if bias is not None and (bias.shape != (size,) or not fits(bias.dtype, query)):
            return False
    extra = (module.bias_k, module.bias_v)
    return all(x is None for x in extra) or all(
        x is not None and x.shape == (1, 1, width) for x in extra
    )


def _dense(module, query, key, value, key_padding_mask, attn_mask, is_causal: bool) -> Tensor:
    _warn_of_mixed_masks(key_padding_mask, attn_mask)
    is_batched = query.dim() == 3
    # (batch, seq, heads, head_dim) or (seq, batch, ...) -> (batch, heads, seq, head_dim)
    to_heads = (0, 2, 1, 3) if module.batch_first else (1, 2, 0, 3)
    projected = _project(module, query, key, value)
    if is_batched:
        q, k, v = (x.permute(to_heads) for x in projected)
    else:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in projected)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    extra = (module.bias_k is not None) + bool(module.add_zero_attn)
    if is_causal and (key_padding_mask is None or (q.shape[2] == k.shape[2] and not extra)):
        attn_mask = None
    else:
        is_causal = False
    if extra:
        k, v = _with_extra_keys(module, k, v)
        key_padding_mask = _padded(key_padding_mask, extra)
        attn_mask = _padded(attn_mask, extra)
    bias, mask = _bias_and_mask(key_padding_mask, attn_mask, module.num_heads, q.dtype)
    output = masked_attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        dropout_p=module.dropout if module.training else 0.0,
        is_causal=is_causal,
        precision=precision_of(module),
    )
    # In the order of the caller's layout, so that the result is contiguous.
    if not is_batched:
        output = output.squeeze(0).transpose(0, 1)
    else:
        output = output.permute((0, 2, 1, 3) if module.batch_first else (2, 0, 1, 3))
    return _project_output(module, output)


def _may_leave_rows_without_keys(module, query, key, value, key_padding_mask, attn_mask) -> bool:
    """Whether torch's forward with need_weights=True could return NaN for its masks."""
    if key_padding_mask is None and attn_mask is None:
        return False
    if module.bias_k is not None or module.add_zero_attn:  # keys for every row
        return False
    return _is_well_formed(module, query, key, value, key_padding_mask, attn_mask, False)


def _with_weights(
    module, query, key, value, key_padding_mask, attn_mask, average: bool
) -> tuple[Tensor, Tensor]:
    """torch's forward with need_weights=True, but rows without a key are 0, and not NaN."""
    _warn_of_mixed_masks(key_padding_mask, attn_mask)
    is_batched = query.dim() == 3
    to_heads = (0, 2, 1, 3) if is_batched and module.batch_first else (1, 2, 0, 3)
    projected = _project(module, query, key, value)
    if not is_batched:
        projected = (x.unsqueeze(1) for x in projected)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    q, k, v = (x.permute(to_heads) for x in projected)
    bias, mask = _bias_and_mask(key_padding_mask, attn_mask, module.num_heads, q.dtype)
    if bias is None:
        bias = q.new_zeros(()).masked_fill(~mask, float("-inf"))
    elif mask is not None:
        bias = bias.masked_fill(~mask, float("-inf"))
    is_empty = (bias == float("-inf")).all(-1, keepdim=True)
    bias = bias.masked_fill(is_empty, 0.0).expand(*q.shape[:3], k.shape[2])
    scaled = q * module.head_dim**-0.5
    scores = torch.baddbmm(bias.flatten(0, 1), scaled.flatten(0, 1), k.flatten(0, 1).mT)
    weights = scores.softmax(-1).unflatten(0, q.shape[:2]).masked_fill(is_empty, 0.0)
    weights = F.dropout(weights, module.dropout, module.training)
    output = (weights @ v).permute((0, 2, 1, 3) if module.batch_first else (2, 0, 1, 3))
    if not is_batched:
        output, weights = output.reshape(-1, *output.shape[2:]), weights.squeeze(0)
    output = _project_output(module, output)
    return output, weights.mean(-3) if average else weights


def _packed(module, x: Tensor) -> Tensor:
    """Self-attention of every sequence of a packed nested tensor."""
    sizes = x._nested_tensor_size()[:, 0]  # on the CPU, as the longest is needed there
    cu_seq = F.pad(sizes.cumsum(0), (1, 0)).to(torch.int32).to(x.device, non_blocking=True)
    longest = int(sizes.max()) if len(sizes) else 0
    rows = rows_of(x)
    output = functional.varlen_attention(
        *_project(module, rows, rows, rows),
        cu_seq,
        cu_seq,
        longest,
        longest,
        dropout_p=module.dropout if module.training else 0.0,
        precision=precision_of(module),
    )
    rows = _project_output(module, output)
    return like_packed(x, rows)


def _project_output(module, output: Tensor) -> Tensor:
    """The projection of the heads' outputs, (..., heads, head_dim)."""
    weight, bias = module.out_proj.weight, module.out_proj.bias
    return linear_where_it_gains(output.flatten(-2), weight, bias, precision_of(module))


def _project(module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The projected inputs (..., heads, head_dim), views of one product per distinct input."""
    heads, embed_dim = module.num_heads, module.embed_dim
    weight, bias = module.in_proj_weight, module.in_proj_bias

    def product(input, weight, bias, count: int) -> tuple[Tensor, ...]:
        parts = linear_where_it_gains(input, weight, bias, precision_of(module))
        return parts.unflatten(-1, (count, heads, module.head_dim)).unbind(-3)

    if weight is not None and query is key is value:
        return product(query, weight, bias, 3)
    if weight is not None and key is value:
        sizes = [embed_dim, 2 * embed_dim]
        biases = (None, None) if bias is None else bias.split(sizes)
        (of_query, of_key_value) = zip(weight.split(sizes), biases, strict=True)
        return *product(query, *of_query, 1), *product(key, *of_key_value, 2)
    weights = (
        (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        if weight is None
        else weight.chunk(3)
    )
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(
        product(input, *parameters, 1)[0]
        for input, *parameters in zip((query, key, value), weights, biases, strict=True)
    )


def _with_extra_keys(module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value, (batch, heads, seq, head_dim), with the learned and the zero key at the
    end."""

    def extended(x: Tensor, learned: Tensor | None) -> Tensor:
        batch, heads, _, head_dim = x.shape
        parts = [x]
        if learned is not None:  # (1, 1, embed_dim)
            parts.append(learned.view(1, heads, 1, head_dim).expand(batch, -1, -1, -1))
        if module.add_zero_attn:
            parts.append(x.new_zeros(batch, heads, 1, head_dim))
        return torch.cat(parts, dim=2)

    return extended(key, module.bias_k), extended(value, module.bias_v)


def _padded(mask: Tensor | None, extra: int) -> Tensor | None:
    """The mask with columns for extra keys that everyone attends to."""
    return None if mask is None else F.pad(mask, (0, extra))


def _bias_and_mask(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, heads: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """(additive bias, boolean mask where True attends), 4-D: of torch's two masks one each.

    With two boolean masks the padding mask becomes the bias, which keeps its size. Two float masks
    are added, the only case that makes a tensor of the size of both.
    """
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[:, None, None]
    if attn_mask is not None:
        attn_mask = (
            attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, heads))
        )
    if key_padding_mask is not None and attn_mask is not None:
        if attn_mask.dtype == torch.bool and key_padding_mask.dtype == torch.bool:
            allowed = torch.zeros_like(key_padding_mask, dtype=dtype)
            key_padding_mask = allowed.masked_fill_(key_padding_mask, float("-inf"))
        elif attn_mask.dtype != torch.bool and key_padding_mask.dtype != torch.bool:
            key_padding_mask, attn_mask = None, key_padding_mask + attn_mask
    bias = mask = None
    for given in (key_padding_mask, attn_mask):
        if given is not None and given.dtype == torch.bool:
            mask = ~given
        elif given is not None:
            bias = given
    return bias, mask


def _warn_of_mixed_masks(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> None:
    if key_padding_mask is None or attn_mask is None or key_padding_mask.dtype == attn_mask.dtype:
        return
    warnings.warn(  # torch's words
        "Support for mismatched key_padding_mask and attn_mask is deprecated. "
        "Use same type for both instead.",
        stacklevel=3,
    )
