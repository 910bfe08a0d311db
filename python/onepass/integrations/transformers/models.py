"""`attach` and `detach` for models of transformers; and the same steps for `onepass.swap` and
`unswap`."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from onepass import _library, _stock
from onepass._imported import is_a
from onepass.integrations.transformers import losses
from onepass.integrations.transformers.attention import NAME, register
from onepass.swapping import matchers
from onepass.swapping.changes import ABSENT, Change, Edit, Journal, in_force
from onepass.swapping.reasons import Reason
from onepass.swapping.restored import without
from onepass.swapping.texts import listed, preformatted, rows, shortened, table

# Models, by model_type, that transformers runs on eager attention alone although they take
# attention from the registry: a test checks that onepass computes the same. Others have not been
# examined.
_PROVEN = (
    "deepseek_v4", "flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4",
    "mimo_v2_flash", "openai_privacy_filter", "t5_gemma_module", "t5gemma", "vaultgemma",
    "videoprism_text_model",
)  # fmt: skip
# Models that pass an argument which the attention refuses.
_SPARSE = ("minimax_m3_vl_text",)
KINDS = ("attention", "loss")  # of attach
_IMPLEMENTATION = "_attn_implementation_internal"  # of a config: the name that it holds
_RECORD = "_onepass_attention_before"  # on a PreTrainedModel: its configs' attention before
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_BY_ITSELF = "takes no attention from transformers' registry; onepass.swap looks at its modules"
_CACHE = (
    "pass use_cache=False in training; layers under torch's checkpoint wrappers append to a KV "
    "cache again as they are recomputed (with use_reentrant=True gradients would miss the keys and "
    "values, with padding it raises; stock's do the same)"
)


class Attachment:
    """The result of `attach`; prints as a table.

    Attributes:
        attached: modules that run on onepass's attention or loss; dicts with name, type, before
            (the name of the implementation that they had), to (of ours), kind.
        skipped: models and modules that do not; dicts with name, type, reason.
        notes: further facts, as sentences.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> from onepass.integrations.transformers import attach
        >>> model, ids = LlamaForCausalLM(config), torch.arange(8)[None]
        >>> report = attach(model)
        >>> report.verify({"input_ids": ids, "labels": ids}).ok
        True
    """

    def __init__(self, model: nn.Module):
        self.attached: list[dict[str, str]] = []
        self.skipped: list[dict[str, str]] = []
        self.notes: list[str] = []
        self.dry_run = False  # as of a swap's report, for `verify`
        self._changes = []
        self._named = []
        self._model = model

    def to_dict(self) -> dict[str, list]:
        """The lists as plain JSON-able data."""
        return {
            "attached": [dict(entry) for entry in self.attached],
            "skipped": [dict(entry) for entry in self.skipped],
            "notes": list(self.notes),
        }

    def verify(self, *batch, loss_fn: Callable | None = None, **named):
        """Runs the model with its former attention and loss and with onepass's, and compares.

        As `onepass.swapping.Report.verify`; modules changed by `onepass.swap` stay swapped in both
        runs. Its report's `verify` undoes both.

        Raises:
            RuntimeError: nothing in the model is attached any more.
        """
        from onepass.swapping.verify import verify

        model = self._model
        if model is not None and not (_attached(_found(model)) or losses.attached(model)):
            raise RuntimeError(
                "verify: model must be attached still, got one that has been detached"
            )
        return verify(self, batch, loss_fn, named)

    def details(self) -> str:
        """The report with all of every note."""
        return "\n".join(self._tables() + listed(self.notes))

    def __str__(self) -> str:
        return "\n".join(self._tables() + shortened(self.notes))

    __repr__ = __str__

    def _tables(self) -> list[str]:
        lines = [f"onepass: attached {len(self.attached)}, {len(self.skipped)} skipped"]
        sections = {
            "attached": ("name", "count", "kind", "type", "before", "to"),
            "skipped": ("name", "count", "type", "reason"),
        }
        for section, columns in sections.items():
            found = rows(getattr(self, section), columns)
            if found:
                lines += ["", *table(section, columns, found)]
        return lines

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def __getstate__(self) -> dict:
        """A copy prints the same, but has no model to verify."""
        return {**vars(self), "_model": None, "_changes": []}


class _Before:
    """(config, the implementation that it named before, "attach" or "swap"), for each config that
    changed: unswap undoes the changes of swap, but not those of attach.

    On the models themselves, so that copies and pickles carry their own; a pickle registers the
    name wherever it is loaded.
    """

    def __init__(self, entries: list[tuple]):
        self.entries = entries

    def __reduce__(self):
        return _restored, (self.entries,)


def _restored(entries: list[tuple]) -> _Before:
    if NAME not in AttentionInterface() or NAME not in AttentionMaskInterface():
        register()
    return _Before(entries)


def attach(
    model: nn.Module,
    *,
    kinds: str | Sequence[str] = KINDS,
    lazy_logits: bool = False,
    strict: bool = False,
) -> Attachment:
    """Makes the models of transformers in `model` run on onepass's attention and loss, in place.

    `onepass.swap` does this too, with norms, products and more. Attached models stay attached when
    the model is unswapped.

    Every `PreTrainedModel` in it is looked at, `model` itself or within wrappers (peft,
    `DistributedDataParallel`, your own modules): its config, and its sub-configs, name "onepass"
    afterwards if transformers runs the class on "sdpa" (`_supports_sdpa`), or if it is one that
    runs on eager attention alone and onepass is known to compute the same (Gemma 2, gpt-oss, ...).
    Models that share a config object change together (only the attached one knows the former name:
    detach that one). The attention works before and after `onepass.swap`, and on compiled models,
    which compile again.

    The `loss_function` of language models then runs on `onepass.functional.cross_entropy`: bfloat16
    logits are not copied to float32, and labels are shifted as before. For this, modules that
    compute a loss change their class, as by `onepass.swap(model, kinds="loss")`; attach before
    `torch.compile` and before `fully_shard`. Parameters, hooks and state_dict keys stay.

    Args:
        model: a `transformers.PreTrainedModel`, or a module that holds some.
        kinds: "attention", "loss" or both.
        lazy_logits: a step with labels and gradients computes its loss without logits, by
            `onepass.functional.linear_cross_entropy`. `output.logits` is then a tensor that is
            computed when it is read; once the weights have changed (after `optimizer.step()`),
            reading it raises. With kind "loss"; off by default, as of `onepass.swap`.
        strict: raise if anything is skipped, or nothing attached.

    Returns:
        Attachment: the modules that run on onepass now, the others, and the reasons;
        `verify(*batch)` compares with the former attention and loss.

    Raises:
        TypeError: model is not and does not hold a `PreTrainedModel`; an option has a wrong type.
        ValueError: kinds holds another name, nothing, or not "loss" with lazy_logits.
        RuntimeError: it is on a device that onepass has no attention for; or under strict. If
            anything raises, the model is as it was.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> from onepass.integrations.transformers import attach
        >>> model = LlamaForCausalLM(config)
        >>> [entry["kind"] for entry in attach(model).attached]
        ['attention', 'loss']
    """
    asked = _kinds(kinds, lazy_logits)
    journal = Journal()
    try:
        return _attach(model, asked, lazy_logits, strict, journal)
    except BaseException:
        journal.undo()
        raise


def _kinds(kinds: str | Sequence[str], lazy_logits: bool) -> tuple[str, ...]:
    if not isinstance(lazy_logits, bool):
        raise TypeError(
            f"attach: lazy_logits must be True or False, got {type(lazy_logits).__name__}"
        )
    if not isinstance(kinds, Iterable):
        raise TypeError(f"attach: kinds must hold names, got {type(kinds).__name__}")
    asked = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not asked or not all(kind in KINDS for kind in asked):
        raise ValueError(f"attach: kinds must be of {KINDS}, got {kinds!r}")
    if lazy_logits and "loss" not in asked:
        raise ValueError(f"attach: kinds must hold 'loss' for lazy_logits, got {kinds!r}")
    return asked


def _attach(
    model: nn.Module, kinds: tuple[str, ...], lazy_logits: bool, strict: bool, journal: Journal
) -> Attachment:
    holders = _holders("attach", model)
    report, edits = Attachment(model), []
    if "attention" in kinds:
        edits += _attach_attention(model, holders, report)
    if "loss" in kinds:
        edits += _attach_losses(model, holders, report, lazy_logits)
    if strict and (report.skipped or not report.attached):
        got = "; ".join(f"{e['name'] or '(root)'!r}: {e['reason']}" for e in report.skipped)
        raise RuntimeError(
            f"attach: model must be attached whole under strict, got {got or 'none'}"
        )
    journal.make(edits)
    return report


def _attach_attention(model: nn.Module, holders, report: Attachment) -> list[Edit]:
    reason = _device_refusal(model)
    if reason:
        raise RuntimeError(
            "attach: model must be on devices that onepass has attention for in this build, got "
            f"{reason}"
        )
    changes, refused = _plan(holders)
    _list_modules(report, holders, changes, refused)
    report.notes += notes(model)
    return _edits(holders, changes, "attach")


def _attach_losses(model: nn.Module, holders, report: Attachment, lazy_logits: bool) -> list[Edit]:
    from onepass.swapping import notes as swap_notes

    plan, edits = losses.plan_attach(model, [holder for _, holder in holders], lazy_logits)
    new = {id(change.module): change.cls for change in plan.classes}
    for entry in plan.report.swapped:
        module = model.get_submodule(entry["name"])
        report.attached.append(
            {
                "name": entry["name"],
                "type": entry["from"],
                "before": _loss_name(module, new.get(id(module), type(module))),
                "to": entry["to"].rpartition(".")[2],
                "kind": "loss",
            }
        )
    report.skipped += [e for e in plan.report.skipped if e["reason"].kind is not Reason.FILTERED]
    notes = swap_notes.notes(model, plan)
    # Its attention can be attached.
    report.notes += [note for note in notes if not note.startswith(swap_notes.NOTHING)]
    report._changes += [
        Change(change.module, without(change.swapped, "loss"), change.swapped)
        for change in plan.report._changes
    ]
    report._changes += [
        Change(change.module, type(change.module), change.cls) for change in plan.classes
    ]
    return edits


def _loss_name(module: nn.Module, cls: type) -> str:
    """The function that computed the loss of a module that gets this class."""
    changed = losses.changes_loss_function(cls)
    function = module.loss_function if changed else None
    while isinstance(function, functools.partial):
        function = function.args[0]
    return getattr(function, "__name__", "cross_entropy")


def detach(model: nn.Module) -> list[str]:
    """Gives every config in a model the implementation back that it named before `attach`, or
    before `onepass.swap`; and modules the loss that they had before `attach`.

    A config that now names another one is left alone; one that has named "onepass" since it was
    loaded gets transformers' default.

    Returns:
        The names of the modules that changed: `PreTrainedModel`s by their configs, and those that
        compute a loss.

    Raises:
        TypeError: model is not and does not hold a `PreTrainedModel`.
        RuntimeError: modules whose loss is attached were sharded or parametrized since. If anything
            raises, the model is as it was.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> from onepass.integrations.transformers import attach, detach
        >>> model = LlamaForCausalLM(config)
        >>> report = attach(model, kinds="attention")
        >>> detach(model)
        ['', 'model']
        >>> model.config._attn_implementation
        'sdpa'
    """
    journal = Journal()
    try:
        holders = _holders("detach", model)
        before = _attached(holders)
        changed = [name for name, holder in holders if id(holder.config) in before]
        changed += [name for name, _ in losses.attached(model) if name not in changed]
        recorded = [holder for _, holder in holders if _RECORD in vars(holder)]
        journal.make(
            [Edit(config, _IMPLEMENTATION, named) for config, named in before.values()]
            + [Edit(holder, _RECORD, ABSENT) for holder in recorded]
            + losses.plan_detach(model)
        )
        return changed
    except BaseException:
        journal.undo()
        raise


def is_attached(module: nn.Module) -> bool:
    """Whether a module that takes attention by name takes onepass's."""
    config = _stock.peek(module, "config")
    return getattr(config, "_attn_implementation", None) == NAME


