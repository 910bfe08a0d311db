"""The picture: the parts of a step, the modules that keep most, and the saving of each change."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onepass.swapping.texts import readable
from onepass.tools.estimate.report import MODULES, module_name, sentence, title
from onepass.tools.estimate.step import estimate_of
from onepass.tools.estimate.survey import STOCK, SWAPPED, Survey
from onepass.tools.plotting import OURS, drawn, put_texts, shortened
from onepass.tools.plotting import STOCK as GREY

# From parts that no change affects to those of the swap, in the order of compare's parts.
COLORS = {
    "parameters": "#33658a",
    "gradients": "#7a9e7e",
    "optimizer state": "#8d7b9e",
    "buffers, batch": "#b8c9a9",
    "activations": "#e4572e",
    "temporary": "#f6ae2d",
}
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
ROOM_FOR_WORDS = 1.4  # right of the longest bar, as a factor of its length


def plot(survey: Survey, format: str) -> bytes:
    """The picture, as a file of this format."""
    return drawn(lambda: _figure(survey), format)


def _figure(survey: Survey) -> Figure:
    figure = Figure(figsize=(13, 7.8), layout="constrained")
    top, bottom = figure.add_gridspec(2, 1, height_ratios=[1, 1.15])
    _plot_parts(figure.add_subplot(top), survey)
    left, right = bottom.subgridspec(1, 2)
    _plot_modules(figure.add_subplot(left), survey)
    _plot_levers(figure.add_subplot(right), survey)
    footer = [f"{title(survey)}; tensors alive at once", survey.command]
    put_texts(figure, sentence(survey), 12, footer)
    return figure


def _plot_parts(axes: Axes, survey: Survey) -> None:
    """The parts at the peak, which depend on its phase."""
    names = list(survey.steps)
    unit, size = _unit(max(survey.peak(name) for name in names))
    widest = max(survey.peak(name) for name in names) / size
    for place, name in enumerate(names):
        found = estimate_of(survey.steps[name], survey.settings.optimizer)
        left = 0.0
        for part, nbytes in found.at_peak.items():
            width = nbytes / size
            axes.barh(place, width, left=left, height=0.7, color=COLORS[part], lw=0,
                label=part if place == 0 else None)  # fmt: skip
            if width > 0.06 * widest:
                axes.text(left + width / 2, place, readable(nbytes), ha="center", va="center",
                    fontsize=8, color="white")  # fmt: skip
            left += width
        axes.text(left + 0.01 * widest, place, readable(found.peak), va="center", fontsize=9)
    if survey.settings.memory is not None:
        axes.axvline(survey.settings.memory / size, color="#1f2933", lw=1.4, ls="--")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.13 * widest)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    axes.set_title("Memory at the peak of a step, by part")
    axes.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _plot_modules(axes: Axes, survey: Survey) -> None:
    kept = survey.steps[STOCK].kept[:MODULES]
    ours = {item.name: item.nbytes for item in survey.steps[SWAPPED].kept}
    places = range(len(kept))
    unit, size = _unit(max((item.nbytes for item in kept), default=0))
    axes.barh([p - 0.2 for p in places], [item.nbytes / size for item in kept], height=0.38,
        color=GREY, label="stock")  # fmt: skip
    axes.barh([p + 0.2 for p in places], [ours.get(item.name, 0) / size for item in kept],
        height=0.38, color=OURS, label="swapped")  # fmt: skip
    axes.set_yticks(places, [shortened(module_name(item.name), 44) for item in kept], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    axes.set_title("Activations by module")
    axes.legend()


def _plot_levers(axes: Axes, survey: Survey) -> None:
    stock = survey.peak(STOCK)
    unit, size = _unit(max((abs(stock - lever.peak) for lever in survey.levers), default=0))
    saved = [(stock - lever.peak) / size for lever in survey.levers]
    widest = max(map(abs, saved), default=0.0) or 1.0
    axes.barh(range(len(saved)), saved, height=0.7, color=OURS)
    for place, lever in enumerate(survey.levers):
        text = readable(stock - lever.peak)
        if lever.rows:
            text += f", batch {lever.rows:,}"
        axes.text(max(0.0, saved[place]) + 0.01 * widest, place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(saved)), [lever.name for lever in survey.levers], fontsize=8)
    axes.set_xlim(min(0.0, *saved), ROOM_FOR_WORDS * widest)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{unit} below the peak of stock")
    axes.set_title("What each change buys")


def _unit(largest: int) -> tuple[str, int]:
    """The largest unit in which this many bytes are one or more, and its bytes."""
    return next(((u, size) for u, size in UNITS.items() if largest >= size), ("KiB", UNITS["KiB"]))
