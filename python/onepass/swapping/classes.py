"""The classes that swapped modules get.

torch's own classes have importable counterparts here. Every other class gets a subclass made on
demand, (forward of onepass, original class), which pickles as "the original, then swapped". All
have the original's `__name__`, because other libraries choose modules by class name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

import onepass.nn
from onepass import _stock
from onepass._compiling import refuse_script
from onepass._policy import small_calls
from onepass._policy.precision import precision_of
from onepass._refusals import is_number, or_torchs
from onepass.functional._internal import (
    cross_entropy_gains,
    linear_where_it_gains,
)
from onepass.swapping import copies, foreign, rotary, scans
from onepass.swapping.facts import is_as_proven
from onepass.swapping.inputs import is_for_attention, is_for_loss, is_for_norm, is_plain
from onepass.swapping.providers import LAZY_LOGITS, LOSSES, SCANS, provider
from onepass.swapping.quantization import Qconfig
from onepass.swapping.redirection import ARE_SMALL, redirected
from onepass.swapping.specs import (
    ActivatedSpec,
    AdaptiveSpec,
    Call,
    GatedSpec,
    HeadSpec,
    NormSpec,
    RotarySpec,
    ScanSpec,
    Spec,
)


class Swapped:
    """Base of all swapped classes. `_onepass_original` is in the `__dict__` of each of them."""

    _onepass_original: type
    _onepass_to: dict[str, str]  # the operator that computes now, by kind, for the report

    __prepare_scriptable__ = refuse_script

    def __init_subclass__(cls, **_):
        """Stops here, so that parents which register subclasses do not see this class."""


QUANTIZED_LAYER = "_onepass_quantized"  # the attribute of a module with a `QuantizedForward`


class LayerNormForward(Swapped):
    _onepass_to = {"norm": "onepass.nn.LayerNorm"}

    def forward(self, input: Tensor) -> Tensor:
        if is_plain(input) and not small_calls.norm_is_small(input):
            weight, bias, eps = self.weight, self.bias, self.eps
            if is_for_norm(input, weight, bias, eps):
                given = (input, self.normalized_shape, weight, bias, eps)
                return or_torchs(onepass.functional.layer_norm, F.layer_norm, *given)
        return run_original(self, torch.nn.LayerNorm.forward, input)


class RMSNormForward(Swapped):
    _onepass_to = {"norm": "onepass.nn.RMSNorm"}

    def forward(self, x: Tensor) -> Tensor:
        if is_plain(x) and (self.eps is None or is_number(self.eps)):
            given = (x, self.normalized_shape, self.weight, self.eps)
            return or_torchs(onepass.functional.rms_norm, F.rms_norm, *given)
        return run_original(self, torch.nn.RMSNorm.forward, x)


class GroupNormForward(Swapped):
    _onepass_to = {"norm": "onepass.nn.GroupNorm"}

    def forward(self, input: Tensor) -> Tensor:
        num_groups = self.num_groups
        if (
            is_plain(input)
            and type(num_groups) is int
            and not small_calls.group_norm_is_small(input, num_groups)
        ):
            weight, bias, eps = self.weight, self.bias, self.eps
            if is_for_norm(input, weight, bias, eps):
                given = (input, num_groups, weight, bias, eps)
                return or_torchs(onepass.functional.group_norm, F.group_norm, *given)
        return run_original(self, torch.nn.GroupNorm.forward, input)


class DropoutForward(Swapped):
    _onepass_to = {"dropout": "onepass.nn.Dropout"}

    def forward(self, input: Tensor) -> Tensor:
        stock = torch.nn.Dropout.forward
        if is_plain(input) and is_number(self.p):
            return or_torchs(onepass.nn.Dropout.forward, stock, self, input)
        return run_original(self, stock, input)


class LinearForward(Swapped):
    _onepass_to = {"linear": "onepass.nn.Linear"}

    qconfig = Qconfig()

    def forward(self, input: Tensor) -> Tensor:
        if is_plain(input):
            return linear_where_it_gains(input, self.weight, self.bias, precision_of(self))
        return run_original(self, torch.nn.Linear.forward, input)


class Conv1DForward(Swapped):
    """Forward of transformers' Conv1D, a linear layer with a transposed weight (GPT-2)."""

    _onepass_to = {"linear": "onepass.functional.linear"}

    def forward(self, x: Tensor) -> Tensor:
        if is_plain(x) and x.dim():
            weight, bias = self.weight, self.bias
            if weight is not None and bias is not None:
                return linear_where_it_gains(x, weight.t(), bias, precision_of(self))
        return run_original(self, _stock.original(self).forward, x)


