"""Swaps hundreds of architectures, each tiny and in a process of its own, and judges each.

    python benchmarks/sweep.py                       # all; continues a run that was interrupted
    python benchmarks/sweep.py --only 'bert*' --again
    python benchmarks/sweep.py --table               # prints the table of the results kept

For each: `swap`, `report.verify` with and without padding, in train and eval mode, a training step,
`swap` again, copies, `unswap` (outputs, state_dict and classes as before), times. timm and
diffusers are left out if they are not installed; they are used without their dependencies:
`pip install --no-deps timm diffusers` suffices.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import importlib.util
import json
import multiprocessing
import os
import pathlib
import random
import sys
import time

import sweep_check
import sweep_models
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_PRELOADED = ["torch", "onepass", "transformers", "sweep_models", "sweep_check"]
_KINDS = ("norm", "attention", "dropout", "linear")


def main() -> int:
    options = _options()
    kept = _load(options.json)
    if options.table:
        print(table(kept.values()))
        return 0
    chosen = [
        (family, name)
        for family in options.families
        if importlib.util.find_spec(family) is not None
        for name in sweep_models.FAMILIES[family][0]()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in options.only)
    ]
    missing = [
        (family, name)
        for family, name in chosen
        if options.again
        or _key(family, name, options.dtype) not in kept
        or (options.failed and not _good(kept[_key(family, name, options.dtype)]))
    ]
    random.Random(0).shuffle(missing)  # an interrupted run has seen some of everything
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(missing))
        for family, name in missing:
            progress.update(task, description=f"{family} {name}")
            row = _in_process(family, name, options)
            kept[_key(family, name, options.dtype)] = row
            _save(options.json, kept)
            if not _good(row) and row["verdict"] != "not built":
                progress.console.print(_line(row), markup=False, highlight=False)
            progress.advance(task)
    rows = [kept[_key(*item, options.dtype)] for item in chosen]
    print(table(rows))
    return 0 if all(_good(row) for row in rows if row["verdict"] != "not built") else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(sweep_models.FAMILIES))
    parser.add_argument("--only", nargs="+", default=["*"], help="globs on names")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--again", action="store_true", help="also what the results file holds")
    parser.add_argument("--failed", action="store_true", help="also what failed in that file")
    parser.add_argument("--table", action="store_true", help="print the file's table, run nothing")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("build/sweep.json"))
    parser.add_argument("--seconds", type=float, default=180.0, help="for each architecture")
    parser.add_argument("--memory", type=float, default=14.0, help="GiB of address space for each")
    return parser.parse_args()


def _in_process(family: str, name: str, options: argparse.Namespace) -> dict:
    """The row of one architecture; a process that dies or takes too long is a row too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, family, name, options.dtype, options.memory)
    process = context.Process(target=sweep_check.run, args=arguments, daemon=True)
    start = time.monotonic()
    process.start()
    sender.close()
    row = {"family": family, "name": name, "dtype": options.dtype, "verdict": "crash", "errors": {}}
    try:
        if receiver.poll(options.seconds):
            row = receiver.recv()
        else:
            row["errors"]["process"] = f"took more than {options.seconds:g} s"
    except EOFError:
        process.join(10)
        row["errors"]["process"] = f"died with exit code {process.exitcode}"
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        receiver.close()
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def _key(family: str, name: str, dtype: str) -> str:
    return f"{family}/{name}/{dtype}"


def _good(row: dict) -> bool:
    return row["verdict"] == "same"


def _load(path: pathlib.Path) -> dict[str, dict]:
    return json.loads(path.read_text()) if path.exists() else {}


def _save(path: pathlib.Path, rows: dict[str, dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1))
    os.replace(partial, path)


def table(rows) -> str:
    """Markdown: a summary, then one line per architecture that could be built."""
    rows = list(rows)
    built = [row for row in rows if row["verdict"] != "not built"]
    lines = [f"{len(built)} architectures"]
    for family in sweep_models.FAMILIES:
        verdicts = collections.Counter(r["verdict"] for r in built if r["family"] == family)
        if verdicts:
            found = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
            lines.append(f"- {family}: {sum(verdicts.values())}: {found}")
    shares = [_share(row) for row in built if "verified" in row]
    if shares:
        lines.append(f"- largest share of the limit: {max(shares):.2f}")
    unbuilt = [row["name"] for row in rows if row["verdict"] == "not built"]
    lines.append(f"- {len(unbuilt)} not built from small settings (not judged)")
    lines += [
        "",
        "| architecture | verdict (of the limit) | norms, attention, dropout, linear |"
        " skipped, unknown | time | remarks |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *map(_line, built)])


def _line(row: dict) -> str:
    counts = collections.Counter()
    for kind, _, count in row.get("swapped", ()):
        counts[kind] += count
    others = [sum(entry[-1] for entry in row.get(part, ())) for part in ("skipped", "unknown")]
    verdict = row["verdict"] + (f" {_share(row):.2f}" if row.get("verified") else "")
    time = f"{row['ms']['stock'] / row['ms']['swapped']:.2f}x" if "ms" in row else ""
    remarks = [f"{stage}: {text}" for stage, text in row.get("errors", {}).items()]
    remarks += [
        f"{name}: {found['text']}"
        for name, found in row.get("verified", {}).items()
        if not found["ok"]
    ]
    swapped = " ".join(str(counts[kind]) for kind in _KINDS)
    cells = (row["name"], verdict, swapped, " ".join(map(str, others)), time, "; ".join(remarks))
    return "| " + " | ".join(cells) + " |"


def _share(row: dict) -> float:
    return max((found["share"] for found in row["verified"].values()), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
