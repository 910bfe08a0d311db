"""Calls too small to gain run torch's own kernel, and the record says so."""

import math
from collections.abc import Callable
from typing import NamedTuple

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
from tests.swap.reported import graph_of
from tests.swap.test_mlp import HIDDEN, WIDTH, Llamas

LEAST_LINEAR = BOUNDS["LEAST_LINEAR"]


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


class Kind(NamedTuple):
    make: Callable[[], nn.Module]
    input: Callable[[int], torch.Tensor]  # of so many rows
    row: int  # what a row adds to the number that is compared with the bound
    bound: str
    kind: str
    note: str


KINDS = {
    "layer norm": Kind(
        lambda: nn.LayerNorm(256), lambda rows: torch.randn(rows, 256), 256, "LEAST_NORM", "norm",
        "torch's own kernel",
    ),
    "another layer norm": Kind(
        lambda: LayerNormOverridden(256), lambda rows: torch.randn(rows, 256), 256, "LEAST_NORM",
        "norm", "torch's own kernel",
    ),
    "group norm": Kind(
        lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU()), lambda rows: torch.randn(1, 8, rows),
        8, "LEAST_GROUP_NORM", "norm", "group norms with silu",
    ),
    "group norm, silu": Kind(
        lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), lambda rows: torch.randn(1, 8, rows),
        8, "LEAST_ACTIVATED", "norm", "group norms with silu",
    ),
    "gate": Kind(
        Llamas, lambda rows: torch.randn(rows, WIDTH), HIDDEN, "LEAST_GATE", "mlp", "feed-forward"
    ),
    "attention": Kind(
        Attention, lambda rows: torch.randn(rows, 64, 64), 64**3, "LEAST_ATTENTION", "attention",
        "run their own forward",
    ),
}  # fmt: skip
LEAST = {kind.bound: dict(getattr(small_calls, kind.bound)) for kind in KINDS.values()}


def is_ours(module: nn.Module, x: torch.Tensor) -> bool:
    with _dispatch_log.record() as calls:
        module(x)
    return any(call["level"] != _dispatch_log.TORCH for call in calls)


@pytest.mark.parametrize(
    ("training", "threads", "dtype"),
    [(True, 1, torch.float32), (False, 1, torch.float32), (True, 2, torch.bfloat16),
     (False, 2, torch.bfloat16), (True, 2, torch.float32), (False, 2, torch.float32)],
)  # fmt: skip
@pytest.mark.parametrize("name", KINDS)
def test_the_bound(name, dtype, training, threads, monkeypatch, torchs_products):
    kind, bounds = KINDS[name], LEAST[KINDS[name].bound]
    monkeypatch.setattr(small_calls, kind.bound, bounds)
    torch.set_num_threads(threads)
    module = kind.make().to(dtype).train(training)
    report = onepass.swap(module, kinds=kind.kind)
    assert bool(report.swapped) is (dtype in bounds)
    if not report.swapped:  # as group norms alone in float32
        return
    assert any(kind.note in note for note in report.notes)
    rows = math.ceil(threads * bounds[dtype][not training] / kind.row)
    with torch.set_grad_enabled(training):
        assert is_ours(module, kind.input(max(rows, 1)).to(dtype))
        assert rows == 0 or not is_ours(module, kind.input(rows - 1).to(dtype))


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
        f"too small to gain: fewer elements than {LEAST['LEAST_NORM'][torch.float32][0]}"
    )
    module(torch.randn(2, 8))
    with _dispatch_log.record() as calls:
        pass
    assert not calls  # nothing is kept while recording is off


def test_the_bound_of_attention_in_training_holds_without_gradients_too(torchs_products):
    """And in eval mode with gradients: a checkpoint computes without them first."""
    module = Attention()
    onepass.swap(module)
    rows = LEAST["LEAST_ATTENTION"][torch.float32][0] // 64**3
    for training, gradients in ((True, False), (False, True)):
        with torch.set_grad_enabled(gradients):
            found = [
                is_ours(module.train(training), torch.randn(n, 64, 64)) for n in (rows, rows - 1)
            ]
        assert found == [True, False]


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
    training, inference = (bound // 64**3 for bound in LEAST["LEAST_ATTENTION"][torch.bfloat16])
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
    module, x = Attention().eval(), torch.randn(1, 4, 64)
    onepass.swap(module)
    traced = torch.jit.trace(module, x, check_trace=False).graph
    with torch.no_grad():
        assert "onepass" in str(traced) and "onepass" in graph_of(module, x)


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
