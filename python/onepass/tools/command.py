"""Shared by the commands that measure: the files they write, and their exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from onepass.tools.errors import BadInput
from onepass.tools.output_file import OutputFile, write_or_say

if TYPE_CHECKING:
    from rich.console import Console

STDOUT = "-"
WIDTH_OFF_TERMINAL = 120


class Outcome(Protocol):
    """Findings of a command."""

    def to_dict(self) -> dict: ...


def run_command(
    name: str,
    args: argparse.Namespace,
    measure: Callable[[], Outcome],
    show: Callable[[Outcome, Console], None],
    plot: Callable[[Outcome, str], bytes] | None = None,
    *,
    width: int = WIDTH_OFF_TERMINAL,
    tools: tuple[str, ...] = ("rich", "numpy"),
) -> int:
    """Measures, shows the outcome, and writes the files of --json and --plot.

    Args:
        name: of the command.
        measure: returns the outcome, or raises BadInput.
        show: prints tables of the outcome.
        plot: the outcome's picture, as a file of the given format.
        width: of tables that are not printed to a terminal.
        tools: packages of onepass[tools] that are needed; matplotlib is, with --plot.

    Returns:
        The exit code: 0; 2 for bad input; 1 if a file could not be written.
    """
    try:
        require_tools(args, tools)
        files = files_of(args)
        outcome = measure()
    except BadInput as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    as_json = json.dumps(outcome.to_dict(), indent=2)
    if args.json == STDOUT:
        print(as_json)
    else:
        from onepass.tools.tables import console_of

        show(outcome, console_of(width))
    written = [write_or_say(name, "--json", files.get("--json"), as_json.encode())]
    if "--plot" in files:
        from onepass.tools.plotting import format_of

        picture = plot(outcome, format_of(args.plot))
        written.append(write_or_say(name, "--plot", files["--plot"], picture))
    return 0 if all(written) else 1


def require_tools(args: argparse.Namespace, tools: tuple[str, ...]) -> None:
    """Raises BadInput if a package of onepass[tools] that this run needs is missing."""
    for package in (*tools, *(("matplotlib",) if _picture(args) else ())):
        try:
            __import__(package)
        except ImportError:
            raise BadInput(f"{package} is missing: pip install 'onepass[tools]'") from None


def files_of(args: argparse.Namespace) -> dict[str, OutputFile]:
    """Files to be written, by flag: tried now, not after minutes of measuring.

    Raises:
        BadInput: a file cannot be written, or no picture has its format.
    """
    if _picture(args):
        from onepass.tools.plotting import format_of

        try:
            format_of(args.plot)
        except ValueError as error:
            raise BadInput(str(error)) from None
    files = {}
    for flag, path in (("--plot", _picture(args)), ("--json", args.json)):
        if path in (None, STDOUT):
            continue
        try:
            files[flag] = OutputFile(path)
        except OSError as error:
            raise BadInput(f"{flag} must name a file to write: {error.strerror}: {path}") from None
    return files


def _picture(args: argparse.Namespace) -> str | None:
    return getattr(args, "plot", None)
