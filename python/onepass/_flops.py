"""Formulas of `torch.utils.flop_counter` for onepass's operators: as torch's at the same shapes.

That module is not imported here (it may import triton). If it has been imported, the formulas are
registered with it, when onepass is imported and at every `swap` and `quantize`.
"""

from __future__ import annotations

import sys

import torch

from onepass._imported import is_fake


def register() -> None:
    """Registers the formulas once; no effect until torch's counter has been imported."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    for name, formula in _FORMULAS.items():
        packet = getattr(torch.ops.onepass, name)
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet, get_raw=True)(formula)


def _attention_forward(query, key, value, *_, out_val=None, **options) -> int:
    return 2 * _scores(query, key, options) * (query.shape[-1] + value.shape[-1])


def _attention_backward(doutput, dlse, query, key, value, *_, out_val=None, **options) -> int:
    """Recomputed scores, dP, and three gradients."""
    columns = 3 * query.shape[-1] + 2 * value.shape[-1]
    return 2 * _scores(query, key, options) * columns


def _attention_decode(query, k_cache, v_cache, key=None, *_, out_val=None, **options) -> int:
    batch, heads, rows, columns = query.shape
    seqlens, pages = options.get("cache_seqlens"), options.get("block_table")
    if seqlens is None or is_fake(seqlens) or seqlens.is_meta:  # as long as they may be
        keys = batch * k_cache.shape[2] if pages is None else pages.numel() * k_cache.shape[1]
    else:
        keys = int(seqlens.sum()) + (0 if key is None else batch * key.shape[2])
        if (padding := options.get("cache_leftpad")) is not None:
            keys -= int(padding.sum())
    return 2 * keys * heads * rows * (columns + v_cache.shape[-1])


def _linear_forward(input, weight, *_, out_val=None, **__) -> int:
    return 2 * input.numel() * weight.shape[0]


def _linear_backward(doutput, input, weight, input_dtype, weight_dtype, *_, out_val=None) -> int:
    columns = input.shape[-1] if weight is None else weight.shape[-1]
    products = (input_dtype is not None) + (weight_dtype is not None)
    return 2 * doutput.numel() * columns * products


def _quantized_linear_forward(input, codes, scales, *_, out_val=None, **__) -> int:
    return 2 * input.numel() * scales.shape[1]


def _quantized_linear_backward(
    doutput, codes, scales, shifts, in_features, kind, input_dtype, bias_dtype, out_val=None
) -> int:
    return 2 * doutput.numel() * in_features * (input_dtype is not None)


def _linear_loss(input, linear_weight, *options, out_val=None) -> int:
    mask = options[-1]
    products = 1 + (mask & 1 > 0) + (mask & 2 > 0)
    return 2 * input.numel() * linear_weight.shape[0] * products


def _scores(query, key, options: dict) -> int:
    """The number of scores, masked ones included, as torch counts."""
    cu_seq_q = options.get("cu_seq_q")
    if cu_seq_q is None:
        return query.shape[:-1].numel() * key.shape[2]
    # (total, heads, head_dim), a sequence after the other.
    lengths_k = options.get("seqused_k")
    if lengths_k is None:
        lengths_k = options["cu_seq_k"].diff()
    if is_fake(cu_seq_q) or cu_seq_q.is_meta:  # as long as they may be
        return query.shape[1] * len(lengths_k) * options["max_q"] * options["max_k"]
    return query.shape[1] * int((cu_seq_q.diff().long() * lengths_k.long()).sum())


_FORMULAS = {
    "attention_forward": _attention_forward,
    "attention_backward": _attention_backward,
    "attention_decode": _attention_decode,
    "attention_decode_append": _attention_decode,
    "linear_forward": _linear_forward,
    "linear_epilogue_forward": _linear_forward,
    "linear_backward": _linear_backward,
    "linear_loss": _linear_loss,
    "quantized_linear_forward": _quantized_linear_forward,
    "quantized_linear_backward": _quantized_linear_backward,
}
