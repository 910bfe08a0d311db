"""`onepass estimate`: the memory of a training step before it is run, and the largest batch.

``--json`` writes one object, bytes throughout; keys are added in later versions, never changed:

- ``schema_version`` 1; ``command``: to repeat the run; ``seconds``: how long it took
- ``settings``: dtype, optimizer, kinds, memory, rows, as they were asked for
- ``rows``: of the batch; ``parameter_count``: a tied one counts once
- ``variants`` by name (stock, swapped, and both checkpointed): the fields of `onepass.Estimate`,
  with ``swapped`` (modules by kind) and ``largest_batch`` (null: not asked for, or not known)
- ``dtypes``: peak by dtype (float32, bfloat16, autocast) and variant
- ``optimizers`` by name: ``state_bytes``, ``bytes_per_parameter`` (of state), ``temporary`` (of a
  step) and ``peaks`` by variant
- ``levers``: ``{name, peak, rows}`` of each change to stock, alone and all together; rows is the
  largest batch (null for each kind of the swap alone)
- ``left_out``: by variant, the reason
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
import warnings

from onepass.swapping.matchers import KINDS
from onepass.tools.command import STDOUT, run_command
from onepass.tools.compare.settings import command_line
from onepass.tools.errors import BadInput, BadModel
from onepass.tools.user_model import MODEL_HELP

WIDTH = 80  # of tables that are not printed to a terminal
PICTURE = "onepass-estimate.png"
_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `onepass estimate` to parser."""
    add = parser.add_argument
    add("--model", metavar="PACKAGE.MODULE:FUNCTION", help=f"{MODEL_HELP}; called without the "
        "memory of its parameters where that works")  # fmt: skip
    add("--config", metavar="CONFIG.JSON", help="a config of transformers instead of --model")
    add("--batch", type=int, metavar="N", help="rows of the batch (default: as it comes, or 1)")
    add("--seq", type=int, metavar="N", help="tokens in a row, with --config (default: as many as "
        "the model takes, at most 2048)")  # fmt: skip
    add("--dtype", default="as given", metavar="as given|float32|bfloat16|autocast",
        help="of the first tables; autocast: float32 parameters, forward in bfloat16")  # fmt: skip
    add("--optimizer", metavar="NAME", help="of the tables (default 'torch AdamW'), by its name in "
        "the table of optimizers")  # fmt: skip
    add("--memory", metavar="SIZE", help="such as 24GB or 22.5GiB: adds the largest batch in it")
    add("--kinds", nargs="+", metavar="KIND", help=f"what the swap takes, of {', '.join(KINDS)} "
        "(default: all that pay)")  # fmt: skip
    add("--real", action="store_true", help="run the steps with data: for models that read values")
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="JSON to FILE, or to stdout alone")
    add("--plot", nargs="?", const=PICTURE, metavar="FILE", help="write a picture (default "
        f"{PICTURE})")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Exit code 2 for bad input, 1 if a file could not be written, else 0."""
    return run_command(
        "estimate", args, lambda: _measured(args), _show, _plot, width=WIDTH, tools=("rich",)
    )


def _show(survey, console) -> None:
    from onepass.tools.estimate.report import print_survey

    print_survey(survey, console)


def _plot(survey, format: str) -> bytes:
    from onepass.tools.estimate.plot import plot

    return plot(survey, format)


def _measured(args: argparse.Namespace):
    start = time.perf_counter()
    try:
        survey = _survey(args, _settings(args))
    except BadModel as error:
        named = "--config" if args.config else "--model"
        raise BadInput(error.of(named, "--real")) from error
    command = command_line("estimate", add_arguments, args)
    return dataclasses.replace(survey, command=command, seconds=time.perf_counter() - start)


def _survey(args: argparse.Namespace, settings):
    from onepass.tools.estimate.survey import Surveyor
    from onepass.tools.progress import Phase, Progress

    subject = _subject(args)
    gc.freeze()  # skips existing objects: collecting them repeatedly takes a third longer
    with warnings.catch_warnings(), Progress("estimate", [Phase("Steps")]) as progress:
        warnings.simplefilter("ignore")
        return Surveyor(subject, settings, progress.next()).run()


def _subject(args: argparse.Namespace):
    from onepass.tools.estimate import configs, subject
    from onepass.tools.user_model import load_user_model

    if bool(args.model) == bool(args.config):
        raise BadInput("one of --model and --config must be given")
    if args.model:
        if args.seq is not None:
            raise BadInput("--seq must come with --config: --model brings its own batch")
        return subject.made(lambda: load_user_model(args.model), args.real)
    make = configs.maker(args.config, args.batch or 1, args.seq)
    return subject.made(make, args.real)


def _settings(args: argparse.Namespace):
    from onepass.tools.estimate import optimizers
    from onepass.tools.estimate.survey import DTYPES, Settings

    if args.dtype not in DTYPES:
        raise BadInput(f"--dtype must be one of {', '.join(DTYPES)}, got {args.dtype!r}")
    for kind in args.kinds or ():
        if kind not in KINDS:
            raise BadInput(f"--kinds must be of {', '.join(KINDS)}, got {kind!r}")
    for name in ("batch", "seq"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise BadInput(f"--{name} must be at least 1, got {value}")
    return Settings(
        dtype=args.dtype,
        optimizer=args.optimizer or optimizers.ADAMW,
        kinds=tuple(args.kinds) if args.kinds else None,
        memory=None if args.memory is None else size(args.memory),
        rows=args.batch,
    )


def size(text: str) -> int:
    """Bytes of "24GB" (10^9 each) or "22.5GiB" (2^30).

    Raises:
        BadInput: it is not a size.
    """
    number = text.strip().rstrip("bBkKmMgGtTiI").strip()
    unit = text.strip()[len(number) :].strip().lower()
    try:
        found = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        raise BadInput(f"--memory must be a size such as 24GB or 22.5GiB, got {text!r}") from None
    if not 1 <= found < 1 << 60:
        raise BadInput(f"--memory must be a size such as 24GB or 22.5GiB, got {text!r}")
    return int(found)
