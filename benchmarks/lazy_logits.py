"""A training step of a layer of GPT-2 small, with its 50257 words: the peak of memory stock,
swapped, and swapped with lazy_logits=True; and how many times faster the last is than the second.

    python benchmarks/lazy_logits.py [--pairs 9] [--threads 2]

Times need a quiet machine; the models of a pair step in turn. Each peak is measured in a process of
its own, above the memory held before the step; it includes the gradients of the weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time

import torch
import transformers
from torch import nn

import onepass
from onepass import _malloc
from onepass.tools.compare.memory import _cpu_peak

OPTIONS = {"stock": None, "with logits": {}, "without": {"lazy_logits": True}}
SHAPES = ((2, 512), (4, 1024))
DTYPES = (torch.float32, torch.bfloat16)


def model_of(variant: str, dtype: torch.dtype) -> nn.Module:
    config = transformers.GPT2Config(n_layer=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config).to(dtype)
    if OPTIONS[variant] is not None:
        onepass.swap(model, **OPTIONS[variant])
    return model


def step(model: nn.Module, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()


def peak(variant: str, dtype: torch.dtype, shape: tuple[int, int], threads: int) -> int:
    torch.set_num_threads(threads)
    _malloc.map_apart()
    model, ids = model_of(variant, dtype), torch.randint(50257, shape)
    step(model, ids[:1, :16])
    return _cpu_peak(lambda: step(model, ids))


def ratio(dtype: torch.dtype, shape: tuple[int, int], threads: int, pairs: int) -> float:
    torch.set_num_threads(threads)
    models = [model_of(variant, dtype) for variant in ("with logits", "without")]
    ids, times = torch.randint(50257, shape), []
    for number in range(pairs + 1):
        pair = []
        for model in models:
            begin = time.perf_counter()
            step(model, ids)
            pair.append(time.perf_counter() - begin)
        times += [pair] * (number > 0)  # the first warms up
    return statistics.median(before / after for before, after in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=9, help="0: no times")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    for shape in SHAPES:
        for dtype in DTYPES:
            row = [f"{str(dtype).removeprefix('torch.')}, {shape[0]} x {shape[1]} tokens"]
            with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                for variant in OPTIONS:
                    found = pool.apply(peak, (variant, dtype, shape, given.threads))
                    row.append(f"{found / 1e6:.0f} MB")
                if given.pairs:
                    found = pool.apply(ratio, (dtype, shape, given.threads, given.pairs))
                    row.append(f"{found:.2f}")
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
