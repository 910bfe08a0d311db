"""The table of `make gpu-report`, from the files of its steps."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
GOALS = json.loads((FOLDER / "goals.json").read_text(encoding="utf-8"))["cuda"]
PREDICTIONS = json.loads((FOLDER / "predictions.json").read_text(encoding="utf-8"))
PHASES = ("forward", "backward", "forward+backward")


def markdown(report: Mapping, measured: Sequence[Mapping], compared: Sequence[Mapping]) -> str:
    """The report as Markdown; its rows of figures fit the tables of docs/."""
    machine = (measured[0]["machine"] if measured else {}) | report["machine"]
    names = ("driver", "cuda", "torch", "commit")
    facts = [f"{name} {machine[name]}" for name in names if name in machine]
    lines = [f"## {machine['gpu']}", "", f"`make gpu-report`, {report['date']}: {', '.join(facts)}"]
    for result in measured:
        lines += ["", *_figures(result)]
    rows = [row for result in measured for row in result["rows"]]
    lines += _predicted_rows(predicted(str(machine.get("capability")), rows))
    if compared:
        lines += ["", "| Model (`onepass compare --device cuda`) | times faster | training |"]
        lines += ["| --- | --- | --- |", *map(_model_row, compared)]
    lines += ["", "| Step | result | seconds | |", "| --- | --- | --- | --- |"]
    for step in report["steps"]:
        detail = step["detail"].replace("|", "/")
        lines.append(f"| {step['name']} | {step['result']} | {step['seconds']:.0f} | {detail} |")
    return "\n".join(lines) + "\n"


def _figures(result: Mapping) -> list[str]:
    """The lines for one file of `onepass bench`."""
    families = dict.fromkeys(
        ("norm", "dropout", "gate", "group_norm", "loss", "rotary"), _norm_rows
    )
    families |= {"optimizer": _optimizer_rows, "attention": _attention_rows, "decode": _decode_rows}
    ceilings, rows = result["ceilings"], result["rows"]
    line = f"Copy of a large tensor: {ceilings['copy_gbps']:.0f} GB/s"
    if ceilings.get("matmul_16_gflops"):
        line += f"; torch's matmul in bfloat16: {ceilings['matmul_16_gflops'] / 1e3:.0f} TFLOP/s"
    goals = [_reached(row) for row in rows if _share(row) is not None and _goal(row)]
    lines = [f"{line}. Goals of speed reached in {sum(goals)} of {len(goals)} cases."]
    for table in dict.fromkeys(families.values()):
        own = [row for row in rows if families.get(row["name"].partition("/")[0]) is table]
        small = [row for row in own if _share(row) is None and table is not _optimizer_rows]
        large = [row for row in own if row not in small]
        if large:
            lines += ["", *table(large)]
        if small:
            lines += ["", f"A call on a tensor of {_size(small[0])}: {_overhead(small)}."]
    for word in ("failed", "left_out"):
        if result[word]:
            lines += ["", f"{word.replace('_', ' ')}: {', '.join(result[word])}"]
    return lines


class Predicted(NamedTuple):
    """A case beside its prediction: a share, or TFLOP/s."""

    of_low: float  # measured / the lower end of what was predicted
    name: str
    what: str
    low: float
    high: float
    value: float


def predicted(capability: str, rows: Sequence[Mapping]) -> list[Predicted]:
    """Measured cases that have a prediction, the farthest below first."""
    found = []
    for row in rows:
        for what, (low, high) in _first(PREDICTIONS.get(capability, {}), row["name"]).items():
            value = _share(row) if what == "share" else row.get("gflops", 0.0) / 1e3
            if value:
                found.append(Predicted(value / low, row["name"], what, low, high, value))
    return sorted(found)


def ratios_to_predictions(capability: str, folder: Path) -> dict[str, float]:
    """What was measured in the files of a folder, by case, over the lower end predicted."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("bench-*.json"))]
    rows = [row for result in found for row in result["rows"]]
    return {of.name: of.of_low for of in predicted(capability, rows)}


def _predicted_rows(found: Sequence[Predicted]) -> list[str]:
    if not found:
        return []
    lines = ["", "| Predicted before a device was seen | predicted | measured | of the lower end |"]
    lines.append("| --- | --- | --- | --- |")
    for ratio, name, what, low, high, value in found:
        text = (lambda x: f"{x:.0%}".replace("%", " %")) if what == "share" else "{:.0f}".format
        span = text(low) if low == high else f"{text(low)} to {text(high)}"
        unit = "" if what == "share" else " TFLOP/s"
        lines.append(f"| {name} | {span}{unit} | {text(value)}{unit} | {ratio:.2f} |")
    return lines


def _norm_rows(rows: Sequence[Mapping]) -> list[str]:
    lines = [
        f"| Case ({' / '.join(PHASES)}) | times faster than eager | than `torch.compile` "
        "| share of a same-size copy, by bytes |",
        "| --- | --- | --- | --- |",
    ]
    for name, phases in _by_case(rows).items():
        columns = [
            _each(phases, lambda row: f"{row['against_eager']['median']:.2f}"),
            _each(phases, lambda row: _ratio(row["against_compile"])),
            _each(phases, lambda row: f"{_share(row):.0%}".replace("%", " %")),
        ]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return lines


