"""The call of attention that computes what was recorded on scores: which terms are its masks, and
all tensors in four dimensions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onepass._overrides import visibly
from onepass.functional._internal import masked_attention
from onepass.swapping.inputs import MOST_HEAD_DIM
from onepass.swapping.scores import Form, Term

# Why there is none, for one call alone.
NO_KEY = "a query of its may attend to no key"
EMPTY = "it has no queries or keys"


class AttentionCall(NamedTuple):
    """A call of attention; all tensors have four dimensions."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    mask: Tensor | None  # True where a query attends
    is_causal: bool
    scale: float
    options: tuple[tuple[str, float], ...]

    def run(self, dropout_p: float, precision: str | None) -> Tensor:
        """The output, contiguous, as torch's products are; function modes see the call."""
        query, key, value, bias, mask, is_causal, scale, options = self
        return visibly(
            masked_attention, query, key, value, bias=bias, mask=mask, dropout_p=dropout_p,
            is_causal=is_causal, scale=scale, keeps_order=False, precision=precision,
            **dict(options),
        )  # fmt: skip


def call_of(form: Form, value: Tensor) -> AttentionCall | str:
    """The call that computes a form, or why there is none."""
    if form.is_tanh:
        return "its tanh is followed by no factor"
    leads = [term.lead for term in (*form.factors, *form.terms, *form.blocked)]
    own = torch.broadcast_shapes(form.query.shape[:-2], form.key.shape[:-2])
    lead = max((tuple(own), form.lead, *leads), key=len)
    query, key = (_led(t, own, lead) for t in (form.query, form.key))
    if torch.broadcast_shapes(value.shape[:-2], form.lead) != form.lead:
        return "its values have more dimensions than its scores"
    value = _led(value, form.lead, lead)
    if max(query.shape[-1], value.shape[-1]) > MOST_HEAD_DIM:
        return f"its head_dim is above {MOST_HEAD_DIM}"
    if not query.shape[-2] or not key.shape[-2] or key.shape[-2] != value.shape[-2]:
        return EMPTY
    dtype = torch.promote_types(query.dtype, value.dtype)
    for factor in form.factors:
        query = query * _aligned(factor, lead)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    bias = None
    for term in form.terms:
        term = _aligned(term, lead)
        bias = term if bias is None else bias + term
    blocked, is_causal = None, False
    for term in form.blocked:
        term = _aligned(term, lead)
        if _is_future(term, query.shape[2], key.shape[2]):
            is_causal = True
        else:
            blocked = term if blocked is None else blocked | term
    if blocked is not None and _may_block_all(blocked, is_causal, query.shape[2]):
        return NO_KEY
    if bias is not None and bias.dtype is not dtype:
        bias = bias.float()
    mask = None if blocked is None else ~blocked
    bias, mask = (_with_a_column_per_key(term, key.shape[2]) for term in (bias, mask))
    shared = key.shape[1] == value.shape[1] == 1  # which the operator reads as it is
    heads = max(query.shape[1], key.shape[1], value.shape[1])
    query = query.expand(-1, heads, -1, -1)
    key, value = (x if shared else x.expand(-1, heads, -1, -1) for x in (key, value))
    return AttentionCall(query, key, value, bias, mask, is_causal, form.scale, form.options)


def _led(tensor: Tensor, own: tuple[int, ...], lead: tuple[int, ...]) -> Tensor:
    """(*own, rows, columns), or what broadcasts to it, as (batch, heads, rows, columns)."""
    size = tensor.shape[-2:]
    if tuple(own) != tuple(lead):
        tensor = tensor.expand(*own, *size).reshape(*lead, *size)
    if len(lead) == 1:
        return tensor.expand(*lead, *size).unsqueeze(1)
    if len(lead) == 2:
        return tensor[(None,) * (4 - tensor.dim())].expand(lead[0], -1, *size)
    return tensor.expand(*lead, *size).flatten(0, -4)


def _aligned(term: Term, lead: tuple[int, ...]) -> Tensor:
    """A term with four dimensions, each of which may be 1."""
    tensor, own, _ = term
    tensor = tensor[(None,) * (len(own) + 2 - tensor.dim())]
    sizes, size = tensor.shape[:-2], tensor.shape[-2:]
    if sizes.numel() == 1:
        return tensor.reshape(1, 1, *size)
    if own == lead and len(lead) == 2:
        return tensor
    if own == lead and sizes[:-1].numel() == 1 and len(lead) > 1:
        return tensor.reshape(1, sizes[-1], *size)
    return _led(tensor.expand(*own, *size), own, lead)


def _with_a_column_per_key(term: Tensor | None, seq_k: int) -> Tensor | None:
    return term if term is None else term.expand(*term.shape[:-1], seq_k)


def _future(seq_q: int, seq_k: int) -> Tensor:
    """True for keys after a query's own position."""
    keys, queries = (torch.arange(n, device="cpu") for n in (seq_k, seq_q))
    return keys > queries.unsqueeze(1)


def _is_future(blocked: Tensor, seq_q: int, seq_k: int) -> bool:
    """Whether exactly the keys after each query's own position are blocked."""
    if blocked.shape != (1, 1, seq_q, seq_k):
        return False
    return torch.equal(blocked[0, 0], _future(seq_q, seq_k))


def _may_block_all(blocked: Tensor, is_causal: bool, seq_q: int) -> bool:
    if is_causal and blocked.shape[-2] == 1:
        return bool(blocked[..., 0].any())  # the first query has the first key alone
    if is_causal:
        blocked = blocked | _future(seq_q, blocked.shape[-1])
    return bool(blocked.all(-1).any())
