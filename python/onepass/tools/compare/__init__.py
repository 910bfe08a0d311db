"""`onepass compare`: the same model on the same text, stock and swapped.

Three phases. Speed: whole training steps of both, interleaved, with the time and the kept memory of
each part of a step. Sameness: loss curves of both, against the band that stock runs alone
span when nothing but rounding or the dropout seed differs. Both with torch's fused AdamW, its
fastest. Optimizers: the AdamW step alone, by torch's default, torch's fused and onepass's, and
training with the last. See :mod:`onepass.tools.compare.attribution` for the division of a
step, :mod:`onepass.tools.compare.optimizers` for the measurement of an optimizer,
:mod:`onepass.tools.model` for the GPT and for ``--model``.

``--json`` writes one object; keys are added in later versions, never changed:

- ``schema_version`` 1; ``command``: to repeat the run; ``seconds``: how long it took
- ``machine``: facts of the machine and the software, text per key
- ``settings``: every flag as it was used; ``speed`` and ``sameness`` in it are the GPT's sizes
- ``data``: what was trained on; ``parameters``: of the model in the speed phase; ``objective``:
  what was trained, "the model's loss", or "mean square of the output: it has no loss"
- ``speed``: per dropout probability ``{dropout, items_per_batch, variants, auto}``; dropout is null
  for ``--model``; ``auto``, null without ``--auto``: ``{left_out, notes, precisions}``, where
  left_out lists ``{modules, kinds, reason}``, the reason with its figure, and precisions has
  ``{left_out, notes}`` of swapped at each other precision by name, decided at that; variants by
  name (stock, swapped; with --compile compiled stock and compiled swapped; with --keep-memory the
  same two, kept memory: in a process that keeps what it has freed; in float32, where this CPU
  multiplies otherwise then, the same two, medium precision: with
  ``torch.set_float32_matmul_precision("medium")``; with --precision int8 swapped, int8: by
  ``onepass.swap(model, precision="int8")``):
  ``step_ms {median, p10, p90, rounds}``, ``items_per_second`` (tokens), ``page_faults`` per
  step, ``ratio_to_stock`` and
  ``ratio_to_baseline`` ``{median, low, high}`` (how many times faster, 95 % interval; the
  ``baseline`` of a swapped variant is the stock one treated alike), ``parts_ms`` by phase (forward,
  backward, update) and part (linear, attention, norm, dropout, activation, loss, convolution,
  recurrent, embedding, optimizer, other operators, Python, unattributed), null for variants that
  are compiled or keep memory, ``saved_bytes`` and
  ``peak_bytes`` (of a step, holes in glibc's heap apart; with kept memory of four steps, and all
  that the process keeps), ``linear_gflops``
  (of linear layers, null as parts_ms is); beside the variants ``linear_operations`` of a step and
  ``arithmetic_gflops``, what this CPU reaches (null on CUDA)
- ``first_step``: per variant ``{loss, loss_difference, gradient_error, gradient_name, dropout}``;
  gradient_error is null where stock's gradients are zero, denormal or not finite; dropout is "on,
  with the same masks", "off", or "off: " and why
- ``sameness``: per dropout probability ``{dropout, stock_runs_differ_by, curve, steps,
  stock_losses, swapped_losses, medium_losses, gap, medium_gap, precisions, stock_gap, band_factor,
  same}``; losses in nats per byte; medium's are of swapped, null where that is no variant, and
  precisions has ``{losses, gap}`` of each by name; same is null where stock's are not finite, or
  all are one number
- ``optimizers``: ``{dropout, parameters, baseline, variants, steps, stock_gap, left_out}``; dropout
  is that of the step and of the training that the figures refer to, parameters those with a
  gradient, left_out the reason by name; variants by name (torch default, torch fused, onepass, and
  what --master and --state-dtype ask for): ``library``, ``cast_to`` (dtype of the parameters; null:
  the model's own), ``master``, ``state_dtype``, ``step_ms`` as above, ``page_faults``,
  ``ratio_to_baseline``, ``share_of_step`` (of stock's, with this optimizer in it; null where cast),
  ``state_bytes_per_parameter``, ``bytes_per_parameter`` (with the parameter itself and its
  gradient), ``losses`` at ``steps`` and their ``gap`` to stock's (null where not trained), ``same``
  (null where other numerics were asked for, or as in ``sameness``)
- ``swap_report``: ``Report.to_dict()`` of the swap, at the last dropout probability
- with ``--generate``, in place of the phases: see :mod:`onepass.tools.compare.generation`
- ``verdict``: ``{same, not_accelerated, sentence, optimizer_same}``; not_accelerated: share of the
  swapped step per part and dropout; optimizer_same: of training by onepass's AdamW, null where not
  trained
"""

