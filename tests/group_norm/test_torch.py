"""Group norm inside torch: derivatives, fakes, compile, export, vmap, autocast, modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import functional
from tests.group_norm.cases import (
    BF16,
    F16,
    F32,
    make,
    orders,
    results,
)
from tests.support.results import assert_same_bits


def test_only_input_weights_and_statistics_are_kept():
    saved = []
    leaves = [t.requires_grad_() for t in make((2, 8, 5, 6), 2).tensors]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.group_norm(leaves[0], 2, *leaves[1:], activation="silu")
    assert [t.data_ptr() for t in saved[:3]] == [t.data_ptr() for t in leaves]
    assert [t.shape for t in saved[3:]] == [(2, 2)] * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@orders
@pytest.mark.grid
def test_compile_fullgraph_with_dynamic_shapes(last, backend):
    def call(x, w, b):
        return functional.group_norm(x, 2, w, b, activation="silu")

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for shape in ((2, 8, 5, 6), (3, 12, 7, 4), (4, 6, 9, 9)):
        case = make(shape, 2, last=last)
        found, expected = results(compiled, case), results(call, case)
        assert_same_bits(found, expected)
        assert found["output"].stride() == expected["output"].stride()


def test_one_graph_for_all_sizes():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(functional.group_norm, fullgraph=True, dynamic=True, backend=counter)
    compiled(torch.randn(2, 8, 5, 6), 4)
    graphs = counter.frame_count  # torch compiles once more when it treats eps as a number
    for shape in ((3, 12, 7, 4), (4, 8, 9, 9)):
        compiled(torch.randn(shape), 4)
    assert counter.frame_count == graphs


def test_the_second_derivative_of_a_compiled_call_is_refused_by_torch():
    compiled = torch.compile(functional.group_norm, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4, 3, requires_grad=True)
    value = compiled(x, 2).pow(2).sum()
    with pytest.raises(RuntimeError, match="double backward|create_graph=False"):
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        gradient.sum().backward()


@pytest.mark.parametrize("strict", [False, True])
@orders
@pytest.mark.grid
def test_exported_programs_train(last, strict, tmp_path):
    module = onepass.nn.GroupNorm(2, 8, activation="silu")
    x = make((4, 8, 5, 6), 2, last=last).input
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2").module()
    x = make((3, 8, 5, 6), 2, last=last, seed=1).input
    found = [
        torch.autograd.grad(m(x).pow(3).sum(), list(m.parameters())) for m in (program, module)
    ]
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@orders
def test_vmap(last):
    case = make((10, 8, 5, 6), 2, last=last)
    x = case.input.unflatten(0, (5, 2))

    def loss(x, w, b):
        return case.ours(x, w, b).pow(3).sum()

    per_part = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, None, None))
    found = per_part(x, *case.tensors[1:])
    for i in range(5):
        leaves = [t.detach().requires_grad_() for t in (x[i], *case.tensors[1:])]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        torch.testing.assert_close([g[i] for g in found], list(expected))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_autocast_leaves_dtypes_as_torch_does(dtype):
    x, w = torch.randn(2, 8, 3).to(dtype), torch.ones(8)
    with torch.autocast("cpu", dtype=BF16):
        found, expected = (f(x, 2, w, w) for f in (functional.group_norm, F.group_norm))
    assert found.dtype is expected.dtype is dtype


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    module, x = onepass.nn.GroupNorm(2, 8, activation="silu"), torch.randn(5, 8, 4)
    found = []
    for call in (module, lambda t: checkpoint(module, t, use_reentrant=use_reentrant)):
        leaf = x.clone().requires_grad_()
        call(leaf).pow(3).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_copies_of_the_module():
    module = onepass.nn.GroupNorm(2, 8, activation="silu", dtype=BF16)
    x = torch.randn(3, 8, 5, dtype=BF16)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x)) and twin.activation == "silu"
    assert onepass.nn.GroupNorm(2, 8, device="meta").weight.device.type == "meta"
    torchs = torch.nn.GroupNorm(2, 8)
    module = onepass.nn.GroupNorm(2, 8)
    module.load_state_dict(torchs.state_dict())


def test_explain_names_the_kernels():
    case = make((2, 8, 5, 6), 2, last=True)
    leaves = [t.requires_grad_() for t in case.tensors]
    text = str(onepass.explain(lambda: case.ours(*leaves).sum().backward()))
    assert "group_norm_forward_kernel" in text and "group_norm_backward_kernel" in text
    assert "2 x 8 x 30, 2 groups, channels last, input float32, weight float32, silu" in text
