"""Norms of other libraries that the probe accepted, computed by the operator."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from onepass import _stock
from onepass._memory_order import rows_in_memory_order
from onepass._ops.norm import NormKind, norm
from onepass._policy import small_calls
from onepass._refusals import is_number
from onepass.swapping.inputs import is_autocast
from onepass.swapping.specs import NormSpec


def computing(module: nn.Module, input: Tensor) -> Callable[[nn.Module, Tensor], Tensor] | None:
    """The function for a swapped norm of `input`; None for a combination that was not proven, or
    where the original is faster.

    Norms that are composed of torch's elementwise functions keep the memory order; layer norms call
    a function of torch's, which does not.
    """
    spec = module._onepass_spec
    weight, eps = getattr(module, spec.weight), eps_of(module)
    bias = None if spec.bias is None else getattr(module, spec.bias)
    if not (isinstance(weight, Tensor) and weight.dim() == 1 and is_number(eps)):
        return None
    if bias is not None and bias.dtype is not weight.dtype:
        return None
    out_dtype = module._onepass_out_dtypes.get((input.dtype, weight.dtype))
    if out_dtype is None or _is_small(module, input):
        return None
    if is_autocast(input.device.type):
        out_dtype = _dtype_under_autocast(module, input, weight)

    def run(_, input: Tensor) -> Tensor:
        return norm(
            input,
            None,
            weight,
            bias,
            (weight.shape[0],),
            kind=spec.kind,
            eps=eps,
            weight_offset=spec.weight_offset,
            out_dtype=out_dtype,
        )[0]

    if spec.kind != NormKind.LAYER and not input.is_contiguous():
        return lambda _, input: rows_in_memory_order(functools.partial(run, None), input, 1)
    return run


def eps_of(module: nn.Module, spec: NormSpec | None = None) -> float | None:
    """The eps of a norm; None if its forward has lost the number that the proof found there.

    Args:
        spec: the module's own by default.
    """
    eps = (spec or module._onepass_spec).eps
    if isinstance(eps, str):
        return getattr(module, eps)
    forward = _stock.original(module).forward
    return eps if eps in forward.__code__.co_consts else None


def calls_layer_norm(cls: type) -> bool:
    """Whether the original of a swapped class calls torch's layer norm, which is fast at small
    inputs."""
    original = cls._onepass_original
    if issubclass(original, nn.LayerNorm):
        return True
    holds_eps = isinstance(cls._onepass_spec.eps, float)
    return holds_eps and "layer_norm" in original.forward.__code__.co_names


def _is_small(module: nn.Module, input: Tensor) -> bool:
    """Whether the original is faster."""
    return calls_layer_norm(type(module)) and small_calls.norm_is_small(input)


def _dtype_under_autocast(module: nn.Module, input: Tensor, weight: Tensor) -> torch.dtype:
    """The original's output dtype under a device's autocast, found by running it.

    It runs on a row of ones. Compiled graphs drop that call, since only its dtype is used, and
    have no cache, since filling it would be a side effect.
    """
    known, device = module._onepass_autocast_dtypes, input.device.type
    key = (device, torch.get_autocast_dtype(device), input.dtype, weight.dtype)
    compiling = torch.compiler.is_compiling()
    if compiling or key not in known:
        with torch.no_grad():
            row = input.new_ones((1, weight.shape[0]))
            dtype = module._onepass_original.forward(module, row).dtype
        if compiling:
            return dtype
        known[key] = dtype
    return known[key]
