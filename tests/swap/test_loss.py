"""swap, kind "loss": nn.CrossEntropyLoss, calls of F.cross_entropy, and transformers' losses."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn as torch_nn
import torch.nn.functional as F
from torch import nn
from torch.nn import CrossEntropyLoss
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import _dispatch_log, numerics
from onepass._policy import small_calls
from onepass.swapping import classes
from onepass.swapping.reasons import Reason
from tests.support.largest import Largest
from tests.swap import linear_calls

VOCABULARY, WIDTH = 600, 16
LEAST_LOSS = dict(small_calls.LEAST_LOSS)


@pytest.fixture(autouse=True)
def every_call_gains(swapped_run_ours, monkeypatch):
    monkeypatch.setattr(small_calls, "LEAST_LOSS_CALLS", 0)


def swap(model: nn.Module, **options) -> onepass.Report:
    return onepass.swap(model, kinds="loss", **options)


def count(run) -> int:
    """The number of losses that ours computes in `run`."""
    with _dispatch_log.record() as calls:
        run()
    return sum(call["kernel"] == "loss_forward_kernel" for call in calls)


def tokens(rows: int = 3, length: int = 11) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length))


class LanguageModel(nn.Module):
    """The embedding and the head of a language model, which is enough here."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def logits(self, tokens):
        return self.head(self.embedding(tokens)).flatten(0, 1)

    def forward(self, tokens):
        return F.cross_entropy(self.logits(tokens), tokens.flatten(), ignore_index=0)


class ByAnotherModule(LanguageModel):
    def forward(self, tokens):
        return torch_nn.functional.cross_entropy(self.logits(tokens), tokens.flatten())


class ByItsName(LanguageModel):
    def forward(self, tokens):
        return cross_entropy(self.logits(tokens), tokens.flatten(), label_smoothing=0.1)


class ByAModuleMadeInForward(LanguageModel):
    def forward(self, tokens):
        criterion = CrossEntropyLoss(reduction="sum")
        return criterion(self.logits(tokens), tokens.flatten())


class ByAQualifiedModule(LanguageModel):
    def forward(self, tokens):
        return nn.CrossEntropyLoss()(self.logits(tokens), tokens.flatten())


class ByAMethod(LanguageModel):
    def forward(self, tokens):
        return self.loss(self.logits(tokens), tokens.flatten())

    def loss(self, logits, target):
        return F.cross_entropy(logits, target, reduction="none").square().mean()


class HeadOfTheEmbedding(LanguageModel):
    """As with tied weights: no linear layer of that size, but a parameter."""

    def __init__(self):
        super().__init__()
        self.head, self.weight = None, self.embedding.weight

    def logits(self, tokens):
        return F.linear(self.embedding(tokens), self.weight).flatten(0, 1)


FOUND = (
    LanguageModel,
    ByAnotherModule,
    ByItsName,
    ByAModuleMadeInForward,
    ByAQualifiedModule,
    ByAMethod,
    HeadOfTheEmbedding,
)