def plan_swap(
    model: nn.Module,
    wanted: Sequence[tuple[nn.Module, bool]],
    kept: Sequence[tuple[nn.Module, str]],
) -> tuple[dict[int, str], list[Edit]]:
    """The changes of a swap that give onepass's attention to modules that take it by name.

    The name is in a config. So modules that share one change together, and with them the models
    that make masks for them.

    Args:
        wanted: (module, whether the user vouches for it).
        kept: (module, name) of those that must stay as they are.

    Returns:
        (why a wanted module stays as it is, by its id; the edits for the others).
    """
    holders = _found(model)
    reason = _device_refusal(model)
    vouched = {id(config) for config, forced in _by_config(wanted) if all(forced)}
    changes, refused = _plan(holders, vouched)
    blocked: dict[int, str] = {}  # ids of configs
    for module, name in kept:
        blocked[id(_stock.peek(module, "config"))] = name
        for _, holder in holders:
            if any(part is module for part in holder.modules()):
                blocked[id(holder.config)] = name
    reasons = {}
    for module, _ in wanted:
        key = id(_stock.peek(module, "config"))
        if reason:
            reasons[id(module)] = f"is on {reason}"
        elif key in blocked:
            reasons[id(module)] = f"shares its config with {blocked[key]!r}, which keeps its own"
        elif key in refused:
            reasons[id(module)] = refused[key][1]
        elif key not in changes:
            reasons[id(module)] = "takes attention by a name that no PreTrainedModel around it has"
    if all(id(module) in reasons for module, _ in wanted):
        return reasons, []
    changes = {
        key: (config, named)
        for key, (config, named) in changes.items()
        if key not in blocked and config._attn_implementation != NAME
    }
    return reasons, _edits(holders, changes, "swap")


