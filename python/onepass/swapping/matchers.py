"""The kind of a module, from its class and structure alone; nothing is computed here."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

import onepass.nn
from onepass import _library, _stock
from onepass._imported import is_a
from onepass._policy import products, small_calls
from onepass.nn._parts import has_hooks
from onepass.swapping import activated, adaptive, callsites, classes, gated, rotary, scans
from onepass.swapping.inputs import MOST_HEAD_DIM, has_kernels
from onepass.swapping.providers import DIFFUSERS, QUANTIZED, provider
from onepass.swapping.reasons import Reason, SkipReason, replaced_forward
from onepass.swapping.specs import Structure

KINDS = ("norm", "attention", "dropout", "mlp", "rotary", "scan", "linear", "loss")
BESIDE = ("rotary", "scan", "linear", "loss")  # kinds that a module may have beside another
COPIED = ("rotary", "scan")  # those whose forward is a copy: calls of the modules in it stay


class Match(NamedTuple):
    """One of: swap to `forward`, `structure` to be probed, refused or unknown for `reason` (with
    `forceable`: unless the user vouches for `forward`), or `named`: takes attention by the name
    that its config holds. `calls`: of `classes.REDIRECTED`, if that is not the kind."""

    kind: str
    forward: type[classes.Swapped] | None = None
    structure: (
        Structure
        | gated.Parts
        | activated.Activated
        | adaptive.Adaptive
        | rotary.Functions
        | scans.Functions
        | None
    ) = None
    reason: SkipReason | None = None
    unknown: bool = False
    forceable: bool = False
    named: bool = False
    calls: tuple[str, ...] = ()


_STOCK_NORMS = {
    nn.LayerNorm: classes.LayerNormForward,
    nn.RMSNorm: classes.RMSNormForward,
    nn.GroupNorm: classes.GroupNormForward,
}
_OWN_NORMS = (
    onepass.nn.LayerNorm.forward,
    onepass.nn.RMSNorm.forward,
    onepass.nn.GroupNorm.forward,
)
_OTHER_NORMS = (
    (nn.modules.batchnorm._NormBase, Reason.BATCH_NORM),
    (nn.GroupNorm, Reason.OWN_FORWARD),
    (nn.LocalResponseNorm, Reason.RESPONSE_NORM),
)
_STOCK_ATTENTION = {
    nn.MultiheadAttention: classes.MultiheadAttentionForward,
    nn.TransformerEncoderLayer: classes.EncoderLayerForward,
    nn.TransformerDecoderLayer: classes.DecoderLayerForward,
}
_OWN_ATTENTION = (
    onepass.nn.MultiheadAttention,
    onepass.nn.TransformerEncoderLayer,
    onepass.nn.TransformerDecoderLayer,
)
# "norm" as in RMSNorm, LayerNorm1P, Normalization; not as in normal or NormedEmbedding.
_NORM_NAME = re.compile(r"norm(?!al(?!i)|ed)", re.IGNORECASE)
_NORM_NAME_END = re.compile(r"norm(alization)?(\dd|gated|zero|single)?$", re.IGNORECASE)
_DROPOUT_NAME = re.compile(r"drop(out|path|block|key|token)", re.IGNORECASE)
_ATTENTION_NAME = re.compile(r"(attention|attn)\d*$", re.IGNORECASE)
_MLP_NAME = re.compile(r"(mlp|glu|ffn|feed_?forward)\d*$", re.IGNORECASE)
_BIAS_NAMES = ("bias", "beta", "shift", "offset", "b")
_EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
_MOST_NUMBERS = 4  # of a forward that are tried as its eps


def match(module: nn.Module, kinds: tuple[str, ...]) -> Match | None:
    """The relation of a module to the given kinds, None if there is none: the first of
    `matches`."""
    return next(iter(matches(module, kinds)), None)


def matches(module: nn.Module, kinds: tuple[str, ...], precision: str | None = None) -> list[Match]:
    """Matches of a module: at most one of norm, attention and dropout; and rotary, scan, linear
    and loss, as a forward may also call functions of its file, F.linear and F.cross_entropy.
    `precision`: that which swap gives products of float32."""
    if isinstance(module, torch.jit.ScriptModule):  # its Python class does not show its code
        return []
    if isinstance(module, classes.Swapped):
        changed = [kind for kind in kinds if kind in module._onepass_to]
        if changed and not classes.is_swapped(type(module)):
            return [Match(changed[0], reason=Reason.CHANGED.format())]
        kinds = tuple(kind for kind in kinds if kind not in changed)
        if not isinstance(module, classes.Calls):
            return []
    calls = functools.cache(functools.partial(callsites.calls_of, module))
    rules = _RULES | {"linear": functools.partial(_linear, precision=precision)}
    found = []
    for kind in sorted(kinds, key=BESIDE.__contains__):
        match = rules[kind](module, calls) if kind in BESIDE or not found else None
        if match is not None:
            found.append(_with_obstacle(module, match))
    return found


def _with_obstacle(module: nn.Module, match: Match) -> Match:
    if match.reason or match.unknown or match.named:
        return match
    is_quantized = match.forward is classes.QuantizedForward
    obstacle = obstacle_to(module, match.kind, "weight" if is_quantized else "")
    if isinstance(module, classes.Swapped):
        obstacle = Reason.REDIRECTED.format()
    return match._replace(reason=obstacle) if obstacle else match


def _norm(module: nn.Module, calls: Callable[[], callsites.Calls]) -> Match | None:
    cls = type(module)
    if isinstance(module, (onepass.nn.AddLayerNorm, onepass.nn.AddRMSNorm)):
        return None
    if cls.forward in _OWN_NORMS:
        return None
    if forward := _STOCK_NORMS.get(_stock.definer(cls)):
        reason = _group_norm_alone(module) if isinstance(module, nn.GroupNorm) else None
        return Match("norm", forward=forward, reason=reason)
    for other, reason in _OTHER_NORMS:
        if isinstance(module, other):
            return Match("norm", reason=reason.format())
    fused = activated.form_of(module)
    if isinstance(fused, SkipReason):
        return Match("norm", reason=fused)
    if fused is not None:
        return Match("norm", activated.FORWARDS[fused.form], fused)
    form = adaptive.form_of(module)
    if isinstance(form, SkipReason):
        return Match("norm", unknown=form.kind is Reason.NO_NORM, reason=form)
    if form is not None:
        obstacle = adaptive.obstacle(module)
        return Match("norm", adaptive.AdaptiveForward, adaptive.Adaptive(form), obstacle)
    if module._modules:
        if not _NORM_NAME_END.search(cls.__name__):
            return None
        return Match("norm", unknown=True, reason=Reason.HOLDS_MODULES.format())
    structure = _structure(module)
    if isinstance(structure, Structure):
        return Match("norm", structure=structure)
    vectors = any(
        value is not None and not isinstance(value, UninitializedTensorMixin) and value.dim() == 1
        for value in module._parameters.values()
    )
    if _NORM_NAME.search(cls.__name__) or (vectors and _eps_name(module) is not None):
        return Match("norm", reason=structure)
    return None


def _group_norm_alone(module: nn.GroupNorm) -> SkipReason | None:
    """Why torch's group norm stays where nothing after it is computed in the same pass."""
    weight = next(iter(_stock.tensors(module, "weight")), None)
    if weight is None:
        return None  # the input's dtype decides in each call
    if weight.device.type not in ("cpu", "meta"):
        return Reason.GROUP_NORM.format(weight.device.type)
    if weight.dtype not in small_calls.ALONE:
        return Reason.GROUP_NORM.format(str(weight.dtype).removeprefix("torch."))
    return None


