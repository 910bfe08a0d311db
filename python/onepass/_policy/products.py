"""Whether torch's or onepass's matrix products are faster on this CPU: a rule by the dtype, the
CPU's vendor and the library that torch would call.

torch gives float32 products to MKL, which uses its AVX2 kernels on any AMD CPU. It gives bfloat16
products to oneDNN if that has instructions for them, and float16 likewise; otherwise its own loops
compute them, 8 to 500 times slower than float32 (`onepass bench linear`). It also gives float32 to
oneDNN if `torch.set_float32_matmul_precision("medium")` allows bfloat16 products, where that takes
half the speed of its products of bfloat16; onepass's then round their factors while packing. oneDNN
packs the weight in each call, also for a few rows: onepass's products then read it in place.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onepass import _dispatch_log
from onepass._compiling import constant_where_traced
from onepass._ops import tracing
from onepass._policy.precision import (
    float32_precision,
    only_torch_rounds,
    quantizes,
    rounds_factors,
)

# Products that onepass computes faster although oneDNN has instructions, because oneDNN packs the
# weight in each call. The bounds: SMALL_PRODUCT multiply-adds with SMALL_WEIGHT elements of weight,
# or FEW_ROWS rows without gradients. In bfloat16 on one thread of Zen 4 (benchmarks/small_calls.py,
# training / inference): 256x256 with 1, 16, 64 rows 1.3 / 1.7, 1.2 / 1.4, 1.1 / 1.1 times as fast;
# 512x512 with 1, 8, 16 rows 0.8 / 1.5, 0.9 / 1.3, 0.8 / 1.1; 2048x2048 in inference with 1, 12, 16
# rows 1.4, 1.05, 0.9. Other dtypes and CPUs have not been measured.
SMALL_PRODUCT = {torch.bfloat16: 1 << 21}
SMALL_WEIGHT = 1 << 17
FEW_ROWS = {torch.bfloat16: 12}
LEAST_WIDTH = 64  # of a small product's weight, either way: 1024 rows by 2x768 take twice as long

_AMD = "AuthenticAMD"


class Facts(NamedTuple):
    vendor: str  # as /proc/cpuinfo has it
    mkl: bool  # whether torch's float32 products are MKL's
    bfloat16: bool  # whether oneDNN has instructions for bfloat16 products and may use them
    float16: bool


@functools.cache
def facts() -> Facts:
    """The facts of this machine and this torch."""
    onednn = torch.backends.mkldnn.is_available()
    vendor, flags = _of_cpuinfo()
    with _disable_current_modes():  # torch.export would record the questions
        # torch reports support for any AVX-512, where oneDNN imitates missing instructions.
        supported = onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        bfloat16 = supported and (not flags or not flags.isdisjoint(_BFLOAT16))
        float16 = onednn and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return Facts(
        vendor=vendor,
        mkl=torch.backends.mkl.is_available(),
        bfloat16=bfloat16 and not _is_held_below("BF16"),
        float16=float16 and not _is_held_below("FP16"),
    )


def as_fast(dtype: torch.dtype, small: bool = False, precision: str | None = None) -> str | None:
    """Why torch's products of a dtype are as fast here as onepass's; None if they are slower.

    Args:
        small: for small products.
        precision: the module's own, of float32 products; None: torch's setting.
    """
    of = facts()
    if dtype is torch.float32:
        if quantizes(precision):
            return None
        if rounds_factors(precision) and (precision is not None or of.vendor == _AMD):
            return None
        if only_torch_rounds(precision):
            return None
        if of.bfloat16 and float32_precision() == "bf16":
            return "float32 products, by oneDNN as matmul precision allows"
        if of.vendor == _AMD and of.mkl:
            return None
        return f"float32 products, by {'MKL' if of.mkl else 'BLAS'} on {of.vendor or 'this CPU'}"
    name = str(dtype).removeprefix("torch.")
    if dtype in (torch.bfloat16, torch.float16):
        has_instructions = getattr(of, name) and torch._C._get_mkldnn_enabled()
        if not has_instructions or (small and dtype in FEW_ROWS and of.vendor == _AMD):
            return None
        return f"{name} products, by oneDNN"
    return f"{name} products"


def dtype_of(tensor: Tensor) -> torch.dtype:
    """The dtype of products on the CPU with this input or weight: autocast's, if it is on and casts
    this one."""
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled("cpu"):
        return tensor.dtype
    if tensor.dtype is torch.float64 or not tensor.is_floating_point():
        return tensor.dtype
    return torch.get_autocast_dtype("cpu")


def is_small(rows: int, dtype: torch.dtype, weight: Tensor, training: bool) -> bool:
    """Whether a product of this dtype is a SMALL_PRODUCT or one of FEW_ROWS: not if autocast would
    cast the weight in each call, and not in a trace by torch.jit, which is used at other sizes."""
    if dtype not in FEW_ROWS or weight.dtype is not dtype or tracing.is_tracing():
        return False
    if rows <= FEW_ROWS[dtype] and not training:
        return True
    size, is_wide = weight.numel(), min(weight.shape[-2:]) >= LEAST_WIDTH
    return is_wide and size <= SMALL_WEIGHT and rows * size <= SMALL_PRODUCT[dtype]


def gains(input: Tensor, weight: Tensor, precision: str | None = None) -> bool:
    """Whether a call gains, by the dtype of its products, their precision and its size; if not, the
    reason is logged."""
    if input.is_cuda:
        record_fallback(input.shape, input.dtype, "torch's products on CUDA")
        return False
    dtype = dtype_of(input)
    if torch.compiler.is_compiling():
        return _gains_as_compiled(dtype, precision)
    rows = input.numel() // max(weight.shape[-1], 1)
    small = is_small(rows, dtype, weight, torch.is_grad_enabled())
    return not is_as_fast(dtype, input.shape, small, precision)


def is_as_fast(
    dtype: torch.dtype, shape: Sequence[int], small: bool = False, precision: str | None = None
) -> bool:
    """Whether torch's product is as fast; logged with the input's shape."""
    reason = as_fast(dtype, small, precision)
    if reason:
        record_fallback(shape, dtype, f"torch is as fast here in {reason}")
    return reason is not None


def record_fallback(shape: Sequence[int], dtype: torch.dtype, reason: str) -> None:
    """Logs why torch computes a product of this input."""
    if torch.compiler.is_compiling() or not _dispatch_log.is_recording():
        return
    _dispatch_log.record_fallback(
        op="linear",
        arguments=f"{tuple(shape)}, {str(dtype)[6:]}",
        kernel="torch.nn.functional.linear",
        threads=torch.get_num_threads(),
        reason=reason,
    )


@constant_where_traced
def _gains_as_compiled(dtype: torch.dtype, precision: str | None) -> bool:
    return as_fast(dtype, precision=precision) is None


# Levels to which oneDNN can be limited, those without instructions for 16-bit products first.
_LEVELS = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
_BELOW = {"BF16": _LEVELS, "FP16": (*_LEVELS, "AVX512_CORE_BF16")}


def _is_held_below(dtype: str) -> bool:
    """Whether the environment forbids oneDNN such instructions, which torch's query of the
    processor does not show."""
    told = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return told.upper() in _BELOW[dtype]


_BFLOAT16 = ("avx512_bf16", "amx_bf16")  # of an x86 processor


def _of_cpuinfo() -> tuple[str, frozenset[str]]:
    """(vendor, instructions) of an x86 processor; elsewhere, and if unknown, both are empty."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    said: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        said.setdefault(key.strip(), value.strip())
    return said.get("vendor_id", ""), frozenset(said.get("flags", "").split())
