"""The best speeds of this machine, measured in this process with the threads of the benchmark.

A kernel is judged by its share of the ceiling that binds it; on shared machines a fixed number of
gigabytes per second would mean nothing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch

from onepass.tools.harness import clock_of, measure_pairs

BIG_BYTES = 192 << 20  # per tensor: well beyond any cache here
CUDA_BIG_BYTES = 1 << 30  # the same on CUDA; a millisecond of the fastest device
CUDA_MATRIX = 8192  # rows and columns: 1.1 TFLOP, 2 ms of the fastest device
MATRICES = (torch.bfloat16, torch.float32)
ARITHMETIC_SECONDS = 0.1


@dataclass(frozen=True)
class Ceilings:
    """GB/s count bytes read plus bytes written; None is not measured."""

    threads: int
    tensor_bytes: int
    copy_gbps: float  # out[:] = in, tensors of tensor_bytes
    update_gbps: float  # x *= c in place, the same size
    fma_gflops: float | None  # float32 multiply-add, all threads
    bf16_dot_gflops: float | None  # bfloat16 dot products, all threads; 0 where the CPU has none
    int8_dot_gflops: float | None = None  # the same of int8: 10^9 operations per second

    def to_dict(self) -> dict:
        return asdict(self)

    def arithmetic_gflops(self, unit: str) -> float | None:
        """The ceiling of multiply-adds of float32, or of dot products of bfloat16 or int8 if the
        CPU has them; unit: which of the three."""
        dots = {"bfloat16": self.bf16_dot_gflops, "int8": self.int8_dot_gflops}
        return dots.get(unit) or self.fma_gflops

    def __str__(self) -> str:
        arithmetic = "FMA float32 not measured"
        if self.fma_gflops is not None:
            arithmetic = f"FMA float32 {self.fma_gflops:.0f} GFLOP/s"
            if self.bf16_dot_gflops:
                arithmetic += f", dot bfloat16 {self.bf16_dot_gflops:.0f} GFLOP/s"
            if self.int8_dot_gflops:
                arithmetic += f", dot int8 {self.int8_dot_gflops:.0f} GOP/s"
        return (
            f"copy {self.copy_gbps:.1f} GB/s, update in place {self.update_gbps:.1f} GB/s "
            f"(tensors of {self.tensor_bytes >> 20} MiB), {arithmetic}, {self.threads} threads"
        )


@dataclass(frozen=True)
class CudaCeilings:
    """GB/s count bytes read plus bytes written, of tensors of tensor_bytes in device memory."""

    tensor_bytes: int
    copy_gbps: float
    update_gbps: float
    # torch's product of square matrices, in its fastest round; None is not measured.
    matmul_16_gflops: float | None = None  # of bfloat16
    matmul_32_gflops: float | None = None  # of float32, without TF32

    def to_dict(self) -> dict:
        return asdict(self)

    def arithmetic_gflops(self, unit: str) -> float | None:
        """The ceiling of float32 multiply-adds, or of 16-bit products on tensor cores."""
        return self.matmul_32_gflops if unit == "float32" else self.matmul_16_gflops

    def __str__(self) -> str:
        text = (
            f"copy {self.copy_gbps:.0f} GB/s, update in place {self.update_gbps:.0f} GB/s "
            f"(tensors of {self.tensor_bytes >> 20} MiB)"
        )
        if self.matmul_16_gflops is not None and self.matmul_32_gflops is not None:
            text += (
                f", torch's matmul {self.matmul_16_gflops / 1e3:.0f} TFLOP/s in bfloat16, "
                f"{self.matmul_32_gflops / 1e3:.0f} in float32"
            )
        return text


def ceilings(big_bytes: int = BIG_BYTES) -> Ceilings:
    """Measures all ceilings, in about a second; `big_bytes` is the size of each tensor of the
    copy."""
    threads = torch.get_num_threads()
    copy_gbps, update_gbps = _bandwidths(big_bytes, "cpu")
    return Ceilings(
        threads,
        big_bytes // 4 * 4,
        copy_gbps,
        update_gbps,
        _on_all_threads("fma_ceiling", threads),
        _on_all_threads("bf16_dot_ceiling", threads),
        _on_all_threads("int8_dot_ceiling", threads),
    )


def arithmetic_gflops(threads: int, unit: str) -> float | None:
    """The CPU's multiply-adds; of bfloat16 its dot products, if it has them."""
    rate = _on_all_threads("bf16_dot_ceiling", threads) if unit == "bfloat16" else None
    return rate or _on_all_threads("fma_ceiling", threads)


def cuda_ceilings(
    big_bytes: int = CUDA_BIG_BYTES, size: int = CUDA_MATRIX, device: str = "cuda"
) -> CudaCeilings:
    """Measures the ceilings of torch's current device; `big_bytes` is the size of each of two
    tensors, `size` that of the matrices."""
    bandwidths = _bandwidths(big_bytes, device)
    return CudaCeilings(big_bytes // 4 * 4, *bandwidths, *_matmuls(size, device))


def _matmuls(size: int, device: str) -> tuple[float, float]:
    """GFLOP/s of products in bfloat16 and in float32, of the fastest rounds."""
    matrices = {dtype: torch.randn(2, size, size, device=device).to(dtype) for dtype in MATRICES}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        timing = measure_pairs(
            {str(dtype): (lambda of=of: of[0] @ of[1]) for dtype, of in matrices.items()},
            rounds=5,
            seconds=0.5,
            clock=clock_of(device),
        )
    finally:
        torch.set_float32_matmul_precision(precision)
    flops = 2 * size**3
    return tuple(flops / timing.fastest(str(dtype)) / 1e9 for dtype in MATRICES)


def _bandwidths(big_bytes: int, device: str) -> tuple[float, float]:
    """GB/s of a copy and of an update in place."""
    source = torch.ones(big_bytes // 4, device=device)
    target = torch.ones_like(source)
    timing = measure_pairs(
        {"copy": lambda: target.copy_(source), "update": lambda: target.mul_(1.0)},
        rounds=5,
        seconds=0.5,
        clock=clock_of(device),
    )
    gigabytes = 2 * source.nbytes / 1e9
    return gigabytes / timing.median("copy"), gigabytes / timing.median("update")


def _on_all_threads(function: str, threads: int) -> float | None:
    """The sum over as many Python threads, running at once: the functions release the GIL."""
    try:
        from onepass import _C
    except ImportError:
        return None
    measure = getattr(_C, function)
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(measure, [ARITHMETIC_SECONDS] * threads))
