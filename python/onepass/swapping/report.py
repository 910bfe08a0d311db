"""The report of `swap`, for people, notebooks and programs."""

from __future__ import annotations

import collections
import html
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import nn

from onepass.swapping import by_hand
from onepass.swapping.changes import Change, Edit

if TYPE_CHECKING:
    from onepass.swapping.sample import Decision

_HINT = "swap changes the model in place; drop the assignment"
MOST_LINES, _LINES_OF_ONE = 5, 2  # of notes, and of a note, that `print` shows
_BULLET = ("  - ", "    ")
_NAMED = 3  # groups of names in the line of `unswap`
_COLUMNS = {
    "swapped": ("name", "count", "kind", "from", "to"),
    "skipped": ("name", "count", "type", "reason"),
    "unknown": ("name", "count", "type", "reason"),
}


class Report:
    """The result of `onepass.swap`; `print` shows it as a table and the first clause of the most
    important notes. It refers to the model.

    Attributes:
        swapped: dicts with name (fully qualified), from, to, kind.
        skipped: candidates that kept their class; dicts with name, type, reason.
        unknown: modules that look related and have no rule; dicts with name, type, reason.
        notes: changes beyond speed, as sentences, the most important first.
        dry_run: True if nothing was changed.

    Examples:
        >>> report = onepass.swap(torch.nn.LayerNorm(64), dry_run=True)
        >>> report.summary()
        'onepass.swap: would swap 1 (norm 1)'
    """

    def __init__(self, model: nn.Module, *, dry_run: bool):
        self.swapped: list[dict[str, str]] = []
        self.skipped: list[dict[str, str]] = []
        self.unknown: list[dict[str, str]] = []
        self.notes: list[str] = []
        self.dry_run = dry_run
        self._model = model
        self._changes: list[Change] = []
        self._named: list[Edit] = []  # of the configs by which modules take attention by name
        self._decision: Decision | None = None  # what a sample decided
        self._earlier: set[tuple[str, str]] = set()  # (name, kind) of what ran before this call

    def _complete(self) -> list[str]:
        """Moves modules whose own attention turned out to be no `softmax(q k^T) v` to the skipped
        ones; returns the notes, with some on modules that call torch's attention, too, and on
        those whose is not known yet."""
        fates = by_hand.fates(self._model, self._changes)
        for entry in [entry for entry in self.swapped if entry["name"] in fates.left]:
            if entry["kind"] == "attention":
                self.swapped.remove(entry)
                reason = fates.left[entry["name"]]
                self.skipped.append(
                    {"name": entry["name"], "type": entry["from"], "reason": reason}
                )
        names = ", ".join(grouped(fates.waiting))
        notes = [by_hand.NOTE.format(names=names)] * bool(fates.waiting)
        for reason in dict.fromkeys(fates.in_part.values()):
            names = [name for name, own in fates.in_part.items() if own == reason]
            notes.append(by_hand.IN_PART.format(names=", ".join(grouped(names)), reason=reason))
        return notes + self.notes

    def to_dict(self) -> dict[str, list]:
        """The lists as plain JSON-able data."""
        notes = self._complete()
        return {
            "swapped": [dict(entry) for entry in self.swapped],
            "skipped": [dict(entry) for entry in self.skipped],
            "unknown": [dict(entry) for entry in self.unknown],
            "notes": notes,
        }

    @property
    def choice(self) -> dict[str, list]:
        """The swapped modules, and those that a sample left out, as plain JSON-able data: for
        `onepass.swap(model, choice=)`, which does the same without measuring, in another process
        or when a run is resumed.

        Examples:
            >>> report = onepass.swap(torch.nn.LayerNorm(64))
            >>> again = onepass.swap(torch.nn.LayerNorm(64), choice=report.choice)
            >>> again.swapped == report.swapped
            True
        """
        return self._decision.to_dict()

    def summary(self) -> str:
        """One line for a log: the number of swapped modules by kind, and the skipped candidates
        with reasons."""
        self._complete()
        kinds = collections.Counter(entry["kind"] for entry in self.swapped)
        swapped = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        parts = [self._counts() + (f" ({swapped})" if swapped else "")]
        for section in ("skipped", "unknown"):
            left = [f"{name}: {reason}" for name, _, _, reason in self._rows(section)]
            parts += [f"{section} {len(getattr(self, section))} ({'; '.join(left)})"] * bool(left)
        return ", ".join(parts)

    def _counts(self) -> str:
        verb = "would swap" if self.dry_run else "swapped"
        return f"onepass.swap: {verb} {len(self.swapped)}"

    def verify(self, *batch, loss_fn=None, **named):
        """Runs the model stock and swapped on one batch and compares output, loss and gradients.

        Both run in the mode that the model is in, under the autocast that is active, with gradients
        enabled, from the same random state. In train mode dropout is on: stock has swapped's masks,
        computed as `onepass.reference` defines them. Where it cannot have them, both run in eval
        mode, and the verdict says why. The model's gradients, buffers, attributes, training flags
        and the random state are restored at the end, also after an error; its forward hooks do run.
        Rows of padding, by `attention_mask` in a batch of keywords, count where the loss sees them.

        Args:
            batch: the model's positional arguments, or one batch: a dict or a tokenizer's result is
                passed as keywords, a tuple or list item by item, unless forward requires one
                argument alone and cannot be called like that.
            named: the model's arguments by keyword.
            loss_fn: takes the model's output and returns a scalar tensor; it and the gradients, if
                there are any, then decide, and other outputs are only listed. Without it
                the loss is the output's `loss`, or the scalar in it, or else a fixed random
                projection of it, and outputs decide too.

        Returns:
            Verification: prints as one line, and is true if `ok` is True; `ok`, `reason`, `worst`
            (name), `kernels`, `padding`, `dropout_off`, `to_dict()`. `ok` is None where no kernel
            of onepass ran, or loss and gradients have no digits. Calls that are too small to gain
            are also verified as in a larger batch.

        Raises:
            TypeError: forward does not take the batch.
            RuntimeError: the model is on the meta device, or its classes have changed; the report
                is of a dry run, or a copy.
        """
        from onepass.swapping.verify import verify

        return verify(self, batch, loss_fn, named)

    def details(self) -> str:
        """The report with all of every note."""
        return self._printed(listed)

    def __str__(self) -> str:
        return self._printed(shortened)

    __repr__ = __str__

    def _printed(self, notes_of: Callable[[list[str]], list[str]]) -> str:
        notes = self._complete()
        lines = [f"{self._counts()}, {len(self.skipped)} skipped, {len(self.unknown)} unknown"]
        for section, columns in _COLUMNS.items():
            found = self._rows(section)
            if found:
                lines += ["", *table(section, columns, found)]
        return "\n".join(lines + notes_of(notes))

    def _repr_html_(self) -> str:
        notes = self._complete()
        parts = [f"<b>{html.escape(str(self).splitlines()[0])}</b>"]
        for section, columns in _COLUMNS.items():
            found = self._rows(section)
            if found:
                head = _html_row("th", columns, columns)
                body = "".join(_html_row("td", columns, map(html.escape, row)) for row in found)
                parts.append(f"<table><caption>{section}</caption>{head}{body}</table>")
        if notes:
            parts.append(_html_list(first_clause(note) for note in notes[:MOST_LINES]))
            whole = f"<summary>{len(notes)} notes, whole</summary>{_html_list(notes)}"
            parts.append(f"<details>{whole}</details>")
        return "\n".join(parts)

    def _rows(self, section: str) -> list[tuple[str, ...]]:
        return rows(getattr(self, section), _COLUMNS[section])

    def __call__(self, *_, **__):
        raise TypeError(f"a swap report is not a model: {_HINT}")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"a swap report has no attribute {name!r}: {_HINT}")

    def __getstate__(self) -> dict:
        """A copy of a report prints the same, but has no model to verify."""
        return {**vars(self), "_model": None, "_changes": [], "_named": []}


def _short(name: str) -> str:
    return name.rpartition(".")[2]


class Restored(list[str]):
    """The names of the modules that `unswap` changed; prints as one line."""

    def __str__(self) -> str:
        if not self:
            return "onepass.unswap: nothing was swapped"
        groups = grouped(self)
        more = f" and {len(groups) - _NAMED} more" if len(groups) > _NAMED else ""
        modules = "1 module" if len(self) == 1 else f"{len(self)} modules"
        return f"onepass.unswap: restored {modules}: {', '.join(groups[:_NAMED])}{more}"

    __repr__ = __str__


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


def _html_list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>"


def _html_row(tag: str, columns: Iterable[str], cells: Iterable[str]) -> str:
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


def grouped(names: list[str]) -> list[str]:
    """Names that differ only in numbers, as one: "layers.*.norm" for all layers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return [_common(group) for group in groups.values()]


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
