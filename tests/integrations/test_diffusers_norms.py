"""diffusers' adaptive norms: norm, scale and shift in one pass, or the reason why not."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import onepass
from onepass import _dispatch_log
from tests.integrations.test_diffusers import build

normalization = pytest.importorskip("diffusers.models.normalization", reason="needs diffusers")

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
WIDTH, CONDITION = 32, 16


def make(name: str, dtype=F32, **options):
    """(module, arguments)."""
    torch.manual_seed(0)
    module = getattr(normalization, name)(WIDTH, **options).to(dtype).eval()
    return module, {"x": torch.randn(2, 5, WIDTH).to(dtype), "emb": torch.randn(2, WIDTH).to(dtype)}


def norms(function) -> list[str]:
    """The modulated norms that run."""
    with _dispatch_log.record() as calls:
        function()
    return [call["op"] for call in calls if re.fullmatch(r"modulated_\w+_norm", call["op"])]


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
    composes(*make("AdaLayerNormZero", F64, norm_type="fp32_layer_norm"))
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
    (entry,) = onepass.swap(normalization.AdaLayerNormZeroSingle(WIDTH), kinds="norm").skipped
    found = str(entry["reason"])
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
