"""Steps of examples/train_distributed.py on several processes: stock against swapped, and scaling.

    python benchmarks/train_distributed.py [--ways ddp fsdp context] [--processes 1 2 4]

The processes share the machine's cores and a batch, so the work is the same for any number of them.
Steps of stock and swapped take turns in the same processes. Times are those of the slowest process:
the median and the best, and the median of the turns' ratios with its 95 % interval. The first turn
warms up.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed as dist

from onepass.tools.harness import bootstrap_median

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_distributed.py"


def example():
    spec = importlib.util.spec_from_file_location("train_distributed", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=["ddp", "fsdp", "context"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dropout", default="0.1")
    parser.add_argument("--swapped-only", action="store_true", help="scaling alone")
    parser.add_argument("--flags", nargs="+", default=[], help="of the example, without dashes")
    options = parser.parse_args()
    flags = [f"--{word}" if word.isidentifier() else word for word in options.flags]
    variants = ["swapped"] if options.swapped_only else ["stock", "swapped"]
    for size in options.processes:
        for way in options.ways:
            call = [*flags, "--parallel", way, "--dropout", options.dropout]
            tokens, times = measured(size, call, variants, options.rounds)
            print(line(f"{way} on {size}", tokens, times), flush=True)


def line(name: str, tokens: int, times: dict[str, list[float]]) -> str:
    medians = {variant: statistics.median(taken) for variant, taken in times.items()}
    found = ", ".join(
        f"{variant} {1e3 * seconds:,.0f} ms, at best {1e3 * min(times[variant]):,.0f} "
        f"({tokens / min(times[variant]):,.0f} tokens/s)"
        for variant, seconds in medians.items()
    )
    if "stock" not in times:
        return f"{name}: {found}"
    ratios = [a / b for a, b in zip(times["stock"], times["swapped"], strict=True)]
    return f"{name}: {found}, {bootstrap_median(ratios)} times as fast"


def measured(size: int, flags: list[str], variants: list[str], rounds: int):
    """(tokens of a step, seconds of the slowest process by variant and round)"""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(target=serve, args=(rank, size, folder, flags, variants, rounds, there))
            for rank, (_, there) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        answers = [here.recv() for here, _ in pipes]
        for rank in ranks:
            rank.join()
    slowest = {
        variant: [max(of) for of in zip(*(times[variant] for _, times in answers), strict=True)]
        for variant in variants
    }
    return answers[0][0], slowest


def serve(
    rank: int, size: int, folder: str, flags: list[str], variants: list[str], rounds: int,
    answer: Connection,
) -> None:  # fmt: skip
    """A process: trains each variant's model in turn."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=size)
    module, device = example(), torch.device("cpu")
    made = {}
    for variant in variants:
        args = module.parse([*flags, *(["--stock"] if variant == "stock" else [])])
        module.check(args, size)
        made[variant] = (*module.build(args, device), args)
    batches = module.Batches(module.load_text(), args.block, args.batch, args.seed)
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds + 1):
        batch = batches(number)
        for variant in variants[:: 1 if number % 2 else -1]:
            model, optimizer, args = made[variant]
            dist.barrier()
            start = time.perf_counter()
            module.train_step(model, optimizer, batch, args)
            times[variant].append(time.perf_counter() - start)
    answer.send((args.batch * args.block, {name: taken[1:] for name, taken in times.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
