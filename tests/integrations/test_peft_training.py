"""Training LoRA on quantised models: transformers' Trainer, Accelerate, checkpointing, the loss."""

import copy
import functools

import pytest
import torch

import onepass
from onepass import numerics
from tests.integrations.transformers_cases import IDS, build, transformers

peft = pytest.importorskip("peft", reason="peft is not installed")
accelerate = pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
safetensors = pytest.importorskip("safetensors.torch", reason="adapters are saved with it")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from onepass.integrations.transformers import SwapCallback, trainer_optimizer  # noqa: E402
from onepass.nn import QuantizedLinear  # noqa: E402
from onepass.tools.compare.train import ADAMW, BAND_FACTOR, STOCK_RUNS  # noqa: E402
from onepass.tools.data import Batches, load_text  # noqa: E402

STEPS, SAVED, BATCH, LENGTH = 6, 3, 4, 12


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict:
        ids = torch.randint(2, 32, (LENGTH,), generator=torch.Generator().manual_seed(index % 3))
        return {"input_ids": ids, "labels": ids}


def adapted(quantised: bool = True, dtype: torch.dtype = torch.float32, **options):
    """A small Llama with LoRA on all linear layers; without codes it has the same weights."""
    model = build("llama")
    onepass.quantize(model, "nf4")
    if not quantised:
        onepass.dequantize(model)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules="all-linear", **options)
    return peft.get_peft_model(model.to(dtype), config)


def trainer_of(model, folder, ours: bool = True, **more) -> transformers.Trainer:
    settings = dict(
        per_device_train_batch_size=BATCH, max_steps=STEPS, save_strategy="steps", save_steps=SAVED,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2,
        adam_epsilon=1e-3,
    )  # fmt: skip
    args = transformers.TrainingArguments(output_dir=folder, **settings | more)
    of = dict(optimizer_cls_and_kwargs=trainer_optimizer(args), callbacks=[SwapCallback()])
    trainer = transformers.Trainer(model, args, train_dataset=Texts(), **(of if ours else {}))
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def losses_of(trainer) -> torch.Tensor:
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor(found, dtype=torch.float64)


