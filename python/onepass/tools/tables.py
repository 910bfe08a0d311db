"""Shared by the commands that print tables. Imports rich, of onepass[tools]."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

FOLDED = 24  # a column of names may be folded to this width, others are not


def console_of(width_off_terminal: int) -> Console:
    """Console for stdout. A pipe has no width, and gets this one."""
    console = Console()
    return console if console.is_terminal else Console(width=width_off_terminal)


def table_of(
    title: str, *columns: str, names: int = 1, words: int = 0, folded: bool = False
) -> Table:
    """An empty table.

    Args:
        title: shown above it, in bold.
        columns: headers. Columns of numbers are aligned to the right.
        names, words: columns at the beginning and at the end that hold text.
        folded: the first column may be broken into lines.
    """
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    for index, column in enumerate(columns):
        justify = "right" if names <= index < len(columns) - words else "left"
        wraps = folded and index == 0
        overflow = "fold" if folded else "ellipsis"
        table.add_column(escape(column), justify=justify, no_wrap=not wraps, overflow=overflow)
    return table


def print_text(console: Console, text: str, style: str = "") -> None:
    """Prints the text as it is: without markup, and without colours for numbers."""
    console.print(Text(text, style=style))


def print_footer(console: Console, lines: list[str]) -> None:
    """Prints what stands below the tables, a blank line above."""
    console.print()
    for line in lines:
        print_text(console, line, "dim")


def print_table(console: Console, table: Table, names: int = 1, before: str = "") -> None:
    """Prints the table; where it is wider than the console, a paragraph for each row.

    A paragraph begins with `before` and the cells of the first `names` columns. The others follow
    after the headers of their columns; empty ones are left out.
    """
    if _least_width(console, table) <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(Text(str(table.title), style="bold"))
    headers = [_plain(console, column.header).replace("\n", " ") for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        cells = [_plain(console, cell) for cell in row]
        name = [
            f"{header} {cell}"
            for header, cell in zip(headers[: names - 1], cells[: names - 1], strict=True)
        ]
        console.print(Text(before + ", ".join([*name, cells[names - 1]]), style="bold"))
        line = ""
        for header, cell in zip(headers[names:], cells[names:], strict=True):
            if not cell:
                continue
            words = f"{header} {cell}".strip()
            if line and len(line) + len(words) + 2 <= console.width:
                line += f"; {words}"
                continue
            if line:
                console.print(Text(line))
            line = f"  {words}"
        console.print(Text(line))
    console.print()


def _plain(console: Console, cell: str | Text) -> str:
    """The characters that a table shows of a cell, which may be markup."""
    return (console.render_str(cell, highlight=False) if isinstance(cell, str) else cell).plain


def _least_width(console: Console, table: Table) -> int:
    """The width below which cells would be cut, or names folded to less than `FOLDED`."""
    unlimited = console.options.update(max_width=10_000)
    width = console.measure(table, options=unlimited).maximum
    for column in table.columns:
        if not column.no_wrap:
            widths = [console.measure(cell, options=unlimited).maximum for cell in column.cells]
            width -= max(0, max(widths, default=0) - FOLDED)
    return width
