"""Decoding inside torch: compile, which must not copy a cache, and export."""

import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from onepass.functional import attention_with_kv_cache
from tests.attention_decode.cases import assert_bits, int32, same_bits
from tests.support.allocations import allocated

OPS = torch.ops.onepass

# ---- compile ------------------------------------------------------------------------------------


def decode(query, k_cache, v_cache, key, value, used, **options):
    y, lse = attention_with_kv_cache(
        query, k_cache, v_cache, key, value, cache_seqlens=used, is_causal=True, return_lse=True,
        **options,
    )  # fmt: skip
    return y.transpose(1, 2).flatten(2), lse


def step_tensors(seq, batch=2, max_seq=64, dim=8):
    sizes = dict(query=(4, seq), key=(2, seq), value=(2, seq))
    return {name: torch.randn(batch, *size, dim) for name, size in sizes.items()}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_fullgraph_with_dynamic_shapes(backend, paged):
    """One graph serves every number of queries and new rows, every length and every batch."""
    torch._dynamo.reset()
    counter, frames = CompileCounterWithBackend(backend), []
    compiled = torch.compile(decode, fullgraph=True, dynamic=True, backend=counter)
    table = torch.randn(80, 4)
    more = {"rotary_cos": table, "rotary_sin": table, "alibi_slopes": torch.ones(4)}
    # No two sizes are equal at first, or torch would unify them.
    for seq, batch, used in ((5, 3, [0, 3, 40]), (2, 2, [5, 8]), (17, 6, [7, 0, 40, 1, 2, 9])):
        size = (4 * batch, 16, 2, 8) if paged else (batch, 2, 64, 8)
        caches = [torch.randn(size) for _ in range(2)]
        copies = [cache.clone() for cache in caches]
        t = step_tensors(seq, batch) | dict(used=int32(used)) | more
        if paged:
            t["block_table"] = torch.randperm(4 * batch).int().view(batch, 4)
        found = compiled(k_cache=caches[0], v_cache=caches[1], **t)
        expected = decode(k_cache=copies[0], v_cache=copies[1], **t)
        assert_bits((*found, *caches), (*expected, *copies))
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]


@pytest.mark.parametrize("as_tensor", [True, False])
def test_compile_counts_no_tokens(as_tensor):
    """Lengths that grow step by step, as tensors or as a number, cause no recompilation."""
    torch._dynamo.reset()
    counter, frames = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(decode, fullgraph=True, backend=counter)
    caches = [torch.zeros(2, 2, 64, 8) for _ in range(2)]
    for used in range(3, 7):
        t = step_tensors(1) | dict(used=int32([used] * 2) if as_tensor else used)
        compiled(k_cache=caches[0], v_cache=caches[1], **t)
        frames.append(counter.frame_count)
    assert frames[2] == frames[-1]


# ---- no cache is copied -------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A layer with its caches as buffers, in one tensor or in two."""

    def __init__(self, together: bool, max_seq: int = 4096):
        super().__init__()
        self.together = together
        if together:
            self.register_buffer("kv", torch.zeros(2, 2, 2, max_seq, 8))
        else:
            self.register_buffer("k_cache", torch.zeros(2, 2, max_seq, 8))
            self.register_buffer("v_cache", torch.zeros(2, 2, max_seq, 8))
        self.register_buffer("used", torch.zeros(2, dtype=torch.int32))

    def caches(self):
        return self.kv.unbind(0) if self.together else (self.k_cache, self.v_cache)

    def forward(self, query, key, value):
        y, _ = decode(query, *self.caches(), key, value, self.used)
        self.used += key.shape[2]
        return y


def stacked(query, kv, key, value, used):
    return decode(query, kv[0], kv[1], key, value, used)


def beside(query, kv, key, value, used):
    return decode(query, kv[..., :8], kv[..., 8:], key, value, used)


def twice(query, kv, key, value, used):
    """Two steps in one graph; the second reads rows that the first has written."""
    first = decode(query, kv[0], kv[1], key, value, used)[0]
    return first, decode(query, kv[0], kv[1], key, value, used + key.shape[2])[0]


def layers(query, keys, values, key, value, used):
    """A tensor of keys and one of values for all layers."""
    pairs = zip(keys.unbind(0), values.unbind(0), strict=True)
    return tuple(decode(query, k, v, key, value, used)[0] for k, v in pairs)


