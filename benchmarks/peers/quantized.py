"""One layer with a quantised weight by onepass and by those of these that are installed: torch's
`_weight_int8pack_mm`, `_weight_int4pack_mm_for_cpu` and quantize_dynamic, bitsandbytes' nf4, and
torch's plain products in float32 and bfloat16.

    python benchmarks/peers/quantized.py --rows 1 4 16 256 --threads 1 2 --json out.json

Weights are in no cache: each call takes another copy, 128 MiB of them in turn. All ways run in one
process, one after the other in each round; medians. A share of a read is that of torch's sum of
192 MiB, as the speed at which a weight could be read.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass import functional
from onepass.nn import QuantizedLinear

RING_BYTES, READ_BYTES = 128 << 20, 192 << 20
CALLS = 4  # in a round; the first finds no code in the caches, and does not count
F32, BF16 = torch.float32, torch.bfloat16


def _onepass(weights: str, dtype: torch.dtype, activations: str | None = None):
    def make(weight: Tensor):
        layer = QuantizedLinear.from_weight(weight, weights=weights, activations=activations)
        size = sum(buffer.nbytes for buffer in layer.buffers())
        return lambda x: layer(x.to(dtype)), size

    return make


def _plain(dtype: torch.dtype, ours: bool = False):
    def make(weight: Tensor):
        own, product = weight.to(dtype, copy=True), functional.linear if ours else F.linear
        return lambda x: product(x.to(dtype), own), own.nbytes

    return make


def _int8pack(weight: Tensor):
    scales = weight.abs().amax(1) / 127
    codes = (weight / scales[:, None]).round().to(torch.int8)
    of = scales.bfloat16()
    return lambda x: torch._weight_int8pack_mm(x.bfloat16(), codes, of), codes.nbytes


def _int4pack(weight: Tensor):
    groups = weight.unflatten(1, (-1, 64))
    least, most = groups.aminmax(dim=2)
    scale = (most - least) / 15
    codes = ((groups - least[..., None]) / scale[..., None]).round().clamp(0, 15).int().flatten(1)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    of = torch.stack((scale, least + 8 * scale), -1).transpose(0, 1).contiguous().bfloat16()
    product = torch._weight_int4pack_mm_for_cpu
    return lambda x: product(x.bfloat16(), packed, 64, of), packed.nbytes + of.nbytes


def _dynamic(weight: Tensor):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    layer.qconfig = torch.ao.quantization.per_channel_dynamic_qconfig
    return torch.ao.nn.quantized.dynamic.Linear.from_float(layer), weight.numel()


def _bitsandbytes(weight: Tensor):
    from bitsandbytes.nn import Linear4bit

    sizes = weight.shape[1], weight.shape[0]
    layer = Linear4bit(*sizes, bias=False, compute_dtype=BF16, quant_type="nf4")
    layer.load_state_dict({"weight": weight})
    layer = layer.to("cpu").eval()
    return lambda x: layer(x.bfloat16()), weight.numel() // 2 + weight.numel() // 16


WAYS = {
    "torch float32": _plain(F32),
    "torch bfloat16": _plain(BF16),
    "onepass bfloat16": _plain(BF16, True),
    "onepass int8 float32": _onepass("int8", F32),
    "onepass int8 bfloat16": _onepass("int8", BF16),
    "torch int8pack": _int8pack,
    "onepass int8 by int8": _onepass("int8", F32, "int8"),
    "quantize_dynamic": _dynamic,
    "onepass int4 float32": _onepass("int4", F32),
    "onepass int4 bfloat16": _onepass("int4", BF16),
    "torch int4pack": _int4pack,
    "onepass nf4 float32": _onepass("nf4", F32),
    "onepass nf4 bfloat16": _onepass("nf4", BF16),
    "bitsandbytes nf4": _bitsandbytes,
}


def measure(rows: int, shape: tuple[int, int], rounds: int, only: str) -> dict[str, dict]:
    """Milliseconds, share of a read and GF/s of each way."""
    x, rings = torch.randn(rows, shape[0]), {}
    weight = torch.randn(shape[1], shape[0]) / shape[0] ** 0.5
    for name, make in WAYS.items():
        if only not in name:
            continue
        try:
            first, size = make(weight)
            first(x)
        except Exception as problem:
            print(f"{name}: left out, {str(problem).splitlines()[0]}", file=sys.stderr)
            continue
        count = max(RING_BYTES // size, 2)
        rings[name] = [first, *(make(weight)[0] for _ in range(count - 1))], size
    big = torch.ones(READ_BYTES // 4)
    times: dict[str, list[float]] = {name: [] for name in (*rings, "read")}
    with torch.no_grad():
        for number in range(rounds):
            for name, (ring, _) in rings.items():
                for i in range(CALLS):
                    way = ring[(CALLS * number + i) % len(ring)]
                    begin = time.perf_counter()
                    way(x)
                    if i:
                        times[name].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            big.sum()
            times["read"].append(time.perf_counter() - begin)
    read, found = READ_BYTES / statistics.median(times["read"]), {}
    for name, (_, size) in rings.items():
        median = statistics.median(times[name])
        found[name] = {
            "ms": median * 1e3,
            "share_of_read": size / median / read,
            "gflops": 2 * rows * shape[0] * shape[1] / median / 1e9,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 256])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 4096))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="ways whose name has this in it")
    parser.add_argument("--json")
    options = parser.parse_args()
    results = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for rows in options.rows:
            torch.manual_seed(0)
            found = measure(rows, tuple(options.shape), options.rounds, options.only)
            results.append({"threads": threads, "rows": rows, "ways": found})
            print(f"\n{rows} rows, {options.shape[0]} x {options.shape[1]}, {threads} threads")
            for name, of in found.items():
                share = f"{of['share_of_read']:6.0%} of a read"
                print(f"{name:24} {of['ms']:8.2f} ms {share} {of['gflops']:7.1f} GF/s")
    if options.json:
        versions = {"torch": torch.__version__, "onepass": onepass.__version__}
        try:
            versions["bitsandbytes"] = importlib.metadata.version("bitsandbytes")
        except importlib.metadata.PackageNotFoundError:
            versions["bitsandbytes"] = "not installed"
        whole = {
            "level": onepass._C.cpu_level(),
            "versions": versions,
            "shape": options.shape,
            "results": results,
        }
        with open(options.json, "w") as file:
            json.dump(whole, file, indent=1)


if __name__ == "__main__":
    main()
