"""The notes of a report: changes beyond speed, and things to check."""

from __future__ import annotations

import collections

import torch
from torch import nn

from onepass._ops import device_attention, small_calls
from onepass.swapping import by_name, callsites, classes, matchers
from onepass.swapping.activated import ActivatedForward
from onepass.swapping.adaptive import AdaptiveForward
from onepass.swapping.classes import ForeignNormForward
from onepass.swapping.inputs import MOST_HEAD_DIM
from onepass.swapping.plan import Plan
from onepass.swapping.report import grouped
from onepass.swapping.restored import ATTACHED
from onepass.swapping.specs import RotarySpec
from onepass.swapping.walk import wrapper

_RANDOM_STREAMS = (
    "dropout was swapped: its random stream is reproducible from manual_seed and not equal to "
    "stock's; an unseeded shuffle drawn from the same generator moves too"
)
_ATTENTION_STREAMS = (
    "attention was swapped: where it drops weights, its random stream is reproducible from "
    "manual_seed and not equal to stock's"
)
_NEED_WEIGHTS = (
    "{names}: calls with need_weights=True, torch's default, ask for the matrix of weights: torch "
    "computes them as before and nothing is gained; pass need_weights=False"
)
_ENCODER_LAYERS = (
    "{names}: in inference too they run the modules in them, where torch computes a layer in one "
    "call; of the nested tensors that nn.TransformerEncoder makes of a padding mask they compute "
    "the rows as one packed batch, and padding comes back as zeros, as in stock"
)
_ATTENTION_CALLS = (
    "calls of F.scaled_dot_product_attention with nested or distributed tensors, a CausalBias, or "
    f"a head_dim above {MOST_HEAD_DIM} run torch's"
)
_REDIRECTION = (
    "in forwards whose calls of F.scaled_dot_product_attention are redirected, each torch function "
    "and each look at a tensor's shape takes about a microsecond longer: "
    f"{small_calls.ATTENTION_NOTE}"
)
_LINEAR_CALLS = (
    "{names}: calls of F.linear in their forwards are redirected, and each torch function there "
    f"takes about a microsecond longer: {small_calls.LINEAR_CALLS_NOTE}"
)
_LOSS_CALLS = (
    "{names}: calls of F.cross_entropy in their forwards are redirected, and each torch function "
    f"there takes about a microsecond longer: {small_calls.LOSS_CALLS_NOTE}"
)
_LAZY_LOGITS = (
    "{names}: in steps with labels and gradients the logits are computed when they are read, which "
    "raises once the weights have changed; their gradient, hooks on it, and dlogits by "
    "torch.autograd.grad of the loss are not to be had; they are made at once under torch.compile "
    "and in calls where they take no more memory"
)
NOTHING = "nothing in this model can be swapped"
_NO_LAZY_LOGITS = (
    "lazy_logits changes nothing here: it is for models of transformers that hand the output of "
    "their head to self.loss_function"
)
_ATTACHED_LOSS = (
    "{names}: on onepass's loss since an earlier attach; unswap leaves that, "
    "onepass.integrations.transformers.detach(model) undoes it"
)
_UNPROVEN = "{names}: {reason}; it stays as it is"
_PROBED = (
    "norms of other classes were accepted by a numeric probe on the CPU; in dtype combinations "
    "that it did not prove (float64 for most) they run their own forward"
)
_ADAPTIVE = (
    "{names}: where scale and shift have a wider dtype than the tokens, tokens do not have 3 "
    "dimensions, CUDA's autocast is on, or a norm of diffusers' own gets float64, norm, scale and "
    "shift are torch's operators as in stock"
)
_FORCED = "{names}: forced; nothing but report.verify(batch) shows whether it computes the same"
_FAST_PATH = (
    "{names}: in eval mode without gradients torch's fast path computes these layers in one call "
    "and reads their parameters only: the swapped modules run in training, and whenever the fast "
    "path is off; nested tensors, which it makes of a padding mask, run the stock forward"
)
_AS_FAST = "{count} linear layers keep torch's products: {reason}"
_ONE_AS_FAST = "1 linear layer keeps torch's products: {reason}"
_GROUP_NORMS = (ActivatedForward, classes.GroupNormForward)
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def notes(model: nn.Module, plan: Plan) -> list[str]:
    report = plan.report
    notes = []
    if report._earlier:
        notes.append(f"{len(report._earlier)} of the swapped modules had been swapped before")
    root = wrapper(model)
    if not report.swapped and root and any(e["reason"].kind is root.kind for e in report.skipped):
        notes.append(f"{NOTHING}: its root {root}")
    kinds = {kind for change in plan.classes for kind in change.cls._onepass_to}
    if "dropout" in kinds:
        notes.append(_RANDOM_STREAMS)
    notes += _attention_notes(plan)
    notes += by_name.notes(model, report)
    if any(issubclass(change.cls, ForeignNormForward) for change in plan.classes):
        notes.append(_PROBED)
    adapting = [c.name for c in plan.classes if issubclass(c.cls, AdaptiveForward)]
    notes += _note(_ADAPTIVE, adapting)
    if any(_is_layer_norm(change.cls) for change in plan.classes):
        notes.append(small_calls.NORM_NOTE)
    if any(issubclass(change.cls, _GROUP_NORMS) for change in plan.classes):
        notes.append(small_calls.GROUP_NORM_NOTE)
    if "linear" in kinds:
        notes.append(small_calls.LINEAR_NOTE)
        calling = [c.name for c in plan.classes if classes.redirects(c.cls, "linear")]
        notes += _note(_LINEAR_CALLS, calling)
    if "mlp" in kinds:
        notes.append(small_calls.GATE_NOTE)
    if "rotary" in kinds:
        if any(_sets_apart(change.cls) for change in plan.classes):
            notes.append(small_calls.ROTARY_NOTE)
        for reason in dict.fromkeys(reason for _, reason in plan.unproven):
            names = [name for name, because in plan.unproven if because == reason]
            notes.append(_UNPROVEN.format(names=", ".join(grouped(names)), reason=reason))
    if "loss" in kinds:
        notes.append(small_calls.LOSS_NOTE)
        waiting = [c.name for c in plan.classes if classes.redirects(c.cls, "loss_head")]
        notes += _note(_LAZY_LOGITS, waiting)
        calling = [c.name for c in plan.classes if classes.redirects(c.cls, "loss")]
        notes += _note(_LOSS_CALLS, calling)
    losses = {entry["name"] for entry in report.swapped if entry["kind"] == "loss"}
    attached = [
        item.names[0]
        for item in plan.found
        if ATTACHED in vars(item.module) and item.names[0] in losses & report._earlier
    ]
    notes += _note(_ATTACHED_LOSS, attached)
    if (
        plan.lazy_logits
        and not any(classes.redirects(change.swapped, "loss_head") for change in report._changes)
        and not any(classes.redirects(change.cls, "loss_head") for change in plan.classes)
    ):
        notes.append(_NO_LAZY_LOGITS)
    if not plan.list_as_fast:
        reasons = collections.Counter(plan.as_fast)
        notes += [
            (_ONE_AS_FAST if count == 1 else _AS_FAST).format(count=count, reason=reason)
            for reason, count in reasons.items()
        ]
    notes += _note(_FORCED, plan.forced)
    kinds = kinds if torch.cuda.is_available() else set()
    if kinds - {"attention", "linear"} and not matchers.has_kernels("cuda"):
        notes.append("this build has kernels for the CPU only: unswap before moving to a GPU")
    if "attention" in kinds and not matchers.has_kernels("cuda", "attention"):
        notes.append("this build has attention for the CPU only: on a GPU torch's runs as before")
    return notes


