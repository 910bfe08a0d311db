"""Attention by a BlockMask of flex_attention: tiles by its indices, on the CPU."""

import gc
import re
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

from onepass import functional, numerics, reference
from onepass.functional._block_mask import blocks_and_tiles
from tests.attention.cases import DTYPES, NAN, Case, assert_same, ours
from tests.support import peaks
from tests.support.dtypes import BF16, F32, F64
from tests.support.results import assert_equal

attend = functional.scaled_dot_product_attention

# ---- masks ---------------------------------------------------------------------------------------


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= 70


def documents(b, h, q, k):
    """Documents of 90, 100, ... tokens, or others in the second batch; each attends to itself."""
    ends = torch.tensor([[0, 90, 190, 250, 400], [0, 10, 20, 300, 301]])
    of = ends[b]
    return torch.bucketize(q, of, right=True) == torch.bucketize(k, of, right=True)


def prefix(b, h, q, k):
    """Another prefix for each head, causal after it."""
    return (q >= k) | (k < torch.tensor([150, 40, 0, 7])[h])


_BITS = torch.rand(2, 4, 64, 64, generator=torch.Generator().manual_seed(3))


def random(b, h, q, k):
    """Some of 5 x 7 keys in a third of all squares of 80."""
    square = _BITS[b, h, q // 80, k // 80] < 0.3
    return square & (_BITS[b, h, q // 5 % 64, k // 7 % 64] < 0.6)


def few_rows(b, h, q, k):
    """Rows that see nothing, alone and a whole block of them."""
    return (q >= k) & (q % 3 > 0) & ((q < 64) | (q >= 192))


MASKS = {f.__name__: f for f in (causal, window, documents, prefix, random, few_rows)}
PER_BATCH, PER_HEAD = {"documents", "random"}, {"prefix", "random"}


def sizes_of(name: str, case: Case) -> tuple[int | None, int | None, int, int]:
    batch = case.batch if name in PER_BATCH else None
    return batch, case.heads if name in PER_HEAD else None, case.seq_q, case.seq_k


def made(name: str, case: Case, block: int | tuple[int, int] = 128) -> BlockMask:
    return create_block_mask(MASKS[name], *sizes_of(name, case), "cpu", BLOCK_SIZE=block)


def with_blocks(t: dict[str, Tensor], block_mask: BlockMask) -> dict[str, Tensor]:
    """A case's tensors, a block mask in the place of a mask."""
    blocks, tiles = blocks_and_tiles("test", block_mask, block_mask.seq_lengths)
    return t | {"block_mask": blocks, "mask": tiles}


# ---- values and gradients ------------------------------------------------------------------------

INPUTS = ("query", "key", "value")
LENGTHS = dict(seq_q=300, seq_k=300, mask="")


ALL_TERMS = dict(window_left=200, window_right=90, bottom_right=True, alibi="b", sinks=F32,
                 softcap=5.0, dropout_p=0.25, dlse=True)  # fmt: skip


@pytest.mark.isa
@pytest.mark.grid(2)
@pytest.mark.parametrize("terms", [{}, ALL_TERMS, dict(bias="hq", dropout_p=0.1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32, 48, 100, 128, (64, 256), (256, 32), 1000])
@pytest.mark.parametrize("sizes", [(300, 300), (1, 257), (129, 65)])
@pytest.mark.parametrize("name", MASKS)
def test_the_whole_mask_gives_the_same_bits(name, sizes, block, dtype, terms):
    """Its values are those of test_values.py; by another number of threads."""
    if dtype is F64 and "sinks" in terms:
        terms = terms | dict(sinks=F64)
    seq_q, seq_k = sizes if dtype is not F64 else (70, 80)
    case = Case(dtype, 24, heads=4, kv_heads=2, seq_q=seq_q, seq_k=seq_k, mask="", **terms)
    t = case.tensors() | {"mask": create_mask(MASKS[name], *sizes_of(name, case), "cpu")}
    expected = ours(case, t)
    torch.set_num_threads(3)
    assert_same(ours(case, with_blocks(t, made(name, case, block))), expected, f"{name} {block}")


@pytest.mark.parametrize("name", MASKS)
def test_the_reference_takes_blocks(name):
    case = Case(F64, 8, heads=4, seq_q=300, seq_k=290, mask="")
    t = case.tensors()
    blocks, tiles = blocks_and_tiles("test", made(name, case, (48, 64)), (300, 290))
    whole = create_mask(MASKS[name], *sizes_of(name, case), "cpu")
    assert torch.equal(reference.attention.dense_mask(blocks, tiles)[:, :, :300, :290], whole)
    given = dict(block_mask=blocks, mask=tiles)
    found, expected = (
        reference.attention.attention(t["query"], t["key"], t["value"], **m)[0]
        for m in (given, dict(mask=whole))
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["documents", "prefix"])
def test_the_same_as_flex_attention(name):
    """Of masks without rows that have no key. Both by the numerics rule; torch's is the base."""
    case = Case(F32, 32, heads=4, kv_heads=2, **LENGTHS, factor=1.0)
    tensors, block_mask = [case.tensors()[n] for n in INPUTS], made(name, case)
    given = dict(block_mask=block_mask, enable_gqa=True)
    whole = create_mask(MASKS[name], *sizes_of(name, case), "cpu")
    wide = [x.double().repeat_interleave(4 // x.shape[1], 1) for x in tensors]
    ref = torch.nn.functional.scaled_dot_product_attention(*wide, whole)
    numerics.assert_close(attend(*tensors, **given), ref, flex_attention(*tensors, **given), name)


# ---- blocks as data ------------------------------------------------------------------------------


def listed(indices: list[list[int]], full: list[list[int]] | None = None, **more) -> BlockMask:
    """A BlockMask with these lists of blocks; unlisted entries are nonsense, as torch allows."""

    def lists(rows):
        most = max(map(len, rows)) + 1
        padded = [row + [0] * (most - len(row)) for row in rows]
        num_blocks = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32)
        return num_blocks, torch.tensor([[padded]], dtype=torch.int32)

    of_full = (None, None) if full is None else lists(full)
    return BlockMask.from_kv_blocks(
        *lists(indices), *of_full, BLOCK_SIZE=32, compute_q_blocks=False, **more
    )


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_blocks_that_are_not_listed_are_not_looked_at(dtype):
    """Whatever mask_mod says of them; those that are listed as full are seen whatever it says."""
    block_mask = listed([[1], [], [2]], [[], [3], [0]], mask_mod=causal, seq_lengths=(96, 128))
    query, key, value = (torch.randn(1, 2, n, 16, dtype=dtype) for n in (96, 128, 128))
    seen = torch.zeros(96, 128, dtype=torch.bool)
    seen[64:96, 64:96] = torch.ones(32, 32).tril()
    seen[32:64, 96:128] = seen[64:96, 0:32] = True
    found = attend(query, key, value, block_mask=block_mask)
    assert torch.equal(found, attend(query, key, value, seen))
    assert (found[:, :, :32] == 0).all()  # no key of the second block is before them
    poisoned = [x.clone() for x in (key, value)]
    for x in poisoned:
        x[:, :, 32:64] = NAN
    leaves = [x.requires_grad_() for x in (query, *poisoned)]
    output = attend(*leaves, block_mask=block_mask)
    assert torch.equal(output, found)
    dquery, dkey, dvalue = torch.autograd.grad(output.sum(), leaves)
    assert dquery.isfinite().all() and dkey.isfinite().all() and dvalue.isfinite().all()


def test_what_is_kept_of_a_block_mask():
    """Tiles of the blocks that are masked in part alone, whichever list they are in."""
    block_mask = create_block_mask(causal, None, None, 512, 512, "cpu")
    blocks, tiles = blocks_and_tiles("test", block_mask, (512, 512))
    assert blocks.tolist() == [[[[2, 0, 0, 0], [1, 3, 0, 0], [1, 1, 4, 0], [1, 1, 1, 5]]]]
    assert torch.equal(tiles, torch.ones(4, 128, 128).tril().bool())
    # Without a mask_mod, and where it lets nothing through.
    blocks, tiles = blocks_and_tiles("test", listed([[0], [0, 1]]), (64, 96))
    assert blocks.tolist() == [[[[1, 0, 0], [1, 1, 0]]]] and tiles.shape == (0, 32, 32)
    nothing = listed([[0, 2], [0]], mask_mod=lambda b, h, q, k: q < k)
    blocks, tiles = blocks_and_tiles("test", nothing, (64, 96))
    assert blocks.tolist() == [[[[2, 0, 1], [0, 0, 0]]]] and tiles.shape == (1, 32, 32)


def test_mask_mod_is_asked_once_and_about_nothing_beyond_the_end():
    asked = []
    ids = torch.tensor([0] * 70 + [1] * 31)

    def counted(b, h, q, k):
        asked.append(0)
        return ids[q] == ids[k]  # would be an error at 101

    block_mask = create_block_mask(counted, None, None, 101, 101, "cpu")
    x = torch.randn(1, 2, 101, 8)
    asked.clear()
    first = attend(x, x, x, block_mask=block_mask)
    assert len(asked) == 1
    with torch.inference_mode():
        attend(x, x, x, block_mask=block_mask)
    assert torch.equal(attend(x, x, x, ids[:, None] == ids), first) and len(asked) == 1
    # But one that gets another mask_mod or other lists is another mask.
    block_mask.mask_mod = lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)
    causal_too = (ids[:, None] == ids) & torch.ones(101, 101).tril().bool()
    assert torch.equal(attend(x, x, x, causal_too), attend(x, x, x, block_mask=block_mask))


def test_a_block_mask_takes_its_tiles_along():
    block_mask = create_block_mask(causal, None, None, 64, 64, "cpu")
    _, tiles = blocks_and_tiles("test", block_mask, (64, 64))
    kept = weakref.ref(tiles)
    del tiles
    gc.collect()
    assert kept() is not None
    del block_mask
    gc.collect()
    assert kept() is None


def test_first_used_in_inference_mode():
    block_mask = create_block_mask(causal, None, None, 64, 64, "cpu")
    x = torch.randn(1, 1, 64, 8)
    with torch.inference_mode():
        attend(x, x, x, block_mask=block_mask)
    (dx,) = torch.autograd.grad(attend(x.requires_grad_(), x, x, block_mask=block_mask).sum(), x)
    assert dx.isfinite().all()


def test_slices():
    """torch lets a mask_mod be set on a slice again."""
    whole = create_block_mask(documents, 2, None, 300, 300, "cpu")
    query, key, value = torch.randn(3, 2, 1, 300, 8)
    one = whole[1:2]
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        attend(query[1:], key[1:], value[1:], block_mask=one)
    one.mask_mod = lambda b, h, q, k: documents(b + 1, h, q, k)
    found = attend(query[1:], key[1:], value[1:], block_mask=one)
    assert torch.equal(found, attend(query, key, value, block_mask=whole)[1:])


# ---- memory --------------------------------------------------------------------------------------

STEP = """
import torch
from torch.nn.attention.flex_attention import BlockMask
from onepass.functional import scaled_dot_product_attention as attend
torch.set_num_threads(2)

def band(b, h, q, k):
    return (q - k).abs() < 128

def step(seq):
    rows = torch.arange(seq // 128)
    indices = torch.stack([rows - 1, rows, rows + 1], 1)
    valid = (indices >= 0) & (indices < len(rows))
    order = (~valid).int().argsort(dim=1, stable=True)
    indices = indices.where(valid, 0).gather(1, order).int()[None, None]
    num_blocks = valid.sum(1).int()[None, None]
    mask = BlockMask.from_kv_blocks(
        num_blocks, indices, mask_mod=band, seq_lengths=(seq, seq), compute_q_blocks=False
    )
    tensors = [torch.randn(1, 1, seq, 16, requires_grad=True) for _ in range(3)]
    attend(*tensors, block_mask=mask).sum().backward()
"""


def test_no_square_in_memory():
    """At 16,384 rows it would be 256 MiB of bytes; the tiles of the band are 6, the tensors of a
    step 10, and the backward's sums of the query another 8."""
    assert peaks.growth(STEP, small=1024, large=16_384) < 48


# ---- errors --------------------------------------------------------------------------------------

X = torch.randn(2, 4, 40, 8)
BLOCKS = torch.zeros(1, 1, 2, 2, dtype=torch.int32)
TILES = torch.ones(3, 32, 32, dtype=torch.bool)
RIGHT = dict(query=X, key=X, value=X, scale=1.0, block_mask=BLOCKS, mask=TILES)
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
PACKED = dict(query=X[0, 0, :6, None], key=X[0, 0, :6, None], value=X[0, 0, :6, None], max_q=4,
              max_k=4, cu_seq_q=CU, cu_seq_k=CU, scale=1.0)  # fmt: skip

SHAPE = "block_mask must have shape (2, 4, 2, 2) or 1 in place of the first two sizes, got"
WRONG = [
    (RIGHT, dict(mask=None), "mask must be given with block_mask, got none"),
    (RIGHT, dict(mask=TILES[0]),
     "mask must have shape (tiles, rows, cols) with block_mask, got (32, 32)"),
    (RIGHT, dict(mask=TILES[:, :, :0]),
     "mask must have shape (tiles, rows, cols) with block_mask, got (3, 32, 0)"),
    (RIGHT, dict(mask=TILES.int()), "mask must have dtype bool, got int32"),
    (RIGHT, dict(block_mask=BLOCKS[0]), f"{SHAPE} (1, 2, 2)"),
    (RIGHT, dict(block_mask=BLOCKS.expand(3, 1, 2, 2)), f"{SHAPE} (3, 1, 2, 2)"),
    (RIGHT, dict(block_mask=BLOCKS[:, :, :1]), f"{SHAPE} (1, 1, 1, 2)"),
    (RIGHT, dict(block_mask=BLOCKS.long()), "block_mask must have dtype int32, got int64"),
    (RIGHT, dict(block_mask=BLOCKS + 5), "block_mask must hold numbers from 0 to 4, got 5"),
    (RIGHT, dict(block_mask=BLOCKS - 1), "block_mask must hold numbers from 0 to 4, got -1"),
    (PACKED, dict(block_mask=BLOCKS[..., :1, :1], mask=TILES),
     "block_mask must not be given with cu_seq_q, got one"),
]  # fmt: skip


def test_messages_of_the_operators():
    for right, change, message in WRONG:
        with pytest.raises(RuntimeError, match=f"^attention: {re.escape(message)}$"):
            torch.ops.onepass.attention_forward(**right | change)
        rows = torch.zeros(right["query"].shape[:-1])
        saved = dict(output=right["query"], lse=rows if right is RIGHT else rows.T, grad_mask=7)
        upstream = saved | dict(doutput=right["query"], dlse=None)
        with pytest.raises(RuntimeError, match=f"^attention_backward: {re.escape(message)}$"):
            torch.ops.onepass.attention_backward(**right | upstream | change)


def test_refused_on_cuda(cuda):
    message = (
        "block_mask must not be given on CUDA, where torch's flex_attention takes a BlockMask, "
        "got one"
    )
    with pytest.raises(RuntimeError, match=f"^attention: {message}$"):
        torch.ops.onepass.attention_forward(**RIGHT)


def test_messages_of_the_function():
    right, floats, of_batch = (
        create_block_mask(causal, batch, None, 40, 40, "cpu") for batch in (None, None, 3)
    )
    floats.mask_mod = lambda b, h, q, k: (q >= k).float()
    beyond, mask = listed([[0, 2], [0]], seq_lengths=(40, 40)), torch.ones(40, 40).bool()
    both = "attn_mask must be a float mask with block_mask"
    for error, block_mask, keywords, message in (
        (TypeError, BLOCKS, {}, "BlockMask or None, got Tensor$"),
        (RuntimeError, right, {"attn_mask": mask}, both),
        (RuntimeError, of_batch, {}, r"block_mask must have shape \(2, 4, 1, 1\) or 1 in"),
        (RuntimeError, beyond, {}, "must hold indices of its 2 blocks of keys, got .*2"),
        (RuntimeError, floats, {}, "mask_mod that returns bool, got torch.float32"),
        (TypeError, right, {"score_mod": lambda s, b, h, q, k: s}, "score_mod"),
    ):
        with pytest.raises(error, match=message):
            attend(X, X, X, block_mask=block_mask, **keywords)
    with pytest.raises(ValueError, match="block_mask must be of 40 queries and 30 keys, got one"):
        attend(X, X[:, :, :30], X[:, :, :30], block_mask=right)


# ---- torch ---------------------------------------------------------------------------------------


def test_gradcheck_and_gradgradcheck():
    block_mask = create_block_mask(random, 2, 2, 5, 6, "cpu", BLOCK_SIZE=(2, 4))
    shapes = ((2, 2, 5, 3), (2, 1, 6, 3), (2, 1, 6, 2))
    leaves = [torch.randn(s, dtype=F64, requires_grad=True) for s in shapes]
    function = partial(attend, block_mask=block_mask, enable_gqa=True)
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def loss(query, key, value, block_mask):
    return attend(query, key, value, block_mask=block_mask, enable_gqa=True).square().sum()


def leaves_of(case: Case) -> list[Tensor]:
    t = case.tensors()
    return [t[name].requires_grad_() for name in INPUTS]


def check_compiled(compiled, leaves: list[Tensor], block_mask: BlockMask) -> None:
    found, expected = (
        torch.autograd.grad(function(*leaves, block_mask), leaves) for function in (compiled, loss)
    )
    assert_equal(found, expected)


def test_compile_fullgraph():
    case = Case(F32, 16, heads=4, kv_heads=2, **LENGTHS)
    leaves = leaves_of(case)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    block_mask = made("random", case)
    loss(*leaves, block_mask)
    check_compiled(compiled, leaves, block_mask)


def test_compile_of_a_block_mask_that_was_not_used_yet():
    case = Case(F32, 16, heads=4, kv_heads=2, **LENGTHS)
    leaves, block_mask = leaves_of(case), made("causal", case)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="must have been used once outside"):
        torch.compile(loss, fullgraph=True, backend="eager")(*leaves, block_mask)
    check_compiled(torch.compile(loss, backend="eager"), leaves, block_mask)


def test_vmap():
    query, key, value = torch.randn(3, 2, 2, 4, 70, 8)
    block_mask = create_block_mask(window, None, None, 70, 70, "cpu", BLOCK_SIZE=32)
    found = torch.vmap(partial(attend, block_mask=block_mask))(query, key, value)
    for i in range(2):
        assert torch.equal(found[i], attend(query[i], key[i], value[i], block_mask=block_mask))


def test_fakes_have_shapes_alone():
    with FakeTensorMode():
        x = torch.empty(2, 4, 96, 8)
        indices = torch.empty(1, 1, 3, 3, dtype=torch.int32)
        block_mask = BlockMask.from_kv_blocks(
            indices[..., 0], indices, BLOCK_SIZE=32, compute_q_blocks=False
        )
        assert attend(x, x, x, block_mask=block_mask).shape == x.shape
