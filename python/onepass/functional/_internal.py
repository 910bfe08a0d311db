"""For the modules and integrations of onepass alone: no part of the public interface."""

from __future__ import annotations

from torch import Tensor

from onepass._ops.attention import attention
from onepass._ops.attention_options import given, score_options
from onepass.functional.attention import _autocast


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    """Attention with a float and a boolean mask at once.

    All are four-dimensional; bias (added to the scores) and mask (True attends) broadcast to
    (batch, heads, seq_q, seq_k), but for the last dimension. The rest is as in
    :func:`scaled_dot_product_attention`; arguments are not checked for their types.
    """
    query, key, value = _autocast(query, key, value)
    options = score_options(query, scale, (-1, 0 if is_causal else -1))
    options |= given(bias=bias, mask=mask)
    if dropout_p != 0.0:
        options["dropout_p"] = dropout_p
    return attention(query, key, value, options)[0]