def _dropout(module: nn.Module, calls: Callable[[], callsites.Calls]) -> Match | None:
    cls = type(module)
    if isinstance(module, onepass.nn.Dropout):
        return None
    if cls is nn.Dropout:
        return Match("dropout", forward=classes.DropoutForward)
    if isinstance(module, nn.Dropout):
        reason = Reason.DROPOUT_SUBCLASS.format()
        return Match("dropout", classes.DropoutForward, reason=reason, forceable=True)
    if not module._modules and (
        isinstance(module, nn.modules.dropout._DropoutNd) or _DROPOUT_NAME.search(cls.__name__)
    ):
        return Match("dropout", unknown=True, reason=Reason.OTHER_DROPOUT.format())
    return None


def _attention(module: nn.Module, calls: Callable[[], callsites.Calls]) -> Match | None:
    cls = type(module)
    if isinstance(module, _OWN_ATTENTION):
        return None
    if forward := _STOCK_ATTENTION.get(_stock.definer(cls)):
        reason, forceable = None, False
        if isinstance(module, nn.MultiheadAttention):
            if module.head_dim > MOST_HEAD_DIM:
                reason = Reason.HEAD_DIM.format(module.head_dim, MOST_HEAD_DIM)
        elif forward is classes.EncoderLayerForward:
            if cls._sa_block is not _stock.method(nn.TransformerEncoderLayer, "_sa_block"):
                reason = Reason.OWN_SA_BLOCK.format()
                forceable = True
        return Match("attention", forward, reason=reason, forceable=forceable)
    if isinstance(module, nn.MultiheadAttention):
        reason = Reason.OWN_FORWARD.format()
        forward = classes.MultiheadAttentionForward
        return Match("attention", forward, reason=reason, unknown=True, forceable=True)
    reached = calls()
    if reached.registry:
        return Match("attention", named=True)
    if reached.attention or reached.by_hand:
        device = next((str(p.device.type) for p in module.parameters()), "cpu")
        if not reached.attention and device not in ("cpu", "meta"):
            reason = Reason.BY_HAND_ELSEWHERE.format(device)
            return Match("attention", unknown=True, reason=reason)
        reason = Reason.CHECKPOINTS.format("attention") if reached.checkpoint else None
        called = ("attention",) * reached.attention + ("attention_by_hand",) * reached.by_hand
        return Match("attention", forward=classes.Calls, reason=reason, calls=called)
    if reached.dispatch:
        text = provider(DIFFUSERS).refusal(module)
        reason = Reason.DIFFUSERS.with_text(text) if text else None
        if reached.checkpoint:
            reason = Reason.CHECKPOINTS.format("attention")
        return Match("attention", classes.Calls, reason=reason)
    if _ATTENTION_NAME.search(cls.__name__):
        return Match("attention", unknown=True, reason=Reason.NO_CALLS.format())
    return None


