"""The notes of a report: changes beyond speed, and things to check.

The most important come first. What stands before the first semicolon of a note is its point, which
a report prints; what follows are details.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from onepass import _C
from onepass._policy import device_attention, small_calls
from onepass._policy.precision import (
    HAS_BYTE_PRODUCTS,
    quantized_products,
    quantizes,
    rounds_factors,
)
from onepass.swapping import by_hand, by_name, callsites, classes, foreign, matchers, scans
from onepass.swapping.activated import ActivatedForward
from onepass.swapping.adaptive import AdaptiveForward
from onepass.swapping.classes import ForeignNormForward
from onepass.swapping.inputs import MOST_HEAD_DIM
from onepass.swapping.plan import Plan
from onepass.swapping.providers import DIFFUSERS, provider
from onepass.swapping.restored import ATTACHED
from onepass.swapping.specs import RotarySpec, ScanSpec
from onepass.swapping.texts import grouped
from onepass.swapping.walk import wrapper

_RANDOM_STREAMS = (
    "dropout's random stream is reproducible from manual_seed and not equal to stock's; an "
    "unseeded shuffle drawn from the same generator moves too"
)
_ATTENTION_STREAMS = (
    "attention that drops weights is reproducible from manual_seed and not equal to stock's"
)
_ROUNDED = (
    "precision='medium': the products of float32 in {modules} take factors rounded to bfloat16, "
    "forward and backward; sums, weights and gradients stay float32; report.verify(batch) says how "
    "far the results are from float32's"
)
_QUANTIZED = (
    "precision={precision!r}: {modules} with linear layers quantise factors to 8 bits; for "
    "{products} in float32, and compute the other products as with 'medium'; calls too small to "
    "gain are not quantised, and attention and losses follow torch's setting; "
    "report.verify(batch) says how far the results are from float32's{slow}"
)
_NOT_QUANTIZED = (
    "precision={precision!r} changes nothing: no swapped linear layer of float32 takes it"
)
_LEFT_IN_FLOAT32 = (
    "precision={precision!r} leaves in float32: {names}; the first and the last linear layer in "
    "the order of model.modules(), and those that share an embedding's weight; include='*' takes "
    "them too"
)
_KEPT_PRECISION = (
    "precision={precision!r} of an earlier call stays in {modules}; precision= gives another, and "
    "unswap takes it back"
)
_WITHOUT_VNNI = "; this CPU has no VNNI, so they take products of 16 bits"
_IN_FLOAT32 = (
    "precision={precision!r}: products of {modules} stay in float32, whatever torch's setting"
)
_WITHOUT_DOTS = (
    "precision='medium' changes nothing on this CPU; it has no dot products of bfloat16 (level "
    "{level}), and float32 products stay in float32"
)
_NEED_WEIGHTS = (
    "{names}: only calls with need_weights=False gain; with True, torch's default, torch computes "
    "the matrix of weights as before"
)
_ENCODER_LAYERS = (
    "{names}: in inference too they call their modules, not torch's fast path; of the nested "
    "tensors that nn.TransformerEncoder makes of a padding mask they compute the rows as one "
    "packed batch, and padding comes back as zeros, as in stock"
)
_ATTENTION_CALLS = (
    "some calls of F.scaled_dot_product_attention run torch's; those with nested or distributed "
    f"tensors, a CausalBias, or a head_dim above {MOST_HEAD_DIM}"
)
_COMPILED_BY_HAND = f"{{names}}: {by_hand.IN_COMPILED}"
_REDIRECTION = (
    "each torch function in a forward that calls attention takes about a microsecond longer; so "
    "does each look at a tensor's shape"
)
_CODES_TWICE = (
    "codes of another library are kept a second time, in the order of onepass's kernel, until "
    "unswap"
)
_LINEAR_CALLS = (
    "{names}: each torch function in their forwards takes about a microsecond longer; their calls "
    f"of F.linear are redirected: {small_calls.LINEAR_CALLS_NOTE}"
)
_LOSS_CALLS = (
    "{names}: each torch function in their forwards takes about a microsecond longer; their calls "
    f"of F.cross_entropy are redirected: {small_calls.LOSS_CALLS_NOTE}"
)
_LAZY_LOGITS = (
    "{names}: logits are computed when they are read, which raises once the weights have changed; "
    "so in steps with labels and gradients, where their gradient, hooks on it, and dlogits by "
    "torch.autograd.grad of the loss are not to be had; they are made at once under torch.compile "
    "and in calls where they take no more memory"
)
NOTHING = "nothing in this model can be swapped"
_NO_LAZY_LOGITS = (
    "lazy_logits changes nothing here; it is for models of transformers that hand the output of "
    "their head to self.loss_function"
)
_ATTACHED_LOSS = (
    "{names}: on onepass's loss since an earlier attach; unswap leaves that, "
    "onepass.integrations.transformers.detach(model) undoes it"
)
_SCANS = (
    "{names}: onepass's operators compute their {words}{but}; on a CPU, in training and decoding: "
    "elsewhere, and in calls that those do not take, the model's own functions run"
)
_UNPROVEN = "{names}: {reason}; it stays as it is"
_PROBED = (
    "norms of other classes were accepted by a numeric probe on the CPU; in dtype combinations "
    "that it did not prove (float64 for most) they run their own forward"
)
_ADAPTIVE = (
    "{names}: in some calls norm, scale and shift are torch's operators, as in stock; where scale "
    "and shift have a wider dtype than the tokens, tokens do not have 3 dimensions, CUDA's "
    "autocast is on, or a norm of diffusers' own gets float64"
)
_FORCED = "{names}: forced: only report.verify(batch) shows whether it computes the same"
_FAST_PATH = (
    "{names}: in eval mode without gradients torch's fast path computes these layers; it reads "
    "their parameters only, in one call: the swapped modules run in training, and whenever it is "
    "off; nested tensors, which it makes of a padding mask, run the stock forward"
)
_AS_FAST = "{count} linear layers keep torch's products: {reason}"
_ONE_AS_FAST = "1 linear layer keeps torch's products: {reason}"
_GROUP_NORMS = (ActivatedForward, classes.GroupNormForward)
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def notes(model: nn.Module, plan: Plan) -> list[str]:
    return [*_of_the_swap(model, plan), *_of_results(plan), *_of_costs(plan)]


def _of_the_swap(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Notes on what was done, and on what remains for the user."""
    report, kinds = plan.report, _kinds(plan)
    if report._earlier:
        names = {name for name, _ in report._earlier}
        yield f"{len(names)} of the swapped modules had been swapped before"
    root = wrapper(model)
    if not report.swapped and root and any(e["reason"].kind is root.kind for e in report.skipped):
        yield f"{NOTHING}: its root {root}"
    yield from _note(_FORCED, plan.forced)
    if torch.cuda.is_available():
        if kinds - {"attention", "linear"} and not matchers.has_kernels("cuda"):
            yield "this build has kernels for the CPU only: unswap before moving to a GPU"
        if "attention" in kinds and not matchers.has_kernels("cuda", "attention"):
            yield "this build has attention for the CPU only: on a GPU torch's runs as before"
    yield from _note(_NEED_WEIGHTS, _asked_for_weights(plan))
    yield from _note(_COMPILED_BY_HAND, _redirecting(plan, "attention_by_hand"))
    yield from by_name.notes(model, report)
    attached = [
        item.names[0]
        for item in plan.found
        if ATTACHED in vars(item.module) and (item.names[0], "loss") in report._earlier
    ]
    if "loss" in kinds:
        yield from _note(_LAZY_LOGITS, _redirecting(plan, "loss_head"))
    yield from _note(_ATTACHED_LOSS, attached)
    if (
        plan.lazy_logits
        and not any(classes.redirects(change.swapped, "loss_head") for change in report._changes)
        and not _redirecting(plan, "loss_head")
    ):
        yield _NO_LAZY_LOGITS


