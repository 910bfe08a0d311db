"""`onepass bench`: the operators against torch's fastest way and against the machine's ceilings.

Results are checked before they are timed. Freed memory stays in the process, for all variants
alike (see `machine.recycled_memory`): otherwise page faults of fresh outputs hide every kernel
beyond the cache. Cases named `fresh` show that, under the allocator's defaults; those named
`cold` take inputs that are not in the cache, as inside a model. On CUDA every case is cold.

``--json`` writes one object: ``command``, ``device`` (cpu or cuda), ``machine`` (facts by name),
``ceilings`` (GB/s and GFLOP/s), ``recycled_memory`` (whether the allocator complied; null on CUDA),
``failed`` (errors by case), ``left_out`` (cases that --quick, --limit or Ctrl-C left out),
``quick`` (whether --quick was given) and ``rows``: ``name``, ``memory``, ``times`` by variant
(ours, eager, compile, copy: median, p10, p90, fastest, calls per batch, page faults per call),
``rounds_at_each_place``, ``against_eager`` and ``against_compile`` (how many times faster, with the
95 % interval), ``against_others``,
``unavailable`` (further variants that do not run here, with their errors), ``share_of_copy`` (or of
an update, a read, or arithmetic), ``gbps``, ``gflops`` (both null where they are no measure),
``right``, ``check``, ``error_share_of_bound``, ``unchecked`` (on CUDA the timed tensors' own
results are checked too: why they were not), ``goal`` (from --goals; else nulls), ``sm_mhz`` and
``watts`` (a CUDA device's clock and power meanwhile; else nulls);
``other_load`` is the number of cores that others kept busy meanwhile (null on CUDA).
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import math
import pkgutil
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace

from onepass import _library
from onepass.tools.bench import families
from onepass.tools.bench.goals import Goals, read_goals
from onepass.tools.command import STDOUT, files_of, require_tools
from onepass.tools.errors import BadInput
from onepass.tools.output_file import OutputFile, write_or_say

FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(families.__path__)))
SECONDS = 0.7
QUICK_SECONDS = 10.0  # of a family; the start and the last case may take as long again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help=f"{', '.join(FAMILIES)}; all (the default)"
    )
    parser.add_argument("--case", metavar="GLOB", default="*", help="only cases of this name")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's own number by default")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"per case (default: {SECONDS})"
    )
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS", help="begin no case after that"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one small shape, few rounds, no torch.compile, "
        f"and no case after {QUICK_SECONDS:g} seconds of a family: a smoke run",
    )
    parser.add_argument(
        "--stream", action="store_true", help="print each figure as soon as it is measured"
    )
    parser.add_argument(
        "--goals", metavar="FILE", help="factors to reach, by case, such as benchmarks/goals.json"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well; - prints")
    parser.add_argument("--plot", metavar="FILE", help="draw the figures (png, svg, pdf)")


def main(args: argparse.Namespace) -> int:
    """Measures and prints; returns 0, 1 if a case failed or was wrong or the file could not be
    written, 2 for bad input, 130 after Ctrl-C, which ends the measuring alone."""
    try:
        require_tools(args, ("rich", "numpy"))
        return _main(args)
    except BadInput as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _main(args: argparse.Namespace) -> int:
    for family in args.families:
        if family not in (*FAMILIES, "all"):
            raise BadInput(f"FAMILY must be one of {', '.join(FAMILIES)} and all, got {family}")
    if args.threads is not None and args.threads < 1:
        raise BadInput(f"--threads must be at least 1, got {args.threads}")
    if not args.seconds > 0:
        raise BadInput(f"--seconds must be positive, got {args.seconds}")
    if not args.limit > 0:
        raise BadInput(f"--limit must be positive, got {args.limit}")

    import torch

    from onepass._C import cpu_level
    from onepass._threads import on_threads

    if args.device == "cuda" and (obstacle := _library.no_cuda()):
        raise BadInput(f"--device must be one that onepass runs on, got cuda: {obstacle}")
    cases = [case for case in _cases(args) if fnmatch.fnmatchcase(case.name, args.case)]
    if not cases:
        raise BadInput(f"--case must match a case, such as norm/*/forward, got {args.case}")
    goals = Goals({})
    if args.goals is not None:
        try:
            goals = read_goals(args.goals, args.device, cpu_level())
        except (OSError, ValueError) as error:
            raise BadInput(
                f"--goals must name a file of goals, got {args.goals}: {error}"
            ) from None
    files = files_of(args)
    with on_threads(args.threads or torch.get_num_threads()):
        result, rows, limits, interrupted = _run(cases, args, goals, files.get("--json"))
    if args.json == STDOUT:
        print(json.dumps(result, indent=1))
    else:
        from onepass.tools.bench.report import print_doubts, print_footer, print_tables

        print_doubts(result, rows)
        print_tables(rows)
        print_footer(result, limits)
    written = [_write_json(files.get("--json"), result)]
    if "--plot" in files:
        from onepass.tools.bench.plot import plot
        from onepass.tools.plotting import format_of

        picture = plot(result, format_of(args.plot))
        written.append(write_or_say("bench", "--plot", files["--plot"], picture))
    if interrupted:
        return 130
    return 1 if not all(written) or result["failed"] or any(row.check for row in rows) else 0


def _cases(args: argparse.Namespace) -> list:
    wanted = set(args.families or FAMILIES)
    names = [family for family in FAMILIES if family in wanted or "all" in wanted]
    modules = [importlib.import_module(f"onepass.tools.bench.families.{name}") for name in names]
    return [case for module in modules for case in module.cases(args.quick, args.device)]


def _write_json(file: OutputFile | None, result: dict) -> bool:
    return write_or_say("bench", "--json", file, json.dumps(result, indent=1).encode())


def _run(cases: list, args: argparse.Namespace, goals: Goals, file: OutputFile | None):
    """(the JSON object, rows in the order of cases, ceilings, whether Ctrl-C came).

    With --stream `file` has the figures so far after each case, whatever ends this process.
    """
    from onepass.tools.bench.case import MIN_ROUNDS, PLACES, measure
    from onepass.tools.bench.report import figure, progress
    from onepass.tools.ceilings import BIG_BYTES, CUDA_BIG_BYTES, ceilings, cuda_ceilings
    from onepass.tools.harness import MIN_ROUNDS as ROUNDS_AT_ONE_PLACE
    from onepass.tools.machine import OtherLoad, command_line, machine_facts, recycled_memory
    from onepass.tools.sensors import Sensors

    on_cuda = args.device == "cuda"
    seconds, places, rounds = args.seconds, PLACES, MIN_ROUNDS
    if on_cuda:
        places, rounds = 1, ROUNDS_AT_ONE_PLACE
    if args.quick:
        seconds, places, rounds = min(args.seconds, 0.02), 1, MIN_ROUNDS
    rows, failed, left_out = {}, {}, []
    ordered = progress(sorted(cases, key=lambda case: not case.fresh))
    pending = next(ordered, None)
    start, interrupted = time.perf_counter(), False
    of_family: Counter[str] = Counter()  # seconds
    most = QUICK_SECONDS if args.quick else math.inf

    def run_while(fresh: bool) -> None:
        nonlocal pending, interrupted
        while pending is not None and pending.fresh == fresh:
            begin, family = time.perf_counter(), pending.name.partition("/")[0]
            if interrupted or begin - start > args.limit or of_family[family] > most:
                left_out.append(pending.name)
            else:
                try:
                    row = measure(
                        pending,
                        seconds=seconds,
                        compiled=not (args.no_compile or args.quick),
                        places=places,
                        rounds=rounds,
                        limits=limits,
                        goal=goals.of(pending.name),
                    )
                    if sensors is not None:  # the timing comes last
                        now = time.perf_counter()
                        row = replace(row, load=sensors.between(now - seconds, now))
                    rows[pending.name] = row
                    if args.stream:
                        print(figure(row), flush=True)
                        _write_json(file, found())
                except KeyboardInterrupt:  # the figures of earlier cases are still reported
                    interrupted = True
                    left_out.append(pending.name)
                except Exception as error:  # and those of the others
                    traceback.print_exc()
                    text = str(error).strip().partition("\n")[0]
                    failed[pending.name] = f"{type(error).__name__}: {text}"
            of_family[family] += time.perf_counter() - begin
            pending = next(ordered, None)

    def found() -> dict:
        return {
            "command": command_line(),
            "device": args.device,
            "machine": machine,
            "ceilings": limits.to_dict(),
            "recycled_memory": recycled,
            "other_load": None if on_cuda else others.cores(),
            "failed": failed,
            "left_out": left_out,
            "quick": args.quick,
            "rows": [rows[case.name].to_dict() for case in cases if case.name in rows],
        }

    machine, others, recycled = machine_facts(), OtherLoad(), None
    sensors = Sensors() if on_cuda else None
    if sensors is not None:
        limits = cuda_ceilings(CUDA_BIG_BYTES // 16, 2048) if args.quick else cuda_ceilings()
        run_while(fresh=False)
        sensors.close()
    else:
        limits = ceilings(BIG_BYTES // 16 if args.quick else BIG_BYTES)
        run_while(fresh=True)  # first: malloc's own adaptation ends with the first mallopt
        with recycled_memory() as recycled:
            run_while(fresh=False)
    in_order = [rows[case.name] for case in cases if case.name in rows]
    return found(), in_order, limits, interrupted
