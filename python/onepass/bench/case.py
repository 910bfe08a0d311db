"""One benchmark case: the variants to time, the bytes they must move, and how to check them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onepass import numerics
from onepass.bench.harness import Interval, Timing, measure_pairs


@dataclass
class Case:
    """A case compares `ours` with torch's fastest eager way and, if given, with torch.compile's.

    Attributes:
        name: family/what/dtype/shape/phase, matched by --case.
        ours, eager: calls without arguments that return the tensors to check, first to last.
        compiled: the same by torch.compile; None where it is not measured.
        reference: the same in float64, for the correctness column; None where results are random.
        bytes: bytes that must move: each input read once, each output written once.
        copy: a tensor of the case's shape; its copy, in the same cache state, is the ceiling.
        goal: the factors to reach against (eager, compiled), and the share of the copy; see GOALS.
    """

    name: str
    ours: Callable[[], tuple[Tensor, ...]]
    eager: Callable[[], tuple[Tensor, ...]]
    compiled: Callable[[], tuple[Tensor, ...]] | None
    reference: Callable[[], tuple[Tensor, ...]] | None
    bytes: int | None
    copy: Tensor
    goal: tuple[float | None, float | None, float | None] = field(default=(None, None, None))


@dataclass(frozen=True)
class Row:
    """The measured case."""

    name: str
    timing: Timing
    eager: Interval  # how many times faster than eager torch
    compiled: Interval | None
    share: float | None  # of the copy ceiling, by bytes
    correct: str
    goal: tuple[float | None, float | None, float | None]

    def to_dict(self) -> dict:
        return {
            "name": self.name,
            "times": self.timing.to_dict(),
            "rounds": self.timing.rounds,
            "against_eager": self.eager.to_dict(),
            "against_compile": None if self.compiled is None else self.compiled.to_dict(),
            "share_of_copy": self.share,
            "correct": self.correct,
            "goal": {
                "against_eager": self.goal[0],
                "against_compile": self.goal[1],
                "share_of_copy": self.goal[2],
            },
        }


def measure(case: Case, *, seconds: float, compiled: bool) -> Row:
    """Checks the case's results, then times its variants in turn for about `seconds`."""
    correct = _check(case)
    target = torch.empty_like(case.copy)
    functions = {"ours": case.ours, "eager": case.eager, "copy": lambda: target.copy_(case.copy)}
    if compiled and case.compiled is not None:
        functions["compile"] = case.compiled
    timing = measure_pairs(functions, seconds=seconds)
    share = None
    if case.bytes is not None:
        copied = 2 * case.copy.nbytes
        share = timing.ratio("ours", "copy").median * case.bytes / copied
    return Row(
        case.name,
        timing,
        timing.ratio("ours", "eager"),
        timing.ratio("ours", "compile") if "compile" in functions else None,
        share,
        correct,
        case.goal,
    )


def _check(case: Case) -> str:
    if case.reference is None:
        return "see tests"  # random results: the tests hold them to the reference bit for bit
    results = [
        numerics.compare(ours, ref, base)
        for ours, ref, base in zip(case.ours(), case.reference(), case.eager(), strict=True)
    ]
    worst = max(results, key=lambda result: result.max_error / (result.bound or 1.0))
    return "yes" if all(result.ok for result in results) else f"NO: {worst.text}"
