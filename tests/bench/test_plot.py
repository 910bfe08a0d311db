"""The picture of `onepass bench`: drawn from the output of --json, and from every kept result."""

import json
from pathlib import Path

import pytest

from onepass import cli

pytest.importorskip("matplotlib", reason="draws the picture")
from onepass.tools.bench import plot

KEPT = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def results() -> dict[str, dict]:
    """Kept results with rows of cases, by file."""
    found = {path: json.loads(path.read_text("utf-8")) for path in sorted(KEPT.rglob("*.json"))}
    return {str(path.relative_to(KEPT)): of for path, of in found.items() if "rows" in of}


RESULTS = results()


def test_the_command_draws_what_it_measured(tmp_path):
    words = "--quick", "--no-compile", "--case", "dropout/*/forward+backward"
    files = "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.svg")
    assert cli.main(["bench", *words, *files]) == 0
    measured = json.loads((tmp_path / "rows.json").read_text("utf-8"))
    names = [row["name"].partition("/")[2] for row in measured["rows"]]
    drawn = (tmp_path / "rows.svg").read_text("utf-8")
    assert names and all(f"<!-- {name} -->" in drawn for name in names)


@pytest.mark.parametrize("name", RESULTS)
def test_every_case_is_in_the_picture(name):
    """Its ratio, its interval, and its share where memory or arithmetic binds it."""
    result = RESULTS[name]
    figure = plot._figure(result)
    families = dict.fromkeys(row["name"].partition("/")[0] for row in result["rows"])
    assert len(figure.axes) == 2 * len(families)
    for family, ratios, shares in zip(families, figure.axes[::2], figure.axes[1::2], strict=True):
        rows = [row for row in result["rows"] if row["name"].startswith(f"{family}/")]
        labels = [label.get_text() for label in ratios.get_yticklabels()]
        assert labels == [row["name"].partition("/")[2] for row in rows]
        medians = next(line for line in ratios.lines if line.get_label() == "than eager")
        assert list(medians.get_xdata()) == [row["against_eager"]["median"] for row in rows]
        low, high = ratios.get_xlim()
        assert all(low < x < high for x in medians.get_xdata())
        found = [
            row[field] for row in rows for field in plot.CEILINGS if row.get(field) is not None
        ]
        assert sorted(bar.get_width() for bar in shares.patches) == sorted(found)


def test_without_rows_the_picture_is_empty():
    result = {"rows": [], "machine": {}, "command": "onepass bench", "other_load": None}
    assert not plot._figure(result).axes and plot.plot(result, "svg").startswith(b"<?xml")


def test_every_field_of_a_share_has_a_name():
    rows = [row for result in RESULTS.values() for row in result["rows"]]
    fields = {field for row in rows for field in row if field.startswith("share_of_")}
    assert fields <= set(plot.CEILINGS)
