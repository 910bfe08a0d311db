"""Attention against a KV cache on a CUDA device: caches that live there, graphs, compile.

Options are tested by the executor "device", on copies of tensors. Rows that are not keys are
NaN, and memory that must not be written is compared bit for bit.
"""

import pytest
import torch

import onepass
from onepass.functional import attention_with_kv_cache, merge_attention_states
from tests.attention_decode import cases as attention_decode_cases
from tests.attention_decode.cases import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    Case,
    assert_same,
    call,
    int32,
    ours,
    same_bits,
    with_copied_caches,
)
from tests.device.common import (
    DEVICE,
    ON_CUDA,
    captured,
    late,
    needs_device,
    needs_gigabytes,
    nothing_waits,
    on_cuda_only,
    randn,
)

pytestmark = needs_device
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def on_device(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The caches with the memory around them."""
    moved = {name: tensor.to(DEVICE) for name, tensor in t.items()}
    for name in ("k_cache", "v_cache"):
        cache = t[name]
        storage = cache.new_empty(0).set_(cache.untyped_storage()).to(DEVICE)
        moved[name] = storage.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    return moved


def check(case: Case) -> None:
    """Every result, and every row that was appended, by the numerics rule."""

    def compute(drawn: Case):
        t = drawn.tensors()
        found = ours(drawn, on_device(t))
        assert found["output"].dtype is drawn.dtype and found["lse"].dtype is F32
        definition = attention_decode_cases.definition(drawn, t, F64)
        return found, definition, attention_decode_cases.base(drawn, t)

    attention_decode_cases.check(case, compute)


def of_device(case: Case, t: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    return ours(case, on_device(case.tensors() if t is None else t))


# ---- values --------------------------------------------------------------------------------------


# As servers have them.
REALISTIC = {
    "long": Case(BF16, 128, heads=32, kv_heads=8, lengths=(16_383,), new_rows=1),
    "batch": Case(BF16, 128, heads=8, kv_heads=2, lengths=(900, 12, 2048, 1, 333, 1500, 64, 700),
                  new_rows=1, page_size=16, rotary="halves"),
    "small": Case(F16, 64, heads=12, kv_heads=12, lengths=(1023, 500), new_rows=1),
}  # fmt: skip


@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_sizes(name):
    check(REALISTIC[name])


def test_merged_states_are_the_attention_to_all_keys():
    case = Case(BF16, 64, heads=4, kv_heads=2, lengths=(300, 300), room=0)
    t = on_device(case.tensors())
    query, keys, values = t["query"], t["k_cache"], t["v_cache"]
    with nothing_waits():
        parts = [
            attention_with_kv_cache(query, k, v, scale=case.scale, return_lse=True)
            for k, v in zip(keys.split(110, 2), values.split(110, 2), strict=True)
        ]
        output, lse = merge_attention_states(*zip(*parts, strict=True))
    expected = attention_decode_cases.definition(case, case.tensors(), F64)
    base = attention_decode_cases.base(case, case.tensors())
    onepass.numerics.assert_close(output, expected["output"], base["output"])
    onepass.numerics.assert_close(lse, expected["lse"], base["lse"])


# ---- contracts -----------------------------------------------------------------------------------

STORED = {
    "long": Case(BF16, 128, heads=8, kv_heads=2, lengths=(1500, 70, 0), new_rows=1),
    "drafted": Case(F16, 64, heads=4, kv_heads=1, seq_q=6, lengths=(700, 129), new_rows=6,
                    window_right=0),
    "float32": Case(F32, 40, lengths=(600, 130), seq_q=2, window_left=500, window_right=0,
                    alibi="", new_rows=1, sinks=F32),
}  # fmt: skip
stored = pytest.mark.parametrize("name", STORED)


@stored
def test_repeats_bit_for_bit(name):
    case = STORED[name]
    first = of_device(case)
    for _ in range(5):
        assert_same(of_device(case), first)


# ---- the device's own time line ------------------------------------------------------------------

ROTARY = torch.outer(torch.arange(64.0), 100.0 ** (-torch.arange(16) / 16))


class Layer(torch.nn.Module):
    """A decoding step on caches that it keeps, each step counted on the device."""

    def __init__(self, dtype: torch.dtype, paged: bool):
        super().__init__()
        size = (12, 16, 2, 32) if paged else (3, 2, 64, 32)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(size, dtype=dtype))
        self.register_buffer("used", int32([5, 0, 20]))
        table = torch.randperm(12).int().view(3, 4)
        self.register_buffer("table", table if paged else None)
        self.register_buffer("cos", ROTARY.cos())
        self.register_buffer("sin", ROTARY.sin())

    def forward(self, query, key, value):
        y = attention_with_kv_cache(
            query, self.k_cache, self.v_cache, key, value, cache_seqlens=self.used,
            block_table=self.table, is_causal=True, rotary_cos=self.cos, rotary_sin=self.sin,
        )  # fmt: skip
        self.used += key.shape[2]
        return y


def step_tensors(dtype: torch.dtype, rows: int = 1) -> list[torch.Tensor]:
    sizes = ((3, 4, rows, 32), (3, 2, rows, 32), (3, 2, rows, 32))
    return [randn(*size, dtype=dtype) for size in sizes]


paged = pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])


@on_cuda_only
@paged
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_cuda_graph_of_a_decoding_step(paged, dtype):
    """Each replay is a step of its own: lengths are read on the device."""
    torch.manual_seed(0)
    layer = Layer(dtype, paged).to(DEVICE)
    eager = Layer(dtype, paged).to(DEVICE)
    eager.table = layer.table
    inputs = step_tensors(dtype)
    with torch.no_grad():
        graph, found = captured(lambda: layer(*inputs))
        eager.load_state_dict(layer.state_dict())
        for _ in range(9):
            for tensor, value in zip(inputs, step_tensors(dtype), strict=True):
                tensor.copy_(value)
            graph.replay()
            replayed = found.clone()
            assert same_bits(replayed, eager(*inputs))
    for name, buffer in eager.state_dict().items():
        assert torch.equal(buffer, layer.state_dict()[name]), name


@on_cuda_only
def test_work_is_on_the_current_stream():
    case = Case(BF16, 64, lengths=(700, 129), new_rows=1)
    t = on_device(case.tensors())
    expected = call(case, with_copied_caches(t))
    found = late([t["query"], t["key"], t["value"]], lambda: list(call(case, t)))
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other)


def test_nothing_waits_for_the_device():
    with torch.no_grad():
        layers = [Layer(dtype, paged).to(DEVICE) for dtype in (F32, BF16) for paged in (0, 1)]
        steps = [step_tensors(layer.k_cache.dtype, rows) for layer in layers for rows in (1, 3)]
        caches = [randn(3, 2, 64, 32) for _ in range(2)]
        with nothing_waits():
            for number, step in enumerate(steps):
                layers[number // 2](*step)
            for used in (7, None, layers[0].used):
                attention_with_kv_cache(steps[0][0], *caches, cache_seqlens=used, return_lse=True)
            attention_with_kv_cache(*steps[0][:1], *caches, *steps[0][1:], cache_seqlens=7)
            with torch.autocast(DEVICE.type, BF16):
                attention_with_kv_cache(steps[0][0], *caches, is_causal=True)


@on_cuda_only
def test_a_recorded_call_does_not_wait_either():
    """explain prints the room of a cache: the rows in use are known on the device alone."""
    layer, step = Layer(BF16, False).to(DEVICE), step_tensors(BF16)

    def run():
        with torch.no_grad(), nothing_waits():
            layer(*step)

    (recorded,) = onepass.explain(run).calls
    assert recorded["level"] == "cuda" and recorded["op"] == "attention_decode_append"
    assert "up to 64 keys" in recorded["arguments"]


# ---- torch ---------------------------------------------------------------------------------------


@pytest.mark.slow
@paged
def test_a_compiled_module_decodes_as_in_eager(paged):
    torch._dynamo.reset()
    layer = Layer(BF16, paged).to(DEVICE)
    eager = Layer(BF16, paged).to(DEVICE)
    eager.table = layer.table
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        for rows in (7, 1, 1, 3, 1):
            t = step_tensors(BF16, rows)
            assert same_bits(compiled(*t), eager(*t))
    for name, buffer in eager.state_dict().items():
        assert torch.equal(buffer, layer.state_dict()[name]), name


# ---- more than 2^31 elements ---------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [0, 16])
def test_caches_of_more_than_2_31_elements(page_size):
    """The last of the sequences is as it is alone."""
    needs_gigabytes(20)
    keys, heads, dim = 4096, 8, 128
    batch = 2**31 // (keys * heads * dim) + 2 if ON_CUDA else 3
    size = (batch, heads, keys, dim)
    if page_size:
        size = (batch * keys // page_size, page_size, heads, dim)
    k_cache, v_cache = (torch.empty(size, dtype=BF16, device=DEVICE).normal_() for _ in range(2))
    query = randn(batch, 32, 1, dim, dtype=BF16)
    key, value = (randn(batch, heads, 1, dim, dtype=BF16) for _ in range(2))
    used = torch.full((batch,), keys - 1, dtype=torch.int32, device=DEVICE)
    table = None
    if page_size:
        pages = torch.arange(batch * keys // page_size, dtype=torch.int32, device=DEVICE)
        table = pages.view(batch, -1)
    with torch.no_grad():
        found = attention_with_kv_cache(
            query, k_cache, v_cache, key, value, cache_seqlens=used, block_table=table
        )
        for b in (0, batch - 1):
            k, v = (x.view(batch, -1, heads, dim)[b : b + 1].transpose(1, 2) if page_size
                    else x[b : b + 1] for x in (k_cache, v_cache))  # fmt: skip
            assert torch.equal(k[:, :, -1:], key[b : b + 1])
            alone = attention_with_kv_cache(query[b : b + 1], k, v)
            assert same_bits(alone, found[b : b + 1])


# ---- for compute-sanitizer -----------------------------------------------------------------------


SMALL = {
    "append": dict(new_rows=1),
    "drafted": dict(seq_q=8, new_rows=8, window_right=0),
    "everything": dict(
        head_dim=72, heads=6, kv_heads=2, seq_q=3, new_rows=3, window_left=100, window_right=0,
        softcap=3.0, alibi="b", sinks=F32, rotary="interleaved", rotary_dim=20, page_size=16,
        pads=(2, 0), lengths=(300, 17, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_small_for_sanitizers(name):
    for dtype in (BF16, F32):
        case = Case(dtype, **SMALL[name])
        call(case, on_device(case.tensors()))
    if ON_CUDA:
        torch.cuda.synchronize()