def _of_results(plan: Plan) -> Iterator[str]:
    """Notes on results that are computed in another way, or by other code."""
    kinds = _kinds(plan)
    if quantizes(plan.precision):
        yield from _of_codes(plan)
    elif plan.precision is not None:
        yield _of_precision(plan)
    yield from _of_kept_precisions(plan)
    if "dropout" in kinds:
        yield _RANDOM_STREAMS
    named = {id(item.module): item.names[0] for item in plan.found}
    modules = [item.module for item in plan.found]
    attending = {*_redirecting(plan, "attention"), *plan.names_of_named}
    attending |= {*_swapped_to(plan, classes.MultiheadAttentionForward, modules)}
    if any(_may_drop(module) for module in modules if named[id(module)] in attending):
        yield _ATTENTION_STREAMS
    if device_attention.leaves_some() and (plan.named or "attention" in kinds):
        yield device_attention.NOTE
    yield from _note(_ENCODER_LAYERS, _swapped_to(plan, classes.EncoderLayerForward, modules))
    forwards = {id(change.module) for change in plan.classes}
    bypassed = [
        named[id(layer)]
        for layer in modules
        if isinstance(layer, nn.TransformerEncoderLayer)
        and type(layer).forward is nn.TransformerEncoderLayer.forward
        and id(layer) not in forwards
        and any(id(part) in forwards for part in layer.modules())
    ]
    yield from _note(_FAST_PATH, bypassed)
    if any(issubclass(change.cls, ForeignNormForward) for change in plan.classes):
        yield _PROBED
    adapting = [c.name for c in plan.classes if issubclass(c.cls, AdaptiveForward)]
    yield from _note(_ADAPTIVE, adapting)
    if "scan" in kinds:
        yield from _of_scans(plan)
    if kinds & {*matchers.COPIED}:
        for reason in dict.fromkeys(reason for _, reason in plan.unproven):
            names = [name for name, own in plan.unproven if own == reason]
            yield _UNPROVEN.format(names=", ".join(grouped(names)), reason=reason)


