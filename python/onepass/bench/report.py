"""The table of `onepass bench` and what stands under it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from onepass.bench.case import Case, Row
from onepass.bench.ceilings import Ceilings

WIDTH_OFF_TERMINAL = 160


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


def print_table(rows: Iterable[Row]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OFF_TERMINAL)
    table = Table("case", box=None)
    columns = ("ours us [p10-p90]", "eager us", "compile us", "x eager [95 %]", "x compile")
    for column in (*columns, "% of copy", "goal", "right"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        time = row.timing
        span = f"[{time.percentile('ours', 10) * 1e6:.1f}-{time.percentile('ours', 90) * 1e6:.1f}]"
        table.add_row(
            row.name,
            f"{time.median('ours') * 1e6:.1f} \\{span}",
            f"{time.median('eager') * 1e6:.1f}",
            "-" if row.compiled is None else f"{time.median('compile') * 1e6:.1f}",
            str(row.eager).replace("[", "\\["),
            "-" if row.compiled is None else f"{row.compiled.median:.2f}",
            "-" if row.share is None else f"{row.share:.0%}",
            _goal(row),
            row.correct,
        )
    console.print(table)


def _goal(row: Row) -> str:
    """The goals, each with whether it was reached here."""
    reached = (
        row.eager.median,
        None if row.compiled is None else row.compiled.median,
        row.share,
    )
    parts = []
    for goal, value, form in zip(row.goal, reached, ("{:.1f}x", "{:.1f}x", "{:.0%}"), strict=True):
        if goal is not None:
            mark = "?" if value is None else "+" if value >= goal else "-"
            parts.append(form.format(goal) + mark)
    return " ".join(parts) or "-"


def print_footer(facts: dict, limits: Ceilings, recycled: bool, command: str) -> None:
    print(f"\nceilings: {limits}")
    print("goal: against eager, against compile, share of a copy of that size; + reached, - not")
    memory = "kept by the process (recycled outputs)" if recycled else "the allocator's default"
    print(f"freed memory: {memory}")
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(command)
