"""onepass.distributed: a sequence on several processes, against the whole sequence on one."""

import functools
import re
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from onepass import numerics
from onepass.distributed import gather_sequence, ring_attention, shard_sequence
from onepass.distributed.sequence import LAYOUTS
from onepass.functional import scaled_dot_product_attention
from onepass.reference.attention import attention as formula
from tests.distributed.ranks import distributed, on_ranks, run
from tests.support import allocations
from tests.support.dtypes import BF16, F16, F32, F64

pytestmark = distributed

CAUSAL = {"is_causal": True}
SIZES = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)

# Keywords of the call; "alibi" and "sinks" stand for tensors.
CASES = {
    "full": {}, "causal": CAUSAL, "window": {"window_size": (9, 3)},
    "causal window": CAUSAL | {"window_size": (5, -1)},
    "softcap": CAUSAL | {"softcap": 3.0, "scale": 0.4}, "alibi": CAUSAL | {"alibi": True},
    "sinks": CAUSAL | {"sinks": True}, "dropout": {"dropout_p": 0.3},
    "causal dropout": CAUSAL | {"dropout_p": 0.2, "sinks": True, "alibi": True},
}  # fmt: skip


DRAWS = 5


def inputs(dtype=F32, rows=48, keys=48, heads=4, kv_heads=4, dim=16, value_dim=16, draw=0):
    """(query, key, value) and the upstream gradients of the output and the log-sum-exp."""
    generator = torch.Generator().manual_seed(3 + draw)
    sizes = [(heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim)]
    tensors = [torch.randn(2, *size, generator=generator).to(dtype) for size in sizes]
    doutput = torch.randn(2, heads, rows, value_dim, generator=generator).to(dtype)
    return tensors, doutput, torch.randn(2, heads, rows, generator=generator)


def evaluated(attend, tensors, doutput, dlse, options):
    """(output, lse, gradients of the tensors, gradients of the terms)."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    options, heads, dtype = dict(options), tensors[0].shape[1], tensors[0].dtype
    if options.pop("alibi", False):
        options["alibi_slopes"] = (2.0 ** -torch.arange(1, 1 + heads)).requires_grad_()
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 1, heads).to(dtype).requires_grad_()
    terms = [options[name] for name in ("alibi_slopes", "sinks") if name in options]
    options["enable_gqa"] = tensors[0].shape[1] != tensors[1].shape[1]
    output, lse = attend(*tensors, return_lse=True, **options)
    torch.autograd.backward([output, lse], [doutput, dlse.to(lse.dtype)])
    return output.detach(), lse.detach(), [t.grad for t in tensors], [t.grad for t in terms]


def in_one_process(dtype, options, sizes, attend=scaled_dot_product_attention):
    tensors, doutput, dlse = inputs(**sizes)
    torch.manual_seed(7)
    tensors = [tensor.to(dtype) for tensor in tensors]
    return evaluated(attend, tensors, doutput.to(dtype), dlse, options)


def by_torch(*tensors, return_lse, enable_gqa, is_causal=False, window_size=(-1, -1), **options):
    """torch's result by the formula, with all scores in memory: the base of the numerics rule."""
    left, right = window_size
    if options.get("dropout_p"):
        options["seed"] = torch.randint(-(2**63), 2**63 - 1, (2,))
    right = 0 if is_causal else right
    return formula(*tensors, window_left=left, window_right=right, **options)


def on_a_ring(options, sizes, layout, group=None, prepare=lambda tensor: tensor):
    """The same, gathered, on the processes of a group."""
    tensors, doutput, dlse = inputs(**sizes)
    split = functools.partial(shard_sequence, dim=2, group=group, layout=layout)
    gather = functools.partial(gather_sequence, dim=2, group=group, layout=layout)
    torch.manual_seed(7 + dist.get_rank(group))  # the first process's counts
    attend = functools.partial(ring_attention, group=group, layout=layout)
    shards = [prepare(split(tensor)) for tensor in tensors]
    upstream = split(doutput), split(dlse)
    output, lse, gradients, terms = evaluated(attend, shards, *upstream, options)
    assert [g.dtype for g in gradients] == [t.dtype for t in tensors]
    assert output.dtype is tensors[0].dtype
    for term in terms:
        dist.all_reduce(term, group=group)
    return gather(output), gather(lse), [gather(g) for g in gradients], terms


def check(find, options, sizes, case):
    """find(sizes) is the result on the ring. Gradients of slopes and sinks are few numbers, of
    which the largest error says little: those of several draws are compared together."""
    draws = DRAWS if options.get("alibi") or options.get("sinks") else 1
    dtype = sizes.get("dtype", F32)
    found, exact, base = [], [], []
    for drawn in ({**sizes, "draw": draw} for draw in range(draws)):
        found.append(find(drawn))
        exact.append(in_one_process(F64, options, drawn, by_torch))
        base.append(in_one_process(dtype, options, drawn, by_torch))
    for place, name in enumerate(("output", "lse", "gradients", "terms' gradients")):
        results = [
            [tensor for result in results for tensor in listed(result[place])]
            for results in (found, exact, base)
        ]
        if results[0]:
            numerics.assert_close(*results, case=f"{case}: {name}")


