"""Texts of reports: names in groups, tables and lists no wider than the terminal, HTML."""

from __future__ import annotations

import html
import re
import shutil
import textwrap
from collections.abc import Iterable

MOST_LINES, _LINES_OF_ONE = 5, 2  # of notes, and of a note, that `print` shows
_BULLET = ("  - ", "    ")


def listed(notes: list[str]) -> list[str]:
    """The lines that print notes, no wider than the terminal; none if there are no notes."""
    if not notes:
        return []
    width = _width_of_notes()
    return ["", "notes", *(folded(note, width, *_BULLET) for note in notes)]


def shortened(notes: list[str]) -> list[str]:
    """The first clauses of the first notes, in at most `MOST_LINES` lines below their head."""
    whole, lines = listed(notes), []
    for note in notes:
        most = min(MOST_LINES - len(lines), _LINES_OF_ONE)
        if not most:
            break
        clause = first_clause(note)
        lines += folded(clause, _width_of_notes(), *_BULLET, max_lines=most).splitlines()
    if "\n".join(lines) == "\n".join(whole[2:]):
        return whole
    return ["", "notes (print(report.details()) has all of them)", *lines]


def first_clause(note: str) -> str:
    """The part of a note before the first semicolon: its point."""
    return note.partition("; ")[0]


def _width_of_notes() -> int:
    return min(100, terminal_width(100))


def terminal_width(otherwise: int = 1 << 20) -> int:
    """Columns of the terminal; `otherwise` where stdout is none."""
    return shutil.get_terminal_size((otherwise, 24)).columns


def folded(
    text: str,
    width: int,
    first: str = "",
    others: str = "    ",
    max_lines: int | None = None,
) -> str:
    """The text in lines of this width, which begin with `first` and `others`; words stay whole."""
    return textwrap.fill(
        text,
        width=width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=max_lines,
        placeholder=" ...",
    )


def html_list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>"


def html_row(tag: str, columns: Iterable[str], cells: Iterable[str]) -> str:
    """A row of a table; notebooks would align words to the right."""
    sides = ("right" if column == "count" else "left" for column in columns)
    return "<tr>{}</tr>".format(
        "".join(
            f'<{tag} style="text-align: {side}">{cell}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
    )


def preformatted(text: str) -> str:
    """HTML of the text, whose long lines a notebook folds between words."""
    return f'<pre style="white-space: pre-wrap; word-break: normal">{html.escape(text)}</pre>'


def rows(entries: list[dict[str, str]], columns: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Rows of a printed table: names that differ only in numbers share one."""
    groups: dict[tuple, list[str]] = {}
    for entry in entries:
        facts = tuple(
            _short(entry[column]) if column in ("from", "type") else entry[column]
            for column in columns[2:]
        )
        groups.setdefault((_pattern(entry["name"]), facts), []).append(entry["name"])
    return [(_common(names), str(len(names)), *facts) for (_, facts), names in groups.items()]


def grouped(names: Iterable[str]) -> list[str]:
    """Names that differ only in numbers, as one: "layers.*.norm" for all layers."""
    return list(groups_of(names))


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The names in the groups of `grouped`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return {_common(group): group for group in groups.values()}


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _common(names: list[str]) -> str:
    """One name for names with the same parts, with * for the parts in which they differ."""
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts) or "(root)"


def table(section: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table. In a narrower terminal the last column has lines of its own."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    indent = " " * (len(section) + 2)
    terminal = terminal_width()
    is_narrow = len(indent) + sum(widths) + 2 * (len(widths) - 1) > terminal

    def lines(cells, start):
        padded = [
            cell.rjust(width) if name == "count" else cell.ljust(width)
            for name, cell, width in zip(columns, cells, widths, strict=True)
        ]
        if not is_narrow:
            return [(start + "  ".join(padded)).rstrip()]
        last = folded(cells[-1], terminal, indent + "  ", indent + "  ")
        return [(start + "  ".join(padded[:-1])).rstrip(), last]

    found = lines(columns, f"{section}  ")
    for row in rows:
        found += lines(row, indent)
    return found


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def readable(nbytes: float) -> str:
    """3 digits or so, in a power of 1024."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if abs(size) < 999.5:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "B" or abs(size) >= 99.95 else 1 if abs(size) >= 9.995 else 2
    return f"{size:,.{digits}f} {unit}"
