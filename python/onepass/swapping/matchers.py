"""What a module is to `swap`, from its class and structure alone; nothing is computed here."""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

import onepass.nn
from onepass import _library
from onepass.swapping import callsites, classes
from onepass.swapping.classes import has_kernels

KINDS = ("norm", "attention", "dropout")


class Structure(NamedTuple):
    """A module that is built like a norm: the names that the probe needs."""

    weight: str
    bias: str | None
    eps: str
    argument: str


class Match(NamedTuple):
    """One of: swap to `forward`, `structure` to be probed, refused or unknown for `reason`, or
    `attached`: on onepass already without a swap."""

    kind: str
    forward: type[classes.Swapped] | None = None
    structure: Structure | None = None
    reason: str = ""
    unknown: bool = False
    attached: bool = False


_STOCK_NORMS = {
    nn.LayerNorm.forward: classes.LayerNormForward,
    nn.RMSNorm.forward: classes.RMSNormForward,
}
_OTHER_NORMS = (
    (nn.modules.batchnorm._NormBase, "normalises over the batch or positions, with statistics"),
    (nn.GroupNorm, "normalises groups of channels over all positions"),
    (nn.LocalResponseNorm, "normalises over neighbouring channels"),
)
_STOCK_ATTENTION = {
    nn.MultiheadAttention.forward: classes.MultiheadAttentionForward,
    nn.TransformerEncoderLayer.forward: classes.EncoderLayerForward,
    nn.TransformerDecoderLayer.forward: classes.DecoderLayerForward,
}
_OWN_ATTENTION = (
    onepass.nn.MultiheadAttention,
    onepass.nn.TransformerEncoderLayer,
    onepass.nn.TransformerDecoderLayer,
)
REGISTRY = (
    "takes attention by name from transformers' registry: "
    "onepass.integrations.transformers.attach(model) makes that onepass's"
)
ATTACHED = "onepass's attention, by transformers' registry"
ATTACHED_NAME = "onepass"  # of it in that registry
_CHECKPOINTS = (
    "checkpoints inside its forward, whose recomputation would run torch's attention; checkpoint "
    "around the module"
)
# "norm" as in RMSNorm, LayerNorm1P, Normalization; not as in normal or NormedEmbedding.
_NORM_NAME = re.compile(r"norm(?!al(?!i)|ed)", re.IGNORECASE)
_NORM_NAME_END = re.compile(r"norm(alization)?(\dd|gated|zero|single)?$", re.IGNORECASE)
_DROPOUT_NAME = re.compile(r"drop(out|path|block|key|token)", re.IGNORECASE)
_ATTENTION_NAME = re.compile(r"(attention|attn)\d*$", re.IGNORECASE)
_BIAS_NAMES = ("bias", "beta", "shift", "offset", "b")
_EPS_NAMES = ("eps", "variance_epsilon", "epsilon")


def match(module: nn.Module, kinds: tuple[str, ...]) -> Match | None:
    """How a module relates to the given kinds, None if not at all."""
    if isinstance(module, torch.jit.ScriptModule):  # its Python class says nothing
        return None
    if isinstance(module, classes.Swapped):
        if module._onepass_kind not in kinds:
            return None
        return Match(module._onepass_kind, reason="its class was changed after a swap")
    for kind in kinds:
        found = _RULES[kind](module)
        if found is not None:
            if found.reason or found.unknown or found.attached:
                return found
            obstacle = _obstacle(module, kind)
            return found._replace(reason=obstacle) if obstacle else found
    return None


def _norm(module: nn.Module) -> Match | None:
    cls = type(module)
    if isinstance(module, (onepass.nn.AddLayerNorm, onepass.nn.AddRMSNorm)):
        return None
    if cls.forward in (onepass.nn.LayerNorm.forward, onepass.nn.RMSNorm.forward):
        return None
    if cls.forward in _STOCK_NORMS:
        return Match("norm", forward=_STOCK_NORMS[cls.forward])
    for other, reason in _OTHER_NORMS:
        if isinstance(module, other):
            return Match("norm", reason=reason)
    if module._modules:
        if not _NORM_NAME_END.search(cls.__name__):
            return None
        return Match("norm", unknown=True, reason="holds other modules; these are looked at alone")
    structure = _structure(module)
    if isinstance(structure, Structure):
        return Match("norm", structure=structure)
    vectors = any(value is not None and value.dim() == 1 for value in module._parameters.values())
    if _NORM_NAME.search(cls.__name__) or (vectors and _eps_name(module) is not None):
        return Match("norm", reason=structure)
    return None


