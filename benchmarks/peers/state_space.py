"""A training step of state-space models of transformers, stock against swapped: forward and
backward, without an optimizer.

    python benchmarks/peers/state_space.py --models mamba --tokens 128 256 512 --threads 1
    python benchmarks/peers/state_space.py --models mamba2 falcon_h1 nemotron_h --tokens 512

Both run in one process, in turns; medians. Stock Mamba's backward grows with the square of the
length: 512 tokens take a minute and a half.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import transformers

import onepass

WORDS, HIDDEN = 1024, 512
_SIZES = {"vocab_size": WORDS, "hidden_size": HIDDEN, "num_hidden_layers": 4}
_HYBRID = _SIZES | {"intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}
_HYBRID |= {"head_dim": 64}
MODELS = {
    "mamba": ("MambaForCausalLM", _SIZES | {"state_size": 16}),
    "mamba2": (
        "Mamba2ForCausalLM",
        _SIZES | {"num_heads": 16, "head_dim": 64, "n_groups": 1, "state_size": 128},
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        _HYBRID
        | {"mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {name: size for name, size in _HYBRID.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["mamba", "mlp", "mamba", "attention"], "ssm_state_size": 128}
        | {"mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 1},
    ),
}


def build(name: str) -> torch.nn.Module:
    cls = getattr(transformers, MODELS[name][0])
    torch.manual_seed(0)
    return cls(cls.config_class(**MODELS[name][1])).train()


def seconds_of_step(model: torch.nn.Module, ids: torch.Tensor) -> float:
    model.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mamba"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.models:
        stock = build(name)
        swapped = copy.deepcopy(stock)
        onepass.swap(swapped)
        for tokens in options.tokens:
            ids = torch.randint(WORDS, (1, tokens))
            times: dict[str, list[float]] = {"stock": [], "swapped": []}
            seconds_of_step(swapped, ids)
            for _ in range(options.rounds):
                for key, model in (("stock", stock), ("swapped", swapped)):
                    times[key].append(seconds_of_step(model, ids))
            before, after = (statistics.median(times[key]) for key in times)
            print(
                f"{name:12}{tokens:6} tokens, {options.threads} threads: stock {before * 1e3:9.1f} "
                f"ms, swapped {after * 1e3:7.1f} ms, {before / after:6.2f} times faster",
                flush=True,
            )


if __name__ == "__main__":
    main()
