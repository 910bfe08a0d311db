"""What a report lists, and the classes of a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def names(entries: Iterable[dict]) -> set[str]:
    return {entry["name"] for entry in entries}


def types(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]
