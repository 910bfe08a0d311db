"""The tables of `onepass bench` and the lines under them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from onepass.tools.bench.case import Case, Row
from onepass.tools.ceilings import Ceilings, CudaCeilings
from onepass.tools.tables import console_of, print_table

WIDTH_OFF_TERMINAL = 260
QUIET = 0.1  # cores; with more, threads wait for each other


def progress(cases: Sequence[Case]) -> Iterator[Case]:
    """The cases one by one, with a bar on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from cases
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=len(cases))
        for case in cases:
            bar.update(task, description=case.name)
            yield case
            bar.advance(task)


def figure(row: Row) -> str:
    """A row in one line, as --stream prints it."""
    parts = [f"ours {row.timing.median('ours') * 1e6:.1f} us"]
    parts.append(f"{row.against_eager.median:.2f} x eager")
    if row.against_compile is not None:
        parts.append(f"{row.against_compile.median:.2f} x compile")
    parts += [f"{ratio.median:.2f} x {name}" for name, ratio in row.against_others.items()]
    if row.share is not None:
        parts.append(f"{row.share:.0%} of the ceiling".replace("%", " %"))
    parts += filter(None, [str(row.load), row.check and f"WRONG: {row.check}"])
    return f"figure {row.case.name}: {', '.join(parts)}"


def print_doubts(result: dict, rows: Sequence[Row]) -> None:
    """Why figures of the tables below are not to be trusted; `result` is what --json writes."""
    lines = []
    if result.get("quick"):
        lines.append("--quick: small shapes and few rounds, a smoke run. Do not trust them.")
    if (busy := result["other_load"]) is not None and busy > QUIET:
        lines.append(
            f"NOT A QUIET MACHINE: {busy:.2f} cores were busy with other things meanwhile. Do not "
            "trust these figures."
        )
    if result["recycled_memory"] is False:
        lines.append("this allocator does not obey mallopt: every case is 'fresh'")
    lines += [f"WRONG: {row.case.name}: {row.check}" for row in rows if row.check]
    lines += [f"FAILED: {name}: {problem}" for name, problem in result["failed"].items()]
    if left_out := result["left_out"]:
        names = ", ".join(left_out[:3]) + f" and {len(left_out) - 3} more" * (len(left_out) > 3)
        lines.append(f"left out by --quick, --limit or Ctrl-C: {names}")
    console = console_of(WIDTH_OFF_TERMINAL)
    for line in lines:
        console.print(Text(line, style="bold red"))


def print_tables(rows: Sequence[Row]) -> None:
    console = console_of(WIDTH_OFF_TERMINAL)
    throughput = [row for row in rows if row.share is not None]
    overhead = [row for row in rows if row.share is None]
    if throughput:
        print_table(console, _throughput_table(throughput))
    if overhead:
        print_table(console, _overhead_table(overhead))
    errors = {row.compile_error for row in rows if row.compile_error}
    for error in sorted(errors):
        console.print(Text(f"torch.compile failed: {error}"))
    missing: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for said in row.unavailable.items():
            missing.setdefault(said, []).append(row.case.name)
    for (name, error), names in sorted(missing.items()):
        console.print(Text(f"{name} left out of {', '.join(names)}: {error}"))


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("case", no_wrap=True)
    for column in columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    return table


def _throughput_table(rows: Sequence[Row]) -> Table:
    faults = any(_faults(row, name) >= 1 for row in rows for name in ("ours", "eager"))
    on_cuda = any(row.case.device == "cuda" for row in rows)
    others = any(row.against_others for row in rows)
    arithmetic = any(row.gflops for row in rows)
    goals = any(row.goal for row in rows)
    table = _table(
        "ours us [p10-p90]",
        "eager us",
        "compile us",
        "x eager [95 %]",
        "x compile [95 %]",
        *(("x others",) if others else ()),
        "of ceiling",
        *(("GB/s",) if on_cuda else ()),
        *((("TFLOP/s" if on_cuda else "GFLOP/s"),) if arithmetic else ()),
        *(("faults ours/eager",) if faults else ()),
        *(("goal",) if goals else ()),
        "right",
    )
    for row in rows:
        cells = [
            row.case.name,
            _spread(row, "ours"),
            _micros(row, "eager"),
            _micros(row, "compile"),
            str(row.against_eager),
            str(row.against_compile or "-"),
            *((_others(row),) if others else ()),
            f"{row.share:.0%}",
            *((f"{row.gbps:.0f}" if row.gbps else "-",) if on_cuda else ()),
            *((_flops(row),) if arithmetic else ()),
            *((f"{_faults(row, 'ours'):.0f}/{_faults(row, 'eager'):.0f}",) if faults else ()),
            *((_goal(row),) if goals else ()),
            _right(row),
        ]
        table.add_row(*map(Text, cells))
    return table


