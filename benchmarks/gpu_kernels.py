"""A device's best speeds, and how much of them the main kernels use: `gpu_kernels.py WHAT`.

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
import contextlib
import csv
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_load
from gpu_build import ceilings_command
from gpu_table import ratios_to_predictions

REPEATS = 10
WARM_UP = 3
# Our name of a value, and Nsight Compute's; the first six are in percent of the peak.
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
UNKNOWN = "Failed to find metric"
NO_COUNTERS = "ERR_NVGPUCTRPERM"  # the driver lets only administrators read the counters
PROFILED = re.compile(r'==PROF== Profiling ".*" - (\d+)')  # printed at the launch; the row's ID
Call = Callable[[], object]


# ---- ceilings ------------------------------------------------------------------------------------


def ceilings(
    nvcc: str, arch: str, program: Path | None, say: Callable[[str], object], sensors: Any
) -> tuple[int, dict]:
    """The exit code of the compiler or of the program, and its figures by name."""
    if program is not None:  # compiled before
        return figures_of([program], say, sensors)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "gpu_ceilings"
        code = subprocess.run(ceilings_command(nvcc, arch, program)).returncode
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
    return 1 if code is None else code, found


# ---- the calls -----------------------------------------------------------------------------------


def calls(device: str, scale: int = 1) -> dict[str, Callable[[], Call]]:
    """The main kernels by name at sizes divided by `scale`: what makes a call and its tensors."""
    import torch

    from onepass import functional, optim

    def drawn(*size: int) -> torch.Tensor:
        values = torch.randn(*size, device=device, dtype=torch.bfloat16)
        return values.requires_grad_()

    found: dict[str, Callable[[], Call]] = {}

    def both(name: str, run: Callable, *sizes: tuple[int, ...]) -> None:
        def forward() -> Call:
            inputs = [drawn(*size) for size in sizes]
            return lambda: run(*inputs)

        def backward() -> Call:
            inputs = [drawn(*size) for size in sizes]
            output = run(*inputs)
            output = output[-1] if isinstance(output, tuple) else output
            upstream = torch.randn_like(output)
            return lambda: torch.autograd.grad(output, inputs, upstream, retain_graph=True)

        found[f"{name}, forward"], found[f"{name}, backward"] = forward, backward

    for dim, seq in ((64, 4096), (128, 4096), (128, 512), (256, 4096)):
        seq, heads = max(seq // scale, 8), max(2048 // dim // scale, 1)
        batch = max(16384 // scale // seq, 1)
        attend = functional.scaled_dot_product_attention
        for causal in (False, True):
            both(
                f"attention {dim} x {seq}{' causal' if causal else ''}",
                lambda q, k, v, causal=causal: attend(q, k, v, is_causal=causal),
                *[(batch, heads, seq, dim)] * 3,
            )
    for rows in (2048, 8192, 65536):
        rows = max(rows // scale, 1)
        both(
            f"rms_norm {rows} x 4096",
            lambda x, w: functional.rms_norm(x, (x.shape[-1],), w),
            (rows, 4096),
            (4096,),
        )
    length = max(32768 // scale, 16)

    def decode() -> Call:
        cache = [drawn(1, 8, length, 128).detach() for _ in range(2)]
        query = drawn(1, 32, 1, 128).detach()
        lengths = torch.full((1,), length, dtype=torch.int32, device=device)
        return lambda: functional.attention_with_kv_cache(query, *cache, cache_seqlens=lengths)

    def adamw() -> Call:
        parameters = [torch.nn.Parameter(drawn(4096, 4096 // scale).detach()) for _ in range(4)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        return optim.AdamW(parameters, master="remainder16").step

    return found | {f"decode {length} keys": decode, "adamw": adamw}


def warmed(make: Callable[[], Call]) -> Call:
    call = make()
    for _ in range(WARM_UP):
        call()
    return call


def reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kernel_name(name: str) -> str:
    """Without namespaces and arguments, with the instance's template arguments."""
    name = re.sub(r"^void |\(anonymous namespace\)::|<unnamed>::|onepass::|cuda::", "", name)
    name = re.sub(r"\([\w:. ]+\)(?=-?\d)", "", name)  # as in <(int)128, (ForwardKind)2>
    return name.partition("(")[0].strip()