def listed(result) -> list:
    return result if isinstance(result, list) else [result]


def body(options, sizes, layout):
    case = f"{options} {sizes} {layout}"
    check(lambda drawn: on_a_ring(options, drawn, layout), options, sizes, case)


@SIZES
@EACH_LAYOUT
@pytest.mark.parametrize("name", CASES)
@pytest.mark.grid
def test_shards_give_what_the_whole_gives(name, layout, size):
    run(size, body, CASES[name], {}, layout)


WINDOW = CAUSAL | {"window_size": (200, -1)}
SINKS = CAUSAL | {"sinks": True, "window_size": (6, -1)}  # some rows have no key
LESS, MORE = dict(rows=16, keys=80), dict(rows=80, keys=16)


OF_DTYPES = [
    (CASES["causal dropout"] | {"alibi": False}, {"dtype": dtype}, "zigzag")
    for dtype in (F64, BF16, F16)
]


@pytest.mark.parametrize("size, options, sizes, layout", [
    *(pytest.param(4, *case, marks=pytest.mark.slow) for case in OF_DTYPES),
    *((2, *case) for case in OF_DTYPES),
    *((2, WINDOW, sizes, "zigzag") for sizes in (
        dict(kv_heads=2), dict(kv_heads=1), dict(dim=24, value_dim=8), LESS, MORE,
        dict(rows=4, keys=4), dict(rows=300, keys=300, heads=2, kv_heads=2),
    )),
    *((2, SINKS, sizes, layout) for sizes in (LESS, MORE) for layout in LAYOUTS),
], ids=str)  # fmt: skip
def test_dtypes_and_shapes(size, options, sizes, layout):
    run(size, body, options, sizes, layout)


@on_ranks(2)
def test_transposed_tensors_keep_their_order():
    def transposed(tensor):
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    check(
        lambda drawn: on_a_ring(CAUSAL, drawn, "zigzag", prepare=transposed),
        CAUSAL, {}, "transposed",
    )  # fmt: skip
    query, key, value = (transposed(t[:, :, :24]) for t in inputs()[0])
    output = ring_attention(query, key, value, is_causal=True)
    assert output.stride() == query.stride()


@on_ranks(2)
def test_a_group_of_others_is_refused():
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="shard_sequence: group must hold this process"):
            shard_sequence(torch.ones(4), 0, group)


@on_ranks(4)
def test_groups_do_not_meet():
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = groups[dist.get_rank() % 2]
    options = CASES["causal dropout"]
    check(lambda drawn: on_a_ring(options, drawn, "zigzag", group), options, {}, "subgroup")
    for group in groups:
        dist.destroy_process_group(group)


def _flat(results):
    output, lse, *gradients = results
    return [output, lse, *(gradient for some in gradients for gradient in some)]


@EACH_LAYOUT
@on_ranks(2)
def test_results_repeat_with_any_number_of_threads(layout):
    results = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        results.append(on_a_ring(CASES["causal dropout"], {}, layout))
    torch.set_num_threads(1)
    for other in results[1:]:
        for ours, first in zip(_flat(other), _flat(results[0]), strict=True):
            assert torch.equal(ours, first)


def body_of_bytes(size, dtype):
    sent = []

    def counting(operation, tensor, *others):
        sent.append(tensor.nbytes if operation is dist.isend else 0)
        return post(operation, tensor, *others)

    post = dist.P2POp
    tensors, doutput, dlse = inputs(dtype, kv_heads=2, value_dim=8)
    shards = [shard_sequence(t, 2) for t in tensors]
    _, key, value = shards
    with mock.patch.object(dist, "P2POp", counting):
        run_once = functools.partial(ring_attention, is_causal=True)
        upstream = shard_sequence(doutput, 2), shard_sequence(dlse, 2)
        evaluated(run_once, shards, *upstream, {})
    of_gradients = 4 * (key.numel() + value.numel())
    assert sum(sent) == 2 * (size - 1) * (key.nbytes + value.nbytes) + size * of_gradients


@SIZES
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_bytes_sent_are_those_of_the_formula(dtype, size):
    run(size, body_of_bytes, size, dtype)


def body_of_memory():
    """(bytes kept for the backward, peak of forward and backward) of a call without a group's."""
    shards = [shard_sequence(t, 2).requires_grad_() for t in inputs(rows=1024, keys=1024)[0]]

    def step():
        ring_attention(*shards, is_causal=True).sum().backward()

    step()  # the gradients are there
    kept = allocations.retained(ring_attention, *shards, is_causal=True)
    return kept, allocations.peak(step), shards[0].nbytes


def test_memory_falls_with_the_number_of_processes():
    found = [max(run(size, body_of_memory)) for size in (1, 2, 4)]
    for size, most, (kept, peak, shard) in zip((1, 2, 4), (8, 14, 19), found, strict=True):
        assert shard == found[0][2] / size
        assert kept <= 1.2 * shard  # the output and two numbers a row
        # Beside the caller's: query's, keys' and values' gradients and those that arrive, the
        # shards that are here and on their way.
        assert peak <= most * shard