def _of_scans(plan: Plan) -> Iterator[str]:
    named = collections.defaultdict(list)
    for change in plan.classes:
        if classes.redirects(change.cls, "scan"):
            specs = (call for call in change.cls._onepass_spec if isinstance(call, ScanSpec))
            words = scans.named(spec.of_package for spec in specs)
            others = ", ".join(dict.fromkeys(scans.others(change.module)))
            named[words, f", the model's own functions {others}" if others else ""].append(
                change.name
            )
    for (words, but), names in named.items():
        yield _SCANS.format(names=", ".join(grouped(names)), words=words, but=but)


def _of_precision(plan: Plan) -> str:
    modules = _counted(sum(own == plan.precision for _, own in plan.precisions_given()))
    if plan.precision != "medium":
        return _IN_FLOAT32.format(precision=plan.precision, modules=modules)
    if not rounds_factors("medium"):
        return _WITHOUT_DOTS.format(level=_C.cpu_level())
    return _ROUNDED.format(modules=modules)


def _counted(modules: int) -> str:
    return "1 module" if modules == 1 else f"{modules} modules"


def _of_codes(plan: Plan) -> Iterator[str]:
    given = [
        (item, own)
        for item, own in plan.precisions_given()
        if small_calls.has_float32_weights(item.module)
    ]
    left = [item for item, own in given if own == "highest"]
    count = sum(own == plan.precision for _, own in given)
    if count:
        yield _QUANTIZED.format(
            precision=plan.precision,
            products=" and ".join(quantized_products(plan.precision)),
            modules=_counted(count),
            slow="" if HAS_BYTE_PRODUCTS else _WITHOUT_VNNI,
        )
    else:
        yield _NOT_QUANTIZED.format(precision=plan.precision)
    if left:
        names = ", ".join(repr(item.names[0] or type(item.module).__name__) for item in left)
        yield _LEFT_IN_FLOAT32.format(precision=plan.precision, names=names)


def _of_kept_precisions(plan: Plan) -> Iterator[str]:
    given = {item.names[0] for item, _ in plan.precisions_given()}
    kept = (own for name, own in plan.precisions().items() if own and name not in given)
    for precision, count in collections.Counter(kept).items():
        yield _KEPT_PRECISION.format(precision=precision, modules=_counted(count))


