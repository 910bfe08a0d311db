"""How fast a step's linear layers multiply, against the machine's ceiling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from onepass.tools.ceilings import arithmetic_gflops
from onepass.tools.compare.attribution import by_part
from onepass.tools.compare.settings import Settings

_aten = torch.ops.aten
# The operators that `attribution` counts as linear.
_LINEAR = (
    _aten.mm,
    _aten.addmm,
    torch.ops.onepass.quantized_linear_forward,
    torch.ops.onepass.quantized_linear_backward,
)


@dataclass(frozen=True)
class Products:
    """The products of a step's linear layers, forward and backward, in every variant."""

    operations: int  # multiplications and additions
    ceiling: float | None  # of the CPU's own on as many threads, in GFLOP/s; None: not measured

    def rate(self, parts: dict[str, dict[str, float]] | None) -> float | None:
        """GFLOP/s of a variant, from the milliseconds of its parts."""
        milliseconds = by_part(parts)["linear"] if parts else 0.0
        return self.operations / milliseconds / 1e6 if milliseconds else None


def products_of(counter: FlopCounterMode, model: nn.Module, settings: Settings) -> Products:
    """Counts the products of a step of the stock model.

    nn.MultiheadAttention's projections count as attention, as their time does.
    """
    counts = counter.get_flop_counts()
    root = type(model).__name__
    attention = [
        f"{root}.{name}" if name else root
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    ]

    def linear(name: str) -> int:
        return sum(counts.get(name, {}).get(op, 0) for op in _LINEAR)

    ceiling = None
    if settings.device.type == "cpu":
        ceiling = arithmetic_gflops(settings.threads, str(settings.dtype).removeprefix("torch."))
    return Products(linear("Global") - sum(map(linear, attention)), ceiling)
