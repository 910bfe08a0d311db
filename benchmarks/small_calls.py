"""Finds the size from which a swapped module or function takes less time than stock's.

For layer norms, group norms, linear layers, modules that call attention, or compute it by hand, or
call F.linear, rotations, and the activations of `register_kernels`.

    python benchmarks/small_calls.py [--dtypes float32 bfloat16] [--only activation attention
        attention_by_hand group_norm linear norm rotary]

On one thread. The tables give how many times faster ours is, in training (forward and backward) and
in inference: medians of processor time in ABBA turns, on which other processes have little effect.
The bounds of onepass._policy.small_calls are read off the tables.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import onepass
from onepass._policy import products, small_calls

COLS = (64, 192, 256, 384, 768, 1024, 2048, 4096)
ROWS = (16, 64, 256, 1024, 4096)
WEIGHTS = ((256, 256), (64, 1024), (1024, 1024))  # (out_features, in_features)
LAYERS = ((2, 768), (8, 256), (64, 64), (256, 256), (512, 512), (3072, 768), (2048, 2048))
LAYER_ROWS = (1, 2, 4, 8, 16, 32, 64, 1024)
SHAPES = ((1, 16), (4, 16), (1, 64), (16, 16), (4, 64), (1, 197), (8, 64), (4, 197), (1, 512))
HEADS, HEAD_DIM = (3, 6, 12), 64
ROTATED, TOKENS = ((2, 1), (8, 2), (16, 16), (32, 8)), (1, 2, 4, 8, 16, 64, 256, 1024)
IMAGES = ((1, 64, 8, 8), (2, 64, 8, 8), (2, 64, 16, 16), (2, 128, 16, 16), (2, 128, 32, 32))
ELEMENTS = (1 << 10, 1 << 14, 1 << 18, 1 << 21)
TURNS, SECONDS = 7, 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=KINDS, metavar="KIND")
    options = parser.parse_args()
    torch.set_num_threads(1)
    small_calls.LEAST_GROUP_NORM.clear()
    small_calls.LEAST_ACTIVATED.clear()
    small_calls.LEAST_ACTIVATION.clear()
    small_calls.LEAST_BY_HAND.clear()
    small_calls.LEAST_MASKED_BY_HAND.clear()
    small_calls.LEAST_ATTENTION.clear()  # ours at every size, whatever torch has
    small_calls.LEAST_LINEAR_CALLS.clear()
    small_calls.LEAST_LINEAR.clear()
    small_calls.LEAST_ROTARY.clear()
    small_calls._is_fast_with_a_row = products.as_fast = lambda *call, **options: None
    for dtype in options.dtypes:
        for kind in options.only:
            KINDS[kind](dtype)
    return 0


def show(title: str, rows: str, shapes: Sequence, counts: Sequence[str], cells: Callable) -> None:
    """A table of cells(shape)."""
    table = Table(rows, *counts, title=f"{title}; times faster")
    for shape in track(shapes, title, console=Console(stderr=True)):
        name = " x ".join(map(str, shape)) if isinstance(shape, tuple) else str(shape)
        table.add_row(name, *cells(shape))
    Console().print(table)


def show_attention(dtype: str, make: Callable | None = None, name: str = "attention") -> None:
    def cells(shape: tuple[int, int]) -> list[str]:
        return [measure_attention(make or Attention, dtype, *shape, heads) for heads in HEADS]

    title = f"{name}, {dtype}: log2 of elements times tokens"
    show(title, "batch x tokens", SHAPES, [f"{heads} heads" for heads in HEADS], cells)


def show_attention_by_hand(dtype: str) -> None:
    show_attention(dtype, ByHand, "attention by hand")
    show_attention(dtype, CausalByHand, "attention by hand, causal")


def show_products(dtype: str) -> None:
    for name, make, shapes, counts in (
        ("linear layers", layer, LAYERS, LAYER_ROWS),
        ("calls of F.linear", Router, WEIGHTS, ROWS),
    ):

        def cells(shape: tuple[int, int], make=make, counts=counts) -> list[str]:
            return [measure_product(make, dtype, rows, shape) for rows in counts]

        title = f"{name}, {dtype}: log2 of multiply-adds"
        show(title, "weight", shapes, [f"{rows} rows" for rows in counts], cells)


def show_norm(dtype: str) -> None:
    def cells(cols: int) -> list[str]:
        return [" / ".join(map("{:.2f}".format, measure(dtype, rows, cols))) for rows in ROWS]

    show(f"layer norm, {dtype}", "columns", COLS, [f"{rows} rows" for rows in ROWS], cells)


def show_rotary(dtype: str) -> None:
    for name, make in (("rotary embedding", Rotary), ("rotary embedding, set apart", Apart)):

        def cells(heads: tuple[int, int], make=make) -> list[str]:
            return [measure_rotary(make, dtype, tokens, *heads) for tokens in TOKENS]

        title = f"{name}, {dtype}: log2 of elements"
        show(title, "heads", ROTATED, [f"{tokens} tokens" for tokens in TOKENS], cells)


def show_group_norm(dtype: str) -> None:
    """The second and fourth column: channels last. In float32 a norm alone is not swapped."""

    def cells(shape: tuple[int, ...]) -> list[str]:
        return [
            measure_group_norm(dtype, shape, following, memory_format)
            for following in (nn.SiLU, nn.Identity)
            for memory_format in (torch.contiguous_format, torch.channels_last)
        ]

    columns = ["with silu", "channels last", "alone", "channels last"]
    show(f"group norm, {dtype}: log2 of elements", "input", IMAGES, columns, cells)


def show_activation(dtype: str) -> None:
    from transformers import activations

    from onepass.integrations.transformers import kernels

    def cells(name: str) -> list[str]:
        layer = next(layer for layer in kernels.LAYERS if layer.name == name)
        stock, ours = (getattr(activations, ACTIVATIONS[name])() for _ in range(2))
        ours.forward = types.MethodType(layer.cls.forward, ours)
        inputs = [torch.randn(n // 512, 512, dtype=getattr(torch, dtype)) for n in ELEMENTS]
        return [measure_both(stock, ours, x, math.log2(x.numel())) for x in inputs]

    counts = [f"2^{math.log2(n):.0f}" for n in ELEMENTS]
    show(f"activation, {dtype}: log2 of elements", "name", list(ACTIVATIONS), counts, cells)


ACTIVATIONS = {
    "SiLU": "SiLUActivation",
    "GeluTanh": "GELUTanh",
    "NewGELU": "NewGELUActivation",
    "FastGELU": "FastGELUActivation",
    "QuickGELU": "QuickGELUActivation",
}
KINDS = {
    "activation": show_activation,
    "attention": show_attention,
    "attention_by_hand": show_attention_by_hand,
    "group_norm": show_group_norm,
    "linear": show_products,
    "norm": show_norm,
    "rotary": show_rotary,
}


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


class Attention(nn.Module):
    """As in timm's vision transformers."""

    def __init__(self, heads: int):
        super().__init__()
        width = heads * HEAD_DIM
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
        y = self.attend(*qkv.unbind(0))
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class ByHand(Attention):
    """The same without `fused_attn`."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = (q * HEAD_DIM**-0.5) @ k.transpose(-2, -1)
        return weights.softmax(dim=-1) @ v


class CausalByHand(Attention):
    """As in nanoGPT without `flash`."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = (q @ k.transpose(-2, -1)) * HEAD_DIM**-0.5
        future = torch.ones(q.shape[2], q.shape[2]).tril() == 0
        return weights.masked_fill(future, -math.inf).softmax(dim=-1) @ v


