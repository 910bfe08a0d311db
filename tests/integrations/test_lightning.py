"""Under PyTorch Lightning's trainer: mixed precision, with and without the trainer's clipping."""

from __future__ import annotations

import copy

import pytest
import torch

from onepass import numerics, optim
from tests.integrations.test_lightning_swap import run
from tests.optim.cases import FLAGS, ours, stock

pl = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
MixedPrecision = pytest.importorskip("pytorch_lightning.plugins").MixedPrecision

CLIP = 0.05
LOUD = 16.0  # of losses: gradients far above CLIP


class Module(pl.LightningModule):
    """Records the gradients before the trainer clips them, and those of each step."""

    def __init__(self, name: str, **options):
        super().__init__()
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(20, 16), torch.nn.GELU(), torch.nn.Linear(16, 3)
        )
        self.name, self.options = name, options
        self.unclipped: list[float] = []
        self.gradients: list[list[torch.Tensor]] = []

    def training_step(self, batch, _):
        return LOUD * self.model(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = ours(self.name)(self.parameters(), **FLAGS[self.name], **self.options)
        optimizer.register_step_post_hook(self._record)  # a closure makes the gradients
        return optimizer

    def on_before_optimizer_step(self, optimizer):
        self.unclipped.append(norm([p.grad for p in self.parameters()]))

    def _record(self, optimizer, *_):
        scale = getattr(optimizer, "grad_scale", None)
        scale = 1.0 if scale is None else float(scale)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or float(found_inf) == 0.0:
            self.gradients.append([p.grad.clone() / scale for p in self.parameters()])


def norm(gradients: list[torch.Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in gradients]).norm())


DATA = torch.randn(80, 20, generator=torch.Generator().manual_seed(4))


def fit(module: Module, folder, precision: str, **options) -> None:
    plugins = None
    if precision == "16-mixed":  # the trainer's own choice on the CPU would be bfloat16
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins, precision = MixedPrecision("16-mixed", "cpu", scaler), None
    run(module, folder, data=DATA, rows=8, precision=precision, plugins=plugins, **options)


def replayed(module: Module, start: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The weights from the recorded gradients, by torch's optimizer or the definition."""
    params = [torch.nn.Parameter(p.to(dtype)) for p in start]
    optimizer = stock(module.name)(params, **FLAGS[module.name])
    for gradients in module.gradients:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.to(dtype)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("clip", [None, CLIP], ids=["", "clipped"])
@pytest.mark.parametrize(
    ("precision", "name"), [("32-true", "SGD"), ("bf16-mixed", "Lion"), ("16-mixed", "AdamW")]
)
def test_trains_as_with_torchs(precision, clip, name, tmp_path):
    module = Module(name)
    start = copy.deepcopy([p.detach() for p in module.parameters()])
    fit(module, tmp_path, precision, gradient_clip_val=clip)
    assert len(module.gradients) >= 4 and min(module.unclipped) > 10 * CLIP
    for gradients in module.gradients:
        assert (norm(gradients) <= CLIP * (1 + 1e-5)) == (clip is not None)
    weights = [p.detach() for p in module.parameters()]
    twins = (replayed(module, start, dtype) for dtype in (torch.float64, torch.float32))
    numerics.assert_close(weights, *twins)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_fused_is_left_to_unscale_as_torchs_is(precision, tmp_path):
    """Without clipping, the step gets the scaled gradients; with it, Lightning refuses."""
    module = Module("AdamW", fused=True)
    fit(module, tmp_path, precision)
    assert len(module.gradients) >= 4
    if precision == "16-mixed":
        assert min(module.unclipped) > 100 * max(map(norm, module.gradients))
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Module("AdamW", fused=True), tmp_path, precision, gradient_clip_val=CLIP)


def test_a_norm_of_our_own_needs_no_trainer(tmp_path):
    module = Module("AdamW", max_grad_norm=CLIP)
    fit(module, tmp_path, "16-mixed")
    assert isinstance(module.trainer.optimizers[0], optim.AdamW)
    assert module.trainer.optimizers[0].grad_norm > 10 * CLIP
