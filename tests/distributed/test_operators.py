"""Every operator on DTensors: the values and gradients of whole tensors, and nothing gathered."""

import contextlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.attention.flex_attention import create_block_mask

from onepass import functional, numerics
from onepass._dtensor import tensors
from onepass._ops.entry import _parameters
from onepass.reference.quantized_linear import Format, quantize
from tests.distributed.dtensors import mesh_of, placed_as, spread, whole
from tests.distributed.ranks import distributed, on_ranks, run

pytestmark = distributed

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
CODES, _ = quantize(torch.linspace(-1, 1, 128).view(16, 8), Format.INT4, 8, torch.float32)
BEGINS = torch.tensor([0, 3, 8], dtype=torch.int32)
TARGET = torch.tensor([3, 0, -100, 7, 5, 5, 2, -100])
ROW_SCALE = torch.tensor([0.0, 2.0, 1.0, 2.0])
CLASSES = torch.linspace(0.5, 2.0, 8)


@dataclass
class Case:
    """A call, and placements of its tensors, each for one member; one alone is for all tensors."""

    shapes: dict[str, tuple[int, ...]]
    call: Callable
    places: Sequence[dict | Placement]
    collectives: dict[str, int] = field(default_factory=dict)  # others are not allowed

    def __post_init__(self):
        self.places = [p if isinstance(p, dict) else every(p, *self.shapes) for p in self.places]


def attention(**options):
    def call(q, k, v, **tensors):
        if "alibi_slopes" in tensors:
            tensors["alibi_slopes"] = tensors["alibi_slopes"].float()
        return functional.scaled_dot_product_attention(
            q, k, v, enable_gqa=True, return_lse=True, **options, **tensors
        )

    return call


def of_blocks(q, k, v):
    """Other blocks in each sequence."""
    block_mask = create_block_mask(
        lambda b, h, i, j: i + 3 * b >= j, 2, None, 6, 8, device="cpu", BLOCK_SIZE=(2, 4)
    )
    return functional.scaled_dot_product_attention(q, k, v, block_mask=block_mask, return_lse=True)


def angles(x, tokens):
    return torch.outer(torch.arange(float(tokens)), torch.tensor([1.0, 0.3])).to(x.dtype)


def rotated(q, k, **tensors):
    table, norms = angles(q, q.shape[2]), tensors | ({"eps": 1e-6} if tensors else {})
    return functional.rotary_embedding(q, k, table.cos(), table.sin(), rotary_dim=4, **norms)


def quantized(x, b, y):
    scales, shifts = (of.to(x.dtype) for of in CODES[1:])
    return functional.quantized_linear(
        x, CODES.codes, scales, shifts, b, weights="int4", residual=y
    )


def every(place, *names):
    return dict.fromkeys(names, place)


X, TWO, ROW = {"x": (4, 6, 8)}, {"x": (4, 6, 8), "y": (4, 6, 8)}, {"w": (8,), "b": (8,)}
OF_TWO = [every(S0, "x", "y"), every(S1, "x", "y")]
LINEAR = X | {"w": (10, 8), "b": (10,)}
QK = {"q": (2, 4, 6, 8), "k": (2, 2, 6, 8)}
QKV = {"q": (2, 4, 6, 8), "k": (2, 4, 8, 8), "v": (2, 4, 8, 8)}
LOGITS, PRODUCT = {"x": (8, 8)}, {"x": (8, 6), "w": (8, 6), "b": (8,)}
ONCE, TWICE = {"all_reduce": 1}, {"all_reduce": 2}


def of_products(x, w, b):
    return functional.linear_cross_entropy(x, w, TARGET, linear_bias=b, softcap=4.0)


