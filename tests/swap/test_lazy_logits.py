"""swap, kind "loss", of models of transformers: with lazy_logits=True without their logits."""

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
from tests.linear.test_precision import global_precision, needs_dots
from tests.support.largest import Largest
from tests.swap.lazy_logits_cases import (
    MADE_AT_ONCE,
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
on_both = pytest.mark.parametrize("lazy", [False, True], ids=["", "lazy"])
TO = {False: "onepass.functional.cross_entropy", True: "onepass.functional.linear_cross_entropy"}


def swap(model: nn.Module, lazy: bool = True, **options) -> onepass.Report:
    if lazy:
        options["lazy_logits"] = True
    return onepass.swap(model, kinds="loss", **options)


# ---- the loss ------------------------------------------------------------------------------------

LAZY = [(name, dtype, True) for name in MODELS for dtype in (torch.float32, torch.bfloat16)]
LAZY.append(("Llama", torch.float16, True))
AT_ONCE = [(name, torch.float32, False) for name in ("Llama", "GPT2", "ModernBert", *MADE_AT_ONCE)]


@pytest.mark.parametrize(("name", "dtype", "lazy"), LAZY + AT_ONCE)
def test_the_loss_and_its_gradients(name, dtype, lazy):
    stock, batch = make(name).to(dtype), labelled()
    model = copy.deepcopy(stock)
    (entry,) = swap(model, lazy, strict=True).swapped
    assert entry["to"] == TO[lazy] and entry["kind"] == "loss" and entry["name"] == ""
    output = model(**batch)
    assert waits(output.logits) is lazy and output.loss.dtype is torch.float32
    expected = stock(**batch).logits
    assert output.logits.dtype is expected.dtype and output.logits.shape == expected.shape
    assert output.logits.stride() == expected.stride() and output.logits.requires_grad
    assert count(lambda: model(**batch)) == 1
    scale = 64.0 if dtype is torch.float16 else 1.0
    assert_same(model, stock, batch, of=lambda out: out.loss * scale)


@needs_dots
@pytest.mark.usefixtures("slow_products")
def test_the_loss_has_the_precision_of_the_head():
    batch, found = labelled(), []
    for own, torchs in (("medium", "highest"), (None, "medium"), ("highest", "medium")):
        model = make()
        onepass.swap(model, precision=own, lazy_logits=True, kinds=("linear", "loss"))
        with global_precision(torchs):
            loss = model(**batch).loss
            found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][0], found[2][0])


@on_both
def test_verify_and_back(lazy):
    model, stock = make(), make()

    def state():
        modules = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
        return modules, list(map(id, model.state_dict(keep_vars=True).values()))

    before, batch = state(), labelled()
    report = swap(model, lazy)
    assert report.verify(batch).ok and swap(model, lazy).swapped == report.swapped
    loss = model(**batch).loss
    assert list(model.state_dict()) == list(stock.state_dict())
    assert type(model.lm_head) is nn.Linear and model.get_output_embeddings() is model.lm_head
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model) and waits(twin(**batch).logits) is lazy
        assert torch.equal(twin(**batch).loss, loss)
    loss.backward()
    assert onepass.unswap(model) == [""] and state() == before
    assert torch.equal(model(**batch).loss, stock(**batch).loss)


def test_swapped_whole():
    model, batch = make(), labelled()
    report = onepass.swap(model, lazy_logits=True)
    assert count(lambda: model(**batch)) == 1 and report.verify(batch).ok
    assert any("computed when they are read" in note for note in report.notes)
    output = model(**batch)
    assert waits(output.logits)
    assert report.verify({"input_ids": batch["input_ids"]}).ok  # the logits


