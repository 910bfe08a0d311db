"""Training steps of ten models, stock against swapped, in pairs: which of them a swap slows down.

    python benchmarks/sweep_pairs.py                     # on a quiet machine, some minutes
    python benchmarks/sweep_pairs.py --only bert --rounds 4

Models are of moderate size, without dropout unless the name says so, and keep their weights: a step
is forward and backward. Both variants are one model, whose classes (and attention, if transformers
takes it by name) are exchanged between steps. Their order is ABBA, and each turn gives a ratio. The
table gives the median of the ratios with its 95 % interval.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import pathlib
import sys
import time

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sweep_models import build_timm
from torch import nn

import onepass
from onepass.swapping.verify import as_stock, changes_of
from onepass.tools.harness import bootstrap_median
from onepass.tools.machine import recycled_memory

SEQ, ROWS, VOCAB = 128, 4, 2000
_WIDTHS = dict(vocab_size=VOCAB, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
_ENCODER = dict(
    _WIDTHS, num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
_DECODER = dict(_WIDTHS, num_attention_heads=4, num_key_value_heads=2, head_dim=64, pad_token_id=0)
_BOTH = ("float32", "bfloat16")

# name: (class of the model, class of its config, settings, dtypes)
MODELS = {
    "bert": ("BertForMaskedLM", "BertConfig", _ENCODER, _BOTH),
    "bert, dropout 0.1": (
        "BertForMaskedLM",
        "BertConfig",
        dict(_WIDTHS, num_attention_heads=4),
        _BOTH,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        dict(
            vocab_size=VOCAB, n_embd=256, n_layer=4, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0,
            resid_pdrop=0.0,
        ),
        _BOTH,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER, _BOTH),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _DECODER, ("float32",)),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _DECODER, _BOTH),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        dict(
            vocab_size=VOCAB, d_model=256, d_kv=64, d_ff=1024, num_layers=2, num_heads=4,
            dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0,
        ),
        ("float32",),
    ),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        dict(
            _ENCODER, relative_attention=True, position_buckets=64, norm_rel_ebd="layer_norm",
            pos_att_type=["p2c", "c2p"], share_att_key=True,
        ),
        _BOTH,
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        dict(image_size=112, depths=[2, 2, 2], num_heads=[3, 6, 12], drop_path_rate=0.0),
        _BOTH,
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**_ENCODER, "image_size": 112, "patch_size": 8},
        _BOTH,
    ),
    "timm vit_tiny": (None, "vit_tiny_patch16_224", {}, ("float32",)),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="globs on names")
    parser.add_argument("--dtypes", nargs="+", default=list(_BOTH))
    parser.add_argument("--rounds", type=int, default=20, help="turns of four steps each, at least")
    parser.add_argument("--seconds", type=float, default=20.0, help="more turns while it took less")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kinds", nargs="+", help="as swap takes them (default: its own)")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = [
        (name, dtype)
        for name, (*_, dtypes) in MODELS.items()
        for dtype in dtypes
        if dtype in options.dtypes and any(fnmatch.fnmatchcase(name, p) for p in options.only)
    ]
    console = Console(stderr=True)
    rows = []
    with Progress(console=console) as progress, recycled_memory():
        for name, dtype in progress.track(cases):
            rows.append(measure(name, dtype, options))
            progress.console.print(_text(rows[-1]))
    table = Table("model", "dtype", "stock ms", "swapped ms", "times faster", "turns")
    for row in rows:
        table.add_row(*_cells(row))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def measure(name: str, dtype: str, options: argparse.Namespace) -> dict:
    model, batch = build(name, getattr(torch, dtype))
    report = onepass.swap(model, kinds=options.kinds)
    modules = changes_of(report)

    def step(stock: bool) -> float:
        with as_stock(model, modules) if stock else contextlib.nullcontext():
            start = time.perf_counter()
            loss(model, batch).backward()
            taken = time.perf_counter() - start
        model.zero_grad(set_to_none=True)
        return taken

    for stock in (True, False, True, False):
        step(stock)
    times: dict[bool, list[float]] = {True: [], False: []}
    ratios: list[float] = []
    begin = time.perf_counter()
    while len(ratios) < options.rounds or time.perf_counter() - begin < options.seconds:
        first = len(ratios) % 2 == 0
        taken: dict[bool, float] = {True: 0.0, False: 0.0}
        for stock in (first, not first, not first, first):
            taken[stock] += step(stock) / 2
        for stock, value in taken.items():
            times[stock].append(value)
        ratios.append(taken[True] / taken[False])
    return {
        "model": name,
        "dtype": dtype,
        "turns": len(ratios),
        "ms": {
            "stock": 1e3 * bootstrap_median(times[True]).median,
            "swapped": 1e3 * bootstrap_median(times[False]).median,
        },
        "ratio": bootstrap_median(ratios).to_dict(),
    }


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict | tuple]:
    torch.manual_seed(0)
    cls, config, settings, _ = MODELS[name]
    if cls is None:
        model = build_timm(config)
        return model.train(), (model.sweep_batch[0].repeat(4, 1, 1, 1),)
    import transformers

    transformers.logging.set_verbosity_error()
    model = getattr(transformers, cls)(getattr(transformers, config)(**settings))
    if hasattr(model.config, "image_size"):
        size = model.config.image_size
        pixels = torch.randn(ROWS, 3, size, size, dtype=dtype)
        return model.to(dtype).train(), {"pixel_values": pixels, "labels": torch.arange(ROWS) % 2}
    ids = torch.randint(1, VOCAB, (ROWS, SEQ))
    return model.to(dtype).train(), {"input_ids": ids, "labels": ids}


def loss(model: nn.Module, batch: dict | tuple) -> torch.Tensor:
    if isinstance(batch, dict):
        return model(**batch).loss
    return model(*batch).float().square().mean()


def _cells(row: dict) -> tuple[str, ...]:
    ms, ratio = row["ms"], row["ratio"]
    faster = f"{ratio['median']:.3f} [{ratio['low']:.3f}-{ratio['high']:.3f}]"
    model = (row["model"], row["dtype"])
    return *model, f"{ms['stock']:.1f}", f"{ms['swapped']:.1f}", faster, str(row["turns"])


def _text(row: dict) -> str:
    return "  ".join(_cells(row))


if __name__ == "__main__":
    sys.exit(main())
