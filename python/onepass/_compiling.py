"""Limits of torch's compilers, and the marks and errors for them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Given = ParamSpec("Given")
Result = TypeVar("Result")


def constant_where_traced(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """`torch.compiler.assume_constant_result`, which imports the compiler to set this mark."""
    function._dynamo_marked_constant = True
    return function


def outside_of_graphs(reason: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """`torch.compiler.disable(reason=reason)`, which imports the compiler to decorate."""

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            if "torch._dynamo" in sys.modules:  # else nothing compiles
                return torch.compiler.disable(function)(*args, **kwargs)
            return function(*args, **kwargs)

        call._torchdynamo_disable = True
        call._torchdynamo_disable_msg = reason
        call._torchdynamo_disable_recursive = True
        return call

    return decorate


def require_fixed_offsets(op: str, **tensors: Tensor) -> None:
    """Checks fake tensors that will be written: if the offset of a view depends on a dynamic size,
    inductor ignores it and writes to the beginning of the view's base
    (https://github.com/pytorch/pytorch/issues/198068).

    An input of the graph may begin anywhere, unless it shares its memory with another one.

    Raises:
        RuntimeError: the write would be lost. Without `fullgraph=True` torch runs it in eager.
    """
    memories = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
    shared = len(memories) < len(tensors)
    for name, tensor in tensors.items():
        offset = tensor.storage_offset()
        if not isinstance(offset, torch.SymInt) or offset.node.maybe_as_int() is not None:
            continue
        of_input = offset.node.expr.is_Symbol  # not computed from sizes
        if (of_input and not shared) or _keeps_offsets():
            continue
        raise RuntimeError(
            f"{op}: {name} must begin at an offset without dynamic sizes under torch.compile, "
            f"which would lose it: take views of a larger tensor outside, or make its sizes "
            f"static, got a view that begins at {offset}"
        )


def _keeps_offsets() -> bool:
    from torch._inductor.lowering import fallbacks, lowerings

    # Inductor calls an operator without code directly, and records it in both tables.
    offset_of = torch.ops.aten.sym_storage_offset.default
    return offset_of in lowerings and offset_of not in fallbacks


def refuse_script(module: torch.nn.Module) -> None:
    """The `__prepare_scriptable__` of modules: torch.jit.script calls it first.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "torch.jit.script: model must hold no module of onepass (onepass.unswap(model) first, or "
        f"use torch.jit.trace), got a {type(module).__name__}"
    )


def refuse_torchscript_exporter(op: str) -> None:
    """Called while `torch.jit.trace` runs, by each operator.

    Raises:
        RuntimeError: it traces for `torch.onnx.export(dynamo=False)`, which has no such operator.
    """
    onnx = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        raise RuntimeError(
            "torch.onnx.export: model must run none of onepass's operators without dynamo=True "
            f"(onepass.unswap(model) first), got onepass::{op}"
        )
