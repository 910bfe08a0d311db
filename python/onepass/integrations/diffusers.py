"""Modules of diffusers whose attention goes through `dispatch_attention_fn`.

That function hands each call to a backend: "native", the default, calls
F.scaled_dot_product_attention, which `onepass.swap` redirects while the module's forward runs, as
it does in modules that call it themselves. Nothing here imports diffusers or changes it:
its `set_attention_backend` and `attention_backend` work as before, and calls that they send
elsewhere run there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

# Backends that call F.scaled_dot_product_attention; all but the first choose torch's kernel for it.
_NATIVE = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")

NOTE = (
    "{names}: attention goes through diffusers' dispatch_attention_fn; calls that it sends to "
    "another backend than the native ones run there, as in stock"
)


def refusal(module: nn.Module) -> str:
    """Why redirecting calls of F.scaled_dot_product_attention would have no effect, or harm, in a
    module; empty if it works."""
    processors = list(_processors(module))
    if any(getattr(processor, "_parallel_config", None) is not None for processor in processors):
        return "runs diffusers' context parallelism, whose backward calls torch's attention"
    backend = _backend(processors)
    if backend not in _NATIVE:
        return f"its attention backend in diffusers is {backend!r}, which onepass does not replace"
    return ""


def _processors(module: nn.Module) -> Iterator[object]:
    """Objects that dispatch for a module: itself, or its processors."""
    for value in (module, *vars(module).values(), *module._modules.values()):
        if hasattr(value, "_attention_backend"):
            yield value


def _backend(processors: list) -> str:
    """The name of the backend of a module's calls: its own, or else the active one."""
    chosen = next((p._attention_backend for p in processors if p._attention_backend), None)
    if chosen is None:
        dispatch = sys.modules["diffusers.models.attention_dispatch"]
        chosen = dispatch._AttentionBackendRegistry._active_backend
    return str(getattr(chosen, "value", chosen))
