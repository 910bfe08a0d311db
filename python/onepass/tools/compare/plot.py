"""The picture: loss curves, every pair of steps, the time of the parts, and the optimizers."""

from __future__ import annotations

import itertools

import matplotlib
import matplotlib.patches
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpecFromSubplotSpec

from onepass.tools.compare.attribution import OTHER, PARTS, PYTHON, UNATTRIBUTED, by_part
from onepass.tools.compare.measure import Speed
from onepass.tools.compare.optimizers import Comparison
from onepass.tools.compare.report import Result, footer, number, part_label, short, verdict
from onepass.tools.compare.train import BAND_FACTOR, Sameness
from onepass.tools.compare.variants import baseline_of, swapped_at
from onepass.tools.plotting import OURS, STOCK, drawn, put_texts

BAND = "#a9c4dd"
# From parts that a swap cannot reach, in greys and blues, to its own parts, in warm colours.
PART_COLORS = {
    "linear": "#33658a",
    "attention": "#a4243b",
    "norm": "#e4572e",
    "dropout": "#f6ae2d",
    "activation": "#7a9e7e",
    "loss": "#b8c9a9",
    "optimizer": "#8d7b9e",
    "convolution": "#5c8fb0",
    "recurrent": "#86a8c0",
    "embedding": "#a9bfd0",
    OTHER: "#b3b9c0",
    PYTHON: "#c6cad0",
    UNATTRIBUTED: "#d5d8dc",
}


def plot(result: Result, format: str) -> bytes:
    """The picture, as a file of this format."""
    return drawn(lambda: _figure(result), format)


def _figure(result: Result) -> Figure:
    rows = len(result.optimizers.outcomes)
    height = 0.9 + 0.3 * rows  # of the optimizers, in inches
    figure = Figure(figsize=(13, 9.9 + height), layout="constrained")
    top, middle, bottom = figure.add_gridspec(3, 1, height_ratios=[5.5, 4.8, height])
    curves = GridSpecFromSubplotSpec(
        2, len(result.sameness), subplot_spec=top, height_ratios=[2, 1.2]
    )
    for column, phase in enumerate(result.sameness):
        upper = figure.add_subplot(curves[0, column])
        lower = figure.add_subplot(curves[1, column], sharex=upper)
        _plot_losses(upper, phase)
        _plot_difference(lower, phase)
    pairs, parts = GridSpecFromSubplotSpec(1, 2, subplot_spec=middle, width_ratios=[1, 1.35])
    _plot_ratios(figure.add_subplot(pairs), result.speeds)
    _plot_parts(figure.add_subplot(parts), result.speeds)
    times, sizes = GridSpecFromSubplotSpec(1, 2, subplot_spec=bottom, width_ratios=[1.35, 1])
    _plot_updates(figure.add_subplot(times), result.optimizers)
    _plot_bytes(figure.add_subplot(sizes), result.optimizers)
    put_texts(figure, verdict(result), 13, footer(result))
    return figure


def _with(dropout: float | None) -> str:
    return "" if dropout is None else f", dropout {dropout:g}"


# Of the curves at other precisions than float32.
_STYLES = (":", "-.", (0, (1, 3)), (0, (5, 1, 1, 1)))


def _plot_losses(axes: Axes, phase: Sameness) -> None:
    low = [min(point) for point in zip(*phase.stock, strict=True)]
    high = [max(point) for point in zip(*phase.stock, strict=True)]
    axes.fill_between(phase.steps, low, high, color=BAND, label="all stock runs")
    axes.plot(phase.steps, phase.stock[0], color=STOCK, lw=2.6, label="stock")
    axes.plot(phase.steps, phase.swapped, color=OURS, lw=1.4, ls="--", label="swapped")
    for (name, losses), style in zip(phase.others.items(), itertools.cycle(_STYLES), strict=False):
        axes.plot(phase.steps, losses, color=OURS, lw=1.2, ls=style, label=swapped_at(name))
    axes.set_title(f"{phase.curve_name[0].upper()}{phase.curve_name[1:]}{_with(phase.dropout)}")
    axes.tick_params(labelbottom=False)
    axes.legend()


def _plot_difference(axes: Axes, phase: Sameness) -> None:
    limit = [BAND_FACTOR * width for width in phase.band]
    positive = [value for value in (*phase.difference, *limit) if value > 0]
    top = max(positive, default=1e-9)
    floor = max(min(positive, default=1e-9) / 2, top / 1e5)  # zero has no logarithm
    axes.fill_between(
        phase.steps, floor, [max(v, floor) for v in limit], color=BAND, alpha=0.35,
        label=f"{BAND_FACTOR:g} x stock-versus-stock",
    )  # fmt: skip
    axes.fill_between(
        phase.steps, floor, [max(v, floor) for v in phase.band], color=BAND,
        label=f"stock-versus-stock ({phase.stock_runs_differ_by})",
    )  # fmt: skip
    axes.plot(
        phase.steps, [max(v, floor) for v in phase.difference], color=OURS, marker="o", ms=3.5,
        lw=1.2, label="|swapped - stock|",
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(min(floor, top / 50), top * 2.5)
    axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set_xlabel("step")
    axes.set_ylabel("|difference|")
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8, borderaxespad=0.2,
        columnspacing=1.2,
    )  # fmt: skip


