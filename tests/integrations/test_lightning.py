"""Under PyTorch Lightning's trainer: the callback that swaps, mixed precision, clipping."""

import contextlib
import copy
import logging
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onepass import _dispatch_log, numerics, optim
from tests.optim.cases import FLAGS, ours, stock
from tests.swap.reported import types as kinds

pl = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")

from pytorch_lightning.plugins import MixedPrecision  # noqa: E402

from onepass.integrations.lightning import Swap  # noqa: E402

LOUD = 0.01  # a clip that always acts
STAGES = ("fit", "validate", "test", "predict")


class Module(pl.LightningModule):
    """A model that is made in `configure_model`, as Lightning recommends."""

    def __init__(self, seed: int = 0, raises: bool = False, **options):
        super().__init__()
        self.seed, self.raises, self.options = seed, raises, options
        self.model, self.losses, self.kinds = None, [], []

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(self.seed)
            dtype = torch.get_default_dtype()  # of the precision; all draw the same weights
            torch.set_default_dtype(torch.float32)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(dtype)
            torch.set_default_dtype(dtype)

    def forward(self, batch):
        self.kinds = kinds(self)
        return self.model(batch[0].to(self.dtype))

    def training_step(self, batch, _):
        loss = (self(batch) - 1.0).square().mean()
        self.losses.append(loss.detach())
        if self.raises:
            raise ZeroDivisionError
        return loss

    def validation_step(self, batch, _):
        self(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, **self.options)


DATA = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(1))


