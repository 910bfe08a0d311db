"""A training step of state-space and linear-attention models of transformers, stock against
swapped: forward and backward, without an optimizer.

    python benchmarks/peers/state_space.py --models mamba --tokens 128 256 512 --threads 1
    python benchmarks/peers/state_space.py --models mamba2 falcon_h1 nemotron_h --tokens 512
    python benchmarks/peers/state_space.py --models qwen3_next olmo_hybrid kimi_linear --tokens 512

Both run in one process, in turns; medians, of the time that passes and of the processor's. Stock
Mamba's backward grows with the square of the length: 512 tokens take a minute and a half. The three
with delta rules have three layers with one and one with attention, and dense feed-forward blocks:
qwen3_next as small as its shared expert, a quarter of the hidden size; qwen3_next_wide and the
others as wide as all experts of a token.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time

import torch
import transformers

import onepass

WORDS, HIDDEN = 1024, 512
_SIZES = {"vocab_size": WORDS, "hidden_size": HIDDEN, "num_hidden_layers": 4}
_HYBRID = _SIZES | {"intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}
_HYBRID |= {"head_dim": 64}
_THREE_TO_ONE = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_THREE_TO_ONE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
# Of the 80B: a head of keys for two of values, with 128 numbers each.
_QWEN = _HYBRID | _THREE_TO_ONE | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
_QWEN |= {"mlp_only_layers": [0, 1, 2, 3]}
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
    "qwen3_next": ("Qwen3NextForCausalLM", _QWEN | {"intermediate_size": 128}),
    "qwen3_next_wide": ("Qwen3NextForCausalLM", _QWEN),
    "olmo_hybrid": (  # 96 numbers of a key and 192 of a value, as in the 7B
        "OlmoHybridForCausalLM",
        _HYBRID
        | _THREE_TO_ONE
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 96, "linear_value_head_dim": 192},
    ),
    "kimi_linear": (  # heads of 128, as in the 48B
        "KimiLinearForCausalLM",
        _HYBRID
        | _THREE_TO_ONE
        | {"num_key_value_heads": 8, "linear_num_heads": 7, "mlp_layer_types": ["dense"] * 4}
        | {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    ),
}


def build(name: str) -> torch.nn.Module:
    cls = getattr(transformers, MODELS[name][0])
    torch.manual_seed(0)
    return cls(cls.config_class(**MODELS[name][1])).train()


def seconds_of_step(model: torch.nn.Module, ids: torch.Tensor) -> tuple[float, float]:
    """(of the clock, of the processor)"""
    model.zero_grad(set_to_none=True)
    begin = time.perf_counter(), time.process_time()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def medians(stock: torch.nn.Module, swapped: torch.nn.Module, tokens: int, rounds: int) -> dict:
    """By model, milliseconds of a step: of the clock and of the processor."""
    ids = torch.randint(WORDS, (1, tokens))
    models = {"stock": stock, "swapped": swapped}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    seconds_of_step(swapped, ids)
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(seconds_of_step(model, ids))
    ways = ("ms", "processor_ms")
    return {
        name: {
            way: 1e3 * statistics.median(column)
            for way, column in zip(ways, zip(*of_model, strict=True), strict=True)
        }
        for name, of_model in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mamba"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    for name in options.models:
        stock = build(name)
        swapped = copy.deepcopy(stock)
        onepass.swap(swapped)
        for tokens in options.tokens:
            found = medians(stock, swapped, tokens, options.rounds)
            results.append({"model": name, "tokens": tokens, "threads": options.threads, **found})
            clock, processor = (
                found["stock"][way] / found["swapped"][way] for way in ("ms", "processor_ms")
            )
            print(
                f"{name:12}{tokens:6} tokens, {options.threads} threads: stock "
                f"{found['stock']['ms']:9.1f} ms, swapped {found['swapped']['ms']:7.1f} ms, "
                f"{clock:6.2f} times faster ({processor:.2f} by processor time)",
                flush=True,
            )
    if options.json:
        whole = {
            "command": f"python benchmarks/peers/state_space.py {' '.join(sys.argv[1:])}",
            "level": onepass._C.cpu_level(),
            "versions": {
                module.__name__: module.__version__ for module in (torch, onepass, transformers)
            },
            "results": results,
        }
        with open(options.json, "w") as file:
            json.dump(whole, file, indent=1)


if __name__ == "__main__":
    main()
