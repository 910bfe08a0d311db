"""diffusers' adaptive norms: norm, scale and shift in one pass, or the reason why not."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import onepass
from onepass import _dispatch_log, numerics
from tests.integrations.test_diffusers import build

normalization = pytest.importorskip("diffusers.models.normalization", reason="needs diffusers")

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
WIDTH, CONDITION = 32, 16


LABELS = {"timestep": torch.tensor([3, 1]), "class_labels": torch.tensor([0, 2])}
# name -> (module, class that its norm gets, arguments beside x)
TAKEN = {
    "AdaLayerNorm": lambda n: (
        n.AdaLayerNorm(CONDITION, output_dim=2 * WIDTH, chunk_dim=1), {"temb": None}
    ),
    "AdaLayerNormZero": lambda n: (n.AdaLayerNormZero(WIDTH), {"emb": None}),
    "AdaLayerNormZero of labels": lambda n: (n.AdaLayerNormZero(WIDTH, num_embeddings=4), LABELS),
    "AdaLayerNormZero in float32": lambda n: (
        n.AdaLayerNormZero(WIDTH, norm_type="fp32_layer_norm"), {"emb": None}
    ),
    "AdaLayerNormZeroSingle": lambda n: (n.AdaLayerNormZeroSingle(WIDTH), {"emb": None}),
    "SD35AdaLayerNormZeroX": lambda n: (n.SD35AdaLayerNormZeroX(WIDTH), {"emb": None}),
    "AdaLayerNormContinuous": lambda n: (
        n.AdaLayerNormContinuous(WIDTH, CONDITION, elementwise_affine=False, eps=1e-6),
        {"conditioning_embedding": None},
    ),
    "AdaLayerNormContinuous of RMS": lambda n: (
        n.AdaLayerNormContinuous(WIDTH, CONDITION, False, norm_type="rms_norm"),
        {"conditioning_embedding": None},
    ),
}  # fmt: skip


def make(name: str, dtype=F32):
    """(module, arguments)."""
    torch.manual_seed(0)
    module, named = TAKEN[name](normalization)
    named = {
        key: torch.randn(2, module.linear.in_features, dtype=dtype) if value is None else value
        for key, value in named.items()
    }
    if "timestep" in named:
        named["hidden_dtype"] = dtype
    return module.to(dtype).eval(), {"x": torch.randn(2, 5, WIDTH).to(dtype), **named}


def results(module, named) -> list[torch.Tensor]:
    """Outputs, and gradients of tokens, conditioning and parameters, for the same upstream ones."""
    first = "hidden_states" if isinstance(module, normalization.SD35AdaLayerNormZeroX) else "x"
    named = {first if key == "x" else key: value for key, value in named.items()}
    leaves = [
        value.requires_grad_()
        for value in named.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    outputs = module(**named)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    wanted = [*leaves, *module.parameters()]
    generator = torch.Generator().manual_seed(3)
    upstream = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, wanted, upstream)]


def norms(function) -> list[str]:
    """The modulated norms that run."""
    with _dispatch_log.record() as calls:
        function()
    return [call["op"] for call in calls if re.fullmatch(r"modulated_\w+_norm", call["op"])]


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_values_gradients_and_the_way_back(name, dtype):
    module, named = make(name, dtype)
    stock, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    keys, cls = list(module.state_dict()), type(module)
    report = onepass.swap(module, kinds=("norm",), strict=True)
    to = {entry["name"]: entry["to"] for entry in report.swapped}[""]
    assert to == f"onepass modulated_{'rms' if 'RMS' in name else 'layer'}_norm"
    assert list(module.state_dict()) == keys and isinstance(module, cls)
    calls = 2 if name.startswith("SD35") else 1
    assert norms(lambda: results(module, named)) == [to.removeprefix("onepass ")] * calls
    wide = {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point()
        else F64 if value is dtype else value
        for key, value in named.items()
    }  # fmt: skip
    found = zip(results(module, named), results(exact, wide), results(stock, named), strict=True)
    for number, (ours, ref, base) in enumerate(found):
        assert ours.dtype is base.dtype and ours.shape == base.shape
        if base.dtype is dtype:
            numerics.assert_close(ours, ref, base, f"{name} result {number}")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module)
        assert all(map(torch.equal, results(twin, named), results(module, named)))
    onepass.unswap(module)
    assert type(module) is cls and type(module.norm) is type(stock.norm)
    for ours, theirs in zip(results(module, named), results(stock, named), strict=True):
        assert torch.equal(ours, theirs)


def composes(module, named) -> None:
    """The result is stock's, to the bit, and no modulated norm ran."""
    stock = copy.deepcopy(module)
    report = onepass.swap(module, kinds=("norm",))
    onepass.unswap(module.norm)  # the swapped one may round differently
    assert any("norm, scale and shift are torch's operators" in note for note in report.notes)
    assert not norms(lambda: module(**named))
    for ours, theirs in zip(module(**named), stock(**named), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype is theirs.dtype


def test_other_shapes_and_dtypes_are_composed():
    module, named = make("AdaLayerNormZero")
    for change in (
        {"x": named["x"].bfloat16()},  # whose conditions are wider
        {"emb": named["emb"][:1]},
        {"x": torch.randn(3, 2, 5, WIDTH)},
    ):
        composes(module, named | change)
        onepass.unswap(module)
    composes(*make("AdaLayerNormZero in float32", F64))
    module, named = make("AdaLayerNormZero", F64)
    onepass.swap(module, kinds=("norm",))
    assert norms(lambda: module(**named)) == ["modulated_layer_norm"]


def test_hooks_of_the_norm_run():
    module, named = make("AdaLayerNormZeroSingle")
    onepass.swap(module, kinds=("norm",))
    seen = []
    handle = module.norm.register_forward_hook(lambda *_: seen.append(1))
    module(**named)
    assert seen == [1]
    handle.remove()
    assert norms(lambda: module(**named)) == ["modulated_layer_norm"] and seen == [1]
    onepass.unswap(module)
    module.norm.register_forward_hook(lambda *_: None)
    (entry,) = [e for e in onepass.swap(module, kinds=("norm",)).skipped if e["name"] == ""]
    assert entry["reason"] == "its norm has hooks"


def reason(module, **options) -> str:
    cls = type(module)
    report = onepass.swap(module, kinds=("norm",), **options)
    assert type(module) is cls
    (entry,) = [e for e in (*report.skipped, *report.unknown) if e["name"] == ""]
    return str(entry["reason"])


def test_reasons():
    n = normalization
    assert reason(n.AdaLayerNormSingle(24)).startswith("makes scale and shift for norms elsewhere")
    assert reason(n.AdaLayerNorm(16, 4)) == (
        "its scale and shift are one for all of a batch (chunk_dim 0)"
    )
    assert reason(n.AdaLayerNormContinuous(16, 8)) == (
        "its norm has a weight of its own in front of scale and shift"
    )
    module = n.AdaLayerNormZero(16)
    assert reason(module, probe=False) == "not proven: probe is off"
    module.norm = nn.Identity()
    assert reason(module) == "its norm is a Identity, and onepass has no rule for that"

    class Other(n.AdaLayerNormZero):
        def forward(self, x, emb=None):
            return super().forward(x, emb=emb)

    assert reason(Other(16)) == "a subclass with a forward of its own"


@pytest.mark.parametrize("error", ["order", "factor", "results", "argument"])
def test_another_forward_is_found_out(error, monkeypatch):
    """A forward that another version of diffusers has changed is noticed."""
    right = normalization.AdaLayerNormZeroSingle.forward

    def forward(self, x, emb=None):
        if error == "argument":
            raise TypeError("forward() takes a guidance too")
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        if error == "order":
            scale, shift = shift, scale
        factor = scale if error == "factor" else 1 + scale
        y = self.norm(x) * factor[:, None] + shift[:, None]
        return (y, gate, gate) if error == "results" else (y, gate)

    monkeypatch.setattr(normalization.AdaLayerNormZeroSingle, "forward", forward)
    found = reason(normalization.AdaLayerNormZeroSingle(WIDTH))
    text = {"results": "returns other tensors than", "argument": "fails on small layers: "}
    assert found.startswith(text.get(error, "is not AdaLayerNormZeroSingle: result 0 is off by"))
    monkeypatch.setattr(normalization.AdaLayerNormZeroSingle, "forward", right)
    assert onepass.swap(normalization.AdaLayerNormZeroSingle(WIDTH)).swapped


def test_a_whole_model():
    """Norms of both blocks and the last one; verified in float64."""
    model, batch, _ = build("flux")
    report = onepass.swap(model, kinds=("norm",))
    taken = [e["name"] for e in report.swapped if e["to"] == "onepass modulated_layer_norm"]
    assert taken == [
        "transformer_blocks.0.norm1", "transformer_blocks.0.norm1_context",
        "single_transformer_blocks.0.norm", "norm_out",
    ]  # fmt: skip
    assert report.verify(batch).ok
    with torch.no_grad():
        assert norms(lambda: model(**batch)) == ["modulated_layer_norm"] * 4


class Doubling(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, emb):
        return self.block(x, emb)[0] * 2


def test_traced_by_fx():
    """A graph calls it as a whole, by its class's name as any other."""
    module, named = make("AdaLayerNormZeroSingle")
    model = Doubling(module)
    onepass.swap(model, kinds=("norm",))
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["block"]
    assert torch.equal(traced(**named), model(**named))


@pytest.mark.parametrize("norm_type", ["layer_norm", "rms_norm"])
def test_the_proof_computes_what_the_swap_will(monkeypatch, norm_type):
    name = f"modulated_{norm_type}"
    right = getattr(onepass.functional, name)
    monkeypatch.setattr(onepass.functional, name, lambda *given: 1.01 * right(*given))
    module = normalization.AdaLayerNormContinuous(
        32, 16, elementwise_affine=False, norm_type=norm_type
    )
    report = onepass.swap(module, kinds="norm")
    assert not any("modulated" in entry["to"] for entry in report.swapped)
    assert "onepass would be less accurate" in str(report)