CASES = {
    # norms
    "layer_norm": Case(
        X | ROW, lambda x, w, b: functional.layer_norm(x, 8, w, b), [{"x": S0}, {"x": S1}, {}]),
    "rms_norm of shards of unequal sizes": Case(
        {"x": (5, 3, 8), "w": (8,)},
        lambda x, w: functional.rms_norm(x, 8, w, 1e-6, weight_offset=1.0), [{"x": S0}, {"x": S1}]),
    "a norm of one row, which one process has": Case(
        {"x": (1, 8), "y": (1, 8)}, lambda x, y: functional.add_layer_norm(x, y, 8), [{}]),
    "add_layer_norm": Case(
        TWO | ROW, lambda x, y, w, b: functional.add_layer_norm(x, y, 8, w, b), OF_TWO),
    "add_rms_norm of a scaled branch": Case(
        TWO | ROW, lambda x, y, w, b: functional.add_rms_norm(
            x, y, 8, w, 1e-6, column_scale=b, row_scale=ROW_SCALE.to(x.dtype)), OF_TWO),
    "add_rms_norm without a residual": Case(
        X | ROW, lambda x, w, b: functional.add_rms_norm(x, None, 8, w, 1e-6, column_scale=b),
        [{"x": S0}, {"x": S1}]),
    "modulated_layer_norm": Case(
        X | {"scale": (4, 8), "shift": (4, 8)},
        lambda x, scale, shift: functional.modulated_layer_norm(x, 8, scale, shift),
        [S0, {"x": S1}]),
    "modulated_rms_norm of a gated sum": Case(
        TWO | {"scale": (4, 1, 8), "gate": (4, 1, 8)},
        lambda x, y, scale, gate: functional.modulated_rms_norm(
            x, 8, scale, residual=y, gate=gate, eps=1e-6), [S0, OF_TWO[1]]),
    "modulated_layer_norm by rows": Case(
        X | {"scale": (4, 6, 8)}, lambda x, scale: functional.modulated_layer_norm(x, 8, scale),
        [S0, S1]),
    "group_norm": Case(
        {"x": (4, 8, 3, 3)} | ROW,
        lambda x, w, b: functional.group_norm(x, 4, w, b, activation="silu"),
        [{"x": S0}, {"x": S1, "w": S0, "b": S0}]),
    # layers
    "causal_conv1d": Case(
        {"x": (4, 6, 8), "w": (6, 4), "b": (6,), "state": (4, 6, 3)},
        lambda x, w, b, state: functional.causal_conv1d(
            x, w, b, activation="silu", initial_state=state),
        [every(S0, "x", "state"), {"x": S1, "w": S0, "b": S0, "state": S1}]),
    "causal_conv1d of packed sequences": Case(
        {"x": (1, 6, 8), "w": (6, 4)},
        lambda x, w: functional.causal_conv1d(x, w, cu_seqlens=BEGINS), [{"x": S1, "w": S0}]),
    "selective_scan": Case(
        {"u": (4, 6, 8), "A": (6, 3), "B": (4, 3, 8), "C": (4, 3, 8), "D": (6,), "z": (4, 6, 8)},
        lambda u, A, B, C, D, z: functional.selective_scan(
            u, u.abs(), -A.abs(), B, C, D, z, delta_softplus=True),
        [every(S0, "u", "B", "C", "z"), {"u": S1, "A": S0, "D": S0, "z": S1}]),
    "mamba_chunk_scan": Case(
        {"x": (4, 9, 2, 8), "dt": (4, 9, 2), "A": (2,), "B": (4, 9, 1, 3), "C": (4, 9, 1, 3),
         "D": (2,)},
        lambda x, dt, A, B, C, D: functional.mamba_chunk_scan(
            x, dt, -A.abs(), B, C, 64, D, dt_softplus=True),
        [every(S0, "x", "dt", "B", "C"), {"x": S2, "dt": S2, "A": S0, "D": S0}]),
    "chunk_gated_delta_rule": Case(
        {"q": (4, 9, 2, 8), "k": (4, 9, 2, 8), "v": (4, 9, 2, 6), "g": (4, 9, 2),
         "beta": (4, 9, 2)},
        lambda q, k, v, g, beta: functional.chunk_gated_delta_rule(
            q, k, v, -g.abs(), beta.sigmoid(), use_qk_l2norm_in_kernel=True)[0],
        [every(S0, "q", "k", "v", "g", "beta"), every(S2, "q", "k", "v", "g", "beta")]),
    "fused_recurrent_kda": Case(
        {"q": (4, 9, 2, 8), "k": (4, 9, 2, 8), "v": (4, 9, 2, 6), "g": (4, 9, 2, 8),
         "beta": (4, 9, 2), "state": (4, 2, 8, 6)},
        lambda q, k, v, g, beta, state: functional.fused_recurrent_kda(
            q, k, v, -g.abs(), beta.sigmoid(), initial_state=state,
            use_qk_l2norm_in_kernel=True)[0],
        [every(S0, "q", "k", "v", "g", "beta", "state"),
         every(S2, "q", "k", "v", "g", "beta") | {"state": S1}]),
    "quantized_linear": Case(
        X | {"b": (16,), "y": (4, 6, 16)},
        quantized,
        [every(S0, "x", "y"), every(S1, "x", "y")]),
    "add_dropout that drops nothing": Case(
        TWO, lambda x, y: functional.add_dropout(x, y, 0.0), [S0, S1, S2]),
    "add_dropout of a scaled branch": Case(
        TWO | {"w": (8,)}, lambda x, y, w: functional.add_dropout(x, y, 0.0, column_scale=w),
        [OF_TWO[0], {"x": S2, "y": S2, "w": S0}]),
    "silu_mul": Case(TWO, lambda x, y: functional.silu_mul(x, y), [S0, S1, S2]),
    "gelu_mul of both halves in one": Case(X, lambda x: functional.gelu_mul(x), [S0, S1]),
    "linear": Case(
        LINEAR, lambda x, w, b: functional.linear(x, w, b),
        [{"x": S0}, {"x": S1}, {"w": S0, "b": S0}, {"x": S2, "w": S1}]),
    "linear without a bias": Case(
        X | {"w": (10, 8)}, lambda x, w: functional.linear(x, w),
        [{"x": S0}, {"w": S0}, {"x": S2, "w": S1}]),
    "linear with its epilogue": Case(
        LINEAR | {"y": (4, 6, 10)},
        lambda x, w, b, y: functional.linear(x, w, b, activation="gelu", residual=y),
        [*OF_TWO, {"w": S0, "b": S0, "y": S2}]),
    "rotary_embedding": Case(QK, rotated, [S0, S1, S2]),
    "rotary_embedding after norms": Case(
        QK | {"query_weight": (8,), "key_weight": (8,)}, rotated,
        [every(place, "q", "k") for place in (S0, S1, S2)]),
    "rotary_embedding by positions": Case(
        QK | {"k": (2, 4, 6, 8)},
        lambda q, k: functional.rotary_embedding(
            q, k, angles(q, 9).cos(), angles(q, 9).sin(), rotary_dim=4,
            positions=torch.tensor([[8, 0, 3, 3, 1, 2], [0, 1, 2, 3, 4, 5]])), [S0, S1, S2]),
    # attention
    "attention": Case(QKV, attention(), [S0, S1, {"q": S2}]),
    "causal attention at the bottom right": Case(
        QKV, attention(is_causal=True, causal_alignment="bottom_right", window_size=(3, -1)),
        [S0, S1, {"q": S2}]),
    "causal attention of more queries than keys": Case(
        QKV | {"q": (2, 4, 12, 8)}, attention(is_causal=True, causal_alignment="bottom_right"),
        [{"q": S2}]),
    "attention of a part of a sequence": Case(
        QKV, attention(is_causal=True, query_offset=4, key_offset=2), [S0, {"q": S2}]),
    "grouped attention": Case(
        QKV | every((2, 2, 8, 8), "k", "v"), attention(is_causal=True, softcap=5.0),
        [S0, S1, {"q": S2}]),
    "attention to one head": Case(
        QKV | every((2, 1, 8, 8), "k", "v"), attention(is_causal=True),
        [S0, {"q": S1}, {"q": S2}]),
    "attention with terms of its scores": Case(
        QKV | {"attn_mask": (2, 1, 6, 8), "alibi_slopes": (4,), "sinks": (4,)},
        attention(is_causal=True),
        [every(S0, *QKV, "attn_mask"), every(S1, *QKV) | every(S0, "alibi_slopes", "sinks"),
         {"q": S2, "attn_mask": S2}]),
    "attention with a block mask": Case(QKV, of_blocks, [S0, S1]),
    "varlen_attention": Case(
        {"q": (8, 4, 8), "k": (8, 2, 8), "v": (8, 2, 8)},
        lambda q, k, v: functional.varlen_attention(
            q, k, v, BEGINS, BEGINS, 5, 5, is_causal=True, enable_gqa=True, return_lse=True),
        [S1]),
    "merge_attention_states": Case(
        every((2, 4, 6, 8), "x", "y") | every((2, 4, 6), "lse", "m"),
        lambda x, y, lse, m: functional.merge_attention_states([x, y], [lse, m]), [S0, S1, S2]),
    # losses
    "cross_entropy of each row": Case(
        LOGITS, lambda x: functional.cross_entropy(
            x, TARGET, reduction="none", label_smoothing=0.1), [S0]),
    "cross_entropy": Case(
        LOGITS, lambda x: functional.cross_entropy(x, TARGET, CLASSES.to(x.dtype), z_loss=0.1),
        [S0], ONCE),
    "cross_entropy, summed": Case(
        LOGITS, lambda x: functional.cross_entropy(
            x * 1.0, TARGET, reduction="sum", inplace_backward=True), [S0], ONCE),
    "cross_entropy of classes in parts": Case(
        LOGITS, lambda x: functional.cross_entropy(x, TARGET, label_smoothing=0.1), [S1], TWICE),
    "linear_cross_entropy of classes in parts": Case(
        PRODUCT, of_products, [{"w": S0, "b": S0}], TWICE),
    "linear_cross_entropy": Case(PRODUCT, of_products, [{"x": S0}], ONCE),
    "linear_cross_entropy of each row": Case(
        {"x": (8, 6), "w": (8, 6)},
        lambda x, w: functional.linear_cross_entropy(x, w, TARGET, reduction="none"),
        [{"x": S0}]),
}  # fmt: skip


