"""Writes the table of operators, dtypes and back ends into README.md and docs/operators.md.

    python docs/support_matrix.py [--check]

docs/operators.md has a line for each function, README.md one for each group of functions. Each
public function is called in each dtype on the CPU, forward and backward; the table shows which
calls succeed. The list of operators says which have CUDA kernels.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import onepass
from onepass import functional as F

ROOT = Path(__file__).resolve().parents[1]
README, OPERATORS = ROOT / "README.md", ROOT / "docs" / "operators.md"
BEGIN, END = "<!-- operators: begin (make docs) -->\n", "<!-- operators: end -->\n"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER = (
    f"| Operator | {' | '.join(str(dtype)[6:] for dtype in DTYPES)} | CPU | CUDA |",
    "| --- |" + " --- |" * (len(DTYPES) + 2),
)


class Row(NamedTuple):
    functions: tuple[str, ...]
    group: str
    cells: tuple[str, ...]  # of each dtype, CPU, CUDA


Call = Callable[[Callable[..., torch.Tensor]], object]  # its argument makes an input of a shape


def _decode(new: Callable[..., torch.Tensor]) -> torch.Tensor:
    caches = [new(1, 2, 8, 16).detach() for _ in range(2)]
    return F.attention_with_kv_cache(new(1, 4, 1, 16).detach(), *caches, cache_seqlens=4)


def _step(name: str) -> Call:
    def step(new: Callable[..., torch.Tensor]) -> None:
        parameter = torch.nn.Parameter(new(64).detach())
        parameter.grad = torch.ones_like(parameter)
        getattr(onepass.optim, name)([parameter], lr=1e-3).step()

    return step


def _step_of_muon(name: str) -> Call:
    def step(new: Callable[..., torch.Tensor]) -> None:
        parameters = [torch.nn.Parameter(new(8, 8).detach()) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        groups = [
            {"params": [parameter], "use_muon": use_muon}
            for parameter, use_muon in zip(parameters, (True, False), strict=True)
        ]
        getattr(onepass.optim, name)(groups, lr=1e-3).step()

    return step


def _keys(new: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """q, k and v of a delta rule."""
    return [new(2, 8, 4, 3) for _ in "qkv"]


def _clip(new: Callable[..., torch.Tensor]) -> None:
    parameter = torch.nn.Parameter(new(64).detach())
    parameter.grad = torch.ones_like(parameter)
    onepass.optim.clip_grad_norm_([parameter], 1.0)


_NORMS = "Norms (layer, RMS, group, modulated), residual adds, dropout"
_ELEMENTWISE = "Rotary embedding, gated activations, cross entropy"
_LINEAR = "Linear layers, alone, quantised or with their cross entropy; causal convolution"
_ONE_PASS, _WHOLE_TENSORS = "AdamW, Adam, SGD, Lion, clipping", "Muon, Adafactor, LAMB"

# Functions that take the same dtypes, with a call of each; the operator that computes them (""
# where torch does); their group in the README ("" for helpers, which it leaves out). A call returns
# the tensor that is differentiated, if there is one.
ROWS: tuple[tuple[dict[str, Call], str, str], ...] = (
    (
        {
            "scaled_dot_product_attention": lambda new: F.scaled_dot_product_attention(
                *(new(1, 2, 4, 16) for _ in range(3))
            ),
            "varlen_attention": lambda new: F.varlen_attention(
                *(new(4, 2, 16) for _ in range(3)),
                *(torch.tensor([0, 4], dtype=torch.int32) for _ in range(2)),
                4,
                4,
            ),
        },
        "attention_forward",
        "Attention, dense and packed",
    ),
    ({"attention_with_kv_cache": _decode}, "attention_decode", "Decoding with a KV cache"),
    (
        {
            "merge_attention_states": lambda new: F.merge_attention_states(
                [new(1, 2, 4, 16) for _ in range(2)], [torch.zeros(1, 2, 4) for _ in range(2)]
            )[0]
        },
        "",
        "",
    ),
    (
        {
            "layer_norm": lambda new: F.layer_norm(new(2, 16), (16,), new(16), new(16)),
            "rms_norm": lambda new: F.rms_norm(new(2, 16), (16,), new(16)),
            "add_layer_norm": lambda new: F.add_layer_norm(new(2, 16), new(2, 16), (16,))[0],
            "add_rms_norm": lambda new: F.add_rms_norm(new(2, 16), new(2, 16), (16,))[0],
        },
        "norm_forward",
        _NORMS,
    ),
    (
        {
            "modulated_layer_norm": lambda new: F.modulated_layer_norm(
                new(2, 3, 16), (16,), new(2, 16), new(2, 16), residual=new(2, 3, 16)
            )[0],
            "modulated_rms_norm": lambda new: F.modulated_rms_norm(
                new(2, 3, 16), (16,), new(2, 16), new(2, 16)
            ),
        },
        "modulated_norm_forward",
        _NORMS,
    ),
    (
        {
            "dropout": lambda new: F.dropout(new(2, 16), 0.1),
            "add_dropout": lambda new: F.add_dropout(new(2, 16), new(2, 16), 0.1),
        },
        "dropout_forward",
        _NORMS,
    ),
    ({"drop_path_scale": lambda new: F.drop_path_scale(new(2, 16), 0.1)}, "dropout_forward", ""),
    (
        {
            "rotary_embedding": lambda new: F.rotary_embedding(
                new(1, 2, 4, 16), None, *(new(4, 16).detach() for _ in range(2))
            )[0]
        },
        "rotary_forward",
        _ELEMENTWISE,
    ),
    (
        {
            "gated_activation": lambda new: F.gated_activation(new(2, 16)),
            "silu_mul": lambda new: F.silu_mul(new(2, 16), new(2, 16)),
            "gelu_mul": lambda new: F.gelu_mul(new(2, 16), new(2, 16)),
        },
        "gate_forward",
        _ELEMENTWISE,
    ),
    (
        {
            "quantized_linear": lambda new: F.quantized_linear(
                new(2, 16),
                torch.zeros(1, 4, 16, dtype=torch.int32),
                new(1, 8).detach(),
                weights="int8",
            )
        },
        "quantized_linear_forward",
        _LINEAR,
    ),
    (
        {"causal_conv1d": lambda new: F.causal_conv1d(new(2, 4, 8), new(4, 4), new(4))},
        "causal_conv1d_forward",
        _LINEAR,
    ),
    (
        {
            "causal_conv1d_update": lambda new: F.causal_conv1d_update(
                new(2, 4), new(2, 4, 3).detach(), new(4, 4)
            )
        },
        "causal_conv1d_update",
        _LINEAR,
    ),
    (
        {
            "selective_scan": lambda new: F.selective_scan(
                new(2, 4, 8), new(2, 4, 8), new(4, 3), new(2, 3, 8), new(2, 3, 8)
            )
        },
        "selective_scan_forward",
        _LINEAR,
    ),
    (
        {
            "mamba_chunk_scan": lambda new: F.mamba_chunk_scan(
                new(2, 8, 4, 4), new(2, 8, 4), new(4), new(2, 8, 1, 3), new(2, 8, 1, 3), 64
            )
        },
        "mamba_chunk_scan_forward",
        _LINEAR,
    ),
    (
        {
            "chunk_gated_delta_rule": lambda new: F.chunk_gated_delta_rule(
                *_keys(new), new(2, 8, 4), new(2, 8, 4)
            )[0],
            "chunk_kda": lambda new: F.chunk_kda(*_keys(new), new(2, 8, 4, 3), new(2, 8, 4))[0],
            "fused_recurrent_gated_delta_rule": lambda new: F.fused_recurrent_gated_delta_rule(
                *_keys(new), new(2, 8, 4), new(2, 8, 4)
            )[0],
            "fused_recurrent_kda": lambda new: F.fused_recurrent_kda(
                *_keys(new), new(2, 8, 4, 3), new(2, 8, 4)
            )[0],
            "delta_rule_update": lambda new: F.delta_rule_update(
                new(2, 4, 3, 3).detach(), *_keys(new), new(2, 8, 4), new(2, 8, 4)
            ),
        },
        "delta_rule_forward",
        _LINEAR,
    ),
    (
        {
            "selective_state_update": lambda new: F.selective_state_update(
                new(2, 4, 3).detach(), new(2, 4), new(2, 4), new(4, 3), new(2, 3), new(2, 3)
            )
        },
        "selective_state_update",
        _LINEAR,
    ),
    (
        {
            "group_norm": lambda new: F.group_norm(
                new(2, 4, 8), 2, new(4), new(4), activation="silu"
            )
        },
        "group_norm_forward",
        _NORMS,
    ),
    (
        {
            "cross_entropy": lambda new: F.cross_entropy(
                new(2, 16), torch.zeros(2, dtype=torch.int64)
            )
        },
        "loss_forward",
        _ELEMENTWISE,
    ),
    (
        {
            "linear_cross_entropy": lambda new: F.linear_cross_entropy(
                new(2, 16), new(8, 16), torch.zeros(2, dtype=torch.int64)
            )
        },
        "linear_product",
        _LINEAR,
    ),
    (
        {"linear": lambda new: F.linear(new(2, 16), new(8, 16), new(8))},
        "linear_product",
        _LINEAR,
    ),
    (
        {f"optim.{name}": _step(name) for name in ("AdamW", "Adam", "SGD", "Lion")},
        "optimizer_step",
        _ONE_PASS,
    ),
    # Their products, or formulas, are torch's.
    (
        {f"optim.{name}": _step_of_muon(name) for name in ("Muon", "MuonWithAdamW")},
        "",
        _WHOLE_TENSORS,
    ),
    ({f"optim.{name}": _step(name) for name in ("Adafactor", "LAMB")}, "", _WHOLE_TENSORS),
    ({"optim.clip_grad_norm_": _clip}, "gradient_norm", _ONE_PASS),
)


def main() -> int:
    warnings.filterwarnings("ignore", message=".*are known to stall")  # nothing is trained
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if one differs")
    check = parser.parse_args().check
    stale = 0
    for page, lines in tables().items():
        old = page.read_text(encoding="utf-8")
        new = with_table(old, lines)
        if new != old:
            stale += 1
            print(f"{page.relative_to(ROOT)} {'is stale: make docs' if check else 'written'}")
            if not check:
                page.write_text(new, encoding="utf-8")
    return 1 if check and stale else 0


def tables() -> dict[Path, list[str]]:
    """The table of each page, without its header."""
    found = list(rows())
    return {OPERATORS: list(by_function(found)), README: list(by_group(found))}


def with_table(page: str, lines: list[str]) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the page has no line {BEGIN.strip()!r} and {END.strip()!r}")
    return before + BEGIN + "\n".join((*HEADER, *lines)) + "\n" + END + after


def rows() -> Iterator[Row]:
    on_cuda = cuda_operators()
    for calls, operator, group in ROWS:
        found = [tuple(takes(call, dtype) for call in calls.values()) for dtype in DTYPES]
        if any(len(set(of_dtype)) != 1 for of_dtype in found):
            raise SystemExit(f"{', '.join(calls)} differ in what they take: give each a row")
        cpu = "kernels" if operator else "torch's"
        cuda = "kernels, emulated only" if operator in on_cuda else "torch's"
        yield Row(tuple(calls), group, (*(of_dtype[0] for of_dtype in found), cpu, cuda))


def by_function(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        yield line(", ".join(f"`{name}`" for name in row.functions), row.cells)


def by_group(rows: Iterable[Row]) -> Iterator[str]:
    """All rows of a group must have the same cells."""
    groups: dict[str, tuple[str, ...]] = {}
    for functions, group, cells in rows:
        if group and groups.setdefault(group, cells) != cells:
            raise SystemExit(f"{', '.join(functions)} must have a group other than {group!r}")
    return (line(group, cells) for group, cells in groups.items())


def line(name: str, cells: tuple[str, ...]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def takes(call: Call, dtype: torch.dtype) -> str:
    """The cell of a dtype: "yes", "forward" or "no", by a call on the CPU."""

    def new(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0.5, dtype=dtype, requires_grad=True)

    try:
        output = call(new)
    except RuntimeError as error:
        if "must have dtype" not in str(error):
            raise
        return "no"
    if not isinstance(output, torch.Tensor):
        return "yes"
    if not output.requires_grad:
        return "forward"
    output.float().sum().backward()
    return "yes"


def cuda_operators() -> set[str]:
    """Operators that have CUDA kernels."""
    text = (ROOT / "csrc" / "ops" / "backend.h").read_text(encoding="utf-8")
    listed = text.partition("ONEPASS_OPERATORS(OPERATOR)")[2].partition("ONEPASS_CPU_OPERATORS")[0]
    return set(re.findall(r"OPERATOR\((\w+),", listed))


if __name__ == "__main__":
    sys.exit(main())