class QuantizedForward(Swapped):
    """Forward of a linear layer whose weight another library quantised, by the same codes."""

    _onepass_to = {"linear": "onepass.functional.quantized_linear"}

    def forward(self, input: Tensor) -> Tensor:
        layer = vars(self).get(QUANTIZED_LAYER)
        if layer is None or not is_plain(input):
            return run_original(self, _stock.original(self).forward, input)
        bias = self.bias
        if bias is not None and bias.dtype is not input.dtype:
            bias = bias.to(input.dtype)
        codes, scales = layer.codes, layer.scales
        if input.dtype is torch.float64:
            scales = scales.double()
        return onepass.functional.quantized_linear(
            input, codes, scales, None, bias, weights=layer.weights
        )


class CrossEntropyLossForward(Swapped):
    _onepass_to = {"loss": "onepass.nn.CrossEntropyLoss"}

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        arguments = (input, target, self.weight, self.label_smoothing)
        ours = isinstance(self, Swapped) and is_for_loss(input)  # not so after `unswap`
        stock = torch.nn.CrossEntropyLoss.forward
        if ours and cross_entropy_gains(*arguments):
            return or_torchs(onepass.nn.CrossEntropyLoss.forward, stock, self, input, target)
        return run_original(self, stock, input, target)


class ProvenForward(Swapped):
    """Forward of a module that takes one tensor and was proven to compute what its spec says.

    A call with other arguments runs the original, as does a wrapper that holds this after `unswap`,
    and so does every call once something that the proof read has changed.
    """

    _onepass_spec: NormSpec | GatedSpec

    def forward(self, input=..., /, **named):
        if input is ... or named or not isinstance(self, Swapped):
            spec = getattr(self, "_onepass_spec", None)
            if input is not ... or not spec or tuple(named) != (spec.argument,):
                given = () if input is ... else (input,)
                return _stock.original(self).forward(self, *given, **named)
            input = named[spec.argument]
        held = self._onepass_spec.held
        if not is_plain(input) or (held and not is_as_proven(self, held)):
            return run_original(self, self._onepass_original.forward, input)
        return self._onepass_compute(input)


class ForeignNormForward(ProvenForward):
    """Forward of a norm that the probe accepted; combinations that were not proven run the
    original."""

    _onepass_out_dtypes: dict[tuple[torch.dtype, torch.dtype], torch.dtype]
    _onepass_autocast_dtypes: dict[tuple, torch.dtype]

    def _onepass_compute(self, input):
        original, ours = self._onepass_original.forward, foreign.computing(self, input)
        if ours is None:
            return run_original(self, original, input)
        return or_torchs(ours, original, self, input)


class MultiheadAttentionForward(Swapped):
    _onepass_to = {"attention": "onepass.nn.MultiheadAttention"}

    @functools.wraps(torch.nn.MultiheadAttention.forward)
    def forward(self, query, key, value, *args, **named):
        original = torch.nn.MultiheadAttention.forward
        if all(map(is_for_attention, (query, key, value))):
            ours = onepass.nn.MultiheadAttention.forward
            return or_torchs(ours, original, self, query, key, value, *args, **named)
        return run_original(self, original, query, key, value, *args, **named)


class EncoderLayerForward(Swapped):
    _onepass_to = {"attention": "onepass.nn.TransformerEncoderLayer"}

    @functools.wraps(torch.nn.TransformerEncoderLayer.forward)
    def forward(self, src, *args, **named):
        if is_for_attention(src):
            return onepass.nn.TransformerEncoderLayer.forward(self, src, *args, **named)
        return run_original(self, torch.nn.TransformerEncoderLayer.forward, src, *args, **named)