def drawn(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in case.shapes.items()
    }


def listed(results) -> list[torch.Tensor]:
    results = results if isinstance(results, tuple) else (results,)
    return [result for result in results if result is not None]


def upstream(outputs) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]


def of_whole(case: Case, dtype: torch.dtype) -> tuple[list, list]:
    tensors = {name: t.requires_grad_() for name, t in drawn(case, dtype).items()}
    outputs = listed(case.call(**tensors))
    gradients = torch.autograd.grad(outputs, list(tensors.values()), upstream(outputs))
    return [o.detach() for o in outputs], list(gradients)


def sent(counted: CommDebugMode) -> dict[str, int]:
    return {op.__name__: n for op, n in counted.get_comm_counts().items()}


def body(name: str, mesh_shape=(2,), places=None, collectives=None, compiled=False):
    """With places: lists of placements for the tensors that are not replicated."""
    case, mesh = CASES[name], mesh_of(mesh_shape)
    ref, base = (of_whole(case, dtype) for dtype in (torch.float64, torch.float32))
    call, count = case.call, CommDebugMode
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
        count = contextlib.nullcontext
    for place in case.places[-1:] if compiled else places or case.places:
        where = f"{name} {place}"
        placements = {
            tensor: [place.get(tensor, R)] if places is None else place.get(tensor, [R, R])
            for tensor in case.shapes
        }
        given = {
            tensor: spread(value, mesh, placements[tensor]).requires_grad_()
            for tensor, value in drawn(case, torch.float32).items()
        }
        with count() as counted:
            outputs = listed(call(**given))
            gradients = list(map(placed_as, outputs, upstream(outputs)))
            found = torch.autograd.grad(outputs, list(given.values()), gradients)
        if not compiled:
            counts = sent(counted)
            wanted = case.collectives if collectives is None else collectives
            assert counts == wanted, (where, counts)
        for tensor, gradient in zip(given, found, strict=True):
            for was, at in zip(given[tensor].placements, gradient.placements, strict=True):
                assert at == was or (was.is_replicate() and at.is_partial()), where
        assert all(isinstance(o, DTensor) for o in outputs), where
        for mine, stock in zip(outputs, base[0], strict=True):
            assert mine.stride() == stock.stride(), where
        for mine, right, stock in zip((*outputs, *found), sum(ref, []), sum(base, []), strict=True):
            numerics.assert_close(whole(mine), right, stock, case=where)


