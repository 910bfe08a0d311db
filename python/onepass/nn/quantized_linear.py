"""The linear layer with a quantised weight, as a module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import NoneType

import torch
from torch import Tensor

from onepass import functional
from onepass._arguments import check_arguments
from onepass.functional.quantized_linear import ACTIVATIONS, FORMATS
from onepass.reference import quantized_linear as reference
from onepass.reference.quantized_linear import PANEL, Format

MOST_GROUPED = {"int4": 64, "nf4": 64, "mxfp4": 32}  # numbers in a group by default; int8: a row
_STEP = 8  # numbers that a group is a multiple of, unless it is a whole row


class QuantizedLinear(torch.nn.Module):
    """`onepass.functional.quantized_linear` with its weight: a linear layer that is frozen but for
    its bias.

    `onepass.quantize` puts it into a model. Buffers are `codes` (int32), `scales` and, for int4,
    `shifts`; the format is in the state_dict too, as `_extra_state`, and a state of another format
    is refused. They are the same on all CPUs. With an order of inputs or with outliers, these are
    buffers too: `input_order`, `outlier_columns` (int32) and `outliers` (16 bits).

    Args:
        in_features, out_features: sizes of the last dimensions of input and output.
        bias: whether there is one; it is a parameter.
        weights: "int8", "int4", "nf4" or "mxfp4".
        group_size: neighbours along in_features that share a scale, a multiple of 8; None: a whole
            row of int8, 64 of int4 and nf4, 32 of mxfp4, or the next lower multiple of 8 that
            divides in_features, or else a row.
        activations: None, or "int8" to quantise the rows of input too: for int8 with a scale a row.
        dtype: of the bias, and of the weight that `onepass.dequantize` makes.
        scales_dtype: None: float32 for int8, bfloat16 for the others.
        input_order, outlier_columns: as in `onepass.functional.quantized_linear`; `outliers` begin
            as zeros.

    Raises:
        ValueError: an argument is none of these, or group_size does not divide in_features.

    Examples:
        >>> layer = onepass.nn.QuantizedLinear(64, 256, weights="nf4")
        >>> layer(torch.randn(8, 64)).shape
        torch.Size([8, 256])
    """

    codes: Tensor
    scales: Tensor
    shifts: Tensor | None
    input_order: Tensor | None
    outlier_columns: Tensor | None
    outliers: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        weights: str = "int8",
        group_size: int | None = None,
        activations: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scales_dtype: torch.dtype | None = None,
        input_order: Tensor | None = None,
        outlier_columns: Tensor | None = None,
    ):
        super().__init__()
        self.group_size = _group_size_of(weights, group_size, in_features)
        _check_activations(activations, weights, self.group_size == in_features)
        self.in_features, self.out_features = in_features, out_features
        self.weights, self.activations = weights, activations
        self.dtype = dtype or torch.get_default_dtype()
        self.plain_class: type[torch.nn.Module] = torch.nn.Linear  # what `dequantize` makes of it
        self.error: float | None = None  # of the weight, as a part of its norm
        if scales_dtype is None:
            scales_dtype = torch.float32 if weights == "int8" else torch.bfloat16
        words = -(-in_features // (32 // Format[weights.upper()].bits))
        codes = (-(-out_features // PANEL), words, PANEL)
        groups = in_features // self.group_size if in_features else 1
        scales = torch.ones(groups, out_features, dtype=scales_dtype, device=device)
        shifts = torch.zeros_like(scales) if weights == "int4" else None
        self.register_buffer("codes", torch.zeros(codes, dtype=torch.int32, device=device))
        self.register_buffer("scales", scales)
        self.register_buffer("shifts", shifts)
        wrong = _wrong_features(in_features, input_order, outlier_columns)
        if wrong is not None:
            raise ValueError(f"quantize: {wrong}")
        outliers = None
        if outlier_columns is not None:
            count, own = len(outlier_columns), self.dtype
            kept = own if own in (torch.bfloat16, torch.float16) else torch.float16
            outliers = torch.zeros(out_features, count, dtype=kept, device=device)
        indices = {"input_order": input_order, "outlier_columns": outlier_columns}
        for name, given in indices.items():
            own = None if given is None else given.to(device, torch.int32, copy=True)
            self.register_buffer(name, own)
        self.register_buffer("outliers", outliers)
        of_bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if of_bias is None else torch.nn.Parameter(of_bias))

    @classmethod
    def from_weight(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        weights: str = "int8",
        group_size: int | None = None,
        activations: str | None = None,
        scales_dtype: torch.dtype | None = None,
        input_order: Tensor | None = None,
        outlier_columns: Tensor | None = None,
    ) -> QuantizedLinear:
        """A layer whose weight is the nearest to `weight` (out_features, in_features).

        The layer of a weight on the meta device is there too, and holds nothing.

        Args:
            bias: (out_features,); a parameter is taken as it is.
            input_order: puts neighbours of this order into groups.
            outlier_columns: these columns keep 16 bits: weight's dtype, or else float16.

        Raises:
            ValueError: as the class; or weight has numbers that are not finite.
        """
        try:
            if weight.dim() != 2:
                raise ValueError(
                    "quantize: weight must have shape (out_features, in_features), got "
                    f"{tuple(weight.shape)}"
                )
            out_features, in_features = weight.shape
            layer = cls(
                in_features,
                out_features,
                False,
                weights=weights,
                group_size=group_size,
                activations=activations,
                device="meta",
                dtype=weight.dtype,
                scales_dtype=scales_dtype,
                input_order=input_order,
                outlier_columns=outlier_columns,
            )
            _check_finite(weight)
            if weight.is_meta:
                return layer._with_bias(bias)
            with torch.no_grad():
                apart = layer._take_apart(weight.detach(), input_order, outlier_columns)
                of_weight, layer.error = reference.quantize(
                    apart, layer.format, layer.group_size, layer.scales.dtype
                )
                if outlier_columns is not None:
                    layer.error *= float(apart.norm()) / (float(weight.norm()) or 1.0)
                layer.codes, layer.scales, layer.shifts = of_weight
        except Exception:
            check_arguments(cls.from_weight, locals())
            raise
        return layer._with_bias(bias)

    def _with_bias(self, bias: Tensor | None) -> QuantizedLinear:
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias, requires_grad=bias.requires_grad)
        self.bias = bias
        return self

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return Format[self.weights.upper()]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (out_features, in_features) that the codes, and outliers, stand for."""
        of_weight = self.codes, self.scales, self.shifts
        weight = reference.dequantize(
            *of_weight, Format[self.weights.upper()], self.in_features, dtype
        )
        of_features = self.input_order, self.outlier_columns, self.outliers
        return reference.in_features_order(weight, *of_features)

    def _take_apart(self, weight: Tensor, order: Tensor | None, columns: Tensor | None) -> Tensor:
        """Keeps a weight's outliers; returns the part that becomes codes."""
        device = weight.device
        if columns is not None:
            columns = columns.to(device)
            self.outlier_columns = columns.to(torch.int32)
            self.outliers = weight.index_select(1, columns).to(self.outliers.dtype)
            _check_finite(self.outliers, "outliers")
            weight = weight.index_fill(1, columns.long(), 0)
        if order is not None:
            self.input_order = order.to(device, torch.int32)
            weight = weight.index_select(1, self.input_order)
        return weight

    def forward(self, input: Tensor) -> Tensor:
        scales, shifts = self.scales, self.shifts
        if getattr(input, "dtype", None) is torch.float64:
            scales, shifts = (None if of is None else of.double() for of in (scales, shifts))
        output = functional.quantized_linear(
            input,
            self.codes,
            scales,
            shifts,
            self.bias,
            weights=self.weights,
            activations=self.activations,
            input_order=self.input_order,
            outlier_columns=self.outlier_columns,
            outliers=self.outliers,
        )
        # After the operator's own checks: the last word may hold a few numbers more.
        if input.shape[-1] != self.in_features:
            raise RuntimeError(
                f"quantized_linear: input must have a last dimension of {self.in_features}, "
                f"in_features, got shape {tuple(input.shape)}"
            )
        return output

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, "
        text += f"bias={self.bias is not None}, weights={self.weights!r}"
        if self.group_size != self.in_features:
            text += f", group_size={self.group_size}"
        if self.input_order is not None:
            text += ", input_order"
        if self.outlier_columns is not None:
            text += f", outliers={len(self.outlier_columns)}"
        return text if self.activations is None else f"{text}, activations={self.activations!r}"

    def get_extra_state(self) -> Tensor:
        """The format's number and the group's size, as a tensor: what safetensors can hold."""
        facts = [self.format, self.group_size]
        return torch.tensor(facts, dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Checks that a state is of this format, which never changes."""
        if not state.is_meta and self._differs(state):
            own = _facts(self.get_extra_state())
            raise RuntimeError(f"QuantizedLinear: state must be of {own}, got {_facts(state)}")

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Loads nothing of a state that does not fit."""
        problem = self._problem(state_dict, prefix)
        if problem is None:
            super()._load_from_state_dict(state_dict, prefix, *args)
        else:
            args[-1].append(f"QuantizedLinear: {problem}")

    def _problem(self, state_dict: Mapping[str, object], prefix: str) -> str | None:
        extra, layer = state_dict.get(f"{prefix}_extra_state"), prefix.rstrip(".")
        if isinstance(extra, Tensor) and not extra.is_meta and self._differs(extra):
            own = _facts(self.get_extra_state())
            return f"{layer} must be of {own}, got a state of {_facts(extra)}"
        for name in self._buffers:
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(given, Tensor) and own is None:
                return f"{layer} must have no {name}, got a state with it"
            if isinstance(given, Tensor) and own is not None and given.dtype != own.dtype:
                dtypes = (str(of.dtype).removeprefix("torch.") for of in (own, given))
                return "{} must have {} in {}, got {}".format(
                    layer, name, *dtypes
                )  # torch would convert it
        indices = [state_dict.get(prefix + name) for name in ("input_order", "outlier_columns")]
        wrong = _wrong_features(self.in_features, *indices)
        return None if wrong is None else f"{prefix}{wrong}"

    def _differs(self, extra: Tensor) -> bool:
        return extra.tolist() != self.get_extra_state().tolist()

    def _apply(self, fn, recurse=True):
        """Moves scales, shifts and outliers, and does not convert them: they keep their digits in
        `model.to(torch.bfloat16)`."""
        kept = {name: getattr(self, name) for name in ("scales", "shifts", "outliers")}
        super()._apply(fn, recurse)
        for name, own in kept.items():
            new = getattr(self, name)
            if own is not None and new.dtype != own.dtype:
                setattr(self, name, own.to(new.device))
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.codes.device)).dtype
        return self


