"""The raw ops on the emulated CUDA back end: what `onepass._ops` calls, on files instead of a GPU.

`on_emulated_cuda(monkeypatch)` puts them under the public functions, so that a test of the CPU
kernels becomes one of the CUDA kernels by one line.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import emulated
import torch
from torch import Tensor

from onepass._ops import dropout, norm

KERNELS = ("norm/forward.cu", "norm/backward.cu", "dropout.cu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Launch:
    blocks: int
    threads: int
    shared: int  # bytes of a block
    kernel: str  # the instance


@dataclass
class Calls:
    """The calls of one test: plan, launches and counted bytes, by op."""

    program: tuple[str, ...] = ("operators", *KERNELS)
    build: str = "plain"
    seed: int = 0
    resident: int = 1  # blocks that run at the same time, at least
    shared: int = 227 * 1024  # bytes that a block may have
    misalign: int = 0  # bytes that tensors of rows begin beyond a multiple of 16
    misaligned: str = ""  # the tensors that do, a pattern of their names; empty: all of them
    done: list[dict] = field(default_factory=list)
    instances: set[str] = field(default_factory=set)  # of the kernels that ran

    def of(self, op: str) -> list[dict]:
        return [call for call in self.done if call["op"] == op]


def all_instances(build: str = "plain", program=("operators", *KERNELS)) -> set[str]:
    """Every instance of a kernel that the ops of a program could launch."""
    name, *kernels = program
    executable = emulated.program(name, build, *kernels)
    return set(emulated.run(executable, "--kernels").stdout.splitlines())


def on_emulated_cuda(monkeypatch, **options) -> Calls:
    calls = Calls(**options)
    monkeypatch.setattr(norm, "_forward", lambda *a: _norm_forward(calls, *a))
    monkeypatch.setattr(norm, "_backward", lambda *a: _norm_backward(calls, *a))
    monkeypatch.setattr(dropout, "_forward", lambda *a: _dropout_forward(calls, *a))
    return calls


def run(calls: Calls, op: str, numbers: dict, tensors: dict[str, Tensor | None]) -> None:
    """Runs the op; tensors that it writes change in place."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    moved = {}
    for name, tensor in present.items():
        pattern = calls.misaligned
        hit = re.fullmatch(pattern, name) if pattern else tensor.dim() > 1
        moved[name] = calls.misalign if hit else 0
    run_case(calls, op, numbers, present, moved)


def run_case(
    calls: Calls, op: str, numbers: dict, storages: dict[str, Tensor], moved: dict[str, int],
    views: dict[str, tuple[str, int]] | None = None,
) -> None:  # fmt: skip
    """Runs the op on whole storages, which change in place, each so many bytes beyond a multiple of
    16; views are (name of a storage, bytes behind its beginning).
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"op {op}"]
        lines += [f"{name} {_number(value)}" for name, value in numbers.items()]
        parts = []
        for name, tensor in storages.items():
            data = _bytes(tensor)
            lines.append(f"{name}: {data.numel()} {moved[name]}")
            parts.append(data.numpy().tobytes())
        lines += [f"{name}@ {of} {behind}" for name, (of, behind) in (views or {}).items()]
        file = Path(folder, "tensors.bin")
        file.write_bytes(b"".join(parts))
        Path(folder, "case.txt").write_text("\n".join(lines))
        name, *kernels = calls.program
        program = emulated.program(name, calls.build, *kernels)
        result = emulated.run(
            program, folder, seed=calls.seed, resident=calls.resident, shared=calls.shared
        )
        assert result.returncode == 0, f"{result.returncode}: {numbers}\n{result.stderr[-3000:]}"
        assert not result.stderr, result.stderr[-3000:]
        plan = dict(line.split() for line in result.stdout.splitlines())
        assert "kernel" in plan, f"the program has no {op}"
        lines = Path(folder, "counters.txt").read_text().splitlines()
        counted = {name: int(value) for name, value in map(str.split, lines)}
        plan |= {name: int(value) for name, value in plan.items() if name != "kernel"}
        launches = [
            Launch(*map(int, line.split(" ", 3)[:3]), line.split(" ", 3)[3])
            for line in Path(folder, "kernels.txt").read_text().splitlines()
        ]
        calls.done.append({"op": op, **plan, **counted, "launched": launches})
        calls.instances.update(launch.kernel for launch in launches)
        read = torch.frombuffer(bytearray(file.read_bytes()) or bytearray(1), dtype=torch.uint8)
        begin = 0
        for tensor, part in zip(storages.values(), parts, strict=True):
            _bytes(tensor).copy_(read[begin : begin + len(part)])
            begin += len(part)


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's whole storage."""
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(tensor.detach().untyped_storage())


def _number(value) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, torch.dtype):
        return str(DTYPES.index(value))
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return repr(value)


def _rows(tensor: Tensor | None, shape) -> Tensor | None:
    """A copy as (*rows, cols), rows of up to three dimensions, in a storage of its own.

    Rows that are dense keep their distances, others are packed, as the ops do it.
    """
    if tensor is None:
        return None
    tensor = tensor.detach().flatten(tensor.dim() - len(shape))
    if tensor.numel() and 2 <= tensor.dim() <= 4 and tensor.stride(-1) == 1:
        reach = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in reach)
        storage = tensor.as_strided((extent,), (1,)).clone()
        return storage.as_strided(tensor.shape, tensor.stride())
    if not 2 <= tensor.dim() <= 4:
        tensor = tensor.reshape(-1, torch.Size(shape).numel())
    return tensor.clone(memory_format=torch.contiguous_format)


