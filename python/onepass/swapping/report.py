"""The report of `swap`, for people, notebooks and programs."""

from __future__ import annotations

import collections
import html
from collections.abc import Callable

from torch import nn

from onepass.swapping import by_hand
from onepass.swapping.changes import Change, Edit
from onepass.swapping.texts import (
    MOST_LINES,
    first_clause,
    grouped,
    html_list,
    html_row,
    listed,
    rows,
    shortened,
    table,
)

_HINT = "swap changes the model in place; drop the assignment"
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
        self._decision = None  # the `sample.Decision`, once there is one
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
    def choice(self) -> dict[str, object]:
        """The swapped modules with the precision of their products, and those that a sample left
        out, as plain JSON-able data: for `onepass.swap(model, choice=)`, which does the same
        without measuring, in another process or when a run is resumed.

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
                head = html_row("th", columns, columns)
                body = "".join(html_row("td", columns, map(html.escape, row)) for row in found)
                parts.append(f"<table><caption>{section}</caption>{head}{body}</table>")
        if notes:
            parts.append(html_list(first_clause(note) for note in notes[:MOST_LINES]))
            whole = f"<summary>{len(notes)} notes, whole</summary>{html_list(notes)}"
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