def _mlp(module: nn.Module, calls: Callable[[], callsites.Calls]) -> Match | None:
    if isinstance(module, onepass.nn.GatedMLP):
        return None
    arguments = _arguments(type(module))
    one = len(arguments) == 1 and arguments[0].kind in _ONE_TENSOR
    parts = gated.parts(module, arguments[0].name if one else None)
    if parts is None:
        return None
    activation = parts.activation and module._modules[parts.activation]
    if activation and has_hooks(activation):
        return Match("mlp", reason=Reason.HOOKS.format(parts.activation))
    if activation and replaced_forward(activation):
        return Match("mlp", reason=Reason.PART_FORWARD.format(parts.activation))
    return Match("mlp", forward=gated.GatedForward, structure=parts)


def is_called_mlp(module: nn.Module) -> bool:
    """Whether its class is named like a feed-forward block, gated or not."""
    return bool(_MLP_NAME.search(type(module).__name__))


def _rotary(module: nn.Module, calls: Callable[[], callsites.Calls]) -> Match | None:
    found = rotary.functions(module)
    if found.called:
        return Match("rotary", forward=classes.Calls, structure=found)
    if rotary.is_decorated(module):
        return Match("rotary", reason=Reason.DECORATED.format())
    if names := rotary.others(module):
        reason = Reason.NO_TABLES.format(", ".join(names))
        return Match("rotary", unknown=True, reason=reason)
    return None


