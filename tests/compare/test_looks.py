"""Tables of `onepass compare` at any width, and its picture with words of any length."""

import dataclasses
import io

import pytest
import torch

pytest.importorskip("rich", reason="prints the tables")
pytest.importorskip("matplotlib", reason="draws the picture")

from rich.console import Console

from onepass.tools import plotting
from onepass.tools.compare import plot, report
from onepass.tools.compare.attribution import PARTS
from onepass.tools.compare.measure import FirstStep, Speed, Variant
from onepass.tools.compare.optimizers import Choice, Comparison, Outcome
from onepass.tools.compare.products import Products
from onepass.tools.compare.report import Result
from onepass.tools.compare.train import Sameness
from onepass.tools.harness import Timing
from tests.compare.cases import settings_of
from tests.support import pictures

STEP = {"stock": 0.230, "swapped": 0.085}  # seconds
ALIKE = ("{}", "compiled {}", "{}, kept memory")
OPTIMIZERS = (
    Choice("default"), Choice("fused"), Choice("onepass"), Choice("fused", torch.bfloat16),
    Choice("onepass", torch.bfloat16, "remainder16", "bfloat16"),
    Choice("onepass", torch.bfloat16, "stochastic", "int8"),
)  # fmt: skip


def result_of(model: str, dropouts=(0.1, 0.0), alike=ALIKE[:1]) -> Result:
    """A result that nothing was run for, whose model, command and data have this name."""
    command = f"onepass compare --model {model} --pairs 8"
    settings = dataclasses.replace(settings_of(), model=model, command=command)
    training = _training(0.0)
    outcomes = {
        choice.name: Outcome(choice, 8 << 20, 8 << 20, training if choice.is_trained else None)
        for choice in OPTIMIZERS
    }
    times = {name: [1e-3 * (1 + 0.1 * place)] * 3 for place, name in enumerate(outcomes)}
    optimizers = Comparison(
        dropouts[0], 1 << 20, 0.230, Timing(times, {}, dict.fromkeys(times, 0.0)), outcomes, {}
    )
    return Result(
        settings=settings,
        machine={"cpu": "Processor (family 6, model 207)", "threads": 2, "commit": "1b9de5f7a0aa"},
        data=f"batches of {model}", parameters=1 << 20,
        speeds=[_speed(dropout, alike) for dropout in dropouts],
        sameness=[_training(dropout) for dropout in dropouts], optimizers=optimizers, seconds=512.0,
    )  # fmt: skip


def _speed(dropout: float | None, alike: tuple[str, ...]) -> Speed:
    times, variants = {}, {}
    for place, form in enumerate(alike):
        for name, seconds in STEP.items():
            times[form.format(name)] = [seconds * (1 + 0.02 * (place + k)) for k in range(5)]
            step = dict.fromkeys(PARTS, 1e3 * seconds / len(PARTS) / 2)
            parts = {"forward": step, "backward": step, "update": dict.fromkeys(PARTS, 0.0)}
            first = FirstStep(5.4, 1e-6, 1e-5, "blocks.0.attention.out.bias", "off")
            variant = Variant(None if place else parts, 99 << 20, 199 << 20, first)
            variants[form.format(name)] = variant
    timing = Timing(times, {}, dict.fromkeys(times, 0.0))
    report = {"swapped": [{"kind": "norm"}, {"kind": "attention"}], "skipped": [], "unknown": []}
    return Speed(dropout, 2048, timing, variants, Products(10**10, 200.0), report)


def _training(dropout: float | None) -> Sameness:
    steps = list(range(0, 201, 20))
    runs = [[5.5 - step / 80 + 1e-4 * run for step in steps] for run in range(4)]
    return Sameness(dropout, "dropout seed", "held-out loss", steps, runs, runs[1], {})


PICTURES = [  # characters of the model's name, and the variants
    (10, dict(dropouts=(None,))),
    (400, dict(alike=ALIKE)),
]


def name_of(length: int) -> str:
    """package.module:function of this many characters."""
    words = "my_package.models.transformers_of_language_and_images."
    return (words * (length // len(words) + 1))[: length - 5] + ":make"


@pytest.mark.parametrize(("length", "options"), PICTURES, ids=lambda value: str(value)[:9])
def test_words_of_the_picture_lie_in_it_and_apart(length, options):
    result = result_of(name_of(length), **options)
    figure = pictures.drawn(lambda: plot._figure(result))
    assert any(name_of(length)[:10] in text for text, _ in pictures.words_of(figure))
    pictures.assert_words_lie_apart(figure)


def test_a_line_is_broken_between_words_and_before_no_percent_sign():
    for inches in (1, 2, 3.7, 12):
        lines = plotting.broken(f"16 % {name_of(200)} of it, 14 % $x_1$", 9, inches)
        assert all(plotting.width_of(line, 9) <= inches for line in lines)
        assert not any(line.startswith("%") for line in lines)
        whole = "".join(lines).replace("\u00a0", "").replace(" ", "")
        assert whole == f"16%{name_of(200)}ofit,14%$x_1$"


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_terminal_of_any_width_gets_every_figure(width):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    result_of("user.models:make", alike=ALIKE).show(console)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    flat = " ".join(" ".join(lines).split())
    assert "…" not in flat
    for figure in "239.2 [231.8-246.6];2.71 [2.71-2.71];99.0;199.0;1.0e-04;3.0e-04".split(";"):
        assert figure in flat, figure


def test_small_losses_are_no_negative_zeros():
    assert [report.number(ms) for ms in (-0.001, -0.006, 0.0, -9.999, 12.34, -123.4)] == [
        "0.00", "-0.01", "0.00", "-10.0", "12.3", "-123",
    ]  # fmt: skip
