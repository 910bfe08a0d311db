"""Modulated norms inside torch: derivatives, fakes, compile, export, vmap, autocast, modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import functional
from tests.modulated_norm.cases import (
    BF16,
    F16,
    F32,
    make,
    results,
)
from tests.support.results import assert_same_bits

forms = pytest.mark.parametrize("form", ["plain", "add", "gated"])


def call_of(case):
    """A function of the case's tensors in their order, and these."""
    names = list(case.tensors)
    return lambda *tensors: case.ours(**dict(zip(names, tensors, strict=True))), [
        case.tensors[name].requires_grad_() for name in names
    ]


def test_what_is_kept():
    """The sum, the branch, scale, shift, gate and statistics are kept, but no normalised rows."""
    saved = []
    function, leaves = call_of(make(False, 2, 30, 40, form="gated"))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, h = function(*leaves)
    sizes = sorted(t.numel() for t in saved)
    assert sizes == sorted([h.numel(), h.numel(), 80, 80, 80, 60, 60])


@pytest.mark.parametrize(
    "backend, form", [("aot_eager", "plain"), ("aot_eager", "add"), ("inductor", "gated")]
)
def test_compile_fullgraph_with_dynamic_shapes(backend, form):
    case = make(False, 2, 4, 16, form=form)
    compiled = torch.compile(case.ours, fullgraph=True, dynamic=True, backend=backend)
    for sizes in ((2, 4, 16), (3, 7, 33)):
        case.tensors = (other := make(False, *sizes, form=form)).tensors
        case.gradients = other.gradients
        assert_same_bits(results(compiled, case), results(case.ours, case))


def test_one_graph_for_all_sizes():
    counter, first = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), 0
    module = onepass.nn.ModulatedLayerNorm(16)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    for batch, tokens in ((2, 4), (3, 7), (5, 2)):
        compiled(torch.randn(batch, tokens, 16), torch.randn(batch, 16), torch.randn(batch, 16))
        first = first or counter.frame_count  # Dynamo compiles again when eps becomes a constant
    assert counter.frame_count == first > 0


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_train(strict, tmp_path):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.modulation, self.branch = torch.nn.Linear(8, 48), torch.nn.Linear(8, 8)
            self.first = onepass.nn.ModulatedLayerNorm(8, eps=1e-6)
            self.second = onepass.nn.ModulatedRMSNorm(8)

        def forward(self, x, embedding):
            parts = self.modulation(embedding).chunk(6, -1)
            branch = self.branch(self.first(x, *parts[:2]))
            y, h = self.second(branch, *parts[2:4], x, parts[4])
            return h + self.branch(y)

    module, batch = Block(), torch.export.Dim("batch", min=2, max=64)
    example = (torch.randn(4, 5, 8), torch.randn(4, 8))
    program = torch.export.export(
        module, example, dynamic_shapes=({0: batch}, {0: batch}), strict=strict
    )
    torch.export.save(program, tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2").module()
    given = torch.randn(3, 5, 8), torch.randn(3, 8)
    found = [
        torch.autograd.grad(m(*given).square().sum(), list(m.parameters()))
        for m in (program, module)
    ]
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@forms
def test_vmap(form):
    case = make(False, 5, 3, 8, form=form)
    tensors = [t.unflatten(0, (5, 1)) for t in case.tensors.values()]
    function, _ = call_of(case)

    def loss(*tensors):
        return sum(output.pow(2).sum() for output in function(*tensors))

    wrt = tuple(range(len(tensors)))
    found = torch.func.vmap(torch.func.grad(loss, wrt))(*tensors)
    expected = torch.func.grad(loss, wrt)(*(t.flatten(0, 1) for t in tensors))
    torch.testing.assert_close([g.flatten(0, 1) for g in found], list(expected))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("scale", [F32, BF16], ids=str)
def test_dtypes_under_autocast_are_the_norms(dtype, scale):
    case = make(False, 2, 3, 8, dtype, form="gated", scale_dtype=scale)
    with torch.autocast("cpu", dtype=BF16):
        y, h = case.ours(**case.tensors)
        plain = functional.layer_norm(case.tensors["input"], 8)
    assert y.dtype == plain.dtype and h.dtype == dtype


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    module, scale = onepass.nn.ModulatedRMSNorm(8), torch.randn(2, 8)
    x, found = torch.randn(2, 5, 8), []
    for call in (module, lambda *t: checkpoint(module, *t, use_reentrant=use_reentrant)):
        leaf = x.clone().requires_grad_()
        call(leaf, scale).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_copies_of_the_module():
    module = onepass.nn.ModulatedLayerNorm((8,), eps=0.5)
    x, scale = torch.randn(2, 3, 8), torch.randn(2, 8)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x, scale), module(x, scale)) and twin.eps == 0.5


def test_explain_names_the_kernels():
    case = make(False, 2, 64, 64, form="gated")
    function, leaves = call_of(case)
    text = str(onepass.explain(lambda: sum(t.sum() for t in function(*leaves)).backward()))
    assert "modulated_layer_norm (128 x 64" in text and "norm_forward_kernel" in text
    assert "modulated_layer_norm_backward (128 x 64" in text and "norm_backward_kernel" in text
    assert "a scale for 64 rows, gate float32" in text
