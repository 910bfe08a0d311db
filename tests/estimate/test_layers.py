"""Steps of models with many equal layers, from models with a few: the same to the byte."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from onepass.estimate import layers, optimizers, step
from onepass.estimate.subject import Subject, made
from onepass.estimate.survey import Settings, Surveyor

LAYERS = layers.LEAST
SIZES = {
    "Llama": ("ForCausalLM", dict(hidden_size=64, intermediate_size=172, num_attention_heads=2,
                                  num_key_value_heads=2, num_hidden_layers=LAYERS)),
    "GPT2": ("LMHeadModel", dict(n_embd=64, n_layer=LAYERS, n_head=2)),
    "Bert": ("ForMaskedLM", dict(hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
                                 intermediate_size=256)),
}  # fmt: skip
OPTIONS = {
    "stock": {},
    "swapped": {"kinds": None},
    "checkpointed": {"checkpointing": True},
    "swapped, checkpointed": {"kinds": None, "checkpointing": True},
    "bfloat16": {"dtype": torch.bfloat16, "kinds": None},
    "autocast": {"autocast": True},
    "other rows": {"kinds": ("norm",), "rows": 5},
    "loss": {"kinds": None, "inplace_loss": True, "lazy_logits": True},
}


def subject(name: str) -> Subject:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    head, sizes = SIZES[name]
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=1000)

    def make():
        tokens = torch.randint(0, 1000, (2, 32))
        model = getattr(transformers, f"{name}{head}")(config)
        return model, {"input_ids": tokens, "labels": tokens}

    return made(make)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.project(self.norm(x))


class Model(nn.Module):
    """Layers, of which some outputs may be added up at the end."""

    def __init__(self, count: int = LAYERS, kept: tuple[int, ...] = ()):
        super().__init__()
        self.layers = nn.ModuleList(Block(32) for _ in range(count))
        self.kept = kept

    def forward(self, x):
        total = 0.0
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in self.kept:
                total = total + torch.tanh(x)
        return x + total


BATCH = torch.randn(8, 16, 32)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.grid
def test_a_step_is_that_of_the_whole_model(name, options):
    given = subject(name)
    asked = step.Options(**OPTIONS[options])
    assert layers.Series(given).step(asked) == step.run(given, asked, {})


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_optimizers_see_the_whole_model(dtype):
    given = subject("Llama")
    makes = optimizers.names(given.model(dtype))
    expected = step.run(given, step.Options(dtype=dtype), makes).updates
    assert step.updates(given, dtype, makes) == expected


def surveyed(given: Subject, settings: Settings | None = None) -> tuple[str, Surveyor]:
    surveyor = Surveyor(given, settings or Settings(), lambda: None)
    return json.dumps(surveyor.run().to_dict()), surveyor


def first_step(model: nn.Module) -> tuple[Surveyor, step.Step]:
    surveyor = Surveyor(Subject(model, BATCH), Settings(), lambda: None)
    return surveyor, surveyor._step("as given", step.Options())


@pytest.mark.slow
def test_a_survey_is_that_of_whole_models(monkeypatch):
    settings = Settings(memory=300_000_000)
    short, surveyor = surveyed(subject("Llama"), settings)
    assert surveyor._series is not None
    monkeypatch.setattr(layers, "LEAST", 1000)
    whole, surveyor = surveyed(subject("Llama"), settings)
    assert surveyor._series is None
    assert short == whole


def test_few_runs_are_of_the_whole_model(monkeypatch):
    """One; the others have up to five layers."""
    counts = []
    run = step.run

    def counted(given, *further):
        counts.append(sum(isinstance(module, Block) for module in given._model.modules()))
        return run(given, *further)

    monkeypatch.setattr(step, "run", counted)
    surveyed(Subject(Model(), BATCH))
    assert counts.count(LAYERS) == 1 and len(counts) > 20
    assert set(counts) == {LAYERS, *layers.COUNTS}


@pytest.mark.parametrize("kept", [(3,), (9,)])
def test_a_layer_that_its_model_treats_in_another_way(kept):
    """The first run, of the whole model, tells."""
    surveyor, found = first_step(Model(kept=kept))
    assert surveyor._series is None
    plain, other = first_step(Model())
    assert plain._series is not None and found.activations > other.activations


def make_unlike(change):
    model = Model()
    change(model.layers[7])
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "project", nn.Linear(32, 32, bias=False)),
        lambda layer: setattr(layer, "norm", nn.LayerNorm(32, eps=1e-3)),
        lambda layer: setattr(layer, "kind", "sliding"),
        lambda layer: layer.project.requires_grad_(False),
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: setattr(layer.norm, "forward", lambda x: x),
    ],
    ids=["parameters", "a number", "an attribute", "frozen", "a hook", "a forward of its own"],
)
def test_layers_that_are_not_equal(change):
    with pytest.raises(layers.NotAlike, match="0 lists"):
        layers.Series(Subject(make_unlike(change), BATCH))
    layers.Series(Subject(Model(), BATCH))


def test_layers_may_know_their_place():
    model = Model()
    for number, layer in enumerate(model.layers):
        layer.number = number
    layers.Series(Subject(model, BATCH))
    model.layers[4].number = 7
    with pytest.raises(layers.NotAlike):
        layers.Series(Subject(model, BATCH))


def test_few_layers_several_lists_and_real_data_are_run_whole():
    for given in (
        Subject(Model(layers.LEAST - 1), BATCH),
        Subject(nn.Sequential(Model(), Model()), BATCH),
        Subject(Model(), BATCH, real=True),
    ):
        with pytest.raises(layers.NotAlike):
            layers.Series(given)


def test_a_model_for_all_its_layers_alone():
    class Fixed(Model):
        def forward(self, x):
            self.layers[LAYERS - 1]  # an error if it has fewer
            return super().forward(x)

    assert first_step(Fixed())[0]._series is None


def test_a_peak_between_the_first_layers_and_the_last_is_found():
    """A step whose forward grows, whose backward shrinks: both ends are looked at."""
    series = layers.Series(Subject(Model(), BATCH))
    for options in ({}, {"rows": 1}, {"rows": 1000}):
        asked = step.Options(**options)
        found, whole = series.step(asked), step.run(series.whole, asked, {})
        assert (found.forward, found.backward) == (whole.forward, whole.backward)
        assert found == whole
