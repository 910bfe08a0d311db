"""The variants that the speed phase compares, by name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import onepass
from onepass._policy.precision import INT8
from onepass.tools.compare.settings import FLOAT32, Settings, at
from onepass.tools.compare.train import Trainer

STOCK, SWAPPED = "stock", "swapped"
COMPILED = "compiled "
KEPT = ", kept memory"
_MEDIUM = ", medium precision"
MEDIUM, SWAPPED_MEDIUM = f"{STOCK}{_MEDIUM}", f"{SWAPPED}{_MEDIUM}"
MEDIUM_MEANS = (
    "products of float32 that may be in bfloat16, as the user allows by "
    'torch.set_float32_matmul_precision("medium")'
)
_AT = ", "
INT8_MEANS = (
    "the factors of linear layers' float32 products quantised to 8 bits, but those of the first "
    "and last layer and of tied heads, by onepass.swap(model, precision=...)"
)
_ONLY = ": "


def names(settings: Settings) -> list[str]:
    """The variants that this process trains; `kept_names` are trained in another one."""
    found = [STOCK, SWAPPED]
    if settings.compile:
        found += [f"{COMPILED}{name}" for name in found]
    for precision in settings.precisions:
        found += [MEDIUM, SWAPPED_MEDIUM] if precision == "medium" else [swapped_at(precision)]
    return found


def swapped_at(precision: str) -> str:
    """The variant that is swapped, with its float32 products at a precision."""
    return SWAPPED_MEDIUM if precision == "medium" else f"{SWAPPED}{_AT}{precision}"


def kept_names(settings: Settings) -> list[str]:
    return [f"{name}{KEPT}" for name in (STOCK, SWAPPED)] if settings.keep_memory else []


def baseline_of(variant: str) -> str:
    """The variant that differs from this one only by the swap; stock has no int8."""
    return variant.partition(f"{_AT}{INT8}")[0].replace(SWAPPED, STOCK)


def of_kinds(kinds: Sequence[str]) -> str:
    """The variant in which only these kinds are swapped."""
    return f"{SWAPPED}{_ONLY}{', '.join(kinds)}"


def kinds_of(variant: str, settings: Settings) -> tuple[str, ...]:
    """The kinds that a variant swaps; empty: the default."""
    named = variant.partition(_ONLY)[2]
    return tuple(named.split(", ")) if named else settings.kinds


def precision_of(variant: str) -> str:
    """The precision of a variant's float32 products."""
    if variant.endswith(_MEDIUM):
        return "medium"
    _, quantized, parts = variant.partition(f"{_AT}{INT8}")
    return f"{INT8}{parts}" if quantized else FLOAT32


def trainer_of(
    variant: str, model: nn.Module, settings: Settings
) -> tuple[Trainer, onepass.Report | None]:
    """Turns a stock model into the variant; returns the report if it is swapped."""
    report, precision = None, precision_of(variant)
    if SWAPPED in variant:
        report = settings.swap(model, kinds_of(variant, settings), precision)
    compiled = variant.startswith(COMPILED)
    return Trainer(model, settings, compiled, around=at(precision)), report
