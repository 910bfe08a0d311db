"""torch's BlockMask as the operator takes it: a number for each block, and the tiles of those
blocks that are masked in part."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._compiling import outside_of_graphs
from onepass._imported import is_a, is_fake
from onepass._ops.differentiation import are_transforms_active

# kAllKeys and kFirstTile of csrc/ops/attention.h; kNoKeys is 0.
_ALL, _FIRST_TILE = 1, 2
_AT_ONCE = 1 << 20  # queries times keys in a call of mask_mod


def blocks_and_tiles(op: str, block_mask, lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(batch, heads, query_blocks, key_blocks) int32 and (tiles, rows, cols) bool of a BlockMask
    of these queries and keys; computed once for each BlockMask, which keeps them.

    Raises:
        TypeError: block_mask is no BlockMask.
        ValueError: it has other lengths.
    """
    if not is_a(block_mask, "torch.nn.attention.flex_attention", "BlockMask"):
        raise TypeError(
            f"{op}: block_mask must be a torch.nn.attention.flex_attention.BlockMask or None, "
            f"got {type(block_mask).__name__}"
        )
    if tuple(block_mask.seq_lengths) != tuple(lengths):
        raise ValueError(
            f"{op}: block_mask must be of {lengths[0]} queries and {lengths[1]} keys, "
            f"got one of {block_mask.seq_lengths[0]} and {block_mask.seq_lengths[1]}"
        )
    # The inputs of the computation: a BlockMask's attributes may be reassigned.
    of = (
        block_mask.mask_mod,
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    kept = getattr(block_mask, "_onepass_blocks", None)
    if kept is not None and all(one is other for one, other in zip(kept[0], of, strict=True)):
        return kept[1]
    return _computed(op, block_mask, of)


@outside_of_graphs(
    "a BlockMask must have been used once outside of a compiled graph: its mask_mod is evaluated "
    "for each query and key"
)
def _computed(op: str, block_mask, of: tuple) -> tuple[Tensor, Tensor]:
    # The result is kept, and a later call may save it for a backward.
    with torch.inference_mode(False), torch.no_grad():
        if is_fake(block_mask.kv_indices) or block_mask.kv_indices.is_meta:
            return _without_values(block_mask)  # shapes are all there is
        found = _blocks_and_tiles(op, block_mask)
    if not are_transforms_active():  # mask_mod may hold a tensor of a transform
        block_mask._onepass_blocks = of, found
    return found


def _blocks_and_tiles(op: str, block_mask) -> tuple[Tensor, Tensor]:
    rows, cols = _block(block_mask)
    listed = _listed(op, block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)
    blocks = torch.zeros(listed.shape, dtype=torch.int32, device=listed.device)
    if block_mask.full_kv_indices is not None:
        num_blocks, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        full = _listed(op, block_mask, num_blocks, indices)
        blocks[full] = _ALL
        listed &= ~full
    tiles = []
    number = _FIRST_TILE
    for at in listed.nonzero().split(max(_AT_ONCE // (rows * cols), 1)):
        allows = _tiles_at(op, block_mask, at)
        flat = allows.flatten(1)
        is_all, is_tile = flat.all(1), flat.any(1) & ~flat.all(1)
        tiles.append(allows[is_tile])
        numbers = torch.where(is_tile, is_tile.cumsum(0) + (number - 1), is_all * _ALL)
        blocks[at.unbind(1)] = numbers.to(torch.int32)
        number += len(tiles[-1])
    none = blocks.new_empty((0, rows, cols), dtype=torch.bool)
    return blocks, torch.cat([none, *tiles])


def _block(block_mask) -> tuple[int, int]:
    """(queries, keys) of a block, at most the lengths of the sequences."""
    rows, cols = (
        max(min(block, length), 1)
        for block, length in zip(block_mask.BLOCK_SIZE, block_mask.seq_lengths, strict=True)
    )
    return rows, cols


def _listed(op: str, block_mask, num_blocks: Tensor, indices: Tensor) -> Tensor:
    """(batch, heads, query_blocks, key_blocks) whether a block is in this list."""
    blocks = -(-block_mask.seq_lengths[1] // _block(block_mask)[1])
    is_index = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    # Other entries may hold anything.
    indices = torch.where(is_index, indices, blocks).long()
    if ((indices < 0) | (indices >= blocks) & is_index).any():
        raise RuntimeError(
            f"{op}: block_mask must hold indices of its {blocks} blocks of keys, "
            f"got {indices[is_index].tolist()}"
        )
    listed = indices.new_zeros((*indices.shape[:-1], blocks + 1), dtype=torch.bool)
    listed.scatter_(-1, indices, True)
    return listed[(None,) * (4 - listed.dim())][..., :blocks].contiguous()


def _tiles_at(op: str, block_mask, at: Tensor) -> Tensor:
    """(tiles, rows, cols) values of mask_mod in the blocks `at`, (tiles, 4)."""
    batch, head, *firsts = at.unbind(1)
    # A block may extend beyond the end, where mask_mod may have no data.
    query, key = (
        (first[:, None] * size + torch.arange(size, device=at.device)).clamp(max=length - 1)
        for first, size, length in zip(
            firsts, _block(block_mask), block_mask.seq_lengths, strict=True
        )
    )
    of_keys = torch.vmap(block_mask.mask_mod, (None, None, None, 0))
    of_rows = torch.vmap(of_keys, (None, None, 0, None))
    allows = torch.vmap(of_rows)(batch, head, query, key)
    if allows.dtype is not torch.bool:
        raise RuntimeError(
            f"{op}: block_mask must have a mask_mod that returns bool, got {allows.dtype}"
        )
    return allows


def _without_values(block_mask) -> tuple[Tensor, Tensor]:
    indices = block_mask.kv_indices
    indices = indices[(None,) * (4 - indices.dim())]
    rows, cols = _block(block_mask)
    blocks = (*indices.shape[:-1], -(-block_mask.seq_lengths[1] // cols))
    return indices.new_empty(blocks, dtype=torch.int32), indices.new_empty(
        (0, rows, cols), dtype=torch.bool
    )
