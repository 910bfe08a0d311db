"""Modulated norms and scaled branches as modules, in models and inside torch."""

import pytest
import torch

import onepass
from onepass import functional
from tests.emulator.executors import everywhere
from tests.norm.forms import BF16, BRANCHES, F16, F32, F64, MODULATED, dtypes, make

pytestmark = pytest.mark.isa

# ---- modules -------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("by_keep", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.25, 0.9, 1.0])
def test_factors_of_samples(p, by_keep):
    """timm's DropPath: 0 or 1 / keep, of whole samples, from dropout's stream."""
    x = torch.ones(400, 3, 2)
    torch.manual_seed(3)
    scale = functional.drop_path_scale(x, p, True, by_keep)
    if p == 0.0:
        assert scale is None
        return
    torch.manual_seed(3)
    expected = functional.dropout(torch.ones(400), p)
    assert torch.equal(scale, expected if by_keep else (expected != 0).float())
    assert scale.dtype == F32 and 0 < int((scale == 0).sum()) <= 400
    torch.manual_seed(3)
    y = onepass.nn.DropPath(p, by_keep)(x)
    assert torch.equal(y, scale[:, None, None].expand_as(x))
    assert functional.drop_path_scale(x.double(), p, True, by_keep).dtype == F64


def test_nothing_is_drawn_in_evaluation():
    x, state = torch.ones(4, 3), torch.get_rng_state()
    module = onepass.nn.DropPath(0.5).eval()
    assert module(x) is x and module.row_scale(x) is None
    assert onepass.nn.DropPath(0.0)(x) is x
    assert functional.drop_path_scale(x, 0.5, False) is None
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("format", [torch.channels_last, torch.contiguous_format])
def test_drop_path_of_images(format):
    x = torch.randn(6, 4, 3, 5).to(memory_format=format)
    torch.manual_seed(1)
    y = onepass.nn.DropPath(0.5)(x)
    torch.manual_seed(1)
    factors = functional.drop_path_scale(x, 0.5)
    assert y.is_contiguous(memory_format=format) and torch.equal(y, x * factors.view(6, 1, 1, 1))


def test_modules_of_branches():
    drop_path = onepass.nn.DropPath(0.12345)
    assert repr(drop_path) == "DropPath(drop_prob=0.123)" and not drop_path.state_dict()
    assert drop_path.scale_by_keep is True and onepass.nn.DropPath().drop_prob == 0.0
    scale, x = onepass.nn.LayerScale(8, init_values=0.5, dtype=BF16), torch.randn(2, 3, 8)
    assert list(scale.state_dict()) == ["gamma"] and scale.gamma.dtype == BF16
    assert torch.equal(scale(x), x * 0.5)
    into = onepass.nn.LayerScale(8, 0.5, inplace=True).requires_grad_(False)
    assert into(x) is x
    norm, gamma, factors = onepass.nn.AddLayerNorm(8), torch.randn(8), torch.tensor([0.0, 2.0])
    scales = {"column_scale": gamma, "row_scale": factors}
    expected = functional.add_layer_norm(x, x, 8, norm.weight, norm.bias, **scales)
    assert all(map(torch.equal, norm(x, x, gamma, factors), expected))
    _, h = onepass.nn.AddRMSNorm(8)(x, x, row_scale=factors)
    assert torch.equal(h, x * torch.tensor([1.0, 3.0]).view(2, 1, 1))


@pytest.mark.parametrize("rms", [False, True])
def test_modulated_norms(rms):
    name = "RMSNorm" if rms else "LayerNorm"
    module = getattr(onepass.nn, f"Modulated{name}")(16, eps=1e-3)
    case = make("gated", (2, 5, 16), rms=rms)
    case.eps, t = 1e-3, case.tensors
    found = module(t["input"], t["scale"], t["shift"], t["residual"], t["gate"])
    assert all(map(torch.equal, found, case.ours(**t)))
    assert torch.is_tensor(module(t["input"], t["scale"]))
    assert not list(module.parameters()) and not module.state_dict()
    assert repr(module) == f"Modulated{name}((16,), eps=0.001)"
    assert getattr(onepass.nn, f"Modulated{name}")((4, 16)).eps == (None if rms else 1e-5)


# ---- as models have them: integrations/test_diffusers_norms.py has others ------------------------


@dtypes
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_a_block_of_a_vision_transformer(p, dtype):
    """Separate modules, as timm writes them, and one call: the same seed drops the same samples."""
    scale, drop_path = onepass.nn.LayerScale(64, 0.1).to(dtype), onepass.nn.DropPath(p)
    norm = torch.nn.LayerNorm(64).to(dtype)
    branch, x = torch.randn(6, 9, 64).to(dtype), torch.randn(6, 9, 64).to(dtype)
    torch.manual_seed(1)
    stream = x + drop_path(scale(branch))
    torch.manual_seed(1)
    scales = {"column_scale": scale.gamma, "row_scale": drop_path.row_scale(branch)}
    fused = functional.add_layer_norm(branch, x, 64, norm.weight, norm.bias, **scales)
    if dtype in (F32, F64):  # 16-bit modules round between
        torch.testing.assert_close(fused, (norm(stream), stream))
    kept = (fused[1] != x).flatten(1).any(1)
    assert torch.equal(kept, (stream != x).flatten(1).any(1)) and kept.all() == (p == 0.0)


# ---- inside torch --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("form", [*MODULATED, *BRANCHES])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("scale", [F32, BF16], ids=str)
def test_dtypes_under_autocast_are_those_without_scales(dtype, scale, form):
    case = make(form, (2, 3, 8), dtype, scale_dtype=scale)
    t = case.tensors
    with torch.autocast("cpu", dtype=BF16):
        found = case.ours(**t)
        if case.is_modulated:
            plain = (functional.layer_norm(t["input"], 8), t["input"])[: len(found)]
        else:
            case.row_scale = None
            plain = case.ours(**{n: t for n, t in t.items() if n != "column_scale"})
    assert [t.dtype for t in found] == [t.dtype for t in plain]
