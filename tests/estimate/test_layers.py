"""Steps of models with many equal layers, from models with a few: the same to the byte."""

import dataclasses
import itertools
import json

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from onepass.tools.estimate import layers, optimizers, step
from onepass.tools.estimate.subject import Subject, made
from onepass.tools.estimate.survey import DTYPES, Settings, Surveyor

LAYERS = layers.LEAST
SIZES = {
    "Llama": ("ForCausalLM", dict(hidden_size=64, intermediate_size=172, num_attention_heads=2,
                                  num_key_value_heads=2, num_hidden_layers=LAYERS)),
    "GPT2": ("LMHeadModel", dict(n_embd=64, n_layer=LAYERS, n_head=2)),
    "Bert": ("ForMaskedLM", dict(hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
                                 intermediate_size=256)),
}  # fmt: skip
OPTIONS = {
    "stock": {}, "swapped": {"kinds": None}, "checkpointed": {"checkpointing": True},
    "swapped, checkpointed": {"kinds": None, "checkpointing": True},
    "bfloat16": {"dtype": torch.bfloat16, "kinds": None}, "autocast": {"autocast": True},
    "other rows": {"kinds": ("norm",), "rows": 5},
    "loss": {"kinds": None, "inplace_loss": True, "lazy_logits": True},
}  # fmt: skip


def subject(name: str) -> Subject:
    if name == "own":
        return Subject(Model(), BATCH)
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


def call(layer, number, layers, x):
    return layer(x)


class Model(nn.Module):
    """Layers; `treat` is given (layer, its number, all layers, x)."""

    def __init__(self, count: int = LAYERS, treat=call):
        super().__init__()
        self.layers = nn.ModuleList(Block(32) for _ in range(count))
        self.treat = treat

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = self.treat(layer, number, self.layers, x)
        return x


BATCH = torch.randn(8, 16, 32)


QUICK = [("Llama", "swapped, checkpointed"), ("Llama", "loss"), ("GPT2", "bfloat16")]
QUICK += [("Bert", "other rows"), *(("own", o) for o in ("stock", "swapped", "autocast"))]
QUICK += [("own", "checkpointed")]
ALL = [*itertools.product(SIZES, OPTIONS), *(pair for pair in QUICK if pair[0] == "own")]


@pytest.mark.parametrize(
    "name, options", [pytest.param(*p, marks=() if p in QUICK else pytest.mark.slow) for p in ALL]
)
def test_a_step_is_that_of_the_whole_model(name, options):
    """In `make test` every option, and every model; small ones, of layers of ours, are cheap."""
    given = subject(name)
    asked = step.Options(**OPTIONS[options])
    assert layers.Series(given).expected(asked).step == step.run(given, asked, {})


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
    """As it is, with all changes, in bfloat16, with autocast; the others have up to five layers."""
    counts = []
    run = step.run

    def counted(given, *further):
        counts.append(sum(isinstance(module, Block) for module in given._model.modules()))
        return run(given, *further)

    monkeypatch.setattr(step, "run", counted)
    surveyed(Subject(Model(), BATCH))
    assert counts.count(LAYERS) == 4 and len(counts) > 20
    assert set(counts) == {LAYERS, *layers.COUNTS}


@pytest.mark.parametrize("at", [3, 9])
def test_a_layer_that_its_model_treats_in_another_way(at):
    """The first run, of the whole model, tells."""

    def followed(layer, number, found, x):
        return x + torch.tanh(layer(x)) if number == at else layer(x)

    surveyor, found = first_step(Model(treat=followed))
    plain, other = first_step(Model())
    assert surveyor._series is None is not plain._series
    assert found.activations > other.activations


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "project", nn.Linear(32, 32, bias=False)),
        lambda layer: setattr(layer, "norm", nn.LayerNorm(32, eps=1e-3)),
        lambda layer: setattr(layer, "kind", "sliding"),
        lambda layer: setattr(layer, "number", 4),
        lambda layer: layer.project.requires_grad_(False),
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: setattr(layer.norm, "forward", lambda x: x),
    ],
    ids="parameters eps attribute place frozen hook forward".split(),
)
def test_layers_that_are_not_equal(change):
    model = Model()
    for number, layer in enumerate(model.layers):
        layer.number = number  # layers may know their place
    layers.Series(Subject(model, BATCH))
    change(model.layers[7])
    with pytest.raises(layers.NotAlike, match="0 lists"):
        layers.Series(Subject(model, BATCH))


def test_few_layers_several_lists_and_real_data_are_run_whole():
    for given in (
        Subject(Model(layers.LEAST - 1), BATCH),
        Subject(nn.Sequential(Model(), Model()), BATCH),
        Subject(Model(), BATCH, real=True),
    ):
        with pytest.raises(layers.NotAlike):
            layers.Series(given)


def all_are_there(layer, number, found, x):
    assert len(found) == LAYERS and found[LAYERS - 1] is not None
    return layer(x)


def test_a_model_for_all_its_layers_alone():
    """It fails with fewer."""
    assert first_step(Model(treat=all_are_there))[0]._series is None


class Switched(Model):
    """`treat` is behind a switch of its own."""

    supports_gradient_checkpointing = True

    def __init__(self, treat):
        super().__init__()
        self.switched = treat

    def gradient_checkpointing_enable(self, _):
        self.treat = self.switched


def recompute(function, *arguments):
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)


def first_half(layer, number, found, x):
    return recompute(layer, x) if number < LAYERS // 2 else layer(x)


def of_all_layers(layer, number, found, x):
    return recompute(all_are_there, layer, number, found, x)


def with_upcasts(layer, number, found, x):
    """From its eighth on a layer computes in float32."""
    y = layer(x)
    return torch.tanh(y.float() if number > 7 else y).to(x.dtype)


@pytest.mark.parametrize(
    ("make", "dtype", "options"),
    [
        (lambda: Switched(first_half), "as given", {"checkpointing": True}),
        (lambda: Switched(of_all_layers), "as given", {"checkpointing": True}),
        (lambda: Model(treat=with_upcasts), "bfloat16", {}),
        pytest.param(lambda: Model(treat=with_upcasts), "autocast", {}, marks=pytest.mark.slow),
    ],
    ids=["half are recomputed", "an assertion", "in bfloat16", "under autocast"],
)
def test_a_layer_that_is_treated_in_another_way_under_a_change(make, dtype, options):
    """The first run does not tell: each change is shown by a run of the whole model."""
    surveyor, _ = first_step(make())
    assert surveyor._series is not None
    found = surveyor._step(dtype, step.Options(**options))
    cast, autocast = DTYPES[dtype]
    asked = step.Options(dtype=cast, autocast=autocast, **options)
    assert dataclasses.replace(found, updates={}) == step.run(surveyor.subject, asked, {})


def test_a_layer_with_temporary_memory_below_the_peak():
    """It would be the peak of another step: all events are compared."""

    def busy(layer, number, found, x):
        if number == 7:
            torch.ones(8, 16, 10 * 32)
        return layer(x)

    plain, expected = first_step(Model())
    surveyor, found = first_step(Model(treat=busy))
    assert plain._series is not None and surveyor._series is None and found == expected


def test_a_peak_between_the_first_layers_and_the_last_is_found():
    """A step whose forward grows, whose backward shrinks: both ends are looked at."""
    series = layers.Series(Subject(Model(), BATCH))
    for options in ({}, {"rows": 1}, {"rows": 1000}):
        asked = step.Options(**options)
        found, whole = series.expected(asked).step, step.run(series.whole, asked, {})
        assert (found.forward, found.backward) == (whole.forward, whole.backward)
        assert found == whole
