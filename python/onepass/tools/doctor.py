"""`onepass doctor`: is this installation in order, and if not, how to repair it.

Standard library only, and nothing here assumes that the op libraries load: it is for broken
installations. Every failed line has the command or step that repairs it; the exit code is 1 if any
line failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import doctest
import functools
import importlib
import importlib.util
import inspect
import json
import mmap
import os
import platform
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import onepass
from onepass import _library

if TYPE_CHECKING:
    import torch

SWITCHES = {
    "ONEPASS_CPU_ISA": "CPU level to use: baseline, avx2, avx512 or avx512_bf16",
    "ONEPASS_CPU_VNNI": "0: no instructions for products of 8 bits, with the same results",
    "ONEPASS_CUDA_ATTENTION": "always: swapped models run onepass's attention on every GPU",
    "ONEPASS_CUDA_OVERLAP": "always: some kernels are launched while the one before still runs",
    "ONEPASS_LOG": "dispatch: log which kernel ran and why, each line once",
}
# From this factor over float32's time on, slow products of a dtype are reported.
WORTH_SAYING = 1.5
# More than malloc keeps by default.
LARGE_BYTES = 64 << 20
KEPT_BY = "; onepass.keep_freed_memory() keeps it"


@dataclass
class Line:
    """One finding. `ok` is None for plain facts; `fix` is kept only if it is needed."""

    name: str
    value: str
    ok: bool | None = None
    fix: str = ""

    def __post_init__(self) -> None:
        if self.ok is not False:
            self.fix = ""


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
            print(_folded(f"{mark} {line.name:<{width}}  ", line.value))
            if line.fix:
                print(_folded(f"     {'':<{width}}  ", f"fix: {line.fix}"))
        print(f"{len(failed)} failed" if failed else "everything is in order")
    return 1 if failed else 0


def _folded(head: str, value: str) -> str:
    """The line; in a terminal it is folded, and goes on under its value."""
    room = shutil.get_terminal_size().columns - len(head)
    if not sys.stdout.isatty() or room < 20:
        return head + value
    wrapper = textwrap.TextWrapper(width=room, break_long_words=False, break_on_hyphens=False)
    return head + ("\n" + " " * len(head)).join(wrapper.wrap(value))


def findings() -> Iterator[Line]:
    yield from _versions()
    yield from _libraries()
    if _library.failure is None:
        yield from _levels()
        yield from _self_tests()
        yield from _products()
        yield from _memory()
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
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Line("torch", f"{torch.__version__}, {cuda}, {torch.get_num_threads()} threads")


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
    if _library.failure is not None:
        text, _, fix = str(_library.failure).rpartition("; ")
        yield Line("op libraries", text or fix, False, fix)


def _relative(path: Path) -> str:
    for entry in map(Path, sys.path):
        if entry.name.endswith("-packages") and path.is_relative_to(entry):
            return os.fspath(path.relative_to(entry))
    return os.fspath(Path(*path.parts[-3:]))


def _levels() -> Iterator[Line]:
    from onepass import _C

    supported = _C.cpu_levels()
    built = _C.build_info()["cpu_levels"].split(", ")
    missing = ", ".join(level for level in built if level not in supported)
    lacking = f" (this CPU has no {missing})" if missing else ""
    yield Line("CPU levels here", ", ".join(supported) + lacking)
    try:
        level = _C.cpu_level()
    except RuntimeError as error:
        yield Line("CPU level in use", str(error), False, "unset ONEPASS_CPU_ISA")
        return
    wanted = os.environ.get("ONEPASS_CPU_ISA")
    why = "the highest of this machine" if not wanted else "ONEPASS_CPU_ISA asks for it"
    yield Line("CPU level in use", f"{level}: {why}", True)
    yield Line("Products of 8 bits", "VNNI" if _C.multiplies_bytes() else "as products of 16 bits")


def _products() -> Iterator[Line]:
    """16-bit dtypes that torch multiplies unexpectedly slowly here."""
    import torch

    from onepass._policy import products

    for dtype in (torch.bfloat16, torch.float16):
        times = _times_float32(dtype)
        if times < WORTH_SAYING:
            continue
        name = str(dtype).removeprefix("torch.")
        value = f"run {times:.0f} times slower than float32 in this torch on this CPU"
        if products.as_fast(dtype) is None:
            value += ": onepass.swap does them"
        yield Line(f"{name} products", value)


def _times_float32(dtype: torch.dtype) -> float:
    """How much longer the three products of a small linear layer's training step take than in
    float32. On one thread, since other load disturbs several; takes a tenth of a second."""
    import torch
    import torch.nn.functional as F

    from onepass._threads import on_threads

    rows, features = 64, 192

    def seconds(dtype: torch.dtype) -> float:
        x, dy = (torch.ones(rows, features, dtype=dtype, device="cpu") for _ in range(2))
        weight = torch.ones(features, features, dtype=dtype, device="cpu")

        def step() -> float:
            begin = time.perf_counter()
            F.linear(x, weight), dy @ weight, dy.t() @ x
            return time.perf_counter() - begin

        step()  # may compile its kernel
        times = [step()]
        while len(times) < 20 and sum(times) < 0.02:
            times.append(step())
        return min(times)

    with on_threads(1):
        return seconds(dtype) / seconds(torch.float32)


def _memory() -> Iterator[Line]:
    """Whether freed memory is kept, measured by page faults."""
    from onepass import _malloc

    faults, seconds = _of_new_tensor()
    told = ", ".join(f"{name} {value}" for name, value in _malloc.told().items())
    value = f"a new tensor of 64 MiB costs {faults:,} page faults"
    if faults >= LARGE_BYTES / mmap.PAGESIZE / 2:
        value += f", {1e3 * seconds:.0f} ms: it goes back to the system when it is freed"
        value += f" ({reason})" if (reason := _malloc.obstacle()) else KEPT_BY
    yield Line("freed memory", value + (f" (the environment says {told})" if told else ""))


def _of_new_tensor() -> tuple[int, float]:
    """Page faults of filling a tensor of LARGE_BYTES, after one of its size was freed, and their
    seconds; estimated from a sixteenth of it, in a twentieth of a second.

    A heap that keeps such blocks first grows by a few of them.
    """
    import torch

    from onepass.tools.machine import page_faults

    part = LARGE_BYTES // 16
    found = []
    for _ in range(12):
        before, begin = page_faults(), time.perf_counter()
        block = torch.empty(LARGE_BYTES, dtype=torch.uint8, device="cpu")[LARGE_BYTES // 2 :][:part]
        block.zero_()
        filled = time.perf_counter()
        block.zero_()
        twice = time.perf_counter()
        del block
        faults, writing = page_faults() - before, twice - filled
        found.append((faults, time.perf_counter() - begin - 2 * writing))
    faults, seconds = sorted(found[-3:])[1]
    return 16 * faults, 16 * max(0.0, seconds)


def _cuda() -> Iterator[Line]:
    """The CUDA library's architectures, and whether this machine's devices are among them."""
    try:
        info = importlib.import_module("onepass._C").build_info()
    except ImportError:
        return
    archs = info["cuda_archs"]
    if not archs:
        yield Line("CUDA", "not built (no nvcc at build time, or ONEPASS_CUDA=OFF)")
        return
    yield Line("CUDA built for", f"sm {archs} (PTX unless -real), toolkit {info['cuda_version']}")
    path = _library.loaded.get("libonepass_cuda.so")
    if path is None:
        return
    library = ctypes.CDLL(os.fspath(path))
    library.onepass_cuda_error.restype = ctypes.c_char_p
    count = library.onepass_cuda_device_count()
    if count < 0:
        yield _no_device(library.onepass_cuda_error(-count).decode(), info["cuda_version"])
    name = ctypes.create_string_buffer(256)
    for device in range(count):
        library.onepass_cuda_device_name(device, name, len(name))
        capability = library.onepass_cuda_capability(device)
        yield device_line(device, name.value.decode(), capability, archs)


def device_line(number: int, name: str, capability: int, archs: str) -> Line:
    """Whether a build for `archs` runs on a device of this capability (as 10 * major + minor)."""
    code = code_for(capability, archs)
    fix = f"pip install with --config-settings=cmake.define.ONEPASS_CUDA_ARCHS={capability}"
    oldest = "{}{}".format(*_library.OLDEST_CAPABILITY)
    if capability < int(oldest):
        fix = f"use a device of sm_{oldest} or newer; for others there are no kernels"
    value = f"{name}, sm_{capability}: {code or 'nothing built runs on it'}"
    return Line(f"CUDA device {number}", value, bool(code), fix)


def _no_device(error: str, toolkit: str) -> Line:
    import torch

    if not torch.cuda.is_available():
        return Line("CUDA device", f"none: {error}")
    # torch reaches its device and this library does not: its CUDA runtime is newer than the driver.
    fix = f"update the driver for CUDA {toolkit}, or build onepass with the toolkit of this driver"
    return Line("CUDA device", error, False, fix)


def code_for(capability: int, archs: str) -> str:
    """The code in a build for `archs` ("80-real, 90") that runs on a device, or "" for none.

    Binary code runs on devices of its major version and at least its minor one; PTX, which all but
    `-real` entries bring, is compiled by the driver for any newer device.
    """
    entries = [(int(entry.split("-")[0].rstrip("af")), entry) for entry in archs.split(", ")]
    binary = [a for a, entry in entries if a // 10 == capability // 10 and a <= capability]
    if binary:
        return f"sm_{max(binary)} code"
    ptx = [a for a, entry in entries if a <= capability and not entry.endswith("-real")]
    return f"compute_{max(ptx)} PTX, compiled by the driver" if ptx else ""


_DRAWS = 4  # compared together: errors of a few numbers differ by luck
# Of the numerics rule, which is stated by the errors of torch's own operators. The definition's are
# smaller where attention has few keys, and right results can be above one bound there. A wrong one
# is off by thousands.
_BOUNDS = 3.0
_WITHOUT_GRADIENT = ("cos", "sin", "row_scale", "scales")  # arguments
# Functions that write into their arguments, called without gradients.
_WRITING = (
    "attention_with_kv_cache",
    "causal_conv1d_update",
    "delta_rule_update",
    "selective_state_update",
)


def _self_tests() -> Iterator[Line]:
    """One line per public function: the first call in its docstring, on random numbers. Results and
    gradients are compared with the definition in torch's operators in float64, by the error that
    the definition has in float32."""
    from onepass import functional

    for name in functional.__all__:
        try:
            ok, text = _verdict(name)
        except Exception as error:  # report it, and go on with the other lines
            ok, text = False, f"{type(error).__name__}: {error}"
        fix = f"{_library.REINSTALL}; if that does not help, please report this line"
        yield Line(f"self-test {name}", text, ok, fix)


def _verdict(name: str) -> tuple[bool | None, str]:
    import torch

    from onepass import numerics

    if sys.flags.optimize > 1:
        return None, "not tested: without docstrings (python -OO) there is no example"
    draws = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(_DRAWS):
            torch.manual_seed(seed)
            call = _example(name)
            draws.append(
                (
                    _results(name, call, torch.float32, by_definition=False),
                    _results(name, call, torch.float64, by_definition=True),
                    _results(name, call, torch.float32, by_definition=True),
                )
            )
    found = []
    for results in zip(*(zip(*ways, strict=True) for ways in draws), strict=True):
        found.append(numerics.compare(*map(list, zip(*results, strict=True))))
    worst = max(found, key=lambda result: result.max_error / (result.bound or 1e-30))
    allowed = _BOUNDS * worst.bound
    if not worst.bound:  # a shape, or numbers that are not finite
        return worst.ok, worst.text
    return worst.max_error <= allowed, f"error {worst.max_error:.2e} of at most {allowed:.2e}"


class _Called(Exception):
    """Ends an example at the call that it is for, and carries the arguments by name."""


def _example(name: str) -> dict:
    """The arguments of the first call of a function in its docstring, by name."""
    import torch

    from onepass import functional

    function = getattr(functional, name)
    signature = inspect.signature(function)

    def call(*args, **kwargs):
        raise _Called(signature.bind(*args, **kwargs).arguments)

    functions = {other: getattr(functional, other) for other in functional.__all__}
    names = {
        "torch": torch,
        "onepass": SimpleNamespace(functional=SimpleNamespace(**functions | {name: call})),
    }
    try:
        for example in doctest.DocTestParser().get_examples(inspect.getdoc(function)):
            exec(example.source, names)
    except _Called as called:
        return called.args[0]
    raise LookupError("its docstring has no example")


def _results(name: str, call: dict, dtype: torch.dtype, by_definition: bool) -> list[torch.Tensor]:
    """Results of a call in a dtype, and the gradients of its arguments, for the same random numbers
    in every call."""
    import torch
    from torch.autograd import forward_ad
    from torch.utils import _pytree as pytree

    from onepass import functional

    function, leaves = getattr(functional, name), []
    differentiated = set(call) - set(_WITHOUT_GRADIENT)
    if name in _WRITING:
        differentiated = ()
    if name == "attention_with_kv_cache" and by_definition:  # which knows no tangents
        function = _decoded

    def given(argument: str, value: object) -> object:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        value = value.to(dtype, copy=True)
        if argument in differentiated:
            leaves.append(value.requires_grad_())
        return value

    arguments = {
        argument: pytree.tree_map(functools.partial(given, argument), value)
        for argument, value in call.items()
    }
    torch.manual_seed(0)
    # Where there are tangents, onepass computes by its definitions.
    with forward_ad.dual_level() if by_definition else contextlib.nullcontext():
        outputs = [y for y in pytree.tree_leaves(function(**arguments)) if y is not None]
        random = torch.Generator().manual_seed(1)
        upstream = [
            torch.randn(y.shape, generator=random, dtype=torch.float64, device="cpu").to(y.dtype)
            for y in outputs
        ]
        wanted = [pair for pair in zip(outputs, upstream, strict=True) if pair[0].requires_grad]
        gradients = ()
        if wanted:
            outputs_of, upstream_of = zip(*wanted, strict=True)
            gradients = torch.autograd.grad(outputs_of, leaves, upstream_of, allow_unused=True)
    return [*(y.detach() for y in outputs), *(g for g in gradients if g is not None)]


def _decoded(query, k_cache, v_cache, key, value, cache_seqlens) -> torch.Tensor:
    """The definition of a call of `attention_with_kv_cache`."""
    import torch

    from onepass import reference

    lengths = torch.full(query.shape[:1], cache_seqlens, device="cpu")
    return reference.attention_decode.attention_decode(
        query, k_cache, v_cache, key, value,
        cache_seqlens=lengths, scale=query.shape[-1] ** -0.5,
    )[0]  # fmt: skip
