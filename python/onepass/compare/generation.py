"""`onepass compare --generate N`: inference, stock and swapped, in eval mode and without gradients.

A model with `generate`, as transformers' have, continues the prompts of its batch greedily by N
tokens. The median time for a single token is that of the prefill; what N tokens take longer is that
of decoding. All other models are called on their batch: that is the whole measurement. Variants
share their parameters and take turns. Beside stock and swapped there are attached, where
`onepass.integrations.transformers.attach` takes the model, and with ``--compile`` both compiled.

``--json`` writes one object like that of `onepass compare`, with ``generation`` in place of the
phases of training: ``{phases, same, swap_report}``. ``phases`` by name (prefill and decode, or
forward): ``tokens`` of a call, and per variant ``ms {median, p10, p90, rounds}``,
``tokens_per_second``, ``ratio_to_stock {median, low, high}``. ``same`` per variant: the share of
tokens that are stock's, or without `generate` the largest difference relative to stock's largest
number.
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import onepass
from onepass._batch import arguments
from onepass._tables import print_table
from onepass.bench.harness import Timing, clock_of, measure_pairs
from onepass.bench.machine import machine_facts
from onepass.compare.errors import BadInput
from onepass.compare.model import move
from onepass.compare.progress import Phase, Progress
from onepass.compare.report import auto_dict, auto_lines
from onepass.compare.settings import Settings
from onepass.compare.user_model import batch_of, load_user_model, telling_errors, tokens_in

STOCK, SWAPPED, ATTACHED = "stock", "swapped", "attached"
COMPILED = "compiled {}"
SECONDS = 4.0  # of timed calls, at least, unless --quick
_LABELS = ("labels", "targets")  # keywords of a batch that `generate` does not take


@dataclass
class Generation:
    """What was measured; prints as a table.

    Attributes:
        phases: by name (times, tokens of a call).
        same: by variant, as in the JSON.
        left_out: variants that are not there, with the reason.
    """

    settings: Settings
    machine: dict
    count: int  # tokens that are generated; 0 without `generate`
    phases: dict[str, tuple[Timing, int]]
    same: dict[str, float]
    left_out: dict[str, str]
    swap_report: dict
    seconds: float

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
                "left_out": self.left_out,
                "auto": auto_dict(self.settings.decision),
                "swap_report": self.swap_report,
            },
        }

    def show(self, console: Console) -> None:
        table = Table(title=f"Inference of {self.settings.model}")
        for column in ("phase", "variant"):
            table.add_column(column)
        for column in (
            r"median ms \[p10-p90]",
            "tokens/s",
            r"times as fast \[95 %]",
            self._sameness(),
        ):
            table.add_column(column, justify="right")
        for phase, (timing, tokens) in self.phases.items():
            for name in timing.times:
                median, low, high = (1e3 * timing.percentile(name, p) for p in (50, 10, 90))
                table.add_row(
                    phase,
                    name,
                    f"{median:.4g} [{low:.4g}-{high:.4g}]",
                    f"{1e3 * tokens / median:,.0f}",
                    "1" if name == STOCK else str(timing.ratio(name, STOCK)),
                    self._same(name) if phase != "prefill" and name != STOCK else "",
                )
        print_table(console, table, names=2)
        for name, reason in self.left_out.items():
            console.print(f"Without {name}: {reason}.")
        for line in auto_lines(self.settings.decision):
            console.print(line, highlight=False, markup=False)
        console.print(self.verdict())
        if self.settings.quick:
            console.print("--quick: few calls, a trial of the tool and not a measurement.")

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


def run(settings: Settings, count: int) -> Generation:
    """Measures inference of --model.

    Raises:
        BadInput: there is no --model, or it does not run on its batch.
    """
    if not settings.model:
        raise BadInput(
            "--generate must come with --model, got none; examples/generate.py decodes the GPT"
        )
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        return _run(settings, count, start)
    finally:
        torch.set_num_threads(threads)


def _run(settings: Settings, count: int, start: float) -> Generation:
    model, batches = load_user_model(settings.model, settings.seed)
    model = model.to(settings.device).eval()
    batch = move(batch_of(batches, 0), settings.device)
    settings = settings.decided(model, batch)
    variants, left_out, report = _variants(model, settings)
    generates = callable(getattr(model, "generate", None))
    calls = {
        name: _generating(variant, batch) if generates else _calling(variant, batch)
        for name, variant in variants.items()
    }
    rounds, seconds = (settings.pairs, 0.0) if settings.quick else (settings.pairs, SECONDS)
    measure = functools.partial(
        measure_pairs, rounds=rounds, seconds=seconds, clock=clock_of(settings.device.type)
    )
    phase = Phase("Inference", seconds=seconds)
    with telling_errors(model, batch), settings.autocast(), Progress("compare", [phase]) as shown:
        shown.next()
        results = {name: call(count) for name, call in calls.items()}
        if generates:
            phases = _prefill_and_decode(calls, count, tokens_in(batch), results[STOCK], measure)
        else:
            timing = measure({name: functools.partial(call, 0) for name, call in calls.items()})
            phases = {"forward": (timing, tokens_in(batch))}
    stock = results.pop(STOCK)
    compare = _same_tokens if generates else _difference
    return Generation(
        settings=settings,
        machine=machine_facts(),
        count=count if generates else 0,
        phases=phases,
        same={name: compare(result, stock) for name, result in results.items()},
        left_out=left_out,
        swap_report=report.to_dict(),
        seconds=time.perf_counter() - start,
    )


def _prefill_and_decode(
    calls: dict, count: int, tokens: int, result: Tensor, measure: Callable[[dict], Timing]
) -> dict[str, tuple[Timing, int]]:
    names = list(calls)
    timing = measure(
        {
            **{f"1 {name}": functools.partial(calls[name], 1) for name in names},
            **{f"N {name}": functools.partial(calls[name], count) for name in names},
        }
    )
    ones, whole = ({n: timing.times[f"{which} {n}"] for n in names} for which in "1N")
    first = {n: statistics.median(ones[n]) for n in names}
    decode = {n: [seconds - first[n] for seconds in whole[n]] for n in names}
    if min(map(min, decode.values())) <= 0.0:
        raise BadInput(
            f"--generate must be more tokens than these {count}, whose decoding takes no longer "
            "than runs differ"
        )
    once, none = dict.fromkeys(names, 1), dict.fromkeys(names, 0.0)
    return {
        "prefill": (Timing(ones, once, none), tokens),
        "decode": (Timing(decode, once, none), len(result) * (count - 1)),
    }


def _variants(
    model: nn.Module, settings: Settings
) -> tuple[dict[str, nn.Module], dict[str, str], onepass.Report]:
    """Copies that share the model's tensors, by name; those that there are not, with the reason;
    the report of the swap."""
    variants, left_out = {STOCK: model, SWAPPED: _sharing(model)}, {}
    report = settings.swap(variants[SWAPPED])
    if hasattr(model, "config") and hasattr(model, "set_attn_implementation"):
        from onepass.integrations.transformers import attach

        variants[ATTACHED] = _sharing(model)
        try:
            attach(variants[ATTACHED])
        except Exception as error:  # it refuses by ValueError and others
            del variants[ATTACHED]
            left_out[ATTACHED] = str(error).splitlines()[0]
    if settings.compile:
        for name in (STOCK, SWAPPED):
            compiled = _sharing(variants[name])
            compiled.forward = torch.compile(compiled.forward, dynamic=True)
            variants[COMPILED.format(name)] = compiled
    return variants, left_out, report


def _sharing(model: nn.Module) -> nn.Module:
    """A copy of the model with the same parameters and buffers."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _calling(model: nn.Module, batch: object) -> Callable[[int], object]:
    args, kwargs = arguments(model, batch)

    def call(_: int) -> object:
        with torch.no_grad():
            return model(*args, **kwargs)

    return call


def _generating(model: nn.Module, batch: object) -> Callable[[int], Tensor]:
    """A call that continues the prompts by so many tokens, which it returns."""
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    kwargs = {name: value for name, value in kwargs.items() if name not in _LABELS}
    if not isinstance(batch, Mapping):
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        kwargs = {"input_ids": leaves[0]} if leaves else {}

    def call(count: int) -> Tensor:
        with torch.no_grad():
            found = model.generate(
                **kwargs, max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        return found[:, -count:]

    return call


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
