"""transformers' Trainer with onepass's optimizers and the callback that swaps."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import onepass
from onepass import _dispatch_log, numerics
from tests.integrations.transformers_cases import build, implementations, kinds, transformers
from tests.support import fresh

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
safetensors = pytest.importorskip("safetensors.torch")

from onepass.integrations.transformers import SwapCallback, trainer_optimizer  # noqa: E402

STEPS, SAVED, BATCH, LENGTH = 6, 3, 4, 12
LOUD = 0.05  # a clip that always acts


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict:
        ids = torch.randint(2, 32, (LENGTH,), generator=torch.Generator().manual_seed(index % 3))
        return {"input_ids": ids, "labels": ids}


def arguments(folder, **more) -> transformers.TrainingArguments:
    settings = dict(
        per_device_train_batch_size=BATCH, max_steps=STEPS, save_strategy="no", logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2, weight_decay=0.1,
    )  # fmt: skip
    return transformers.TrainingArguments(output_dir=folder, **settings | more)


def trainer_of(model, args, optimizer=None, callback=None, **more) -> transformers.Trainer:
    more["callbacks"] = [callback] if callback else None
    trainer = transformers.Trainer(
        model, args, train_dataset=Texts(), optimizer_cls_and_kwargs=optimizer, **more
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def logged(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def same(one, other) -> bool:
    """Bit for bit, whatever is nested how."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


# ---------------------------------------------------------------- the optimizer


def test_settings_are_the_arguments_own(tmp_path):
    args = arguments(tmp_path, adam_beta2=0.95, adam_epsilon=1e-6)
    adamw, sgd = onepass.optim.AdamW, onepass.optim.SGD
    own = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-6, master="fp32")
    assert trainer_optimizer(args, master="fp32") == (adamw, own)
    assert trainer_optimizer(args, sgd, momentum=0.9) == (sgd, dict(lr=1e-2, momentum=0.9))
    assert dict(trainer_optimizer(args, lr=1.0)[1])["lr"] == 1.0
    assert trainer_optimizer(lr=1.0) == (adamw, dict(lr=1.0))
    trainer = trainer_of(build("llama"), args, trainer_optimizer(args))
    args.learning_rate = 0.5  # as a search over hyperparameters does between two trainings
    assert trainer.create_optimizer().param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "settings, kind, message",
    [
        (dict(master="fp32"), TypeError, "lr must be given"),
        (dict(lr=1e-3, max_grad_norm=1.0), ValueError, "TrainingArguments.max_grad_norm"),
        (dict(lr=1e-3, weight_decay=0.1), ValueError, "TrainingArguments.weight_decay"),
        (dict(lr=1e-3, zero_grads=True), ValueError, "frees gradients after each step"),
        (dict(lr=1e-3, params=[]), ValueError, "is what the Trainer passes"),
        (dict(lr=1e-3, masters="fp32"), TypeError, "must be AdamW's, got .*'masters'"),
        (dict(cls=torch.optim.AdamW), TypeError, "must be a class of onepass.optim"),
        (dict(args={"learning_rate": 1.0}), TypeError, "must be transformers.TrainingArguments"),
    ],
)
def test_what_the_trainer_decides_is_refused(settings, kind, message):
    with pytest.raises(kind, match=message):
        trainer_optimizer(**settings)


