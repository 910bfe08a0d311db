"""swap, kind "loss": nn.CrossEntropyLoss, and calls of F.cross_entropy."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
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


class ByItsName(LanguageModel):
    def forward(self, tokens):
        return cross_entropy(self.logits(tokens), tokens.flatten(), label_smoothing=0.1)


class ByAModuleMadeInForward(LanguageModel):
    def forward(self, tokens):
        criterion = CrossEntropyLoss(reduction="sum")
        return criterion(self.logits(tokens), tokens.flatten())


class HeadOfTheEmbedding(LanguageModel):
    """As with tied weights: no linear layer of that size, but a parameter."""

    def __init__(self):
        super().__init__()
        self.head, self.weight = None, self.embedding.weight

    def logits(self, tokens):
        return F.linear(self.embedding(tokens), self.weight).flatten(0, 1)


FOUND = (LanguageModel, ByItsName, ByAModuleMadeInForward, HeadOfTheEmbedding)


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


def results(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the gradients of the parameters."""
    loss = model(ids)
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


def assert_same(ours: nn.Module, stock: nn.Module, ids: torch.Tensor) -> None:
    models = (ours, copy.deepcopy(stock).double(), stock)
    for got, ref, base in zip(*(results(model, ids) for model in models), strict=True):
        assert got.dtype == base.dtype
        numerics.assert_close(got, ref, base)


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
    assert_same(torch.compile(model, fullgraph=True, backend="aot_eager"), stock, ids)


# ---- the module ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(ignore_index=3, label_smoothing=0.2)])
def test_a_criterion(options):
    weight = torch.rand(VOCABULARY) if options else None
    criterion = nn.CrossEntropyLoss(weight, **options)
    stock, target = copy.deepcopy(criterion), tokens(9, 1)[:, 0]
    (entry,) = swap(criterion, strict=True).swapped
    assert entry["to"] == "onepass.nn.CrossEntropyLoss"
    assert isinstance(criterion, onepass.nn.CrossEntropyLoss)
    x = torch.randn(9, VOCABULARY, requires_grad=True)
    assert count(lambda: criterion(x, target)) == 1
    exact = copy.deepcopy(stock).double()
    losses = [criterion(x, target), exact(x.double(), target), stock(x, target)]
    numerics.assert_close(*losses)
    numerics.assert_close(*(torch.autograd.grad(loss, x)[0] for loss in losses))
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
    options, *args = _ODD[name]
    stock = nn.CrossEntropyLoss(**options)
    loss = nn.CrossEntropyLoss(**options)
    assert onepass.swap(loss, kinds="loss").swapped
    try:
        expected = stock(*args)
    except Exception as error:
        with pytest.raises(Exception) as found:
            loss(*args)
        assert found.type is type(error)
    else:
        assert loss(*args).equal(expected)
