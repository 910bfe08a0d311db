"""The survey of `onepass estimate`: variants of a step, dtypes, optimizers, and each saving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onepass.swapping.matchers import KINDS
from onepass.swapping.plan import verdicts_shared
from onepass.tools.errors import BadInput, BadModel
from onepass.tools.estimate import optimizers, step
from onepass.tools.estimate.layers import Series
from onepass.tools.estimate.step import Options, Step, Update
from onepass.tools.estimate.subject import Subject

STOCK, SWAPPED = "stock", "swapped"
CHECKPOINTED = ", checkpointed"
VARIANTS = (STOCK, SWAPPED, f"{STOCK}{CHECKPOINTED}", f"{SWAPPED}{CHECKPOINTED}")
# (dtype of parameters, whether autocast is on) by name; None: unchanged.
DTYPES: dict[str, tuple[torch.dtype | None, bool]] = {
    "as given": (None, False),
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}
MOST_ROWS = 1 << 20


@dataclass(frozen=True)
class Settings:
    """The choices of a survey."""

    dtype: str = "as given"  # of DTYPES
    optimizer: str = optimizers.ADAMW
    kinds: tuple[str, ...] | None = None  # of the swap; None: all that pay
    memory: int | None = None  # bytes
    rows: int | None = None  # of the batch; None: unchanged


@dataclass(frozen=True)
class Lever:
    """One change to the stock model, or all of them."""

    name: str
    peak: int
    rows: int | None  # the largest batch; None: not asked, not known, or of a kind alone


@dataclass(frozen=True)
class Survey:
    """The results of a survey."""

    settings: Settings
    rows: int | None
    steps: dict[str, Step]  # by variant, in the dtype of the settings
    dtypes: dict[str, dict[str, Step]]  # by dtype and variant
    levers: list[Lever]
    fits: dict[str, int | None]  # by variant, the largest batch
    left_out: dict[str, str]  # by variant, why
    command: str = ""  # repeats the run
    seconds: float = 0.0

    @property
    def base(self) -> Step:
        return self.steps[STOCK]

    def peak(self, variant: str) -> int:
        return self.steps[variant].peak(self.settings.optimizer)

    def to_dict(self) -> dict:
        """The JSON of `onepass.tools.estimate.command`, whose docstring is its schema."""
        name = self.settings.optimizer
        return {
            "schema_version": 1,
            "command": self.command,
            "settings": dataclasses.asdict(self.settings),
            "rows": self.rows,
            "parameter_count": self.base.parameter_count,
            "variants": {
                variant: {
                    **step.estimate_of(found, name).to_dict(),
                    "swapped": dict(found.swapped),
                    "largest_batch": self.fits.get(variant),
                }
                for variant, found in self.steps.items()
            },
            "dtypes": {
                dtype: {variant: found.peak(name) for variant, found in of_dtype.items()}
                for dtype, of_dtype in self.dtypes.items()
            },
            "optimizers": {
                name: {
                    "state_bytes": update.state_bytes,
                    "bytes_per_parameter": update.state_bytes / self.base.parameter_count,
                    "temporary": update.temporary,
                    "peaks": {variant: found.peak(name) for variant, found in self.steps.items()},
                }
                for name, update in self.base.updates.items()
            },
            "levers": [dataclasses.asdict(lever) for lever in self.levers],
            "left_out": self.left_out,
            "seconds": self.seconds,
        }


class Surveyor:
    """Runs the steps, each once."""

    def __init__(self, subject: Subject, settings: Settings, advance: Callable[[], None]):
        self.subject, self.settings, self.advance = subject, settings, advance
        self._updates: dict[torch.dtype | None, dict[str, Update]] = {}  # by parameters' dtype
        self._steps: dict[Options, Step] = {}
        self._series: Series | None = None
        self._shown: set[object] = set()  # changes that a run of the whole model had
        given = {tensor.dtype for tensor in subject.floating()}
        self._given = given if len(given) == 1 else set()

    def run(self) -> Survey:
        with verdicts_shared():
            return self._run()

    def _run(self) -> Survey:
        settings = self.settings
        known = optimizers.names(self.subject.model(DTYPES[settings.dtype][0]))
        if settings.optimizer not in known:
            names = ", ".join(known)
            raise BadInput(f"--optimizer must be one of {names}, got {settings.optimizer!r}")
        found, left_out = {}, {}
        # After the first the one with all changes: one run of the whole model then shows them.
        for variant in (STOCK, *reversed(VARIANTS[1:])):
            try:
                found[variant] = self._step(settings.dtype, self._options(variant))
            except BadInput as error:
                if not variant.endswith(CHECKPOINTED):
                    raise
                told = error.of("model", "--real") if isinstance(error, BadModel) else str(error)
                left_out[variant] = told
        steps = {variant: found[variant] for variant in VARIANTS if variant in found}
        left_out = {variant: left_out[variant] for variant in VARIANTS if variant in left_out}
        rows = steps[STOCK].rows
        dtypes = {}
        for dtype in [name for name in DTYPES if name != "as given"]:
            found = {
                variant: self._step(dtype, self._options(variant)) for variant in (SWAPPED, STOCK)
            }
            dtypes[dtype] = {variant: found[variant] for variant in (STOCK, SWAPPED)}
        fits = {}
        if settings.memory is not None and rows:
            fits = {variant: self._largest(self._options(variant), rows) for variant in steps}
        levers = self._levers(steps, rows)
        return Survey(settings, rows, steps, dtypes, levers, fits, left_out)

    def _options(self, variant: str) -> Options:
        return Options(
            kinds=self.settings.kinds if variant.startswith(SWAPPED) else (),
            checkpointing=variant.endswith(CHECKPOINTED),
            rows=self.settings.rows,
        )

    def _step(self, dtype: str, options: Options) -> Step:
        cast, autocast = DTYPES[dtype]
        if cast in self._given:  # it already has that dtype
            cast = None
        options = dataclasses.replace(options, dtype=cast, autocast=autocast)
        if options in self._steps:
            return self._steps[options]
        # Optimizers see parameters and gradients alone, which every variant has.
        # In a dtype other than that of the settings an optimizer is given.
        makes = {}
        if not self._updates:
            makes = optimizers.names(self.subject.model(cast))
        elif cast not in self._updates:
            makes = {self.settings.optimizer: optimizers.ALL[self.settings.optimizer]}
        found = self._run_once(options, makes)
        updates = self._updates.setdefault(cast, found.updates)
        found = self._steps[options] = dataclasses.replace(found, updates=updates)
        self.advance()
        return found

    def _run_once(self, options: Options, makes: dict[str, optimizers.Make]) -> Step:
        """Extrapolates from models with a few of the layers, if runs of the whole model were alike:
        one as it is, and one with each change."""
        changes, series, expected = _changes(options), self._series, None
        if series or not self._steps:
            try:
                series = series or Series(self.subject)
                # First, so that trials that swapped modules make once are not its events.
                expected = series.expected(options)
            except Exception:  # of any class: it is the code of a model for all its layers
                pass  # a run of the whole model raises the same
        if expected and changes <= self._shown and self._steps:
            updates = step.updates(self.subject, options.dtype, makes) if makes else {}
            return dataclasses.replace(expected.step, updates=updates)
        trace = step.Trace()
        found = step.run(self.subject, options, makes, trace if expected else None)
        if expected:
            self._series = series if expected.agrees(found, trace) else None
            self._shown |= changes
        return found

    def _levers(self, steps: dict[str, Step], rows: int | None) -> list[Lever]:
        """Each change alone, and then together."""
        base = Options(rows=self.settings.rows)
        taken = steps[SWAPPED].swapped
        alone = {
            f"swap, {kind}": dataclasses.replace(base, kinds=(kind,))
            for kind in KINDS
            if taken[kind]
        }
        tried: list[tuple[str, Options, str | None]] = [
            (name, options, None) for name, options in alone.items()
        ]
        everything = self._options(SWAPPED)
        tried.append(("swap", everything, None))
        if taken["loss"]:
            everything = dataclasses.replace(everything, inplace_loss=True)
            tried.append(("swap, loss in place", everything, None))
            without = dataclasses.replace(self._options(SWAPPED), lazy_logits=True)
            if self._differs(without, steps[SWAPPED]):
                everything = dataclasses.replace(everything, lazy_logits=True)
                tried.append(("swap, without logits", without, None))
        if f"{STOCK}{CHECKPOINTED}" in steps:
            checkpointed = self._options(f"{STOCK}{CHECKPOINTED}")
            tried.append(("checkpointing", checkpointed, None))
            everything = dataclasses.replace(everything, checkpointing=True)
        smallest = self._smallest_optimizer(steps[STOCK])
        if smallest:
            tried.append((smallest, base, smallest))
        tried.append(("all of these", everything, smallest))
        levers = []
        for name, options, optimizer in tried:
            optimizer = optimizer or self.settings.optimizer
            try:
                peak = self._step(self.settings.dtype, options).peak(optimizer)
            except BadInput:
                continue
            most = None
            if self.settings.memory is not None and rows and name not in alone:
                most = self._largest(options, rows, optimizer)
            levers.append(Lever(name, peak, most))
        return levers

    def _differs(self, options: Options, other: Step) -> bool:
        """Whether a step can be run and takes other memory."""
        try:
            found = self._step(self.settings.dtype, options)
        except (BadInput, ValueError, RuntimeError):
            return False
        return dataclasses.replace(found, swapped=other.swapped) != other

    def _smallest_optimizer(self, found: Step) -> str | None:
        """The AdamW of onepass with the smallest states, if smaller than the present ones."""
        ours = {n: u.state_bytes for n, u in found.updates.items() if n.startswith("AdamW")}
        name = min(ours, key=ours.__getitem__)
        kept = found.updates[self.settings.optimizer].state_bytes
        return name if ours[name] < kept else None

    def _largest(self, options: Options, rows: int, optimizer: str | None = None) -> int | None:
        def peak(rows: int) -> int:
            # The given batch has been measured already.
            same = rows == (self.settings.rows or self.subject.rows)
            asked = options if same else dataclasses.replace(options, rows=rows)
            found = self._step(self.settings.dtype, asked)
            return found.peak(optimizer or self.settings.optimizer)

        try:
            return largest(peak, rows, self.settings.memory)
        except (BadInput, RuntimeError):  # a model for one size of batch
            return None


def _changes(options: Options) -> set[object]:
    """Changes under which a model may treat one of its layers in another way."""
    found: set[object] = {options.dtype} - {None}
    if options.kinds is None or options.kinds:
        found.add("swap")
    return found | {name for name in ("autocast", "checkpointing") if getattr(options, name)}


def largest(peak: Callable[[int], int], rows: int, memory: int) -> int:
    """The most rows whose peak is at most memory; 0 if a single row is too much.

    A peak is the largest of several sums that are constant or grow in proportion to the rows. So
    the line through two sizes that fit is below the peak of a larger one, and bounds the answer
    from above. The line from the largest that fits to the smallest that does not is above the peak,
    and bounds it from below.
    """
    known: dict[int, int] = {}

    def fits(rows: int) -> bool:
        known[rows] = peak(rows)
        return known[rows] <= memory

    if fits(rows):
        low, high = rows, 2 * rows
        while fits(high) and high < MOST_ROWS:
            slope = (known[high] - known[low]) // (high - low)
            if slope and known[high] + slope > memory:
                return high
            step = (memory - known[high]) // slope if slope else 7 * high
            low, high = high, min(high + step, MOST_ROWS)
        if known[high] <= memory:
            return high
    elif rows == 1 or not fits(1):
        return 0
    else:
        low, high = 1, rows
    while high - low > 1:
        below = sorted(size for size in known if size < low)[-1:]
        most = high - 1
        for size in below:
            slope = (known[low] - known[size]) / (low - size)
            most = min(most, low + int((memory - known[low]) / slope)) if slope else most
        if most <= low:
            break
        chord = low + int((memory - known[low]) * (high - low) / (known[high] - known[low]))
        for guess in sorted({min(most, max(chord, low + 1)), most, (low + most + 1) // 2}):
            if low < guess < high:
                if fits(guess):
                    low = guess
                else:
                    high = guess
    return low
