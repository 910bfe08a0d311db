"""The operators on a CUDA device inside torch: streams, graphs, compile, errors, a model, sizes
beyond 32 bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from onepass import functional, reference
from tests.device.common import (
    BF16,
    DEVICE,
    F16,
    F32,
    ON_CUDA,
    OTHER,
    assert_equal,
    captured,
    check_draws,
    late,
    make,
    needs_device,
    needs_gigabytes,
    on_cuda_only,
    randn,
)
from tests.norm import cases as norm_cases
from tests.norm.cases import Case, check, dtypes, kinds
from tests.support.seeds import drawn_seed

pytestmark = needs_device


# ---- streams and graphs --------------------------------------------------------------------------


def step(case: Case):
    """A function that runs forward and backward of a case on the very same tensors each time."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in case.tensors().items()}
    upstream = [torch.randn_like(leaves["input"]) for _ in range(2 if "residual" in leaves else 1)]

    def run():
        rest = [case.shape, leaves["weight"], *([leaves["bias"]] if "bias" in leaves else [])]
        first = [leaves[name] for name in ("input", "residual") if name in leaves]
        outputs = getattr(functional, case.name)(*first, *rest)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return *outputs, *torch.autograd.grad(outputs, list(leaves.values()), upstream)

    return leaves, run


@on_cuda_only
@kinds
def test_work_is_on_the_current_stream(rms, residual):
    leaves, run = step(make(rms, 300, 1000, residual=residual))
    expected = run()
    assert_equal(expected, late([leaves["input"]], run))


@on_cuda_only
@kinds
@pytest.mark.parametrize("cols", [1000, 2056, 16395])
def test_cuda_graph_of_forward_and_backward(rms, residual, cols):
    leaves, run = step(make(rms, 64, cols, residual=residual))
    graph, found = captured(run)
    for seed in (1, 2):
        with torch.no_grad():
            torch.manual_seed(seed)
            for leaf in leaves.values():
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        replayed = [tensor.clone() for tensor in found]
        assert_equal(run(), replayed, f"{seed=}")


@on_cuda_only
def test_each_replay_of_a_graph_drops_other_elements():
    x = torch.ones(10_000, device=DEVICE, requires_grad=True)

    def run():
        y = functional.dropout(x, 0.5)
        return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

    graph, (y, dx) = captured(run)
    masks = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, dx) and set(y.unique().tolist()) == {0.0, 2.0}
        masks.append(y.detach().clone())
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.skipif(not ON_CUDA or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    check(*(norm_cases.make(False, 33, 1000, seed=seed, device=last) for seed in range(4)))
    x = torch.ones(1000, device=last)
    assert functional.dropout(x, 0.5).device == last and torch.cuda.current_device() == 0


# ---- torch ---------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_forward(rms, residual, grad):
    case = make(rms, (3, 2), 10, residual=residual)
    tensors = [getattr(case, name) for name in ("input", "residual", "weight", "bias")]
    arguments = (*tensors, None, [10], int(rms), 1e-5, 0.0, 0.0, None, None, grad)
    torch.library.opcheck(torch.ops.onepass.norm_forward.default, arguments)


@pytest.mark.parametrize("mask", [0, 1, 4, 15])
def test_opcheck_backward(mask):
    x, w = randn(3, 2, 10), randn(10)
    _, _, mean, rstd = norm_cases.raw_forward(x, weight=w, bias=w, eps=1e-5, save_statistics=True)
    arguments = (x, x, x, w, w, None, mean, rstd, [10], False, 0.0, 0.0, BF16, None, mask)
    torch.library.opcheck(torch.ops.onepass.norm_backward.default, arguments)


@pytest.mark.parametrize("residual", [False, True])
def test_opcheck_dropout(residual):
    x, seed = randn(10, 3).t(), torch.tensor([1, 2], device=DEVICE)
    arguments = (x, x if residual else None, seed, 0.3, None)
    torch.library.opcheck(torch.ops.onepass.dropout_forward.default, arguments)


class Block(nn.Module):
    """A pre-norm block with every kind of norm, and dropout."""

    def __init__(self, width: int = 64, p: float = 0.0):
        super().__init__()
        self.first, self.add = onepass.nn.LayerNorm(width), onepass.nn.AddRMSNorm(width)
        self.mlp, self.drop = nn.Linear(width, width), onepass.nn.Dropout(p)

    def forward(self, x):
        y, stream = self.add(self.drop(self.mlp(self.first(x))), x)
        return y * torch.tanh(stream)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", pytest.param("reduce-overhead", marks=on_cuda_only)])
def test_compile(mode):
    torch._dynamo.reset()
    block = Block().to(DEVICE)
    compiled = torch.compile(block, fullgraph=True, dynamic=mode == "default", mode=mode)
    for rows in (40, 40, 40, 56) if mode == "default" else (40, 40, 40):
        x, g = randn(rows, 64), randn(rows, 64)
        found = []
        for function in (block, compiled):
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            gradients = torch.autograd.grad(y, [leaf, *block.parameters()], g)
            found.append([tensor.detach().clone() for tensor in (y, *gradients)])
        for eager, ours in zip(*found, strict=True):
            # The operators are the same in both; inductor may sum the Linear and tanh otherwise.
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compile_with_dropout_under_autocast():
    torch._dynamo.reset()
    block = Block(p=0.5).to(DEVICE)
    compiled = torch.compile(block, fullgraph=True)
    x, outputs = randn(40, 64), []
    for function in (block, compiled):
        with torch.autocast(DEVICE.type, BF16):
            outputs.append(function(x.clone().requires_grad_()))
        outputs[-1].float().sum().backward()
    eager, ours = outputs
    assert ours.dtype == eager.dtype and ours.shape == eager.shape and not ours.isnan().any()


@pytest.mark.parametrize("autocast_dtype", [BF16, F16], ids=str)
@dtypes
def test_dtypes_under_autocast_are_torchs(dtype, autocast_dtype):
    x, w = randn(2, 8, dtype=dtype), randn(8, dtype=dtype)
    for name in ("layer_norm", "rms_norm"):
        with torch.autocast(DEVICE.type, dtype=autocast_dtype):
            ours = getattr(functional, name)(x.clone().requires_grad_(), (8,), w)
            stock = getattr(F, name)(x, (8,), w)
            assert functional.dropout(x, 0.5).dtype == F.dropout(x, 0.5).dtype
        assert ours.dtype == stock.dtype
        ours.float().sum().backward()


# ---- errors --------------------------------------------------------------------------------------


def test_messages():
    x, w = randn(4, 6), randn(6)
    here = str(x.device)
    device = rf"must be on the device of input, {here}, got {OTHER}"
    wrong = {
        rf"layer_norm: weight {device}": lambda: functional.layer_norm(x, 6, w.to(OTHER)),
        rf"layer_norm: bias {device}": lambda: functional.layer_norm(x, 6, w, w.to(OTHER)),
        rf"rms_norm: weight {device}": lambda: functional.rms_norm(x, 6, w.to(OTHER)),
        rf"add_rms_norm: residual {device}": lambda: functional.add_rms_norm(x, x.to(OTHER), 6),
        rf"add_dropout: residual {device}": lambda: functional.add_dropout(x, x.to(OTHER), 0.5),
        r"layer_norm: weight must have shape \(6,\), got \(4,\)": (
            lambda: functional.layer_norm(x, 6, x[:, 0])
        ),
        "rms_norm: input must have dtype float32, bfloat16, float16 or float64, got int64": (
            lambda: functional.rms_norm(x.long(), 6)
        ),
    }
    if ON_CUDA:
        wrong[rf"rms_norm: weight must be on the device of input, cpu, got {here}"] = lambda: (
            functional.rms_norm(x.cpu(), 6, w)
        )
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{message}"):
            call()
    check_draws(False, 4, 6)  # and the device goes on


# ---- a whole model -------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.norm, self.last = nn.LayerNorm(width), nn.RMSNorm(width)
        self.mlp, self.drop = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.last(x + self.drop(self.mlp(self.norm(x)))))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_swap_and_verify(torchs_products, dtype):
    model = Model().to(DEVICE, dtype)
    ids = (torch.arange(24).reshape(2, 12) % 11).to(DEVICE)
    report = onepass.swap(model)
    assert sorted(entry["kind"] for entry in report.swapped) == ["dropout", "norm", "norm"]
    result = report.verify(ids)
    assert result.ok and result.judged == "float64", str(result)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    onepass.unswap(model)
    assert type(model.norm) is nn.LayerNorm


