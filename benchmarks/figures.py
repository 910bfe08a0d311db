"""Draws the pictures of the README from the measurements under benchmarks/results.

    python benchmarks/figures.py            (make figures)

`docs/images/compare.svg`: a training step of the GPT of `onepass compare`, stock and swapped, by
the parts of the model, from a file of `onepass compare --json FILE`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COMPARE = ROOT / "benchmarks" / "results" / "epyc-zen4-2cores" / "compare.json"
# The parts of a step: the picture's names, and those of `compare`.
PARTS = {
    "linear layers": ("linear",),
    "attention": ("attention",),
    "the rest": (
        "norm", "dropout", "activation", "loss", "convolution", "recurrent", "embedding",
        "optimizer", "other operators", "Python", "unattributed",
    ),
}  # fmt: skip
COLORS = ("#4878a8", "#d1792c", "#9a9a9a")


def main() -> int:
    IMAGES.mkdir(parents=True, exist_ok=True)
    draw_compare(json.loads(COMPARE.read_text(encoding="utf-8")), IMAGES / "compare.svg")
    return 0


def bars(measured: Mapping) -> list[tuple[str, list[float]]]:
    """(label, milliseconds of each of PARTS) of stock and swapped, at each dropout."""
    result = []
    for speed in measured["speed"]:
        drops = f"dropout {speed['dropout']:g}" if speed["dropout"] else "no dropout"
        for name in ("stock", "swapped"):
            variant = speed["variants"][name]
            step, phases = variant["step_ms"]["median"], variant["parts_ms"].values()
            parts = [
                sum(phase.get(part, 0.0) for phase in phases for part in names)
                for names in PARTS.values()
            ]
            # The parts are timed in separate steps, which hooks make longer.
            scale = step / sum(parts)
            result.append((f"{drops}, {name}", [scale * part for part in parts]))
    return result


def draw_compare(measured: Mapping, path: Path) -> None:
    import matplotlib

    # The same figures give the same file, whose text can be searched.
    style = {"svg.hashsalt": "onepass", "svg.fonttype": "none", "font.size": 11}
    with matplotlib.rc_context(style):
        figure = compare_figure(measured)
        figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")


def compare_figure(measured: Mapping) -> Figure:
    from matplotlib.figure import Figure

    rows = bars(measured)
    figure = Figure(figsize=(8, 0.55 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots()
    places = [row + 0.35 * (row // 2) for row in range(len(rows))]  # a gap between pairs
    left = [0.0] * len(rows)
    for index, (part, color) in enumerate(zip(PARTS, COLORS, strict=True)):
        widths = [parts[index] for _, parts in rows]
        axes.barh(places, widths, left=left, color=color, label=part, height=0.8)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total, row in zip(places, left, range(len(rows)), strict=True):
        text = f"{total:,.0f} ms"
        if row % 2:
            ratio = measured["speed"][row // 2]["variants"]["swapped"]["ratio_to_stock"]
            text += f", {ratio['median']:.2f}x [{ratio['low']:.2f}-{ratio['high']:.2f}]"
        weight = "bold" if row % 2 else "normal"
        offset = dict(xytext=(4, 0), textcoords="offset points")  # svg drops a leading space
        axes.annotate(text, (total, place), va="center", weight=weight, **offset)
    axes.set_yticks(places, [label for label, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    machine = measured["machine"]
    axes.set_xlabel(f"a training step, {machine['cpu']}, {machine['threads']} threads")
    figure.legend(loc="outside upper center", ncols=len(PARTS), frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
