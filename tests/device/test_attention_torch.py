"""Attention on a CUDA device inside torch: streams, graphs, compile, a model, 64-bit sizes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from onepass import functional, numerics, reference
from tests.attention import cases as attention_cases
from tests.attention.cases import NAN, Case, assert_same, backward, forward
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
    to_device,
)
from tests.support.dtypes import BF16, F16, F32, F64

pytestmark = needs_device
attend = functional.scaled_dot_product_attention

# One of each kernel: tiles of every head dimension, multiply-adds, TF32, both kinds of scores,
# packed.
KERNELS = {
    "causal": Case(BF16, 64, heads=4, kv_heads=2, seq_q=200, seq_k=200, window_right=0),
    "full": Case(F16, 128, heads=2, seq_q=130, seq_k=200),
    "wide": Case(BF16, 256, heads=2, seq_q=130, seq_k=200, window_right=0, bottom_right=True),
    "everything": Case(
        BF16, 64, heads=4, kv_heads=2, seq_q=130, seq_k=200, window_left=100, window_right=0,
        bottom_right=True, bias="hq", mask="b", alibi="b", sinks=F32, softcap=3.0, dropout_p=0.2,
        dlse=True,
    ),
    "float32": Case(F32, 64, heads=4, kv_heads=2, seq_q=130, seq_k=200, bias="q", dlse=True),
    "tf32": Case(F32, 64, heads=4, kv_heads=2, seq_q=130, seq_k=200, dlse=True, tf32=True),
    "packed": Case(BF16, 64, heads=4, storage="packed", seq_q=130, seq_k=200, alibi="b"),
}  # fmt: skip
kernels = pytest.mark.parametrize("name", KERNELS)


def step(case: Case):
    """(tensors on the device, a function that runs forward and backward of these very tensors)."""
    t = to_device(case.tensors())

    def run(deterministic: bool = True) -> dict[str, torch.Tensor]:
        found = forward(case, t)
        return found | backward(case, t, found, deterministic=deterministic)

    return t, run


# ---- TF32 ----------------------------------------------------------------------------------------


@on_cuda_only
def test_float32_takes_tf32_where_torch_does(monkeypatch):
    """As torch's unfused function: by the numerics rule, and no better."""
    tensors = [randn(2, 4, seq, 64, requires_grad=True) for seq in (200, 300, 300)]
    upstream = randn(2, 4, 200, 64)

    def results(function, dtype=F32):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(dtype))]

    errors = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = results(F.scaled_dot_product_attention, F64)
        for allowed in (False, True):
            monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
            found, torchs = results(attend), results(F.scaled_dot_product_attention)
            for one, ref, base in zip(found, exact, torchs, strict=True):
                numerics.assert_close(one, ref, base, f"{allowed=}")
            errors.append([(o - r).abs().max() for o, r in zip(found, exact, strict=True)])
    assert all(rounded > 8 * full for full, rounded in zip(*errors, strict=True))


# ---- streams and graphs --------------------------------------------------------------------------


@on_cuda_only
@kernels
def test_work_is_on_the_current_stream(name):
    t, run = step(KERNELS[name])
    expected = run()
    assert_same(late([t["query"], t["value"], t["doutput"]], run), expected)


@on_cuda_only
@kernels
def test_cuda_graph_of_forward_and_backward(name):
    case = KERNELS[name]
    t, run = step(case)
    graph, found = captured(run)
    for draw in (1, 2):
        drawn = replace(case, draw=draw).tensors()
        for key, tensor in t.items():
            tensor.copy_(drawn[key])
        graph.replay()
        replayed = {key: result.clone() for key, result in found.items()}
        assert_same(replayed, dict(run()), f"{draw=}")


@on_cuda_only
@kernels
def test_cuda_graph_of_gradients_that_are_not_deterministic(name):
    """Their sums begin at zero in every replay."""
    case = KERNELS[name]
    t, run = step(case)
    graph, found = captured(lambda: run(deterministic=False))
    on_host = case.tensors()
    ref, base = (of(case, on_host) for of in (exact, attention_cases.base))
    for _ in range(3):
        graph.replay()
    for key, result in found.items():
        numerics.assert_close(result, ref[key], base[key], key)


