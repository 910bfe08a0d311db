"""How products of float32 on a CPU take their factors: as they are, rounded to bfloat16, or as
codes of 8 bits, because a call, a module or torch's global setting says so."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import nn

from onepass import _C
from onepass._compiling import constant_where_traced
from onepass.reference.products import INT8_FORWARD, INT8_INPUT, INT8_WEIGHT, ROUNDED

HAS_PAIR_PRODUCTS = _C.cpu_level() == "avx512_bf16"  # dot products of pairs of bfloat16
HAS_BYTE_PRODUCTS = _C.multiplies_bytes()  # dot products of bytes: VNNI
_PRECISIONS = (None, "highest", "high", "medium")
INT8 = "int8"
_INT8_PARTS = {"output": INT8_FORWARD, "dinput": INT8_INPUT, "dweight": INT8_WEIGHT}
_STOCHASTIC = "stochastic"
ATTRIBUTE = "_onepass_precision"  # of a module whose products have one of their own


class Factors(NamedTuple):
    """How a linear layer's products take float32 factors."""

    mask: int  # bits of reference/products.py
    rounds_randomly: bool = False  # the output's gradient, to codes, for that of the input


def check_precision(op: str, precision: str | None) -> None:
    """Raises ValueError unless this is a precision of float32 products."""
    if precision in _PRECISIONS or (isinstance(precision, str) and _int8(precision) is not None):
        return
    raise ValueError(
        f"{op}: precision must be None, 'highest', 'high', 'medium', 'int8', or 'int8:' and some "
        "of output, dinput, dweight, each once, joined by '+', with '+stochastic' beside dinput, "
        f"got {precision!r}"
    )


def quantizes(precision: str | None) -> bool:
    """Whether a linear layer's products, or some of them, take codes of 8 bits."""
    return precision is not None and precision.startswith(INT8)


def quantized_products(precision: str) -> list[str]:
    """The names of the products that a precision quantises."""
    mask = factors_of(precision).mask
    return [name for name, bit in _INT8_PARTS.items() if mask & bit]


def changes_factors(precision: str | None) -> bool:
    """Whether float32 products on this CPU take other factors than float32's."""
    return quantizes(precision) or rounds_factors(precision)


def factors_of(precision: str | None) -> Factors:
    """How a linear layer's products take factors that are both float32.

    "int8" quantises those of output and dinput, as SwitchBackQ does (Wortsman et al. 2023); those
    of dweight are rounded to bfloat16 where the CPU multiplies pairs of those.
    """
    if precision is None or not precision.startswith(INT8):  # without calls: most layers are here
        return _ROUNDING if rounds_factors(precision) else _AS_THEY_ARE
    return _int8(precision)


@constant_where_traced
def _int8(precision: str) -> Factors | None:
    """The factors of "int8" or "int8:..."; None if this is neither."""
    return _parsed(precision)


@functools.cache
def _parsed(precision: str) -> Factors | None:
    name, colon, listed = precision.partition(":")
    parts = listed.split("+") if colon else []
    if name != INT8 or len({*parts}) != len(parts) or not {*parts} <= {*_INT8_PARTS, _STOCHASTIC}:
        return None
    products = [part for part in parts if part != _STOCHASTIC] or ["output", "dinput"]
    if _STOCHASTIC in parts and "dinput" not in products:
        return None
    mask = sum(_INT8_PARTS[part] for part in products)
    return Factors(mask + ROUNDED * HAS_PAIR_PRODUCTS, _STOCHASTIC in parts)


_AS_THEY_ARE, _ROUNDING = Factors(0), Factors(ROUNDED)


def precision_of(module: nn.Module) -> str | None:
    """The precision of a module's float32 products that `swap` was asked for; None: torch's
    setting."""
    if torch.compiler.is_compiling():
        return getattr(module, ATTRIBUTE, None)  # which a graph is guarded by
    return module.__dict__.get(ATTRIBUTE)  # a miss of getattr takes a microsecond


def rounds_factors(precision: str | None = None) -> bool:
    """Whether float32 products on this CPU take factors that are rounded to bfloat16: with
    "medium", or where torch's global setting says so with None, or with "int8" outside of linear
    layers."""
    if not HAS_PAIR_PRODUCTS or precision in ("highest", "high"):
        return False
    if precision == "medium":
        return True
    if torch.compiler.is_compiling():
        return _global_rounds()
    try:  # a tenth of the time of the other; it raises where torch's newer settings were used
        if torch._C._get_float32_matmul_precision() != "medium":
            return False
    except RuntimeError:
        pass
    return float32_precision() == "bf16"


def only_torch_rounds(precision: str | None) -> bool:
    """Whether torch's own products may round factors where this precision asks for float32."""
    if precision not in ("highest", "high"):
        return False
    return _global_rounds() if torch.compiler.is_compiling() else float32_precision() == "bf16"


def sentence(own: set[str | None]) -> str:
    """Says what was asked of float32 products beside torch's default, and whether this CPU does it.

    own: the precisions of a model's modules, of which None is torch's setting.
    """
    names = {"bf16": "medium", "tf32": "high"}
    asked = {names.get(float32_precision()) if one is None else one for one in own}
    if any(map(quantizes, asked)):
        as_fast = "" if HAS_BYTE_PRODUCTS else "; without VNNI they take products of 16 bits"
        return f"precision int8: lines that say so quantise float32 factors to 8 bits{as_fast}"
    if "medium" in asked and HAS_PAIR_PRODUCTS:
        return "precision medium: lines that say so round float32 factors to bfloat16"
    if "medium" in asked:
        level = _C.cpu_level()
        return f"precision medium changes nothing: {level} has no dot products of bfloat16"
    if "high" in asked:
        return "precision high is float32 on a CPU: three products of bfloat16 are no faster"
    return ""


@constant_where_traced
def _global_rounds() -> bool:
    return float32_precision() == "bf16"


def float32_precision() -> str:
    """`torch.backends.mkldnn.matmul.fp32_precision`, which takes a microsecond."""
    return torch._C._get_fp32_precision_getter("mkldnn", "matmul")