def _scan(module: nn.Module, calls: Callable[[], callsites.Calls]) -> Match | None:
    found = scans.functions(module)
    if not found.called:
        return (
            Match("scan", reason=Reason.DECORATED.format()) if scans.is_decorated(module) else None
        )
    device = next((str(p.device.type) for p in module.parameters()), "cpu")
    if device not in ("cpu", "meta"):
        names = [called.of_package for called in found.called]
        words, packages = scans.named(names), scans.faster_elsewhere(names)
        return Match("scan", reason=Reason.SCAN_ELSEWHERE.format(words, device, packages))
    return Match("scan", forward=classes.Calls, structure=found)


def _linear(
    module: nn.Module, calls: Callable[[], callsites.Calls], precision: str | None = None
) -> Match | None:
    cls = type(module)
    if quantized := _quantized(module):
        return quantized
    if is_a(module, "transformers.pytorch_utils", "Conv1D"):
        original = sys.modules["transformers.pytorch_utils"].Conv1D
        forward = classes.Conv1DForward
    elif isinstance(module, onepass.nn.Linear):
        return None
    elif not isinstance(module, nn.Linear):
        return _linear_calls(module, calls(), precision)
    elif isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None  # torch's attention reads its weight directly
    else:
        original, forward = nn.Linear, classes.LinearForward
    weights = _stock.tensors(module, "weight")
    if not weights:
        return None  # set later, or never
    if _stock.definer(cls) is not original:
        own = Match("linear", unknown=True, reason=Reason.OWN_FORWARD.format())
        return _linear_calls(module, calls(), precision) or own
    return Match("linear", forward=forward, reason=_as_fast(weights, True, precision))


def _quantized(module: nn.Module) -> Match | None:
    """The match of a linear layer whose weight another library quantised."""
    if type(module._parameters.get("weight")) in (nn.Parameter, type(None)):
        return None
    known = provider(QUANTIZED)
    if known.words(module) is None:
        return None
    text = known.refusal(module)
    reason = Reason.QUANTIZED.with_text(text) if text else None
    return Match("linear", forward=classes.QuantizedForward, reason=reason)


def _linear_calls(
    module: nn.Module, reached: callsites.Calls, precision: str | None
) -> Match | None:
    """The match of a module that calls F.linear with its own weights."""
    weights = small_calls.linear_weights(module)
    if parametrizations := _stock.parametrizations(module):
        weights += small_calls.matrices(parametrizations.parameters())
    if not reached.linear or not weights:
        return None
    reason = _as_fast(weights, False, precision)
    if not reason and reached.checkpoint:
        reason = Reason.CHECKPOINTS.format("products")
    experts = getattr(_stock.peek(module, "config"), "_experts_implementation", None)
    if not reason and reached.experts and experts not in (None, "eager"):
        reason = Reason.EXPERTS.format(experts)
    return Match("linear", forward=classes.Calls, reason=reason)


def _loss(module: nn.Module, calls: Callable[[], callsites.Calls]) -> Match | None:
    cls = type(module)
    if isinstance(module, onepass.nn.CrossEntropyLoss):
        return None
    if _stock.definer(cls) is nn.CrossEntropyLoss:
        return Match("loss", forward=classes.CrossEntropyLossForward)
    reached = calls()
    if not (reached.loss or reached.losses) or not small_calls.vocabulary(module):
        return None
    if reached.losses and is_a(module, "transformers.modeling_utils", "PreTrainedModel"):
        return Match("loss", forward=classes.Calls, calls=("loss_function",))
    if reached.loss:
        reason = Reason.CHECKPOINTS.format("loss") if reached.checkpoint else None
        return Match("loss", forward=classes.Calls, reason=reason)
    return None


def _as_fast(weights: list[torch.Tensor], small: bool, precision: str | None) -> SkipReason | None:
    """Why torch's products with these weights are as fast, small ones too; None if those with one
    of them are slower."""
    for weight in weights:
        device = weight.device.type
        torchs = f"products on {device}"
        if device in ("cpu", "meta"):
            dtype = products.dtype_of(weight)
            torchs = products.as_fast(dtype, small and weight.dtype is dtype, precision)
        if not torchs:
            return None
    return Reason.AS_FAST.format(torchs)


