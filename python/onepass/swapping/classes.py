"""The classes that swapped modules get.

torch's own three classes have importable counterparts here. Every other class gets a subclass made
on demand, (forward of onepass, original class), which pickles as "the original, then swapped". All
carry the original's `__name__`: other libraries choose modules by class name.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

import onepass.nn
from onepass._ops.norm import norm


class NormSpec(NamedTuple):
    """What the probe proved about a class of norms: plain values only, it travels in pickles."""

    rms: bool
    weight_offset: float
    weight: str  # attribute names
    bias: str | None
    eps: str
    argument: str  # name of forward's argument
    # (input dtype, weight dtype, output dtype) of each combination that was proven.
    dtypes: tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]

    def __str__(self) -> str:
        name = "rms_norm" if self.rms else "layer_norm"
        return f"{name}, weight_offset {self.weight_offset:g}" if self.weight_offset else name


class Swapped:
    """Base of all swapped classes. `_onepass_original` is in the `__dict__` of each of them."""

    _onepass_original: type
    _onepass_kind = "norm"

    def __init_subclass__(cls, **_):
        """Ends here: registering subclasses is not meant for a class of the same name."""


class LayerNormForward(Swapped):
    def forward(self, input: Tensor) -> Tensor:
        if _is_plain(input):
            return onepass.nn.LayerNorm.forward(self, input)
        return torch.nn.LayerNorm.forward(self, input)


class RMSNormForward(Swapped):
    def forward(self, x: Tensor) -> Tensor:
        if _is_plain(x):
            return onepass.nn.RMSNorm.forward(self, x)
        return torch.nn.RMSNorm.forward(self, x)


class DropoutForward(Swapped):
    _onepass_kind = "dropout"

    def forward(self, input: Tensor) -> Tensor:
        if _is_plain(input):
            return onepass.nn.Dropout.forward(self, input)
        return torch.nn.Dropout.forward(self, input)


class ForeignNormForward(Swapped):
    """Forward of a norm that the probe accepted; whatever was not proven runs the original."""

    _onepass_spec: NormSpec
    _onepass_out_dtypes: dict[tuple[torch.dtype, torch.dtype], torch.dtype]
    _onepass_autocast_dtypes: dict[tuple, torch.dtype]

    def forward(self, input=None, /, **named):
        spec = self._onepass_spec
        if input is None or named:
            if input is not None or tuple(named) != (spec.argument,):
                return super().forward(*(() if input is None else (input,)), **named)
            input = named[spec.argument]
        weight = getattr(self, spec.weight)
        out_dtype = self._onepass_out_dtypes.get((input.dtype, weight.dtype))
        if out_dtype is None or not _is_plain(input):
            return super().forward(input)
        if torch.is_autocast_enabled(input.device.type):
            out_dtype = self._onepass_under_autocast(input, weight)
        return norm(
            input,
            None,
            weight,
            None if spec.bias is None else getattr(self, spec.bias),
            (weight.shape[0],),
            rms=spec.rms,
            eps=getattr(self, spec.eps),
            weight_offset=spec.weight_offset,
            out_dtype=out_dtype,
        )[0]

    def _onepass_under_autocast(self, input: Tensor, weight: Tensor) -> torch.dtype:
        """The original's output dtype: what a device's autocast does to it only the device knows.

        It is asked with a row of ones. Compiled graphs drop the question, since only its dtype is
        used, and get no cache, whose filling would be a side effect.
        """
        device = input.device.type
        key = (device, torch.get_autocast_dtype(device), input.dtype, weight.dtype)
        compiling = torch.compiler.is_compiling()
        if compiling or key not in self._onepass_autocast_dtypes:
            with torch.no_grad():
                dtype = super().forward(input.new_ones((1, weight.shape[0]))).dtype
            if compiling:
                return dtype
            self._onepass_autocast_dtypes[key] = dtype
        return self._onepass_autocast_dtypes[key]


class LayerNorm(LayerNormForward, onepass.nn.LayerNorm):
    """What `swap` makes of an exact `torch.nn.LayerNorm`."""

    _onepass_original = torch.nn.LayerNorm


class RMSNorm(RMSNormForward, onepass.nn.RMSNorm):
    """What `swap` makes of an exact `torch.nn.RMSNorm`."""

    _onepass_original = torch.nn.RMSNorm


class Dropout(DropoutForward, onepass.nn.Dropout):
    """What `swap` makes of an exact `torch.nn.Dropout`."""

    _onepass_original = torch.nn.Dropout


STATIC = {cls._onepass_original: cls for cls in (LayerNorm, RMSNorm, Dropout)}


class _Dynamic:
    """Pickling of classes made by `make_class`: the importable original, then swapped again."""

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        if isinstance(reduced, str):
            return reduced
        cls = type(self)
        original = cls._onepass_original
        make, args, *rest = reduced
        args = tuple(original if arg is cls else arg for arg in args)
        recipe = (original, cls._onepass_forward, cls.__dict__.get("_onepass_spec"))
        return _rebuild, (recipe, original if make is cls else make, args), *rest


def _rebuild(recipe: tuple, make, args: tuple):
    module = make(*args)
    module.__class__ = make_class(*recipe)
    return module


@functools.cache
def make_class(original: type, forward: type[Swapped], spec: NormSpec | None = None) -> type:
    """The class of a swapped `original`, one per (original, forward, spec).

    Raises:
        TypeError: original cannot be subclassed.
    """
    if original in STATIC and issubclass(STATIC[original], forward):
        return STATIC[original]
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_onepass_original": original,
        "_onepass_forward": forward,
    }
    if spec is not None:
        namespace["_onepass_spec"] = spec
        namespace["_onepass_out_dtypes"] = {(x, w): out for x, w, out in spec.dtypes}
        namespace["_onepass_autocast_dtypes"] = {}
    return type(original)(original.__name__, (forward, _Dynamic, original), namespace)


def is_swapped(cls: type) -> bool:
    """Whether cls was made by `swap`; a subclass put on top of such a class was not."""
    return "_onepass_original" in cls.__dict__


def _is_plain(input: Tensor) -> bool:
    """Whether the operators take this tensor: nested and distributed ones run the original.

    `nn.TransformerEncoder` is what hands out nested tensors, in eval with a padding mask.
    """
    if type(input) is Tensor:
        return not input.is_nested
    return not (input.is_nested or hasattr(input, "device_mesh"))
