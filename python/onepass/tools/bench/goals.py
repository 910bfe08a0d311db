"""Goals of cases, for `onepass bench --goals FILE`; the project's own are
benchmarks/goals.json."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Goal:
    """Factors against eager, torch.compile and others by name, and share of the ceiling; None: no
    goal."""

    eager: float | None = None
    compile: float | None = None
    share: float | None = None
    others: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __bool__(self) -> bool:
        return self != Goal()

    def to_dict(self) -> dict:
        return {
            "against_eager": self.eager,
            "against_compile": self.compile,
            "share_of_copy": self.share,
            "against_others": dict(self.others),
        }


class Goals:
    """Goals by patterns of case names, as in fnmatch; the first that matches applies."""

    def __init__(self, patterns: Mapping[str, Goal]):
        self.patterns = patterns

    def of(self, name: str) -> Goal:
        found = (goal for p, goal in self.patterns.items() if fnmatch.fnmatchcase(name, p))
        return next(found, Goal())


def read_goals(path: str, device: str, level: str) -> Goals:
    """The goals of a device ("cpu" or "cuda"); on the CPU those of its level first.

    The file holds {"cpu": {pattern: {"eager": ..., "compile": ..., "share": ..., "others": {name:
    ...}}}, "cuda": ..., and "avx2", "avx512_bf16"}. A level without a section takes "avx2".

    Raises:
        OSError: the file cannot be read.
        ValueError: it has another form.
    """
    with open(path, encoding="utf-8") as file:
        sections = json.load(file)
    names = ["cuda"] if device == "cuda" else [level if level in sections else "avx2", "cpu"]
    try:
        patterns = {p: Goal(**goal) for name in names for p, goal in sections[name].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no goals for {' and '.join(names)}: {error}") from error
    return Goals(patterns)
