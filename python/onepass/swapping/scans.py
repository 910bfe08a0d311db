"""Functions of state-space and linear-attention layers that a forward calls: causal convolutions,
selective scans, delta rules, and their steps of decoding.

transformers decorates such functions with the name that they have in the packages causal_conv1d,
mamba_ssm and fla, and runs a slow reference where the package is missing. The decorator's wrapper
keeps the two names, by which a function is recognised, whatever its own name. `copies.py` makes the
forward that calls ours, and an integration knows the arguments.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

from onepass.swapping import copies
from onepass.swapping.specs import ScanSpec

# By the name that a package gives a function: the package, and what a report calls it. The last two
# fuse a layer; where their package is missing they leave that to the others, and warn.
FUNCTIONS = {
    "causal_conv1d_fn": ("causal_conv1d", "causal convolution"),
    "causal_conv1d_update": ("causal_conv1d", "causal convolution"),
    "selective_scan_fn": ("mamba_ssm", "selective scan"),
    "mamba_chunk_scan_combined": ("mamba_ssm", "scan in chunks"),
    "selective_state_update": ("mamba_ssm", "state update of decoding"),
    "chunk_gated_delta_rule": ("fla", "gated delta rule"),
    "fused_recurrent_gated_delta_rule": ("fla", "gated delta rule"),
    "chunk_kda": ("fla", "Kimi delta attention"),
    "fused_recurrent_kda": ("fla", "Kimi delta attention"),
    "mamba_inner_fn": ("mamba_ssm", ""),
    "mamba_split_conv1d_scan_combined": ("mamba_ssm", ""),
}
SCAN, CHUNKS, STEP = "selective_scan_fn", "mamba_chunk_scan_combined", "selective_state_update"
GATED = "chunk_gated_delta_rule"
FUSED = ("mamba_inner_fn", "mamba_split_conv1d_scan_combined")
_DISTRIBUTIONS = {
    "causal_conv1d": "causal-conv1d",
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
}


class Called(NamedTuple):
    """A function that a forward calls by a global name, in place of a package's."""

    name: str
    function: Callable
    of_package: str  # its name there


class Functions(NamedTuple):
    """The functions of a module."""

    called: tuple[Called, ...]
    beside: str  # that of SCAN and GATED which is one of them, or ""


def functions(module: nn.Module) -> Functions:
    """The functions of `FUNCTIONS` that the forward of a module calls."""
    found = tuple(copies.called(module, _recognised))
    beside = next((c.of_package for c in found if c.of_package in (SCAN, GATED)), "")
    return Functions(found, beside)


def is_decorated(module: nn.Module) -> bool:
    """Whether the forward that calls such functions cannot be replaced by a copy."""
    return copies.is_decorated(module, _recognised)


def others(module: nn.Module) -> list[str]:
    """Names in packages of functions that the forward of a module calls, and that `FUNCTIONS` does
    not have."""
    found = copies.called(module, lambda name, value: decorated_as(value))
    return [of_package for of_package, _ in found if of_package not in FUNCTIONS]


def computes_nothing(spec: NamedTuple) -> bool:
    """Whether it is only a function that leaves a layer to the others."""
    return isinstance(spec, ScanSpec) and spec.of_package in FUSED


def named(names: Iterable[str]) -> str:
    """The words for what the functions with these names in their packages compute."""
    names = {*names}
    if names & {SCAN, CHUNKS}:
        names -= {STEP}  # which is their step of decoding
    words = {FUNCTIONS[name][1]: None for name in FUNCTIONS if name in names}
    return " and ".join(word for word in words if word)


def faster_elsewhere(names: Iterable[str]) -> str:
    """The distributions that hold the functions for a GPU."""
    packages = sorted({FUNCTIONS[name][0] for name in names})
    return " and ".join(_DISTRIBUTIONS[package] for package in packages)


def _recognised(name: str, value: object) -> Called | None:
    """A function that is decorated as one of `FUNCTIONS`."""
    of_package, package = decorated_as(value) or ("", "")
    is_known = of_package in FUNCTIONS and FUNCTIONS[of_package][0] == package
    return Called(name, value, of_package) if is_known else None


def decorated_as(value: object) -> tuple[str, str] | None:
    """The name and the package of the function that a decorated one stands in for."""
    wrapper = _wrapper(value)
    kept = _closure(wrapper)
    found = kept.get("func_name"), kept.get("package")
    are_names = all(isinstance(name, str) for name in found)
    return found if are_names and hasattr(wrapper, "__wrapped__") else None


def reference(function: Callable) -> types.FunctionType:
    """The function that the decorator got: that which runs without the package."""
    return _wrapper(function).__wrapped__


def _wrapper(value: object) -> object:
    """The decorator's wrapper: if the package "kernels" is installed, that makes a module of it."""
    if isinstance(value, nn.Module) and hasattr(type(value), "kernel_layer_name"):
        return _closure(type(value).forward).get("func")
    return value


def _closure(function: object) -> dict[str, object]:
    """The variables of a function's closure, without those that are not assigned yet."""
    if not isinstance(function, types.FunctionType):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