def same_states(one, other) -> bool:
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("ours", [True, False], ids=["swapped", "quantised alone"])
def test_a_run_of_the_trainer_resumed_is_the_run_uninterrupted(ours, tmp_path):
    """Bit for bit, with dropout; codes do not change, and are in no checkpoint."""
    runs = []
    for checkpoint in (None, tmp_path / f"checkpoint-{SAVED}"):
        model = adapted(lora_dropout=0.1)
        first = {n: t.clone() for n, t in model.named_buffers()}
        trainer = trainer_of(model, tmp_path if checkpoint is None else tmp_path / "again", ours)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append((model, losses_of(trainer)))
        assert all(torch.equal(t, first[n]) for n, t in model.named_buffers())
    assert same_states(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    saved = safetensors.load_file(tmp_path / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    assert len(saved) == 28 and all(".lora_A." in name or ".lora_B." in name for name in saved)
    assert not same_states(runs[0][0], adapted(lora_dropout=0.1))


def test_losses_of_the_trainer_are_as_close_as_stocks(tmp_path):
    """To a run in float64 on the dequantised base; the checkpoints have the same names."""
    curves, plain = {}, {"quantised": False}
    models = {"ours": {}, "stock": plain, "double": plain | {"dtype": torch.float64}}
    for name, options in models.items():
        trainer = trainer_of(adapted(**options), tmp_path / name, name == "ours")
        trainer.train()
        curves[name] = losses_of(trainer)
    assert curves["double"][-1] < curves["double"][0] - 0.1  # it trains
    numerics.assert_close(curves["ours"].float(), curves["double"], curves["stock"])
    files = [
        safetensors.load_file(tmp_path / name / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
        for name in ("ours", "stock")
    ]
    assert files[0].keys() == files[1].keys()
    loaded = peft.PeftModel.from_pretrained(build("llama"), tmp_path / "ours/checkpoint-6")
    loaded(IDS)  # stock's float32 base


def test_a_state_of_accelerate_continues_bitwise(tmp_path):
    """`save_state` and `load_state`, with dropout; the state has the codes."""

    def train(made, model, optimizer, steps) -> None:
        for step in steps:
            made.backward(model((IDS + step) % 32, labels=IDS).loss)
            made.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()

    models = []
    try:
        for resumes in (False, True):
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            made, model = accelerate.Accelerator(cpu=True), adapted(lora_dropout=0.1).train()
            onepass.swap(model)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = onepass.optim.AdamW(trained, lr=1e-2)
            model, optimizer = made.prepare(model, optimizer)
            if resumes:
                made.load_state(tmp_path)
            else:
                train(made, model, optimizer, range(2))
                made.save_state(tmp_path)
            train(made, model, optimizer, range(2, 4))
            models.append(model)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    assert same_states(*models) and not same_states(models[0], adapted(lora_dropout=0.1))


@pytest.mark.parametrize("by", ["model", "trainer"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dora", [True, False])
def test_gradient_checkpointing(dora, reentrant, by, tmp_path):
    """The same gradients, bit for bit; peft lets the input require one, which reentrant
    checkpoints need."""
    plain = adapted(use_dora=dora).train()
    plain(IDS, labels=IDS).loss.backward()
    model = build("llama")
    onepass.quantize(model, "nf4")
    options = {"use_reentrant": reentrant}
    if by == "model":
        model.gradient_checkpointing_enable(options)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules="all-linear", use_dora=dora)
    model = peft.get_peft_model(model, config).train()
    if by == "trainer":
        more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}
        trainer = trainer_of(model, tmp_path, max_steps=1, save_strategy="no", **more)
        trainer.train()
        model.zero_grad()
        model.load_state_dict(plain.state_dict())
    model(IDS, labels=IDS).loss.backward()
    for name, parameter in plain.named_parameters():
        other = model.get_parameter(name).grad
        assert (other is None) == (parameter.grad is None), name
        assert other is None or torch.equal(other, parameter.grad), name


def test_prepared_for_kbit_training():
    """peft freezes what is left, and makes it float32. It knows no flag of ours, so checkpointing
    is for the user to switch on."""
    model = build("llama").to(torch.bfloat16)
    onepass.quantize(model, "nf4")
    model = peft.prepare_model_for_kbit_training(model)
    assert not any(p.requires_grad for p in model.parameters())
    assert model.lm_head.weight.dtype is model.model.norm.weight.dtype is torch.float32
    assert not model.is_activation_checkpointing
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear")).train()
    of_layers = {m.dtype for m in model.modules() if isinstance(m, QuantizedLinear)}
    assert of_layers == {torch.bfloat16}  # the dtype of what dequantize makes
    model(IDS, labels=IDS).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 28 and all(p.grad is not None for p in trained)


def test_a_quantised_model_without_adapters_has_nothing_to_train_but_the_rest(tmp_path):
    """The Trainer asks for adapters where a quantizer of transformers made the model; ours trains
    its norms and embeddings."""
    model = build("llama")
    onepass.quantize(model, "nf4")
    codes = copy.deepcopy(dict(model.named_buffers()))
    trainer_of(model, tmp_path, max_steps=1, save_strategy="no").train()
    assert all(torch.equal(t, codes[n]) for n, t in model.named_buffers())


def test_a_model_that_transformers_quantised_while_loading(tmp_path):
    """The Trainer takes it with adapters alone; peft is told of the layers by the loading."""
    from onepass.integrations.peft import unregister
    from onepass.integrations.transformers import QuantizationConfig

    build("llama").save_pretrained(tmp_path / "base")
    unregister()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=QuantizationConfig("nf4")
    )
    with pytest.raises(ValueError, match="purely quantized models"):
        trainer_of(model, tmp_path / "run")
    options = {"use_reentrant": False}  # otherwise model.enable_input_require_grads() comes first
    model.gradient_checkpointing_enable(options)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    trainer_of(model, tmp_path / "run").train()
    plain = adapted()
    trainer_of(plain, tmp_path / "plain").train()
    assert same_states(model, plain)


# ---- a run on real text -------------------------------------------------------------------------

RUN, WIDTH, BLOCK, ROWS, EVERY = 200, 64, 32, 4, 10


@functools.cache
def text():
    return load_text()


def curve(quantised: bool, order: int = 0) -> list[float]:
    """Losses of a QLoRA run. An order permutes the features between the layers of an MLP, which
    changes nothing but the order of sums."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=BLOCK,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    onepass.quantize(model, "nf4")
    if not quantised:
        onepass.dequantize(model)
    config = peft.LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"])
    model = peft.get_peft_model(model, config)
    if order:
        permute(model, order)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    batches, losses = Batches(text(), BLOCK, ROWS, seed=0), []
    for step in range(RUN):
        tokens, targets = batches(step)
        logits = model(tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            losses.append(float(loss.detach()))
    return losses


def permute(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.base_model.model.model.layers:
            order = torch.randperm(2 * WIDTH, generator=generator)
            for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
                for weight in (part.base_layer.weight, part.lora_B["default"].weight):
                    weight.copy_(weight[order])
            part = layer.mlp.down_proj
            for weight in (part.base_layer.weight, part.lora_A["default"].weight):
                weight.copy_(weight[:, order])


@pytest.mark.slow
def test_losses_of_two_hundred_steps_lie_in_the_band_of_stocks():
    """By the rule of `onepass compare`: at most twice as far from stock's run as stock's runs,
    which differ in the order of their sums alone, are from each other."""
    stock = [curve(False, order) for order in range(STOCK_RUNS)]
    ours = curve(True)
    assert stock[0][-1] < stock[0][0] - 0.5  # it has learnt something
    band = max(max(point) - min(point) for point in zip(*stock, strict=True))
    gap = max(abs(a - b) for a, b in zip(ours, stock[0], strict=True))
    assert gap <= BAND_FACTOR * band, f"gap {gap:.2e}, stock against stock {band:.2e}"