def ways() -> dict:
    """How a program may hold its caches: (the step, its arguments besides query, key, value)."""
    one = lambda: torch.zeros(2, 2, 4096, 8)  # noqa: E731
    kv = lambda: torch.zeros(2, 2, 2, 4096, 8)  # noqa: E731
    return {
        "two inputs": (decode, lambda: (one(), one())),
        "two views as inputs": (decode, lambda: tuple(kv().unbind(0))),
        "one input, kv[0] and kv[1]": (stacked, lambda: (kv(),)),
        "one input, two steps": (twice, lambda: (kv(),)),
        "one input, beside each other": (beside, lambda: (torch.zeros(2, 2, 4096, 16),)),
        "two inputs, of layers": (layers, lambda: (kv(), kv())),
        "buffers": (Layer(False), lambda: ()),
        "one buffer": (Layer(True), lambda: ()),
    }


# Inductor copies inputs that are parts of one tensor, whatever the operator.
COPIED = "two views as inputs"
# Where sizes are dynamic, it loses where a selected part begins (pytorch/pytorch#198068).
LOST = (COPIED, "one input, kv[0] and kv[1]", "one input, two steps", "two inputs, of layers")
CACHES = 2 * 2 * 2 * 4096 * 8 * 4  # bytes


def run_both(step, held, how: str):
    """A compiled step and its arguments, after one call with eager mode's results."""
    backend, _, dynamic = how.partition(", ")
    run = step
    if backend != "eager":
        run = torch.compile(step, fullgraph=True, dynamic=bool(dynamic), backend=backend)
    t = step_tensors(1)
    for x in held:
        x.normal_()
    own = [x.clone() for x in held]
    more = () if isinstance(step, Layer) else (int32([5, 3]),)
    given = [t["query"], *held, t["key"], t["value"], *more]
    found = run(*given)
    if not isinstance(step, Layer):  # its buffers have changed
        expected = step(t["query"], *own, t["key"], t["value"], *more)
        assert_bits((*found, *held), (*expected, *own))
    return run, given


@pytest.fixture
def compiled_anew():
    """Compiled without state from other tests, or from other runs of this one."""
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(automatic_dynamic_local_pgo=False),
        torch.no_grad(),
    ):
        yield


def uncopied() -> list:
    """Ways, and how they may be run, in which torch itself keeps caches where they are."""
    copied = {"eager": (), "inductor": (COPIED,), "inductor, dynamic": LOST}
    pairs = [(name, how) for how, names in copied.items() for name in ways() if name not in names]
    return [pytest.param(*pair, marks=() if i % 9 == 0 else pytest.mark.slow)
            for i, pair in enumerate(pairs)]  # fmt: skip


@pytest.mark.parametrize("name, how", uncopied())
def test_an_append_copies_no_cache(name, how, compiled_anew):
    """Not under functionalisation either, although that rewrites writes into inputs as copies."""
    step, caches = ways()[name]
    run, arguments = run_both(step, caches(), how)
    assert allocated(run, *arguments) < CACHES / 8


@pytest.mark.parametrize("name", LOST)
def test_parts_of_a_larger_cache_are_written_where_they_are(name, compiled_anew):
    """Or refused: nothing is written to a copy that torch would make."""
    step, caches = ways()[name]
    try:
        run_both(step, caches(), "inductor, dynamic")
    except RuntimeError as error:
        assert re.search("attention_decode_append: [kv]_cache must (begin|not lie)", str(error))


def test_caches_of_layers_as_inputs(compiled_anew):
    """One compiled step for parts of larger tensors that begin anywhere."""
    compiled = torch.compile(decode, fullgraph=True)
    keys, values = (torch.randn(3, 2, 2, 64, 8) for _ in range(2))
    own = keys.clone(), values.clone()
    for seq in (1, 3, 5):
        t = step_tensors(seq) | dict(used=int32([5, 3]))
        for layer in range(3):
            found = compiled(k_cache=keys[layer], v_cache=values[layer], **t)
            expected = decode(k_cache=own[0][layer], v_cache=own[1][layer], **t)
            assert_bits((*found, keys, values), (*expected, *own))


@pytest.mark.parametrize("how", ["compiled", "exported"])
def test_a_module_generates_as_in_eager(how):
    """With caches that are buffers."""
    torch._dynamo.reset()
    layers, seq = [Layer(True, 64), Layer(True, 64)], torch.export.Dim("seq", min=2, max=20)
    with torch.no_grad():
        if how == "compiled":
            program = torch.compile(layers[0], fullgraph=True, backend="aot_eager")
        else:
            t = step_tensors(5)
            options = {"dynamic_shapes": {name: {2: seq} for name in t}, "strict": False}
            program = torch.export.export(layers[0], (), t, **options).module()
        for rows in (9, 1, 5) if how == "compiled" else (9, 2, 5):
            t = step_tensors(rows)
            assert same_bits(program(**t), layers[1](**t))
            assert same_bits(program.kv, layers[1].kv) and torch.equal(program.used, layers[1].used)
