"""Rotary embedding of query and key in one pass, with the norms before it."""

from __future__ import annotations

from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops.rotary import rotary, rotary_inplace


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    seq_first: bool = False,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotates pairs of columns of query and key by angles that grow with the token's position.

    Of columns a and b of a pair, ``x[a] * cos[a] - x[b] * sin[a]`` and
    ``x[b] * cos[b] + x[a] * sin[b]`` (Su, Lu, Pan, Murtadha, Wen, Liu: RoFormer, 2021): what models
    write as ``x * cos + rotate_half(x) * sin``, computed in float32 (float64 for float64) and
    rounded once. The backward is one pass as well, by the transposed rotation. cos and sin get no
    gradient.

    With query_weight or key_weight every row of query's or key's heads goes through an RMS norm
    first, ``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`` (Zhang, Sennrich: Root Mean
    Square Layer Normalization, 2019), as Qwen3 and Gemma3 have it: norm and rotation are one pass,
    and so are their gradients.

    Args:
        query: shape (batch, heads, tokens, head_dim), or without a batch (heads, tokens, head_dim);
            float32, bfloat16, float16 or float64. Any strides: a dense last dimension is read in
            place, other layouts are copied once.
        key: like query with heads of its own, or None.
        cos, sin: shape (tokens, width), or (batch, tokens, width), where batch may be 1; with
            positions a table (rows, width). The width is rotary_dim, a number for each column, as
            models of transformers have it: those of a pair may differ. Or it is rotary_dim / 2, a
            number for each pair; then rotary_dim must be given. Any of float32, bfloat16 and
            float16, or float64 where query is float64.
        interleaved: pairs are columns (2i, 2i + 1), as in GPT-J and Cohere; else (i,
            i + rotary_dim / 2), as in Llama and GPT-NeoX. Columns keep their places:
            where DeepSeek-V3 moves its interleaved pairs apart, the products of query and key are
            the same.
        positions: shape (tokens,) or (batch, tokens), where batch may be 1; int64 or int32: the row
            of cos and sin that a token has.
        rotary_dim: how many of the first columns are rotated, the others stay; None is the width.
        seq_first: query and key have shape (batch, tokens, heads, head_dim), or (tokens, heads,
            head_dim), as packed sequences do, whose positions restart with each sequence.
        query_weight, key_weight: shape (head_dim,), the weights of the norms of query and key, any
            of float32, bfloat16 and float16, or float64 where query is float64; None: no norm. On
            CUDA head_dim is at most 512 with one.
        eps: added to the mean square; None is float32's epsilon (float64's for float64), as in
            torch. Given with a weight only.
        weight_offset: added to both weights: 1.0 for Gemma, which stores the weight minus one. Must
            be 0 without a weight.
        inplace: query and key are rotated in their own memory, and nothing is allocated for them.
            Their last dimension must be dense, elements must not overlap, and they must share no
            memory with each other or with another argument; heads of one projection may be
            interleaved. With a weight this is for calls without gradients: the backward of a norm
            reads the original rows.

    Returns:
        (query, key) rotated, in query's dtype, also under autocast; each has the memory order of
        its input, heads or tokens first, and with inplace is that tensor. The second is None
        without a key.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, there is no row for a position, or eps
            or weight_offset is given without a weight; the message names the argument. cos or sin
            requires a gradient. With inplace: the memory of query or key is not as said above,
            torch's autograd forbids to write there (a leaf that requires a gradient, a view of
            one, or a view that may not be modified, such as one of `chunk`), or the call is inside
            a transform of torch.func; nothing was written then. On CUDA the values of positions are
            not checked, which would wait for the device: a token whose position has no row becomes
            NaN.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> query, key = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
        >>> angles = torch.outer(torch.arange(16.0), 10000 ** (-torch.arange(0, 64, 2) / 64))
        >>> query, key = onepass.functional.rotary_embedding(
        ...     query, key, angles.cos(), angles.sin(), rotary_dim=64
        ... )
        >>> query.shape, key.shape
        (torch.Size([1, 8, 16, 64]), torch.Size([1, 2, 16, 64]))

        With the norms of Qwen3:

        >>> norms = torch.nn.RMSNorm(64, eps=1e-6), torch.nn.RMSNorm(64, eps=1e-6)
        >>> query, key = onepass.functional.rotary_embedding(
        ...     query, key, angles.cos(), angles.sin(), rotary_dim=64,
        ...     query_weight=norms[0].weight, key_weight=norms[1].weight, eps=1e-6,
        ... )
        >>> query.shape, key.shape
        (torch.Size([1, 8, 16, 64]), torch.Size([1, 2, 16, 64]))

        In place, the heads of query and key in one projection:

        >>> projected = torch.randn(1, 16, 8 + 2 + 2, 64)
        >>> query, key, value = projected.transpose(1, 2).split([8, 2, 2], dim=1)
        >>> rotated, _ = onepass.functional.rotary_embedding(
        ...     query, key, angles.cos(), angles.sin(), rotary_dim=64, inplace=True
        ... )
        >>> rotated is query
        True
    """
    try:
        if not type(interleaved) is type(seq_first) is type(inplace) is bool:
            raise TypeError  # which check_arguments names
        given = query, key
        batched = query.dim() != 3
        if not batched:
            query, key = query.unsqueeze(0), None if key is None else key.unsqueeze(0)
        if seq_first:
            query, key = map(_transposed, (query, key))
        arguments = (cos, sin, positions, rotary_dim, interleaved)
        arguments += (query_weight, key_weight, eps, weight_offset)
        if inplace:
            rotary_inplace(query, key, *arguments)
            return given
        outputs = rotary(query, key, *arguments)
        if seq_first:
            outputs = map(_transposed, outputs)
        if not batched:
            outputs = (None if x is None else x.squeeze(0) for x in outputs)
        return tuple(outputs)
    except Exception:
        check_arguments(rotary_embedding, locals())
        raise


def _transposed(x: Tensor | None) -> Tensor | None:
    """Heads first for tokens first, and back; other numbers of dimensions raise later."""
    return x if x is None or x.dim() != 4 else x.transpose(1, 2)