@pytest.mark.parametrize(
    ("name", "lazy"), [("Llama", True), ("Gemma2", True), ("Llama", False), ("ModernBert", False)]
)
def test_a_step_makes_no_logits(name, lazy):
    """Or no copy in float32 of those that it makes in bfloat16."""
    stock, batch = make(name).to(torch.float32 if lazy else torch.bfloat16), labelled(4, 200)
    model, sizes = copy.deepcopy(stock), []
    swap(model, lazy)

    def counts(x: torch.Tensor) -> bool:
        return not isinstance(x, LazyLogits) if lazy else x.dtype is torch.float32

    def step(m):
        with Largest(counts) as largest:
            m(**batch).loss.backward()
        sizes.append(largest.elements)

    assert_same_steps(model, stock, step)
    assert sizes[0] < 4 * 200 * VOCABULARY <= sizes[1]


def _shifted(batch: dict) -> torch.Tensor:
    return F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()


def _padded(batch: dict, places: slice) -> dict:
    mask = torch.ones_like(batch["input_ids"])
    mask[0, places] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return dict(batch, labels=labels, attention_mask=mask)


ARGUMENTS = {
    "items": lambda b: dict(b, num_items_in_batch=50),
    "a tensor of items": lambda b: dict(b, num_items_in_batch=torch.tensor(50)),
    "shifted labels": lambda b: dict(b, shift_labels=_shifted(b)),
    "the last logits": lambda b: dict(
        b, shift_labels=_shifted(b)[:, -4:].contiguous(), logits_to_keep=4
    ),
    "ignored labels": lambda b: dict(b, ignore_index=7, labels=b["labels"].clamp(min=7)),
    "padding on the left": lambda b: _padded(b, slice(0, 4)),
    "padding on the right": lambda b: _padded(b, slice(-4, None)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@on_both
def test_the_arguments_of_the_loss(name, lazy):
    model, stock, batch = pair("Llama", lazy)
    batch = ARGUMENTS[name](batch)
    assert count(lambda: model(**batch)) == 1
    assert count(lambda: model(**batch, return_dict=False)) == 1
    assert_same(model, stock, batch)


def test_odd_labels():
    """None at all, by their place, of another length, no word."""
    model, stock, batch = pair()
    ids, labels = batch["input_ids"], batch["labels"]
    nothing = dict(input_ids=ids, labels=torch.full_like(labels, -100))
    assert model(**nothing).loss.isnan() and stock(**nothing).loss.isnan()
    assert model(**nothing, num_items_in_batch=7).loss == 0.0
    assert waits(model(ids, None, None, None, None, labels).logits)
    for m in (model, stock):
        with pytest.raises((ValueError, RuntimeError), match="target"):
            m(**batch, logits_to_keep=3)
    labels[0, 5] = VOCABULARY
    with pytest.raises(RuntimeError, match="target must lie between 0 and 599"):
        model(**batch)


def test_accumulated_batches():
    """As in the Trainer: sums, divided by the items of all batches."""
    batches = [labelled(), labelled(2, 17)]
    items = sum((b["labels"][:, 1:] != -100).sum() for b in batches)

    def step(m):
        for batch in batches:
            m(**batch, num_items_in_batch=items).loss.backward()

    model, stock, _ = pair()
    assert_same_steps(model, stock, step)


def test_under_autocast():
    model, stock, batch = pair()

    def autocast(m, given):
        with torch.autocast("cpu", torch.bfloat16):
            return m(**given)

    output, expected = autocast(model, batch), autocast(stock, batch)
    assert waits(output.logits) and output.logits.dtype is torch.bfloat16
    assert output.loss.dtype is expected.loss.dtype
    assert torch.equal(output.logits + 0, expected.logits)  # read where autocast is off
    runs = [(model, autocast), (copy.deepcopy(stock).double(), lambda m, given: m(**given))]
    draws = []
    for given in (batch, *(labelled() for _ in range(7))):
        losses = [(m, call(m, given).loss) for m, call in (*runs, (stock, autocast))]
        draws.append([[loss.detach(), *gradients(m, loss)] for m, loss in losses])
    for results in zip(*(zip(*draw, strict=True) for draw in draws), strict=True):
        numerics.assert_close(*map(list, zip(*results, strict=True)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_as_a_whole(use_reentrant):
    model, stock, batch = pair()
    embedded = stock.model.embed_tokens(batch["input_ids"]).detach()

    def step(m):
        def run(x):
            return m(inputs_embeds=x, labels=batch["labels"]).loss

        x = embedded.to(m.dtype).requires_grad_()
        checkpoint(run, x, use_reentrant=use_reentrant).backward()

    assert_same_steps(model, stock, step)


def own_loss(logits, labels, vocab_size, **_):
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1)) * 3.0


def _with_a_loss(model: nn.Module) -> None:
    model.loss_function = own_loss


def _with_a_hook(model: nn.Module) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2.0)


def _compiled_in_part(model: nn.Module) -> None:
    if type(model) is not transformers.LlamaForCausalLM:
        model.model = torch.compile(model.model, backend="eager")


CHANGES = {  # and whether logits wait then
    "checkpointed layers": (lambda model: model.gradient_checkpointing_enable(), True),
    "a frozen head": (lambda model: model.lm_head.requires_grad_(False), True),
    "compiled in part": (_compiled_in_part, True),
    "a loss function of the user's": (_with_a_loss, False),
    "a hook that comes later": (_with_a_hook, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_models_that_change_after_the_swap(name):
    model, stock, _ = pair()
    change, lazy = CHANGES[name]
    for m in (model, stock):
        change(m.train())
    batch = labelled()
    assert waits(model(**batch).logits) is lazy
    assert_same_steps(model, stock, lambda m: m(**batch).loss.backward())


def test_a_loss_function_of_the_user_stays():
    """Its call of F.cross_entropy is redirected."""
    model, stock, batch = pair("Llama", False)
    for m in (model, stock):
        m.loss_function = own_loss
    assert count(lambda: model(**batch)) == 1
    assert_same(model, stock, batch)
    onepass.unswap(model)
    assert torch.equal(model(**batch).loss, stock(**batch).loss)
    for m in (model, stock):
        del m._loss_function
    assert torch.equal(model(**batch).loss, stock(**batch).loss)


def test_a_classifier_stays():
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_labels=3, **SIZES)
    assert not swap(transformers.LlamaForSequenceClassification(config), False).swapped


def test_a_swapped_model_generates_and_is_saved_as_before(tmp_path):
    """Its class is a new one with the same name."""
    model, stock = make(), make()
    onepass.swap(model)
    batch, options = labelled(), dict(max_new_tokens=4, do_sample=False)
    ids = batch["input_ids"]
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    model.save_pretrained(tmp_path)
    assert model.config.architectures == ["LlamaForCausalLM"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert torch.equal(loaded(ids).logits, stock(ids).logits)
    model.resize_token_embeddings(VOCABULARY + 100)
    assert count(lambda: model(**batch)) == 1


# ---- where logits are made at once ---------------------------------------------------------------


def test_without_labels_or_gradients():
    model, stock, batch = pair()
    assert type(model(batch["input_ids"]).logits) is torch.Tensor
    with torch.no_grad():
        output = model(**batch)
    assert type(output.logits) is torch.Tensor and torch.equal(output.logits, stock(**batch).logits)


def test_without_numbers():
    """On the meta device, where tensors have no data."""
    model, _, batch = pair()
    output = model.to("meta")(**{name: x.to("meta") for name, x in batch.items()})
    assert type(output.logits) is torch.Tensor
    output.loss.backward()


def test_few_logits(monkeypatch):
    kernels = Path(__file__).parents[2] / "csrc/ops/loss.cpp"
    (chunk,) = re.findall(r"kChunkBytes = (\d+);", kernels.read_text())
    assert int(chunk) == CHUNK_OF_WORD
    monkeypatch.setattr(small_calls, "CHUNK_OF_WORD", CHUNK_OF_WORD)
    model, *_ = pair()

    def wait(rows: int, length: int) -> bool:
        return waits(model(**labelled(rows, length)).logits)

    assert wait(3, 128) and not wait(2, 128)
    model.bfloat16()  # a chunk has 512 rows, sums of gradients the bytes of 32 more
    assert wait(2, 137) and not wait(2, 136)
    model.lm_head.requires_grad_(False)
    assert wait(4, 129) and not wait(4, 128)
    monkeypatch.setattr(small_calls, "CHUNK_OF_WORD", 0)
    model.lm_head.requires_grad_(True)  # one and a half times the width
    assert wait(1, 25) and not wait(1, 24)


def test_compiled():
    model, stock, batch = pair()
    output = torch.compile(model, fullgraph=True, backend="eager")(**batch)
    assert type(output.logits) is torch.Tensor
    exact = copy.deepcopy(stock).double()(**batch).loss
    numerics.assert_close(output.loss, exact, stock(**batch).loss)


def skipped(model: nn.Module, **options) -> dict:
    (entry,) = swap(model, **options).skipped
    return entry


def _with_a_forward(model: nn.Module) -> None:
    model.lm_head.forward = model.lm_head.forward


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (_with_a_hook, {}, Reason.HOOKS_OF_HEAD),
        (_with_a_forward, {}, Reason.INSTANCE_FORWARD),
        (nn.Module.train, dict(exclude="lm_head"), Reason.EXCLUDED),
        (lambda model: swap(model, False), {}, Reason.LOGITS_BEFORE),
    ],
)
def test_heads_that_keep_their_logits(change, options, reason):
    model = make()
    change(model)
    assert skipped(model, **options)["reason"].kind is reason
    assert type(model(**labelled()).logits) is torch.Tensor


def test_a_head_that_is_the_child_of_a_child():
    config = transformers.BertConfig(vocab_size=VOCABULARY, is_decoder=True, **SIZES)
    model = transformers.BertLMHeadModel(config)
    with pytest.raises(RuntimeError, match="under strict"):
        swap(model, strict=True)
    assert skipped(model)["reason"].kind is Reason.NOT_A_CHILD


@pytest.mark.parametrize("swap_first", [False, True])
@pytest.mark.parametrize(
    ("options", "lazy"),
    [
        (dict(target_modules=["q_proj"]), True),
        (dict(target_modules=["lm_head", "q_proj"]), False),
        (dict(target_modules=["q_proj"], modules_to_save=["lm_head"]), False),
    ],
    ids=["beside the head", "of the head", "a saved head"],
)
def test_adapters(options, lazy, swap_first):
    peft = pytest.importorskip("peft", reason="its adapters are put on the head")
    model, config = make(), peft.LoraConfig(r=2, **options)
    if swap_first:
        swap(model)
    model = peft.get_peft_model(model, config)
    if not swap_first and lazy:
        swap(model, strict=True)
    elif not swap_first:
        reason = skipped(model)["reason"]
        assert reason.kind is Reason.NO_HEAD and "it is a peft." in str(reason)
    output = model(**labelled())
    assert waits(output.logits) is lazy
    output.loss.backward()


def test_options():
    with pytest.raises(ValueError, match="kinds must hold 'loss'"):
        onepass.swap(make(), kinds="norm", lazy_logits=True)
    with pytest.raises(TypeError, match="lazy_logits must be True or False"):
        onepass.swap(make(), lazy_logits=1)
    report = onepass.swap(nn.Linear(3, 3), lazy_logits=True)
    assert any("lazy_logits changes nothing" in note for note in report.notes)
    with onepass.swapped(model := make(), kinds="loss", lazy_logits=True):
        assert waits(model(**labelled()).logits)
    assert type(model(**labelled()).logits) is torch.Tensor
