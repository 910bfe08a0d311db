"""peft's LoRA around a layer with a quantised weight. Importing this module imports peft."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from onepass.nn import QuantizedLinear as Base
from onepass.quantizing.engine import _carry_attributes, _is_conv1d, _plain

# All others subtract the adapter's first values from the base's weight.
INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")
_READ_THE_WEIGHT = ("orthogonal", "mica")
_ROUNDS = (
    "peft: merging adapters into quantised layers rounds the sum to their format again, which adds "
    "to the error; merging after onepass.dequantize(model) is exact"
)


class QuantizedLinear(Linear):
    """`peft.tuners.lora.Linear` on an `onepass.nn.QuantizedLinear`. Where `onepass.dequantize` has
    put a plain layer since, all is peft's own."""

    _unmerged: tuple[Base, ...] = ()  # the base, while another one has adapters merged into it

    @property
    def fan_in_fan_out(self) -> bool:
        """Whether the base's weight lies transposed: codes never do, whatever the config says."""
        return _is_conv1d(self.get_base_layer())

    @fan_in_fan_out.setter
    def fan_in_fan_out(self, of_config: bool) -> None:
        pass

    def _get_in_out_features(self, module: nn.Module):
        if isinstance(module, Base):
            return module.in_features, module.out_features
        return super()._get_in_out_features(module)

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module):
        if isinstance(base_layer, Base):
            return base_layer.codes.device, base_layer.dtype
        return super()._get_base_layer_device_and_dtype(base_layer)

    def update_layer(self, adapter_name: str, r: int, *args, config, **named) -> None:
        """Adds an adapter.

        Raises:
            ValueError: the config would change the base's weight.
        """
        base, reading = self.get_base_layer(), contextlib.nullcontext()
        if isinstance(base, Base):
            _check(config)
            reads = _name(config.init_lora_weights) in _READ_THE_WEIGHT
            if reads or self.resolve_lora_variant(config=config) is not None:
                reading = self._base_is(_with_weight(base, base.dtype))
        with reading:
            super().update_layer(adapter_name, r, *args, config=config, **named)
        self.fit_magnitudes()

    def fit_magnitudes(self) -> None:
        """Makes DoRA's magnitudes read the weight of this base, of codes or not."""
        for magnitude in self.lora_magnitude_vector.values():
            if type(magnitude) is DoraLinearLayer:
                magnitude.__class__ = QuantizedDora
            magnitude.fan_in_fan_out = self.fan_in_fan_out

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the base's weight, and rounds the sum to the base's format, with a
        warning. What was merged before is added once more, so that the sum is rounded once.
        """
        base = self.get_base_layer()
        if not isinstance(base, Base):
            self.fit_magnitudes()
            super().merge(safe_merge, adapter_names)
            return
        names = check_adapters_to_merge(self, adapter_names)
        if not any(name in self.lora_A for name in names):
            return
        warnings.warn(_ROUNDS, stacklevel=2)
        merged, kept = list(self.merged_adapters), self._unmerged
        # Adapters may be in codes that were made after the merge: these stay in them.
        start, again = (kept[0], merged) if kept else (base, [])

        def add() -> None:
            self.merged_adapters = [] if kept else list(merged)
            super(QuantizedLinear, self).merge(safe_merge, [*again, *names])

        try:
            self._unmerged = ()
            self._requantize(start, add)
        except BaseException:
            self.merged_adapters, self._unmerged = merged, kept
            raise
        if kept or not merged:
            self._unmerged = (start,)

    def unmerge(self) -> None:
        """Gives the base its own codes back; a layer that was dequantised since, their weight."""
        base = self.get_base_layer()
        if self._unmerged:
            (before,), self._unmerged = self._unmerged, ()
            self._put_base(before if isinstance(base, Base) else _plain(before))
            for name in self.merged_adapters:
                self._caches.pop(f"{name}-weight_norm", None)
            self.merged_adapters = []
        elif isinstance(base, Base) and self.merged:
            self._requantize(base, super().unmerge)
        else:
            super().unmerge()

    def _requantize(self, start: Base, change: Callable[[], None]) -> None:
        """Makes codes of the weight that a change leaves of another layer's."""
        plain = _with_weight(start, torch.float32)
        if plain.bias is not None:
            plain.bias = nn.Parameter(plain.bias.detach().clone(), start.bias.requires_grad)
        with self._base_is(plain):
            change()
            made = _like(start, plain.weight.detach(), plain.bias)
        self._put_base(made)

    @contextlib.contextmanager
    def _base_is(self, layer: nn.Module) -> Iterator[None]:
        """Inside, this layer is the base."""
        base = self.get_base_layer()
        self._put_base(layer)
        try:
            yield
        finally:
            self._put_base(base)

    def _put_base(self, layer: nn.Module) -> None:
        holder = self
        while isinstance(holder.base_layer, BaseTunerLayer):
            holder = holder.base_layer
        holder.base_layer = layer

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        for base in self._unmerged:
            base._apply(fn, recurse)
        return self


