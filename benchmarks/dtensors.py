"""The time of a call on DTensors beside one on plain tensors, for torch's functions and ours.

    python benchmarks/dtensors.py [--processes 1 2] [--json FILE]

Small tensors, gloo, one thread in each process: nothing is sent, and the time of a call is that of
its dispatch, in microseconds of processor time of the first process, the median of turns in
alternation. "arranged" is ours without a kept plan. On a CPU torch has no rule for attention of
DTensors: ours stands alone there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import multiprocessing
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional as F

from onepass import functional
from onepass._dtensor import plans

ROWS, WIDTH, CLASSES, TURNS, CALLS = 16, 64, 128, 15, 60
COLUMNS = ("ours", "arranged", "ours plain", "torch", "torch plain")


def cases(made: Callable) -> dict[str, tuple[Callable, Callable | None]]:
    """name: (ours, torch's), on tensors that `made(tensor, placement)` spreads."""
    rows, whole = Shard(0), Replicate()
    x, y = made(torch.randn(ROWS, WIDTH), rows), made(torch.randn(ROWS, CLASSES), rows)
    weight, bias = made(torch.randn(WIDTH), whole), made(torch.randn(WIDTH), whole)
    matrix = made(torch.randn(WIDTH, WIDTH), whole)
    target = made(torch.randint(0, CLASSES, (ROWS,)), rows)
    heads = [made(torch.randn(1, 4, ROWS, 16), Shard(1)) for _ in range(3)]
    return {
        "rms_norm": (
            lambda: functional.rms_norm(x, WIDTH, weight),
            lambda: F.rms_norm(x, (WIDTH,), weight),
        ),
        "layer_norm": (
            lambda: functional.layer_norm(x, WIDTH, weight, bias),
            lambda: F.layer_norm(x, (WIDTH,), weight, bias),
        ),
        "linear": (lambda: functional.linear(x, matrix), lambda: F.linear(x, matrix)),
        "cross_entropy": (
            lambda: functional.cross_entropy(y, target, reduction="none"),
            lambda: F.cross_entropy(y, target, reduction="none"),
        ),
        "attention": (
            lambda: functional.scaled_dot_product_attention(*heads, is_causal=True),
            None,
        ),
    }


def microseconds(calls: list[Callable | None], backward: bool) -> list[float | None]:
    """Of each call."""

    def step(call: Callable) -> None:
        output = call()
        if backward:
            output.backward(torch.ones_like(output))

    times: list[list[float]] = [[] for _ in calls]
    for turn in range(TURNS + 1):
        for call, found in zip(calls, times, strict=True):
            if call is None:
                continue
            began = time.process_time()
            for _ in range(CALLS):
                step(call)
            if turn:  # the first is to warm up
                found.append((time.process_time() - began) / CALLS * 1e6)
    return [statistics.median(found) if found else None for found in times]


def arranged(call: Callable) -> Callable:
    """The call, for which no plan is kept."""
    key_of = plans.key_of

    def without_plan():
        plans.key_of = lambda *given: None
        try:
            return call()
        finally:
            plans.key_of = key_of

    return without_plan


def measure(rank: int, processes: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes
    )
    mesh, rows = init_device_mesh("cpu", (processes,)), []
    for backward in (False, True):

        def placed(value, place, needs=backward):
            spread = distribute_tensor(value, mesh, [place])
            return spread.requires_grad_(needs and value.is_floating_point())

        def plain(value, place, needs=backward):
            spread = placed(value, place).to_local().detach()
            return spread.requires_grad_(needs and value.is_floating_point())

        of_parts, of_plain = cases(placed), cases(plain)
        for name, (ours, stock) in of_parts.items():
            calls = [ours, arranged(ours), of_plain[name][0], stock, of_plain[name][1]]
            found = dict(zip(COLUMNS, microseconds(calls, backward), strict=True))
            rows.append({"processes": processes, "call": name, "backward": backward, **found})
    torch.distributed.destroy_process_group()
    if rank == 0:
        Path(results).write_text(json.dumps(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print("processes  call           backward  " + "".join(f"{name:>13}" for name in COLUMNS))
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            results = os.path.join(folder, "results")
            given = (processes, os.path.join(folder, "store"), results)
            multiprocessing.spawn(measure, given, processes)
            found = json.loads(Path(results).read_text())
        for row in found:
            times = "".join(
                f"{'' if row[name] is None else format(row[name], '.1f'):>13}" for name in COLUMNS
            )
            print(f"{processes:<11}{row['call']:<15}{row['backward']!s:<10}{times}", flush=True)
        rows += found
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
