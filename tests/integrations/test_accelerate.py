"""onepass's modules and optimizers prepared by Accelerate; on several processes:
tests/distributed/test_accelerate.py."""

import pytest
import torch
from torch import nn

import onepass
from onepass import numerics

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

STEPS, LOUD = 4, 0.05  # a clip that always acts
BATCHES = torch.randn(STEPS, 3, 5, 16, generator=torch.Generator().manual_seed(1))


def reset() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture
def accelerator():
    """Makes an Accelerator, and resets the state that the package keeps for the process."""

    def make(**options) -> accelerate.Accelerator:
        reset()
        return accelerate.Accelerator(cpu=True, **options)

    reset()
    yield make
    reset()


def build(seed: int = 0, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(dtype)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch.to(next(model.parameters()).dtype)) - 1.0).float().square().mean()


def train(made, model, optimizer, steps=range(STEPS)) -> list[torch.Tensor]:
    """A loop as in Accelerate's documentation."""
    losses = []
    for step in steps:
        with made.accumulate(model):
            losses.append(loss_of(model, BATCHES[step]))
            made.backward(losses[-1])
            if made.sync_gradients:
                made.clip_grad_norm_(model.parameters(), LOUD)
            optimizer.step()
            optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_prepared_loop_is_the_plain_one(accelerator):
    """Bit for bit: with accumulated gradients, clipped, and a schedule."""
    model, plain = build(), build()
    onepass.swap(model), onepass.swap(plain)
    optimizers = [onepass.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, total_iters=2) for o in optimizers]
    made = accelerator(gradient_accumulation_steps=2)
    prepared, optimizer, scheduler = made.prepare(model, optimizers[0], schedulers[0])
    for step in range(STEPS):
        train(made, prepared, optimizer, [step])
        scheduler.step()
        (loss_of(plain, BATCHES[step]) / 2).backward()
        if step % 2:
            assert nn.utils.clip_grad_norm_(plain.parameters(), LOUD) > 2 * LOUD
            optimizers[1].step()
            schedulers[1].step()
            optimizers[1].zero_grad()
    assert same(model, plain) and not same(model, build())
    one, other = (o.param_groups[0]["lr"] for o in optimizers)
    assert one == other == pytest.approx(1e-2)


@pytest.mark.parametrize("early", [True, False])
def test_autocast_is_as_close_to_the_truth_as_stocks(early, accelerator):
    """`mixed_precision="bf16"`; swapped before `prepare` or after."""

    def curve(seed, ours: bool, double: bool = False):
        model = build(seed, torch.float64 if double else torch.float32)
        made = accelerator(mixed_precision="no" if double else "bf16")
        if ours and early:
            onepass.swap(model)
        cls = onepass.optim.AdamW if ours else torch.optim.AdamW
        prepared, optimizer = made.prepare(model, cls(model.parameters(), lr=1e-2, eps=1e-3))
        if ours and not early:
            onepass.swap(prepared)
        return torch.stack(train(made, prepared, optimizer))

    seeds = range(6)
    ours, base = ([curve(seed, which) for seed in seeds] for which in (True, False))
    ref = [curve(seed, False, double=True) for seed in seeds]
    numerics.assert_close(ours, ref, base)


@pytest.mark.parametrize(
    "dtype, precision, options",
    [
        (torch.float32, "bf16", {}),
        (torch.bfloat16, "no", dict(master="fp32")),
        (torch.bfloat16, "no", dict(master="remainder16", state_dtype="int8")),
    ],
    ids=["autocast", "fp32", "remainder16"],
)
def test_a_state_that_is_loaded_continues_bitwise(dtype, precision, options, accelerator, tmp_path):
    """With dropout: `save_state` keeps the random state."""
    models = []
    for resumes in (False, True):
        model = build(dtype=dtype, dropout=0.1)
        onepass.swap(model)
        made = accelerator(mixed_precision=precision)
        optimizer = onepass.optim.AdamW(model.parameters(), lr=1e-2, **options)
        prepared, optimizer = made.prepare(model, optimizer)
        if resumes:
            made.load_state(tmp_path)
        else:
            train(made, prepared, optimizer, range(2))
            made.save_state(tmp_path)
        train(made, prepared, optimizer, range(2, STEPS))
        models.append(model)
    assert same(*models) and not same(models[0], build(dtype=dtype))


@pytest.mark.parametrize("clips", [True, False])
def test_a_step_that_overflows_is_one_that_was_skipped(clips, accelerator):
    """As with torch's optimizers: schedulers then wait."""
    made = accelerator()
    runs = []
    for cls in (onepass.optim.AdamW, torch.optim.AdamW):
        model = build()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = accelerate.optimizer.AcceleratedOptimizer(
            cls(model.parameters(), lr=1e-2), scaler=scaler
        )
        skipped = []
        for scale in (1.0, float("inf"), 1.0):
            scaler.scale(loss_of(model, BATCHES[0]) * scale).backward()
            if clips:
                scaler.unscale_(optimizer.optimizer)
                made.clip_grad_norm_(model.parameters(), LOUD)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
        runs.append((skipped, scaler.get_scale()))
    assert runs[0] == runs[1] == ([False, True, False], 512.0)