def _group_size_of(
    weights: str, group_size: int | None, in_features: int, of: str = "in_features"
) -> int:
    """The numbers along in_features that share a scale.

    Raises:
        ValueError: weights is no format, or groups do not divide in_features, which are `of`.
    """
    _check_weights(weights)
    if type(group_size) not in (int, NoneType):
        raise TypeError(
            f"quantize: group_size must be a whole number or None, got {type(group_size).__name__}"
        )
    if group_size is None:
        fitting = (
            s for s in range(MOST_GROUPED.get(weights, 0), 0, -_STEP) if in_features % s == 0
        )
        group_size = next(fitting, in_features)
    if group_size != in_features and (
        group_size < 1 or group_size % _STEP or in_features % group_size
    ):
        raise ValueError(
            f"quantize: group_size must be a multiple of {_STEP} that divides {of}, "
            f"{in_features}, got {group_size}"
        )
    return group_size


def _check_weights(weights: str) -> None:
    """
    Raises:
        ValueError: weights is no format.
    """
    if weights not in FORMATS:
        names = ", ".join(map(repr, FORMATS))
        raise ValueError(f"quantize: weights must be one of {names}, got {weights!r}")


def _wrong_features(in_features: int, order: Tensor | None, columns: Tensor | None) -> str | None:
    """The error if order is no permutation of the features, or columns are not some of them."""
    for name, given in (("input_order", order), ("outlier_columns", columns)):
        if given is None or given.is_meta:
            continue
        found, are_all = set(given.flatten().tolist()), name == "input_order"
        features = set(range(in_features))
        fit = found == features if are_all else found <= features
        if not (given.dim() == 1 and fit and len(found) == len(given)):
            rule = "each of" if are_all else "some of"
            return (
                f"{name} must hold {rule} the {in_features} in_features once, got shape "
                f"{tuple(given.shape)} from {min(found, default=None)} to "
                f"{max(found, default=None)}"
            )
    return None


def _facts(extra: Tensor) -> str:
    """The format and the groups in an extra state."""
    number, group_size = extra.tolist()
    return f"{FORMATS[number]} in groups of {group_size}"


def _check_activations(activations: str | None, weights: str, in_rows: bool) -> None:
    """
    Raises:
        ValueError: input cannot be quantised beside such weights.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"quantize: activations must be None or 'int8', got {activations!r}")
    if activations is not None and not (weights == "int8" and in_rows):
        raise ValueError(
            "quantize: activations must be None unless weights are int8 with a scale for each row, "
            f"got {activations!r} beside {weights}{'' if in_rows else ' in groups'}"
        )


def _check_finite(weight: Tensor, name: str = "weight") -> None:
    """
    Raises:
        ValueError: the weight has numbers that are not finite.
    """
    if not weight.is_meta and not math.isfinite(
        float(torch.linalg.vector_norm(weight.detach(), math.inf))
    ):
        raise ValueError(f"quantize: {name} must be finite, got NaN or Inf in it")
