"""QLoRA from the text to the generated answer: a small Llama is trained on code, quantised to 4
bits, and taught English by LoRA alone.

The Llama reads bytes. It is trained whole for a minute, on the sources of Python's standard
library. Then its linear layers become nf4, peft puts adapters beside them, and those are trained
on the chapters of Python's manual that `help()` shows (`pydoc_data/topics.py`). The perplexity of
text that it was not trained on is printed at each point; the adapters are saved, loaded beside the
same base and must give the same logits; the model writes. The picture shows what is in memory while
it is trained whole, and while adapters are.

    pip install 'onepass[tools]' transformers peft
    python examples/finetune_lora.py --folder finetuned --plot finetune_lora.png

Two minutes on two cores. Exits with 1 if the adapters taught nothing or are not the same when they
are loaded, with 2 for bad input.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

try:
    import matplotlib  # noqa: F401
    import peft
    import transformers
except ImportError as error:
    sys.exit(
        f"finetune_lora: {error.name} is missing: pip install 'onepass[tools]' transformers peft"
    )

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import onepass
from onepass.tools.data import Batches, Text, held_out_batch, load_text, standard_library
from onepass.tools.errors import BadInput
from onepass.tools.plotting import drawn, format_of, put_texts

BYTES, BLOCK, BATCH = 256, 128, 8
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
QUICK = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
TOPICS = Path("pydoc_data") / "topics.py"
PROMPT = "The following sections describe "
WHOLE, ADAPTERS = "trained whole", "LoRA on nf4"
COLORS = {
    "weights": "#5b6573",
    "codes and scales": "#33658a",
    "adapters": "#e4572e",
    "gradients": "#f6ae2d",
    "AdamW's states": "#7a9e7e",
}


def texts(names: list[str] | None) -> tuple[Text, Text]:
    """The text of the first training, and that of the adapters."""
    files = standard_library()
    topics = [file for file in files if file.as_posix().endswith(TOPICS.as_posix())]
    if not names and not topics:
        raise BadInput("--text must be given: this Python has no pydoc_data/topics.py")
    version = sysconfig.get_python_version()
    code = load_text([str(file) for file in files if file not in topics])
    code = dataclasses.replace(code, source=f"standard library of Python {version}")
    if names:
        return code, load_text(names)
    manual = load_text([str(topics[0])])
    return code, dataclasses.replace(manual, source=f"manual of Python {version}")


def build(sizes: dict[str, int]) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=BYTES, num_attention_heads=4, max_position_embeddings=2 * BLOCK,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, **sizes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def perplexity(model: nn.Module, text: Text) -> float:
    """Of text that no training reads."""
    model.eval()
    tokens, targets = held_out_batch(text, BLOCK, 4 * BATCH)
    return math.exp(loss_of(model, tokens, targets))


def train(model: nn.Module, text: Text, seconds: float, lr: float) -> tuple[int, dict[str, int]]:
    """Trains what requires a gradient. Returns the steps, and the bytes that were in memory."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = onepass.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), max_grad_norm=1.0)
    batches, steps, end = Batches(text, BLOCK, BATCH, seed=0), 0, time.monotonic() + seconds
    model.train()
    while steps < 2 or time.monotonic() < end:
        loss_of(model, *batches(steps)).backward()
        optimizer.step()
        if steps == 0:
            held = in_memory(model, optimizer)
        optimizer.zero_grad()
        steps += 1
    return steps, held


