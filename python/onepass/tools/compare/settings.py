"""The flags of `onepass compare`, checked and filled in."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import nn

import onepass
from onepass import _library, _malloc
from onepass._policy.precision import check_precision, quantizes
from onepass.swapping.matchers import KINDS
from onepass.swapping.sample import Decision
from onepass.tools.command import STDOUT
from onepass.tools.errors import BadInput
from onepass.tools.machine import medium_has_effect, medium_precision
from onepass.tools.model import Sizes
from onepass.tools.user_model import MODEL_HELP, telling_errors

# One step of the speed phase at these sizes takes a few seconds on two cores; the sameness phase
# trains a model small enough for a thousand steps in the time of thirty such steps.
SPEED = Sizes()
SAMENESS = Sizes(layers=2, heads=4, width=128, block=128, batch=4)
QUICK_SPEED = Sizes(layers=2, heads=2, width=32, block=64, batch=2)
QUICK_SAMENESS = Sizes(layers=1, heads=2, width=32, block=32, batch=4)
SIZE_FLAGS = ("layers", "heads", "width", "block", "batch")
OPTIMIZERS = ("default", "fused", "onepass")
MASTERS = ("none", "fp32", "remainder16", "stochastic")
STATE_DTYPES = ("float32", "bfloat16", "int8")
FLOAT32 = "float32"  # the precision that is always compared


@dataclass(frozen=True)
class Settings:
    """All choices of a measurement; JSON-able except the device and the dtype."""

    speed: Sizes
    sameness: Sizes
    dropouts: tuple[float, ...]  # empty for --model, whose dropout is not changed
    rmsnorm: bool
    text: tuple[str, ...]
    steps: int | None  # None: chosen by the time that a step of --model takes
    pairs: int
    kinds: tuple[str, ...]  # that the swap includes; empty: its default
    auto: bool  # the swap takes what gains
    compile: bool
    generate: int  # tokens; 0: training is compared
    keep_memory: bool
    precisions: tuple[str, ...]  # of float32 products beside float32; training is compared in each
    optimizers: tuple[str, ...]  # of OPTIMIZERS, always with "fused", the baseline
    masters: tuple[str, ...]  # of MASTERS; empty: only unchanged parameters
    state_dtypes: tuple[str, ...]  # of STATE_DTYPES; empty: only torch's
    model: str | None
    device: torch.device
    dtype: torch.dtype
    seed: int
    threads: int
    quick: bool
    command: str
    decisions: dict[str, Decision] = field(default_factory=dict)  # of --auto, by precision

    def swap(
        self, model: nn.Module, kinds: Sequence[str] = (), precision: str = FLOAT32, **options
    ) -> onepass.Report:
        """Swaps a model in place.

        Args:
            kinds: others than the settings'.
            precision: of `compared`; to run the model `at` it is the caller's.
            options: of `onepass.swap`.
        """
        if precision in self.decisions:
            options["choice"] = self.decisions[precision].to_dict()
        own = precision if quantizes(precision) else None
        with at(precision)():
            kinds = kinds or self.kinds or None
            return onepass.swap(model, kinds=kinds, precision=own, **options)

    @property
    def compared(self) -> tuple[str, ...]:
        """The precisions of float32 products in which the swapped model runs."""
        return (FLOAT32,) if self.generate else (FLOAT32, *self.precisions)

    def decided(self, model: nn.Module, batch: object) -> Settings:
        """Settings; with --auto those that swap what gains on this batch, in the mode that the
        model is in and at the precision of each variant; the model stays as it is."""
        if not self.auto:
            return self
        decisions = {}
        for precision in self.compared:
            with telling_errors(model, batch), self.autocast():
                report = self.swap(model, precision=precision, sample=batch, dry_run=True)
            decisions[precision] = report._decision
        return replace(self, decisions=decisions)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, self.dtype == torch.bfloat16)

    def to_dict(self) -> dict:
        """The flags; `task` has what was decided too."""
        fields = asdict(self)
        del fields["command"], fields["decisions"]
        return fields | {
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            **{name: list(fields[name]) for name in _TUPLES},
        }

    def task(self) -> dict:
        """Arguments for another process."""
        decisions = {name: decision.to_dict() for name, decision in self.decisions.items()}
        return self.to_dict() | {"decisions": decisions}

    @classmethod
    def from_dict(cls, fields: dict, command: str) -> Settings:
        """The inverse of `to_dict` and of `task`."""
        decisions = fields.get("decisions", {})
        return cls(
            **fields
            | {
                "speed": Sizes(**fields["speed"]),
                "sameness": Sizes(**fields["sameness"]),
                **{name: tuple(fields[name]) for name in _TUPLES},
                "device": torch.device(fields["device"]),
                "dtype": getattr(torch, fields["dtype"]),
                "command": command,
                "decisions": {name: Decision.from_dict(d) for name, d in decisions.items()},
            }
        )


def at(precision: str) -> Callable[[], contextlib.AbstractContextManager]:
    """The context of steps at a precision: that of torch's setting for "medium"."""
    return medium_precision if precision == "medium" else contextlib.nullcontext


