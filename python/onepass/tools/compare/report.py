"""The outcome: one dictionary for machines, tables and one sentence for people."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from onepass._policy.precision import quantizes
from onepass.swapping.reasons import Reason
from onepass.swapping.sample import Decision
from onepass.swapping.texts import grouped
from onepass.tools.compare.attribution import PARTS, PYTHON, UNATTRIBUTED, by_part
from onepass.tools.compare.measure import FirstStep, Speed
from onepass.tools.compare.optimizers import BASELINE, Comparison
from onepass.tools.compare.settings import FLOAT32, Settings
from onepass.tools.compare.train import BAND_FACTOR, Sameness
from onepass.tools.compare.variants import INT8_MEANS, MEDIUM, MEDIUM_MEANS, baseline_of
from onepass.tools.harness import Interval
from onepass.tools.tables import print_footer, print_table, print_text, table_of

SCHEMA_VERSION = 1
OTHER = "other numerics"  # that were asked for
SAME = {True: "same", False: "different", None: "cannot tell"}
_TRAINING = {
    True: "training is the same",
    False: "training is DIFFERENT",
    None: "it cannot be told whether training is the same",
}
_DIFFER = "differ from stock's by at most"
_LABELS = {
    "linear": "linear layers",
    "convolution": "convolutions",
    "recurrent": "LSTM, GRU, RNN",
    "embedding": "embeddings",
    PYTHON: "model's Python",
}
WORTH_NAMING = 0.10  # share of the swapped step from which a part not accelerated is named


@dataclass(frozen=True)
class Result:
    """All results of a run of `onepass compare`."""

    settings: Settings
    machine: dict
    data: str
    parameters: int
    speeds: list[Speed]
    sameness: list[Sameness]
    optimizers: Comparison
    seconds: float

    @property
    def swapped_kinds(self) -> set[str]:
        return {entry["kind"] for speed in self.speeds for entry in speed.swap_report["swapped"]}

    @property
    def same(self) -> bool | None:
        found = {phase.same for phase in self.sameness}
        return False if False in found else None if None in found else True

    @property
    def optimizer_same(self) -> bool | None:
        """Whether onepass's AdamW trains as torch's does; None where it did not train."""
        outcome = self.optimizers.outcomes.get("onepass")
        return outcome and outcome.same

    @property
    def first_steps(self) -> dict[str, FirstStep]:
        """First steps by variant; with dropout, if it is trained with it and was measured so."""
        return {
            name: variant.first_step
            for speed in sorted(self.speeds, key=lambda speed: speed.dropout or 0.0)
            for name, variant in speed.variants.items()
            if variant.first_step
        }

    def to_dict(self) -> dict:
        """The JSON of `onepass.tools.compare`, whose docstring is its schema."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.settings.command,
            "machine": self.machine,
            "settings": self.settings.to_dict(),
            "data": self.data,
            "parameters": self.parameters,
            "objective": self.speeds[0].objective,
            "speed": [_speed_dict(speed) for speed in self.speeds],
            "first_step": {name: step.to_dict() for name, step in self.first_steps.items()},
            "sameness": [phase.to_dict() for phase in self.sameness],
            "optimizers": self.optimizers.to_dict(),
            "swap_report": self.speeds[-1].swap_report,
            "verdict": {
                "same": self.same,
                "not_accelerated": not_accelerated(self),
                "sentence": verdict(self),
                "optimizer_same": self.optimizer_same,
            },
            "seconds": self.seconds,
        }

    def show(self, console: Console) -> None:
        """Prints the tables, the verdict and the footer.

        Saved is what the forward keeps for the backward, peak the step's high-water mark (holes in
        glibc's heap do not count: :mod:`onepass.tools.compare.memory`).
        """
        print_table(console, _speed_table(self), names=2)
        if any(MEDIUM in speed.variants for speed in self.speeds):
            print_text(console, f"medium precision: {MEDIUM_MEANS}.\n")
        if any(map(quantizes, self.settings.precisions)):
            print_text(console, f"int8: {INT8_MEANS}.\n")
        for speed in self.speeds:
            print_table(console, _parts_table(speed))
            if text := linear_text(speed):
                print_text(console, f"{text}\n")
            for line in auto_lines(speed.decisions):
                print_text(console, line)
        print_table(console, _sameness_table(self), before="dropout ")
        for name, step in self.first_steps.items():
            print_text(console, _first_step_text(name, step))
        print_table(console, _optimizer_table(self))
        for name, reason in self.optimizers.left_out.items():
            print_text(console, f"Left out: {name}: {reason}.")
        if any(outcome.training for outcome in self.optimizers.outcomes.values()):
            print_table(console, _training_table(self))
        print_text(console, f"\n{verdict(self)}", "bold")
        print_footer(console, footer(self))


