"""`onepass profile-swap`: each kind of swap alone, on one model: the time and memory it saves.

The steps are those of `onepass compare`, and so are the model, the text and ``--model``. One model
takes turns: before each step, untimed, its modules get the classes of the next variant, so that all
variants have the same weights at the same addresses. Kinds that are slower than stock alone are
left out of one more variant, which is timed against stock and the whole swap: the cost of a kind
alone need not equal the gain of leaving it out. See :mod:`onepass.tools.profile_swap.measure`. With
``--generate`` calls of inference are measured instead, as `onepass compare --generate` makes them.

``--json`` writes one object; keys are added in later versions, never changed:

- ``schema_version`` 1; ``command``: to repeat the run; ``seconds``: how long it took
- ``machine``: facts of the machine and the software, text per key; ``data``: what was trained on;
  ``parameters``: of the model; ``objective``: as of `onepass compare`, null with ``--generate``
- ``settings``: the flags as they were used; ``speed`` in it are the GPT's sizes
- ``profiles``: per dropout probability (null for ``--model``) ``{dropout, items_per_batch,
  variants, absent, note, advice}``
- ``variants`` by name (stock; swapped: all kinds; swapped: KIND, each alone): ``kinds`` (null: what
  is not swapped), ``modules`` that changed, ``step_ms {median, p10, p90, rounds}``,
  ``times_stock`` and ``ms_bought {median, low, high}`` (95 % intervals of differences within
  rounds), ``saved_bytes`` (kept by the forward for the backward), ``peak_bytes`` (of a step),
  ``pays`` (true, false: slower, null: no difference measured), ``phases``; with ``--generate`` a
  call stands for the step (prefill and decoding, or a forward), saved_bytes is null, and phases
  has ``ms`` and ``times_stock`` of prefill and decode
- ``absent``: by kind, why nothing of it was swapped; ``note``: why `generate` was not called
- ``advice``: ``{leave_out, keep, where_memory_is_short, ratio_to_all, ratio_to_stock, sentence,
  call}``: leave_out are the kinds that are slower than stock alone; where_memory_is_short lists
  kinds that save memory and are not in call; ratio_to_all and ratio_to_stock are how many times
  faster the swap of ``keep`` was than that of all kinds and than stock, in separate rounds, null
  where nothing was left out; call is the line of Python to use, null where no swap was measured to
  gain
"""

from __future__ import annotations

import argparse
import time

from onepass.tools.command import run_command
from onepass.tools.compare.settings import add_shared_arguments, read_settings

__all__ = ["add_arguments", "main"]

add_arguments = add_shared_arguments
COMMAND = "profile-swap"


def main(args: argparse.Namespace) -> int:
    """Measures as args ask; returns the exit code: 2 for bad input, 1 if a file could not be
    written, else 0."""
    return run_command(
        COMMAND,
        args,
        lambda: run(read_settings(args, COMMAND, add_arguments)),
        lambda result, console: result.show(console),
    )


def run(settings):
    """Profiles the model at every dropout probability; returns a `report.Result`."""
    from onepass._threads import on_threads
    from onepass.tools.compare.report import label
    from onepass.tools.compare.settings import make_current
    from onepass.tools.compare.workload import workload_of
    from onepass.tools.data import load_text
    from onepass.tools.machine import machine_facts
    from onepass.tools.profile_swap.measure import SECONDS, Calls, Turns, profile
    from onepass.tools.profile_swap.report import Result
    from onepass.tools.progress import Phase, Progress

    start = time.perf_counter()
    with on_threads(settings.threads):
        make_current(settings.device)
        machine = machine_facts()
        text, data = None, f"batches of {settings.model}"
        if not settings.model:
            text = load_text(settings.text)
            text.check(settings.speed.block)
            data = text.describe()
        profiles = []
        dropouts = settings.dropouts or (None,)
        seconds = 0.0 if settings.quick else SECONDS
        # At least stock and one kind, once to warm up and once in each round.
        steps = 0 if settings.generate else 2 * (1 + settings.pairs)
        phases = [Phase(f"Kinds alone, dropout {label(p)}", steps, seconds) for p in dropouts]
        with Progress(COMMAND, phases) as progress:
            for dropout in dropouts:
                if settings.generate:
                    turns = Calls(settings)
                else:
                    turns = Turns(workload_of(settings, text, dropout), settings)
                with turns:
                    profiles.append(profile(turns, settings, progress.next()))
        parameters = sum(p.numel() for p in turns.model.parameters())
    seconds = time.perf_counter() - start
    return Result(settings, machine, data, parameters, profiles, seconds)