def body_of_half():
    """The scores that this process computes in each layout, and in how many calls."""
    calls = []
    forward = torch.ops.onepass.attention_forward.default

    def counting(query, key, value, **options):
        calls.append(query.shape[2] * key.shape[2])
        return forward(query, key, value, **options)

    shards = {
        layout: [shard_sequence(t, 2, layout=layout) for t in inputs()[0]] for layout in LAYOUTS
    }
    with mock.patch("onepass.distributed.ring._forward", counting):
        for layout in LAYOUTS:
            ring_attention(*shards[layout], layout=layout, is_causal=True)
            calls.append(-1)
    split = calls.index(-1)
    zigzag, contiguous = calls[:split], calls[split + 1 : -1]
    return (sum(zigzag), len(zigzag)), (sum(contiguous), len(contiguous))


def test_zigzag_is_the_same_work_for_all():
    """Scores of shards that causality masks are not computed, and a shard takes one call."""
    zigzag, contiguous = zip(*run(4, body_of_half), strict=True)
    piece = 12 * 12  # of a contiguous shard
    assert zigzag == ((piece + 3 * piece // 2, 4),) * 4  # the others' by halves
    assert contiguous == tuple((count * piece, count) for count in (1, 2, 3, 4))


def test_one_process_is_the_whole_sequence():
    tensors = inputs()[0]
    found = ring_attention(*tensors, is_causal=True, return_lse=True)
    expected = scaled_dot_product_attention(*tensors, is_causal=True, return_lse=True)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert torch.equal(gather_sequence(shard_sequence(tensors[0], 2), 2), tensors[0])


@on_ranks(2)
def test_shards_of_a_sequence():
    rank, size = dist.get_rank(), dist.get_world_size()
    positions = torch.arange(4 * size)
    front = shard_sequence(positions, 0)
    assert front.tolist() == [
        2 * rank, 2 * rank + 1, 4 * size - 2 * rank - 2, 4 * size - 2 * rank - 1
    ]  # fmt: skip
    assert shard_sequence(positions, 0, layout="contiguous").tolist() == list(
        range(4 * rank, 4 * rank + 4)
    )
    whole = torch.arange(24.0 * size).reshape(2, 4 * size, 3)
    for layout in LAYOUTS:
        mine = shard_sequence(whole, -2, layout=layout)
        assert torch.equal(gather_sequence(mine, -2, layout=layout), whole)


ERRORS = [
    (dict(layout="ring"), ValueError, "layout must be 'zigzag' or 'contiguous', got 'ring'"),
    (dict(query=torch.ones(2, 4, 16)), RuntimeError,
     "query must have 4 dimensions, got shape (2, 4, 16)"),
    (dict(key=torch.ones(2, 2, 48, 16)), RuntimeError,
     "key must have query's 4 heads without enable_gqa, got 2"),
    (dict(window_size=3), TypeError, "window_size must be (left, right), got 3"),
    (dict(is_causal=1), TypeError, "is_causal must be True or False, got int"),
    (dict(softcap="high"), TypeError, "softcap must be a number, got str"),
    (dict(value=None), TypeError, "value must be a tensor, got NoneType"),
    *((dict(sinks=wrong, dropout_p=0.1), RuntimeError, "sinks must have ")
      for wrong in (torch.ones(3), torch.ones(4, dtype=F64))),
    (dict(alibi_slopes=torch.ones(3), dropout_p=0.1), RuntimeError, "alibi_slopes must have "),
]  # fmt: skip
OF_ATTENTION = ("sinks", "alibi_slopes")  # the operator checks them, under its own name


@pytest.mark.parametrize("changes, error, message", ERRORS)
def test_errors(changes, error, message):
    given = dict(zip(("query", "key", "value"), inputs()[0], strict=True)) | changes
    op = "attention" if set(changes) & set(OF_ATTENTION) else "ring_attention"
    with pytest.raises(error, match=f"^{op}: {re.escape(message)}"):
        ring_attention(**given)


@on_ranks(2)
def test_uneven_shards():
    with pytest.raises(RuntimeError, match="tensor must have a size that 2 divides in dimension 1"):
        shard_sequence(torch.ones(2, 5), 1)
    with pytest.raises(RuntimeError, match="shard_sequence: tensor must have an even number"):
        shard_sequence(torch.ones(2, 6), 1)
    message = "ring_attention: query must have an even number of positions on each process"
    with pytest.raises(RuntimeError, match=message):
        ring_attention(*(torch.ones(1, 1, 3, 8) for _ in range(3)))


def test_second_derivatives_are_refused():
    tensors = [t.requires_grad_() for t in inputs()[0]]
    with pytest.raises(RuntimeError, match="ring_attention: create_graph must be False, got True"):
        torch.autograd.grad(ring_attention(*tensors).sum(), tensors[0], create_graph=True)
