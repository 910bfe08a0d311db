"""Calls whose branch is scaled inside torch: derivatives, fakes, compile, export, vmap."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import onepass
from onepass import functional
from tests.branch.cases import BF16, F32, forms, make


def call_of(case):
    """A function of the case's tensors in their order, and these."""
    names = list(case.tensors)
    return lambda *tensors: case.ours(**dict(zip(names, tensors, strict=True))), [
        case.tensors[name].requires_grad_() for name in names
    ]


def kept_by(form: str, scale: str, p: float) -> list[int]:
    saved = []
    function, leaves = call_of(make(form, (2, 30, 40), scale=scale, p=p))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(*leaves)
    return sorted(t.numel() for t in saved)


def test_what_is_kept():
    """The branch if its scale is trained, the sum if a norm follows, factors and seed: no mask."""
    assert kept_by("add", "rows", 0.0) == [2]
    assert kept_by("add", "both", 0.1) == [2, 2, 40, 2400]
    assert kept_by("layer", "rows", 0.0) == [2, 40, 40, 60, 60, 2400]
    assert kept_by("layer", "both", 0.1) == [2, 2, 40, 40, 40, 60, 60, 2400, 2400]


def test_compiled_modules_drop_what_eager_ones_do():
    module = torch.nn.Sequential(onepass.nn.LayerScale(8, 0.5), onepass.nn.DropPath(0.5))
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 7):
        found = []
        for call in (module, compiled):
            x = torch.ones(batch, 3, 8, requires_grad=True)
            torch.manual_seed(2)
            y = call(x)
            found.append([y, *torch.autograd.grad(y.sum(), [x, module[0].gamma])])
        torch.testing.assert_close(*found, rtol=0, atol=0)


class Block(torch.nn.Module):
    """Half a transformer block, with LayerScale and DropPath."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.branch = torch.nn.Linear(width, width)
        self.scale, self.drop_path = onepass.nn.LayerScale(width, 0.5), onepass.nn.DropPath(0.3)
        self.norm = onepass.nn.AddLayerNorm(width)

    def forward(self, x):
        branch = self.branch(x)
        y, x = self.norm(branch, x, self.scale.gamma, self.drop_path.row_scale(branch))
        return x + self.drop_path(self.scale(y))


@forms
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_dtypes_under_autocast_are_those_without_scales(dtype, form):
    case = make(form, (2, 3, 8), dtype, scale_dtype=F32)
    with torch.autocast("cpu", dtype=BF16):
        found = case.ours(**case.tensors)
        case.row_scale = None
        plain = case.ours(**{n: t for n, t in case.tensors.items() if n != "column_scale"})
    assert [t.dtype for t in found] == [t.dtype for t in plain]


def test_copies_of_the_modules():
    x = torch.randn(2, 3, 8)
    module = Block().eval()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x)) and twin.drop_path.drop_prob == 0.3


def test_explain_names_the_kernels():
    x, c, r = torch.randn(2, 64, 64, requires_grad=True), torch.randn(64), torch.ones(2)

    def call():
        y, h = functional.add_layer_norm(x, x, 64, column_scale=c, row_scale=r)
        z = functional.add_dropout(y, h, 0.0, column_scale=c, row_scale=r)
        z.sum().backward()

    text = str(onepass.explain(call))
    assert "add_layer_norm (128 x 64" in text and "norm_forward_kernel" in text
    assert "column_scale float32, row_scale" in text
    assert "add_layer_norm_backward (128 x 64" in text
    assert "add_dropout (128 x 64" in text and "add_dropout_backward (128 x 64" in text
