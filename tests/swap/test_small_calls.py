"""Calls too small to gain run torch's own kernel, and the record says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import _dispatch_log
from onepass._policy import small_calls
from tests.swap.conftest import BOUNDS
from tests.swap.foreign_norms import LayerNormOverridden

LEAST, LEAST_ATTENTION, LEAST_LINEAR = BOUNDS.values()
TRAINING, INFERENCE = LEAST[torch.float32]


pytestmark = pytest.mark.usefixtures("users_bounds", "one_thread")


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.into, self.drop = nn.Linear(64, 192), nn.Dropout(dropout)

    def forward(self, x):
        query, key, value = self.into(x)[:, None].chunk(3, -1)
        dropped = self.drop.p if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropped)


def kernel_of(module, *args) -> str:
    (call,) = onepass.explain(module, *args).calls
    return call["kernel"]


def ours(module, rows: int, dtype=torch.float32, training: bool = True) -> bool:
    cols = module.weight.shape[0]
    with torch.set_grad_enabled(training):
        kernel = kernel_of(module, torch.randn(rows, cols, dtype=dtype))
    assert kernel in ("norm_forward_kernel", "torch.nn.functional.layer_norm"), kernel
    return kernel == "norm_forward_kernel"


@pytest.mark.parametrize("make", [nn.LayerNorm, LayerNormOverridden])
def test_the_bound(make):
    module = make(256)
    report = onepass.swap(module)
    assert report.swapped and any("torch's own kernel" in note for note in report.notes)
    assert ours(module, TRAINING // 256) and not ours(module, TRAINING // 256 - 1)
    assert ours(module, INFERENCE // 256, training=False)
    assert not ours(module, INFERENCE // 256 - 1, training=False)


def test_the_bound_of_16_bits_and_of_threads():
    module = nn.LayerNorm(256)
    onepass.swap(module)
    rows = LEAST[torch.bfloat16][0] // 256
    assert ours(module.bfloat16(), rows, torch.bfloat16)
    assert not ours(module, rows - 1, torch.bfloat16)
    torch.set_num_threads(2)
    assert not ours(module, 2 * rows - 1, torch.bfloat16)
    assert ours(module, 2 * rows, torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: nn.LayerNorm(48), (5, 48)), (Attention, (2, 5, 64))]
)
def test_small_calls_are_torchs_bit_for_bit(make, shape):
    module = make()
    x = torch.randn(shape, requires_grad=True)

    def results():
        y = module(x)
        return [y, *torch.autograd.grad(y.sum(), [x, *module.parameters()])]

    stock = results()
    with onepass.swapped(module):
        assert all(map(torch.equal, results(), stock))


def test_others_run_ours_at_every_size():
    module = nn.RMSNorm(8)
    assert not any("torch's own kernel" in note for note in onepass.swap(module).notes)
    assert kernel_of(module, torch.randn(2, 8)) == "norm_forward_kernel"
    assert kernel_of(onepass.nn.LayerNorm(8), torch.randn(2, 8)) == "norm_forward_kernel"


def test_the_record_tells_it():
    module = nn.LayerNorm(8)
    onepass.swap(module)
    with _dispatch_log.record() as calls:
        module(torch.randn(2, 8))
    (call,) = calls
    assert "too small to gain" in call["reason"]
    assert _dispatch_log.line(call) == (
        "layer_norm (2 x 8, float32): torch.nn.functional.layer_norm, torch's own, 1 thread; "
        f"too small to gain: fewer elements than {TRAINING}"
    )
    module(torch.randn(2, 8))
    with _dispatch_log.record() as calls:
        pass
    assert not calls  # nothing is kept while recording is off


def test_the_bound_of_attention(torchs_products):
    """Elements times tokens; one bound in training, whether gradients are wanted or not."""
    module = Attention()
    assert any("run their own forward" in note for note in onepass.swap(module).notes)

    def ours(batch: int, dtype=torch.float32) -> bool:
        kernel = kernel_of(module.to(dtype), torch.randn(batch, 64, 64, dtype=dtype))
        own = kernel == "torch.nn.functional.scaled_dot_product_attention"
        assert own or kernel.startswith("attention_"), kernel
        return not own

    training, inference = (bound // 64**3 for bound in LEAST_ATTENTION[torch.float32])
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            assert ours(training) and not ours(training - 1)
    assert ours(1, torch.bfloat16)
    module.eval()
    assert ours(training) and not ours(training - 1)
    with torch.no_grad():
        assert ours(inference) and not ours(inference - 1)
        torch.set_num_threads(2)
        assert ours(2 * inference) and not ours(2 * inference - 1)
        bound = LEAST_ATTENTION[torch.bfloat16][1] // 64**3
        assert ours(2 * bound, torch.bfloat16) and not ours(2 * bound - 1, torch.bfloat16)


def test_attention_with_dropout_runs_ours_at_every_size(torchs_products):
    module, x = Attention(0.1), torch.randn(1, 4, 64)
    onepass.swap(module)
    assert kernel_of(module, x).startswith("attention_")
    module.drop.p = 0.0
    assert kernel_of(module, x).startswith("torch.")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_the_same_again(reentrant, torchs_products):
    """Between the bounds of training and of inference, where a first pass has no gradients."""
    module = Attention().bfloat16()
    onepass.swap(module)
    training, inference = (bound // 64**3 for bound in LEAST_ATTENTION[torch.bfloat16])
    assert training < inference
    x = torch.randn(inference - 1, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    plain = torch.autograd.grad(module(x).sum(), x)[0]
    with _dispatch_log.record() as calls:
        y = checkpoint(module, x, use_reentrant=reentrant)
        y.sum().backward()
    forwards = [call["kernel"] for call in calls if "backward" not in call["kernel"]]
    assert len(forwards) == 2 and forwards[0] == forwards[1]
    assert torch.equal(x.grad, plain)


@pytest.mark.filterwarnings("ignore")
def test_what_is_traced_runs_ours_at_every_size():
    """A trace is used at other sizes than at its making."""
    module, x, graphs = Attention().eval(), torch.randn(1, 4, 64), []
    onepass.swap(module)
    graphs.append(str(torch.jit.trace(module, x, check_trace=False).graph))

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True)(x)
    assert len(graphs) == 2 and all("onepass" in graph for graph in graphs)


def test_one_row_by_a_transposed_weight_is_torchs(slow_products):
    module = nn.Linear(2048, 2048)
    module.weight = nn.Parameter(module.weight.t())  # as transformers' Conv1D has it
    onepass.swap(module, kinds=("linear",))

    def kernels(dtype: torch.dtype) -> list[str]:
        module.to(dtype)
        with torch.no_grad():
            return [kernel_of(module, torch.randn(1, rows, 2048).to(dtype)) for rows in (1, 2)]

    assert kernels(torch.float32) == ["torch.nn.functional.linear", "linear_few_rows_kernel"]
    assert kernels(torch.float16) == ["linear_few_rows_kernel"] * 2  # torch has loops for both


def test_the_bounds_of_linear(slow_products, monkeypatch):
    """By rows in float32, and by multiply-adds, with low bounds in 16 bits where torch is slow."""

    def check(sizes, taken, left, dtype=torch.float32, gradients=True, threads=1):
        module = nn.Linear(*sizes)
        assert small_calls.LINEAR_NOTE in onepass.swap(module, kinds="linear").notes
        torch.set_num_threads(threads)
        for rows in (*taken, *left):
            with torch.set_grad_enabled(gradients):
                x = torch.randn(1, rows, sizes[0], dtype=dtype)
                kernel = kernel_of(module.to(dtype), x)
            ours = ("linear_kernel", "linear_few_rows_kernel")
            assert kernel in (ours if rows in taken else ["torch.nn.functional.linear"]), rows

    monkeypatch.setattr(small_calls, "LEAST_ROWS", 1)  # of a machine with AVX-512
    wide, square, large = (256, 512), (512, 512), (2048, 2048)
    least = LEAST_LINEAR[torch.float32][0] // (256 * 512)
    check(wide, [least], [least - 2])
    check(wide, [2 * least], [2 * least - 2], threads=2)
    for dtype in (torch.bfloat16, torch.float16):
        check(wide, [2], [], dtype, threads=2)
    check((64, 64), [32], [30], torch.bfloat16, threads=2)
    check((64, 64), [8], [6], torch.float16, gradients=False, threads=2)
    check(wide, [2], [1], torch.bfloat16, gradients=False, threads=2)
    check(wide, [1], [], torch.bfloat16, threads=2)  # whose backward is slow in torch
    least, most = 2 * small_calls.LEAST_IN_PLACE // 512**2, small_calls.ROWS_IN_PLACE[-1]
    for gradients in (True, False):
        check(square, [least, most], [least - 1, most + 1], gradients=gradients, threads=2)
    check(large, [2], [1], gradients=False, threads=2)  # of which the weight may lie in a cache
    monkeypatch.setattr(small_calls, "LEAST_ROWS", 256)  # of a machine without AVX-512
    check(large, [2, 12, 256], [13, 255], threads=2)
    check(large, [13], [], torch.bfloat16, threads=2)
    monkeypatch.setattr(small_calls, "LEAST_LINEAR", {torch.float32: (1, 1)})
    check(large, [2], [1], threads=2)
    check(large, [1], [], gradients=False, threads=2)
