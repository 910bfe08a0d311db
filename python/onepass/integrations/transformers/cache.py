"""A KV cache of transformers that holds codes of 8 bits.

A row of a layer's `keys` and `values` is one of int8: head_dim codes, and the four bytes of its
float32 scale after them. So what transformers does to rows (crop, select, reorder) keeps both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from onepass.functional.attention_decode import attention_with_kv_cache
from onepass.reference.attention_decode import quantize_rows

_SCALE_BYTES = 4
_LEAST_ROOM = 64  # rows
_MOST_COLUMNS = 512  # that the operator takes


class Int8Cache(DynamicCache):
    """KV cache of 8 bits: a row of a key or value is its scale times codes from -127 to 127.

    ``scale = max |row| / 127`` in float32, for each position and head, so a row has head_dim + 4
    bytes. New rows are quantised once, and appended in place. With onepass's attention (`swap`,
    `attach`) a step of decoding reads the codes; any other attention gets the numbers that they
    stand for. The first rows of a sequence, its prompt, attend to one another as they are.

    Layers with a sliding window, and states of convolutions and scans, are those of `DynamicCache`.
    For self-attention (of an `EncoderDecoderCache` the first cache), and without gradients after
    the prompt. A compiled forward has a graph break in each layer.

    Args:
        config: the model's, whose types of layers it has; None: all have full attention.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from onepass.integrations.transformers import Int8Cache
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(
        ...         vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
        ...     )
        ... )
        >>> report = onepass.swap(model)
        >>> cache = Int8Cache(model.config)
        >>> model.generate(
        ...     torch.arange(8)[None], max_new_tokens=4, min_new_tokens=4, past_key_values=cache,
        ...     pad_token_id=0,
        ... ).shape
        torch.Size([1, 12])
    """

    def __init__(self, config: PretrainedConfig | None = None):
        super().__init__(config=config)
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = Int8Layer
        self.layers = [Int8Layer() if type(of) is DynamicLayer else of for of in self.layers]


class Int8Layer(DynamicLayer):
    """Keys and values of one layer, int8 of shape (batch, kv_heads, rows, bytes of a row)."""

    def __copy__(self) -> Int8Layer:
        """A layer with memory of its own, since rows are written in place."""
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        if self.is_initialized:
            made.keys, made.values = self.keys.clone(), self.values.clone()
        return made

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """The keys and values of all rows, after new ones are written.

        Raises:
            RuntimeError: a gradient would be lost, or the batch or the heads have changed.
        """
        used = self.get_seq_length()
        if used:
            self._check(key_states, value_states)
        new = key_states.detach(), value_states.detach()
        with torch.no_grad():
            kept = _longer(self.keys, used, new[0]), _longer(self.values, used, new[1])
            keys, values = Int8Rows(kept[0], new[0]), Int8Rows(kept[1], new[1])
            _append(keys, values, *new, used)
        # Last, so that a call that fails changes nothing.
        self.keys, self.values = kept
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        return (keys, values) if used else (key_states, value_states)

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        for name, new, kept in (
            ("key_states", key_states, self.keys),
            ("value_states", value_states, self.values),
        ):
            if torch.is_grad_enabled() and new.requires_grad:
                raise RuntimeError(
                    f"Int8Cache: {name} must not require gradients after the first rows, use "
                    "torch.no_grad(), got some that do"
                )
            if new.shape[:2] != kept.shape[:2]:
                raise RuntimeError(
                    f"Int8Cache: {name} must have the batch and heads of the rows before, "
                    f"{tuple(kept.shape[:2])}, got {tuple(new.shape[:2])}"
                )


class Int8Rows(Tensor):
    """Rows of an `Int8Layer`: to every function of torch the numbers that they stand for.

    Args:
        rows: int8 (batch, kv_heads, rows, bytes of a row).
        like: a tensor of the numbers' dtype and last size.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, rows: Tensor, like: Tensor) -> Int8Rows:
        shape = (*rows.shape[:-1], like.shape[-1])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=rows.device)

    def __init__(self, rows: Tensor, like: Tensor):
        self.codes = rows[..., : like.shape[-1]]
        self.scale = rows.view(torch.float32)[..., -1]

    def __repr__(self) -> str:
        return f"Int8Rows(shape={tuple(self.shape)}, dtype={self.dtype})"

    def numbers(self) -> Tensor:
        return (self.codes * self.scale[..., None]).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, cls.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def _longer(kept: Tensor | None, used: int, states: Tensor) -> Tensor:
    """`kept` with the rows of `states` after its own, which are not written yet.

    In place if its memory has room after the rows in use, else in memory for twice as many.
    """
    batch, heads, new, columns = states.shape
    rows = used + new
    if used:
        room = kept.untyped_storage().nbytes() // max(batch * heads * kept.shape[-1], 1)
        strides = (heads * room * kept.shape[-1], room * kept.shape[-1], kept.shape[-1], 1)
        if rows <= room and kept.stride() == strides and kept.storage_offset() == 0:
            return kept.as_strided((batch, heads, rows, kept.shape[-1]), strides)
    row_bytes = -(-columns // _SCALE_BYTES) * _SCALE_BYTES + _SCALE_BYTES
    room = max(_LEAST_ROOM, rows if not used else 2 * rows)
    longer = states.new_zeros(batch, heads, room, row_bytes, dtype=torch.int8)[:, :, :rows]
    if used:
        longer[:, :, :used] = kept
    return longer


def _append(
    keys: Int8Rows, values: Int8Rows, new_keys: Tensor, new_values: Tensor, used: int
) -> None:
    """Writes the codes and scales of rows from `used` on."""
    columns = max(new_keys.shape[-1], new_values.shape[-1])
    if new_keys.is_cpu and new_keys.dtype is not torch.float64 and columns <= _MOST_COLUMNS:
        no_query = new_keys[:, :, :0]
        attention_with_kv_cache(
            no_query, keys.codes, values.codes, new_keys, new_values, cache_seqlens=used,
            k_scale=keys.scale, v_scale=values.scale,
        )  # fmt: skip
        return
    for rows, new in ((keys, new_keys), (values, new_values)):
        rows.codes[:, :, used:], rows.scale[:, :, used:] = quantize_rows(new)
