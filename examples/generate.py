"""A byte GPT writes text with a KV cache: by torch alone and by onepass, the same text, how fast?

It trains the small GPT of `onepass compare` for a minute on the sources of Python's standard
library, then continues prompts greedily, twice: with torch's modules and attention, and with a
swapped copy and `attention_with_kv_cache`. `WAYS` and the two functions before it are the whole
difference. Speed is measured with that GPT and with compare's large one, which is not trained: only
its time matters, not its text.

Then with quantised weights: int8, int4, and int4 with the layer of the logits too. Their text is
another one; how much they forget is the perplexity of text that the small GPT was not trained on.

In float32 both must write the same bytes. In bfloat16 rounding alone may change the likeliest byte:
there both ways compute the logits of one text, and these are compared with float64's by the rule of
`onepass.numerics`.

    pip install 'onepass[tools]'
    python examples/generate.py
    python examples/generate.py --prompt "class Parser(" --batch 1 --dtype bfloat16

Exits with 1 if the two ways differ, with 2 for bad input.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial

try:
    import numpy  # noqa: F401
    import rich  # noqa: F401
except ImportError as error:
    sys.exit(f"generate: {error.name} is missing: pip install 'onepass[tools]'")

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import onepass
from onepass import numerics
from onepass.functional import attention_with_kv_cache, scaled_dot_product_attention
from onepass.tools.compare.settings import (
    QUICK_SAMENESS,
    QUICK_SPEED,
    SAMENESS,
    SPEED,
    Settings,
    add_arguments,
    read_settings,
)
from onepass.tools.compare.train import Trainer
from onepass.tools.compare.workload import GptWorkload
from onepass.tools.data import Text, held_out_batch, load_text
from onepass.tools.errors import BadInput
from onepass.tools.harness import machine_facts, measure_pairs
from onepass.tools.model import GPT, Sizes
from onepass.tools.output_file import OutputFile, write_or_say
from onepass.tools.progress import Phase, Progress

QUICK_STEPS = 30
SHOWN = 4  # sequences whose text is printed
TABLE_WIDTH = 160
READ = "read"  # the variant that only reads memory, beside WAYS
PARTS = {  # of a token's time: operators that do not call each other
    "linear layers": (
        "aten::linear",
        "onepass::linear_forward",
        "onepass::quantized_linear_forward",
    ),
    "attention": ("aten::scaled_dot_product_attention", "onepass::attention_decode_append"),
}


# ---- the attention of a layer, with a cache: the two ways ---------------------------------------
#
# query, key and value are (batch, heads, rows, head_dim) and follow the `used` first rows of the
# caches, which are (batch, heads, block, head_dim).


def stock_attention(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, used: int
) -> Tensor:
    end = used + key.shape[2]
    k_cache[:, :, used:end] = key
    v_cache[:, :, used:end] = value
    if used == 0:  # a prompt attends to itself
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return F.scaled_dot_product_attention(query, k_cache[:, :, :end], v_cache[:, :, :end])


def onepass_attention(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, used: int
) -> Tensor:
    if used == 0:
        k_cache[:, :, : key.shape[2]] = key
        v_cache[:, :, : key.shape[2]] = value
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    # Writes the new row, then attends. Where lengths differ, cache_seqlens is a tensor of them.
    return attention_with_kv_cache(query, k_cache, v_cache, key, value, cache_seqlens=used)


def stock_way(model: GPT) -> tuple[GPT, Callable[..., Tensor]]:
    return model, stock_attention


def onepass_way(model: GPT) -> tuple[GPT, Callable[..., Tensor]]:
    swapped = copy.deepcopy(model)
    onepass.swap(swapped)
    return swapped, onepass_attention


def quantized_way(model: GPT, **options) -> tuple[GPT, Callable[..., Tensor]]:
    swapped, attention = onepass_way(model)
    onepass.quantize(swapped, **options)
    return swapped, attention


WAYS = {"stock": stock_way, "onepass": onepass_way}
QUANTIZED = {
    "int8": partial(quantized_way, weights="int8"),
    "int4": partial(quantized_way, weights="int4"),
    "int4, head too": partial(quantized_way, weights="int4", skip_head=False),
}


# ---- generation ---------------------------------------------------------------------------------


class Writer:
    """Continues prompts greedily, in one of the ways, with its own caches."""

    def __init__(self, model: GPT, sizes: Sizes, batch: int, attention: Callable[..., Tensor]):
        self.model, self.sizes, self.attention = model, sizes, attention
        shape = (batch, sizes.heads, sizes.block, sizes.width // sizes.heads)
        zeros = partial(torch.zeros, shape, dtype=model.tokens.weight.dtype)
        self.caches = [(zeros(), zeros()) for _ in model.blocks]

    def prefill(self, prompt: Tensor) -> Tensor:
        """Reads prompts (batch, seq) into the caches; returns the byte after each, (batch, 1)."""
        return self._logits(prompt, used=0).argmax(-1)

    def decode(self, token: Tensor, used: int, count: int) -> Tensor:
        """The `count` bytes (batch, count) after token (batch, 1), before which `used` are cached.

        May be called again: it writes the caches after the first `used`.
        """
        written = []
        for position in range(used, used + count):
            token = self._logits(token, position).argmax(-1)
            written.append(token)
        return torch.cat(written, 1)

    def write(self, prompt: Tensor, count: int) -> Tensor:
        """The `count` bytes (batch, count) after prompts (batch, seq)."""
        first = self.prefill(prompt)
        return torch.cat([first, self.decode(first, prompt.shape[1], count - 1)], 1)

    def read(self, prompt: Tensor, text: Tensor) -> Tensor:
        """The logits (batch, count, 256) of each byte of a text (batch, count) after prompts."""
        logits = [self._logits(prompt, used=0)]
        for i, token in enumerate(text[:, :-1].split(1, dim=1)):
            logits.append(self._logits(token, prompt.shape[1] + i))
        return torch.cat(logits, 1)

    def weight_bytes(self) -> int:
        of_model = itertools.chain(self.model.parameters(), self.model.buffers())
        return sum(tensor.nbytes for tensor in of_model)

    def cache_bytes(self) -> int:
        return sum(cache.nbytes for pair in self.caches for cache in pair)

    def read_bytes(self, used: int) -> int:
        """What a token must read: the weights but the table of positions, of which it takes a row,
        and the first `used` rows of the caches."""
        caches = self.cache_bytes() * used // self.sizes.block
        return self.weight_bytes() - self.model.positions.weight.nbytes + caches

    @torch.inference_mode()
    def _logits(self, tokens: Tensor, used: int) -> Tensor:
        """The logits (batch, 1, 256) of the byte after tokens (batch, seq), which follow `used`
        cached ones: the GPT's forward, without dropout."""
        model, heads, (batch, seq) = self.model, self.sizes.heads, tokens.shape
        x = model.tokens(tokens) + model.positions(torch.arange(used, used + seq))
        for block, (k_cache, v_cache) in zip(model.blocks, self.caches, strict=True):
            qkv = block.attention.qkv(block.norm_attention(x)).view(batch, seq, 3, heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            y = self.attention(query, key, value, k_cache, v_cache, used)
            x = x + block.attention.out(y.transpose(1, 2).reshape(batch, seq, -1))
            x = x + block.contract(block.activation(block.expand(block.norm_mlp(x))))
        return model.head(model.norm(x[:, -1:]))


# ---- the text of both ways, and their speed -----------------------------------------------------


class Comparison:
    """Both ways of continuing the same prompts with the same model."""

    def __init__(self, name: str, model: GPT, sizes: Sizes, prompt: Tensor, count: int):
        self.name, self.prompt, self.count, self.batch = name, prompt, count, len(prompt)
        self.model, self.sizes = model, sizes
        self.writers = {n: self._writer(*way(model)) for n, way in WAYS.items()}
        self.written = {name: w.write(prompt, count) for name, w in self.writers.items()}
        quantized = {n: self._writer(*way(model)) for n, way in QUANTIZED.items()}
        self.all_writers = self.writers | quantized

    def _writer(self, model: GPT, attention: Callable[..., Tensor]) -> Writer:
        return Writer(model, self.sizes, self.batch, attention)

    def difference(self) -> str:
        """How the two ways differ; empty if they do not."""
        if self.model.tokens.weight.dtype is torch.float32:
            places = (self.written["stock"] != self.written["onepass"]).nonzero()
            if not len(places):
                return ""
            return "first at byte {1} of sequence {0}".format(*places[0].tolist())
        text = self.written["stock"]
        exact = self._writer(copy.deepcopy(self.model).double(), stock_attention)
        ref = exact.read(self.prompt, text)
        base, ours = (self.writers[n].read(self.prompt, text) for n in ("stock", "onepass"))
        held = numerics.compare(ours, ref, base)
        return "" if held.ok else f"logits of stock's text: {held}"

    def bytes_in_common(self) -> int:
        return int((self.written["stock"] == self.written["onepass"]).sum())

    def show(self, sequence: int) -> None:
        print(f"after   {as_text(self.prompt[sequence])[-60:]!r}")
        for name, tokens in self.written.items():
            print(f"{name:7} {as_text(tokens[sequence])!r}")
        print()

    def measure(self, table: Table, **effort: float) -> dict[str, dict]:
        """Times both ways and those with quantised weights in turn, prefill and decode apart; adds
        rows to the table.

        Decoding is timed beside a plain read of the bytes that stock's tokens must read: what that
        is times faster than stock bounds every way of that dtype. Returns each phase's
        milliseconds, and how many times as fast ours is.
        """
        found = {}
        seq, steps = self.prompt.shape[1], self.count - 1  # prefill writes the first byte
        first = self.written["stock"][:, :1]
        writers, used = self.all_writers, seq + (steps + 1) // 2
        prefill = {n: partial(w.prefill, self.prompt) for n, w in writers.items()}
        decode = {n: partial(w.decode, first, seq, steps) for n, w in writers.items()}
        token_bytes = writers["stock"].read_bytes(used)
        decode[READ] = partial(read, torch.ones(token_bytes // 4), steps)
        for phase, rows, functions in (("prefill", seq, prefill), ("decode", steps, decode)):
            timing = measure_pairs(functions, **effort)
            found[phase] = {"sequences": self.batch, "rows": rows}
            found[phase] |= {f"{name}_ms": 1e3 * timing.median(name) for name in functions}
            found[phase]["times_as_fast"] = timing.ratio("onepass", "stock").to_dict()
            if READ in functions:
                found[phase]["shares"] = {name: shares(functions[name]) for name in writers}
                found[phase]["bytes"] = token_bytes * steps
                found[phase]["read_times_as_fast"] = timing.ratio(READ, "stock").to_dict()
            for name in functions:
                median, low, high = (1e3 * timing.percentile(name, p) for p in (50, 10, 90))
                writer = writers.get(name)
                share = ""
                if writer and READ in functions:
                    part = writer.read_bytes(used) / token_bytes
                    share = f"{part * timing.median(READ) / timing.median(name):.0%}"
                table.add_row(
                    self.name,
                    f"{phase} {self.batch} x {rows}",
                    name if writer else f"a read of {token_bytes / 1e6:.0f} MB a token",
                    f"{median:.4g} [{low:.4g}-{high:.4g}]",
                    f"{1e3 * self.batch * rows / median:,.0f}",
                    "1" if name == "stock" else str(timing.ratio(name, "stock")),
                    share,
                    f"{writer.weight_bytes():,}" if writer else "",
                    end_section=name == list(functions)[-1],
                )
        return found


@torch.inference_mode()
def perplexities(comparison: Comparison, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Perplexity of bytes (batch, seq) by the model of each way."""
    writers = comparison.all_writers.items()
    return {name: math.exp(writer.model(inputs, targets)) for name, writer in writers}


def read(memory: Tensor, times: int) -> None:
    for _ in range(times):
        memory.sum()


def shares(function: Callable[[], object]) -> dict[str, float]:
    """Where a call's time goes, by torch's profiler, which makes the rest larger than it is."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function()
    events = profiled.key_averages()
    times = dict.fromkeys(PARTS, 0.0)
    for event in events:
        for part, operators in PARTS.items():
            times[part] += event.cpu_time_total * (event.key in operators)
    total = sum(event.self_cpu_time_total for event in events)
    times["rest"] = total - sum(times.values())
    return {part: time / total for part, time in times.items()}


def amdahl(decoding: dict) -> dict[str, dict[str, float]]:
    """The gain of each quantised way's linear layers over onepass's, the tokens/s which that allows
    where the rest of a token takes as long as onepass's, and the part of them that is reached."""
    found, tokens = {}, decoding["sequences"] * decoding["rows"]
    plain, shares = decoding["onepass_ms"], decoding["shares"]
    linear = {name: of["linear layers"] * decoding[f"{name}_ms"] for name, of in shares.items()}
    for name in QUANTIZED:
        least = plain - linear["onepass"] + linear[name]
        found[name] = {
            "gain": linear["onepass"] / linear[name],
            "allowed": 1e3 * tokens / least,
            "reached": least / decoding[f"{name}_ms"],
        }
    return found


def as_text(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


def new_table() -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("GPT", "phase", "by"):
        table.add_column(column, no_wrap=True)
    for column in (
        r"median ms \[p10-p90]",
        "tokens/s",
        r"times as fast \[95 %]",
        "of a read",
        "weight bytes",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    return table


# ---- training -----------------------------------------------------------------------------------


def train(workload: GptWorkload, settings: Settings, seconds: float, most_steps: float) -> GPT:
    """The workload's GPT, of plain torch modules, trained with onepass's for `seconds`, at most
    `most_steps`."""
    model = workload.build()
    phase = Phase("Training, seconds", math.ceil(seconds))
    with onepass.swapped(model), Progress("generate", [phase]) as progress:
        trainer = Trainer(model, settings)
        advance = progress.next()
        begin, shown = time.perf_counter(), 0
        for step in itertools.count():
            elapsed = time.perf_counter() - begin
            if elapsed >= seconds or step >= most_steps:
                break
            for _ in range(shown, int(elapsed)):
                advance()
            shown = int(elapsed)
            trainer.step(workload.batch(step))
        loss = workload.curve_point(trainer, None)
    print(f"{step} steps in {elapsed:.0f} s; {workload.curve_name}: {loss:.2f}.\n")
    return model


# ---- the command --------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    args = read_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    small, large = (QUICK_SAMENESS, QUICK_SPEED) if args.quick else (SAMENESS, SPEED)
    try:
        file = args.json and OutputFile(args.json)
    except OSError as error:
        print(f"generate: --json cannot be written: {error.strerror}: {args.json}", file=sys.stderr)
        return 2
    try:
        text = load_text()
        prompts = read_prompt(args, small, text), held_out_prompt(args, large, text)
    except BadInput as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = read_settings(parser.parse_args([]))  # compare's own: float32 on the CPU, seed 0
    workloads = [GptWorkload(settings, text, sizes, dropout=0.0) for sizes in (small, large)]
    print(f"Training the small GPT, {small}, on the {text.describe()}.")
    trained = train(workloads[0], settings, args.seconds, QUICK_STEPS if args.quick else math.inf)
    dtype = getattr(torch, args.dtype)
    models = [model.eval().to(dtype) for model in (trained, workloads[1].build())]
    comparisons = [
        Comparison(name, model, sizes, prompt, args.tokens)
        for name, model, sizes, prompt in zip(
            ("small", "large"), models, (small, large), prompts, strict=True
        )
    ]
    for sequence in range(1 if args.prompt else min(args.batch, SHOWN)):
        comparisons[0].show(sequence)
    for comparison in comparisons:
        if difference := comparison.difference():
            print(f"DIFFERENT: the {comparison.name} GPT's, {difference}.")
            return 1
    written = f"{args.batch} x {args.tokens} bytes of either GPT"
    if dtype is torch.float32:
        print(f"Same: {written}, the likeliest in float32.")
    else:
        common = " and ".join(str(comparison.bytes_in_common()) for comparison in comparisons)
        print(f"Same: the logits of {written}, as far as {args.dtype} goes.")
        print(f"Both ways chose the same byte {common} times of {args.batch * args.tokens}.")

    table = new_table()
    effort = dict(rounds=3, seconds=0.0) if args.quick else dict(rounds=7, seconds=2.0)
    found = {}
    phases = [Phase(f"Timing, the {comparison.name} GPT") for comparison in comparisons]
    with Progress("generate", phases) as progress:
        for comparison in comparisons:
            progress.next()
            found[comparison.name] = comparison.measure(table, **effort)
    # A pipe has no width and a terminal may be narrow: lines wrap and are not cut short.
    console = Console(width=max(Console().width, TABLE_WIDTH))
    console.print(table)
    print(
        f"large: {large.layers} layers, {large.heads} heads, width {large.width}, caches of "
        f"{large.block} rows, as initialised."
    )
    decoding = found["large"]["decode"]
    decoding["amdahl"] = amdahl(decoding)
    for name, parts in decoding["shares"].items():
        listed = ", ".join(f"{part} {share:.0%}" for part, share in parts.items())
        print(f"A token of the large GPT by {name}: {listed}.")
    for name, of in decoding["amdahl"].items():
        print(
            f"Amdahl, {name}: linear layers {of['gain']:.2f} times as fast as onepass's, so at "
            f"most {of['allowed']:,.0f} tokens/s; {of['reached']:.0%} of that is reached."
        )
    held_out = held_out_batch(text, small.block, 8 if args.quick else 64)
    found["perplexity"] = perplexities(comparisons[0], *held_out)
    listed = ", ".join(f"{name} {value:.4g}" for name, value in found["perplexity"].items())
    print(f"Perplexity of the small GPT on {held_out[0].numel():,} bytes not trained on: {listed}.")
    if args.quick:
        print("--quick: tiny sizes, a trial. These figures measure nothing.")
    print(" | ".join(f"{name} {value}" for name, value in machine_facts().items()))
    options = {name: v for name, v in vars(args).items() if name not in ("json", "prompt")}
    result = {"options": options, "machine": machine_facts(), "models": found}
    data = json.dumps(result, indent=1).encode() + b"\n"
    return 0 if write_or_say("generate", "--json", file, data) else 2


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of training (default 60)")
    add("--prompt", metavar="TEXT", help="of each sequence (default: text not trained on)")
    add("--tokens", type=int, metavar="N", help="bytes to write (default 64)")
    add("--batch", type=int, default=4, metavar="N", help="sequences at a time (default 4)")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and caches (default float32); training is in float32",
    )
    add("--threads", type=int, metavar="N", help="torch's own number by default")
    add("--json", metavar="FILE", help="keep the figures")
    add("--quick", action="store_true", help="tiny sizes: a trial, not a measurement")
    args = parser.parse_args(arguments)
    if args.tokens is None:
        args.tokens = 16 if args.quick else 64
    for name, least in (("seconds", 0), ("tokens", 2), ("batch", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and not value >= least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    return args


def read_prompt(args: argparse.Namespace, sizes: Sizes, text: Text) -> Tensor:
    """The prompts of the trained GPT, (batch, seq): --prompt in each row, or held-out text."""
    if args.prompt is None:
        return held_out_prompt(args, sizes, text)
    prompt, room = args.prompt.encode(), room_for_prompt(args, sizes)
    if not 1 <= len(prompt) <= room:
        raise BadInput(
            f"--prompt must have 1 to {room} bytes, for the GPT has {sizes.block} positions and "
            f"--tokens takes {args.tokens}, got {len(prompt)}"
        )
    return torch.tensor(list(prompt)).repeat(args.batch, 1)


def held_out_prompt(args: argparse.Namespace, sizes: Sizes, text: Text) -> Tensor:
    """As much text (batch, seq) as there is room for."""
    return held_out_batch(text, room_for_prompt(args, sizes), args.batch)[0]


def room_for_prompt(args: argparse.Namespace, sizes: Sizes) -> int:
    if args.tokens >= sizes.block:
        raise BadInput(f"--tokens must be less than {sizes.block}, got {args.tokens}")
    return sizes.block - args.tokens


if __name__ == "__main__":
    sys.exit(main())
