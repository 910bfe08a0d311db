"""The command line: doctor, compare, profile-swap, bench, explain, estimate.

Each subcommand is a module with `add_arguments(parser)` and `main(args) -> exit code`, imported
only when it is used. Bad input ends in one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import onepass
from onepass import _library

COMMANDS = {
    "doctor": "check this installation: versions, libraries, CPU levels, a self-test per operator",
    "compare": "train a model on real text, stock against swapped, torch's AdamW against ours",
    "profile-swap": "time each kind of swap alone on a model, and say what to leave out",
    "bench": "time the operators against torch's and the machine's ceilings",
    "explain": "say which kernels a model's forward runs, and why",
    "estimate": "say what memory a training step will take, before it is run",
}
MODULES = {  # of the commands that are not the module of their name in `onepass.tools`
    "profile-swap": "onepass.tools.profile_swap",
    "explain": "onepass.explain",
    "estimate": "onepass.tools.estimate.command",
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="onepass", description=(onepass.__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--version", action="version", version=f"onepass {onepass.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == asked:
            if name != "doctor" and _library.failure is not None:
                print(_library.failure, file=sys.stderr)
                return 1
            module = importlib.import_module(MODULES.get(name, f"onepass.tools.{name}"))
            module.add_arguments(subparser)
            subparser.set_defaults(main=module.main)
    args = parser.parse_args(argv)
    return args.main(args)