def plan_unswap(model: nn.Module) -> list[Edit]:
    """The edits that give the configs in a model the names from before `onepass.swap`."""
    holders = _found(model)
    known = _recorded(holders)
    attached = _attached(holders)
    ours = {key for key in attached if key in known and known[key][1] == "swap"}
    edits = [Edit(attached[key][0], _IMPLEMENTATION, attached[key][1]) for key in ours]
    for _, holder in holders:
        record = vars(holder).get(_RECORD)
        if record is not None:
            left = [entry for entry in record.entries if id(entry[0]) not in ours]
            if len(left) < len(record.entries):
                edits.append(Edit(holder, _RECORD, _Before(left) if left else ABSENT))
    return edits


def notes(model: nn.Module) -> list[str]:
    """Notes of a report on models of transformers in a model."""
    wrapped = any(is_a(m, _WRAPPERS, "CheckpointWrapper") for m in model.modules())
    caching = any(getattr(holder.config, "use_cache", False) for _, holder in _found(model))
    return [_CACHE] if wrapped and caching else []


@contextlib.contextmanager
def stock(model: nn.Module) -> Iterator[None]:
    """Inside, `model` runs the attention from before `attach` and `onepass.swap`; it may hold
    none of transformers' models."""
    before = _attached(_found(model))
    with in_force([Edit(config, _IMPLEMENTATION, named) for config, named in before.values()]):
        yield