@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_of_the_whole(name):
    run(2, body, name)


ON_FOUR = {
    "layer_norm": [{"x": [S0, S1]}, {"x": [S1, S1]}],
    "linear": [
        {"x": [S0, R], "w": [R, S0], "b": [R, S0]},
        {"x": [S0, S2], "w": [R, S1]},
        {"w": [S0, S0], "b": [S0, S0]},
    ],
    "grouped attention": [{**every([S0, S1], *QKV)}, {**every([S0, R], "k", "v"), "q": [S0, S2]}],
    "causal_conv1d": [{"x": [S0, S1], "state": [S0, S1], "w": [R, S0], "b": [R, S0]}],
    "group_norm": [{"x": [S0, S1], "w": [R, S0], "b": [R, S0]}],
}


@pytest.mark.parametrize("name", ON_FOUR)
def test_meshes_of_two_dimensions(name):
    run(4, body, name, (2, 2), ON_FOUR[name], {})


@on_ranks(2)
def test_what_lies_elsewhere_is_moved():
    """Tensors that do not lie right are moved, as few bytes as can be."""
    mesh = mesh_of((2,))
    x = torch.randn(4, 6, 8)

    def part(value, place):
        return spread(value, mesh, [place])

    def counts(call):
        with CommDebugMode() as counted:
            result = call()
        return result, sent(counted)

    y, moved = counts(lambda: functional.rms_norm(part(x, S2), 8))
    assert moved == {"all_gather_into_tensor": 1}
    numerics.assert_close(y.full_tensor(), torch.rms_norm(x.double(), [8]), torch.rms_norm(x, [8]))
    summand = DTensor.from_local(x / 2, mesh, [Partial()], run_check=False)
    y, moved = counts(lambda: functional.rms_norm(summand, 8))
    assert moved == {"reduce_scatter_tensor": 1} and y.placements[0].is_shard()
    # Query in shards of tokens beside key in shards of tokens: key and value are gathered.
    q, k, v = (part(torch.randn(2, 3, 4, 8), S2) for _ in range(3))
    y, moved = counts(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert moved == {"all_gather_into_tensor": 2} and y.placements == (S2,)
    # A small target is gathered rather than logits cut up.
    logits = part(torch.randn(8, 8), R).requires_grad_()
    _, moved = counts(lambda: functional.cross_entropy(logits, part(TARGET, S0)).backward())
    assert moved == {"all_gather_into_tensor": 1}


@on_ranks(2)
def test_tensors_of_collectives_on_their_way_keep_their_gradients():
    """torch's tensor parallelism makes them."""
    mesh, x, upstream = mesh_of((2,)), torch.randn(4, 8), torch.randn(4, 8)
    found = []
    for is_async in (False, True):
        rows = spread(x, mesh, [S0]).requires_grad_()
        y = functional.rms_norm(rows.redistribute(placements=[R], async_op=is_async), 8)
        dy = spread(upstream, mesh, [R])
        found.append(torch.autograd.grad(y, rows, dy)[0].full_tensor())
    assert found[0].any() and torch.equal(*found)


def check_streams(drop: Callable, mesh, places: list) -> None:
    """Parts have streams of their own, replicas one, whatever their generators."""
    ones, rank = torch.ones(64, 64), torch.distributed.get_rank()
    for seed in (7, 7 + rank):
        torch.manual_seed(seed)
        x = spread(ones, mesh, places).requires_grad_()
        y = drop(x, 0.25)
        y.sum().backward()
        mine = y.to_local().detach()
        assert torch.equal(mine, x.grad.to_local())
        assert 0.6 < float((mine != 0).float().mean()) < 0.9
        at_each = zip(mesh.get_coordinate(), places, strict=True)
        place = torch.tensor([at if p.is_shard() else 0 for at, p in at_each])
        others, there = ([torch.empty_like(t) for _ in range(mesh.size())] for t in (mine, place))
        torch.distributed.all_gather(others, mine.contiguous())
        torch.distributed.all_gather(there, place)
        for other, at in zip(others, there, strict=True):
            assert torch.equal(other, mine) == torch.equal(at, place), (places, at, place)


def counted_dropout(x, p):
    """Replicas agree on a seed; nothing else is sent."""
    with CommDebugMode() as counted:
        y = functional.dropout(x, p)
    counts = sent(counted)
    assert counts == ({"broadcast_": 1} if x.placements == (R,) else {})
    return y


@on_ranks(2)
def test_streams_of_dropout():
    mesh, rank, ones = mesh_of((2,)), torch.distributed.get_rank(), torch.ones(64, 64)
    for place in (S0, S1, R):
        check_streams(counted_dropout, mesh, [place])
    q = spread(torch.randn(2, 2, 16, 8), mesh, [S1])
    value = torch.ones(2, 2, 16, 8)
    value = spread(value, mesh, [S1]).requires_grad_()
    y = functional.scaled_dot_product_attention(q, q, value, dropout_p=0.5)
    (again,) = torch.autograd.grad((y * y.detach()).sum(), value)
    # Linear in value: y = P value, so y . y = value . P^T y.
    torch.testing.assert_close((again * value).to_local().sum(), (y * y).to_local().sum())
    torch.manual_seed(rank)
    scale = functional.drop_path_scale(spread(ones, mesh, [R]), 0.5)
    branch = spread(ones, mesh, [S1])
    y = functional.add_dropout(branch, branch, 0.0, row_scale=scale).full_tensor()
    assert bool((y == y[:, :1]).all())


@on_ranks(2)
def test_caches_are_written_where_they_lie():
    mesh = mesh_of((2,))
    for place, paged in ((S0, False), (S1, False), (S2, True)):
        caches = [torch.randn(2, 4, 8, 8).transpose(1, 2 if paged else 1) for _ in range(2)]
        caches = [cache.contiguous() for cache in caches]
        q, k, v = torch.randn(2, 8, 1, 8), *(torch.randn(2, 4, 1, 8) for _ in range(2))
        options = {"cache_seqlens": torch.tensor([3, 5], dtype=torch.int32), "is_causal": True}
        if paged:
            options["block_table"] = torch.tensor([[0], [1]], dtype=torch.int32)
        new_place = S1 if paged else place
        mine = [spread(c.clone(), mesh, [place]) for c in caches]
        new = [spread(t, mesh, [new_place]) for t in (q, k, v)]
        given = (new[0], *mine, *new[1:])
        with torch.no_grad(), CommDebugMode() as counted:
            y = functional.attention_with_kv_cache(*given, **options)
            again = functional.attention_with_kv_cache(new[0], *mine, **options)
        with torch.no_grad():
            expected = functional.attention_with_kv_cache(q, *caches, k, v, **options)
        assert not counted.get_total_counts() and again.shape == y.shape
        assert torch.equal(y.full_tensor(), expected)
        for cache, right in zip(mine, caches, strict=True):
            assert torch.equal(cache.full_tensor(), right)
    # A cache that would have to be moved to be written.
    q, k, v = (spread(t, mesh, [S0]) for t in (q, k, v))
    moved = [spread(torch.zeros(2, 4, 8, 8), mesh, [S2]) for _ in range(2)]
    message = "must be placed alike, by whole heads or sequences, to be"
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        functional.attention_with_kv_cache(q, *moved, k, v, cache_seqlens=0)


@on_ranks(2)
def test_updates_of_states_in_place():
    """By samples, channels or heads, each process its part of the state."""
    mesh = mesh_of((2,))
    tokens, state = torch.randn(4, 6), torch.randn(4, 6, 3)
    weight, bias = torch.randn(6, 4), torch.randn(6)
    numbers = -torch.rand(6, 3)
    factors = torch.randn(2, 4, 3)
    scanned = (tokens, tokens.abs(), numbers, *factors, bias, tokens)
    of_heads = [t.unflatten(-1, (2, 3)) for t in (tokens, tokens.abs())]
    of_heads = (*of_heads, numbers.view(2, 3, 3), *factors[:, :, None], bias.view(2, 3))
    conv, update = functional.causal_conv1d_update, functional.selective_state_update
    cases = (
        (lambda h, x, w, b: conv(x, h, w, b, "silu"), state, (tokens, weight, bias), "0--", "100"),
        (update, state, scanned, "00-00-0", "110--01"),
        (update, state.view(4, 2, 3, 3), of_heads, "00-00-", "110--0"),
    )
    for call, before, given, *placed in cases:
        for dimension, names in enumerate(placed):
            places = [R if name == "-" else Shard(int(name)) for name in names]
            parts = [spread(t, mesh, [p]) for t, p in zip(given, places, strict=True)]
            after, own = before.clone(), spread(before.clone(), mesh, [Shard(dimension)])
            expected = call(after, *given)
            with CommDebugMode() as counted:
                found = call(own, *parts)
            assert not counted.get_total_counts()
            assert torch.equal(found.full_tensor(), expected)
            assert torch.equal(own.full_tensor(), after)


@on_ranks(2)
def test_rotary_embedding_in_place():
    mesh = mesh_of((2,))
    q = torch.randn(2, 4, 6, 8)
    table = angles(q, 6)
    for needs in (False, True):
        leaf = spread(q.clone(), mesh, [S1]).requires_grad_(needs)
        x = leaf * 1.0
        rotated, _ = functional.rotary_embedding(
            x, None, table.cos(), table.sin(), rotary_dim=4, inplace=True
        )
        assert rotated is x
        expected, _ = functional.rotary_embedding(q, None, table.cos(), table.sin(), rotary_dim=4)
        assert torch.equal(x.full_tensor(), expected)
    x.sin().sum().backward()
    whole_leaf = q.clone().requires_grad_()
    y, _ = functional.rotary_embedding(whole_leaf, None, table.cos(), table.sin(), rotary_dim=4)
    y.sin().sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), whole_leaf.grad)


