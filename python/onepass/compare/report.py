"""The outcome: one dictionary for machines, tables and one sentence for people."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from onepass.compare.attribution import PARTS, UNATTRIBUTED, by_part
from onepass.compare.measure import FirstStep, Speed
from onepass.compare.settings import Settings
from onepass.compare.train import BAND_FACTOR, Sameness

SCHEMA_VERSION = 1
WORTH_NAMING = 0.10  # share of the swapped step from which a part not accelerated is named


@dataclass(frozen=True)
class Result:
    """Everything that a run of `onepass compare` found out."""

    settings: Settings
    machine: dict
    data: str
    parameters: int
    speeds: list[Speed]
    sameness: list[Sameness]
    swap_report: dict  # Report.to_dict()
    seconds: float

    @property
    def same(self) -> bool:
        return all(phase.same for phase in self.sameness)

    @property
    def first_steps(self) -> dict[str, FirstStep]:
        """Per variant; measured with one of the dropout probabilities only."""
        return {
            name: variant.first_step
            for speed in self.speeds
            for name, variant in speed.variants.items()
            if variant.first_step
        }

    def to_dict(self) -> dict:
        """The JSON of `onepass.compare`, whose docstring is its schema."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.settings.command,
            "machine": self.machine,
            "settings": self.settings.to_dict(),
            "data": self.data,
            "parameters": self.parameters,
            "speed": [_speed_dict(speed) for speed in self.speeds],
            "first_step": {name: step.to_dict() for name, step in self.first_steps.items()},
            "sameness": [phase.to_dict() for phase in self.sameness],
            "swap_report": self.swap_report,
            "verdict": {
                "same": self.same,
                "not_accelerated": not_accelerated(self),
                "sentence": verdict(self),
            },
            "seconds": self.seconds,
        }


def _speed_dict(speed: Speed) -> dict:
    timing = speed.timing
    variants = {}
    for name, variant in speed.variants.items():
        baseline = baseline_of(name)
        variants[name] = {
            "step_ms": {
                "median": timing.median(name),
                "p10": timing.percentile(name, 10),
                "p90": timing.percentile(name, 90),
                "rounds": timing.times[name],
            },
            "items_per_second": speed.items_per_second(name),
            "ratio_to_stock": timing.ratio(name, "stock").to_dict(),
            "ratio_to_baseline": timing.ratio(name, baseline).to_dict(),
            "baseline": baseline,
            "parts_ms": variant.parts,
            "saved_bytes": variant.saved_bytes,
            "peak_bytes": variant.peak_bytes,
        }
    return {
        "dropout": speed.dropout,
        "items_per_batch": speed.items_per_batch,
        "variants": variants,
    }


def baseline_of(variant: str) -> str:
    """The variant that differs from this one by the swap alone."""
    return variant.replace("swapped", "stock")


def label(dropout: float | None) -> str:
    return "as given" if dropout is None else f"{dropout:g}"


def not_accelerated(result: Result) -> dict[str, list[float]]:
    """Parts that no swapped module belongs to: their share of the swapped step, per dropout."""
    kinds = {entry["kind"] for entry in result.swap_report["swapped"]}
    shares: dict[str, list[float]] = {}
    for part in PARTS:
        if part in kinds or part == UNATTRIBUTED:
            continue
        of_step = []
        for speed in result.speeds:
            parts = by_part(speed.variants["swapped"].parts)
            of_step.append(parts[part] / sum(parts.values()))
        if max(of_step) >= WORTH_NAMING:
            shares[part] = of_step
    return dict(sorted(shares.items(), key=lambda item: -max(item[1])))


def verdict(result: Result) -> str:
    """One sentence: how much faster or slower, whether training is the same, what is left."""
    several = len(result.speeds) > 1

    def with_dropout(dropout: float | None) -> str:
        if not several:
            return ""
        return f" with dropout {dropout:g}" if dropout else " without dropout"

    speeds = []
    for speed in result.speeds:
        interval = speed.timing.ratio("swapped", "stock")
        remark = ""
        if interval.high < 1.0:
            remark = ": slower"
        elif interval.low <= 1.0:
            remark = ": no difference measured"
        text = f"{interval.median:.2f}x [{interval.low:.2f}-{interval.high:.2f}]{remark}"
        speeds.append(text + with_dropout(speed.dropout))
    gaps = []
    for phase in result.sameness:
        remark = f" stock-versus-stock{with_dropout(phase.dropout)}"
        if several and not phase.same:
            remark += " (different)"
        gaps.append(f"{phase.gap:.0e} against {phase.stock_gap:.0e}{remark}")
    sameness = "same" if result.same else "different"
    sentence = f"{', '.join(speeds)}; loss gap {', '.join(gaps)}: {sentence_end(sameness, result)}"
    return sentence


