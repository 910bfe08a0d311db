"""Attention that modules take by a name in their config, swapped through the package that defines
the names.

That package is transformers. Neither it nor its integration is imported unless the model may come
from it: a model cannot hold classes of a package that was not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from torch import nn

from onepass import _stock
from onepass.swapping import matchers
from onepass.swapping.changes import Edit
from onepass.swapping.providers import MODELS, imported, provider
from onepass.swapping.report import Report
from onepass.swapping.texts import grouped
from onepass.swapping.walk import Found

TO = "onepass's attention, by transformers' registry"  # an entry's "to"
_ATTACHED = (
    "{names}: on onepass's attention by transformers' registry since before this swap; unswap "
    "leaves that, onepass.integrations.transformers.detach(model) undoes it"
)


def is_attached(module: nn.Module) -> bool:
    """Whether a module that takes attention by name takes onepass's already."""
    models = imported(MODELS)
    return models is not None and models.is_attached(module)


def plan_swap(
    model: nn.Module, wanted: Sequence[tuple[Found, bool]], kept: Sequence[Found]
) -> tuple[dict[int, str], list[Edit], set[int]]:
    """(why a wanted module stays as it is, by id; the edits for the others; ids of those that were
    swapped only because the user vouched for them).

    Args:
        wanted: (module, whether the user vouches for it).
        kept: those that options keep as they are.
    """
    if not wanted:
        return {}, [], set()
    models, why = _integration()
    if models is None:
        return {id(item.module): why for item, _ in wanted}, [], set()
    left = [(item.module, item.names[0]) for item in kept]
    reasons, edits = models.plan_swap(model, [(item.module, False) for item, _ in wanted], left)
    vouched = {id(item.module) for item, forced in wanted if forced and id(item.module) in reasons}
    if vouched:
        modules = [(item.module, id(item.module) in vouched) for item, _ in wanted]
        reasons, edits = models.plan_swap(model, modules, left)
    return reasons, edits, vouched - set(reasons)


def plan_unswap(model: nn.Module, found: list[Found]) -> tuple[list[Edit], list[Found]]:
    """The edits that undo a swap, and the modules that they change."""
    models = imported(MODELS)  # not imported: nothing is attached
    edits = [] if models is None else models.plan_unswap(model)
    configs = {id(edit.owner) for edit in edits}
    return edits, [item for item in found if edits and _is_served(item.module, configs)]


def notes(model: nn.Module, report: Report) -> list[str]:
    """Notes on the attention that the swapped modules take by name."""
    if not any(entry["to"] == TO for entry in report.swapped):
        return []
    models = imported(MODELS)
    modules = dict(model.named_modules())
    ours = {id(edit.owner) for edit in models.plan_unswap(model)}
    attached = [
        entry["name"]
        for entry in report.swapped
        if entry["to"] == TO and (entry["name"], "attention") in report._earlier
        if id(modules[entry["name"]].config) not in ours
    ]
    lines = [_ATTACHED.format(names=", ".join(grouped(attached)))] if attached else []
    return lines + models.notes(model)


def _is_served(module: nn.Module, configs: set[int]) -> bool:
    if id(_stock.peek(module, "config")) not in configs:
        return False
    match = matchers.match(module, ("attention",))
    return match is not None and match.named


def _integration() -> tuple[ModuleType | None, str]:
    """The provider, or None and why."""
    if "transformers.modeling_utils" not in sys.modules:
        return None, "takes attention by name from a registry that is not transformers'"
    try:
        return provider(MODELS), ""
    except ImportError as error:  # a version without the registry of masks
        return None, str(error)
