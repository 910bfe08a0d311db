"""`onepass compare --generate N`: inference, stock and swapped; see `compare.inference`.

Beside stock and swapped there are attached, where `onepass.integrations.transformers.attach` takes
the model, and with ``--compile`` both compiled.

``--json`` writes one object like that of `onepass compare`, with ``generation`` in place of the
phases of training: ``{phases, same, peak_bytes, left_out, note, auto, swap_report}``. ``phases`` by
name (prefill and decode, or forward): ``tokens`` of a call, and per variant ``ms {median, p10, p90,
rounds}``, ``tokens_per_second``, ``ratio_to_stock {median, low, high}``. Per variant ``same``: the
share of tokens that are stock's, or without `generate` the largest difference relative to stock's
largest number; ``peak_bytes``: of a call (prefill and decoding) in a process of its own, beside the
parameters. ``left_out``: reasons by variant; ``note``: why `generate` was not called; ``auto``: as
in ``speed`` of a training.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from torch import Tensor
from torch.utils import _pytree as pytree

from onepass._threads import on_threads
from onepass.swapping import sample
from onepass.tools.compare import memory
from onepass.tools.compare.inference import ATTACHED, PREFILL, SECONDS, Call, Inference
from onepass.tools.compare.report import auto_dict, auto_lines, mebibytes
from onepass.tools.compare.settings import Settings
from onepass.tools.compare.variants import COMPILED, STOCK, SWAPPED
from onepass.tools.harness import Timing
from onepass.tools.machine import machine_facts
from onepass.tools.progress import Phase, Progress
from onepass.tools.tables import print_table, print_text, table_of


@dataclass
class Generation:
    """The measurements; print as a table.

    Attributes:
        phases: by name (times, tokens of a call).
        same, peaks: by variant, as `same` and `peak_bytes` of the JSON.
        left_out: variants that are not there, with the reason.
        note: why `generate` was not called.
    """

    settings: Settings
    machine: dict
    count: int  # tokens that are generated; 0 without `generate`
    phases: dict[str, tuple[Timing, int]]
    same: dict[str, float]
    peaks: dict[str, int]
    left_out: dict[str, str]
    swap_report: dict
    seconds: float
    note: str = ""

    def to_dict(self) -> dict:
        return {
            "schema_version": 1,
            "command": self.settings.command,
            "seconds": self.seconds,
            "machine": self.machine,
            "settings": self.settings.to_dict(),
            "generation": {
                "phases": {name: _as_dict(*phase) for name, phase in self.phases.items()},
                "same": self.same,
                "peak_bytes": self.peaks,
                "left_out": self.left_out,
                "note": self.note,
                "auto": auto_dict(self.settings.decisions),
                "swap_report": self.swap_report,
            },
        }

    def show(self, console: Console) -> None:
        table = table_of(
            f"Inference of {self.settings.model}",
            "phase", "variant", "median ms [p10-p90]", "tokens/s", "times stock [95 %]",
            self._sameness(), "peak MiB", names=2,
        )  # fmt: skip
        for phase, (timing, tokens) in self.phases.items():
            for name in timing.times:
                median, low, high = (1e3 * timing.percentile(name, p) for p in (50, 10, 90))
                table.add_row(
                    phase,
                    name,
                    f"{median:.4g} [{low:.4g}-{high:.4g}]",
                    f"{1e3 * tokens / median:,.0f}",
                    "1" if name == STOCK else str(timing.ratio(name, STOCK)),
                    self._same(name) if phase != PREFILL and name != STOCK else "",
                    mebibytes(self.peaks[name]) if phase != PREFILL else "",
                )
        print_table(console, table, names=2)
        if self.note:
            print_text(console, f"{self.note}.")
        for name, reason in self.left_out.items():
            print_text(console, f"Without {name}: {reason}.")
        for line in auto_lines(self.settings.decisions):
            print_text(console, line)
        print_text(console, self.verdict(), "bold")
        if self.settings.quick:
            print_text(console, "--quick: few calls, a trial of the tool and not a measurement.")

    def verdict(self) -> str:
        """A sentence on the last phase: decoding, or the call."""
        phase, (timing, _) = list(self.phases.items())[-1]
        ratio = timing.ratio(SWAPPED, STOCK)
        if ratio.low > 1.0:
            return f"Swapped, {phase} is {ratio.median:.2f} times as fast."
        if ratio.high < 1.0:
            return f"Do not swap this model for {phase}: {ratio.median:.2f} times as fast."
        return f"Swapped, {phase} takes the same time as far as this run can tell."

    def _sameness(self) -> str:
        return "same tokens" if self.count else "difference"

    def _same(self, name: str) -> str:
        return f"{self.same[name]:.1%}" if self.count else f"{self.same[name]:.1e}"


def _as_dict(timing: Timing, tokens: int) -> dict:
    variants = {}
    for name in timing.times:
        median, low, high = (1e3 * timing.percentile(name, p) for p in (50, 10, 90))
        variants[name] = {
            "ms": {"median": median, "p10": low, "p90": high, "rounds": timing.rounds},
            "tokens_per_second": 1e3 * tokens / median,
            "ratio_to_stock": timing.ratio(name, STOCK).to_dict(),
        }
    return {"tokens": tokens, "variants": variants}


def run(settings: Settings) -> Generation:
    """Measures inference of --model.

    Raises:
        BadInput: the model does not run on its batch.
    """
    start = time.perf_counter()
    with on_threads(settings.threads):
        return _run(settings, start)


def _run(settings: Settings, start: float) -> Generation:
    inference = Inference(settings)
    phases = [Phase("Choice", seconds=sample.SECONDS)] * settings.auto
    phases.append(Phase("Inference", seconds=0.0 if settings.quick else SECONDS))
    with Progress("compare", phases) as progress:
        if settings.auto:
            progress.next()
            settings = inference.settings = settings.decided(inference.model, inference.batch)
        progress.next()
        calls, left_out, swap_report = _calls(inference)
        with inference.inside():
            results = {name: call(inference.count) for name, call in calls.items()}
            measured = inference.time(calls)
        peaks = memory.peaks_of_steps(list(calls), None, settings)
    stock = results.pop(STOCK)
    compare = _same_tokens if inference.generates else _difference
    return Generation(
        settings=settings,
        machine=machine_facts(),
        count=inference.count,
        phases=measured,
        same={name: compare(result, stock) for name, result in results.items()},
        peaks=peaks,
        left_out=left_out,
        swap_report=swap_report,
        seconds=time.perf_counter() - start,
        note=inference.note,
    )


def _calls(inference: Inference) -> tuple[dict[str, Call], dict[str, str], dict]:
    """Calls by variant; the variants that there are not, with the reason; the report of the
    swap."""
    stock, _ = inference.variant(STOCK)
    swapped, report = inference.variant(SWAPPED)
    calls, left_out = {STOCK: stock, SWAPPED: swapped}, {}
    if hasattr(inference.model, "config") and hasattr(inference.model, "set_attn_implementation"):
        try:
            calls[ATTACHED], _ = inference.variant(ATTACHED)
        except Exception as error:  # it refuses by ValueError and others
            left_out[ATTACHED] = str(error).splitlines()[0]
    if inference.settings.compile:
        for name in (f"{COMPILED}{STOCK}", f"{COMPILED}{SWAPPED}"):
            calls[name], _ = inference.variant(name)
    return calls, left_out, report.to_dict()


def _same_tokens(tokens: Tensor, stock: Tensor) -> float:
    return float((tokens == stock).double().mean())


def _difference(output: object, stock: object) -> float:
    pairs = zip(*(map(_floating, (output, stock))), strict=True)
    return max(
        (float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs), default=0.0
    )


def _floating(output: object) -> list[Tensor]:
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return [tensor.double() for tensor in tensors if tensor.numel()]
