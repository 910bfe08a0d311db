"""`register_kernels`: onepass's layers by transformers' own switch, `model.set_use_kernels(True)`.

Classes and functions in transformers' files carry names, "RMSNorm" or "rotary_pos_emb", by which
the package kernels looks up a layer for a device and a mode, mostly to download it. It finds an
object that loads a class, whose forward then runs on the module of the model. Ours load the classes
below: nothing is downloaded, and no remote code has to be trusted.

A layer of that package has no constructor and no members, so it knows only the name. Where the name
is not enough, the forward of the module's own class runs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import activations

from onepass import _library
from onepass._ops import gate as _gate
from onepass._ops.norm import NormKind, norm
from onepass._policy import small_calls
from onepass._policy.precision import precision_of
from onepass.functional._internal import linear_where_it_gains
from onepass.integrations.transformers import losses
from onepass.nn._parts import runs_its_class
from onepass.swapping import rotary
from onepass.swapping.inputs import has_kernels, is_autocast, is_plain
from onepass.swapping.specs import Form, RotarySpec

DEVICES = ("cpu", "cuda")


class RMSNorm(nn.Module):
    """Llama's norm: its weight times the normalised input."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, eps = getattr(self, "weight", None), getattr(self, "variance_epsilon", None)
        if not _is_norm(hidden_states, weight, eps):
            return type(self).forward(self, hidden_states)
        return _rms_norm(hidden_states, weight, eps)


class RMSNormZeroCentered(nn.Module):
    """Qwen 3.5's norm: one plus its weight times the normalised input."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, eps = getattr(self, "weight", None), getattr(self, "eps", None)
        if not _is_norm(hidden_states, weight, eps):
            return type(self).forward(self, hidden_states)
        return _rms_norm(hidden_states, weight, eps, weight_offset=1.0)


class RMSNormGated(nn.Module):
    """Qwen3-Next's norm: its weight times the normalised input, times the activated gate."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states, gate=None):
        weight, eps = getattr(self, "weight", None), getattr(self, "variance_epsilon", None)
        activation = getattr(self, "activation", None)
        if (
            activation not in _gate.KINDS
            or not _is_norm(hidden_states, weight, eps)
            or not _is_factor(gate, hidden_states)
        ):
            return type(self).forward(self, hidden_states, gate)
        normed = _rms_norm(hidden_states, weight, eps)
        return _gate.gated_activation(gate, normed, _gate.KINDS[activation], False)


class SwiGLUMLP(nn.Module):
    """Llama's feed-forward block: its three linear layers, and silu."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        return _gated_mlp(self, x, ("silu",))


class GeGLUMLP(nn.Module):
    """Gemma's feed-forward block: its three linear layers, and gelu, exact or by tanh."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        return _gated_mlp(self, x, ("gelu", "gelu_tanh"))


class Linear(nn.Module):
    """torch's linear layer, where onepass's products gain; at the precision that a swap gave it."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        usual = isinstance(weight, Tensor) and weight.dim() == 2
        if not (usual and is_plain(input) and has_kernels(input.device.type, "linear")):
            return type(self).forward(self, input)
        return linear_where_it_gains(input, weight, bias, precision_of(self))


class ForCausalLMLoss(nn.Module):
    """transformers' loss of a language model, without a float32 copy of 16-bit logits."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        **kwargs,
    ):
        return losses.causal_lm_loss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels
        )


class SiLU(nn.Module):
    """transformers' activation of that name; so are the next three. Each has a forward of its own:
    the compiler limits the graphs of one code object, which all activations would share."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return _activated(self, input, "silu", "SiLU")


class GeluTanh(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return _activated(self, input, "gelu_tanh", "GeluTanh")


class NewGELU(nn.Module):
    """FastGELU too: the same function in other words."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return _activated(self, input, "gelu_tanh", "NewGELU")