class DecoderLayerForward(Swapped):
    """The forward is torch's, since torch always calls the parts, which are swapped."""

    _onepass_to = {"attention": "onepass.nn.TransformerDecoderLayer"}


class Calls(Swapped):
    """Runs the original's forward with its calls of torch's functions redirected.

    `make_class` gets the calls, of `REDIRECTED`, and adds the forward with the original's
    signature. For "loss_function", the loss of a model of transformers, it adds that property
    instead. Functions of the forward's file are given by their specs, and so is a head, for which
    it adds a property with its name.
    """

    _onepass_spec: tuple[Call, ...]


# The functions that replace torch's in a forward, by kind, and in "loss".
REDIRECTED = {
    "attention": "onepass.functional.scaled_dot_product_attention",
    "attention_by_hand": "onepass.functional.scaled_dot_product_attention",
    "linear": "onepass.functional.linear",
    "loss": "onepass.functional.cross_entropy",
    "loss_function": "onepass.functional.cross_entropy",
    "loss_head": "onepass.functional.linear_cross_entropy",
    "rotary": "onepass.functional.rotary_embedding",
}


def redirects(cls: type, kind: str) -> bool:
    """Whether calls of this kind are redirected in a forward of this class."""
    names = map(call_name, cls._onepass_spec) if issubclass(cls, Calls) else ()
    return any(name in (kind, f"{kind}_by_hand") for name in names)


def call_name(call: Call) -> str:
    return call if isinstance(call, str) else _NAMES_OF_CALLS[type(call)]


_NAMES_OF_CALLS = {HeadSpec: "loss_head", RotarySpec: "rotary", ScanSpec: "scan"}


def _computing(function: Callable, spec: RotarySpec | ScanSpec) -> Callable:
    """Ours, for a function of a forward's file."""
    if isinstance(spec, RotarySpec):
        return rotary.rotating(function, spec)
    if scans.decorated_as(function) != (spec.of_package, scans.FUNCTIONS[spec.of_package][0]):
        return function  # another one, which a program assigned before it loaded a pickled model
    return provider(SCANS).computing(function, spec)


class LayerNorm(LayerNormForward, onepass.nn.LayerNorm):
    """The class that `swap` gives an exact `torch.nn.LayerNorm`."""

    _onepass_original = torch.nn.LayerNorm


class RMSNorm(RMSNormForward, onepass.nn.RMSNorm):
    """The class that `swap` gives an exact `torch.nn.RMSNorm`."""

    _onepass_original = torch.nn.RMSNorm


class GroupNorm(GroupNormForward, onepass.nn.GroupNorm):
    """The class that `swap` gives an exact `torch.nn.GroupNorm`."""

    _onepass_original = torch.nn.GroupNorm
    activation = None


class Dropout(DropoutForward, onepass.nn.Dropout):
    """The class that `swap` gives an exact `torch.nn.Dropout`."""

    _onepass_original = torch.nn.Dropout


class Linear(LinearForward, onepass.nn.Linear):
    """The class that `swap` gives an exact `torch.nn.Linear`."""

    _onepass_original = torch.nn.Linear


class CrossEntropyLoss(CrossEntropyLossForward, onepass.nn.CrossEntropyLoss):
    """The class that `swap` gives an exact `torch.nn.CrossEntropyLoss`."""

    _onepass_original = torch.nn.CrossEntropyLoss


class MultiheadAttention(MultiheadAttentionForward, onepass.nn.MultiheadAttention):
    """The class that `swap` gives an exact `torch.nn.MultiheadAttention`."""

    _onepass_original = torch.nn.MultiheadAttention


class TransformerEncoderLayer(EncoderLayerForward, onepass.nn.TransformerEncoderLayer):
    """The class that `swap` gives an exact `torch.nn.TransformerEncoderLayer`."""

    _onepass_original = torch.nn.TransformerEncoderLayer


class TransformerDecoderLayer(DecoderLayerForward, onepass.nn.TransformerDecoderLayer):
    """The class that `swap` gives an exact `torch.nn.TransformerDecoderLayer`."""

    _onepass_original = torch.nn.TransformerDecoderLayer