class FewClasses(LanguageModel):
    """Classes of a sentence: the number of logits is not that of the embedding's rows."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens):
        logits = self.head(self.embedding(tokens)).mean(1)
        return F.cross_entropy(logits, tokens[:, 0] % 5)


class OfAChild(LanguageModel):
    """The name is that of another kind of module."""

    def __init__(self):
        super().__init__()
        self.cross_entropy = nn.NLLLoss()

    def forward(self, tokens):
        return self.cross_entropy(self.logits(tokens).log_softmax(-1), tokens.flatten())


class CheckpointsInside(LanguageModel):
    def forward(self, tokens):
        logits = self.logits(tokens)
        return checkpoint(F.cross_entropy, logits, tokens.flatten(), use_reentrant=False)


def results(model: nn.Module, *args, **named) -> list[torch.Tensor]:
    """The loss and the gradients of the parameters."""
    loss = model(*args, **named)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


def assert_same(ours: nn.Module, stock: nn.Module, *args, **named) -> None:
    exact = results(copy.deepcopy(stock).double(), *args, **named)
    found, base = results(ours, *args, **named), results(stock, *args, **named)
    for got, ref, from_stock in zip(found, exact, base, strict=True):
        assert got.dtype == from_stock.dtype
        numerics.assert_close(got, ref, from_stock)


# ---- calls in a forward --------------------------------------------------------------------------


@pytest.mark.parametrize("cls", FOUND, ids=lambda cls: cls.__name__)
def test_calls_are_found_and_redirected(cls):
    model, ids = cls(), tokens()
    stock, signature = copy.deepcopy(model), inspect.signature(model.forward)
    report = swap(model, strict=True)
    (entry,) = report.swapped
    assert entry["kind"] == "loss" and entry["to"] == "onepass.functional.cross_entropy"
    assert count(lambda: model(ids)) == 1 and not count(lambda: stock(ids))
    assert_same(model, stock, ids)
    assert report.verify(ids).ok
    assert isinstance(model, cls) and type(model).__name__ == cls.__name__
    assert inspect.signature(model.forward) == signature
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model) and torch.equal(twin(ids), model(ids))
    assert onepass.unswap(model) == [""] and type(model) is cls
    assert torch.equal(model(ids), stock(ids))


@pytest.mark.parametrize("cls", [FewClasses, OfAChild], ids=lambda cls: cls.__name__)
def test_others_are_not_redirected(cls):
    model = cls()
    report = swap(model)
    assert type(model) is cls and not report.swapped and not report.skipped


def test_a_checkpoint_inside_would_run_torchs_again():
    model = CheckpointsInside()
    (entry,) = swap(model).skipped
    assert entry["reason"].kind is Reason.CHECKPOINTS and type(model) is CheckpointsInside


def test_all_kinds_of_calls_of_one_forward_share_a_class(monkeypatch):
    linear_calls.set_facts(monkeypatch, linear_calls.SLOW)
    model, ids = HeadOfTheEmbedding(), tokens()
    report = onepass.swap(model, kinds=("linear", "loss"))
    assert {entry["kind"] for entry in report.swapped} == {"linear", "loss"}
    assert all(classes.redirects(type(model), kind) for kind in ("linear", "loss"))
    assert count(lambda: model(ids)) == 1
    assert linear_calls.count(lambda: model(ids)) == 1


def test_what_onepass_does_not_compute_is_torchs():
    class Others(LanguageModel):
        def forward(self, tokens):
            logits = self.logits(tokens)
            probabilities = F.cross_entropy(logits, logits.detach().softmax(-1))
            images = F.cross_entropy(logits.T[None, :, :], tokens.flatten()[None])
            old = F.cross_entropy(logits, tokens.flatten(), size_average=False)
            return probabilities + images + old

    model, ids = Others(), tokens()
    stock = copy.deepcopy(model)
    swap(model, strict=True)
    with pytest.warns(UserWarning, match="size_average"):
        assert not count(lambda: model(ids)) and torch.equal(model(ids), stock(ids))


def test_calls_of_a_small_model_are_torchs(monkeypatch):
    model = LanguageModel()
    monkeypatch.setattr(small_calls, "LEAST_LOSS_CALLS", 33 * VOCABULARY)
    torch.set_num_threads(1)
    swap(model)
    assert count(lambda: model(tokens(3))) == 1 and not count(lambda: model(tokens(2)))
    (call,) = onepass.explain(model, tokens(2)).calls
    assert call["kernel"] == "torch.nn.functional.cross_entropy" and "small" in call["reason"]


def test_compiled_in_one_graph():
    model, ids = LanguageModel(), tokens()
    stock = copy.deepcopy(model)
    swap(model)
    assert_same(torch.compile(model, fullgraph=True), stock, ids)


# ---- the module ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(ignore_index=3, label_smoothing=0.2)])
def test_a_criterion(options):
    weight = torch.rand(VOCABULARY) if options else None
    criterion = nn.CrossEntropyLoss(weight, **options)
    stock, x, target = copy.deepcopy(criterion), torch.randn(9, VOCABULARY), tokens(9, 1)[:, 0]
    (entry,) = swap(criterion, strict=True).swapped
    assert entry["to"] == "onepass.nn.CrossEntropyLoss"
    assert isinstance(criterion, onepass.nn.CrossEntropyLoss)
    assert count(lambda: criterion(x, target)) == 1
    leaf = x.requires_grad_()
    losses = [
        criterion(leaf, target),
        copy.deepcopy(stock).double()(leaf.double(), target),
        stock(leaf, target),
    ]
    numerics.assert_close(*losses)
    numerics.assert_close(*(torch.autograd.grad(loss, leaf)[0] for loss in losses))
    if not options:
        assert not count(lambda: criterion(x, x.detach().softmax(-1)))
    assert str(criterion) == str(stock)
    assert type(pickle.loads(pickle.dumps(criterion))) is type(criterion)
    assert onepass.unswap(criterion) == [""] and type(criterion) is nn.CrossEntropyLoss


def test_a_small_criterion_is_torchs(monkeypatch):
    monkeypatch.setattr(small_calls, "LEAST_LOSS", LEAST_LOSS)
    criterion = nn.CrossEntropyLoss()
    swap(criterion)
    assert not count(lambda: criterion(torch.randn(8, 10), torch.arange(8)))


# ---- transformers --------------------------------------------------------------------------------

SIZES = dict(hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)


def of_transformers(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="compares with its models")
    configs = {
        "LlamaForCausalLM": ("LlamaConfig", SIZES),
        "GPT2LMHeadModel": ("GPT2Config", dict(n_embd=WIDTH, n_layer=1, n_head=2)),
        "BertForMaskedLM": ("BertConfig", SIZES),
        "ModernBertForMaskedLM": ("ModernBertConfig", SIZES),
        "T5ForConditionalGeneration": (
            "T5Config",
            dict(
                d_model=WIDTH, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
            ),
        ),
    }
    config, sizes = configs[name]
    config = getattr(transformers, config)(vocab_size=VOCABULARY, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


MODELS = (
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "BertForMaskedLM",
    "ModernBertForMaskedLM",
    "T5ForConditionalGeneration",
)


def labelled() -> dict[str, torch.Tensor]:
    ids = tokens()
    labels = ids.clone()
    labels[:, :2] = -100
    return dict(input_ids=ids, labels=labels)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    model, batch = of_transformers(name), labelled()
    stock = copy.deepcopy(model)
    (entry,) = swap(model, strict=True).swapped
    assert entry["name"] == "" and entry["kind"] == "loss"
    assert count(lambda: model(**batch)) == 1
    assert model(**batch).loss.dtype == stock(**batch).loss.dtype
    losses = [model(**batch).loss, copy.deepcopy(stock).double()(**batch).loss, stock(**batch).loss]
    numerics.assert_close(*losses)
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is type(model) and torch.equal(twin(**batch).loss, losses[0])
    assert onepass.unswap(model) == [""] and torch.equal(model(**batch).loss, losses[2])


def test_the_arguments_of_a_causal_loss():
    """The Trainer's count of items, in several batches; labels that are shifted already."""
    model, batch = of_transformers("LlamaForCausalLM"), labelled()
    stock = copy.deepcopy(model)
    swap(model)
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    for options in (
        dict(num_items_in_batch=50),
        dict(num_items_in_batch=torch.tensor(50)),
        dict(shift_labels=shifted),
        dict(ignore_index=7),
    ):
        given = {**batch, **options}
        if "ignore_index" in options:
            given["labels"] = batch["labels"].clamp(min=7)
        assert count(lambda given=given: model(**given)) == 1
        exact = copy.deepcopy(stock).double()(**given).loss
        numerics.assert_close(model(**given).loss, exact, stock(**given).loss, str(options))


