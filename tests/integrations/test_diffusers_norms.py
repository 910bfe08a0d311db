"""diffusers' norms: with scale and shift, or with silu, in one pass, or the reason why not; their
values are those of tests/swap/test_kinds.py."""

import copy
import re

import pytest
import torch
from torch import nn

import onepass
from onepass import _dispatch_log
from onepass.swapping.reasons import Reason
from tests.integrations.test_diffusers import build, diffusers

resnet = pytest.importorskip("diffusers.models.resnet", reason="needs diffusers")
normalization = pytest.importorskip("diffusers.models.normalization", reason="needs diffusers")

F32, F64, WIDTH = torch.float32, torch.float64, 32


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


# ---- group norms with silu, of resnet blocks -----------------------------------------------------


def make_block(**options) -> nn.Module:
    torch.manual_seed(0)
    options = dict(in_channels=8, groups=4, temb_channels=12) | options
    block = resnet.ResnetBlock2D(**options)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return block


def fused(run) -> int:
    with _dispatch_log.record() as calls:
        run()
    return sum(call["op"] == "group_norm" and "silu" in call["arguments"] for call in calls)


def test_hooks_options_and_further_arguments():
    block, stock, given = make_block(), make_block(), (torch.randn(2, 8, 6, 6), torch.randn(2, 12))
    report = onepass.swap(block, kinds="norm", exclude="norm2")
    assert fused(lambda: block(*given)) == 1 and len(report.swapped) == 1
    onepass.unswap(block)
    onepass.swap(block, kinds="norm")
    seen = []
    block.nonlinearity.register_forward_hook(lambda *_: seen.append(1))
    assert fused(lambda: block(*given)) == 0 and len(seen) == 3
    with pytest.warns(FutureWarning, match="scale"):
        assert torch.equal(block(*given, scale=1.0), stock(*given))


@pytest.mark.parametrize("change", ["order", "scale", "norm2", "dropout"])
def test_another_version_of_the_class_is_refused(change, monkeypatch):
    """As one with a changed forward would be."""
    original = resnet.ResnetBlock2D.forward

    def forward(self, input_tensor, temb, *args, **kwargs):
        if change == "order":  # silu before the norm
            return original(self, self.nonlinearity(input_tensor), temb)
        if change == "scale":
            return original(self, input_tensor, temb) * 1.001
        part = getattr(self, change)
        setattr(self, change, nn.Identity())
        try:
            y = original(self, input_tensor, temb)
        finally:
            setattr(self, change, part)
        return part(y) if change == "dropout" else y  # at the end

    monkeypatch.setattr(resnet.ResnetBlock2D, "forward", forward)
    block = make_block()
    report = onepass.swap(block, kinds="norm")
    (reason,) = [e["reason"] for e in report.skipped if e["name"] == ""]
    assert reason.kind is Reason.PROBE and not report.swapped
    assert not onepass.swap(block, kinds="norm", probe=False).swapped


@pytest.mark.parametrize(
    "options",
    [dict(groups=1), dict(groups=2, up=True, eps=1e-6), dict(groups=8), dict(groups=32, eps=1e-6)],
    ids=str,
)
def test_a_block_is_not_refused_by_bad_luck(options):
    """In few numbers stock's error may be small by chance."""
    block = make_block(in_channels=2 * max(4, options["groups"]), **options)
    assert onepass.swap(block, kinds="norm", strict=True).swapped


def test_a_small_unet():
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 16),
        layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    batch = dict(sample=torch.randn(2, 3, 8, 8), timestep=torch.tensor([3, 700]))
    blocks = sum(isinstance(m, resnet.ResnetBlock2D) for m in model.modules())
    report = onepass.swap(model)
    assert sum(e["to"] == "onepass group_norm, silu" for e in report.swapped) == blocks == 8
    assert fused(lambda: model(**batch)) == 2 * blocks
    assert {e["name"] for e in report.skipped if e["type"].endswith("GroupNorm")} == {
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.GroupNorm) and "resnets" not in name
    }
    assert report.verify(batch).ok
    onepass.unswap(model)
    assert fused(lambda: model(**batch)) == 0