def implementations(model: nn.Module) -> list[tuple]:
    """(config, the attention implementation that it names) of every config in a model."""
    configs = {id(c): c for _, holder in _found(model) for c in _configs(holder.config)}
    return [(config, config._attn_implementation_internal) for config in configs.values()]


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


def _device_refusal(model: nn.Module) -> str:
    """The first device of a model that onepass has no attention for, and why; empty if none."""
    for device in {parameter.device for parameter in model.parameters()}:
        reason = "" if matchers.has_kernels(device.type, "attention") else "has no attention"
        if device.type == "cuda":
            reason = reason or _library.too_old(device)
        if reason:
            return f"{device}: {reason}"
    return ""


def _plan(
    holders: list[tuple[str, PreTrainedModel]], vouched: Set[int] = frozenset()
) -> tuple[dict[int, tuple], dict[int, tuple[str, str]]]:
    """Plan by id: (config, its former name) of the configs that shall name "onepass", and (name of
    the model, reason) of the others. The user vouches for some configs."""
    register()
    known = _recorded(holders)
    own = {id(holder.config) for _, holder in holders}
    changes: dict[int, tuple] = {}
    refused: dict[int, tuple[str, str]] = {}
    for name, holder in holders:
        if id(holder.config) in changes or id(holder.config) in refused:
            continue
        configs = [
            config
            for config in _configs(holder.config)
            if config is holder.config or id(config) not in own
        ]
        reason = _refusal(holder, any(id(config) in vouched for config in configs))
        if reason:
            refused.update({id(config): (name, reason) for config in configs})
        else:
            changes.update({id(c): (c, _before(holder, c, known)) for c in configs})
    return changes, refused


