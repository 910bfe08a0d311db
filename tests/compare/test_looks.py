"""Tables of `onepass compare` at any width, and its picture with words of any length."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich", reason="prints the tables")
pytest.importorskip("matplotlib", reason="draws the picture")

from rich.console import Console
from rich.table import Table

from onepass import _plotting, _tables
from onepass.compare import plot, report
from onepass.compare.model import Sizes
from tests.compare.results import ALIKE, result_of
from tests.support import pictures

PICTURES = [  # characters of the model's name, and the variants
    (10, dict(dropouts=(None,))),
    (40, dict(alike=ALIKE)),
    (90, dict()),
    (200, dict(dropouts=(None,))),
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
        lines = _plotting.broken(f"16 % {name_of(200)} of it, 14 % $x_1$", 9, inches)
        assert all(_plotting.width_of(line, 9) <= inches for line in lines)
        assert not any(line.startswith("%") for line in lines)
        whole = "".join(lines).replace("\u00a0", "").replace(" ", "")
        assert whole == f"16%{name_of(200)}ofit,14%$x_1$"


def printed(width: int, alike=ALIKE, **options) -> list[str]:
    """The lines of a run with every variant in a terminal of this width."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    result = result_of("user.models:make", alike=alike, **options)
    report.print_result(result, console)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_terminal_of_any_width_gets_every_figure(width):
    lines = printed(width)
    assert max(map(len, lines)) <= width
    flat = " ".join(" ".join(lines).split())
    assert "…" not in flat
    for figure in (
        "239.2 [231.8-246.6]",
        "2.71 [2.71-2.71]",
        "99.0",
        "199.0",
        "1.0e-04",
        "3.0e-04",
    ):
        assert figure in flat, figure


def test_a_narrow_terminal_gets_paragraphs_with_the_names_of_columns():
    lines = printed(80)
    start = lines.index("dropout 0.1, compiled swapped")
    paragraph = "; ".join(line.strip() for line in lines[start + 1 : start + 4]).split("; ")
    assert [words.rpartition(" ")[0] for words in paragraph[2:5]] == [
        "items/s", "saved MiB", "peak MiB",
    ]  # fmt: skip
    assert any("part" in line and "backward" in line for line in lines)  # this table fits
    narrower = printed(60)
    assert "dropout 0.1" in narrower and "dropout 0" in narrower  # the rows of the sameness


def test_what_was_trained_is_said():
    assert "trained: the model's loss" in printed(120)
    assert result_of("my_run:make").to_dict()["objective"] == "the model's loss"


def test_medium_precision_is_explained_where_it_was_measured():
    named = "stock, medium precision: torch alone, with its products of float32 in bfloat16"
    assert any(named in line for line in printed(160, alike=("{}", "{}, medium precision")))
    assert not any(named in line for line in printed(160))


def test_one_layer_is_no_layers():
    assert str(Sizes(layers=1, heads=1, width=16)).startswith("1 layer, 1 head, width 16, ")
    assert str(Sizes(layers=2, heads=4, width=16)).startswith("2 layers, 4 heads, width 16, ")


def test_small_losses_are_no_negative_zeros():
    assert [report.number(ms) for ms in (-0.001, -0.006, 0.0, -9.999, 12.34, -123.4)] == [
        "0.00", "-0.01", "0.00", "-10.0", "12.3", "-123",
    ]  # fmt: skip


def test_a_table_without_rows_is_its_header():
    file = io.StringIO()
    table = Table("module", "count")
    _tables.print_table(Console(file=file, width=20), table)
    assert "module" in file.getvalue() and "count" in file.getvalue()