def in_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of a model and its optimizer after a step, before the gradients are freed."""

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))

    named = dict(model.named_parameters())
    states = [of for state in optimizer.state.values() for of in state.values()]
    quantised = [m for m in model.modules() if isinstance(m, onepass.nn.QuantizedLinear)]
    return {
        "weights": size(p for name, p in named.items() if "lora_" not in name),
        "codes and scales": size(buffer for layer in quantised for buffer in layer.buffers()),
        "adapters": size(p for name, p in named.items() if "lora_" in name),
        "gradients": size(p.grad for p in named.values() if p.grad is not None),
        "AdamW's states": size(states),
    }


def with_adapters(base: nn.Module, folder: Path | None = None) -> nn.Module:
    """A quantised copy of a model with new adapters, or with those of a folder."""
    model = copy.deepcopy(base)
    report = onepass.quantize(model, "nf4")
    if folder is None:
        print(report.summary())
        config = peft.LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, config)
    else:
        model = peft.PeftModel.from_pretrained(model, folder)
    onepass.swap(model)
    return model


@torch.no_grad()
def written(model: nn.Module, prompt: str, count: int) -> str:
    model.eval()
    tokens = torch.tensor([list(prompt.encode())])
    found = model.generate(input_ids=tokens, max_new_tokens=count, do_sample=False)
    return bytes(found[0].tolist()).decode(errors="replace")


def picture(found: dict[str, dict[str, int]], steps: dict[str, int]) -> Figure:
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    axes = figure.add_subplot()
    ways = list(found)[::-1]
    left = dict.fromkeys(ways, 0.0)
    for part, color in COLORS.items():
        sizes = [found[way][part] / 2**20 for way in ways]
        axes.barh(ways, sizes, left=[left[way] for way in ways], color=color, label=part)
        left = {way: left[way] + size for way, size in zip(ways, sizes, strict=True)}
    for way in ways:
        axes.text(left[way], way, f"  {left[way]:.1f} MiB", va="center")
    axes.set_xlabel("MiB held between forward and backward of two steps")
    axes.set_xlim(0, 1.18 * max(left.values()))
    axes.grid(axis="y", visible=False)
    axes.legend(ncols=len(COLORS), loc="upper center", bbox_to_anchor=(0.5, -0.35))
    footer = [", ".join(f"{way}: {count} steps" for way, count in steps.items())]
    put_texts(figure, "Memory of a small Llama, float32, without activations", 11, footer)
    return figure


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="finetune_lora", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="of each of two trainings")
    parser.add_argument("--text", nargs="+", help="files for the adapters instead of the manual")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--folder", help="for the adapters; they are not kept without it")
    parser.add_argument("--plot", help="a picture of the memory: .png, .svg, .pdf")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, a trial of the script")
    args = parser.parse_args(arguments)
    if not args.prompt:
        raise BadInput("--prompt must have a byte at least, got none")
    if not (math.isfinite(args.seconds) and args.seconds >= 0):
        raise BadInput(f"--seconds must be at least 0, got {args.seconds}")
    if args.plot:
        try:
            format_of(args.plot)
        except ValueError as error:
            raise BadInput(str(error)) from error
    return args


def run(args: argparse.Namespace, folder: Path) -> bool:
    """Whether the adapters have learnt and are the same when they are loaded."""
    code, manual = texts(args.text)
    base = build(QUICK if args.quick else SIZES)
    onepass.swap(base)
    steps, memory = {}, {}
    steps[WHOLE], memory[WHOLE] = train(base, code, args.seconds, lr=2e-3)
    onepass.unswap(base)
    base.requires_grad_(False)
    print(f"Trained whole, {steps[WHOLE]} steps, on the {code.describe()}.")
    print(f"Perplexity of code {perplexity(base, code):.2f}, of the {manual.source} ", end="")
    print(f"{perplexity(base, manual):.2f}.\n")

    model = with_adapters(base)
    before = perplexity(model, manual)
    prompt = args.prompt
    count = 16 if args.quick else 120
    first = written(model, prompt, count)
    steps[ADAPTERS], memory[ADAPTERS] = train(model, manual, args.seconds, lr=3e-3)
    after = perplexity(model, manual)
    print(
        f"Perplexity of the {manual.source} by nf4 {before:.2f}, after {steps[ADAPTERS]} steps "
        f"of the adapters {after:.2f}.\n"
    )
    print(f"before  {first!r}\nafter   {written(model, prompt, count)!r}\n")

    model.save_pretrained(folder)
    loaded = with_adapters(base, folder).eval()
    tokens, _ = held_out_batch(manual, BLOCK, 2)
    with torch.no_grad():
        same = torch.equal(loaded(tokens).logits, model(tokens).logits)
    print("Same: the logits of the adapters that were saved and loaded." if same else "DIFFERENT.")

    for way, parts in memory.items():
        total = sum(parts.values()) / 2**20
        shown = ", ".join(f"{name} {size / 2**20:.2f}" for name, size in parts.items() if size)
        print(f"{way}: {total:.2f} MiB ({shown})")
    if args.plot:
        Path(args.plot).write_bytes(drawn(lambda: picture(memory, steps), format_of(args.plot)))
        print(f"The picture is in {args.plot}.")
    if after >= before:
        print(f"The adapters taught nothing: {before:.4f} became {after:.4f}.")
    return same and after < before


def main(arguments: list[str] | None = None) -> int:
    try:
        args = read_arguments(arguments)
        if args.threads:
            torch.set_num_threads(args.threads)
        with tempfile.TemporaryDirectory() as elsewhere:
            return 0 if run(args, Path(args.folder or elsewhere)) else 1
    except (BadInput, OSError) as error:
        print(f"finetune_lora: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