class Router(nn.Module):
    """As in transformers' mixtures of experts."""

    def __init__(self, shape: tuple[int, int]):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = F.softmax(F.linear(x, self.weight), dim=-1).topk(2, dim=-1).values
        return top / top.sum(-1, keepdim=True)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotate(q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Rotary(nn.Module):
    """As in transformers' Llama."""

    def forward(self, q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(q, k, cos, sin)


def set_apart(q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    return rotated(q), rotated(k)


class Apart(nn.Module):
    """As in transformers' DeepSeek-V3."""

    def forward(self, q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        return set_apart(q, k, cos, sin)


def measure_rotary(
    make_module: Callable, dtype: str, tokens: int, heads: int, key_heads: int
) -> str:
    stock, swapped = make_module(), make_module()
    onepass.swap(swapped)
    q, k = (
        torch.randn(1, tokens, n, HEAD_DIM, dtype=getattr(torch, dtype), requires_grad=True)
        for n in (heads, key_heads)
    )
    cos, sin = (torch.randn(1, tokens, HEAD_DIM, dtype=q.dtype) for _ in range(2))
    upstream = [torch.randn_like(x.transpose(1, 2)) for x in (q, k)]

    def inference(module: nn.Module) -> Callable:
        return torch.no_grad()(lambda: module(q.transpose(1, 2), k.transpose(1, 2), cos, sin))

    def training(module: nn.Module) -> Callable:
        def step() -> None:
            outputs = module(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            torch.autograd.backward(outputs, upstream)
            q.grad = k.grad = None

        return step

    ratios = [times_faster(make(stock), make(swapped)) for make in (training, inference)]
    return f"{math.log2(q.numel() + k.numel()):.1f}: {ratios[0]:.2f} / {ratios[1]:.2f}"


def measure_attention(make: Callable, dtype: str, batch: int, tokens: int, heads: int) -> str:
    x = torch.randn(batch, tokens, heads * HEAD_DIM, dtype=getattr(torch, dtype))
    stock, swapped = (make(heads).to(x.dtype) for _ in range(2))
    onepass.swap(swapped, kinds="attention")
    return measure_both(stock, swapped, x, math.log2(x.numel() * tokens))


def layer(shape: tuple[int, int]) -> nn.Module:
    return nn.Linear(shape[1], shape[0])


def measure_product(make: Callable, dtype: str, rows: int, shape: tuple[int, int]) -> str:
    x = torch.randn(rows, shape[1], dtype=getattr(torch, dtype))
    stock, swapped = (make(shape).to(x.dtype) for _ in range(2))
    return measure_swapped(stock, swapped, x, math.log2(rows * math.prod(shape)))


def measure_group_norm(dtype: str, shape: tuple[int, ...], following: type, memory_format) -> str:
    x = torch.randn(shape, dtype=getattr(torch, dtype)).to(memory_format=memory_format)
    stock, swapped = (
        nn.Sequential(nn.GroupNorm(32, shape[1]), following()).to(x.dtype) for _ in range(2)
    )
    return measure_swapped(stock, swapped, x, math.log2(x.numel()))


def measure_swapped(stock: nn.Module, swapped: nn.Module, x: torch.Tensor, size: float) -> str:
    onepass.swap(swapped)
    return measure_both(stock, swapped, x, size)


def measure_both(stock: nn.Module, swapped: nn.Module, x: torch.Tensor, size: float) -> str:
    x.requires_grad_()
    upstream = torch.randn_like(stock(x))

    def training(module: nn.Module) -> Callable:
        return lambda: module(x).backward(upstream)

    def inference(module: nn.Module) -> Callable:
        return torch.no_grad()(lambda: module(x))

    ratios = [times_faster(make(stock), make(swapped)) for make in (training, inference)]
    return f"{size:.1f}: {ratios[0]:.2f} / {ratios[1]:.2f}"


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