class _Plain(NamedTuple):
    """The part of a base that a call of DoRA reads."""

    weight: Tensor
    bias: Tensor | None


class QuantizedDora(DoraLinearLayer):
    """DoRA's magnitudes beside a quantised weight: its numbers are made for each call, and freed
    after it. The product stays that of the codes."""

    def forward(self, x: Tensor, *, base_layer: nn.Module, base_result=None, **named) -> Tensor:
        if isinstance(base_layer, Base):
            if base_result is None:  # x has been through dropout
                base_result = base_layer(x)
            weight = base_layer.dequantized(torch.promote_types(x.dtype, torch.float32))
            base_layer = _Plain(weight, base_layer.bias)
        elif not self.fan_in_fan_out and _is_conv1d(base_layer):  # it was dequantised
            self.fan_in_fan_out = True
        return super().forward(x, base_layer=base_layer, base_result=base_result, **named)


def adopt(model: nn.Module) -> None:
    """Gives peft's layers whose base was quantised the class for it."""
    for module in model.modules():
        if type(module) is Linear and isinstance(module.get_base_layer(), Base):
            module.__class__ = QuantizedLinear
        if isinstance(module, QuantizedLinear):
            module.fit_magnitudes()


def _name(init: object) -> object:
    return init.lower() if isinstance(init, str) else init


def _check(config) -> None:
    """
    Raises:
        ValueError: the config would change the base's weight.
    """
    if _name(config.init_lora_weights) not in INITS:
        *some, last = map(repr, INITS)
        raise ValueError(
            f"peft: init_lora_weights must be {', '.join(some)} or {last} on a quantised layer, "
            f"whose weight cannot change, got {config.init_lora_weights!r}"
        )
    if getattr(config, "kasa_config", None) is not None:
        raise ValueError(
            "peft: kasa_config must be None on a quantised layer, whose weight cannot change, got "
            f"{type(config.kasa_config).__name__}"
        )


def _with_weight(base: Base, dtype: torch.dtype) -> nn.Linear:
    """A plain layer with the weight that the codes stand for, and the bias."""
    made = nn.Linear(base.in_features, base.out_features, False, device="meta")
    made.weight = nn.Parameter(base.dequantized().to(dtype), requires_grad=False)
    made.bias = base.bias
    return made.train(base.training)


def _like(base: Base, weight: Tensor, bias: nn.Parameter | None) -> Base:
    """A layer of another weight in the format of a base."""
    if bias is not None and bias.dtype != base.bias.dtype:
        bias.data = bias.data.to(base.bias.dtype)
    made = Base.from_weight(
        weight,
        bias,
        weights=base.weights,
        group_size=base.group_size,
        activations=base.activations,
        scales_dtype=base.scales.dtype,
        input_order=base.input_order,
        outlier_columns=base.outlier_columns,
    )
    if base.outliers is not None:
        made.outliers = made.outliers.to(base.outliers.dtype)
    made.dtype, made.plain_class = base.dtype, base.plain_class
    _carry_attributes(base, made)
    vars(made).update({name: of for name, of in vars(base).items() if "_hook" in name})
    return made.train(base.training)