def _edits(holders: list[tuple[str, PreTrainedModel]], changes: dict, by: str) -> list[Edit]:
    edits = [Edit(config, _IMPLEMENTATION, NAME) for config, _ in changes.values()]
    for _, holder in holders:
        new = [(*changes[id(c)], by) for c in _configs(holder.config) if id(c) in changes]
        if new:
            record = vars(holder).get(_RECORD)
            old = [] if record is None else record.entries
            kept = [entry for entry in old if id(entry[0]) not in changes]
            edits.append(Edit(holder, _RECORD, _Before(kept + new)))
    return edits


def _by_config(wanted: Sequence[tuple[nn.Module, bool]]) -> Iterator[tuple[object, list[bool]]]:
    configs: dict[int, tuple[object, list[bool]]] = {}
    for module, forced in wanted:
        config = _stock.peek(module, "config")
        configs.setdefault(id(config), (config, []))[1].append(forced)
    yield from configs.values()


def _refusal(holder: PreTrainedModel, vouched: bool) -> str:
    """Why a model's attention cannot be set; empty if it can."""
    can_set = getattr(holder, "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        return _BY_ITSELF
    registry = getattr(sys.modules.get(type(holder).__module__), "ALL_ATTENTION_FUNCTIONS", None)
    if "sdpa" in getattr(registry, "_local_mapping", ()):
        return "its module has an attention of its own under the name sdpa"
    if holder.config.model_type in _SPARSE:
        return "selects blocks of keys, which onepass's attention does not take"
    proven = holder._supports_attention_backend and holder.config.model_type in _PROVEN
    if not (holder._supports_sdpa or proven or vouched):
        return "transformers vouches for its eager attention alone"
    holder.get_correct_attn_implementation(NAME)  # raises transformers' own error
    return ""


def _configs(config) -> Iterator:
    """A config and all its sub-configs."""
    yield config
    for key in config.sub_configs:
        inner = getattr(config, key, None)
        if inner is not None:
            yield from _configs(inner)


def _recorded(holders: list[tuple[str, PreTrainedModel]]) -> dict[int, tuple[str | None, str]]:
    """(the former name, "attach" or "swap") of configs by id, as recorded by these models: the
    outermost record counts, but attached in any record means attached."""
    known: dict[int, tuple[str | None, str]] = {}
    for _, holder in reversed(holders):
        for config, named, by in getattr(vars(holder).get(_RECORD), "entries", ()):
            attached = known.get(id(config), ("", by))[1] == "attach"
            known[id(config)] = (named, "attach" if attached else by)
    return known


def _before(holder: PreTrainedModel, config, known: dict[int, tuple]) -> str | None:
    """The attention that a config names, or named before attach; transformers' default if it never
    named another."""
    named = config._attn_implementation
    if named != NAME:
        return named
    if id(config) in known:
        return known[id(config)][0]
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


def _list_modules(report: Attachment, holders, changes: dict, refused: dict) -> None:
    """Fills the lists: refused models, and each module by its code and its config."""
    matches = {}
    for name, module in report._model.named_modules():
        match = matchers.match(module, ("attention",))
        if match is not None:
            matches[id(module)] = (name, module, match)
    by_name = {key for key, (_, _, match) in matches.items() if match.named}
    for name, holder in holders:
        if refused.get(id(holder.config), (None,))[0] == name:
            served = any(id(module) in by_name for module in holder.modules())
            reason = refused[id(holder.config)][1] if served else _BY_ITSELF
            report.skipped.append({"name": name, "type": _full_name(holder), "reason": reason})
    for name, module, match in matches.values():
        config = _stock.peek(module, "config")
        entry = {"name": name, "type": _full_name(module)}
        if match.named and (id(config) in changes or is_attached(module)):
            before = changes[id(config)][1] if id(config) in changes else NAME
            report.attached.append(
                {**entry, "before": str(before), "to": NAME, "kind": "attention"}
            )
        elif match.named and id(config) not in refused:
            reason = f"its config names {getattr(config, '_attn_implementation', None)!r}"
            report.skipped.append({**entry, "reason": reason})
        elif match.forward is not None and not match.unknown:
            reason = "attends by itself: onepass.swap(model) makes it run onepass's"
            report.skipped.append({**entry, "reason": reason})


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
