"""The phases of a run, with the least steps and seconds of each."""

from __future__ import annotations

from collections.abc import Sequence

from onepass.swapping import sample
from onepass.tools.compare import measure, optimizers
from onepass.tools.compare.report import label
from onepass.tools.compare.settings import Settings
from onepass.tools.compare.train import USER_SECONDS, curves_of
from onepass.tools.compare.variants import kept_names, names
from onepass.tools.progress import Phase


def phases_of(
    settings: Settings, dropouts: Sequence[float | None], choices: Sequence[optimizers.Choice]
) -> list[Phase]:
    trained, kept = names(settings), kept_names(settings)
    steps = len(trained) + settings.pairs * len(trained + kept) + bool(kept) + 1
    seconds = 0.0 if settings.quick else measure.SECONDS + measure.WATCHED_SECONDS
    found = [
        Phase(f"Choice, dropout {label(p)}", seconds=sample.SECONDS * len(settings.compared))
        for p in dropouts
        if settings.auto
    ]
    found += [Phase(f"Speed, dropout {label(p)}", steps, seconds) for p in dropouts]
    further = sum(choice.is_trained for choice in choices)
    runs = curves_of(settings)
    # Without a number of steps the runs share the time.
    of_a_run = 0.0 if settings.steps else USER_SECONDS / (runs + further)
    steps, seconds = (settings.steps or 0) * runs, of_a_run * runs
    found += [Phase(f"Sameness, dropout {label(p)}", steps, seconds) for p in dropouts]
    steps = settings.pairs * len(choices) + (settings.steps or 0) * further
    seconds = (0.0 if settings.quick else optimizers.SECONDS) + of_a_run * further
    return [*found, Phase("Optimizers", steps, seconds)]
