"""diffusers' ResnetBlock2D: group norm and silu in one pass, or the reason why not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onepass
from onepass import _dispatch_log
from onepass.swapping.reasons import Reason

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from diffusers.models import resnet  # noqa: E402

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CONDITION = 12


def make(**options) -> nn.Module:
    torch.manual_seed(0)
    options = dict(in_channels=8, groups=4, temb_channels=CONDITION) | options
    block = resnet.ResnetBlock2D(**options)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return block


def inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 8, 6, 6), torch.randn(2, CONDITION)]


def fused(run) -> int:
    with _dispatch_log.record() as calls:
        run()
    return sum(call["op"] == "group_norm" and "silu" in call["arguments"] for call in calls)


def test_hooks_options_and_further_arguments():
    block, stock, given = make(), make(), inputs()
    report = onepass.swap(block, kinds="norm", exclude="norm2")
    assert fused(lambda: block(*given)) == 1 and len(report.swapped) == 1
    onepass.unswap(block)
    onepass.swap(block, kinds="norm")
    seen = []
    block.nonlinearity.register_forward_hook(lambda *_: seen.append(1))
    assert fused(lambda: block(*given)) == 0 and len(seen) == 3
    with pytest.warns(FutureWarning, match="scale"):
        assert torch.equal(block(*given, scale=1.0), stock(*given))


class Doubled(nn.SiLU):
    def forward(self, x):
        return super().forward(x) * 2


def test_a_subclass_of_the_activation():
    block = make()
    block.nonlinearity = Doubled()
    assert not onepass.swap(block, kinds="norm").swapped


@pytest.mark.parametrize("change", ["order", "scale", "norm2", "dropout"])
def test_another_version_of_the_class_is_refused(change, monkeypatch):
    """As one with a changed forward would be."""
    original = resnet.ResnetBlock2D.forward

    def forward(self, input_tensor, temb, *args, **kwargs):
        if change == "order":  # silu before the norm
            return original(self, self.nonlinearity(input_tensor), temb)
        if change == "scale":
            return original(self, input_tensor, temb) * 1.001
        if change == "dropout":  # at the end
            drop, self._modules["dropout"] = self.dropout, nn.Identity()
            try:
                return drop(original(self, input_tensor, temb))
            finally:
                self._modules["dropout"] = drop
        norm, self._modules["norm2"] = self.norm2, nn.Identity()
        try:
            return original(self, input_tensor, temb)
        finally:
            self._modules["norm2"] = norm

    monkeypatch.setattr(resnet.ResnetBlock2D, "forward", forward)
    block = make()
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
    block = make(in_channels=2 * max(4, options["groups"]), **options)
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
