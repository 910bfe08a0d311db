"""flash_attn's names refuse the same calls as flash_attn, with its argument names and layouts."""

import re

import numpy as np
import pytest
import torch

from onepass.integrations import flash_attn

Q, K = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
CU = torch.tensor([0, 5, 12], dtype=torch.int32)
ROWS, KV_ROWS = torch.zeros(12, 4, 8), torch.zeros(12, 2, 2, 8)
INT32 = torch.zeros(2, dtype=torch.int32)
QKV, CACHE, PAGES = torch.zeros(2, 5, 3, 4, 8), torch.zeros(2, 9, 2, 8), torch.zeros(4, 8, 2, 8)
PACKED, NEW, TABLE = torch.zeros(12, 3, 4, 8), K[:, :1], torch.zeros(2, 2, dtype=torch.int32)
AS_USED = dict(cache_seqlens=INT32)
VARLEN = dict(q=ROWS, k=ROWS, v=ROWS, cu_seqlens_q=CU, cu_seqlens_k=CU)
VARLEN |= dict(max_seqlen_q=7, max_seqlen_k=7)
# The function, what the error says, arguments and keywords; a wrong type is a TypeError, a wrong
# value that Python finds a ValueError.
CALLS = [
    *(("func", text, arguments, {}) for text, arguments in {
        "q must have shape (batch, seq, heads, head_dim), got (5, 4, 8)": (Q[0], K, K),
        "k must have shape (batch, seq, heads, head_dim), got (7, 2, 8)": (Q, K[0], K),
        "v must have shape (batch, seq, heads, head_dim), got (7, 2, 8)": (Q, K, K[0]),
        "k must have the batch size of q, 2, got 1": (Q, K[:1], K[:1]),
        "v must have batch, seq and heads of k, (2, 7, 2), got (2, 6, 2)": (Q, K, K[:, :6]),
        "v must have batch, seq and heads of k, (2, 7, 2), got (2, 7, 1)": (Q, K, K[:, :, :1]),
        "k must have shape (2, 7, 2, 8), got (2, 7, 2, 6)": (Q, K[..., :6], K),
        "k must have dtype float32 like q, got float64": (Q, K.double(), K.double()),
        "q must have a multiple of the 2 heads of k, got 3": (Q[:, :, :3], K, K),
    }.items()),
    *(("func", text, (Q, K, K), named) for text, named in {
        "window_size must be (left, right), got 4": dict(window_size=4),
        "window_size must be (left, right), got (4,)": dict(window_size=(4,)),
        "softmax_scale must be a number or None, got str": dict(softmax_scale="1"),
        "alibi_slopes must have shape (4,) or (2, 4), got": dict(alibi_slopes=INT32),
        "dropout_p must lie between 0 and 1, got 2": dict(dropout_p=2.0),
        "return_attn_probs must be": dict(dropout_p=0.1, return_attn_probs=True),
    }.items()),
    *(("func", f"{name} must be a tensor, got {type(bad).__name__}", (),
       dict(q=Q, k=K, v=K) | {name: bad})
      for name in "qkv" for bad in (None, [1.0], 2.0, np.zeros((2, 5, 4, 8)))),
    *(("varlen_func", text, (), VARLEN | changes) for text, changes in {
        "q must have 3 dimensions, got (2, 5, 4, 8)": dict(q=Q),
        "cu_seqlens_q must be an int32 tensor": dict(cu_seqlens_q=CU.long()),
        "cu_seqlens_k must be an int32 tensor": dict(cu_seqlens_k=CU[:2]),
        "max_seqlen_q must be at least": dict(max_seqlen_q=6),
        "max_seqlen_k must be a whole number, got str": dict(max_seqlen_k="7"),
        "cu_seqlens_q must be a tensor, got list": dict(cu_seqlens_q=[0, 5, 12]),
        "window_size must be (left, right), got 4": dict(window_size=4),
        "return_attn_probs must be": dict(dropout_p=0.1, return_attn_probs=True),
    }.items()),
    ("qkvpacked_func", "qkv must have dtype", (QKV.long(),), {}),
    ("qkvpacked_func", "qkv must have 5 dimensions, the one before the heads of size 3, got shape "
     "(2, 5, 3, 4)", (QKV[..., 0],), {}),
    ("qkvpacked_func", "qkv must have 5 dimensions", (QKV[:, :, :2],), {}),
    ("kvpacked_func", "kv must have 5 dimensions", (Q, QKV), {}),
    ("kvpacked_func", "kv must have the batch size of q, 1, got 2", (Q[:1], QKV[:, :, :2]), {}),
    ("kvpacked_func", "kv must be a tensor, got NoneType", (Q, None), {}),
    ("varlen_qkvpacked_func", "qkv must have 4 dimensions", (PACKED[:, :2], CU, 7), {}),
    ("varlen_qkvpacked_func", "cu_seqlens must be an int32", (PACKED, CU.long(), 7), {}),
    ("varlen_qkvpacked_func", "max_seqlen must be at least", (PACKED, CU, 6), {}),
    ("varlen_kvpacked_func", "kv must have dtype float32 like q",
     (ROWS, KV_ROWS.double(), CU, CU, 7, 7), {}),
    ("varlen_kvpacked_func", "kv must have 4 dimensions", (ROWS, PACKED, CU, CU, 7, 7), {}),
    ("with_kvcache", "k must have shape (2, 1, 2, 8), got (2, 1, 1, 8)",
     (Q, CACHE, CACHE.clone(), NEW[:, :, :1], NEW), AS_USED),
    ("with_kvcache", "k must be given together with v, got k alone",
     (Q, CACHE, CACHE.clone(), NEW), AS_USED),
    ("with_kvcache", "v_cache must have shape (2, 9, 2, 8), got (2, 8, 2, 8)",
     (Q, CACHE, CACHE[:, :8]), {}),
    ("with_kvcache", "v_cache must have shape (4, 8, 2, 8), got (4, 8, 1, 8)",
     (Q, PAGES, PAGES[:, :, :1]), AS_USED | dict(block_table=TABLE)),
    ("with_kvcache", "q must have 4 dimensions, got", (Q[0], CACHE, CACHE.clone()), {}),
    ("with_kvcache", "cache_seqlens must be a tensor, a whole number or None, got list",
     (Q, CACHE, CACHE.clone()), dict(cache_seqlens=[1, 2])),
]  # fmt: skip


def error_of(text: str) -> type[Exception]:
    if text.startswith(("return_attn_probs", "k must be given")) or text.endswith("got (4,)"):
        return ValueError
    words = r"must be (a tensor|a number|a whole number|\(left, right\)).*, got (\w+)$"
    return TypeError if re.search(words, text) else RuntimeError


@pytest.mark.parametrize(("name", "text", "arguments", "named"), CALLS)
def test_what_is_refused(name, text, arguments, named):
    message = f"^flash_attn_{name}: {re.escape(text)}"
    with pytest.raises(error_of(text), match=message):
        getattr(flash_attn, f"flash_attn_{name}")(*arguments, **named)


def test_what_is_right_is_not_refused():
    flash_attn.flash_attn_varlen_func(**VARLEN)
    with pytest.raises(TypeError, match="missing .* argument"):  # Python's
        flash_attn.flash_attn_func(Q, K)
