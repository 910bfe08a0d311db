"""The operators that `torch.jit.trace` and `torch.export` record.

An autograd.Function enters a trace as a Python object, which cannot be saved and differs from one
trace to the next. It enters an exported program as its raw operator, which has no gradient. So each
family has one more operator, written in Python, that chooses the path when it is called: a traced
module, or a program, trains, and loads wherever onepass is imported. After `run_decompositions` a
program holds raw operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onepass._compiling import refuse_torchscript_exporter

_library = torch.library.Library("onepass", "FRAGMENT")


def is_tracing() -> bool:
    """Equals `torch.jit.is_tracing()`, in a quarter of the time."""
    return torch._C._is_tracing()


def is_making_graph() -> bool:
    """Whether `make_fx` records operators."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def records() -> bool:
    """Whether a call is recorded in a trace or a program, by a family's operator in Python."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return is_tracing()


def operator(name: str, raw, function: Callable, *more: str) -> Callable:
    """Records `onepass::name`: arguments are those of the operator `raw`, or of a schema, and
    `more`.

    Raises:
        RuntimeError: when called, if the TorchScript exporter to ONNX traces.
    """
    arguments, _, results = str(getattr(raw, "_schema", raw)).partition("(")[2].rpartition(") -> ")
    # If imported again in this process: the registration of the first import stays.
    if not torch._C._jit_get_schemas_for_operator(f"onepass::{name}"):
        _library.define(f"{name}({', '.join([arguments, *more])}) -> {results}")
        _library.impl(name, function, "CompositeImplicitAutograd")
    op = getattr(torch.ops.onepass, name).default

    def record(*args, **options):
        if not torch.compiler.is_compiling():
            refuse_torchscript_exporter(name)
        return op(*args, **options)

    return record


def numbers(sizes: int | Sequence[int]) -> tuple[int, ...]:
    """Sizes of weights as numbers: in a trace a size is a tensor, which no list of sizes takes."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        return tuple(int(size) for size in sizes)
    finally:
        torch._C._set_tracing_state(state)
