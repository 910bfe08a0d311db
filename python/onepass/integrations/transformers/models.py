"""`attach` and `detach`: which models of transformers run on onepass's attention."""

from __future__ import annotations

import contextlib
import html
import sys
from collections.abc import Callable, Iterator

from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from onepass import _library
from onepass.integrations.transformers.attention import NAME, register
from onepass.swapping import matchers
from onepass.swapping.report import rows, table

# What transformers runs on eager attention alone, though it takes attention from outside, by
# model_type: a test holds that onepass computes the same. What others do with their masks or leave
# to their eager function nobody has looked at.
_PROVEN = (
    "deepseek_v4", "flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4",
    "mimo_v2_flash", "openai_privacy_filter", "t5_gemma_module", "t5gemma", "vaultgemma",
    "videoprism_text_model",
)  # fmt: skip
# What passes an argument that the attention refuses.
_SPARSE = ("minimax_m3_vl_text",)
_KINDS = ("attention",)
_RECORD = "_onepass_attention_before"  # on a PreTrainedModel: what its configs named before attach


class Attachment:
    """What :func:`attach` did; prints as a table.

    Attributes:
        attached: modules that run on onepass's attention; dicts with name, type, before (the name
            of the implementation they had).
        skipped: models and modules that do not; dicts with name, type, reason.
    """

    def __init__(self, model: nn.Module):
        self.attached: list[dict[str, str]] = []
        self.skipped: list[dict[str, str]] = []
        self.dry_run = False  # as of a swap's report, for `verify`
        self._changes = []
        self._model = model

    def to_dict(self) -> dict[str, list]:
        """The lists as plain JSON-able data."""
        return {
            "attached": [dict(entry) for entry in self.attached],
            "skipped": [dict(entry) for entry in self.skipped],
        }

    def verify(self, *batch, loss_fn: Callable | None = None):
        """Runs the model with the attention it had and with onepass's, and compares.

        As :meth:`onepass.swapping.Report.verify`; what `onepass.swap` changed stays swapped in both
        runs. Its report's `verify` undoes both.

        Raises:
            RuntimeError: nothing in the model is attached any more.
        """
        from onepass.swapping.verify import verify

        if self._model is not None and not _attached(_found(self._model)):
            raise RuntimeError(
                "verify: model must be attached still, got one whose configs name others"
            )
        return verify(self, batch, loss_fn)

    def __str__(self) -> str:
        lines = [f"onepass: attached {len(self.attached)}, {len(self.skipped)} skipped"]
        sections = {
            "attached": ("name", "count", "type", "before"),
            "skipped": ("name", "count", "type", "reason"),
        }
        for section, columns in sections.items():
            found = rows(getattr(self, section), columns)
            if found:
                lines += ["", *table(section, columns, found)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "<pre>" + html.escape(str(self)) + "</pre>"

    def __getstate__(self) -> dict:
        """A copy reads like it, and has no model to verify."""
        return {**vars(self), "_model": None}


class _Before:
    """(config, the implementation that it named before attach), for each config that changed.

    On the models themselves, so that copies and pickles carry their own; a pickle registers the
    name wherever it is loaded.
    """

    def __init__(self, pairs: list[tuple]):
        self.pairs = pairs

    def __reduce__(self):
        return _restored, (self.pairs,)


def _restored(pairs: list[tuple]) -> _Before:
    if NAME not in AttentionInterface():
        register()
    return _Before(pairs)


def attach(model: nn.Module, *, strict: bool = False) -> Attachment:
    """Makes the models of transformers in `model` run on onepass's attention, in place.

    Every `PreTrainedModel` in it is looked at, `model` itself or within wrappers (peft,
    `DistributedDataParallel`, your own modules): its config, and its sub-configs, name "onepass"
    afterwards if transformers runs the class on "sdpa" (`_supports_sdpa`), or if it is one that
    runs on eager attention alone and onepass is known to compute the same (Gemma 2, gpt-oss, ...).
    Nothing else changes: no class, no parameter; models that share a config object change together
    (which of them was attached knows what it named before; detach that one).
    Works before and after `onepass.swap`, and on compiled models, which compile again.

    Args:
        model: a `transformers.PreTrainedModel`, or a module that holds some.
        strict: raise if anything is skipped, or nothing attached; the model is then as it was.

    Returns:
        Attachment: which modules run on onepass now, which do not, and why; `verify(*batch)`
        compares with what ran before.

    Raises:
        TypeError: model is not and does not hold a `PreTrainedModel`.
        RuntimeError: it is on a device that onepass has no attention for; or under strict.
    """
    holders = _holders("attach", model)
    _check_devices(model)
    register()
    report = Attachment(model)
    refused: set[int] = set()  # ids of configs
    changes: dict[int, tuple] = {}
    known = _recorded(holders)
    own = {id(holder.config) for _, holder in holders}
    for name, holder in holders:
        if id(holder.config) in changes or id(holder.config) in refused:
            continue
        reason = _refusal(holder)
        if reason:
            refused.add(id(holder.config))
            report.skipped.append({"name": name, "type": _full_name(holder), "reason": reason})
            continue
        for config in _configs(holder.config):
            if config is holder.config or id(config) not in own:
                changes[id(config)] = (config, _before(holder, config, known))
    were = [(config, config._attn_implementation) for config, _ in changes.values()]
    for config, _ in changes.values():
        config._attn_implementation_internal = NAME
    _list_modules(report, refused, changes)
    if strict and (report.skipped or not report.attached):
        for config, implementation in were:
            config._attn_implementation_internal = implementation
        got = "; ".join(f"{e['name'] or '(root)'!r}: {e['reason']}" for e in report.skipped)
        raise RuntimeError(
            f"attach: model must be attached whole under strict, got {got or 'none'}"
        )
    for _, holder in holders:
        pairs = [changes[id(c)] for c in _configs(holder.config) if id(c) in changes]
        if pairs:
            holder.__dict__[_RECORD] = _Before(pairs)
    return report


def detach(model: nn.Module) -> list[str]:
    """Gives every config in a model the implementation back that it named before :func:`attach`.

    A config that names another one by now is left alone; one that has named "onepass" ever since it
    was loaded gets transformers' default.

    Returns:
        The names of the `PreTrainedModel`s that changed.

    Raises:
        TypeError: model is not and does not hold a `PreTrainedModel`.
    """
    holders = _holders("detach", model)
    before = _attached(holders)
    changed = [name for name, holder in holders if id(holder.config) in before]
    for config, implementation in before.values():
        config._attn_implementation_internal = implementation
    for _, holder in holders:
        holder.__dict__.pop(_RECORD, None)
    return changed


@contextlib.contextmanager
def stock(model: nn.Module) -> Iterator[None]:
    """Inside, `model` runs the attention from before :func:`attach`; it may hold none of
    transformers' models."""
    before = _attached(_found(model))
    try:
        for config, implementation in before.values():
            config._attn_implementation_internal = implementation
        yield
    finally:
        for config, _ in before.values():
            config._attn_implementation_internal = NAME


def _found(model: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    return [(name, m) for name, m in model.named_modules() if isinstance(m, PreTrainedModel)]


def _holders(op: str, model: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    holders = _found(model) if isinstance(model, nn.Module) else []
    if not holders:
        raise TypeError(
            f"{op}: model must be or hold a transformers.PreTrainedModel, got "
            f"{type(model).__name__}"
        )
    return holders


def _check_devices(model: nn.Module) -> None:
    for device in {parameter.device for parameter in model.parameters()}:
        reason = "" if matchers.has_kernels(device.type, "attention") else "has no attention"
        if device.type == "cuda":
            reason = reason or _library.too_old(device)
        if reason:
            raise RuntimeError(
                "attach: model must be on devices that onepass has attention for in this build, "
                f"got {device}: {reason}"
            )


def _refusal(holder: PreTrainedModel) -> str:
    """Why a model's attention cannot be set; empty if nothing stands against it."""
    can_set = getattr(holder, "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        return "takes no attention from transformers' registry; onepass.swap looks at its modules"
    registry = getattr(sys.modules.get(type(holder).__module__), "ALL_ATTENTION_FUNCTIONS", None)
    if "sdpa" in getattr(registry, "_local_mapping", ()):
        return "its module has an attention of its own under the name sdpa"
    if holder.config.model_type in _SPARSE:
        return "selects blocks of keys, which onepass's attention does not take"
    proven = holder._supports_attention_backend and holder.config.model_type in _PROVEN
    if not (holder._supports_sdpa or proven):
        return "transformers vouches for its eager attention alone"
    holder.get_correct_attn_implementation(NAME)  # raises what transformers has to say of it
    return ""


def _configs(config) -> Iterator:
    """A config and all its sub-configs."""
    yield config
    for key in config.sub_configs:
        inner = getattr(config, key, None)
        if inner is not None:
            yield from _configs(inner)


def _recorded(holders: list[tuple[str, PreTrainedModel]]) -> dict[int, str | None]:
    """What configs named before attach, by their ids, as far as these models know."""
    records = [holder.__dict__.get(_RECORD) for _, holder in reversed(holders)]  # the outer counts
    return {id(c): named for record in records if record for c, named in record.pairs}


def _before(holder: PreTrainedModel, config, known: dict[int, str | None]) -> str | None:
    """What a config names, or did before attach; transformers' default if it was never another."""
    named = config._attn_implementation
    if named != NAME:
        return named
    if id(config) in known:
        return known[id(config)]
    return holder.get_correct_attn_implementation(None)


def _attached(holders: list[tuple[str, PreTrainedModel]]) -> dict[int, tuple]:
    """(config, its implementation from before) by id, of every config that names "onepass"."""
    known = _recorded(holders)
    return {
        id(config): (config, _before(holder, config, known))
        for _, holder in holders
        for config in _configs(holder.config)
        if config._attn_implementation == NAME
    }


def _list_modules(report: Attachment, refused: set[int], changes: dict[int, tuple]) -> None:
    """Fills the lists: what each module says of itself, by its code and its config."""
    for name, module in report._model.named_modules():
        match = matchers.match(module, _KINDS)
        if match is None:
            continue
        config = getattr(module, "config", None)
        entry = {"name": name, "type": _full_name(module)}
        if match.attached:
            before = changes[id(config)][1] if id(config) in changes else NAME
            report.attached.append({**entry, "before": str(before)})
        elif match.forward is not None:
            reason = "attends by itself: onepass.swap(model) makes it run onepass's"
            report.skipped.append({**entry, "reason": reason})
        elif match.reason == matchers.REGISTRY and id(config) not in refused:
            reason = f"its config names {getattr(config, '_attn_implementation', None)!r}"
            report.skipped.append({**entry, "reason": reason})


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
