"""The picture of `onepass bench`: for each family, how many times faster every case is than
torch's, and its share of the binding ceiling."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from onepass.tools.plotting import OURS, STOCK, drawn, put_texts

# The bound of a case, by the field of its row.
CEILINGS = {
    "share_of_copy": ("a copy", "#33658a"),
    "share_of_update": ("an update in place", "#7a9e7e"),
    "share_of_read": ("a read", "#8d7b9e"),
    "share_of_arithmetic": ("arithmetic", "#f6ae2d"),
}
CASE_INCHES, TITLE_INCHES, AXIS_INCHES = 0.24, 0.75, 0.6

# Without a frame, the marks of a legend look like values.
FRAME = {"frameon": True, "framealpha": 1, "edgecolor": "#d5d8dc"}


def plot(result: dict, format: str) -> bytes:
    """The picture, as a file of this format.

    Args:
        result: the object that --json writes.
    """
    return drawn(lambda: _figure(result), format)


def _figure(result: dict) -> Figure:
    families: dict[str, list[dict]] = {}
    for row in result["rows"]:
        families.setdefault(row["name"].partition("/")[0], []).append(row)
    heights = [TITLE_INCHES + CASE_INCHES * len(rows) for rows in families.values()]
    figure = Figure(figsize=(13, sum(heights) + AXIS_INCHES), layout="constrained")
    grid = figure.add_gridspec(max(len(heights), 1), 2, height_ratios=heights or None)
    for number, (family, rows) in enumerate(families.items()):
        ratios = figure.add_subplot(grid[number, 0])
        _plot_ratios(ratios, family, rows)
        _plot_shares(figure.add_subplot(grid[number, 1], sharey=ratios), rows)
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    busy = result.get("other_load")
    load = "" if busy is None else f"other load: {busy:.2f} cores. "
    put_texts(figure, "onepass bench", 13, [f"{result['command']}. {load}{machine}"])
    return figure


def _plot_ratios(axes: Axes, family: str, rows: list[dict]) -> None:
    axes.set_title(f"{family}: times faster than torch (95 % interval)")
    for y, row in enumerate(rows):
        found = row["against_eager"]
        axes.plot([found["low"], found["high"]], [y, y], color=OURS, lw=2)
    medians = [row["against_eager"]["median"] for row in rows]
    axes.plot(medians, range(len(rows)), "o", color=OURS, ms=5, label="than eager")
    compiled = [
        (row["against_compile"]["median"], y)
        for y, row in enumerate(rows)
        if row["against_compile"]
    ]
    if compiled:
        axes.plot(*zip(*compiled, strict=True), "D", color=STOCK, mfc="none", label="than compiled")
    axes.axvline(1, color=STOCK, lw=1)
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.9), max(high, 2.2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.set_yticks(range(len(rows)), [row["name"].partition("/")[2] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.legend(loc="best", **FRAME)


def _plot_shares(axes: Axes, rows: list[dict]) -> None:
    axes.set_title("share of the ceiling that binds")
    for field, (name, color) in CEILINGS.items():
        found = [(y, row[field]) for y, row in enumerate(rows) if row.get(field) is not None]
        if found:
            places, shares = zip(*found, strict=True)
            axes.barh(places, shares, color=color, height=0.6, label=f"of {name}")
            for y, share in found:
                axes.text(share, y, f" {share:.0%}", va="center", fontsize=8)
    axes.tick_params(labelleft=False)
    axes.axvline(1, color=STOCK, lw=1)
    axes.set_xlim(0, max(1.15, axes.get_xlim()[1] * 1.1))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", **FRAME)