_RULES = {
    "norm": _norm,
    "attention": _attention,
    "dropout": _dropout,
    "mlp": _mlp,
    "rotary": _rotary,
    "scan": _scan,
    "linear": _linear,
    "loss": _loss,
}


def _structure(module: nn.Module) -> Structure | SkipReason:
    """The names of a norm's parts, or why this does not have a norm's structure."""
    buffers = [name for name, buffer in module._buffers.items() if buffer is not None]
    if buffers:
        return Reason.BUFFERS.format(", ".join(buffers))
    for name, value in vars(module).items():
        if name not in _MODULE_ATTRIBUTES and _holds_tensor(value):
            return Reason.KEEPS_TENSOR.format(name)
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    if not parameters:
        return Reason.NO_WEIGHT.format()
    for name, value in parameters.items():
        if isinstance(value, UninitializedTensorMixin):
            return Reason.NO_SHAPE.format(name)
        if value.dim() != 1:
            return Reason.DIMENSIONS.format(name, tuple(value.shape))
    bias = next((name for name in _BIAS_NAMES if name in parameters and len(parameters) > 1), None)
    weights = [name for name in parameters if name != bias]
    if len(weights) != 1:
        return Reason.PARAMETERS.format(len(parameters), ", ".join(parameters))
    if bias is not None and parameters[bias].shape != parameters[weights[0]].shape:
        return Reason.SHAPES_DIFFER.format(bias, weights[0])
    eps = _eps_name(module) or _eps_numbers(type(module))
    if not eps:
        return Reason.NO_EPS.format()
    arguments = _arguments(type(module))
    if len(arguments) != 1 or arguments[0].kind not in _ONE_TENSOR:
        return Reason.ARGUMENTS.format(", ".join(map(str, arguments)))
    return Structure(weights[0], bias, eps, arguments[0].name)


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_ONE_TENSOR = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _eps_name(module: nn.Module) -> str | None:
    attributes = vars(module)
    others = sorted(name for name in attributes if "eps" in name.lower())
    for name in (*_EPS_NAMES, *others):
        if type(attributes.get(name)) in (float, int):
            return name
    return None


def _eps_numbers(cls: type) -> tuple[float, ...]:
    """The numbers in the code of a norm's forward that may be its eps."""
    forward = inspect.getattr_static(cls, "forward")
    if not _NORM_NAME.search(cls.__name__) or not isinstance(forward, types.FunctionType):
        return ()
    numbers = {x for x in forward.__code__.co_consts if isinstance(x, float) and 0.0 < x <= 0.01}
    return tuple(sorted(numbers))[:_MOST_NUMBERS]


def _arguments(cls: type) -> list[inspect.Parameter]:
    try:
        arguments = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):  # a forward without a readable signature
        return []
    return [argument.replace(annotation=argument.empty) for argument in arguments]


def _holds_tensor(value) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set)):
        return False
    return any(isinstance(item, torch.Tensor) for item in value)


def obstacle_to(module: nn.Module, kind: str, held: str = "") -> SkipReason | None:
    """Why a module of a known class still cannot be swapped; None if it can. `held`: the name of a
    parameter whose class is known."""
    cls = type(module)
    if reason := replaced_forward(module):
        return reason
    if cls.__call__ is not nn.Module.__call__:
        return Reason.OWN_CALL.format()
    if _stock.parametrizations(module):
        return Reason.PARAMETRIZED.format()
    for name, parameter in module._parameters.items():
        if parameter is None or name == held:
            continue
        if type(parameter) is not nn.Parameter:
            return Reason.PARAMETER_CLASS.format(name, type(parameter).__name__)
    for device in {parameter.device for parameter in module.parameters()}:
        if not has_kernels(device.type, kind):
            return Reason.NO_KERNELS.format(device.type)
        if device.type == "cuda" and (text := _library.too_old(device)):
            return Reason.OLD_DEVICE.with_text(text)
    return None