def _overhead_table(rows: Sequence[Row]) -> Table:
    columns = "ours us [p10-p90]", "eager us", "compile us", "ours - eager us [95 %]"
    others = any(row.against_others for row in rows)
    goals = any(row.goal for row in rows)
    more_columns = (("x others",) if others else ()) + (("goal",) if goals else ())
    table = _table(*columns, "x eager [95 %]", *more_columns, "right")
    for row in rows:
        more = row.timing.difference("ours", "eager")
        cells = [
            row.case.name,
            _spread(row, "ours"),
            _micros(row, "eager"),
            _micros(row, "compile"),
            f"{more.median * 1e6:+.1f} [{more.low * 1e6:+.1f} to {more.high * 1e6:+.1f}]",
            str(row.against_eager),
            *((_others(row),) if others else ()),
            *((_goal(row),) if goals else ()),
            _right(row),
        ]
        table.add_row(*map(Text, cells))
    return table


def _spread(row: Row, name: str) -> str:
    low, high = (row.timing.percentile(name, percent) * 1e6 for percent in (10, 90))
    return f"{row.timing.median(name) * 1e6:.1f} [{low:.1f}-{high:.1f}]"


def _micros(row: Row, name: str) -> str:
    if name not in row.timing.times:
        return "failed" if row.compile_error else "-"
    return f"{row.timing.median(name) * 1e6:.1f}"


def _faults(row: Row, name: str) -> float:
    return row.timing.faults[name]


def _right(row: Row) -> str:
    """The worst error, as a share of the numerics rule's bound."""
    return "NO" if row.check else f"{row.margin:.2f}"


def _flops(row: Row) -> str:
    if not row.gflops:
        return "-"
    return f"{row.gflops / 1e3:.1f}" if row.case.device == "cuda" else f"{row.gflops:.0f}"


def _others(row: Row) -> str:
    """Factors against the further variants."""
    parts = (f"{interval.median:.2f} {name}" for name, interval in row.against_others.items())
    return ", ".join(parts) or "-"


def _goal(row: Row) -> str:
    """The goals, each with whether it was reached here."""
    goal, compiled = row.goal, row.against_compile
    reached = (
        (goal.eager, row.against_eager.median, "{:.1f}x"),
        (goal.compile, compiled and compiled.median, "{:.1f}x"),
        (goal.share, row.share, "{:.0%}"),
        *(
            (goal.others.get(name), interval.median, "{:.2g}x " + name)
            for name, interval in row.against_others.items()
        ),
    )
    parts = []
    for wanted, value, form in reached:
        if wanted is not None:
            mark = "?" if value is None else "+" if value >= wanted else "-"
            parts.append(form.format(wanted) + mark)
    return " ".join(parts) or "-"


def print_footer(result: dict, limits: Ceilings | CudaCeilings) -> None:
    """Units, machine and method of the tables above; `result` is the object that --json writes."""
    on_cuda = result.get("device") == "cuda"
    decoding = "an update in place" if on_cuda else "a read (torch's sum)"
    arithmetic = "torch's matmul" if on_cuda else "FMA (bfloat16: of dot, if there is)"
    lines = [
        f"ceilings here: {limits}",
        "of ceiling: bytes that must move per second, of those of a copy of the input, in the same "
        "cache state, autograd included; for optimizers, of an update in place; for decoding, of "
        f"{decoding}; for attention, useful operations per second in the fastest round, of "
        f"{arithmetic}",
        "right: worst error of outputs and gradients, of what the numerics rule allows (at most 1)",
    ]
    if any(any(row["goal"].values()) for row in result.get("rows", ())):
        lines.append(
            "goal: against eager, against compile, of ceiling, against others; + reached, - not, "
            "? not measured"
        )
    if on_cuda:
        lines.append(
            "backward: torch.autograd.grad alone, on a graph that is kept; no input is in the L2 "
            "cache; times by events on the stream, of decoding of replays of CUDA graphs"
        )
    else:
        lines.append(
            "memory: freed memory stays with the process, for all variants (M_MMAP_MAX=0, no "
            "trimming); cases named fresh: the allocator's defaults"
        )
    if (busy := result["other_load"]) is not None and busy <= QUIET:
        lines.append(f"other load: {busy:.2f} cores were busy with other things meanwhile")
    lines.append(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    lines.append(result["command"])
    print("\n" + "\n".join(lines))