def _dropout(module: nn.Module) -> Match | None:
    cls = type(module)
    if isinstance(module, onepass.nn.Dropout):
        return None
    if cls is nn.Dropout:
        return Match("dropout", forward=classes.DropoutForward)
    if isinstance(module, nn.Dropout):
        return Match("dropout", reason="a subclass of torch.nn.Dropout; only the class itself is")
    if not module._modules and (
        isinstance(module, nn.modules.dropout._DropoutNd) or _DROPOUT_NAME.search(cls.__name__)
    ):
        return Match("dropout", unknown=True, reason="no rule for this kind of dropout")
    return None


def _attention(module: nn.Module) -> Match | None:
    cls = type(module)
    if isinstance(module, _OWN_ATTENTION):
        return None
    if cls.forward in _STOCK_ATTENTION:
        reason = ""
        if isinstance(module, nn.MultiheadAttention):
            if module.head_dim > classes.MOST_HEAD_DIM:
                reason = f"its head_dim, {module.head_dim}, is above {classes.MOST_HEAD_DIM}"
        elif cls.forward is nn.TransformerEncoderLayer.forward:
            if cls._sa_block is not nn.TransformerEncoderLayer._sa_block:
                reason = "its class overrides _sa_block, which gets masks in torch's form"
        return Match("attention", forward=_STOCK_ATTENTION[cls.forward], reason=reason)
    if isinstance(module, nn.MultiheadAttention):
        return Match("attention", unknown=True, reason="a subclass with a forward of its own")
    calls = callsites.calls_of(module)
    if calls.registry:
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == ATTACHED_NAME:
            return Match("attention", attached=True)
        return Match("attention", reason=REGISTRY)
    if calls.attention:
        reason = _CHECKPOINTS if calls.checkpoint else ""
        return Match("attention", forward=classes.AttentionCalls, reason=reason)
    if _ATTENTION_NAME.search(cls.__name__):
        reason = "calls no F.scaled_dot_product_attention itself; modules in it are looked at alone"
        return Match("attention", unknown=True, reason=reason)
    return None


_RULES = {"norm": _norm, "attention": _attention, "dropout": _dropout}


def _structure(module: nn.Module) -> Structure | str:
    """The names of a norm's parts, or the reason why this is not built like one."""
    buffers = [name for name, buffer in module._buffers.items() if buffer is not None]
    if buffers:
        return f"keeps buffers: {', '.join(buffers)}"
    for name, value in vars(module).items():
        if name not in _MODULE_ATTRIBUTES and _holds_tensor(value):
            return f"keeps a tensor in its attribute {name!r}"
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    if not parameters:
        return "has no weight"
    for name, value in parameters.items():
        if isinstance(value, nn.parameter.UninitializedTensorMixin):
            return f"its {name} has no shape yet"
        if value.dim() != 1:
            return f"its {name} must have 1 dimension, got shape {tuple(value.shape)}"
    bias = next((name for name in _BIAS_NAMES if name in parameters and len(parameters) > 1), None)
    weights = [name for name in parameters if name != bias]
    if len(weights) != 1:
        return f"has {len(parameters)} parameters ({', '.join(parameters)})"
    if bias is not None and parameters[bias].shape != parameters[weights[0]].shape:
        return f"its {bias} differs from its {weights[0]} in shape"
    eps = _eps_name(module)
    if eps is None:
        return "has no eps"
    arguments = _arguments(type(module))
    if len(arguments) != 1 or arguments[0].kind not in _ONE_TENSOR:
        return f"its forward takes ({', '.join(map(str, arguments))}), not exactly one tensor"
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


def _obstacle(module: nn.Module, kind: str) -> str:
    """Why a module of a known class cannot be swapped all the same; empty if nothing does."""
    cls = type(module)
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    if cls.__call__ is not nn.Module.__call__:
        return "its class overrides __call__"
    if parametrize.is_parametrized(module):
        return "is parametrized"
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}"
    for device in {parameter.device for parameter in module.parameters()}:
        if not has_kernels(device.type, kind):
            return f"onepass has no kernels for its device, {device.type}, in this build"
        if device.type == "cuda" and (reason := _library.too_old(device)):
            return reason
    return ""