def _attention_rows(rows: Sequence[Mapping]) -> list[str]:
    """Forward / backward, with the variants that each case has, in their order."""
    phases, lines = (
        PHASES[:2],
        [
            "| Case (forward / backward) | TFLOP/s | share of matmul | times faster than eager "
            "| than others |",
            "| --- | --- | --- | --- | --- |",
        ],
    )
    for name, of in _by_case(rows).items():
        others = dict.fromkeys(other for row in of.values() for other in row["against_others"])
        columns = [
            _each(of, lambda row: f"{row['gflops'] / 1e3:.0f}", phases),
            _each(of, lambda row: f"{_share(row):.0%}".replace("%", " %"), phases),
            _each(of, lambda row: f"{row['against_eager']['median']:.2f}", phases),
            ", ".join(
                f"{other} {_each(of, lambda row: _ratio(row['against_others'].get(other)), phases)}"
                for other in others
            )
            or "-",
        ]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return lines


def _decode_rows(rows: Sequence[Mapping]) -> list[str]:
    return _single_rows("Decoding, replayed", rows)


def _optimizer_rows(rows: Sequence[Mapping]) -> list[str]:
    """Many small tensors get no share: memory does not bound their steps."""
    return _single_rows("Optimizer step", rows)


def _single_rows(title: str, rows: Sequence[Mapping]) -> list[str]:
    lines = [
        f"| {title} | microseconds | GB/s | share of an update in place or a copy "
        "| times faster than eager | than others |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        share, others = _share(row), row["against_others"].items()
        columns = [
            f"{row['times']['ours']['median_us']:.1f}",
            f"{row['gbps']:.0f}" if row["gbps"] else "-",
            "-" if share is None else f"{share:.0%}".replace("%", " %"),
            f"{row['against_eager']['median']:.2f}",
            ", ".join(f"{name} {_ratio(of)}" for name, of in others) or "-",
        ]
        name = row["name"].partition("/")[2].replace("/", " ")
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return lines


def _by_case(rows: Sequence[Mapping]) -> dict[str, dict[str, Mapping]]:
    """Rows by case, then by phase."""
    groups: dict[str, dict[str, Mapping]] = {}
    for row in rows:
        _, operator, dtype, shape, phase = row["name"].split("/")
        groups.setdefault(f"{operator} {dtype} {shape}", {})[phase] = row
    return groups


def _overhead(rows: Sequence[Mapping]) -> str:
    texts = []
    for row in rows:
        _, operator, _, _, *phase = row["name"].split("/")
        ours, eager = (row["times"][name]["median_us"] for name in ("ours", "eager"))
        texts.append(f"{' '.join([operator, *phase])} {ours:.1f} us (eager {eager:.1f})")
    return ", ".join(texts)


def _size(row: Mapping) -> str:
    return row["name"].split("/")[3]


def _share(row: Mapping) -> float | None:
    """The share of the ceiling that binds the case; None where a call's overhead binds it."""
    return next((value for name, value in row.items() if name.startswith("share_of_")), None)


def _each(
    rows: Mapping[str, Mapping], text: Callable[[Mapping], str], phases: Sequence[str] = PHASES
) -> str:
    return " / ".join(text(rows[phase]) if phase in rows else "-" for phase in phases)


def _ratio(interval: Mapping | None) -> str:
    return "-" if interval is None else f"{interval['median']:.2f}"


def _first(table: Mapping[str, Mapping], name: str) -> Mapping:
    """The entry whose pattern is the first to match a name; empty if none does."""
    return next((of for pattern, of in table.items() if fnmatch.fnmatchcase(name, pattern)), {})


def _goal(row: Mapping) -> Mapping:
    return _first(GOALS, row["name"])


def _reached(row: Mapping) -> bool:
    goal, compiled = _goal(row), row["against_compile"]
    pairs = [
        (goal.get("eager"), row["against_eager"]["median"]),
        (goal.get("compile"), compiled and compiled["median"]),
        (goal.get("share"), _share(row)),
        *(
            (wanted, row["against_others"].get(name, {}).get("median"))
            for name, wanted in goal.get("others", {}).items()
        ),
    ]
    return all(value is None or wanted is None or value >= wanted for wanted, value in pairs)


def _model_row(compared: Mapping) -> str:
    settings, ratios = compared["settings"], []
    for speed in compared["speed"]:
        ratio = speed["variants"]["swapped"]["ratio_to_stock"]
        low, high = ratio["low"], ratio["high"]
        ratios.append(f"{ratio['median']:.3f} [{low:.3f}-{high:.3f}] (dropout {speed['dropout']})")
    sizes = settings["speed"]
    name = f"GPT, {compared['parameters'] / 1e6:.0f}M, batch {sizes['batch']}x{sizes['block']}"
    same = "same" if compared["verdict"]["same"] else "different"
    return f"| {name}, {settings['dtype']} | {', '.join(ratios)} | {same} |"