def _is_float32(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "ModernBertForMaskedLM"])
def test_bfloat16_logits_are_never_copied_to_float32(name):
    model, batch = of_transformers(name).bfloat16(), labelled()
    stock, logits = copy.deepcopy(model), batch["input_ids"].numel() * VOCABULARY
    swap(model)
    with Largest(_is_float32) as ours:
        loss = model(**batch).loss
        loss.backward()
    with Largest(_is_float32) as theirs:
        expected = stock(**batch).loss
        expected.backward()
    assert ours.elements < logits <= theirs.elements
    assert loss.dtype is expected.dtype is torch.float32
    exact = copy.deepcopy(stock).double()
    exact.zero_grad()
    exact(**batch).loss.backward()
    for (key, ref), got, base in zip(
        exact.named_parameters(), model.parameters(), stock.parameters(), strict=True
    ):
        if ref.grad is not None:
            numerics.assert_close(got.grad, ref.grad, base.grad, key)


def test_a_loss_function_of_the_user_stays():
    model, batch = of_transformers("LlamaForCausalLM"), labelled()
    swap(model)

    def own(logits, labels, vocab_size, **_):
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1)) * 3.0

    ours = model(**batch).loss
    model.loss_function = own
    logits = model(**batch).logits
    assert count(lambda: model(**batch)) == 1  # its call of F.cross_entropy is redirected
    expected = own(logits, batch["labels"], VOCABULARY)
    numerics.assert_close(
        model(**batch).loss, own(logits.double(), batch["labels"], VOCABULARY), expected
    )
    onepass.unswap(model)
    assert torch.equal(model(**batch).loss, expected)
    del model._loss_function
    numerics.assert_close(model(**batch).loss, ours.double(), ours)