def _of_costs(plan: Plan) -> Iterator[str]:
    """Calls that gain nothing, or cost more."""
    kinds, calling = _kinds(plan), _redirecting(plan, "attention")
    if not plan.list_as_fast:
        for reason, count in collections.Counter(plan.as_fast).items():
            yield (_ONE_AS_FAST if count == 1 else _AS_FAST).format(count=count, reason=reason)
    torchs = [c for c in plan.classes if c.name in calling and "attention" in c.cls._onepass_spec]
    if torchs:
        yield _ATTENTION_CALLS
        yield f"{_REDIRECTION}: {small_calls.ATTENTION_NOTE}"
    elif calling:
        yield _REDIRECTION
    dispatching = [
        change.name
        for change in plan.classes
        if classes.redirects(change.cls, "attention") and callsites.calls_of(change.module).dispatch
    ]
    if dispatching:
        yield from _note(provider(DIFFUSERS).NOTE, dispatching)
    if any(_is_layer_norm(change.cls) for change in plan.classes):
        yield small_calls.NORM_NOTE
    if any(issubclass(change.cls, _GROUP_NORMS) for change in plan.classes):
        yield small_calls.GROUP_NORM_NOTE
    codes = [c.name for c in plan.classes if issubclass(c.cls, classes.QuantizedForward)]
    yield from _note(_CODES_TWICE, codes)
    if "linear" in kinds:
        yield small_calls.LINEAR_NOTE
        yield from _note(_LINEAR_CALLS, _redirecting(plan, "linear"))
    if "mlp" in kinds:
        yield small_calls.GATE_NOTE
    if "rotary" in kinds and any(_sets_apart(change.cls) for change in plan.classes):
        yield small_calls.ROTARY_NOTE
    if "loss" in kinds:
        yield small_calls.LOSS_NOTE
        yield from _note(_LOSS_CALLS, _redirecting(plan, "loss"))


def _kinds(plan: Plan) -> set[str]:
    return {kind for change in plan.classes for kind in change.cls._onepass_to}


def _redirecting(plan: Plan, call: str) -> list[str]:
    """Names of the modules whose calls of this kind are redirected."""
    return [change.name for change in plan.classes if classes.redirects(change.cls, call)]


def _swapped_to(plan: Plan, forward: type, modules: Sequence[nn.Module]) -> list[str]:
    """Names of those of the modules that get this forward."""
    wanted = set(map(id, modules))
    return [c.name for c in plan.classes if id(c.module) in wanted and issubclass(c.cls, forward)]


def _asked_for_weights(plan: Plan) -> list[str]:
    """Names of the swapped nn.MultiheadAttention that the user's code calls: no layer of torch."""
    modules = [item.module for item in plan.found]
    layers = [module for module in modules if isinstance(module, _LAYERS)]
    in_layers = {id(part) for layer in layers for part in layer.children()}
    alone = [module for module in modules if id(module) not in in_layers]
    return _swapped_to(plan, classes.MultiheadAttentionForward, alone)


def _may_drop(module: nn.Module) -> bool:
    """Whether attention may drop weights: False where all that is named so is 0."""
    values = [value for name, value in vars(module).items() if "drop" in name.lower()]
    values += [child.p for child in module.children() if isinstance(child, nn.Dropout)]
    chances = [value for value in values if isinstance(value, (int, float))]
    return not chances or any(chances)


def _is_layer_norm(cls: type) -> bool:
    if issubclass(cls, ForeignNormForward):
        return foreign.calls_layer_norm(cls)
    return issubclass(cls, nn.LayerNorm) and "norm" in cls._onepass_to


def _sets_apart(cls: type) -> bool:
    calls = cls._onepass_spec if issubclass(cls, classes.Calls) else ()
    return any(isinstance(call, RotarySpec) and call.form.apart for call in calls)


def _note(text: str, names: list[str]) -> list[str]:
    return [text.format(names=", ".join(grouped(names)))] if names else []