def _first_step_text(name: str, step: FirstStep) -> str:
    gradients = "stock's gradients have no digits to compare"
    if step.gradient_error is not None:
        gradients = (
            f"worst gradient error {step.gradient_error:.1e} of that gradient's largest, in "
            f"{step.gradient_name}"
        )
    return (
        f"First step, {name} against stock, dropout {step.dropout}: loss difference "
        f"{step.loss_difference:.1e} of {step.loss:.4f}; {gradients}."
    )


def _speed_dict(speed: Speed) -> dict:
    timing = speed.timing
    variants = {}
    for name, variant in speed.variants.items():
        baseline = baseline_of(name)
        median, low, high = speed.milliseconds(name)
        variants[name] = {
            "step_ms": {
                "median": median,
                "p10": low,
                "p90": high,
                "rounds": [1e3 * seconds for seconds in timing.times[name]],
            },
            "page_faults": timing.faults[name],
            "items_per_second": speed.items_per_second(name),
            "ratio_to_stock": timing.ratio(name, "stock").to_dict(),
            "ratio_to_baseline": timing.ratio(name, baseline).to_dict(),
            "baseline": baseline,
            "parts_ms": variant.parts,
            "saved_bytes": variant.saved_bytes,
            "peak_bytes": variant.peak_bytes,
            "linear_gflops": speed.products.rate(variant.parts),
        }
    return {
        "dropout": speed.dropout,
        "items_per_batch": speed.items_per_batch,
        "variants": variants,
        "linear_operations": speed.products.operations,
        "arithmetic_gflops": speed.products.ceiling,
        "auto": auto_dict(speed.decisions),
    }


def auto_dict(decisions: dict[str, Decision]) -> dict | None:
    """Decisions of --auto by precision: that in float32, and in it the others."""
    if not decisions:
        return None
    found = {precision: _decision_dict(decision) for precision, decision in decisions.items()}
    return found.pop(FLOAT32) | {"precisions": found}


def _decision_dict(decision: Decision) -> dict:
    """The same kinds with the same reason are one entry."""
    modules: dict[tuple, list[str]] = {}
    for left in decision.left_out:
        modules.setdefault((tuple(left.kinds), left.text), []).extend(left.names)
    left_out = [
        {"modules": names, "kinds": list(kinds), "reason": text}
        for (kinds, text), names in modules.items()
    ]
    return {"left_out": left_out, "notes": decision.notes}


def auto_lines(decisions: dict[str, Decision]) -> list[str]:
    """The same for people; none without --auto."""
    lines = []
    for precision, decision in decisions.items():
        found = _decision_dict(decision)
        gain = "; ".join(found["notes"]) or "measured on the batch: nothing gains"
        lines.append(f"--auto{'' if precision == FLOAT32 else f', {precision}'}: {gain}.")
        for left in found["left_out"]:
            names = ", ".join(grouped(left["modules"]))
            lines.append(f"  left out, {' and '.join(left['kinds'])} of {names}: {left['reason']}")
    return lines