def _is_layer_norm(cls: type) -> bool:
    return issubclass(cls, nn.LayerNorm) and "norm" in cls._onepass_to


def _sets_apart(cls: type) -> bool:
    calls = cls._onepass_spec if issubclass(cls, classes.Calls) else ()
    return any(isinstance(call, RotarySpec) and call.form.apart for call in calls)


def _attention_notes(plan: Plan) -> list[str]:
    names = {id(item.module): item.names[0] for item in plan.found}
    forwards = {id(change.module): change.cls for change in plan.classes}

    def swapped_to(forward: type, modules) -> list[str]:
        return [
            names[id(module)]
            for module in modules
            if issubclass(forwards.get(id(module), object), forward)
        ]

    modules = [item.module for item in plan.found]
    layers = [module for module in modules if isinstance(module, _LAYERS)]
    in_layers = {id(part) for layer in layers for part in layer.children()}
    alone = [module for module in modules if id(module) not in in_layers]
    calling = [c.name for c in plan.classes if classes.redirects(c.cls, "attention")]
    dropping = [m for m in modules if isinstance(m, nn.MultiheadAttention) and m.dropout > 0.0]
    bypassed = [
        names[id(layer)]
        for layer in layers
        if type(layer).forward is nn.TransformerEncoderLayer.forward
        and id(layer) not in forwards
        and any(id(part) in forwards for part in layer.modules())
    ]
    notes = []
    if device_attention.leaves_some() and (
        plan.named or any("attention" in change.cls._onepass_to for change in plan.classes)
    ):
        notes.append(device_attention.NOTE)
    if calling or plan.named or swapped_to(classes.MultiheadAttentionForward, dropping):
        notes.append(_ATTENTION_STREAMS)
    notes += _note(_NEED_WEIGHTS, swapped_to(classes.MultiheadAttentionForward, alone))
    notes += _note(_ENCODER_LAYERS, swapped_to(classes.EncoderLayerForward, modules))
    notes += _note(_ATTENTION_CALLS, calling) + _note(_REDIRECTION, calling)
    dispatching = [
        names[id(change.module)]
        for change in plan.classes
        if classes.redirects(change.cls, "attention") and callsites.calls_of(change.module).dispatch
    ]
    if dispatching:
        from onepass.integrations import diffusers

        notes += _note(diffusers.NOTE, dispatching)
    return notes + _note(_FAST_PATH, bypassed)


def _note(text: str, names: list[str]) -> list[str]:
    return [text.format(names=", ".join(grouped(names)))] if names else []
