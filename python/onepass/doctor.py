"""`onepass doctor`: is this installation in order, and if not, what to do.

Standard library only, and nothing here assumes that the op libraries load: a broken installation is
what it is for. Every failed line carries the command or step that mends it; the exit code is 1 if
any line failed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import onepass
from onepass import _library

SWITCHES = {
    "ONEPASS_CPU_ISA": "CPU level to use: baseline, avx2, avx512 or avx512_bf16",
    "ONEPASS_LOG": "dispatch: log which kernel ran and why, each line once",
}


@dataclass
class Line:
    """One finding. `ok` is None for plain facts."""

    name: str
    value: str
    ok: bool | None = None
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(args: argparse.Namespace) -> int:
    lines = list(findings())
    failed = [line for line in lines if line.ok is False]
    if args.json:
        print(json.dumps({"ok": not failed, "lines": [asdict(line) for line in lines]}, indent=1))
    else:
        width = max(len(line.name) for line in lines)
        for line in lines:
            mark = {True: "ok  ", False: "FAIL", None: "    "}[line.ok]
            print(f"{mark} {line.name:<{width}}  {line.value}")
            if line.ok is False and line.fix:
                print(f"     {'':<{width}}  fix: {line.fix}")
        print(f"{len(failed)} failed" if failed else "everything is in order")
    return 1 if failed else 0


def findings() -> Iterator[Line]:
    yield from _versions()
    yield from _libraries()
    if onepass.load_error is None:
        yield from _levels()
        yield from _self_tests()
    yield from _cuda()
    for name, meaning in SWITCHES.items():
        yield Line(name, f"{os.environ.get(name, 'not set')} ({meaning})")


def _versions() -> Iterator[Line]:
    yield Line("python", platform.python_version())
    yield Line("onepass", onepass.__version__)
    try:
        import torch
    except Exception as error:  # a broken torch can raise anything while importing
        yield Line("torch", f"{type(error).__name__}: {error}", False, "pip install 'torch>=2.10'")
        return
    yield Line("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _libraries() -> Iterator[Line]:
    extension = importlib.util.find_spec("onepass._C")
    if extension is not None:
        try:
            info = importlib.import_module("onepass._C").build_info()
        except ImportError as error:
            yield Line("onepass._C", str(error), False, _library.REINSTALL)
        else:
            built = (
                f"{info['compiler']}, {info['build_type']}, torch {info['torch_headers']} headers"
            )
            yield Line("built with", built)
            yield Line("CPU levels built", info["cpu_levels"])
    for name, path in _library.loaded.items():
        yield Line(name, f"loaded from {_relative(path)}", True)
    for name, reason in _library.not_loaded.items():
        yield Line(name, f"not loaded: {reason}")
    if onepass.load_error is not None:
        text, _, fix = str(onepass.load_error).rpartition("; ")
        yield Line("op libraries", text or fix, False, fix)


def _relative(path: Path) -> str:
    for entry in map(Path, sys.path):
        if entry.name.endswith("-packages") and path.is_relative_to(entry):
            return os.fspath(path.relative_to(entry))
    return os.fspath(Path(*path.parts[-3:]))


def _levels() -> Iterator[Line]:
    from onepass import _C

    supported = _C.cpu_levels()
    yield Line("CPU levels here", ", ".join(supported))
    try:
        level = _C.cpu_level()
    except RuntimeError as error:
        yield Line("CPU level in use", str(error), False, "unset ONEPASS_CPU_ISA")
        return
    wanted = os.environ.get("ONEPASS_CPU_ISA")
    why = "the highest of this machine" if not wanted else "ONEPASS_CPU_ISA asks for it"
    yield Line("CPU level in use", f"{level}: {why}", True)


def _cuda() -> Iterator[Line]:
    try:
        directory = _library.library_directory()
        info = importlib.import_module("onepass._C").build_info()
    except ImportError:
        return
    path = directory / "libonepass_cuda.so"
    if not info["cuda_archs"] or not path.exists():
        yield Line("CUDA", "not built (no nvcc at build time, or ONEPASS_CUDA=OFF)")
        return
    yield Line("CUDA built for", f"sm {info['cuda_archs']}, toolkit {info['cuda_version']}")
    library = ctypes.CDLL(os.fspath(path))
    library.onepass_cuda_error.restype = ctypes.c_char_p
    count = library.onepass_cuda_device_count()
    if count < 0:
        yield Line("CUDA device", library.onepass_cuda_error(-count).decode())
    for device in range(max(count, 0)):
        capability = library.onepass_cuda_capability(device)
        yield Line(f"CUDA device {device}", f"compute capability {capability / 10:.1f}")


def _self_tests() -> Iterator[Line]:
    """One small case per operator, forward and backward, against the reference in float64."""
    import torch

    from onepass import functional, numerics, reference

    shape, cols = (6, 40), 40
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    x, residual, weight, bias = random(*shape), random(*shape), random(cols), random(cols)
    dy = random(*shape)
    ours, stock = functional, torch.nn.functional

    def add_norm(norm: Callable) -> Callable:
        return lambda x, r, *rest: norm(x + r, (cols,), *rest)

    cases = {
        "layer_norm": (
            lambda x, w, b: ours.layer_norm(x, (cols,), w, b),
            lambda x, w, b: reference.norm.layer_norm(x, (cols,), w, b),
            lambda x, w, b: stock.layer_norm(x, (cols,), w, b),
            (x, weight, bias),
        ),
        "rms_norm": (
            lambda x, w: ours.rms_norm(x, (cols,), w),
            lambda x, w: reference.norm.rms_norm(x, (cols,), w),
            lambda x, w: stock.rms_norm(x, (cols,), w),
            (x, weight),
        ),
        "add_layer_norm": (
            lambda x, r, w, b: ours.add_layer_norm(x, r, (cols,), w, b)[0],
            lambda x, r, w, b: reference.norm.add_layer_norm(x, r, (cols,), w, b)[0],
            add_norm(stock.layer_norm),
            (x, residual, weight, bias),
        ),
        "add_rms_norm": (
            lambda x, r, w: ours.add_rms_norm(x, r, (cols,), w)[0],
            lambda x, r, w: reference.norm.add_rms_norm(x, r, (cols,), w, torch.finfo(x.dtype).eps)[
                0
            ],
            add_norm(stock.rms_norm),
            (x, residual, weight),
        ),
    }
    # float64 references take float32's epsilon, as the float32 calls do.
    float32_eps = torch.finfo(torch.float32).eps
    cases["rms_norm"] = (
        cases["rms_norm"][0],
        lambda x, w: reference.norm.rms_norm(x, (cols,), w, float32_eps),
        *cases["rms_norm"][2:],
    )
    cases["add_rms_norm"] = (
        cases["add_rms_norm"][0],
        lambda x, r, w: reference.norm.add_rms_norm(x, r, (cols,), w, float32_eps)[0],
        *cases["add_rms_norm"][2:],
    )

    def run(function: Callable, inputs: tuple, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, dy.to(dtype))]

    for name, (fused, formula, base, inputs) in cases.items():
        results = [
            numerics.compare(ours, ref, stock)
            for ours, ref, stock in zip(
                run(fused, inputs, torch.float32),
                run(formula, inputs, torch.float64),
                run(base, inputs, torch.float32),
                strict=True,
            )
        ]
        worst = max(results, key=lambda r: r.max_error / r.bound)
        yield _verdict(name, all(result.ok for result in results), worst.text)

    seed_state = torch.get_rng_state()
    try:
        for name, fused, formula in (
            (
                "dropout",
                lambda: ours.dropout(x, 0.3),
                lambda s: reference.dropout.dropout(x, 0.3, s),
            ),
            (
                "add_dropout",
                lambda: ours.add_dropout(x, residual, 0.3),
                lambda s: reference.dropout.add_dropout(x, residual, 0.3, s),
            ),
        ):
            torch.manual_seed(1)
            output = fused()
            torch.manual_seed(1)
            seed = torch.randint(-(2**63), 2**63 - 1, (2,))
            same = torch.equal(output, formula(seed))
            yield _verdict(name, same, "bitwise the reference" if same else "not the reference")
    finally:
        torch.set_rng_state(seed_state)


def _verdict(name: str, ok: bool, text: str) -> Line:
    return Line(f"self-test {name}", text, ok, "" if ok else f"report it, and {_library.REINSTALL}")
