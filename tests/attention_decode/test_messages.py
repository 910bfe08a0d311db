"""Decoding's errors, with their messages; a refused call writes nothing."""

import torch

from tests.attention_decode.cases import int32
from tests.support.refused import assert_refused

# ---- right calls, and wrong ones -----------------------------------------------------------------

Q = torch.randn(2, 4, 3, 8)
K, V = torch.randn(2, 2, 2, 9, 8)
NEW = torch.randn(2, 2, 2, 8)
POOL, OTHER = torch.randn(2, 5, 4, 2, 8)
COS = torch.ones(10, 4)
USED = int32([7, 3])
TABLE = int32([[0, 1, 4], [2, 3, 9]])  # 9 is after the last row in use

READ = dict(query=Q, k_cache=K, v_cache=V, cache_seqlens=USED, scale=1.0)
PAGED = READ | dict(k_cache=POOL, v_cache=OTHER, block_table=TABLE)
SCATTERED = READ | dict(k_cache=K.repeat(2, 1, 1, 1), v_cache=V.repeat(2, 1, 1, 1),
                        cache_batch_idx=int32([3, 0]))  # fmt: skip
NEW_ROWS = dict(key=NEW, value=NEW)
APPEND, APPEND_PAGED, APPEND_SCATTERED = (c | NEW_ROWS for c in (READ, PAGED, SCATTERED))
ROTARY = APPEND | dict(rotary_cos=COS, rotary_sin=COS)
RIGHT = [READ, PAGED, SCATTERED, APPEND, APPEND_PAGED, APPEND_SCATTERED, ROTARY,
         READ | dict(cache_leftpad=USED), APPEND | dict(cache_leftpad=int32([9, 0]))]  # fmt: skip

# For both ops: changes that make a right call wrong, and the whole message after the op's name.
ROOM = "cache_seqlens must lie between 0 and the rows of the cache,"
OF_PAGES = "block_table must hold numbers of the 5 pages, got"
INT32 = "must be an int32 tensor of shape (2,) on cpu, got"
CACHE = "cache_batch_idx must lie between 0 and the last cache, 3, got"
ELSEWHERE = "block_table must not let a row be read that is written at another place, got row"
LEAVE = "cache_seqlens must leave room for 2 new rows in a cache of"
SLOPES = "alibi_slopes must have shape (4,) or (2, 4), got"
LEFTPAD = "cache_leftpad must lie between 0 and the rows in use,"
TOGETHER = "rotary_cos must be given together with rotary_sin, got"
WRONG = [
    # shapes
    (READ, dict(query=Q[0]), "query must have 4 dimensions, got (4, 3, 8)"),
    (READ, dict(k_cache=K[0]), "k_cache must have 4 dimensions, got (2, 9, 8)"),
    (READ, dict(v_cache=K[0]), "v_cache must have shape (2, 2, 9, 8), got (2, 9, 8)"),
    (READ, dict(k_cache=K[..., :7]), "k_cache must have shape (2, 2, 9, 8), got (2, 2, 9, 7)"),
    (SCATTERED, dict(v_cache=K), "v_cache must have shape (4, 2, 9, 8), got (2, 2, 9, 8)"),
    (PAGED, dict(v_cache=POOL[:4]), "v_cache must have shape (5, 4, 2, 8), got (4, 4, 2, 8)"),
    (READ, dict(query=Q[:, :3]), "query must have a multiple of the 2 heads of k_cache, got 3"),
    (READ, dict(k_cache=K[:, :0], v_cache=K[:, :0]), "k_cache must have at least one head, got 0"),
    (READ, dict(v_cache=torch.zeros(2, 2, 9, 513)),
     "v_cache must have a head_dim of 1 to 512, got 513"),
    # dtypes and devices
    (READ, dict(query=Q.double(), k_cache=K.double(), v_cache=K.double()),
     "query must have dtype float32, bfloat16 or float16, got float64"),
    (READ, dict(k_cache=K.half()), "k_cache must have dtype float32 like query, got float16"),
    (READ, dict(k_cache=K.to("meta")), "k_cache must be on the device of query, cpu, got meta"),
    # lengths
    (READ, dict(cache_seqlens=USED.long()), f"cache_seqlens {INT32} (2,) of int64 on cpu"),
    (READ, dict(cache_seqlens=int32([3, 10])), f"{ROOM} 9, got 10"),
    (READ, dict(cache_seqlens=int32([-1, 3])), f"{ROOM} 9, got -1"),
    (PAGED, dict(cache_seqlens=int32([13, 3])), f"{ROOM} 12, got 13"),
    (READ, dict(cache_leftpad=int32([7, -1])), f"{LEFTPAD} 3, got -1"),
    (READ, dict(cache_leftpad=int32([8, 0])), f"{LEFTPAD} 7, got 8"),
    # where sequences are
    (PAGED, dict(block_table=TABLE[:1]),
     "block_table must be an int32 tensor of shape (2, 3) on cpu, got (1, 3) of int32 on cpu"),
    (PAGED, dict(block_table=int32([[0, 5, 4], [2, 3, 9]])), f"{OF_PAGES} 5"),
    (SCATTERED, dict(cache_batch_idx=USED.long()), f"cache_batch_idx {INT32} (2,) of int64 on cpu"),
    (SCATTERED, dict(cache_batch_idx=int32([0, 4])), f"{CACHE} 4"),
    (PAGED, dict(cache_batch_idx=int32([0, 1])),
     "cache_batch_idx must not be given with block_table, got one"),
    # scores
    (READ, dict(window_left=-2), "window_left must be at least -1, got -2"),
    (READ, dict(softcap=-1.0), "softcap must be 0 or a positive number that float32 holds, got -1"),
    (READ, dict(alibi_slopes=torch.zeros(3)), f"{SLOPES} (3,)"),
    (READ, dict(sinks=torch.zeros(2)), "sinks must have shape (4,), got (2,)"),
    (READ, dict(cache_leftpad=USED[None]), f"cache_leftpad {INT32} (1, 2) of int32 on cpu"),
    (SCATTERED, dict(cache_batch_idx=int32([-1, 0])), f"{CACHE} -1"),
]  # fmt: skip