@on_ranks(2)
def test_refusals():
    x, other = (spread(torch.randn(n, 8), mesh_of((2,)), [S0]) for n in (4, 6))
    functional.layer_norm(x, 8, torch.ones(8))
    message = "norm: weight must be a DTensor beside others to get a gradient, got a"
    with pytest.raises(RuntimeError, match=message):
        functional.layer_norm(x, 8, torch.ones(8, requires_grad=True))
    with pytest.raises(RuntimeError, match="norm: residual must have size 4 in dimension 0, got 6"):
        functional.add_layer_norm(x, other, 8)


def entry(input, weight, bias=None, *, eps=1e-5, options=()):
    """Parameters of every kind that entries have."""


entry.parameters = _parameters(entry)


@pytest.mark.parametrize(
    "args, kwargs",
    [((1,), {}), ((1, 2, 3, 4), {}), ((1, 2), {"weight": 3}), ((1, 2), {"width": 3}),
     ((1,), {"width": 3})],
)  # fmt: skip
def test_wrong_arguments_are_named_as_by_inspect(args, kwargs):
    with pytest.raises(TypeError) as expected:
        inspect.signature(entry).bind(*args, **kwargs)
    with pytest.raises(TypeError, match=f"^{re.escape(str(expected.value))}$"):
        tensors._given(entry, args, kwargs)


def test_arguments_are_named_in_the_order_of_the_signature():
    found = tensors._given(entry, (1,), {"options": {"a": 1}, "weight": 2})
    assert list(found.items()) == [
        ("input", 1), ("weight", 2), ("bias", None), ("eps", 1e-5), ("options", {"a": 1})
    ]  # fmt: skip