_OF_TRAINING = ("steps", "keep_memory", "precision", "optimizers", "master", "state_dtype", "plot")
_TUPLES = ("dropouts", "text", "kinds", "precisions", "optimizers", "masters", "state_dtypes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `onepass compare` to parser."""
    add_shared_arguments(parser)
    add = parser.add_argument
    add("--steps", type=int, metavar="N", help="steps of the sameness phase (default 200)")
    add("--auto", action="store_true", help="swap what gains on the batch, as "
        "onepass.swap(model, sample=batch), for each precision")  # fmt: skip
    add("--compile", action="store_true", help="add compiled stock and compiled swapped")
    add("--keep-memory", action="store_true", help="add stock and swapped in a process that keeps "
        "the memory it has freed (onepass.keep_freed_memory)")  # fmt: skip
    add("--precision", nargs="+", metavar="NAME", help="of float32 products on a CPU: float32 "
        "(always), medium, int8, or int8: and its parts, also joined by commas (default: float32, "
        "and medium where it changes torch's products)")  # fmt: skip
    add("--optimizers", nargs="+", metavar="NAME", help="AdamW steps timed apart: torch's default, "
        "torch's fused (always), onepass's (default: default fused onepass)")  # fmt: skip
    add("--master", nargs="+", metavar="MODE", help="bfloat16 parameters too, of which onepass's "
        "AdamW keeps this of the float32 result: one or more of none, fp32, remainder16, "
        "stochastic")  # fmt: skip
    add("--state-dtype", nargs="+", metavar="DTYPE", help="moments of onepass's AdamW, with every "
        "--master or alone: one or more of float32, bfloat16, int8")  # fmt: skip
    add("--plot", nargs="?", const="onepass-compare.png", metavar="FILE",
        help="write a picture (default onepass-compare.png)")  # fmt: skip


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the model, the data and the number of timed steps; sets other flags of
    `add_arguments` to their defaults."""
    parser.set_defaults(
        steps=None, auto=False, compile=False, keep_memory=False, precision=None, optimizers=None,
        master=None, state_dtype=None, plot=None,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", metavar="PACKAGE.MODULE:FUNCTION",
        help=f"a model of your own, not the GPT: {MODEL_HELP}")  # fmt: skip
    add("--generate", type=int, metavar="N", help="inference of --model, not training: prefill, "
        "and decoding of N tokens where it has generate(); else its forward")  # fmt: skip
    add("--text", nargs="+", metavar="FILE", help="train on these files, not the standard library")
    add("--rmsnorm", action="store_true", help="Llama layout: nn.RMSNorm and no bias")
    for name in SIZE_FLAGS:
        default = getattr(SPEED, name)
        add(
            f"--{name}", type=int, metavar="N", help=f"of the GPT that is timed (default {default})"
        )
    add("--dropout", type=float, nargs="+", metavar="P", help="one or more (default 0.1 0)")
    add("--pairs", type=int, metavar="N", help="timed pairs of steps, at least (default 8)")
    add("--kinds", nargs="+", metavar="KIND", help="what the swap takes, of "
        f"{', '.join(KINDS)} (default: all that pay)")  # fmt: skip
    add("--device", default="cpu", metavar="DEVICE", help="default cpu")
    add("--dtype", default="auto", metavar="auto|float32|bfloat16",
        help="bfloat16 is autocast; auto: bfloat16 on CUDA, float32 on CPU")  # fmt: skip
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="JSON to FILE, or to stdout alone")
    add("--seed", type=int, default=0, metavar="N", help="weights, batches, dropout (default 0)")
    add("--threads", type=int, metavar="N", help="torch's threads (default: as torch chooses)")
    add("--quick", action="store_true", help="tiny sizes: a trial of the tool, not a measurement")


def read_settings(
    args: argparse.Namespace,
    command: str = "compare",
    flags: Callable[[argparse.ArgumentParser], None] = add_arguments,
) -> Settings:
    """Settings from parsed flags; raises BadInput with one line on flags that cannot be used.

    Args:
        command, flags: the command of onepass, and the function that adds its flags to a parser.
    """
    default = QUICK_SPEED if args.quick else SPEED
    sizes = {name: getattr(args, name) for name in SIZE_FLAGS}
    given = {name: value for name, value in sizes.items() if value is not None}
    if args.model and (given or args.dropout or args.text or args.rmsnorm):
        raise BadInput("--model brings its own sizes, dropout and data: drop the flags for those")
    if args.dropout is not None and len(set(args.dropout)) != len(args.dropout):
        raise BadInput(f"--dropout must list different values, got {args.dropout}")
    optimizers = _several(args.optimizers, "--optimizers", OPTIMIZERS) or OPTIMIZERS
    masters = _several(args.master, "--master", MASTERS)
    state_dtypes = _several(args.state_dtype, "--state-dtype", STATE_DTYPES)
    if (masters or state_dtypes) and "onepass" not in optimizers:
        raise BadInput(
            "--master and --state-dtype are settings of onepass's AdamW: --optimizers must list "
            f"onepass, got {' '.join(optimizers)}"
        )
    kinds = _several(args.kinds, "--kinds", KINDS)
    for p in args.dropout or ():
        if not 0.0 <= p < 1.0:
            raise BadInput(f"--dropout must lie in [0, 1), got {p:g}")
    if args.generate is not None:
        if not args.model:
            raise BadInput(
                "--generate must come with --model, got none; examples/generate.py decodes the GPT"
            )
        if args.generate < 2:
            raise BadInput(f"--generate must be at least 2 tokens, got {args.generate}")
        for name in _OF_TRAINING:
            if getattr(args, name):
                raise BadInput(f"--generate trains nothing: drop --{name.replace('_', '-')}")
    for name in ("steps", "pairs", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise BadInput(f"--{name} must be at least 1, got {value}")
    if args.seed < 0:
        raise BadInput(f"--seed must be at least 0, got {args.seed}")
    steps = args.steps or (10 if args.quick else None if args.model else 200)
    device = _device(args.device)
    dtype = _dtype(args.dtype, device)
    return Settings(
        speed=Sizes(**{**default.__dict__, **given}),
        sameness=QUICK_SAMENESS if args.quick else SAMENESS,
        dropouts=() if args.model else tuple(args.dropout or (0.1, 0.0)),
        rmsnorm=args.rmsnorm,
        text=tuple(args.text or ()),
        steps=steps,
        pairs=args.pairs or (3 if args.quick else 8),
        kinds=kinds,
        auto=args.auto,
        compile=args.compile,
        generate=args.generate or 0,
        keep_memory=_keep_memory(args.keep_memory, device),
        precisions=_precisions(args.precision, device, dtype),
        optimizers=tuple(name for name in OPTIMIZERS if name in (*optimizers, "fused")),
        masters=masters,
        state_dtypes=state_dtypes,
        model=args.model,
        device=device,
        dtype=dtype,
        seed=args.seed,
        threads=args.threads or torch.get_num_threads(),
        quick=args.quick,
        command=command_line(command, flags, args),
    )


def _several(values: list[str] | None, flag: str, known: tuple[str, ...]) -> tuple[str, ...]:
    values = tuple(values or ())
    for value in values:
        if value not in known:
            raise BadInput(f"{flag} must be of {', '.join(known)}, got {value!r}")
    if len(set(values)) != len(values):
        raise BadInput(f"{flag} must list different values, got {' '.join(values)}")
    return values


def _precisions(
    given: list[str] | None, device: torch.device, dtype: torch.dtype
) -> tuple[str, ...]:
    """The precisions of float32 products beside float32."""
    is_float32 = device.type == "cpu" and dtype == torch.float32
    if given is None:
        return ("medium",) if is_float32 and medium_has_effect() else ()
    names = [name for value in given for name in value.split(",")]
    for name in names:
        try:
            check_precision("", None if name == FLOAT32 else name)
            known = name in (FLOAT32, "medium") or quantizes(name)
        except ValueError:
            known = False
        if not known:
            raise BadInput(
                "--precision must be of float32, medium, int8, int8:output+dinput+dweight+"
                f"stochastic or some of these parts, got {name!r}"
            )
    if len({*names}) != len(names):
        raise BadInput(f"--precision must list different values, got {' '.join(names)}")
    others = tuple(name for name in names if name != FLOAT32)
    if others and not is_float32:
        raise BadInput("--precision is of float32 on a CPU: drop it, or --device and --dtype")
    return others


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"--device must be cpu or cuda, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"--device must be cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"--device must be one that torch sees, got {name!r}: torch has no CUDA")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise BadInput(f"--device must be one that torch sees, got {name!r}: it sees {seen}")
    if device.type == "cuda" and (obstacle := _library.no_cuda()):
        raise BadInput(f"--device must be one that onepass runs on, got {name!r}: {obstacle}")
    return device


def _keep_memory(wanted: bool, device: torch.device) -> bool:
    if wanted and device.type != "cpu":
        raise BadInput(f"--keep-memory must come with --device cpu, got {device}")
    if wanted and (obstacle := _malloc.obstacle()):
        raise BadInput(f"--keep-memory must have glibc's malloc: {obstacle}")
    return wanted


def make_current(device: torch.device) -> None:
    """Makes it torch's current CUDA device, for clock stamps, memory and synchronisation."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    # bfloat16 does not pay on most CPUs: without the instructions torch has no usable bf16 GEMM.
    known = {
        "auto": torch.bfloat16 if device.type == "cuda" else torch.float32,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
    }
    if name not in known:
        raise BadInput(f"--dtype must be auto, float32 or bfloat16, got {name!r}")
    return known[name]


def command_line(
    command: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    args: argparse.Namespace,
) -> str:
    """The command line that repeats a run."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["onepass", command]
    for action in parser._actions:
        value = getattr(args, action.dest, action.default)
        if value == action.default or not action.option_strings or action.dest == "help":
            continue
        words.append(action.option_strings[-1])
        if isinstance(value, list):
            words.extend(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
        elif value is not True and value != action.const:
            words.append(str(value))
    return shlex.join(words)