# ---- split ---------------------------------------------------------------------------------------


def split(device: str, scale: int, say: Callable[[str], object], sensors: Any) -> list[dict]:
    """Microseconds of each kernel of each call: means of REPEATS, after BUSY seconds of calls; of a
    call that fails, why."""
    rows = []
    for name, make in calls(device, scale).items():
        try:
            times, load = kernels_of(warmed(make), device, sensors)
        except Exception as error:  # the others may still run
            rows.append({"call": name, "failed": reason(error)})
            say(f"figure split, {name}: failed: {reason(error)}")
            continue
        rows.append({"call": name, "kernels": times, **asdict(load)})
        parts = ", ".join(f"{kernel} {us:.1f} us" for kernel, us in times.items())
        say(gpu_load.with_load(f"figure split, {name}: {parts or 'torch saw no kernel'}", load))
    return rows


def kernels_of(call: Call, device: str, sensors: Any) -> tuple[dict[str, float], Any]:
    """(microseconds by kernel, the Load while the call ran before)."""
    import torch

    activity = torch.profiler.ProfilerActivity
    chosen = activity.CUDA if device == "cuda" else activity.CPU

    def run() -> None:
        for _ in range(REPEATS):
            call()
        if device == "cuda":
            torch.cuda.synchronize()

    end = time.perf_counter() + gpu_load.BUSY
    while time.perf_counter() < end:
        run()
    load = gpu_load.load_now(sensors)
    with torch.profiler.profile(activities=[chosen]) as profile:
        run()
    return times_of(profile.events(), device), load


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


def in_order(names: Iterable[str], figures: Path | None, arch: str) -> list[str]:
    """Names of calls; those first whose measured case in `figures` misses its prediction most."""
    ratios = ratios_to_predictions(arch, figures) if figures else {}

    def ratio(name: str) -> float:
        words = case_words(name)
        found = (of for case, of in ratios.items() if all(word in case for word in words))
        return min(found, default=math.inf)

    return sorted(names, key=ratio)


def case_words(name: str) -> list[str]:
    """Words of the cases of `onepass bench` that measure what a call does."""
    call, _, phase = name.partition(", ")
    kind, *sizes = call.split()
    if kind == "attention":
        form = "causal" if "causal" in sizes else "full"
        return [f"attention/{form}/", f"x{sizes[0]}/", f"/{phase}"]
    words = {"rms_norm": "norm/rms_norm/", "decode": "decode/", "adamw": "optimizer/adamw/"}
    return [words[kind], *([f"/{phase}"] if phase else [])]


def once(device: str, scale: int, names: Sequence[str] | None = None) -> None:
    """Each call once, between the marks that Nsight Compute heeds; what the profile looks at."""
    made = calls(device, scale)
    for name in names or made:
        make = made[name]
        print(f"call {name}", flush=True)
        try:
            call = warmed(make)
            with looked_at(name) if device == "cuda" else contextlib.nullcontext():
                call()
        except Exception as error:  # the others may still run
            print(f"figure profile, {name}: failed: {reason(error)}", flush=True)


@contextlib.contextmanager
def looked_at(name: str) -> Iterator[None]:
    """A range of all threads: a backward runs in one of its own."""
    import torch

    torch.cuda.synchronize()
    mark = torch.cuda.nvtx.range_start(name)
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()
        torch.cuda.nvtx.range_end(mark)