class QuickGELU(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return _activated(self, input, "quick_gelu", "QuickGELU")


class RotaryPosEmb(nn.Module):
    """`apply_rotary_pos_emb` of a model's file, turned into a module by the package kernels."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        own = functools.partial(type(self).forward, self)
        halves = isinstance(q, Tensor) and cos.shape[-1] * 2 == q.shape[-1]  # gpt-oss's
        return rotary.rotating(own, _OF_PAIRS if halves else _OF_COLUMNS)(
            q, k, cos, sin, unsqueeze_dim
        )


def _is_norm(input: Tensor, weight, eps) -> bool:
    """Whether these are as in a norm of transformers: in one dtype, since norms of the same name
    differ in the output dtype for two."""
    return (
        isinstance(weight, Tensor)
        and isinstance(eps, float)
        and is_plain(input)
        and is_plain(weight)
        and weight.dim() == 1
        and input.dtype is weight.dtype is not torch.float64
        and input.is_floating_point()
        and input.shape[-1:] == weight.shape
        and input.device == weight.device
        and _runs_on(input.device, "norm")
    )


def _is_factor(x, like: Tensor) -> bool:
    return isinstance(x, Tensor) and is_plain(x) and x.dtype is like.dtype and x.shape == like.shape


def _rms_norm(input: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    return norm(
        input,
        None,
        weight,
        None,
        weight.shape,
        kind=NormKind.RMS,
        eps=eps,
        weight_offset=weight_offset,
        out_dtype=input.dtype,
    )[0]


def _gated_mlp(module: nn.Module, x: Tensor, activations: tuple[str, ...]) -> Tensor:
    """down(activation(gate(x)) * up(x)) of a block of Llama's names; or its own forward."""
    parts = [module._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]
    gate, up, down, activation = parts
    kind = _activation_of(activation)
    if (
        kind not in activations
        or len(module._modules) != len(parts)
        or any(part is None for part in parts)
        or not (is_plain(x) and _runs_on(x.device, "mlp"))
    ):
        return type(module).forward(module, x)
    gated, factor = gate(x), up(x)
    if not (is_plain(gated) and _is_factor(factor, gated)):
        return down(activation(gated) * factor)
    return down(_gate.gated_activation(gated, factor, _gate.KINDS[kind], False))


def _activation_of(module: nn.Module | None) -> str | None:
    """The name in `gated_activation` of an activation module of torch's or transformers'."""
    if module is None or not runs_its_class(module):
        return None
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return _ACTIVATIONS.get(type(module))


_ACTIVATIONS = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
    activations.FastGELUActivation: "gelu_tanh",
}


def _activated(module: nn.Module, input: Tensor, activation: str, name: str) -> Tensor:
    """The activation alone: gated by a row of ones, which stays in the cache."""
    if (
        not (is_plain(input) and input.dtype in _DTYPES and input.dim())
        or not _is_row_major(input)  # torch keeps other orders, as of channels last
        or not _runs_on(input.device, "mlp")
        or is_autocast(input.device.type)  # some of its operators run in float32 there
        or small_calls.activation_is_small(input, name)
    ):
        return type(module).forward(module, input)
    ones = torch.ones(input.shape[-1], dtype=input.dtype, device=input.device).expand_as(input)
    return _gate.gated_activation(input, ones, _gate.KINDS[activation], False)


def _is_row_major(x: Tensor) -> bool:
    """Whether no stride is larger than the one before it; rows may have gaps between them."""
    strides = [x.stride(i) for i in range(x.dim()) if x.shape[i] != 1]
    return all(a >= b for a, b in itertools.pairwise(strides))


def _runs_on(device: torch.device, kind: str) -> bool:
    if device.type != "cuda":
        return has_kernels(device.type, kind)
    return has_kernels("cuda", kind) and not _library.too_old(device)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Heads first by unsqueeze_dim 1, tokens first by 2. In one dtype: functions of this name round the
# output of two to either.
_OF_COLUMNS = RotarySpec(
    name="apply_rotary_pos_emb",
    parameters=("q", "k", "cos", "sin", "unsqueeze_dim"),
    tensors=2,
    unsqueeze_dim=1,
    form=Form(),
    partial=False,
    layouts=(((4, 3, 1), False), ((4, 3, 2), True)),
    dtypes=tuple((dtype, dtype, dtype) for dtype in _DTYPES),
    autocast=True,
)
_OF_PAIRS = _OF_COLUMNS._replace(form=Form(table="pairs"))


