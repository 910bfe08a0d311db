"""The survey as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onepass.swapping.texts import readable
from onepass.tools.estimate.step import estimate_of
from onepass.tools.estimate.survey import STOCK, SWAPPED, Survey
from onepass.tools.estimate.timeline import LOSS
from onepass.tools.tables import print_footer, print_table, print_text, table_of

MODULES = 10  # rows of the table of modules


def print_survey(survey: Survey, console: Console) -> None:
    for table in (
        _variants_table(survey), _modules_table(survey), _dtypes_table(survey),
        _optimizers_table(survey), _levers_table(survey),
    ):  # fmt: skip
        print_table(console, table)
    for variant, reason in survey.left_out.items():
        print_text(console, f"Left out: {variant}: {reason}.")
    if note := survey.steps[SWAPPED].note:
        print_text(console, f"Swapped, {note}: --real counts the call.")
    print_text(console, sentence(survey), "bold")
    print_footer(console, footer(survey))


def sentence(survey: Survey) -> str:
    """The peaks, and the batch that fits."""
    peaks = {variant: survey.peak(variant) for variant in survey.steps}
    phase = estimate_of(survey.base, survey.settings.optimizer).peak_phase
    text = f"Peak {readable(peaks[STOCK])}, in the {phase}; swapped {readable(peaks[SWAPPED])}"
    others = [v for v in peaks if v not in (STOCK, SWAPPED)]
    if others:
        text += f"; {others[-1]} {readable(peaks[others[-1]])}"
    best = min(survey.levers, key=lambda lever: lever.peak)
    if best.peak < min(peaks.values()):
        text += f"; {best.name} {readable(best.peak)}"
    if survey.settings.memory is None:
        return f"{text}."
    batches = {v: rows for v, rows in survey.fits.items() if rows is not None}
    batches |= {lever.name: lever.rows for lever in survey.levers if lever.rows is not None}
    room = readable(survey.settings.memory)
    most = max(batches, key=batches.__getitem__, default=None)
    if most is None:
        return f"{text}. The largest batch is not known: the model runs with its own alone."
    if not batches[most]:
        return f"{text}. Not one row fits in {room}."
    return (
        f"{text}. In {room} fit {batches.get(STOCK, 0):,} rows stock, "
        f"{batches[most]:,} with {most}."
    )


def footer(survey: Survey) -> list[str]:
    """The meaning of the figures, and the line that repeats the run."""
    return [
        "Bytes of tensors that are alive at once (1 GiB = 2^30 bytes). Scratch of",
        "operators, rounding of the allocator and the process itself come on top.",
        f"{survey.command}   ({survey.seconds:.0f} s)",
    ]


def _table(title: str, *columns: str) -> Table:
    return table_of(title, *columns, folded=True)


def title(survey: Survey) -> str:
    """The model of these figures."""
    rows = "" if survey.rows is None else f"batch {survey.rows}, "
    dtype, optimizer = survey.settings.dtype, survey.settings.optimizer
    parameters = f"{survey.base.parameter_count:,} parameters"
    return f"{parameters}, {rows}{dtype}, {optimizer}"


def _variants_table(survey: Survey) -> Table:
    headers = [variant.replace(", ", ",\n") for variant in survey.steps]
    table = _table(f"A training step: {title(survey)}", "", *headers)
    found = [estimate_of(step, survey.settings.optimizer) for step in survey.steps.values()]
    rows = {
        "parameters": [e.parameters for e in found],
        "gradients": [e.gradients for e in found],
        "optimizer state": [e.optimizer_state for e in found],
        "buffers, batch": [e.others for e in found],
        "activations kept": [e.activations for e in found],
        "  the loss's own": [e.loss for e in found],
        "temporary, at the peak": [e.temporary for e in found],
        "peak, forward": [e.peaks["forward"] for e in found],
        "peak, backward": [e.peaks["backward"] for e in found],
        "peak, update": [e.peaks["update"] for e in found],
    }
    for name, values in rows.items():
        last = name in ("temporary, at the peak", "peak, update")
        table.add_row(name, *map(readable, values), end_section=last)
    table.add_row("peak", *(readable(e.peak) for e in found), style="bold")
    if survey.fits:
        most = [_rows(survey.fits[variant]) for variant in survey.steps]
        table.add_row(f"largest batch, {readable(survey.settings.memory)}", *most, style="bold")
    return table


def _rows(rows: int | None) -> str:
    return "" if rows is None else f"{rows:,}" if rows else "none"


def _modules_table(survey: Survey) -> Table:
    table = _table("Activations by module", "module", "count", "stock", "swapped")
    stock, swapped = survey.steps[STOCK], survey.steps[SWAPPED]
    ours = {kept.name: kept.nbytes for kept in swapped.kept}
    for kept in stock.kept[:MODULES]:
        table.add_row(
            escape(module_name(kept.name)), str(kept.count), readable(kept.nbytes),
            readable(ours.pop(kept.name, 0)),
        )  # fmt: skip
    rest = stock.activations - sum(kept.nbytes for kept in stock.kept[:MODULES])
    if rest or ours:
        table.add_row("(others)", "", readable(rest), readable(sum(ours.values())))
    return table


def module_name(name: str) -> str:
    return {"": "(the model itself)", LOSS: "(the loss)"}.get(name, name)


def _dtypes_table(survey: Survey) -> Table:
    table = _table("Peak by dtype", "dtype", "parameters", "stock", "swapped", "saved")
    name = survey.settings.optimizer
    for dtype, steps in survey.dtypes.items():
        stock, swapped = steps[STOCK].peak(name), steps[SWAPPED].peak(name)
        parameters = readable(steps[STOCK].parameters)
        table.add_row(dtype, parameters, readable(stock), readable(swapped), _saved(stock, swapped))
    return table


def _saved(before: int, after: int) -> str:
    percent = round(100 * (before - after) / before)
    return f"{readable(before - after)}, {percent} %"


def _optimizers_table(survey: Survey) -> Table:
    table = _table(
        "Optimizers", "optimizer", "state", "bytes per\nparameter", "peak,\nstock", "peak,\nswapped"
    )
    stock, swapped = survey.steps[STOCK], survey.steps[SWAPPED]
    for name, update in stock.updates.items():
        table.add_row(
            name, readable(update.state_bytes),
            f"{update.state_bytes / stock.parameter_count:.2f}",
            readable(stock.peak(name)), readable(swapped.peak(name)),
        )  # fmt: skip
    return table


def _levers_table(survey: Survey) -> Table:
    columns = ["change", "peak", "saved"]
    if survey.fits:
        columns.append("largest batch")
    table = _table("What each change to stock buys", *columns)
    stock = survey.peak(STOCK)
    for lever in survey.levers:
        row = [lever.name, readable(lever.peak), _saved(stock, lever.peak)]
        table.add_row(*row, *([_rows(lever.rows)] if survey.fits else []))
    return table
