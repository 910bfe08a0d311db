"""What a device can do, and what the main kernels do with it: `gpu_kernels.py WHAT`.

ceilings: the best speeds of its tensor cores, of ldmatrix, of additions and of a copy, by kernels
          of our own (gpu_ceilings.cu), which `--nvcc PROGRAM` compiles for `--arch`.
split:    microseconds of each kernel of a call (of attention's backward: delta, main, dQ, memset),
          by torch's profiler.
profile:  shares of the tensor cores, of shared memory, of issue slots and of DRAM, bank conflicts
          and occupancy, by Nsight Compute (`--ncu PROGRAM`), which runs `calls` of this file and
          looks at one launch of each kernel. It leaves the clocks as they are.

Each prints a line per kernel as soon as it is known, and writes all of them to --json. Ceilings and
split have the clock and the power of the device in every line, a profile has the clock.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_load
from gpu_machine import ROOT

REPEATS = 10
WARM_UP = 3
# What a value means, and Nsight Compute's name for it; the first six in percent of the peak.
METRICS = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "lsu": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "microseconds": "gpu__time_duration.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "sm_mhz": "smsp__cycles_elapsed.avg.per_second",
}
NO_COUNTERS = "ERR_NVGPUCTRPERM"  # the driver lets only administrators read the counters
Call = Callable[[], object]


# ---- ceilings ------------------------------------------------------------------------------------


def ceilings(nvcc: str, arch: str, say: Callable[[str], object], sensors: Any) -> tuple[int, dict]:
    """The exit code of the compiler or of the program, and its figures by name."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "gpu_ceilings"
        words = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-arch=sm_{arch}"]
        words += [f"-I{ROOT / 'csrc'}", str(ROOT / "benchmarks" / "gpu_ceilings.cu")]
        code = subprocess.run([*words, "-o", str(program)]).returncode
        return (code, {}) if code else figures_of([program], say, sensors)


def figures_of(
    words: Sequence, say: Callable[[str], object], sensors: Any
) -> tuple[int, dict[str, dict]]:
    """(its exit code, {name: value, unit, clock and power}) of a program that prints ceilings."""
    found: dict[str, dict] = {}

    def keep(line: str, load: Any) -> None:
        name, value, unit = re.fullmatch(r"figure ceiling, (.+): ([\d.]+) (\S+)", line).groups()
        found[name] = {"value": float(value), "unit": unit, **asdict(load)}
        say(gpu_load.with_load(line, load))

    code, errors = gpu_load.run(words, sensors, keep)
    print(errors, end="", file=sys.stderr)
    return code, found


# ---- the calls -----------------------------------------------------------------------------------