def label(dropout: float | None) -> str:
    return "as given" if dropout is None else f"{dropout:g}"


def part_label(part: str) -> str:
    """The name of a part for people."""
    return _LABELS.get(part, part)


def not_accelerated(result: Result) -> dict[str, list[float]]:
    """Parts without a swapped module: their share of the swapped step, per dropout."""
    shares: dict[str, list[float]] = {}
    for part in PARTS:
        if part in result.swapped_kinds or part == UNATTRIBUTED:
            continue
        of_step = []
        for speed in result.speeds:
            parts = by_part(speed.variants["swapped"].parts)
            of_step.append(parts[part] / sum(parts.values()))
        if max(of_step) >= WORTH_NAMING:
            shares[part] = of_step
    return dict(sorted(shares.items(), key=lambda item: -max(item[1])))


def verdict(result: Result) -> str:
    """One sentence: how much faster or slower, whether training is the same, remaining parts."""
    several = len(result.speeds) > 1

    def with_dropout(dropout: float | None) -> str:
        if not several:
            return ""
        return f" with dropout {dropout:g}" if dropout else " without dropout"

    speeds = []
    for speed in result.speeds:
        text, remark = _times_faster(speed.timing.ratio("swapped", "stock"))
        speeds.append(text + with_dropout(speed.dropout) + remark)
    gaps = []
    for phase in result.sameness:
        outside = f"; {SAME[phase.same]}" if several and not phase.same else ""
        stock = _stock_runs(phase.stock_gap) if not gaps else f"stock runs {short(phase.stock_gap)}"
        gaps.append(f"{short(phase.gap)}{with_dropout(phase.dropout)} ({stock}{outside})")
    rest = not_accelerated(result).items()
    shares = [f"{_left_part(result, part)}, {_range(share)}" for part, share in rest]
    tail = "" if result.swapped_kinds else " Nothing was swapped."
    tail += f" Not accelerated: {'; '.join(shares)}." if shares else ""
    sameness = f"{_TRAINING[result.same]}: losses {_DIFFER} {', '.join(gaps)}"
    return f"{', '.join(speeds)}; {sameness}.{tail}{_optimizer_sentence(result)}"


def _left_part(result: Result, part: str) -> str:
    """The name of a part that is not accelerated; attention's with how many modules compute it by
    hand."""
    report = result.speeds[-1].swap_report
    left = report["skipped"] + report["unknown"]
    count = sum(
        entry["reason"].kind in (Reason.BY_HAND, Reason.BY_HAND_ELSEWHERE) for entry in left
    )
    if part != "attention" or not count:
        return part_label(part)
    return f"{count} x softmax(q k^T) v by hand"


def _times_faster(interval: Interval) -> tuple[str, str]:
    """The figure with its interval, and words if it is no gain."""
    digits = 3 if abs(interval.median - 1.0) < 0.02 else 2  # never "1.00x: slower"
    remark = ""
    if interval.high < 1.0:
        remark = ": slower"
    elif interval.low <= 1.0:
        remark = ": no difference measured"
    low, high = (f"{limit:.{digits}f}" for limit in (interval.low, interval.high))
    return f"{interval.median:.{digits}f}x [{low}-{high}]", remark


def _optimizer_sentence(result: Result) -> str:
    compared = result.optimizers
    if "onepass" not in compared.outcomes:
        return ""
    text, remark = _times_faster(compared.timing.ratio("onepass", BASELINE.name))
    training = compared.outcomes["onepass"].training
    return (
        f" AdamW's step: {text} {BASELINE.name}{remark}; {_TRAINING[training.same]}: losses "
        f"{_DIFFER} {short(training.gap)} ({_stock_runs(training.stock_gap)})."
    )


def _stock_runs(gap: float) -> str:
    return f"those of stock runs from each other by {short(gap)}"


