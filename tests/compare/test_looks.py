"""Tables of `onepass compare` at any width, and its picture with words of any length."""

import io

import pytest

pytest.importorskip("rich", reason="prints the tables")
pytest.importorskip("matplotlib", reason="draws the picture")

from rich.console import Console

from onepass.tools import plotting
from onepass.tools.compare import plot, report
from tests.compare.results import ALIKE, result_of
from tests.support import pictures

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