def run(module, folder, *callbacks, stage="fit", ckpt_path=None, data=DATA, rows=2, **options):
    options = {"max_epochs": 1, **options}
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, default_root_dir=folder, callbacks=list(callbacks),
            **dict.fromkeys(off, False), **options,
        )  # fmt: skip
        getattr(trainer, stage)(module, loader, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("stage", STAGES)
def test_the_model_is_swapped_for_the_run_and_restored(stage, tmp_path, caplog):
    module, callback = Module(), Swap(kinds=["norm", "attention"], exclude="*.1.norm2")
    module.configure_model()
    before = kinds(module)
    with caplog.at_level(logging.INFO, "onepass.swap"), _dispatch_log.record() as calls:
        run(module, tmp_path, callback, stage=stage)
    assert module.kinds != before and kinds(module) == before
    assert "attention" in {call["op"] for call in calls}
    line, *_, last = [r.getMessage() for r in caplog.records if r.name == "onepass.swap"]
    assert f"onepass.swap: {line}" == callback.report.summary()
    assert line == (
        "swapped 7 (attention 4, norm 3), skipped 1 (model.layers.1.norm2: excluded by '*.1.norm2')"
    )
    assert last == "the model is as it was before the run"


@pytest.mark.parametrize("raises", [False, True])
def test_what_configure_model_makes_is_swapped_and_restored(raises, tmp_path):
    module, callback = Module(raises=raises), Swap()
    with pytest.raises(ZeroDivisionError) if raises else contextlib.nullcontext():
        run(module, tmp_path, callback)
    assert {entry["kind"] for entry in callback.report.swapped} >= {"norm", "attention"}
    stock = Module()
    stock.configure_model()
    assert module.kinds != kinds(module) == kinds(stock)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_a_run_resumed_is_the_run_uninterrupted(precision, tmp_path):
    """Bit for bit, from a checkpoint with stock's keys."""
    options = dict(precision=precision)
    master = dict(master="fp32") if precision == "bf16-true" else {}
    whole = Module(**master)
    trainer = run(whole, tmp_path, Swap(), max_epochs=3, **options)
    half = Module(**master)
    run(half, tmp_path, Swap(), **options).save_checkpoint(tmp_path / "half.ckpt")
    resumed = Module(**master)
    resumed.configure_model()
    again = run(
        resumed, tmp_path, Swap(), max_epochs=3, ckpt_path=tmp_path / "half.ckpt", **options
    )
    stored = torch.load(tmp_path / "half.ckpt", weights_only=False)
    assert list(stored["state_dict"]) == list(Module.state_dict(resumed))
    assert ("master" in stored["optimizer_states"][0]["state"][0]) == bool(master)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert trainer.global_step == again.global_step == 12


def test_one_of_the_two_clips(tmp_path):
    for how in (None, "norm"):
        both = dict(gradient_clip_val=LOUD, gradient_clip_algorithm=how)
        with pytest.raises(ValueError, match="gradient_clip_val=0.01 of the trainer and max_grad_"):
            run(Module(max_grad_norm=LOUD), tmp_path, Swap(), **both)
    trainer = run(Module(max_grad_norm=LOUD), tmp_path, Swap())
    assert trainer.optimizers[0].grad_norm > 10 * LOUD
    run(Module(), tmp_path, Swap(), gradient_clip_val=LOUD)
    by_value = dict(gradient_clip_val=LOUD, gradient_clip_algorithm="value")
    run(Module(max_grad_norm=LOUD), tmp_path, Swap(), **by_value)


def test_what_comes_too_late_or_is_no_option():
    with pytest.raises(TypeError, match="'kind'"):
        Swap(kind="norm")
    strategy = pl.strategies.ModelParallelStrategy()
    with pytest.raises(ValueError, match=r"swap\(self.model\) in configure_model, got ModelPar"):
        Swap().setup(SimpleNamespace(strategy=strategy), nn.Module(), "fit")


def test_it_is_a_callback_that_travels():
    assert isinstance(Swap(), pl.Callback)
    assert type(pickle.loads(pickle.dumps(Swap(kinds="norm")))) is Swap


# ---- optimizers: precisions, with and without the trainer's clipping -----------------------------


class Recording(Module):
    """Records the gradients before the trainer clips them, and those of each step."""

    def __init__(self, name: str, **options):
        super().__init__(3, **options)
        self.configure_model()
        self.name = name
        self.unclipped: list[float] = []
        self.gradients: list[list[torch.Tensor]] = []

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


def fit(module: Module, folder, precision: str, **options) -> None:
    plugins = None
    if precision == "16-mixed":  # the trainer's own choice on the CPU would be bfloat16
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins, precision = MixedPrecision("16-mixed", "cpu", scaler), None
    run(module, folder, precision=precision, plugins=plugins, **options)


def replayed(module: Recording, start: list, dtype: torch.dtype) -> list[torch.Tensor]:
    """The weights from the recorded gradients, by torch's optimizer or the definition."""
    params = [torch.nn.Parameter(p.to(dtype)) for p in start]
    optimizer = stock(module.name)(params, **FLAGS[module.name])
    for gradients in module.gradients:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.to(dtype)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("clip", [None, LOUD], ids=["", "clipped"])
@pytest.mark.parametrize(
    ("precision", "name"), [("32-true", "SGD"), ("bf16-mixed", "Lion"), ("16-mixed", "AdamW")]
)
def test_trains_as_with_torchs(precision, clip, name, tmp_path):
    module = Recording(name)
    start = copy.deepcopy([p.detach() for p in module.parameters()])
    fit(module, tmp_path, precision, gradient_clip_val=clip)
    assert len(module.gradients) >= 4 and min(module.unclipped) > 10 * LOUD
    for gradients in module.gradients:
        assert (norm(gradients) <= LOUD * (1 + 1e-5)) == (clip is not None)
    weights = [p.detach() for p in module.parameters()]
    twins = (replayed(module, start, dtype) for dtype in (torch.float64, torch.float32))
    numerics.assert_close(weights, *twins)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_fused_is_left_to_unscale_as_torchs_is(precision, tmp_path):
    """Without clipping, the step gets the scaled gradients; with it, Lightning refuses."""
    module = Recording("AdamW", fused=True)
    fit(module, tmp_path, precision)
    assert len(module.gradients) >= 4
    if precision == "16-mixed":
        assert min(module.unclipped) > 100 * max(map(norm, module.gradients))
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Recording("AdamW", fused=True), tmp_path, precision, gradient_clip_val=LOUD)


def test_a_norm_of_our_own_needs_no_trainer(tmp_path):
    module = Recording("AdamW", max_grad_norm=LOUD)
    fit(module, tmp_path, "16-mixed")
    assert isinstance(module.trainer.optimizers[0], optim.AdamW)
    assert module.trainer.optimizers[0].grad_norm > 10 * LOUD