def _row_numbers(rows: Tensor, **tensors: Tensor | None) -> dict:
    """rows, cols, the rows' sizes, and the strides of each tensor by its name; all shaped alike."""
    sizes = (1, 1, 1, *rows.shape[:-1])[-3:]
    strides = {
        f"{name}_stride": (0, 0, 0, *(() if tensor is None else tensor.stride()[:-1]))[-3:]
        for name, tensor in tensors.items()
    }
    return dict(rows=rows.shape[:-1].numel(), cols=rows.shape[-1], row_size=sizes, **strides)


def _poisoned(shape, dtype: torch.dtype, wanted: bool = True) -> Tensor | None:
    return torch.full(shape, float("nan"), dtype=dtype) if wanted else None


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().flatten().clone()


def _or_empty(tensor: Tensor | None, shape, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype) if tensor is None else tensor.reshape(shape)


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _norm_forward(
    calls, input, residual, weight, bias, seed, shape, rms, eps, offset, p, out_dtype,
    residual_dtype, save_statistics,
):  # fmt: skip
    x, stream = _rows(input, shape), _rows(residual, shape)
    out_dtype = out_dtype or input.dtype
    residual_dtype = residual_dtype or (input if residual is None else residual).dtype
    accumulator = _accumulator(input)
    y = _poisoned(x.shape, out_dtype)
    total = _poisoned(x.shape, residual_dtype, residual is not None)
    mean = _poisoned(x.shape[:-1], accumulator, save_statistics and not rms)
    rstd = _poisoned(x.shape[:-1], accumulator, save_statistics)
    numbers = _row_numbers(x, input=x, residual=stream) | dict(
        input_dtype=input.dtype, residual_dtype=input.dtype if residual is None else residual.dtype,
        weight_dtype=input.dtype if weight is None else weight.dtype,
        bias_dtype=input.dtype if bias is None else bias.dtype,
        output_dtype=out_dtype, residual_out_dtype=residual_dtype,
        eps=float(eps), weight_offset=float(offset), dropout_p=float(p), rms=rms,
    )  # fmt: skip
    tensors = dict(
        input=x, residual=stream, weight=_flat(weight), bias=_flat(bias), seed=seed, output=y,
        residual_out=total, mean=mean, rstd=rstd,
    )  # fmt: skip
    if x.numel():
        run(calls, "norm_forward", numbers, tensors)
    leading = input.shape[: input.dim() - len(shape)]
    return (
        y.reshape(input.shape),
        _or_empty(total, input.shape, residual_dtype),
        _or_empty(mean, leading, accumulator),
        _or_empty(rstd, leading, accumulator),
    )


def _norm_backward(
    calls, doutput, dresidual_out, x, weight, bias, seed, mean, rstd, shape, rms, offset, p,
    input_dtype, residual_dtype, mask,
):  # fmt: skip
    input_dtype, residual_dtype = input_dtype or x.dtype, residual_dtype or x.dtype
    d = _rows(torch.zeros_like(x) if doutput is None else doutput, shape)
    above, rows = _rows(dresidual_out, shape), _rows(x, shape)
    dinput = _poisoned(rows.shape, input_dtype, bool(mask & 1))
    dresidual = _poisoned(rows.shape, residual_dtype, bool(mask & 2))
    dweight = None
    if mask & 4 and weight is not None:
        dweight = _poisoned(rows.shape[-1:], weight.dtype)
    dbias = _poisoned(rows.shape[-1:], bias.dtype) if mask & 8 and bias is not None else None
    numbers = _row_numbers(rows, doutput=d, dresidual_out=above, x=rows) | dict(
        doutput_dtype=d.dtype, x_dtype=x.dtype,
        weight_dtype=x.dtype if weight is None else weight.dtype,
        dinput_dtype=input_dtype, dresidual_dtype=residual_dtype,
        dweight_dtype=x.dtype if weight is None else weight.dtype,
        dbias_dtype=x.dtype if bias is None else bias.dtype,
        weight_offset=float(offset), dropout_p=float(p), rms=rms,
    )  # fmt: skip
    tensors = dict(
        doutput=d, dresidual_out=above, x=rows, weight=_flat(weight),
        mean=None if rms else _flat(mean), rstd=_flat(rstd), seed=seed, dinput=dinput,
        dresidual=dresidual, dweight=dweight, dbias=dbias,
    )  # fmt: skip
    if rows.shape[-1]:
        run(calls, "norm_backward", numbers, tensors)
    return (
        _or_empty(dinput, x.shape, input_dtype),
        _or_empty(dresidual, x.shape, residual_dtype),
        _or_empty(dweight, shape, x.dtype if weight is None else weight.dtype),
        _or_empty(dbias, shape, x.dtype if bias is None else bias.dtype),
    )


def _dropout_forward(calls, input, residual, seed, p, out_dtype):
    dtype = (input if residual is None else residual).dtype if out_dtype is None else out_dtype
    x = input.detach().contiguous().clone()
    stream = None if residual is None else residual.detach().contiguous().clone()
    output = _poisoned(x.shape, dtype)
    numbers = dict(
        numel=x.numel(), input_dtype=x.dtype,
        residual_dtype=x.dtype if stream is None else stream.dtype, output_dtype=dtype,
        dropout_p=float(p),
    )  # fmt: skip
    if x.numel():
        run(
            calls,
            "dropout_forward",
            numbers,
            dict(input=x, residual=stream, seed=seed, output=output),
        )
    return output