def short(number: float) -> str:
    """3e-6, 0.02: one digit, in the shorter notation."""
    mantissa, _, exponent = f"{number:.0e}".partition("e")
    if not exponent or -3 <= int(exponent) <= 0:
        return f"{number:.1g}"
    return f"{mantissa}e{int(exponent)}"


def _range(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}"[:-1], f"{max(shares):.0%}"[:-1]
    return f"{low} %" if low == high else f"{low}-{high} %"


def _speed_table(result: Result) -> Table:
    unit = "items/s" if result.settings.model else "tokens/s"
    table = table_of(
        "Speed: one training step",
        "dropout", "variant", "median ms [p10-p90]", "times stock [95 %]", unit,
        "saved MiB", "peak MiB", names=2,
    )  # fmt: skip
    for speed in result.speeds:
        timing = speed.timing
        for name, variant in speed.variants.items():
            ratio = timing.ratio(name, "stock")
            median, low, high = speed.milliseconds(name)
            table.add_row(
                label(speed.dropout),
                name,
                f"{median:.4g} [{low:.4g}-{high:.4g}]",
                "1" if name == "stock" else str(ratio),
                f"{speed.items_per_second(name):,.0f}",
                mebibytes(variant.saved_bytes),
                mebibytes(variant.peak_bytes),
                end_section=name == list(speed.variants)[-1],
            )
    return table


