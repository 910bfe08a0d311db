"""Further variants of `onepass compare`: medium precision, kept memory."""

import contextlib
import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import onepass
from onepass import _malloc
from onepass.tools import machine
from onepass.tools.compare import measure, memory, variants
from tests.compare.cases import settings_of


class Precise(nn.Linear):
    """Notes the matmul precision of its forward and of its backward."""

    def __init__(self):
        super().__init__(4, 1)
        self.seen = []
        self.weight.register_hook(self.note)

    def note(self, _):
        self.seen.append(torch.get_float32_matmul_precision())

    def forward(self, x):
        self.note(x)
        return super().forward(x).square().mean()


@pytest.mark.parametrize(
    "variant, precision",
    [("stock", "highest"), (variants.MEDIUM, "medium"), (variants.SWAPPED_MEDIUM, "medium")],
)
def test_all_of_a_step_has_the_precision_of_its_variant(variant, precision):
    trainer, report = variants.trainer_of(variant, Precise(), settings_of())
    batch = (torch.ones(2, 4),)
    trainer.step(batch)
    trainer.watched_step(batch)
    trainer.saved_bytes(batch)
    measure._first_steps({variant: trainer}, batch, False)
    assert trainer.model.seen == [precision] * 8
    assert (report is None) is variant.startswith("stock")
    assert torch.get_float32_matmul_precision() == "highest"


class Drops(nn.Module):
    def __init__(self, as_swapped):
        super().__init__()
        self.norm, self.drop, self.as_swapped = nn.LayerNorm(8), nn.Dropout(0.4), as_swapped

    def forward(self, x):
        x = self.drop(self.norm(x))
        return (x if type(self.norm) is nn.LayerNorm else self.as_swapped(self, x)).square().mean()


@pytest.mark.parametrize(
    "as_swapped, dropout, least, most",
    [
        (lambda model, x: x, "on, with the same masks", 0.0, 1e-6),
        (lambda model, x: 1.01 * x, "on, with the same masks", 1e-3, 1.0),
        (
            lambda model, x: x + 0.0 * torch.rand(1),
            "off: stock and swapped draw different",
            0,
            1e-6,
        ),
    ],
    ids=["same", "different", "other numbers"],
)
def test_the_first_step_has_dropout_on(as_swapped, dropout, least, most):
    model, batch = Drops(as_swapped), (torch.randn(6, 8),)
    stock, swapped = (
        variants.trainer_of(name, copy.deepcopy(model), settings_of())[0]
        for name in (variants.STOCK, variants.SWAPPED)
    )
    made = {variants.STOCK: stock, variants.SWAPPED: swapped}
    step = measure._first_steps(made, batch, True)[variants.SWAPPED]
    assert step.dropout.startswith(dropout) and least <= step.gradient_error < most
    for trainer in made.values():
        assert trainer.model.training
        assert all(p.grad is None for p in trainer.model.parameters())
    compiled = {variants.STOCK: stock, "compiled stock": swapped}
    assert measure._first_steps(compiled, batch, True) == {}
    assert measure._first_steps(compiled, batch, False)["compiled stock"].dropout == "off"


def test_precision_is_restored_after_an_error():
    with pytest.raises(KeyError), machine.medium_precision():
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


def test_medium_precision_is_a_variant_where_it_has_an_effect(monkeypatch):
    plain, medium = ["stock", "swapped"], [variants.MEDIUM, variants.SWAPPED_MEDIUM]
    monkeypatch.setattr(machine, "medium_precision", contextlib.nullcontext)
    assert variants.names(settings_of()) == plain
    other = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    monkeypatch.setattr(machine, "medium_precision", other)
    assert variants.names(settings_of()) == plain + medium
    assert variants.names(settings_of("--dtype", "bfloat16")) == plain


@pytest.mark.parametrize("variant", ["stock", "stock, kept memory"])
def test_peak_memory_of_kept_steps_is_that_of_some(variant, monkeypatch):
    told, sent, model = [], [], Precise()
    work = SimpleNamespace(build=lambda: model)
    work.batch = work.small_batch = lambda *_: (torch.ones(2, 4),)
    monkeypatch.setattr(onepass, "keep_freed_memory", lambda: told.append("keep"))
    monkeypatch.setattr(_malloc, "map_apart", lambda: told.append("apart"))
    monkeypatch.setattr(memory, "workload_of", lambda *_: work)
    memory._measure(SimpleNamespace(send=sent.append), variant, 0.0, settings_of(), None)
    assert sent[0] >= 0
    is_kept = variant != "stock"
    assert told == ["keep" if is_kept else "apart"]
    assert len(model.seen) == 2 * (1 + (memory.KEPT_STEPS if is_kept else 1))
