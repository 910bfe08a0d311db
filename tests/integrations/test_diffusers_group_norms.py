"""diffusers' ResnetBlock2D: group norm and silu in one pass, or the reason why not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import onepass
from onepass import _dispatch_log, numerics
from onepass.swapping.reasons import Reason

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from diffusers.models import resnet  # noqa: E402

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CONDITION = 12
CASES = {  # arguments, and how many of the two norms are computed with silu
    "usual": (dict(out_channels=16), 2),
    "same width": (dict(), 2),
    "up": (dict(up=True), 2),
    "down": (dict(down=True), 2),
    "sde": (dict(up=True, kernel="sde_vp"), 2),
    "fir": (dict(down=True, kernel="fir"), 2),
    "scale and shift": (dict(out_channels=16, time_embedding_norm="scale_shift"), 1),
    "no time": (dict(temb_channels=None), 2),
    "raw time": (dict(skip_time_act=True), 2),
    "scaled": (dict(output_scale_factor=1.5, groups_out=2, eps=1e-5), 2),
}


def make(name: str, dtype=F32, **options) -> nn.Module:
    torch.manual_seed(0)
    options = dict(in_channels=8, groups=4, temb_channels=CONDITION) | CASES[name][0] | options
    block = resnet.ResnetBlock2D(**options)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return block.to(dtype)


def inputs(block: nn.Module, dtype=F32, last: bool = False) -> list[torch.Tensor | None]:
    x = torch.randn(2, 8, 6, 6).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    return [x, None if block.time_emb_proj is None else torch.randn(2, CONDITION).to(dtype)]


def results(block: nn.Module, given, dtype) -> list[torch.Tensor]:
    given = [None if x is None else x.detach().to(dtype).requires_grad_() for x in given]
    y = block(*given)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    leaves = [x for x in (*given, *block.parameters()) if x is not None]
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def assert_same(block: nn.Module, stock: nn.Module, dtype, last: bool = False) -> None:
    exact = copy.deepcopy(stock).double()
    batches = [inputs(block, dtype, last) for _ in range(8)]
    models = ((block, dtype), (exact, F64), (stock, dtype))
    runs = [[results(m, given, t) for given in batches] for m, t in models]
    assert runs[0][0][0].stride() == runs[2][0][0].stride()
    for found in zip(*(zip(*run, strict=True) for run in runs), strict=True):
        ours, ref, base = (torch.stack(tensors) for tensors in found)
        assert ours.dtype is base.dtype
        # Not the bias: that of the convolutions is in both, and cancels by chance in one. The
        # kernel's own is tested by tests/group_norm.
        result = numerics.compare(ours, ref, base)
        assert result.max_error <= result.bound, result


def fused(run) -> int:
    with _dispatch_log.record() as calls:
        run()
    return sum(call["op"] == "group_norm" and "silu" in call["arguments"] for call in calls)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, F32) for name in CASES]
    + [(name, BF16) for name in ("usual", "down", "scale and shift")],
    ids=str,
)
def test_values_gradients_and_the_way_back(name, dtype):
    block, stock = make(name, dtype), make(name, dtype)
    report = onepass.swap(block, kinds="norm", strict=True)
    assert {e["name"]: e["to"] for e in report.swapped}[""] == "onepass group_norm, silu"
    assert list(block.state_dict()) == list(stock.state_dict())
    assert isinstance(block, resnet.ResnetBlock2D)
    given = inputs(block, dtype)
    assert fused(lambda: block(*given)) == CASES[name][1]
    assert_same(block, stock, dtype)
    onepass.unswap(block)
    assert [type(m) for m in block.modules()] == [type(m) for m in stock.modules()]
    assert torch.equal(block(*given), stock(*given))


def test_channels_last_copies_and_pickles():
    block, stock = make("usual"), make("usual")
    onepass.swap(block, kinds="norm")
    assert_same(block, stock, F32, last=True)
    given = inputs(block)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert type(twin) is type(block) and torch.equal(twin(*given), block(*given))


def test_hooks_options_and_further_arguments():
    block, stock, given = make("usual"), make("usual"), inputs(make("usual"))
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


class Subclass(resnet.ResnetBlock2D):
    def forward(self, x, temb):
        return super().forward(x, temb) + 1


def test_other_activations_and_forwards_of_their_own():
    block = make("usual", non_linearity="relu")
    assert not onepass.swap(block, kinds="norm").swapped
    block = make("usual")
    block.nonlinearity = Doubled()
    assert not onepass.swap(block, kinds="norm").swapped
    own = Subclass(in_channels=8, groups=4, temb_channels=CONDITION)
    reasons = {e["name"]: e["reason"].kind for e in onepass.swap(own, kinds="norm").skipped}
    assert reasons[""] is Reason.OWN_FORWARD and reasons["norm1"] is Reason.GROUP_NORM


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
    block = make("same width")
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
    block = make("same width", in_channels=2 * max(4, options["groups"]), **options)
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
