"""`onepass doctor`: is this installation in order, and if not, how to repair it.

Standard library only, and nothing here assumes that the op libraries load: it is for broken
installations. Every failed line has the command or step that repairs it; the exit code is 1 if any
line failed.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib
import importlib.util
import json
import mmap
import os
import platform
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
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

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return seconds(dtype) / seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)


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

    from onepass.bench.machine import page_faults

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


def _self_tests() -> Iterator[Line]:
    """One small case per operator: dropout bit for bit against its reference with the same seed,
    the others forward and, where there is one, backward by the numerics rule against the reference
    in float64."""
    import torch
    import torch.nn.functional as F

    from onepass import functional, numerics, reference

    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(6, 40, generator=generator, device="cpu") for _ in range(2))
    weight, bias = (torch.randn(40, generator=generator, device="cpu") for _ in range(2))
    shape, eps, p = (40,), 1e-6, 0.3
    heads = [torch.randn(192, 2, 20, generator=generator, device="cpu") for _ in range(3)]
    ends = torch.tensor([0, 70, 192], dtype=torch.int32, device="cpu")
    used = torch.tensor([191], dtype=torch.int32, device="cpu")
    matrix = torch.randn(40, 40, generator=generator, device="cpu")
    dy = torch.randn(192, 40, generator=generator, device="cpu")  # enough rows for any output

    def dense(ops, *rows):
        batch = (t.transpose(0, 1)[None] for t in rows)
        return (
            ops.scaled_dot_product_attention(*batch, is_causal=True)[0].transpose(0, 1).flatten(1)
        )

    def packed(ops, *rows):
        return ops.varlen_attention(*rows, ends, ends, 122, 122, is_causal=True).flatten(1)

    def decode(ops, *rows):  # of the last row, the others being in the caches
        q, k, v = (t.detach().transpose(0, 1)[None] for t in rows)
        caches = (F.pad(t[:, :, :191], (0, 0, 0, 1)) for t in (k, v))
        new = (t[:, :, 191:] for t in (k, v))
        return ops.attention_with_kv_cache(q[:, :, 191:], *caches, *new, cache_seqlens=used)

    def rotated(ops, query, key):  # 6 tokens of 2 heads and of one
        query, key = query.view(6, 2, 20), key.view(6, 2, 20)[:, :1]
        tables = (matrix[:6, :20].to(query), matrix[6:12, :20].to(query))
        query, key = ops.rotary_embedding(query, key, *tables, seq_first=True)
        return (query + key).flatten(1)

    def convolved(ops, rows, weight, of_channels):
        x = rows.T[None]  # channels last
        return ops.causal_conv1d(x, weight[:, :4], of_channels, activation="silu")[0].T

    def loss(ops, rows):  # of 6 rows, one of which is ignored, for each of a gradient
        targets = torch.tensor([3, 39, -100, 0, 7, 20], device="cpu")
        return ops.cross_entropy(rows, targets, reduction="none")[:, None].expand(6, 40)

    # Of many rows: errors of a few differ threefold by the order in which MKL adds up their logits.
    def loss_of_layer(ops, rows, layer, of_layer):
        targets = torch.arange(192, device="cpu") % 40
        targets[2] = -100
        loss = ops.linear_cross_entropy(rows, layer, targets, linear_bias=of_layer)
        return loss.expand(192, 40)

    def formula(*rows, **options):
        scale = rows[0].shape[-1] ** -0.5
        return reference.attention.attention(*rows, scale=scale, window_right=0, **options)[0]

    def merged(outputs, lses):
        weights = torch.stack(lses).softmax(0)
        return (weights[..., None] * torch.stack(outputs)).sum(0), torch.stack(lses).logsumexp(0)

    definition = SimpleNamespace(
        **{name: getattr(reference.norm, name) for name in dir(reference.norm) if "norm" in name},
        scaled_dot_product_attention=lambda *rows, is_causal: formula(*rows),
        varlen_attention=lambda q, k, v, *_, is_causal: formula(
            q, k, v, cu_seq_q=ends, cu_seq_k=ends, max_q=122, max_k=122, bottom_right=True
        ),
        attention_with_kv_cache=lambda *rows, **options: (
            reference.attention_decode.attention_decode(*rows, **options)[0]
        ),
        merge_attention_states=merged,
        gated_activation=reference.gate.gated_activation,
        silu_mul=reference.gate.gated_activation,
        gelu_mul=functools.partial(reference.gate.gated_activation, activation="gelu"),
        group_norm=reference.group_norm.group_norm,
        causal_conv1d=reference.causal_conv.causal_conv1d,
        cross_entropy=reference.loss.cross_entropy,
        linear_cross_entropy=reference.loss.linear_cross_entropy,
        linear=reference.linear.linear,
        rotary_embedding=reference.rotary.rotary_embedding,
    )
    stock = SimpleNamespace(
        scaled_dot_product_attention=F.scaled_dot_product_attention,
        varlen_attention=lambda *rows, is_causal: torch.cat(  # torch has none on CPU
            [
                F.scaled_dot_product_attention(
                    *(t[begin:end].transpose(0, 1) for t in rows[:3]), is_causal=True
                ).transpose(0, 1)
                for begin, end in ((0, 70), (70, 192))
            ]
        ),
        attention_with_kv_cache=lambda q, k_cache, v_cache, k, v, **_: (
            F.scaled_dot_product_attention(
                q, torch.cat([k_cache[:, :, :191], k], 2), torch.cat([v_cache[:, :, :191], v], 2)
            )
        ),
        merge_attention_states=merged,
        layer_norm=F.layer_norm,
        rms_norm=F.rms_norm,
        add_layer_norm=lambda x, r, *rest: (F.layer_norm(x + r, *rest), x + r),
        add_rms_norm=lambda x, r, *rest: (F.rms_norm(x + r, *rest), x + r),
        modulated_layer_norm=lambda x, shape, scale, shift, eps, residual, gate: (
            F.layer_norm(residual + gate * x, shape, None, None, eps) * (1 + scale) + shift,
        ),
        modulated_rms_norm=lambda x, shape, scale, shift, eps: (
            F.rms_norm(x, shape, None, eps) * (1 + scale) + shift
        ),
        gated_activation=lambda gate, up, activation: F.relu(gate) * up,
        silu_mul=lambda gate, up: F.silu(gate) * up,
        gelu_mul=lambda gate, up: F.gelu(gate) * up,
        causal_conv1d=lambda x, w, b, activation: F.silu(
            F.conv1d(x, w[:, None], b, padding=3, groups=len(w))[..., : x.shape[-1]]
        ),
        group_norm=lambda x, groups, w, b, activation: F.silu(F.group_norm(x, groups, w, b)),
        cross_entropy=F.cross_entropy,
        linear_cross_entropy=lambda x, w, target, linear_bias: F.cross_entropy(
            F.linear(x, w, linear_bias), target
        ),
        linear=F.linear,
        rotary_embedding=reference.rotary.rotary_embedding,
    )
    calls = {
        "layer_norm": (lambda ops, x, w, b: ops.layer_norm(x, shape, w, b, eps), (x, weight, bias)),
        "rms_norm": (lambda ops, x, w: ops.rms_norm(x, shape, w, eps), (x, weight)),
        "add_layer_norm": (
            lambda ops, x, r, w, b: ops.add_layer_norm(x, r, shape, w, b, eps)[0],
            (x, residual, weight, bias),
        ),
        "add_rms_norm": (
            lambda ops, x, r, w: ops.add_rms_norm(x, r, shape, w, eps)[0],
            (x, residual, weight),
        ),
        "modulated_layer_norm": (
            lambda ops, x, r, scale, shift: ops.modulated_layer_norm(
                x, shape, scale, shift, eps, residual=r, gate=scale
            )[0],
            (x, residual, residual, x),
        ),
        "modulated_rms_norm": (
            lambda ops, x, scale, shift: ops.modulated_rms_norm(x, shape, scale, shift, eps),
            (x, residual, x),
        ),
        "scaled_dot_product_attention": (dense, heads),
        "varlen_attention": (packed, heads),
        "attention_with_kv_cache": (decode, heads),
        "merge_attention_states": (
            lambda ops, x, r, a, b: ops.merge_attention_states((x, r), (a, b))[0],
            (x, residual, weight[:6], bias[:6]),
        ),
        "gated_activation": (
            lambda ops, gate, up: ops.gated_activation(gate, up, activation="relu"),
            (x, residual),
        ),
        "silu_mul": (lambda ops, gate, up: ops.silu_mul(gate, up), (x, residual)),
        "gelu_mul": (lambda ops, gate, up: ops.gelu_mul(gate, up), (x, residual)),
        "group_norm": (
            lambda ops, x, w, b: ops.group_norm(x, 8, w, b, activation="silu"),
            (x, weight, bias),
        ),
        "causal_conv1d": (convolved, (x, matrix, bias)),
        "cross_entropy": (loss, (x,)),
        "linear_cross_entropy": (loss_of_layer, (heads[0].flatten(1), matrix, bias)),
        "linear": (lambda ops, x, w, b: ops.linear(x, w, b), (x, matrix, bias)),
        "rotary_embedding": (rotated, (x, residual)),
    }

    def output_and_gradients(call: Callable, ops, inputs, dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
        output = call(ops, *leaves)
        if not output.requires_grad:
            return [output]
        return [output.detach(), *torch.autograd.grad(output, leaves, dy[: len(output)].to(dtype))]

    def verdict_by_numerics(call: Callable, inputs) -> tuple[bool, str]:
        ours = output_and_gradients(call, functional, inputs, torch.float32)
        ref = output_and_gradients(call, definition, inputs, torch.float64)
        base = output_and_gradients(call, stock, inputs, torch.float32)
        results = [numerics.compare(*each) for each in zip(ours, ref, base, strict=True)]
        worst = max(results, key=lambda result: result.max_error / result.bound)
        return all(result.ok for result in results), worst.text

    dropouts = {
        "dropout": (
            lambda: functional.dropout(x, p),
            lambda seed: reference.dropout.dropout(x, p, seed),
        ),
        "add_dropout": (
            lambda: functional.add_dropout(x, residual, p),
            lambda seed: reference.dropout.add_dropout(x, residual, p, seed),
        ),
        "drop_path_scale": (
            lambda: functional.drop_path_scale(x, p),
            lambda seed: reference.dropout.keep_scale(seed, len(x), p),
        ),
    }

    def dropout_verdict(fused: Callable, formula: Callable) -> tuple[bool, str]:
        from onepass._random import draw_seed

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            output = fused()
            torch.manual_seed(1)
            same = torch.equal(output, formula(draw_seed(x.device)))
        return same, "bitwise the reference" if same else "differs from the reference"

    for cases, verdict in ((calls, verdict_by_numerics), (dropouts, dropout_verdict)):
        for name, case in cases.items():
            try:
                ok, text = verdict(*case)
            except Exception as error:  # report it, and go on with the other lines
                ok, text = False, f"{type(error).__name__}: {error}"
            fix = f"{_library.REINSTALL}; if that does not help, please report this line"
            yield Line(f"self-test {name}", text, ok, fix)
