"""Report.verify finds every operator whose results are wrong by a hundredth."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass._policy import small_calls
from onepass.compare.model import GPT, Sizes
from onepass.swapping.matchers import KINDS
from tests.swap import attention_by_hand
from tests.test_conventions import declared_ops


class Wrong(TorchDispatchMode):
    """Scales the results of one operator of onepass, and notes which there are."""

    def __init__(self, name: str | None = None, factor: float = 1.01):
        super().__init__()
        self.name, self.factor, self.seen = name, factor, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace != "onepass":
            return result
        name = function._schema.name.removeprefix("onepass::")
        self.seen.add(name)
        if name != self.name:
            return result
        return pytree.tree_map_only(torch.Tensor, self._scaled, result)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x if x.is_floating_point() else x


def gpt():
    tokens = torch.randint(0, 256, (2, 32))
    sizes = Sizes(layers=1, heads=2, width=32, block=32, batch=2)
    return GPT(sizes, dropout=0.1), (tokens, tokens)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 1), torch.randn(2, 16, 32)


def llama():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    ids = torch.arange(32).reshape(2, 16)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def images():
    return nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 1)
    ), torch.randn(2, 3, 8, 8)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.loss = nn.Linear(16, 64), nn.CrossEntropyLoss()

    def forward(self, x, target):
        return self.loss(self.linear(x), target)


def losses():
    return Classifier(), (torch.randn(32, 16), torch.arange(32))


def by_hand():
    return attention_by_hand.NanoGPT(0.2), torch.randn(2, 12, 16)


def adaptive():
    from tests.swap import small_models  # which skips without transformers

    return small_models.adaptive(), (torch.randn(2, 9, 64), torch.randn(2, 64))


def lazy():
    from tests.swap import lazy_logits_cases

    return lazy_logits_cases.make("Llama"), lazy_logits_cases.labelled()


# What each model runs at least: in any mode, and in training.
EXPECTED = {
    gpt: {"norm_forward", "attention_forward", "linear_forward"},
    encoder: {"norm_forward", "attention_forward", "linear_epilogue_forward"},
    llama: {"norm_forward", "attention_forward", "gate_forward", "rotary_forward"},
    images: {"group_norm_forward"},
    losses: {"linear_forward", "loss_forward"},
    by_hand: {"attention_forward", "linear_forward"},
    adaptive: {"modulated_norm_forward"},
    lazy: {"linear_loss"},
}
IN_TRAINING = {gpt: {"dropout_forward"}}
MODES = [*((make, True) for make in EXPECTED), (gpt, False), (encoder, False)]


@pytest.fixture(autouse=True)
def all_kinds_gain(slow_products, monkeypatch):
    monkeypatch.setattr(small_calls, "LEAST_LOSS_CALLS", 0)
    monkeypatch.setattr(small_calls, "LEAST_ROWS", 1)
    monkeypatch.setattr(small_calls, "CHUNK_OF_WORD", 0)


@pytest.mark.parametrize(("make", "training"), MODES)
def test_every_operator_that_is_wrong_is_found(make, training):
    torch.manual_seed(0)
    model, batch = make()
    model.train(training)
    is_lazy = make is lazy
    report = onepass.swap(model, kinds="loss" if is_lazy else KINDS, lazy_logits=is_lazy)
    with Wrong() as mode:
        result = report.verify(batch)
    assert result.ok and result.dropout_off == ""
    assert mode.seen >= EXPECTED[make] | (IN_TRAINING.get(make, set()) if training else set())
    missed = []
    for name in sorted(mode.seen):
        with Wrong(name):
            if report.verify(batch).ok is not False:
                missed.append(name)
    assert missed == [], f"of {sorted(mode.seen)}"


def test_every_kind_is_here():
    """Of the operators that swapped modules call, each is expected of a model above."""
    expected = set().union(*EXPECTED.values(), *IN_TRAINING.values())
    declared = {name.removeprefix("onepass::") for name in declared_ops()}
    forward = {name for name in declared if name.endswith(("_forward", "linear_loss"))}
    assert expected == forward - {"branch_forward", "causal_conv1d_forward"}  # no swap calls these
