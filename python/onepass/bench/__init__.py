"""`onepass bench`: the operators against torch's fastest way and against the machine's ceilings.

Results are checked before they are timed. Memory that is freed stays with the process, for all
variants alike (see `machine.recycled_memory`): otherwise page faults of fresh outputs hide every
kernel beyond the cache.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys

FAMILIES = ("norm", "dropout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("family", choices=[*FAMILIES, "all"], nargs="?", default="all")
    parser.add_argument("--case", metavar="GLOB", default="*", help="only cases of this name")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's own number by default")
    parser.add_argument("--seconds", type=float, default=0.7, help="per case (default: 0.7)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, few rounds: a smoke run"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")


def main(args: argparse.Namespace) -> int:
    try:
        import numpy  # noqa: F401
        import rich  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"onepass bench needs {error.name}: pip install 'onepass[tools]'", file=sys.stderr)
        return 2
    if args.threads is not None and args.threads < 1:
        print(f"bench: --threads must be at least 1, got {args.threads}", file=sys.stderr)
        return 2

    import torch

    from onepass.bench import dropout, norm
    from onepass.bench.ceilings import BIG_BYTES, ceilings
    from onepass.bench.machine import command_line, machine_facts, recycled_memory
    from onepass.bench.report import print_footer, print_table, progress

    if args.threads:
        torch.set_num_threads(args.threads)
    families = FAMILIES if args.family == "all" else (args.family,)
    modules = {"norm": norm, "dropout": dropout}
    cases = [
        case
        for family in families
        for case in modules[family].cases(args.quick)
        if fnmatch.fnmatch(case.name, args.case)
    ]
    if not cases:
        print(f"bench: --case must match a case, got {args.case}", file=sys.stderr)
        return 2

    from onepass.bench.case import measure

    seconds = min(args.seconds, 0.05) if args.quick else args.seconds
    with recycled_memory() as recycled:
        limits = ceilings(BIG_BYTES // 16 if args.quick else BIG_BYTES)
        rows = [
            measure(case, seconds=seconds, compiled=not args.no_compile) for case in progress(cases)
        ]
    facts = machine_facts()
    print_table(rows)
    print_footer(facts, limits, recycled, command_line())
    if args.json:
        result = {
            "command": command_line(),
            "machine": facts,
            "ceilings": limits.to_dict(),
            "recycled_memory": recycled,
            "rows": [row.to_dict() for row in rows],
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return 0 if all(not row.correct.startswith("NO") for row in rows) else 1