def decayed(model, folder, **more) -> tuple[set[str], set[str]]:
    """Names of the parameters with weight decay, and of those without."""
    optimizer = trainer_of(model, arguments(folder), **more).create_optimizer()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first, second = (
        {names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    return first, second


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_norms_and_biases_stay_without_decay(name, tmp_path):
    """Also in an optimizer that is made after the swap."""
    stock, model = build(name), build(name)
    onepass.swap(model)
    expected = decayed(stock, tmp_path)
    optimizer = trainer_optimizer(lr=1e-3)
    assert decayed(model, tmp_path, optimizer=optimizer) == expected
    assert expected[0] and any("ln_1" in n or "norm" in n.lower() for n in expected[1])
    ours = onepass.nn  # under names that do not show what they are
    odd = nn.ModuleDict(
        dict(a=ours.LayerNorm(4), b=ours.AddLayerNorm(4), c=ours.Linear(4, 4),
             d=ours.MultiheadAttention(4, 2))
    )  # fmt: skip
    with_decay, _ = decayed(odd, tmp_path, optimizer=optimizer)
    assert with_decay == {"c.weight", "d.in_proj_weight", "d.out_proj.weight"}


# ---------------------------------------------------------------- training


@pytest.mark.slow
def test_compiled_models_run_it_too(tmp_path):
    """`torch_compile`: the callback swaps before the first graph is made."""
    runs = []
    compiled = dict(torch_compile=True, torch_compile_backend="aot_eager")
    for more in (compiled, {}):
        args = arguments(tmp_path, max_steps=2, **more)
        trainer = trainer_of(build("llama"), args, trainer_optimizer(args), SwapCallback())
        with _dispatch_log.record() as calls:
            trainer.train()
        runs.append(trainer.state.log_history[1]["loss"])
        assert {"attention", "rms_norm"} <= {call["op"] for call in calls}
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


class Watch(transformers.TrainerCallback):
    """Records the model's classes during training, and raises there if told to."""

    def __init__(self, raises: bool = False):
        self.raises, self.kinds, self.norms = raises, [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        gradients = [p.grad.flatten() for p in model.parameters()]
        self.norms.append(float(torch.cat(gradients).norm()))

    def on_step_end(self, args, state, control, model=None, **_):
        self.kinds, self.implementations = kinds(model), implementations(model)
        if self.raises:
            raise KeyboardInterrupt


def test_the_model_is_swapped_for_the_training_and_restored(tmp_path, caplog):
    model, watch = build("gpt2"), Watch()
    before = kinds(model), implementations(model)
    callback = SwapCallback(exclude="*.ln_f", kinds=["norm", "attention"])
    trainer = trainer_of(model, arguments(tmp_path), callback=callback)
    trainer.add_callback(watch)
    with caplog.at_level(logging.INFO, "onepass.swap"), _dispatch_log.record() as calls:
        trainer.train()
    assert watch.kinds != before[0] and set(watch.implementations) == {"onepass"}
    assert (kinds(model), implementations(model)) == before
    assert {"attention", "layer_norm"} <= {call["op"] for call in calls}
    line, *notes, last = [r.getMessage() for r in caplog.records if r.name == "onepass.swap"]
    assert line == (
        "swapped 6 (attention 2, norm 4), skipped 1 (transformer.ln_f: excluded by '*.ln_f')"
    )
    assert f"onepass.swap: {line}" == callback.report.summary()
    assert callback.report.notes == notes and notes
    assert last == "the model is as it was before the run"


@pytest.mark.parametrize(
    "configured, line",
    [
        ("pass", "onepass.swap: swapped"),
        ("logging.basicConfig(level='INFO')", "INFO:onepass.swap:swapped"),
        ("logging.basicConfig(level='WARNING')", None),
        ("logging.getLogger('onepass.swap').setLevel('WARNING')", None),
    ],
)
def test_the_log_is_seen_unless_logging_is_configured_otherwise(configured, line):
    """The name of the logger is in the line once."""
    code = f"import logging; from onepass.integrations import _session; {configured}"
    done = fresh.run(f"{code}; _session.say('swapped')", check=True)
    assert done.stderr.splitlines() == [line] * bool(line)


def test_nothing_swapped_is_a_warning(tmp_path, caplog):
    callback = SwapCallback(exclude="*")
    trainer_of(build("llama"), arguments(tmp_path, max_steps=1), callback=callback).train()
    told = [record for record in caplog.records if record.name == "onepass.swap"]
    (warning,) = [record for record in told if record.levelname == "WARNING"]
    assert warning.getMessage().startswith("swapped 0, skipped")


def test_a_training_that_was_interrupted_leaves_the_model_swapped_until_the_next(tmp_path):
    model, watch, callback = build("llama"), Watch(raises=True), SwapCallback()
    before = kinds(model), implementations(model)
    trainer = trainer_of(model, arguments(tmp_path), callback=callback)
    trainer.add_callback(watch)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert kinds(model) == watch.kinds != before[0]
    callback.restore()
    assert (kinds(model), implementations(model)) == before
    watch.raises = False
    trainer.train()
    assert (kinds(model), implementations(model)) == before


def test_a_swap_of_the_users_stays(tmp_path):
    model = build("llama")
    onepass.swap(model, kinds="norm")
    swapped = kinds(model)
    trainer_of(model, arguments(tmp_path, max_steps=1), callback=SwapCallback()).train()
    assert kinds(model) == swapped


def test_what_comes_too_late_or_is_no_option(tmp_path):
    with pytest.raises(TypeError, match="'kind'"):
        SwapCallback(kind="norm")
    with pytest.raises(ValueError, match="swap\\(model\\) before Trainer\\(model\\), got fsdp="):
        SwapCallback().on_init_end(SimpleNamespace(fsdp=["full_shard"]), None, None)
    callback = SwapCallback(strict=True, probe=False)
    with pytest.raises(RuntimeError, match="under strict"):
        trainer_of(build("llama"), arguments(tmp_path), callback=callback).train()


def test_one_of_the_two_clips(tmp_path):
    """The Trainer clips if the optimizer does not; the optimizer clips if the Trainer must not."""
    runs = []
    for limits in (dict(args=LOUD), dict(args=0.0, own=LOUD), dict(args=LOUD, own=LOUD)):
        model, watch = build("llama"), Watch()
        args = arguments(tmp_path, max_steps=1, max_grad_norm=limits["args"])
        optimizer = onepass.optim.AdamW(model.parameters(), max_grad_norm=limits.get("own"))
        trainer = trainer_of(model, args, None, SwapCallback(), optimizers=(optimizer, None))
        trainer.add_callback(watch)
        if len(runs) == 2:
            with pytest.raises(ValueError, match="0.05 of TrainingArguments and 0.05 of the opt"):
                trainer.train()
            break
        trainer.train()
        runs.append(
            (watch.norms[0], optimizer.grad_norm, trainer.state.log_history[0]["grad_norm"])
        )
    (clipped, own, logged), (unclipped, measured, same) = runs
    assert clipped <= LOUD * (1 + 1e-5) and own is None
    assert unclipped > 10 * LOUD and float(measured) == pytest.approx(unclipped)
    assert logged == pytest.approx(same)


@pytest.mark.parametrize("kept", [True, False])
def test_recomputed_layers_keep_attention(kept, tmp_path):
    """`activation_checkpointing` with a context of torch's."""
    more = {"context_fn": lambda: create_selective_checkpoint_contexts(onepass.sac_ops())}
    args = arguments(
        tmp_path, max_steps=1, activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False, **(more if kept else {})},
    )  # fmt: skip
    with _dispatch_log.record() as calls:
        trainer_of(build("llama"), args, callback=SwapCallback()).train()
    assert [call["op"] for call in calls].count("attention") == (2 if kept else 4)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    "dtype, options, more",
    [
        (torch.float32, {}, {}),
        (torch.float32, {}, dict(bf16=True, gradient_accumulation_steps=2, max_steps=4)),
        (torch.bfloat16, dict(master="fp32"), {}),
        (torch.bfloat16, dict(master="remainder16", state_dtype="bfloat16"), {}),
        (torch.bfloat16, dict(master="stochastic"), {}),
    ],
    ids=["float32", "autocast", "fp32", "remainder16", "stochastic"],
)
def test_a_run_resumed_is_the_run_uninterrupted(dtype, options, more, tmp_path):
    """Bit for bit, with dropout, including the optimizer's states and the log."""
    args = {**dict(save_strategy="steps", save_steps=SAVED), **more}
    args["save_steps"] = min(SAVED, args.get("max_steps", STEPS) // 2)
    runs = []
    for checkpoint in (None, tmp_path / f"checkpoint-{args['save_steps']}"):
        model = build("gpt2").to(dtype)
        own = arguments(tmp_path if checkpoint is None else tmp_path / "resumed", **args)
        trainer = trainer_of(model, own, trainer_optimizer(own, **options), SwapCallback())
        trainer.train(resume_from_checkpoint=checkpoint)
        losses = logged(trainer)
        runs.append((model.state_dict(), trainer.optimizer.state_dict(), losses))
    assert same(*runs) and len(losses) == own.max_steps
    has_master = options.get("master") in ("fp32", "remainder16")
    assert ("master" in runs[0][1]["state"][0]) == has_master


def test_adapters_of_peft_train_and_resume(tmp_path):
    """They alone are stepped and saved, by stock's names; resumed bit for bit."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def run(folder, ours: bool, checkpoint=None, dtype=torch.float32):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        torch.manual_seed(1)
        model = peft.get_peft_model(build("llama").to(dtype), config)
        args = arguments(folder, save_strategy="steps", save_steps=SAVED, adam_epsilon=1e-3)
        swapping = (trainer_optimizer(args), SwapCallback()) if ours else ()
        trainer = trainer_of(model, args, *swapping)
        trainer.train(resume_from_checkpoint=checkpoint)
        return model, torch.tensor(logged(trainer), dtype=torch.float64)

    stock, base = run(tmp_path / "stock", False)
    _, ref = run(tmp_path / "double", False, dtype=torch.float64)
    ours, losses = run(tmp_path / "ours", True)
    again, _ = run(tmp_path / "again", True, tmp_path / f"ours/checkpoint-{SAVED}")
    assert ref[-1] < ref[0] - 0.1  # it trains
    numerics.assert_close(losses.float(), ref, base)
    assert same(ours.state_dict(), again.state_dict())
    frozen = {name: p for name, p in stock.named_parameters() if not p.requires_grad}
    assert frozen and all(torch.equal(p, ours.get_parameter(name)) for name, p in frozen.items())
    files = [
        safetensors.load_file(tmp_path / f"{name}/checkpoint-{STEPS}/adapter_model.safetensors")
        for name in ("stock", "ours")
    ]
    assert files[0].keys() == files[1].keys() and len(files[0]) == 8