WRONG_APPEND = [
    # shapes and dtypes
    (APPEND, dict(key=NEW[0]), "key must have 4 dimensions, got (2, 2, 8)"),
    (APPEND, dict(key=NEW[:1]), "key must have shape (2, 2, 2, 8), got (1, 2, 2, 8)"),
    (APPEND, dict(value=NEW[:, :, :1]), "value must have shape (2, 2, 2, 8), got (2, 2, 1, 8)"),
    (APPEND, dict(key=NEW.half()), "key must have dtype float32 like query, got float16"),
    (APPEND, dict(key=NEW.to("meta")), "key must be on the device of query, cpu, got meta"),
    # room
    (APPEND, dict(cache_seqlens=None),
     "cache_seqlens must be given where keys are appended, got none"),
    (APPEND, dict(cache_seqlens=int32([8, 3])), f"{LEAVE} 9 rows, got 8"),
    (APPEND, dict(cache_seqlens=int32([2**31 - 1, 3])), f"{ROOM} 9, got 2147483647"),
    (APPEND_PAGED, dict(cache_seqlens=int32([11, 3])), f"{LEAVE} 12 rows, got 11"),
    # a page that only new rows need
    (APPEND_PAGED, dict(cache_seqlens=int32([7, 7])), f"{OF_PAGES} 9"),
    # a page that is written, but that no query sees
    (APPEND_PAGED, dict(query=Q[:, :, :1], cache_seqlens=int32([3, 3]), window_left=0,
                        block_table=int32([[9, 1, 4], [2, 3, 4]])),
     f"{OF_PAGES} 9"),
    # two sequences in one place
    (APPEND_SCATTERED, dict(cache_batch_idx=int32([1, 1])),
     "cache_batch_idx must not name a cache twice where keys are appended, got 1 twice"),
    (APPEND_PAGED, dict(block_table=int32([[0, 1, 4], [2, 1, 9]]), cache_seqlens=int32([5, 5])),
     "block_table must not give the same row to write twice, got row 1 of page 1"),
    # rows that are read at another place than they are written, in another sequence or the same
    (APPEND_PAGED, dict(block_table=int32([[0, 1, 4], [2, 1, 3]]), cache_seqlens=int32([5, 8])),
     f"{ELSEWHERE} 1 of page 1"),
    (APPEND_PAGED, dict(block_table=int32([[0, 1, 0], [2, 3, 4]]), cache_seqlens=int32([8, 8])),
     f"{ELSEWHERE} 0 of page 0"),
    # rotary embedding
    (ROTARY, dict(rotary_sin=None), f"{TOGETHER} it alone"),
    (ROTARY, dict(rotary_cos=None), f"{TOGETHER} rotary_sin alone"),
    (ROTARY, dict(rotary_cos=COS[0]), "rotary_cos must have 2 dimensions, got (4,)"),
    (ROTARY, dict(rotary_cos=torch.ones(10, 5), rotary_sin=torch.ones(10, 5)),
     "rotary_cos must have at most head_dim / 2 columns, 4, got 5"),
    (ROTARY, dict(rotary_sin=COS[:, :3]), "rotary_sin must have shape (10, 4), got (10, 3)"),
    (ROTARY, dict(rotary_cos=COS.half(), rotary_sin=COS.half()),
     "rotary_cos must have dtype float32 or query's float32, got float16"),
    (ROTARY, dict(rotary_cos=COS[:9], rotary_sin=COS[:9], window_right=0),
     "rotary_cos must have a row for every position, 10, got 9"),
    # caches that cannot be written in place
    (APPEND, dict(k_cache=K.mT.contiguous().mT),
     "k_cache must be dense in its last dimension, it is written in place, got strides "
     "(144, 72, 1, 9)"),
    (APPEND, dict(k_cache=K[:1].expand(2, 2, 9, 8)),
     "k_cache must not be expanded, it is written in place, got strides (0, 72, 8, 1)"),
    (APPEND_PAGED, dict(v_cache=POOL[:, :1].expand(5, 4, 2, 8)),
     "v_cache must not be expanded, it is written in place, got strides (64, 0, 8, 1)"),
]  # fmt: skip


