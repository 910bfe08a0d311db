"""From which size on a layer norm of ours takes less time than torch's, on one thread.

    python benchmarks/small_norms.py [--dtypes float32 bfloat16]

The table gives how many times faster ours is, in training (forward and backward) and in inference,
by processor time in ABBA turns, medians: noise of other processes counts little. The bounds of
onepass.swapping.small_norms are read off it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn import functional as F

import onepass

COLS = (64, 192, 256, 384, 768, 1024, 2048, 4096)
ROWS = (16, 64, 256, 1024, 4096)
TURNS, SECONDS = 7, 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.dtypes:
        table = Table("columns", *(f"{rows} rows" for rows in ROWS), title=name)
        for cols in track(COLS, name, console=Console(stderr=True)):
            cells = [" / ".join(map("{:.2f}".format, measure(name, n, cols))) for n in ROWS]
            table.add_row(str(cols), *cells)
        Console().print(table)
    return 0


def measure(dtype: str, rows: int, cols: int) -> tuple[float, float]:
    """How many times faster ours is: (in training, in inference)."""
    x, weight, bias = (
        torch.randn(shape, dtype=getattr(torch, dtype)).requires_grad_()
        for shape in ((rows, cols), (cols,), (cols,))
    )
    upstream = torch.randn_like(x)

    def training(norm: Callable) -> Callable:
        def step() -> None:
            norm(x, (cols,), weight, bias).backward(upstream)
            x.grad = weight.grad = bias.grad = None

        return step

    def inference(norm: Callable) -> Callable:
        def step() -> None:
            with torch.no_grad():
                norm(x, (cols,), weight, bias)

        return step

    return tuple(
        times_faster(*(make(norm) for norm in (F.layer_norm, onepass.functional.layer_norm)))
        for make in (training, inference)
    )


def times_faster(stock: Callable, ours: Callable) -> float:
    stock(), ours()
    calls = max(3, int(SECONDS / max(seconds(stock, 3) / 3, 1e-6)))
    ratios = []
    for _ in range(TURNS):
        first, a, b, last = (seconds(f, calls) for f in (stock, ours, ours, stock))
        ratios.append((first + last) / (a + b))
    return statistics.median(ratios)


def seconds(function: Callable, calls: int) -> float:
    start = time.thread_time()
    for _ in range(calls):
        function()
    return time.thread_time() - start


if __name__ == "__main__":
    sys.exit(main())