def test_a_classifier_of_transformers_stays():
    transformers = pytest.importorskip("transformers", reason="its models are swapped")
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_labels=3, **SIZES)
    model = transformers.LlamaForSequenceClassification(config)
    assert not swap(model).swapped


def test_a_model_of_transformers_compiled():
    model, batch = of_transformers("LlamaForCausalLM"), labelled()
    stock = copy.deepcopy(model)
    swap(model)
    with _dispatch_log.record():
        loss = torch.compile(model, fullgraph=True)(**batch).loss
    exact = copy.deepcopy(stock).double()(**batch).loss
    numerics.assert_close(loss, exact, stock(**batch).loss)


def test_a_swapped_model_generates_and_is_saved_as_before(tmp_path):
    """Its class is a new one with the same name."""
    transformers = pytest.importorskip("transformers", reason="its models are swapped")
    model, batch = of_transformers("LlamaForCausalLM"), labelled()
    stock = copy.deepcopy(model)
    onepass.swap(model)
    options = dict(max_new_tokens=4, do_sample=False)
    ids = batch["input_ids"]
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    model.save_pretrained(tmp_path)
    assert model.config.architectures == ["LlamaForCausalLM"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert torch.equal(loaded(ids).logits, stock(ids).logits)
    model.resize_token_embeddings(VOCABULARY + 100)
    assert count(lambda: model(**batch)) == 1


_LOGITS, _TARGET = torch.randn(4, 7), torch.tensor([0, 3, 6, 2])
_ODD = {
    "negative smoothing": (dict(label_smoothing=-0.1), _LOGITS, _TARGET),
    "no number": (dict(label_smoothing=float("nan")), _LOGITS, _TARGET),
    "much smoothing": (dict(label_smoothing=1.5), _LOGITS, _TARGET),
    "a class too many": ({}, _LOGITS, _TARGET + 1),
    "a negative class": (dict(reduction="none"), _LOGITS, _TARGET - 1),
    "no classes": ({}, _LOGITS[:, :0], _TARGET),
    "a target too few": ({}, _LOGITS, _TARGET[:3]),
    "targets of one row": ({}, _LOGITS[0], _TARGET),
    "int32": ({}, _LOGITS, _TARGET.int()),
    "no target": ({}, _LOGITS, None),
    "weights too few": (dict(weight=torch.ones(5)), _LOGITS, _TARGET),
    "float8": ({}, _LOGITS.to(torch.float8_e4m3fn), _TARGET),
}


@pytest.mark.parametrize("name", _ODD)
def test_odd_arguments_are_torchs(name):
    """Outside our range torch computes, or raises its own type."""
    options, logits, target = _ODD[name]
    stock = nn.CrossEntropyLoss(**options)
    model = nn.ModuleList([nn.CrossEntropyLoss(**options)])
    assert onepass.swap(model, kinds="loss").swapped
    found = []
    for loss in (model[0], stock):
        try:
            found.append(loss(logits, target))
        except Exception as error:
            found.append(type(error))
    if isinstance(found[1], type):
        assert found[0] is found[1]
    else:
        assert found[0].equal(found[1])