def _plot_ratios(axes: Axes, speeds: list[Speed]) -> None:
    """A row for each variant, so that any number of them has room for its words."""
    labels: list[str] = []
    for speed in speeds:
        for name in speed.variants:
            baseline = baseline_of(name)
            if name == baseline:
                continue
            place = len(labels)
            times = speed.timing.times
            ratios = [a / b for a, b in zip(times[baseline], times[name], strict=True)]
            interval = speed.timing.ratio(name, baseline)
            spread = [(k * 0.618 % 1 - 0.5) * 0.35 + place for k in range(len(ratios))]
            axes.scatter(ratios, spread, s=22, color=OURS, alpha=0.45, lw=0)
            axes.errorbar(
                interval.median, place, capsize=6, color="#1f2933", marker="D", ms=6, lw=1.8,
                xerr=[[interval.median - interval.low], [interval.high - interval.median]],
            )  # fmt: skip
            axes.annotate(
                f"{interval.median:.3g}x [{interval.low:.3g}-{interval.high:.3g}]",
                (interval.median, place - 0.2), ha="center", va="bottom", fontsize=9,
            )  # fmt: skip
            labels.append(f"{name}\nvs {baseline}{_with(speed.dropout)}")
    axes.axvline(1.0, color=STOCK, lw=1.4, zorder=0)
    axes.set_yticks(range(len(labels)), labels, fontsize=10 if len(labels) <= 2 else 8)
    axes.set_ylim(len(labels) - 0.4, -0.7)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("times faster; the line is stock")
    axes.set_title("Pairs of steps: how many times faster")


def _plot_parts(axes: Axes, speeds: list[Speed]) -> None:
    rows, labels = [], []
    for speed in speeds:
        for name in ("stock", "swapped"):
            rows.append(by_part(speed.variants[name].parts))
            labels.append(f"{name}{_with(speed.dropout)}")
    widest = max(sum(parts.values()) for parts in rows)
    # Two bars per dropout, and a gap before the next pair.
    places = [index + 0.6 * (index // 2) for index in range(len(rows))]
    for place, parts in zip(places, rows, strict=True):
        left = 0.0
        for part in PARTS:
            width = parts[part]
            axes.barh(place, width, left=left, height=0.78, color=PART_COLORS[part], lw=0)
            if width > 0.05 * widest:
                dark = part in ("linear", "norm", "optimizer")
                axes.text(
                    left + width / 2, place, number(width), ha="center", va="center", fontsize=8,
                    color="white" if dark else "#1f2933",
                )  # fmt: skip
            left += width
        axes.text(left + 0.01 * widest, place, f"{number(left)} ms", va="center", fontsize=9)
    for stock, swapped, place in zip(rows[::2], rows[1::2], places[1::2], strict=True):
        axes.text(
            0.004 * widest,
            place + 0.48,
            _saved_text(stock, swapped),
            va="top",
            fontsize=9,
            color="#b23a1a",
        )
    axes.set_yticks(places, labels)
    axes.set_ylim(places[-1] + 0.95, -0.6)
    axes.set_xlim(0, widest * 1.13)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms per step")
    axes.set_title("Where a step goes")
    shown = [part for part in PARTS if any(parts[part] for parts in rows)]
    handles = [
        matplotlib.patches.Patch(color=PART_COLORS[part], label=part_label(part)) for part in shown
    ]
    axes.legend(handles=handles, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _plot_updates(axes: Axes, compared: Comparison) -> None:
    names = list(compared.outcomes)
    times = [1e3 * compared.timing.median(name) for name in names]
    axes.barh(names, times, height=0.7, color=[_color_of(name) for name in names])
    for place, (name, ms) in enumerate(zip(names, times, strict=True)):
        share = compared.share_of_step(name)
        remark = "" if share is None else f", {100 * share:.2g} % of a step"
        outcome = compared.outcomes[name]
        if outcome.training:
            remark += f", loss gap {short(outcome.training.gap)}"
        if outcome.same is not None:
            remark += " (same)" if outcome.same else " (different)"
        axes.text(
            ms + 0.01 * max(times), place, f"{number(ms)} ms{remark}", va="center", fontsize=9
        )
    axes.set_xlim(0, 1.6 * max(times))  # room for the words
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms")
    axes.set_title(f"AdamW's step alone, {compared.parameters:,} parameters")


def _plot_bytes(axes: Axes, compared: Comparison) -> None:
    names = list(compared.outcomes)
    states = [compared.state_bytes(name) for name in names]
    totals = [compared.all_bytes(name) for name in names]
    colors = [_color_of(name) for name in names]
    axes.barh(names, states, height=0.7, color=colors)
    rest = [total - state for total, state in zip(totals, states, strict=True)]
    axes.barh(names, rest, left=states, height=0.7, color=PART_COLORS[UNATTRIBUTED])
    for place, (state, total) in enumerate(zip(states, totals, strict=True)):
        axes.text(total + 0.1, place, f"{state:.3g} of {total:.3g}", va="center", fontsize=9)
    axes.set_xlim(0, 1.25 * max(totals))
    axes.invert_yaxis()
    axes.tick_params(labelleft=False)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("bytes per parameter\n(grey: the parameter and its gradient)")
    axes.set_title("State of the optimizer")


def _color_of(optimizer: str) -> str:
    return OURS if optimizer.startswith("onepass") else STOCK


def _saved_text(stock: dict[str, float], swapped: dict[str, float]) -> str:
    """A line on the time that the swap saves or costs, and in which parts most."""
    saved = {part: stock[part] - swapped[part] for part in PARTS}
    total = sum(saved.values())
    named = sorted(saved.items(), key=lambda item: -abs(item[1]))[:3]
    words = ", ".join(f"{part} {'+' if ms < 0 else '-'}{number(abs(ms))}" for part, ms in named)
    return f"{'saves' if total >= 0 else 'costs'} {number(abs(total))} ms: {words}"
