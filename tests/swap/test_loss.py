"""swap, kind "loss": nn.CrossEntropyLoss, and calls of F.cross_entropy.

What every kind of swap does is tested on these modules in test_kinds.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import CrossEntropyLoss
from torch.nn.functional import cross_entropy

import onepass
from onepass._policy import small_calls
from onepass.swapping import classes
from tests.swap import linear_calls
from tests.swap.reported import losses as count

VOCABULARY, WIDTH = 600, 16
LEAST_LOSS = dict(small_calls.LEAST_LOSS)
pytestmark = pytest.mark.usefixtures("every_loss_gains")


def swap(model: nn.Module, **options) -> onepass.Report:
    return onepass.swap(model, kinds="loss", **options)


def words(x: torch.Tensor) -> torch.Tensor:
    """The targets of hidden states."""
    return torch.arange(x.shape[0], device=x.device) * 7 % VOCABULARY


class LanguageModel(nn.Module):
    """The head of a language model, and its embedding, by which the head is known."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return F.cross_entropy(self.head(x), words(x), ignore_index=0)


class ByItsName(LanguageModel):
    def forward(self, x):
        return cross_entropy(self.head(x), words(x), label_smoothing=0.1)


class ByAModuleMadeInForward(LanguageModel):
    def forward(self, x):
        criterion = CrossEntropyLoss(reduction="sum")
        return criterion(self.head(x), words(x))


class HeadOfTheEmbedding(LanguageModel):
    """As with tied weights: no linear layer of that size, but a parameter."""

    def __init__(self):
        super().__init__()
        self.head, self.weight = None, self.embedding.weight

    def forward(self, x):
        return F.cross_entropy(F.linear(x, self.weight), words(x))


FOUND = (LanguageModel, ByItsName, ByAModuleMadeInForward, HeadOfTheEmbedding)


class Criterion(nn.Module):
    """The module, with targets."""

    def __init__(self, **options):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(**options)

    def forward(self, logits):
        return self.loss(logits, words(logits) % logits.shape[1])


# ---- calls in a forward --------------------------------------------------------------------------


def test_all_kinds_of_calls_of_one_forward_share_a_class(slow_products):
    model, x = HeadOfTheEmbedding(), torch.randn(33, WIDTH)
    report = onepass.swap(model, kinds=("linear", "loss"))
    assert {entry["kind"] for entry in report.swapped} == {"linear", "loss"}
    assert all(classes.redirects(type(model), kind) for kind in ("linear", "loss"))
    assert count(lambda: model(x)) == linear_calls.count(lambda: model(x)) == 1


def test_what_onepass_does_not_compute_is_torchs():
    class Others(LanguageModel):
        def forward(self, x):
            logits, target = self.head(x), words(x)
            probabilities = F.cross_entropy(logits, logits.detach().softmax(-1))
            images = F.cross_entropy(logits.T[None, :, :], target[None])
            old = F.cross_entropy(logits, target, size_average=False)
            return probabilities + images + old

    model, x = Others(), torch.randn(33, WIDTH)
    stock = copy.deepcopy(model)
    swap(model, strict=True)
    with pytest.warns(UserWarning, match="size_average"):
        assert not count(lambda: model(x)) and torch.equal(model(x), stock(x))


class OfTokens(LanguageModel):
    def forward(self, tokens):
        return F.cross_entropy(self.head(self.embedding(tokens)), tokens)


def test_small_calls_are_torchs(one_thread, monkeypatch):
    monkeypatch.setattr(small_calls, "LEAST_LOSS_CALLS", 33 * VOCABULARY)
    model, criterion = OfTokens(), Criterion()
    swap(model), swap(criterion)
    assert count(lambda: model(torch.arange(33))) == 1
    assert not count(lambda: model(torch.arange(32)))
    (call,) = onepass.explain(model, torch.arange(32)).calls
    assert call["kernel"] == "torch.nn.functional.cross_entropy" and "small" in call["reason"]
    monkeypatch.setattr(small_calls, "LEAST_LOSS", LEAST_LOSS)
    assert not count(lambda: criterion(torch.randn(8, 10)))


LOGITS, TARGET = torch.randn(4, 7), torch.tensor([0, 3, 6, 2])
ODD = {
    "probabilities": ({}, LOGITS, LOGITS.softmax(-1)),
    "a class too many": ({}, LOGITS, TARGET + 1),
    "a negative class": (dict(reduction="none"), LOGITS, TARGET - 1),
    "a target too few": ({}, LOGITS, TARGET[:3]),
    "targets of one row": ({}, LOGITS[0], TARGET),
    "int32": ({}, LOGITS, TARGET.int()),
    "no target": ({}, LOGITS, None),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_targets_are_torchs(name):
    """Outside our range torch computes, or raises its own type."""
    options, *args = ODD[name]
    stock, loss = (nn.CrossEntropyLoss(**options) for _ in range(2))
    assert swap(loss).swapped
    try:
        expected = stock(*args)
    except Exception as error:
        with pytest.raises(Exception) as found:
            loss(*args)
        assert found.type is type(error)
    else:
        assert loss(*args).equal(expected)