def profile_command(
    ncu: str,
    device: str,
    scale: int,
    names: Sequence[str] = (),
    metrics: Iterable[str] = METRICS.values(),
) -> list[str]:
    words = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--nvtx"]
    words += ["--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]
    words += ["--kernel-name", "regex:attention_|norm_|optimizer_"]
    words += [sys.executable, __file__, "calls", "--device", device, "--scale", str(scale)]
    return [*words, *(["--calls", *names] if names else [])]


def profile(lines: Iterable[str], say: Callable[[str], object]) -> list[dict]:
    """A row for each kernel of each call, from what Nsight Compute and the calls print.

    Rows come after all calls. A row is of the call whose range it names; without ranges, of the
    call that ran when its launch was announced.
    """
    rows, header, names, announced = [], [], [""], {}
    for line in lines:
        if line.startswith("call "):
            names.append(line.removeprefix("call ").strip())
        elif line.startswith("figure "):
            say(line.rstrip())
        elif found := PROFILED.match(line):
            announced[found[1]] = names[-1]
        if not line.startswith('"'):
            continue
        (cells,) = csv.reader([line])
        if "Kernel Name" in cells:
            header = cells
            continue
        found = dict(zip(header, cells, strict=False))
        if not found.get("ID"):  # the units
            continue
        ranges = " ".join(cell for column, cell in found.items() if "Domain:" in column)
        of_range = (name for name in names[1:] if name in ranges)
        call = next(of_range, announced.get(found["ID"], names[-1]))
        row = {"call": call, "kernel": kernel_name(found["Kernel Name"])}
        row |= {name: _number(found.get(metric, "")) for name, metric in METRICS.items()}
        if row["microseconds"] is not None:
            row["microseconds"] /= 1e3  # in nanoseconds by --print-units base
        if row["sm_mhz"] is not None:
            row["sm_mhz"] /= 1e6
        rows.append(row)
        say(f"figure profile, {call}, {row['kernel']}: {_shares(row)}")
    return rows


def profiled(
    ncu: str, device: str, scale: int, names: Sequence[str], say: Callable[[str], object]
) -> tuple[list[dict], int, list[str]]:
    """(rows, exit code, output) of Nsight Compute. It profiles nothing if it does not know one of
    the metrics; then it runs once more without that one."""
    metrics = list(METRICS.values())
    while True:
        words = profile_command(ncu, device, scale, names, metrics)
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        printed: list[str] = []

        def lines(process=process, printed=printed) -> Iterable[str]:
            for line in process.stdout:
                printed.append(line)
                yield line

        rows = profile(lines(), say)
        code = process.wait()
        unknown = [metric for metric in metrics if _is_unknown(metric, printed)]
        if rows or not unknown or len(unknown) == len(metrics):
            return rows, code, printed
        say(f"figure profile: without {', '.join(unknown)}, which ncu does not know")
        metrics = [metric for metric in metrics if metric not in unknown]


def _is_unknown(metric: str, printed: Iterable[str]) -> bool:
    """It is named itself, or by a regular expression for all that begin as it does."""
    named = (line.replace("\\", "") for line in printed if UNKNOWN in line)
    return any(metric in text or f"^{metric.partition('.')[0]}.(" in text for text in named)


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
    parser.add_argument("--program", type=Path, metavar="FILE", help="of ceilings, compiled before")
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="FOLDER",
        help="of `bench`: a profile begins with what misses its prediction most",
    )
    parser.add_argument("--most", type=int, metavar="N", help="calls of a profile")
    parser.add_argument("--calls", nargs="+", metavar="NAME", help="of calls, in this order")
    args = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    code, rows = 0, None
    if args.what == "calls":
        once(args.device, args.scale, args.calls)
        return 0
    if args.what in ("ceilings", "split"):
        with closing(gpu_load.sensors()) as sensors:
            if args.what == "ceilings":
                code, rows = ceilings(args.nvcc, args.arch, args.program, say, sensors)
            else:
                rows = split(args.device, args.scale, say, sensors)
    else:
        names = in_order(calls(args.device, args.scale), args.figures, args.arch)
        rows, code, printed = profiled(args.ncu, args.device, args.scale, names[: args.most], say)
        if code or not rows:
            print("".join(printed[-20:]), end="", file=sys.stderr)
            if any(NO_COUNTERS in line for line in printed):
                return 3
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.what == "split" and not all(row.get("kernels") for row in rows):
        return 1
    return code or (0 if rows else 1)


if __name__ == "__main__":
    raise SystemExit(main())
