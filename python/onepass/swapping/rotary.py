"""Functions of other libraries that rotate query and key: found where a forward calls them, and
computed by ours.

Models of transformers call a function of their own file, `apply_rotary_pos_emb(q, k, cos, sin)`;
`copies.py` makes the forward that calls ours.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import onepass.functional
from onepass._overrides import visibly
from onepass._policy import small_calls
from onepass.swapping import callsites, copies
from onepass.swapping.inputs import has_kernels, is_autocast, is_plain
from onepass.swapping.specs import Form, RotarySpec

_ROTATING_NAME = re.compile(r"^_?(apply|vision_apply)_.*(rotary|rope)", re.IGNORECASE)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
_SIZES = (8, 12)  # of head_dim, which a proof tries beside the module's own
_MOST_SIZE = 512
_DEVICES = frozenset(device for device in ("cpu", "cuda", "meta") if has_kernels(device, "rotary"))


class Called(NamedTuple):
    """A function that a forward calls by a global name, and that may rotate."""

    name: str
    function: Callable
    parameters: tuple[inspect.Parameter, ...]


class Functions(NamedTuple):
    """The rotating functions of a module, and possible sizes of heads."""

    called: tuple[Called, ...]
    sizes: tuple[int, ...]


def functions(module: nn.Module) -> Functions:
    """The functions with arguments cos and sin that the forward of a module calls."""
    found = tuple(copies.called(module, _recognised))
    return Functions(found, _sizes(module) if found else ())


def is_decorated(module: nn.Module) -> bool:
    """Whether the forward that calls such functions cannot be replaced by a copy."""
    return copies.is_decorated(module, _recognised)


def others(module: nn.Module) -> list[str]:
    """Functions that seem to rotate, but have other arguments than cos and sin."""
    inner = copies.innermost(module)
    if inner is None:
        return []
    variables = inner.__globals__
    named = (
        name for name in sorted(callsites.names_of(inner.__code__)) if _ROTATING_NAME.match(name)
    )
    return [name for name in named if name in variables and not _parameters(variables[name])]


def _recognised(name: str, value: object) -> Called | None:
    parameters = _parameters(value)
    return Called(name, value, parameters) if parameters else None


def _parameters(value) -> tuple[inspect.Parameter, ...]:
    """The parameters of a function that has cos and sin among them; else none.

    If the package "kernels" is installed, it replaces functions of transformers by its modules.
    """
    if isinstance(value, types.FunctionType):
        function = inspect.unwrap(value)
        names = getattr(function, "__code__", None) and function.__code__.co_varnames
    elif isinstance(value, nn.Module) and hasattr(type(value), "kernel_layer_name"):
        function, names = value.forward, ("cos", "sin")
    else:
        return ()
    if not names or "cos" not in names or "sin" not in names:
        return ()
    parameters = tuple(inspect.signature(function).parameters.values())
    return parameters if {"cos", "sin"} <= {p.name for p in parameters} else ()


def _sizes(module: nn.Module) -> tuple[int, ...]:
    own = {
        value
        for name, value in vars(module).items()
        if name.endswith("head_dim") and type(value) is int and 0 < value <= _MOST_SIZE
    }
    return tuple(sorted({*_SIZES, *(size for size in own if size % 4 == 0)}))


def tensors_of(called: Called) -> int | str:
    """The number of its first parameters that are rotated, or why it is unknown."""
    names = [parameter.name for parameter in called.parameters]
    count = min(names.index("cos"), names.index("sin"))
    rest = called.parameters[count + 2 :]
    if any(parameter.kind not in _NAMED for parameter in called.parameters):
        return "has arguments without a name"
    if count not in (1, 2) or {*names[count : count + 2]} != {"cos", "sin"}:
        return f"takes ({', '.join(names)}), not query, key, cos and sin"
    for parameter in rest:
        if parameter.default is parameter.empty:
            return f"takes an argument {parameter.name!r} too"
    return count


# ---- the calls that are ours ---------------------------------------------------------------------


def rotating(function: Callable, spec: RotarySpec) -> Callable:
    """`function` by our operator, for proven calls that gain: all except small ones that move
    columns apart (benchmarks/small_calls.py)."""
    layouts = dict(spec.layouts)
    dtypes = {(input, table): output for input, table, output in spec.dtypes}

    def rotating(*args, **named):
        given = {**dict(zip(spec.parameters, args, strict=False)), **named}
        inputs = [given.pop(name, None) for name in spec.parameters[: spec.tensors]]
        cos, sin = given.pop("cos", None), given.pop("sin", None)
        unsqueeze_dim = given.pop("unsqueeze_dim", spec.unsqueeze_dim)
        if not all(map(is_plain, (*inputs, cos, sin))) or any(
            value is not None for value in given.values()
        ):
            return function(*args, **named)
        query = inputs[0]
        if type(unsqueeze_dim) not in (int, types.NoneType):  # 1.0 and True are equal to 1
            return function(*args, **named)
        seq_first = layouts.get((query.dim(), cos.dim(), unsqueeze_dim))
        output_dtype = dtypes.get((query.dtype, cos.dtype))
        if (
            seq_first is None
            or output_dtype is None
            or not _fits(spec, inputs, cos, sin, seq_first)
            or (spec.form.apart and small_calls.rotary_is_small(inputs, output_dtype))
        ):
            return function(*args, **named)
        inputs = [x.to(output_dtype) for x in inputs]
        outputs = rotate(spec.form, inputs, cos, sin, seq_first)
        return outputs[0] if spec.tensors == 1 else tuple(outputs)

    rotating.__name__ = rotating.__qualname__ = spec.name
    return rotating


def _fits(spec: RotarySpec, inputs: list[Tensor], cos: Tensor, sin: Tensor, first: bool) -> bool:
    """Whether shapes, dtypes and devices were proven and are taken by the operator."""
    query, width = inputs[0], cos.shape[-1]
    rotated, head_dim = width * 2 if spec.form.table == "pairs" else width, query.shape[-1]
    tokens = -3 if first else -2
    if sin.shape != cos.shape or sin.dtype != cos.dtype or width % 2:
        return False
    if not (rotated == head_dim or (spec.partial and rotated < head_dim)):
        return False
    if cos.dim() == 3 and cos.shape[0] not in (1, query.shape[0]):
        return False
    for x in inputs:
        if x.dim() != query.dim() or x.dtype != query.dtype or x.shape[-1] != head_dim:
            return False
        if x.shape[tokens] != cos.shape[-2] or (x.dim() == 4 and x.shape[0] != query.shape[0]):
            return False
    device = query.device
    if device.type not in _DEVICES or any(x.device != device for x in (*inputs, cos, sin)):
        return False
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return False
    return spec.autocast or not is_autocast(device.type)


def rotate(
    form: Form, inputs: list[Tensor], cos: Tensor, sin: Tensor, seq_first: bool
) -> list[Tensor]:
    """One or two tensors, rotated."""
    width = cos.shape[-1]
    if form.table == "half":
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    if form.apart:  # cheaper before than after: the copy is dense then
        inputs = [torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in inputs]
    options = {
        "interleaved": form.interleaved and not form.apart,
        "rotary_dim": 2 * width if form.table == "pairs" else width,
        "seq_first": seq_first,
    }
    arguments = (inputs[0], inputs[1] if len(inputs) > 1 else None, cos, sin)
    outputs = visibly(onepass.functional.rotary_embedding, *arguments, **options)
    return [x for x in outputs if x is not None]
