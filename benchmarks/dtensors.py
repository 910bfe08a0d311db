"""What a call on DTensors costs beside one on plain tensors, for torch's functions and ours.

    python benchmarks/dtensors.py [--json FILE]

Small tensors in one process of a group of two that sends nothing ("fake"), one thread: the time of
a call is that of its dispatch, in microseconds, the medians of turns. On a CPU torch's
F.scaled_dot_product_attention has no rule for DTensors: ours stands alone there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from onepass import functional

ROWS, WIDTH, TURNS, CALLS = 16, 64, 15, 100


def cases(spread: Callable) -> dict[str, tuple[Callable, Callable | None]]:
    """name: (ours, torch's), on tensors that `spread(tensor, placement)` makes."""

    def made(*shape: int, place=None) -> torch.Tensor:
        return spread(torch.randn(shape), Replicate() if place is None else place)

    x, weight, bias = made(ROWS, WIDTH, place=Shard(0)), made(WIDTH), made(WIDTH)
    matrix = made(WIDTH, WIDTH, place=Replicate())
    heads = [made(1, 4, ROWS, 16, place=Shard(1)) for _ in range(3)]
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
        "attention": (
            lambda: functional.scaled_dot_product_attention(*heads, is_causal=True),
            lambda: F.scaled_dot_product_attention(*heads, is_causal=True),
        ),
    }


def microseconds(calls: list[Callable], backward: bool) -> list[float]:
    """Of each call, in alternation."""

    def step(call: Callable) -> None:
        output = call()
        if backward:
            output.backward(output.detach())

    times: list[list[float]] = [[] for _ in calls]
    for turn in range(TURNS + 1):
        for call, found in zip(calls, times, strict=True):
            began = time.perf_counter()
            for _ in range(CALLS):
                step(call)
            if turn:  # the first is to warm up
                found.append((time.perf_counter() - began) / CALLS * 1e6)
    return [statistics.median(found) for found in times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh, rows = init_device_mesh("cpu", (2,)), []
    for backward in (False, True):

        def placed(value, place, needs=backward):
            return distribute_tensor(value, mesh, [place]).requires_grad_(needs)

        def plain(value, place, needs=backward):
            return placed(value, place).to_local().detach().requires_grad_(needs)

        of_parts, of_plain = cases(placed), cases(plain)
        for name, (ours, stock) in of_parts.items():
            calls = [ours, of_plain[name][0], stock, of_plain[name][1]]
            if name == "attention":
                calls[2] = None
            found = iter(microseconds([call for call in calls if call], backward))
            times = [next(found) if call else None for call in calls]
            rows.append(
                {"call": name, "backward": backward}
                | dict(zip(("ours", "ours plain", "torch", "torch plain"), times, strict=True))
            )
            print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
