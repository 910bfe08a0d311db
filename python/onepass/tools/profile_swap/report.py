"""The outcome of `onepass profile-swap`: one dictionary for machines, tables for people."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from onepass.tools.compare.report import label, number, subject
from onepass.tools.compare.settings import Settings
from onepass.tools.compare.variants import STOCK, SWAPPED, of_kinds
from onepass.tools.harness import Interval
from onepass.tools.profile_swap.measure import Profile, verdict
from onepass.tools.tables import print_footer, print_table, print_text, table_of

SCHEMA_VERSION = 1
MEBIBYTE = 2**20
# Settings of `onepass compare` that this command does not have.
OTHERS = (
    "sameness", "steps", "auto", "compile", "keep_memory", "optimizers", "masters", "state_dtypes",
)  # fmt: skip
_WORDS = {True: "pays", False: "slower", None: "no difference"}


@dataclass(frozen=True)
class Result:
    """All results of a run of `onepass profile-swap`."""

    settings: Settings
    machine: dict
    data: str
    parameters: int
    profiles: list[Profile]
    seconds: float

    @property
    def objective(self) -> str | None:
        return self.profiles[0].objective

    def to_dict(self) -> dict:
        """The JSON of `onepass.tools.profile_swap`, whose docstring is its schema."""
        settings = self.settings.to_dict()
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.settings.command,
            "machine": self.machine,
            "settings": {name: settings[name] for name in settings if name not in OTHERS},
            "data": self.data,
            "parameters": self.parameters,
            "objective": self.objective,
            "profiles": [_profile_dict(profile) for profile in self.profiles],
            "seconds": self.seconds,
        }

    def show(self, console: Console) -> None:
        """Prints a table for each dropout probability, the advice, and the footer."""
        for profile in self.profiles:
            print_table(console, _table(profile, _what(profile, self.settings)))
            for kind, reason in profile.absent.items():
                print_text(console, f"  {kind}: {reason}")
            print_text(console, f"\n{sentence(profile)}", "bold")
            if text := call(profile):
                print_text(console, f"  {text}")
            if profile.note:
                print_text(console, f"{profile.note}.")
        print_footer(console, footer(self))


def _profile_dict(profile: Profile) -> dict:
    timing, advice = profile.timing, profile.advice
    variants = {}
    for name, variant in profile.variants.items():
        rounds = [1e3 * seconds for seconds in timing.times[name]]
        median, p10, p90 = (1e3 * timing.percentile(name, percent) for percent in (50, 10, 90))
        times_stock = profile.times_stock(name)
        variants[name] = {
            "kinds": variant.kinds and list(variant.kinds),
            "modules": variant.modules,
            "step_ms": {"median": median, "p10": p10, "p90": p90, "rounds": rounds},
            "times_stock": times_stock.to_dict(),
            "ms_bought": profile.milliseconds_bought(name).to_dict(),
            "saved_bytes": variant.saved_bytes,
            "peak_bytes": variant.peak_bytes,
            "pays": verdict(times_stock),
            "phases": {
                phase: {
                    "ms": 1e3 * times.median(name),
                    "times_stock": times.ratio(name, STOCK).to_dict(),
                }
                for phase, times in profile.phases.items()
            },
        }
    return {
        "dropout": profile.dropout,
        "items_per_batch": profile.items_per_batch,
        "variants": variants,
        "absent": profile.absent,
        "note": profile.note,
        "advice": {
            "leave_out": list(advice.leave_out),
            "keep": list(advice.keep),
            "where_memory_is_short": list(profile.saving),
            "ratio_to_all": advice.ratio and advice.ratio.to_dict(),
            "ratio_to_stock": advice.times_stock and advice.times_stock.to_dict(),
            "sentence": sentence(profile),
            "call": call(profile),
        },
    }


def call(profile: Profile) -> str | None:
    """The line of Python that swaps the kinds that pay; None: no swap was measured to gain."""
    if not profile.swaps:
        return None
    if set(profile.swaps) == set(profile.kinds) and not profile.limited:
        return "onepass.swap(model)"
    return f"onepass.swap(model, kinds={profile.swaps!r})"


def sentence(profile: Profile) -> str:
    """The kinds to leave out and how certain that is, or the advice against a swap."""
    return " ".join([_of_speed(profile), *(_of_memory(profile, kind) for kind in profile.saving)])


def _of_speed(profile: Profile) -> str:
    advice, out = profile.advice, _listed(profile.advice.leave_out)
    if not profile.swaps:
        whole = profile.times_stock(profile.whole)
        if verdict(whole) is False:
            return f"Do not swap this model: it would be {_interval(whole)} as fast."
        return f"No gain measured, {_interval(whole)}: do not swap this model for speed."
    if not out and profile.swaps == profile.kinds:
        return "Nothing to leave out: no kind is slower alone."
    if profile.swaps not in (profile.kinds, advice.keep):
        kind = of_kinds(profile.swaps)
        return f"Swap {profile.swaps[0]} alone: {_interval(profile.times_stock(kind))} as fast."
    if profile.swaps == advice.keep:
        return (
            f"Leave out {out}: the swap without is {_interval(advice.ratio)} as fast as all, and "
            f"{_interval(advice.times_stock)} as fast as stock."
        )
    if advice.ratio is None:
        whole = _interval(profile.times_stock(profile.whole))
        return f"Slower alone: {out}; all together are {whole} as fast."
    return (
        f"Slower alone: {out}; but the swap without is {_interval(advice.ratio)} as fast as "
        "all, so leaving out gains nothing measured."
    )


def _of_memory(profile: Profile, kind: str) -> str:
    name = of_kinds((kind,))
    saved, peak = profile.saved_peak(name), profile.variants[STOCK].peak_bytes
    return (
        f"Where memory is short: {kind} alone lowers the peak by {saved / MEBIBYTE:,.1f} MiB "
        f"({100 * saved / peak:.0f} %) and is {_interval(profile.times_stock(name))} as fast."
    )


def _listed(kinds: tuple[str, ...]) -> str:
    return " and ".join(kinds) if len(kinds) < 3 else ", ".join(kinds)


def _interval(found: Interval) -> str:
    return f"{found.median:.3f}x [{found.low:.3f}-{found.high:.3f}]"


def _what(profile: Profile, settings: Settings) -> str:
    """The step or the call."""
    if profile.phases:
        return f"prefill and decoding of {settings.generate} tokens"
    if settings.generate:
        return "a forward"
    tail = "" if profile.dropout is None else f", dropout {label(profile.dropout)}"
    return f"one training step{tail}"


def _table(profile: Profile, what: str) -> Table:
    table = table_of(
        f"Each kind alone, {what}; bought: stock's less this one's",
        "swapped", "modules", "ms [p10-p90]", "times stock [95 %]", *profile.phases, "ms bought",
        "peak MiB bought", "", words=1,
    )  # fmt: skip
    stock = profile.variants[STOCK]
    for name, variant in profile.variants.items():
        median, low, high = (1e3 * profile.timing.percentile(name, p) for p in (50, 10, 90))
        times = f"{number(median)} [{number(low)}-{number(high)}]"
        if name == STOCK:
            peak = f"of {variant.peak_bytes / MEBIBYTE:,.1f}"
            table.add_row(name, "", times, "1", *["1" for _ in profile.phases], "", peak, "")
            continue
        ratio = profile.times_stock(name)
        table.add_row(
            "all" if name == SWAPPED else _listed(variant.kinds),
            str(variant.modules),
            times,
            str(ratio),
            *(f"{phase.ratio(name, STOCK).median:.2f}" for phase in profile.phases.values()),
            number(profile.milliseconds_bought(name).median),
            f"{round((stock.peak_bytes - variant.peak_bytes) / MEBIBYTE, 1) + 0.0:,.1f}",
            _WORDS[verdict(ratio)],
            end_section=name == SWAPPED,
        )
    return table


def footer(result: Result) -> list[str]:
    """Machine, software and method; the last line repeats the run."""
    settings = result.settings
    lines = []
    if settings.quick:
        lines.append("--quick: tiny sizes, a trial of the tool. These figures measure nothing.")
    return [
        *lines,
        subject(settings, result.parameters, "", result.data),
        *([f"trained: {result.objective}"] if result.objective else []),
        "peak: in a process of its own; gains alone need not add up to that of all",
        " | ".join(f"{name} {value}" for name, value in result.machine.items()),
        f"{settings.command}   ({result.seconds:.0f} s)",
    ]