class Layer(NamedTuple):
    """A repository in the sense of the package kernels: an object that loads a class."""

    name: str
    cls: type[nn.Module]
    kind: str  # whose kernels it runs

    def load(self) -> type[nn.Module]:
        return self.cls

    def __str__(self) -> str:
        return f"onepass, layer `{self.name}`"


LAYERS = (
    Layer("RMSNorm", RMSNorm, "norm"),
    Layer("RMSNormZeroCentered", RMSNormZeroCentered, "norm"),
    Layer("RMSNormGated", RMSNormGated, "norm"),
    Layer("rotary_pos_emb", RotaryPosEmb, "rotary"),
    Layer("SwiGLUMLP", SwiGLUMLP, "mlp"),
    Layer("GeGLUMLP", GeGLUMLP, "mlp"),
    Layer("Linear", Linear, "linear"),
    Layer("ForCausalLMLoss", ForCausalLMLoss, "loss"),
    Layer("SiLU", SiLU, "mlp"),
    Layer("GeluTanh", GeluTanh, "mlp"),
    Layer("NewGELU", NewGELU, "mlp"),
    Layer("FastGELU", NewGELU, "mlp"),
    Layer("QuickGELU", QuickGELU, "mlp"),
)


def register_kernels(devices: str | Sequence[str] = DEVICES) -> dict[str, list[str]]:
    """Makes `model.set_use_kernels(True)`, and `use_kernels=True` of `from_pretrained`, use
    onepass's layers.

    They are added to transformers' mapping of the package kernels, for training and inference,
    with and without `torch.compile`, in the place of downloads of the same names. Of these names,
    models of transformers ask for RMS norms (gated ones too), the rotary embedding of query and
    key, and activations. None asks yet for gated feed-forward blocks, linear layers and the loss of
    language models, but code of yours may. Models that already use kernels must be switched once
    more. The model's own code still computes norms and rotations of several dtypes, or on other
    devices.

    `onepass.swap(model)` does the same and more, with a report, a check and a way back; this is for
    those who have chosen transformers' switch. Use one of them.

    Args:
        devices: of "cpu" and "cuda": for which to add layers; devices without kernels in this build
            are left alone.

    Returns:
        The devices for which each name was added.

    Raises:
        ImportError: transformers does not find a version of the package kernels that it takes, is
            of a version whose mapping cannot be extended, or was told to use none by
            USE_HUB_KERNELS.
        ValueError: devices holds another name.

    Examples:
        >>> from onepass.integrations.transformers import register_kernels
        >>> register_kernels("cpu")["RMSNorm"]
        ['cpu']
    """
    devices = (devices,) if isinstance(devices, str) else devices
    for device in devices:
        if device not in DEVICES:
            raise ValueError(f"register_kernels: devices must be of {DEVICES}, got {device!r}")
    _check_packages()
    from kernels import Mode, register_kernel_mapping
    from transformers.integrations import hub_kernels

    mapping = {
        layer.name: {
            device: {
                Mode.TRAINING | Mode.TORCH_COMPILE: layer,
                Mode.INFERENCE | Mode.TORCH_COMPILE: layer,
            }
            for device in devices
            if has_kernels(device, layer.kind)
        }
        for layer in LAYERS
    }
    # set_use_kernels registers transformers' mapping first: its entries are kept.
    transformers = hub_kernels.get_kernel_mapping_transformers()
    for name, entries in mapping.items():
        transformers.setdefault(name, {}).update(entries)
    register_kernel_mapping(mapping)
    return {name: list(entries) for name, entries in mapping.items()}


def _check_packages() -> None:
    import transformers
    from transformers.integrations import hub_kernels
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        try:
            found = importlib.metadata.version("kernels")
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        least = getattr(import_utils, "KERNELS_MIN_VERSION", None)
        asked = f", from {least}" if least else ""
        raise ImportError(
            "register_kernels: the package kernels must be of a version that transformers "
            f"{transformers.__version__} takes{asked}, got {found}"
        )
    if not hasattr(hub_kernels, "get_kernel_mapping_transformers"):
        raise ImportError(
            "register_kernels: transformers must have a mapping of kernels that can be extended, "
            f"as 5.23 has, got {transformers.__version__}"
        )
    if not getattr(hub_kernels, "_kernels_enabled", True):
        raise ImportError("register_kernels: USE_HUB_KERNELS must not turn kernels off")
