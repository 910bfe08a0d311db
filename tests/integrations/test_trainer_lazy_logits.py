"""swap(lazy_logits=True) under transformers' Trainer, parts of which read logits."""

import copy

import pytest
import torch

import onepass
from onepass import numerics
from onepass._policy import small_calls
from tests.integrations.transformers_cases import transformers

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from onepass.integrations.transformers import SwapCallback
from tests.integrations.test_trainer import Texts, arguments, logged, trainer_of
from tests.swap.lazy_logits_cases import make, waits


@pytest.fixture(autouse=True)
def few_logits_wait(monkeypatch):
    monkeypatch.setattr(small_calls, "CHUNK_OF_WORD", 0)


def watched(model) -> list[bool]:
    """Whether the logits of each step were not computed."""
    waited = []

    def note(module, args, output):
        waited.append(waits(output.logits))

    model.register_forward_hook(note)
    return waited


def losses(trainer) -> torch.Tensor:
    trainer.train()
    return torch.tensor(logged(trainer))


@pytest.mark.parametrize("options", [{}, dict(bf16=True, gradient_accumulation_steps=2)], ids=str)
def test_training(options, tmp_path):
    stock = make()
    model, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    callback = None if options else SwapCallback(lazy_logits=True)
    if options:  # under bf16=True the Trainer replaces the model's forward before it begins
        onepass.swap(model, lazy_logits=True)
    waited = watched(model)
    found = losses(trainer_of(model, arguments(tmp_path, **options), callback=callback))
    assert waited and all(waited)
    base = losses(trainer_of(stock, arguments(tmp_path, **options)))
    options.pop("bf16", None)
    ref = losses(trainer_of(exact, arguments(tmp_path, **options)))
    numerics.assert_close(found, ref.double(), base)


class Reading(transformers.Trainer):
    """With a loss of its own, and metrics, which read logits though the model is given labels."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        output = model(**inputs)
        output.logits[:, :-1].argmax(-1)
        entropy = output.logits.float().softmax(-1).square().sum(-1).mean()
        loss = output.loss + 0.1 * entropy
        return (loss, output) if return_outputs else loss


@pytest.mark.parametrize("cls", [transformers.Trainer, Reading])
def test_losses_that_read_logits(cls, tmp_path):
    """The Trainer itself computes that of smoothed labels, and passes the model none."""
    stock = make()
    model, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    onepass.swap(model, lazy_logits=True)
    waited = watched(model)
    args = arguments(tmp_path, label_smoothing_factor=0.1 * (cls is not Reading))

    def run(m):
        return losses(cls(model=m, args=args, train_dataset=Texts()))

    found, ref, base = map(run, (model, exact, stock))
    assert waited and any(waited) is (cls is Reading)  # there they are read afterwards
    numerics.assert_close(found, ref.double(), base)


def test_metrics_of_an_evaluation(tmp_path):
    stock = make()
    model = copy.deepcopy(stock)
    onepass.swap(model, kinds="loss", lazy_logits=True)
    seen = []

    def metrics(prediction):
        seen.append(torch.as_tensor(prediction.predictions))
        return {}

    for m in (model, stock):
        trainer = trainer_of(m, arguments(tmp_path), compute_metrics=metrics)
        trainer.evaluate(trainer.train_dataset)
    assert torch.equal(*seen)