def sentence_end(sameness: str, result: Result) -> str:
    left = [f"{_title(part)}, {_range(shares)}" for part, shares in not_accelerated(result).items()]
    if not result.swap_report["swapped"]:
        return f"{sameness}. Nothing was swapped."
    return f"{sameness}." + (f" Not accelerated: {'; '.join(left)}." if left else "")


def _title(part: str) -> str:
    return "Linear" if part == "linear" else part


def _range(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}"[:-1], f"{max(shares):.0%}"[:-1]
    return f"{low} %" if low == high else f"{low}-{high} %"


def print_tables(result: Result, console: Console) -> None:
    """Prints the tables, the verdict and the footer."""
    console.print(_speed_table(result))
    console.print(_parts_table(result))
    console.print(_sameness_table(result))
    for name, step in result.first_steps.items():
        console.print(
            f"First step, {name} against stock, dropout off: loss difference "
            f"{step.loss_difference:.1e} of {step.loss:.4f}; worst gradient error "
            f"{step.gradient_error:.1e} of that gradient's largest, in {step.gradient_name}."
        )
    console.print()
    console.print(verdict(result), style="bold", highlight=False)
    console.print()
    for line in footer(result):
        console.print(line, style="dim", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index > 1 else "left", no_wrap=True)
    return table


def _speed_table(result: Result) -> Table:
    unit = "items/s" if result.settings.model else "tokens/s"
    table = _table(
        "Speed: one training step",
        "dropout", "variant", "median ms [p10-p90]", "times stock [95 %]", unit,
        "saved for backward", "peak memory",
    )  # fmt: skip
    for speed in result.speeds:
        timing = speed.timing
        for name, variant in speed.variants.items():
            ratio = timing.ratio(name, "stock")
            low, high = timing.percentile(name, 10), timing.percentile(name, 90)
            table.add_row(
                label(speed.dropout),
                name,
                f"{timing.median(name):.4g} [{low:.4g}-{high:.4g}]",
                "1" if name == "stock" else f"{ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}]",
                f"{speed.items_per_second(name):,.0f}",
                _mebibytes(variant.saved_bytes),
                _mebibytes(variant.peak_bytes),
                end_section=name == list(speed.variants)[-1],
            )
    return table


def _parts_table(result: Result) -> Table:
    columns = ["part"]
    for speed in result.speeds:
        tail = "" if speed.dropout is None else f", {speed.dropout:g}"
        columns += [f"stock{tail}", f"swapped{tail}", "saved"]
    table = _table("Where the step goes: ms (forward + backward), per dropout", *columns)
    for column in table.columns[1:]:
        column.justify = "right"

    for part in (*PARTS, "step"):
        row = [part]
        for speed in result.speeds:
            spent = [speed.variants[name].parts for name in ("stock", "swapped")]
            row += [_part_text(parts, part) for parts in spent]
            row.append(f"{_part_ms(spent[0], part) - _part_ms(spent[1], part):.1f}")
        table.add_row(*row, end_section=part == UNATTRIBUTED)
    return table


def _part_ms(parts: dict[str, dict[str, float]], part: str) -> float:
    totals = by_part(parts)
    return sum(totals.values()) if part == "step" else totals[part]


def _part_text(parts: dict[str, dict[str, float]], part: str) -> str:
    if part in ("optimizer", "step"):
        return f"{_part_ms(parts, part):.1f}"
    forward, backward = parts["forward"][part], parts["backward"][part]
    return f"{_part_ms(parts, part):.1f} ({forward:.1f} + {backward:.1f})"


def _sameness_table(result: Result) -> Table:
    table = _table(
        "Sameness: gap between loss curves",
        "dropout", "stock runs differ by", "steps", "swapped - stock", "stock-versus-stock", "",
    )  # fmt: skip
    for phase in result.sameness:
        table.add_row(
            label(phase.dropout),
            phase.stock_runs_differ_by,
            str(phase.steps[-1]),
            f"{phase.gap:.1e}",
            f"{phase.stock_gap:.1e}",
            "same" if phase.same else "different",
        )
    return table


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def footer(result: Result) -> list[str]:
    """Where, with what and how; the last line repeats the run."""
    settings, machine = result.settings, result.machine
    lines = []
    if settings.quick:
        lines.append("--quick: tiny sizes, a trial of the tool. These figures measure nothing.")
    model = settings.model or (
        f"GPT of {settings.speed}, {'RMSNorm' if settings.rmsnorm else 'LayerNorm'}, tied head; "
        f"sameness with {settings.sameness}"
    )
    dtype = str(settings.dtype).removeprefix("torch.")
    lines += [
        f"{model}; {result.parameters:,} parameters, {dtype}, torch's fused AdamW; {result.data}",
        f"same: the gap is at most {BAND_FACTOR:g} x the largest difference between "
        f"{len(result.sameness[0].stock)} stock runs",
        " | ".join(f"{name} {value}" for name, value in machine.items()),
        f"{settings.command}   ({result.seconds:.0f} s)",
    ]
    return lines
