"""The picture: the parts of a step, the modules that keep most, and the saving of each change."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onepass._plotting import OURS, SMALL, drawn, wrapped
from onepass._plotting import STOCK as GREY
from onepass.estimate.report import MODULES, module_name, sentence, title
from onepass.estimate.result import readable
from onepass.estimate.step import estimate_of
from onepass.estimate.survey import STOCK, SWAPPED, Survey

# From parts that no change affects to those of the swap, in the order of compare's parts.
COLORS = {
    "parameters": "#33658a",
    "gradients": "#7a9e7e",
    "optimizer state": "#8d7b9e",
    "buffers, batch": "#b8c9a9",
    "activations": "#e4572e",
    "temporary": "#f6ae2d",
}
GIB = 2**30


def plot(survey: Survey, command: str, format: str) -> bytes:
    """The picture, as a file of this format."""
    return drawn(lambda: _figure(survey, command), format)


def _figure(survey: Survey, command: str) -> Figure:
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    top, bottom = figure.add_gridspec(2, 1, height_ratios=[1, 1.15])
    _plot_parts(figure.add_subplot(top), survey)
    left, right = bottom.subgridspec(1, 2)
    _plot_modules(figure.add_subplot(left), survey)
    _plot_levers(figure.add_subplot(right), survey)
    figure.suptitle(wrapped(sentence(survey), 130), x=0.01, ha="left", fontsize=12)
    small = f"{title(survey)}; tensors alive at once\n{command}"
    figure.supxlabel(small, x=0.01, ha="left", fontsize=7.5, color=SMALL)
    return figure


def _plot_parts(axes: Axes, survey: Survey) -> None:
    """The parts at the peak, which depend on its phase."""
    names = list(survey.steps)
    widest = max(survey.peak(name) for name in names) / GIB
    for place, name in enumerate(names):
        found = estimate_of(survey.steps[name], survey.settings.optimizer)
        left = 0.0
        for part, nbytes in found.at_peak.items():
            width = nbytes / GIB
            axes.barh(place, width, left=left, height=0.7, color=COLORS[part], lw=0,
                label=part if place == 0 else None)  # fmt: skip
            if width > 0.06 * widest:
                axes.text(left + width / 2, place, readable(nbytes), ha="center", va="center",
                    fontsize=8, color="white")  # fmt: skip
            left += width
        axes.text(left + 0.01 * widest, place, readable(found.peak), va="center", fontsize=9)
    if survey.settings.memory is not None:
        axes.axvline(survey.settings.memory / GIB, color="#1f2933", lw=1.4, ls="--")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.13 * widest)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("GiB")
    axes.set_title("Memory at the peak of a step, by part")
    axes.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _plot_modules(axes: Axes, survey: Survey) -> None:
    kept = survey.steps[STOCK].kept[:MODULES]
    ours = {item.name: item.nbytes for item in survey.steps[SWAPPED].kept}
    places = range(len(kept))
    axes.barh([p - 0.2 for p in places], [item.nbytes / GIB for item in kept], height=0.38,
        color=GREY, label="stock")  # fmt: skip
    axes.barh([p + 0.2 for p in places], [ours.get(item.name, 0) / GIB for item in kept],
        height=0.38, color=OURS, label="swapped")  # fmt: skip
    axes.set_yticks(places, [module_name(item.name) for item in kept], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("GiB")
    axes.set_title("Activations by module")
    axes.legend()


def _plot_levers(axes: Axes, survey: Survey) -> None:
    stock = survey.peak(STOCK)
    saved = [(stock - lever.peak) / GIB for lever in survey.levers]
    widest = max(map(abs, saved), default=0.0) or 1.0
    axes.barh(range(len(saved)), saved, height=0.7, color=OURS)
    for place, lever in enumerate(survey.levers):
        text = readable(stock - lever.peak)
        if lever.rows:
            text += f", batch {lever.rows:,}"
        axes.text(max(0.0, saved[place]) + 0.01 * widest, place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(saved)), [lever.name for lever in survey.levers], fontsize=8)
    axes.set_xlim(min(0.0, *saved), 1.3 * widest)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("GiB below the peak of stock")
    axes.set_title("What each change buys")