def call(check: bool = False, **arguments):
    """The op of these arguments, or its checks alone."""
    name = "attention_decode" + ("_append" if "key" in arguments else "")
    return getattr(torch.ops.onepass, name + ("_check" if check else ""))(**arguments)


def test_messages():
    """A refused call writes nothing."""
    for right, changes, message in WRONG:
        assert_refused(call, "attention_decode", right, {message: changes})
        # The same of an append; the rows in use are those after it.
        message = message.replace("rows in use, 3", "rows in use, 5")
        if "rows in use, 7" in message:
            changes, message = dict(cache_leftpad=int32([10, 0])), "rows in use, 9, got 10"
            message = f"cache_leftpad must lie between 0 and the {message}"
        assert_refused(call, "attention_decode_append", right | NEW_ROWS, {message: changes})
    for right, changes, message in WRONG_APPEND:
        assert_refused(call, "attention_decode_append", right, {message: changes})


def test_the_right_calls_are_right():
    for right in RIGHT:
        output, lse = call(**right)
        assert output.shape == Q.shape and lse.shape == Q.shape[:-1]
        assert call(check=True, **right) in (None, ())


def test_caches_in_one_place():
    """Keys and values would be written into the same rows; reading them is allowed."""
    message = "v_cache must not lie where k_cache does, both are written in place, got one place"
    for right in (APPEND, APPEND_PAGED, APPEND_SCATTERED, ROTARY):
        changes = dict(v_cache=right["k_cache"])
        assert_refused(call, "attention_decode_append", right, {message: changes})
    assert call(**READ | dict(v_cache=K))[0].isfinite().all()
