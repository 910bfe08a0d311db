"""flash_attn.bert_padding: padded batches to packed sequences and back, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def __getattr__(name: str):
    if name == "rearrange":  # einops's, which published files import from here
        from einops import rearrange

        return rearrange
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``: rows of shape (rows, ...), indices of shape (picked,).

    Examples:
        >>> from onepass.integrations.flash_attn.bert_padding import index_first_axis
        >>> index_first_axis(torch.tensor([5, 6, 7]), torch.tensor([2, 0]))
        tensor([7, 5])
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros of shape (first_axis_dim, ...) with values in the rows that indices name.

    Examples:
        >>> from onepass.integrations.flash_attn.bert_padding import index_put_first_axis
        >>> index_put_first_axis(torch.tensor([7, 5]), torch.tensor([2, 0]), 4)
        tensor([5, 0, 7, 0])
    """
    rows = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return rows.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that a mask names, one sequence after the other.

    Args:
        hidden_states: shape (batch, seq, ...).
        attention_mask: shape (batch, seq), bool or int: 1 for rows in use.
        unused_mask: shape (batch, seq), bool or int: 1 for rows that are kept besides.

    Returns:
        (rows, indices, cu_seqlens, max_seqlen, used_seqlens): rows of shape (total, ...), their
        indices in the flattened batch, (total,) int64, the first row of each sequence, (batch + 1,)
        int32, the length of the longest, and the rows in use of each, (batch,) int32; as in
        flash_attn 2.7.

    Examples:
        >>> from onepass.integrations.flash_attn.bert_padding import unpad_input
        >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> rows, indices, cu_seqlens, longest, used = unpad_input(torch.randn(2, 3, 8), mask)
        >>> rows.shape, cu_seqlens.tolist(), longest
        (torch.Size([5, 8]), [0, 2, 5], 3)
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return *_packed(hidden_states, indices, lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Does what `unpad_input` does, for rows that hold several sequences each.

    Args:
        hidden_states: shape (batch, seq, ...).
        attention_mask_in_length: shape (batch, seq), int: the lengths of the sequences in a row,
            from the left, and zeros after them.

    Returns:
        (rows, indices, cu_seqlens, max_seqlen).

    Examples:
        >>> from onepass.integrations.flash_attn import bert_padding
        >>> lengths = torch.tensor([[1, 2, 0, 0]])  # two sequences in a row, and padding
        >>> unpad = bert_padding.unpad_input_for_concatenated_sequences
        >>> found = unpad(torch.randn(1, 4, 8), lengths)
        >>> found[0].shape, found[2].tolist()
        (torch.Size([3, 8]), [0, 1, 3])
    """
    seq = attention_mask_in_length.shape[-1]
    in_use = attention_mask_in_length.sum(-1, keepdim=True)
    indices = (torch.arange(seq, device=in_use.device) < in_use).flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    return _packed(hidden_states, indices, lengths[lengths != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`, with zeros for padding.

    Args:
        hidden_states: shape (total, ...).
        indices: shape (total,): the indices of the rows in the flattened batch.

    Returns:
        Tensor of shape (batch, seqlen, ...).

    Examples:
        >>> from onepass.integrations.flash_attn.bert_padding import pad_input
        >>> pad_input(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 3]), batch=2, seqlen=2)
        tensor([[1., 2.],
                [0., 3.]])
    """
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def _packed(
    hidden_states: Tensor, indices: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest
