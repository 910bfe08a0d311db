"""Whether products of float32 on a CPU take factors that are rounded to bfloat16: because a call, a
module or torch's global setting says so."""

from __future__ import annotations

import torch
from torch import nn

from onepass import _C
from onepass._compiling import constant_where_traced

HAS_PAIR_PRODUCTS = _C.cpu_level() == "avx512_bf16"  # dot products of pairs of bfloat16
_PRECISIONS = (None, "highest", "high", "medium")
ATTRIBUTE = "_onepass_precision"  # of a module whose products have one of their own


def check_precision(op: str, precision: str | None) -> None:
    """Raises ValueError unless this is a precision of float32 products."""
    if precision not in _PRECISIONS:
        raise ValueError(
            f"{op}: precision must be None, 'highest', 'high' or 'medium', got {precision!r}"
        )


def precision_of(module: nn.Module) -> str | None:
    """The precision of a module's float32 products that `swap` was asked for; None: torch's
    setting."""
    if torch.compiler.is_compiling():
        return getattr(module, ATTRIBUTE, None)  # which a graph is guarded by
    return module.__dict__.get(ATTRIBUTE)  # a miss of getattr takes a microsecond


def rounds_factors(precision: str | None = None) -> bool:
    """Whether float32 products on this CPU take factors that are rounded to bfloat16: with
    "medium", or with None where torch's global setting says so."""
    if not HAS_PAIR_PRODUCTS or precision not in (None, "medium"):
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
    if precision in (None, "medium"):
        return False
    return _global_rounds() if torch.compiler.is_compiling() else float32_precision() == "bf16"


def sentence(own: set[str | None]) -> str:
    """Says what was asked of float32 products beside torch's default, and whether this CPU does it.

    own: the precisions of a model's modules, of which None is torch's setting.
    """
    names = {"bf16": "medium", "tf32": "high"}
    asked = {names.get(float32_precision()) if one is None else one for one in own}
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