STATIC = {
    cls._onepass_original: cls
    for cls in (
        LayerNorm,
        RMSNorm,
        GroupNorm,
        Dropout,
        Linear,
        CrossEntropyLoss,
        MultiheadAttention,
        TransformerEncoderLayer,
        TransformerDecoderLayer,
    )
}


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


# Made classes by their originals. A class lives as long as something refers to it: neither a
# deleted model nor the user's class, to which its swapped class refers, is kept alive.
_MADE: WeakKeyDictionary[type, WeakValueDictionary] = WeakKeyDictionary()


def make_class(original: type, forward: type[Swapped], spec: Spec | None = None) -> type:
    """The class of a swapped `original`: the same for the same arguments, and forward of
    original, while it is alive.

    Args:
        spec: for a `ForeignNormForward` the norm, for an `AdaptiveForward` or `ActivatedForward`
            its form, for a `gated.GatedForward` the block; for `Calls` the members of `REDIRECTED`
            and the specs of other calls, sorted by their text.

    Raises:
        TypeError: original cannot be subclassed.
    """
    if original in STATIC and issubclass(STATIC[original], forward):
        return STATIC[original]
    made = _MADE.setdefault(original, WeakValueDictionary())
    cls = made.get((forward, spec))
    if cls is None or cls._onepass_replaces is not inspect.getattr_static(original, "forward"):
        cls = made[forward, spec] = _make_class(original, forward, spec)
    return cls


def _make_class(original: type, forward: type[Swapped], spec: Spec | None) -> type:
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_onepass_original": original,
        "_onepass_forward": forward,
        "_onepass_replaces": inspect.getattr_static(original, "forward"),
    }
    if spec is not None:
        namespace["_onepass_spec"] = spec
    if isinstance(spec, (ActivatedSpec, AdaptiveSpec, GatedSpec, NormSpec)):
        kind = "mlp" if isinstance(spec, GatedSpec) else "norm"
        namespace["_onepass_to"] = {kind: f"onepass {spec}"}
    if forward is Calls:
        # The report shows the last: of a model's loss the head.
        named = sorted(map(call_name, spec))
        namespace["_onepass_to"] = {
            name.partition("_")[0]: REDIRECTED[name] for name in named if name in REDIRECTED
        }
        scanned = [call for call in spec if isinstance(call, ScanSpec)]
        functions = [call for call in spec if isinstance(call, RotarySpec)] + scanned
        kinds = [call for call in spec if call in ARE_SMALL]
        run = original.forward
        if functions:
            run = copies.redirected(run, functions, _computing)
        if scanned:
            of_package = [call.of_package for call in scanned]
            namespace["_onepass_to"]["scan"] = f"onepass {scans.named(of_package)}"
            if scans.SCAN in of_package:
                run = provider(SCANS).forward_of(run)
        run = redirected(run, kinds) if kinds else run
        heads = [call.name for call in spec if isinstance(call, HeadSpec)]
        if heads:
            lazy_logits = provider(LAZY_LOGITS)
            run = lazy_logits.forward_of(run)
            namespace |= {name: lazy_logits.head_of(name) for name in heads}
        if run is not original.forward:
            namespace["forward"] = run
        if "loss_function" in spec:
            namespace["loss_function"] = provider(LOSSES).redirected(original.loss_function)
    if forward is ForeignNormForward:
        namespace["_onepass_out_dtypes"] = {(x, w): out for x, w, out in spec.dtypes}
        namespace["_onepass_autocast_dtypes"] = {}
    return type(original)(original.__name__, (forward, _Dynamic, original), namespace)


def is_swapped(cls: type) -> bool:
    """Whether cls was made by `swap`; a subclass of such a class was not."""
    return "_onepass_original" in cls.__dict__


def run_original(module: nn.Module, original, input, *args, **named):
    """Runs the original's forward; while torch.fx traces, records a call of the module instead.

    So a traced graph calls the swapped module as a whole, as it would call one of torch's own.
    """
    if not isinstance(input, torch.fx.Proxy):
        return original(module, input, *args, **named)
    tracer = input.tracer
    name = tracer.path_of_module(module)
    if not name:  # the module that is traced
        return original(module, input, *args, **named)
    return tracer.create_proxy("call_module", name, (input, *args), named)
