"""Attention of one sequence by several processes, against one process with as many threads.

    python benchmarks/ring_attention.py [--processes 2] [--tokens 8192] [--layouts zigzag]

Causal, forward and forward + backward, in turns; the processes of the ring have one thread each.
Throughput of the ring over that of one process: medians of the turns' ratios with 95 % intervals.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection

import torch
from torch import distributed as dist

from onepass.distributed import ring_attention
from onepass.distributed.sequence import LAYOUTS
from onepass.functional import scaled_dot_product_attention
from onepass.tools.harness import bootstrap_median

TURNS = 9
HEADS, HEAD_DIM = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        calls = [context.Pipe() for _ in range(options.processes)]
        ranks = [
            context.Process(target=serve, args=(rank, options.processes, folder, there))
            for rank, (_, there) in enumerate(calls)
        ]
        for rank in ranks:
            rank.start()
        show(options, [here for here, _ in calls])
        for here, _ in calls:
            here.send(None)
        for rank in ranks:
            rank.join()


def show(options: argparse.Namespace, ranks: list[Connection]) -> None:
    torch.set_num_threads(options.processes)
    print(
        f"{options.tokens} tokens, {HEADS} heads of {HEAD_DIM}, causal, {options.processes} cores"
    )
    for dtype in options.dtypes:
        for layout in options.layouts:
            for backward in (False, True):
                alone = step(scaled_dot_product_attention, options.tokens, dtype, backward)
                call = (options.tokens // options.processes, dtype, layout, backward)
                ratios = []
                for turn in range(TURNS + 1):
                    one, ring = timed(alone), together(ranks, call)
                    if turn:  # the first warms up
                        ratios.append(one / ring)
                what = "forward + backward" if backward else "forward"
                print(f"{dtype} {layout} {what}: {bootstrap_median(ratios)}", flush=True)


def together(ranks: list[Connection], call: tuple) -> float:
    """Seconds of the slowest process; all begin together."""
    for rank in ranks:
        rank.send(call)
    return max(rank.recv() for rank in ranks)


def step(attend, tokens: int, dtype: str, backward: bool):
    """A call of attention on new tensors."""
    shape = (1, HEADS, tokens, HEAD_DIM)
    tensors = [torch.randn(shape).to(getattr(torch, dtype)) for _ in range(4)]
    *tensors, upstream = tensors
    for tensor in tensors:
        tensor.requires_grad_(backward)

    def call() -> None:
        output = attend(*tensors, is_causal=True)
        if backward:
            torch.autograd.grad(output, tensors, upstream)

    return call


def timed(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def serve(rank: int, size: int, folder: str, calls: Connection) -> None:
    """A process of the ring."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=size)
    made = {}
    while (asked := calls.recv()) is not None:
        tokens, dtype, layout, backward = asked

        def attend(*tensors, layout=layout, **options):
            return ring_attention(*tensors, layout=layout, **options)

        if asked not in made:
            made = {asked: step(attend, tokens, dtype, backward)}
        dist.barrier()
        calls.send(timed(made[asked]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