def exact(case: Case, t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return attention_cases.definition(case, t, F64)


@on_cuda_only
def test_cuda_graph_through_autograd_with_dropout():
    """Each replay draws new numbers, the same in forward and backward."""
    q, k, v = (randn(2, 4, 128, 64, dtype=BF16, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        v.copy_(torch.eye(128, 64))

    def run():
        y = attend(q, k, v, dropout_p=0.5)
        return y, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

    graph, found = captured(run)
    outputs = []
    for _ in range(3):
        graph.replay()
        outputs.append(found[0].clone())
        assert all(tensor.isfinite().all() for tensor in found)
    dropped = [output == 0 for output in outputs]
    assert not torch.equal(dropped[0], dropped[1]) and not torch.equal(dropped[1], dropped[2])


def test_nothing_waits_for_the_device():
    """Neither forward nor backward, nor the second derivative of a dense call."""
    for case in KERNELS.values():
        _, run = step(case)
        with nothing_waits():
            run()
            run(deterministic=False)
    q, k, v = (randn(2, 4, 70, 32, requires_grad=True) for _ in range(3))
    mask = torch.ones(70, 70, dtype=torch.bool, device=DEVICE).tril()
    slopes, sinks = torch.rand(4, device=DEVICE), randn(4, requires_grad=True)
    cu_seq = torch.tensor([0, 30, 70], dtype=torch.int32, device=DEVICE)
    pages = torch.arange(10, dtype=torch.int32, device=DEVICE).view(2, 5)
    used = torch.tensor([5, 40], dtype=torch.int32, device=DEVICE)
    rows = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    pool = [randn(10, 8, 4, 32, requires_grad=True) for _ in range(2)]
    module = onepass.nn.MultiheadAttention(128, 4, dropout=0.1, batch_first=True).to(DEVICE)
    x, padded = randn(2, 70, 128), torch.zeros(2, 70, dtype=torch.bool, device=DEVICE)
    batch = torch.nested.nested_tensor([x[0], x[1, :9]])

    def calls():
        yield attend(q, k, v, mask, dropout_p=0.1, sinks=sinks, alibi_slopes=slopes)
        yield attend(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True, return_lse=True)[1]
        yield attend(q[0], k, v[:1], mask, window_size=(9, 0), causal_alignment="bottom_right")
        yield functional.varlen_attention(*rows, cu_seq, cu_seq, 40, 40, dropout_p=0.2)
        yield functional.varlen_attention(
            rows[0], *pool, cu_seq, None, 40, 40, seqused_k=used, block_table=pages
        )
        yield module(x, x, x, padded, need_weights=False)[0]
        yield module(batch, batch, batch, need_weights=False)[0].values()
        with torch.autocast(DEVICE.type, BF16):
            yield attend(q, k, v, is_causal=True)
        with torch.no_grad():
            paged = dict(seqused_k=used, block_table=pages)
            yield functional.varlen_attention(rows[0], *pool, cu_seq, None, 40, 40, **paged)

    with nothing_waits():
        for output in calls():
            if output.requires_grad:
                output.float().sum().backward()
        y = attend(q, k, v, dropout_p=0.3, is_causal=True)
        (first,) = torch.autograd.grad(y.sum(), q, create_graph=True)
        first.pow(2).sum().backward()


@pytest.mark.skipif(not ON_CUDA or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    t = KERNELS["causal"].tensors()
    expected, found = (
        forward(KERNELS["causal"], {name: x.to(device) for name, x in t.items()})
        for device in (DEVICE, last)
    )
    assert found["output"].device == last and torch.cuda.current_device() == 0
    assert_same({n: x.cpu() for n, x in found.items()}, {n: x.cpu() for n, x in expected.items()})


# ---- torch ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    """With torch's module and a call of torch's function, as models have them."""

    def __init__(self, width: int = 128, heads: int = 4, p: float = 0.0):
        super().__init__()
        self.heads, self.p = heads, p
        self.projection, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.cross = nn.MultiheadAttention(width, heads, dropout=p, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.projection(y).view(*y.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.cross(x, x, x, need_weights=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", pytest.param("reduce-overhead", marks=on_cuda_only)])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_compile(mode, dtype):
    torch._dynamo.reset()
    block = Attention().to(DEVICE)
    onepass.swap(block)
    compiled = torch.compile(block, fullgraph=True, dynamic=mode == "default", mode=mode)
    for rows in (40, 40, 40, 56) if mode == "default" else (40, 40, 40):
        x, g = randn(2, rows, 128), randn(2, rows, 128)
        found = []
        for function in (block, compiled):
            leaf = x.clone().requires_grad_()
            with torch.autocast(DEVICE.type, dtype, enabled=dtype is not F32):
                y = function(leaf)
            gradients = torch.autograd.grad(y, [leaf, *block.parameters()], g.to(y.dtype))
            found.append([tensor.detach().clone() for tensor in (y, *gradients)])
        tolerance = 1e-3 if dtype is F32 else 5e-2  # inductor sums the Linear and norm otherwise
        for eager, ours in zip(*found, strict=True):
            scale = eager.abs().max().item()
            torch.testing.assert_close(ours, eager, rtol=0.0, atol=tolerance * scale)


# ---- a whole model -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_swap_and_verify(torchs_products, dtype):
    model, x = Attention(p=0.1).to(DEVICE, dtype), randn(2, 70, 128, dtype=dtype)
    report = onepass.swap(model)
    assert {entry["name"] for entry in report.swapped} == {"", "norm", "cross"}
    assert not any("CPU only" in note for note in report.notes)
    result = report.verify(x)
    assert result.ok and result.judged == "float64", str(result)
    found = onepass.explain(lambda: model(x).sum().backward())
    assert sum(call["count"] for call in found.calls if call["op"] == "attention") == 2
    onepass.unswap(model)
    assert type(model.cross) is nn.MultiheadAttention


# ---- more than 2^31 elements ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_offsets_beyond_32_bits(dtype):
    """Two heads 2^31 + 5 elements apart; the memory between them is never touched."""
    needs_gigabytes(30 if dtype is F32 else 16)
    apart = 2**31 + 5 if ON_CUDA else 2**13 + 5
    case = Case(dtype, 64, batch=1, seq_q=70, seq_k=90, window_right=0)
    t, run = step(case)
    expected = run()
    for name in ("query", "key", "doutput"):
        shape = t[name].shape
        buffer = torch.empty(apart + 64 * shape[2], dtype=dtype, device=DEVICE)
        t[name] = buffer.as_strided(shape, (0, apart, 64, 1)).copy_(t[name])
    assert_same(run(), expected)


@on_cuda_only
def test_keys_and_pages_far_apart():
    needs_gigabytes(24)
    case = Case(BF16, 64, batch=1, seq_q=9, seq_k=40, heads=4, kv_heads=1)
    t = to_device(case.tensors())
    expected = forward(case, t)
    apart = 2**31 // 39 + 8
    for name in ("key", "value"):
        buffer = torch.full((apart * 39 + 64,), NAN, dtype=BF16, device=DEVICE)
        t[name] = buffer.as_strided((1, 1, 40, 64), (0, 0, apart, 1)).copy_(t[name])
    assert_same(forward(case, t), expected)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_more_than_2_31_elements(head_dim):
    """Of every tensor; sequences do not depend on their batch."""
    needs_gigabytes(50)
    seq, heads = 64, 16
    batch = 2**31 // (seq * heads * head_dim) + 2 if ON_CUDA else 5
    shape = (batch, heads, seq, head_dim)
    q, k, v = (torch.empty(shape, dtype=BF16, device=DEVICE).normal_() for _ in range(3))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    y = attend(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(y, (q, k, v), q.detach())
    for part in (slice(0, 2), slice(batch - 2, batch)):
        leaves = [x.detach()[part].clone().requires_grad_() for x in (q, k, v)]
        assert torch.equal(attend(*leaves, is_causal=True), y[part])
        wide, own = ([x.detach().to(of).requires_grad_() for x in leaves] for of in (F64, BF16))
        formula = lambda *of: reference.attention.attention(*of, window_right=0)[0]  # noqa: E731
        ref, base = (torch.autograd.grad(formula(*of), of, of[0].detach()) for of in (wide, own))
        for mine, exactly, stock in zip(gradients, ref, base, strict=True):
            numerics.assert_close(mine[part], exactly, stock)


# ---- for compute-sanitizer -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["packed", "causal"])
def test_small_for_sanitizers(name):
    """Through autograd, with atomic sums."""
    t, run = step(replace(KERNELS[name], seq_q=40, seq_k=70))
    run(deterministic=False)
    if ON_CUDA:
        torch.cuda.synchronize()