def calls(device: str, scale: int = 1) -> dict[str, Call]:
    """The main kernels by name, at sizes divided by `scale`."""
    import torch

    from onepass import functional, optim

    def drawn(*size: int) -> torch.Tensor:
        values = torch.randn(*size, device=device, dtype=torch.bfloat16)
        return values.requires_grad_()

    found: dict[str, Call] = {}

    def both(name: str, run: Callable, *inputs: torch.Tensor) -> None:
        output = run(*inputs)
        output = output[-1] if isinstance(output, tuple) else output
        upstream = torch.randn_like(output)
        found[f"{name}, forward"] = lambda: run(*inputs)
        found[f"{name}, backward"] = lambda: torch.autograd.grad(
            output, inputs, upstream, retain_graph=True
        )

    for dim, seq in ((64, 4096), (128, 4096), (128, 512), (256, 4096)):
        seq, heads = max(seq // scale, 8), max(2048 // dim // scale, 1)
        batch = max(16384 // scale // seq, 1)
        attend = functional.scaled_dot_product_attention
        for causal in (False, True):
            both(
                f"attention {dim} x {seq}{' causal' if causal else ''}",
                lambda q, k, v, causal=causal: attend(q, k, v, is_causal=causal),
                *(drawn(batch, heads, seq, dim) for _ in range(3)),
            )
    for rows in (2048, 8192, 65536):
        rows = max(rows // scale, 1)
        both(
            f"rms_norm {rows} x 4096",
            lambda x, w: functional.rms_norm(x, (x.shape[-1],), w),
            drawn(rows, 4096),
            drawn(4096),
        )
    length = max(32768 // scale, 16)
    cache = [drawn(1, 8, length, 128).detach() for _ in range(2)]
    query = drawn(1, 32, 1, 128).detach()
    lengths = torch.full((1,), length, dtype=torch.int32, device=device)
    found[f"decode {length} keys"] = lambda: functional.attention_with_kv_cache(
        query, *cache, cache_seqlens=lengths
    )
    parameters = [torch.nn.Parameter(drawn(4096, 4096 // scale).detach()) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    found["adamw"] = optim.AdamW(parameters, master="remainder16").step
    return found


def prepared(device: str, scale: int) -> dict[str, Call]:
    found = calls(device, scale)
    for call in found.values():
        for _ in range(WARM_UP):
            call()
    return found


def kernel_name(name: str) -> str:
    """Without namespaces and arguments, with the instance's template arguments."""
    name = re.sub(r"^void |\(anonymous namespace\)::|<unnamed>::|onepass::|cuda::", "", name)
    name = re.sub(r"\((int|bool|unsigned int|cuda::\w+)\)", "", name)  # as in <(int)128, (bool)1>
    return name.partition("(")[0].strip()


# ---- split ---------------------------------------------------------------------------------------


def split(device: str, scale: int, say: Callable[[str], object], sensors: Any) -> list[dict]:
    """Microseconds of each kernel of each call: means of REPEATS, after BUSY seconds of calls."""
    import torch

    activity = torch.profiler.ProfilerActivity
    chosen = activity.CUDA if device == "cuda" else activity.CPU
    rows = []
    for name, call in prepared(device, scale).items():
        end = time.perf_counter() + gpu_load.BUSY
        while time.perf_counter() < end:
            for _ in range(REPEATS):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
        load = gpu_load.load_now(sensors)
        with torch.profiler.profile(activities=[chosen]) as profile:
            for _ in range(REPEATS):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
        times = times_of(profile.events(), device)
        rows.append({"call": name, "kernels": times, **asdict(load)})
        parts = ", ".join(f"{kernel} {us:.1f} us" for kernel, us in times.items())
        say(gpu_load.with_load(f"figure split, {name}: {parts}", load))
    return rows


def times_of(events: Iterable, device: str) -> dict[str, float]:
    """Microseconds of a call by kernel; on the CPU, for tests, of onepass's operators."""
    found: dict[str, float] = {}
    for event in events:
        if device != "cuda":
            if event.name.startswith("onepass::"):
                found[event.name] = found.get(event.name, 0.0) + event.cpu_time_total
        elif "CUDA" in str(event.device_type):
            name = kernel_name(event.name)
            found[name] = found.get(name, 0.0) + event.device_time_total
    return {name: round(us / REPEATS, 2) for name, us in found.items()}


# ---- profile -------------------------------------------------------------------------------------


def once(device: str, scale: int) -> None:
    """Each call once, between the marks that Nsight Compute heeds; what the profile looks at."""
    import torch

    found = prepared(device, scale)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    for name, call in found.items():
        print(f"call {name}", flush=True)
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    if device == "cuda":
        torch.cuda.profiler.stop()


def profile_command(ncu: str, device: str, scale: int) -> list[str]:
    words = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    words += ["--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS.values())]
    words += ["--kernel-name", "regex:attention_|norm_|optimizer_"]
    return [*words, sys.executable, __file__, "calls", "--device", device, "--scale", str(scale)]


def profile(lines: Iterable[str], say: Callable[[str], object]) -> list[dict]:
    """A row for each kernel of each call, from what Nsight Compute and the calls print."""
    rows, header, call = [], [], ""
    for line in lines:
        if line.startswith("call "):
            call = line.removeprefix("call ").strip()
        if not line.startswith('"'):
            continue
        (cells,) = csv.reader([line])
        if "Kernel Name" in cells:
            header = cells
            continue
        found = dict(zip(header, cells, strict=False))
        if not found.get("ID"):  # the units
            continue
        row = {"call": call, "kernel": kernel_name(found["Kernel Name"])}
        row |= {name: _number(found.get(metric, "")) for name, metric in METRICS.items()}
        if row["microseconds"] is not None:
            row["microseconds"] /= 1e3  # in nanoseconds by --print-units base
        if row["sm_mhz"] is not None:
            row["sm_mhz"] /= 1e6
        rows.append(row)
        say(f"figure profile, {row['kernel']}: {_shares(row)}")
    return rows


def _shares(row: dict) -> str:
    shares = ("tensor", "lsu", "shared", "issue", "dram", "occupancy")
    parts = [f"{name} {row[name]:.0f} %" for name in shares if row[name] is not None]
    if row["wavefronts"]:
        parts.append(f"conflicts {100 * (row['conflicts'] or 0) / row['wavefronts']:.1f} %")
    if row["microseconds"] is not None:
        parts.append(f"{row['microseconds']:.1f} us")
    if row["sm_mhz"] is not None:
        parts.append(f"{row['sm_mhz']:.0f} MHz")
    return ", ".join(parts)


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


# ---- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if nothing was found; 3 if this user may not read the device's counters."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("ceilings", "split", "profile", "calls"))
    parser.add_argument("--nvcc", default="nvcc", metavar="PROGRAM")
    parser.add_argument("--arch", default="80", help="90 for sm_90")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--ncu", default="ncu", metavar="PROGRAM")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--scale", type=int, default=1, help="divides the sizes")
    args = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    code, rows = 0, None
    if args.what == "calls":
        once(args.device, args.scale)
        return 0
    if args.what in ("ceilings", "split"):
        with closing(gpu_load.sensors()) as sensors:
            if args.what == "ceilings":
                code, rows = ceilings(args.nvcc, args.arch, say, sensors)
            else:
                rows = split(args.device, args.scale, say, sensors)
    else:
        words = profile_command(args.ncu, args.device, args.scale)
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        printed: list[str] = []

        def lines() -> Iterable[str]:
            for line in process.stdout:
                printed.append(line)
                yield line

        rows = profile(lines(), say)
        if process.wait() or not rows:
            print("".join(printed[-20:]), end="", file=sys.stderr)
            if any(NO_COUNTERS in line for line in printed):
                return 3
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return code or (0 if rows else 1)


if __name__ == "__main__":
    raise SystemExit(main())