from __future__ import annotations

import argparse
import time

from onepass.tools.command import run_command
from onepass.tools.compare.settings import add_arguments, read_settings

__all__ = ["add_arguments", "main"]


def main(args: argparse.Namespace) -> int:
    """Runs the comparison of args; returns the exit code: 2 for bad input, 1 if a file could not be
    written, else 0."""
    return run_command(
        "compare",
        args,
        lambda: run(read_settings(args)),
        lambda result, console: result.show(console),
        _plot,
    )


def _plot(result, format: str) -> bytes:
    from onepass.tools.compare.plot import plot

    return plot(result, format)


def run(settings):
    """Both phases for every dropout probability; returns a `report.Result`, or with --generate a
    `generation.Generation`."""
    if settings.generate:
        from onepass.tools.compare import generation

        return generation.run(settings)

    from onepass._threads import on_threads
    from onepass.tools.compare.measure import compare_speed
    from onepass.tools.compare.optimizers import choose, compare_optimizers
    from onepass.tools.compare.phases import phases_of
    from onepass.tools.compare.report import Result
    from onepass.tools.compare.settings import make_current
    from onepass.tools.compare.train import compare_training
    from onepass.tools.compare.workload import GptWorkload, UserWorkload
    from onepass.tools.data import load_text
    from onepass.tools.machine import machine_facts
    from onepass.tools.progress import Progress

    start = time.perf_counter()
    with on_threads(settings.threads):
        make_current(settings.device)
        machine = machine_facts()
        if settings.model:
            data = f"batches of {settings.model}"
            fast = slow = [UserWorkload(settings)]
        else:
            text = load_text(settings.text)
            data = text.describe()
            for sizes in (settings.speed, settings.sameness):
                text.check(sizes.block)
            fast, slow = (
                [GptWorkload(settings, text, sizes, p) for p in settings.dropouts]
                for sizes in (settings.speed, settings.sameness)
            )
        # One dropout probability is enough for optimizers, best the one without.
        checked = next((i for i, w in enumerate(fast) if w.dropout == 0.0), 0)
        choices, left_out = choose(settings, slow[checked])
        further_runs = sum(choice.is_trained for choice in choices)
        speeds, sameness = [], []
        phases = phases_of(settings, [workload.dropout for workload in fast], choices)
        with Progress("compare", phases) as progress:
            decided = []
            for workload in fast:
                if settings.auto:
                    progress.next()
                decided.append(settings.decided(workload.build(), workload.batch(0)))
            for workload, chosen in zip(fast, decided, strict=True):
                speeds.append(compare_speed(workload, chosen, progress.next()))
            for workload, chosen in zip(slow, decided, strict=True):
                advance = progress.next()
                sameness.append(compare_training(workload, chosen, advance, further_runs))
            optimizers = compare_optimizers(
                choices, left_out, speeds[checked].timing.median("stock"), fast[checked],
                slow[checked], sameness[checked], settings, progress.next(),
            )  # fmt: skip
        parameters = sum(p.numel() for p in fast[0].build().parameters())
    return Result(
        settings, machine, data, parameters, speeds, sameness, optimizers,
        time.perf_counter() - start,
    )  # fmt: skip
