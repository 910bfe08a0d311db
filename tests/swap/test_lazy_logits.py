"""swap(lazy_logits=True): the loss of a model of transformers without its logits."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import numerics
from onepass._policy import small_calls
from onepass.swapping.reasons import Reason
from tests.support.largest import Largest
from tests.swap.lazy_logits_cases import (
    MODELS,
    SIZES,
    VOCABULARY,
    LazyLogits,
    assert_same,
    assert_same_steps,
    count,
    gradients,
    labelled,
    make,
    pair,
    transformers,
    waits,
)

CHUNK_OF_WORD = small_calls.CHUNK_OF_WORD


pytestmark = pytest.mark.usefixtures("every_loss_gains")


# ---- the loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_its_gradients(name, dtype):
    stock, batch = make(name).to(dtype), labelled()
    model = copy.deepcopy(stock)
    (entry,) = onepass.swap(model, kinds="loss", lazy_logits=True, strict=True).swapped
    assert entry["to"] == "onepass.functional.linear_cross_entropy" and entry["kind"] == "loss"
    output = model(**batch)
    assert waits(output.logits) and output.loss.dtype is torch.float32
    expected = stock(**batch).logits
    assert output.logits.dtype is expected.dtype and output.logits.shape == expected.shape
    assert output.logits.stride() == expected.stride() and output.logits.requires_grad
    assert count(lambda: model(**batch)) == 1
    assert_same(model, stock, batch)


def test_verify_and_back():
    model, stock = pair()
    batch = labelled()
    loss = model(**batch).loss
    report = onepass.swap(model, kinds="loss", lazy_logits=True)
    assert report.verify(batch).ok
    assert list(model.state_dict()) == list(stock.state_dict())
    assert type(model.lm_head) is nn.Linear and model.get_output_embeddings() is model.lm_head
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model) and waits(twin(**batch).logits)
        assert torch.equal(twin(**batch).loss, loss)
    assert onepass.unswap(model) == [""] and type(model) is type(stock)
    assert torch.equal(model(**batch).loss, stock(**batch).loss)


def test_a_way_back():
    model = make()

    def state():
        modules = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
        return modules, list(map(id, model.state_dict(keep_vars=True).values()))

    before, keys = state(), list(model.state_dict())
    onepass.swap(model, lazy_logits=True)
    model(**labelled()).loss.backward()
    assert list(model.state_dict()) == keys
    onepass.unswap(model)
    assert state() == before


def test_off_by_default():
    model = make()
    onepass.swap(model)
    output = model(**labelled())
    assert type(output.logits) is torch.Tensor
    output.logits.retain_grad()
    output.loss.backward()
    assert output.logits.grad is not None


def test_swapped_whole():
    model, batch = make(), labelled()
    stock = copy.deepcopy(model)
    report = onepass.swap(model, lazy_logits=True)
    assert count(lambda: model(**batch)) == 1
    assert report.verify(batch).ok
    assert any("computed when they are read" in note for note in report.notes)
    numerics.assert_close(
        model(**batch).logits.detach() + 0,
        copy.deepcopy(stock).double()(**batch).logits,
        stock(**batch).logits,
    )


def _is_made(x: torch.Tensor) -> bool:
    return not isinstance(x, LazyLogits)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_step_makes_no_logits(name):
    model, stock = pair(name)
    batch = labelled(rows=4, length=200)
    logits = 4 * 200 * VOCABULARY
    with Largest(_is_made) as ours:
        model(**batch).loss.backward()
    with Largest(_is_made) as theirs:
        stock(**batch).loss.backward()
    assert ours.elements < logits <= theirs.elements


def test_the_arguments_of_the_loss():
    model, stock = pair()
    batch = labelled()
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    for options in (
        dict(num_items_in_batch=50),
        dict(num_items_in_batch=torch.tensor(50)),
        dict(shift_labels=shifted),
        dict(shift_labels=shifted[:, -4:].contiguous(), logits_to_keep=4),
        dict(ignore_index=7, labels=batch["labels"].clamp(min=7)),
        dict(return_dict=False),
    ):
        given = {**batch, **options}
        assert count(lambda given=given: model(**given)) == 1, options
        if "return_dict" not in options:
            assert_same(model, stock, given)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side):
    model, stock = pair()
    batch = labelled()
    mask = torch.ones_like(batch["input_ids"])
    padded = mask[0, :4] if side == "left" else mask[0, -4:]
    padded.zero_()
    labels = batch["labels"].masked_fill(mask == 0, -100)
    assert_same(model, stock, dict(batch, labels=labels, attention_mask=mask))


def test_float16():
    stock, batch = make().half(), labelled()
    model = copy.deepcopy(stock)
    onepass.swap(model, kinds="loss", lazy_logits=True)
    assert count(lambda: model(**batch)) == 1
    assert_same(model, stock, batch, of=lambda out: out.loss * 64.0)


def test_batches_without_a_target():
    model, stock = pair()
    batch = labelled()
    nothing = dict(batch, labels=torch.full_like(batch["labels"], -100))
    assert model(**nothing).loss.isnan() and stock(**nothing).loss.isnan()
    assert model(**nothing, num_items_in_batch=7).loss == 0.0


def test_a_target_that_is_no_word():
    model, _ = pair()
    batch = labelled()
    batch["labels"][0, 5] = VOCABULARY
    with pytest.raises(RuntimeError, match="target must lie between 0 and 599"):
        model(**batch)


def test_labels_by_their_place():
    model, _ = pair("Llama")
    batch = labelled()
    ids, labels = batch["input_ids"], batch["labels"]
    assert waits(model(ids, None, None, None, None, labels).logits)


def test_labels_that_do_not_fit_raise_as_before():
    model, stock = pair()
    batch = labelled()
    for m in (model, stock):
        with pytest.raises((ValueError, RuntimeError), match="target"):
            m(**batch, logits_to_keep=3)


def test_accumulated_batches():
    """As in the Trainer: sums, divided by the items of all batches."""
    model, stock = pair()
    batches = [labelled(), labelled(2, 17)]
    items = sum((b["labels"][:, 1:] != -100).sum() for b in batches)

    def step(m):
        for batch in batches:
            m(**batch, num_items_in_batch=items).loss.backward()

    assert_same_steps(model, stock, step)


def test_under_autocast():
    model, stock = pair()
    batch = labelled()

    def autocast(m, given):
        with torch.autocast("cpu", torch.bfloat16):
            return m(**given)

    output, expected = autocast(model, batch), autocast(stock, batch)
    assert waits(output.logits) and output.logits.dtype is torch.bfloat16
    assert output.loss.dtype is expected.loss.dtype
    assert torch.equal(output.logits + 0, expected.logits)  # read where autocast is off
    double = copy.deepcopy(stock).double()
    draws = []
    for given in (batch, *(labelled() for _ in range(7))):
        outputs = autocast(model, given), double(**given), autocast(stock, given)
        models = model, double, stock
        draws.append(
            [
                [out.loss.detach(), *gradients(m, out.loss)]
                for m, out in zip(models, outputs, strict=True)
            ]
        )
    for results in zip(*(zip(*draw, strict=True) for draw in draws), strict=True):
        numerics.assert_close(*map(list, zip(*results, strict=True)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_as_a_whole(use_reentrant):
    model, stock = pair()
    batch = labelled()
    embedded = stock.model.embed_tokens(batch["input_ids"]).detach()

    def step(m):
        def run(x):
            return m(inputs_embeds=x, labels=batch["labels"]).loss

        x = embedded.to(m.dtype).requires_grad_()
        checkpoint(run, x, use_reentrant=use_reentrant).backward()

    assert_same_steps(model, stock, step)


def test_gradient_checkpointing_of_layers():
    model, stock = pair()
    for m in (model, stock):
        m.gradient_checkpointing_enable()
        m.train()
    assert_same(model, stock, labelled())


def test_frozen_weights():
    model, stock = pair()
    for m in (model, stock):
        m.lm_head.requires_grad_(False)
    batch = labelled()
    assert waits(model(**batch).logits)
    assert_same_steps(model, stock, lambda m: m(**batch).loss.backward())
    assert model.lm_head.weight.grad is None


def test_a_loss_function_of_the_user_reads_logits():
    model, stock = pair()
    batch = labelled()

    def own(logits, labels, vocab_size, **_):
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1)) * 3.0

    for m in (model, stock):
        m.loss_function = own
    output = model(**batch)
    assert not waits(output.logits)
    assert_same(model, stock, batch)


# ---- where logits are made at once ---------------------------------------------------------------


def test_without_labels_or_gradients():
    model, stock = pair()
    batch = labelled()
    assert type(model(batch["input_ids"]).logits) is torch.Tensor
    with torch.no_grad():
        output = model(**batch)
    assert type(output.logits) is torch.Tensor and torch.equal(output.logits, stock(**batch).logits)
    ids = model.eval().generate(batch["input_ids"], max_new_tokens=3, do_sample=False)
    assert torch.equal(
        ids, stock.eval().generate(batch["input_ids"], max_new_tokens=3, do_sample=False)
    )


def test_without_numbers():
    """On the meta device, where tensors have no data."""
    model, _ = pair()
    batch = {name: x.to("meta") for name, x in labelled().items()}
    output = model.to("meta")(**batch)
    assert type(output.logits) is torch.Tensor
    output.loss.backward()


def test_few_logits(monkeypatch):
    kernels = Path(__file__).parents[2] / "csrc/ops/loss.cpp"
    (chunk,) = re.findall(r"kChunkBytes = (\d+);", kernels.read_text())
    assert int(chunk) == CHUNK_OF_WORD
    monkeypatch.setattr(small_calls, "CHUNK_OF_WORD", CHUNK_OF_WORD)
    model, _ = pair()
    assert type(model(**labelled(2, 128)).logits) is torch.Tensor
    assert waits(model(**labelled(3, 128)).logits)
    model, _ = pair()
    model.bfloat16()  # a chunk has 512 rows, sums of gradients the bytes of 32 more
    assert type(model(**labelled(2, 136)).logits) is torch.Tensor
    assert waits(model(**labelled(2, 137)).logits)
    model.lm_head.requires_grad_(False)
    assert type(model(**labelled(4, 128)).logits) is torch.Tensor
    assert waits(model(**labelled(4, 129)).logits)
    monkeypatch.setattr(small_calls, "CHUNK_OF_WORD", 0)
    model.lm_head.requires_grad_(True)
    assert type(model(**labelled(1, 24)).logits) is torch.Tensor  # one and a half times the width
    assert waits(model(**labelled(1, 25)).logits)


def test_compiled():
    model, stock = pair()
    batch = labelled()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch)
    assert type(output.logits) is torch.Tensor
    exact = copy.deepcopy(stock).double()(**batch).loss
    numerics.assert_close(output.loss, exact, stock(**batch).loss)


def test_compiled_in_part():
    model, stock = pair()
    model.model = torch.compile(model.model, backend="eager")
    batch = labelled()
    assert waits(model(**batch).logits)
    assert_same_steps(model, stock, lambda m: m(**batch).loss.backward())


def test_heads_that_keep_their_logits():
    model = make()
    model.lm_head.register_forward_hook(lambda *_: None)
    (entry,) = onepass.swap(model, kinds="loss", lazy_logits=True).skipped
    assert entry["name"] == "lm_head" and entry["reason"].kind is Reason.HOOKS_OF_HEAD
    assert type(model(**labelled()).logits) is torch.Tensor

    model = make()
    (entry,) = onepass.swap(model, kinds="loss", lazy_logits=True, exclude="lm_head").skipped
    assert entry["reason"].kind is Reason.EXCLUDED

    model = make()
    model.lm_head.forward = model.lm_head.forward
    (entry,) = onepass.swap(model, kinds="loss", lazy_logits=True).skipped
    assert entry["reason"].kind is Reason.INSTANCE_FORWARD

    config = transformers.BertConfig(vocab_size=VOCABULARY, is_decoder=True, **SIZES)
    model = transformers.BertLMHeadModel(config)  # its head is the child of a child
    with pytest.raises(RuntimeError, match="under strict"):
        onepass.swap(model, kinds="loss", lazy_logits=True, strict=True)
    (entry,) = onepass.swap(model, kinds="loss", lazy_logits=True).skipped
    assert entry["reason"].kind is Reason.NOT_A_CHILD


def test_a_hook_that_comes_later_runs():
    model, stock = pair()
    batch = labelled()
    for m in (model, stock):
        m.lm_head.register_forward_hook(lambda module, args, output: output * 2.0)
    output = model(**batch)
    assert type(output.logits) is torch.Tensor
    assert_same(model, stock, batch)


def test_a_head_with_an_adapter():
    peft = pytest.importorskip("peft", reason="its adapters are put on the head")
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"])
    model = peft.get_peft_model(make(), config)
    report = onepass.swap(model, kinds="loss", lazy_logits=True)
    (entry,) = report.skipped
    assert entry["reason"].kind is Reason.NO_HEAD
    assert "it is a peft.tuners.lora" in str(entry["reason"])
    batch = labelled()
    assert type(model(**batch).logits) is torch.Tensor

    model = make()
    onepass.swap(model, kinds="loss", lazy_logits=True)
    model = peft.get_peft_model(model, config)
    assert type(model(**batch).logits) is torch.Tensor

    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(make(), config)
    onepass.swap(model, kinds="loss", lazy_logits=True, strict=True)
    output = model(**batch)
    assert waits(output.logits)
    output.loss.backward()

    for saved in (True, False):
        model = make()
        if saved:
            onepass.swap(model, kinds="loss", lazy_logits=True)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = peft.get_peft_model(model, config)
        if not saved:
            (entry,) = onepass.swap(model, kinds="loss", lazy_logits=True).skipped
            assert entry["reason"].kind is Reason.NO_HEAD
        assert type(model(**batch).logits) is torch.Tensor


def test_options():
    with pytest.raises(ValueError, match="kinds must hold 'loss'"):
        onepass.swap(make(), kinds="norm", lazy_logits=True)
    with pytest.raises(TypeError, match="lazy_logits must be True or False"):
        onepass.swap(make(), lazy_logits=1)
    report = onepass.swap(nn.Linear(3, 3), lazy_logits=True)
    assert any("lazy_logits changes nothing" in note for note in report.notes)
    model = make()
    onepass.swap(model, kinds="loss")
    (entry,) = onepass.swap(model, kinds="loss", lazy_logits=True).skipped
    assert entry["reason"].kind is Reason.LOGITS_BEFORE
    report = onepass.swap(make(), kinds="loss")
    assert report.swapped[0]["to"] == "onepass.functional.cross_entropy"
    with onepass.swapped(model := make(), kinds="loss", lazy_logits=True):
        assert waits(model(**labelled()).logits)
    assert type(model(**labelled()).logits) is torch.Tensor