def _parts_table(speed: Speed) -> Table:
    tail = "" if speed.dropout is None else f" with dropout {speed.dropout:g}"
    table = table_of(
        f"Where a step goes{tail}, in ms", "part",
        "stock", "forward", "backward", "swapped", "forward", "backward", "saved", names=2,
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
        column.style = "dim" if column.header in ("forward", "backward") else ""
    spent = [speed.variants[name].parts for name in ("stock", "swapped")]
    for part in (*PARTS, "step"):
        totals = [_part_ms(parts, part) for parts in spent]
        if not any(totals) and part != UNATTRIBUTED:  # which ends the section
            continue
        row = [part_label(part)]
        for parts, total in zip(spent, totals, strict=True):
            row.append(number(total))
            phases = ("forward", "backward")
            split = part not in ("optimizer", "step")
            row += [number(parts[phase][part]) if split else "" for phase in phases]
        row.append(number(totals[0] - totals[1]))
        table.add_row(*row, end_section=part == UNATTRIBUTED)
    return table


def linear_text(speed: Speed) -> str:
    """How fast linear layers multiply in each variant whose parts were watched; empty for a model
    without any."""
    products = speed.products
    rates = {name: products.rate(variant.parts) for name, variant in speed.variants.items()}
    rates = {name: rate for name, rate in rates.items() if rate is not None}
    if not products.operations or not rates:
        return ""
    found = []
    for name, rate in rates.items():
        share = f" ({rate / products.ceiling:.0%})".replace("%", " %") if products.ceiling else ""
        found.append(f"{name} {rate:,.0f} GFLOP/s{share}")
    ceiling = (
        f"; of {products.ceiling:,.0f} that this CPU reaches at the model's dtype"
        if products.ceiling
        else ""
    )
    return f"  linear layers: {'; '.join(found)}{ceiling}."


def _part_ms(parts: dict[str, dict[str, float]], part: str) -> float:
    totals = by_part(parts)
    return sum(totals.values()) if part == "step" else totals[part]


def number(ms: float) -> str:
    """About three digits, for any size; never -0."""
    digits = 0 if abs(ms) >= 99.95 else 1 if abs(ms) >= 9.995 else 2
    return f"{round(ms, digits) + 0.0:.{digits}f}"


def _sameness_table(result: Result) -> Table:
    table = table_of(
        "Sameness: gap between loss curves",
        "dropout", "stock runs\ndiffer by", "steps", "swapped - stock", "stock-versus-stock", "",
        names=2,
    )  # fmt: skip
    for phase in result.sameness:
        table.add_row(
            label(phase.dropout),
            phase.stock_runs_differ_by,
            str(phase.steps[-1]),
            f"{phase.gap:.1e}",
            f"{phase.stock_gap:.1e}",
            SAME[phase.same],
        )
        for name, losses in phase.others.items():
            what = name if quantizes(name) else f"{name} precision"
            verdict = "as swapped: no call takes it" if losses == phase.swapped else OTHER
            table.add_row("", what, "", f"{phase.gap_of(losses):.1e}", "", verdict)
    return table


def _optimizer_table(result: Result) -> Table:
    """Bytes (B) are per parameter: of the state, and with the parameter itself and its gradient."""
    compared = result.optimizers
    table = table_of(
        f"Optimizers: AdamW's step on {compared.parameters:,} parameters, apart from the rest",
        "optimizer", "median ms [p10-p90]", "times fused [95 %]", "of a step",
        "state B", "all B", names=2,
    )  # fmt: skip
    table.columns[0].no_wrap = False
    table.columns[1].justify = "right"
    for name in compared.outcomes:
        median, low, high = (1e3 * compared.timing.percentile(name, p) for p in (50, 10, 90))
        share = compared.share_of_step(name)
        table.add_row(
            name,
            f"{number(median)} [{number(low)}-{number(high)}]",
            "1" if name == BASELINE.name else str(compared.timing.ratio(name, BASELINE.name)),
            "" if share is None else f"{100 * share:.2g} %",
            f"{compared.state_bytes(name):.2f}",
            f"{compared.all_bytes(name):.2f}",
        )
    return table


def _training_table(result: Result) -> Table:
    compared = result.optimizers
    tail = "" if compared.dropout is None else f", dropout {compared.dropout:g}"
    table = table_of(
        f"Sameness: stock trained by {BASELINE.name} and by others{tail}",
        "optimizer", "steps", "last loss", "gap to fused", "stock-versus-stock", "", names=2,
    )  # fmt: skip
    table.columns[0].no_wrap = False
    table.columns[1].justify = "right"
    trained = {name: o for name, o in compared.outcomes.items() if o.training}
    stock = next(iter(trained.values())).training
    table.add_row(BASELINE.name, str(stock.steps[-1]), f"{stock.stock[0][-1]:.4f}")
    for name, outcome in trained.items():
        training = outcome.training
        table.add_row(
            name,
            str(training.steps[-1]),
            f"{training.swapped[-1]:.4f}",
            f"{training.gap:.1e}",
            "" if outcome.same is None else f"{training.stock_gap:.1e}",
            SAME[training.same] if outcome.choice.is_plain else OTHER,
        )
    return table


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def subject(settings: Settings, parameters: int, sameness: str, data: str) -> str:
    """The trained model, the optimizer, and the data."""
    layout = "RMSNorm" if settings.rmsnorm else "LayerNorm"
    model = settings.model or f"GPT of {settings.speed}, {layout}, tied head"
    dtype = str(settings.dtype).removeprefix("torch.")
    optimizer = "" if settings.generate else ", torch's fused AdamW"
    return f"{model}{sameness}; {parameters:,} parameters, {dtype}{optimizer}; {data}"


def footer(result: Result) -> list[str]:
    """Machine, software and method; the last line repeats the run."""
    settings, machine = result.settings, result.machine
    lines = []
    if settings.quick:
        lines.append("--quick: tiny sizes, a trial of the tool. These figures measure nothing.")
    sameness = "" if settings.model else f"; sameness with {settings.sameness}"
    lines += [
        subject(settings, result.parameters, sameness, result.data),
        f"trained: {result.speeds[0].objective}",
        f"same: the gap is at most {BAND_FACTOR:g} x the largest difference between "
        f"{len(result.sameness[0].stock)} stock runs",
        " | ".join(f"{name} {value}" for name, value in machine.items()),
        f"{settings.command}   ({result.seconds:.0f} s)",
    ]
    return lines
