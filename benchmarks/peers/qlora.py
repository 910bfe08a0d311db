"""A step of QLoRA on a small Llama (nf4, LoRA of rank 16 on all linear layers, AdamW on the
adapters) by onepass, quantised alone and swapped too, and by bitsandbytes where it is installed:
time and peak of memory.

    python benchmarks/peers/qlora.py --tokens 256 2048 --rounds 7 --json out.json

The layer is one of TinyLlama (width 2048), that of the logits is small. `--bfloat16` adds bases in
bfloat16, for CPUs that multiply it: elsewhere torch's products of it, in the peer and in what is
not swapped, take minutes. All ways run in one process, in turns; medians of the clock, and of the
processor's time, which other programs change less. A peak is what a process of its own has more in
memory at the height of a step than before it built the model. Times need a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import multiprocessing
import resource
import statistics
import time
from pathlib import Path

import peft
import torch
import transformers
from torch import nn

import onepass
from onepass import _malloc
from onepass.tools.compare.memory import _cpu_peak

WORDS = 1024
SIZES = {
    "vocab_size": WORDS, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_hidden_layers": 1,
}  # fmt: skip
F32, BF16 = torch.float32, torch.bfloat16
RANK, WARM_UP = 16, 1


def _base(dtype: torch.dtype, sizes: dict) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(SIZES | sizes))
    return transformers.LlamaForCausalLM(config).to(dtype)


def _onepass(dtype: torch.dtype, sizes: dict) -> nn.Module:
    model = _base(dtype, sizes)
    onepass.quantize(model, "nf4")
    return model


def _bitsandbytes(dtype: torch.dtype, sizes: dict) -> nn.Module:
    from bitsandbytes.nn import Linear4bit

    model = _base(dtype, sizes)
    for name, layer in list(model.model.named_modules()):
        if type(layer) is nn.Linear:
            shape = layer.in_features, layer.out_features
            made = Linear4bit(*shape, bias=False, compute_dtype=dtype, quant_type="nf4")
            made.load_state_dict({"weight": layer.weight.detach()})
            parent = model.model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], made.to("cpu"))
            del layer, made
    model.is_loaded_in_4bit = True  # which peft asks for
    return model


# name: (a model without adapters, dtype, whether it is swapped)
WAYS = {
    "onepass": (_onepass, F32, False),
    "onepass swapped": (_onepass, F32, True),
    "onepass bfloat16": (_onepass, BF16, False),
    "onepass bfloat16 swapped": (_onepass, BF16, True),
    "bitsandbytes": (_bitsandbytes, F32, False),
    "bitsandbytes bfloat16": (_bitsandbytes, BF16, False),
}


class Step:
    """A model with adapters and their optimizer."""

    def __init__(self, way: str, sizes: dict):
        make, dtype, swaps = WAYS[way]
        config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(make(dtype, sizes), config).train()
        if swaps:
            onepass.swap(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        self.losses: list[float] = []

    def __call__(self, ids: torch.Tensor) -> tuple[float, float]:
        """Seconds, and the processor's."""
        begin = time.perf_counter(), time.process_time()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - begin[0], time.process_time() - begin[1]
        self.losses.append(float(loss.detach()))
        return seconds


def batch(tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(WORDS, (1, tokens), generator=generator)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def memory(way: str, tokens: int, threads: int, sizes: dict) -> dict[str, int]:
    """Bytes of a built model, and with the most of a step."""
    torch.set_num_threads(threads)
    _malloc.map_apart()
    if WAYS[way][0] is _bitsandbytes:
        import bitsandbytes  # noqa: F401  (the package itself does not count)
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    Step(way, {**sizes, **tiny})(batch(32))  # what is imported and made at the first call
    gc.collect()
    before = _resident()
    step = Step(way, sizes)
    step(batch(16))
    gc.collect()
    built = _resident() - before
    return {"model": built, "peak": built + _cpu_peak(lambda: step(batch(tokens)))}


def times(ways: list[str], tokens: int, rounds: int, sizes: dict) -> dict[str, dict]:
    steps = {way: Step(way, sizes) for way in ways}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(WARM_UP + rounds):
        for way, step in steps.items():
            seconds = step(batch(tokens))
            if number >= WARM_UP:
                found[way].append(seconds)
    results = {}
    for way, of in found.items():
        clock, processor = (1e3 * statistics.median(each) for each in zip(*of, strict=True))
        loss = steps[way].losses[-1]
        results[way] = {"ms": clock, "processor_ms": processor, "loss": loss}
    return results


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=json.loads, default={}, help="of the config, as JSON")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--only", default="", help="ways whose name has this in it")
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    has_peer = importlib.util.find_spec("bitsandbytes") is not None
    ways = [w for w in WAYS if options.only in w and (has_peer or "bitsandbytes" not in w)]
    ways = [w for w in ways if options.bfloat16 or WAYS[w][1] is F32]
    results = []
    for tokens in options.tokens:
        found = times(ways, tokens, options.rounds, options.sizes)
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for way in ways:
                found[way] |= pool.apply(memory, (way, tokens, options.threads, options.sizes))
        results.append({"tokens": tokens, "ways": found})
        peers = [of for way, of in found.items() if "bitsandbytes" in way]
        print(f"\n{tokens} tokens, {options.threads} threads")
        for way, of in found.items():
            print(f"{way:25}", end="")
            for unit in ("ms", "processor_ms"):
                gain = f" ({min(p[unit] for p in peers) / of[unit]:.2f}x)" if peers else ""
                print(f"{of[unit]:9.1f} {unit.replace('_', ' ')}{gain}", end="")
            sizes = (f"{name} {of[name] / 2**20:.0f} MiB" for name in ("model", "peak"))
            print("", *sizes, f"loss {of['loss']:.4f}", sep="  ", flush=True)
    versions = {"torch": torch.__version__, "onepass": onepass.__version__}
    versions |= {name: importlib.metadata.version(name) for name in ("peft", "transformers")}
    versions["bitsandbytes"] = (
        importlib.metadata.version("bitsandbytes") if has_peer else "not installed"
    )
    whole = {
        "level": onepass._C.cpu_level(),
        "threads": options.threads,
        "versions": versions,
        "sizes": SIZES | options.sizes,
        "results": results,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(whole, indent=1))
    return whole


if __name__ == "__main__":
    main()