# ---- more than 2^31 elements ---------------------------------------------------------------------


@pytest.mark.parametrize("rms", [False, True])
def test_norm_of_more_than_2_31_elements(rms):
    needs_gigabytes(16)
    cols = 4096
    rows = 2**31 // cols + 3 if ON_CUDA else 30
    x = torch.empty(rows, cols, dtype=BF16, device=DEVICE).normal_().requires_grad_()
    weight = randn(cols, dtype=BF16)
    norm = functional.rms_norm if rms else functional.layer_norm
    y = norm(x, cols, weight)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    for part in (slice(0, 5), slice(rows - 5, rows)):  # rows do not depend on their batch
        few = x[part].detach().clone().requires_grad_()
        expected = norm(few, cols, weight)
        (gradient,) = torch.autograd.grad(expected, few, few.detach())
        assert torch.equal(y[part], expected) and torch.equal(dx[part], gradient)


@on_cuda_only
def test_offsets_beyond_32_bits():
    needs_gigabytes(6)
    buffer = torch.empty(2**31 + 5 + 64, dtype=BF16, device=DEVICE)
    case = Case(False, buffer.as_strided((2, 64), (2**31 + 5, 1)), weight=randn(64))
    case.input.copy_(randn(2, 64))
    check(case)


def test_dropout_of_more_than_2_31_elements():
    needs_gigabytes(10)
    count, tail = 2**31 + 4096 if ON_CUDA else 12_288, 4096
    seed = drawn_seed(5, DEVICE)
    torch.manual_seed(5)
    y = functional.dropout(torch.ones(count, dtype=BF16, device=DEVICE), 0.5)
    low, high = (int(value) & 0xFFFFFFFFFFFFFFFF for value in seed)
    block = torch.arange((count - tail) // 8, count // 8, device=DEVICE)
    zero = torch.zeros_like(block)
    words = reference.dropout.philox4x32(
        (low & 0xFFFFFFFF, low >> 32), (block, zero, zero, zero + (high & 0xFFFFFFFF))
    )
    halves = [(word >> shift) & 0xFFFF for word in words for shift in (0, 16)]
    kept = torch.stack(halves, dim=1).flatten() >= 32768
    assert torch.equal(y[-tail:], kept.to(BF16) * 2)
