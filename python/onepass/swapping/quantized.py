"""Linear layers whose weights another library quantised: `swap` keeps their codes a second time, in
the order that onepass's kernel streams, beside the module and not in its state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from onepass.swapping.changes import Edit
from onepass.swapping.classes import QUANTIZED_LAYER, QuantizedForward
from onepass.swapping.providers import QUANTIZED, provider


def edits_of(changes: Iterable[NamedTuple]) -> list[Edit]:
    """The edits of classes, and of the codes that they need."""
    edits = []
    for change in changes:
        edits.append(Edit(change.module, "__class__", change.cls))
        if issubclass(change.cls, QuantizedForward):
            layer = provider(QUANTIZED).layer_of(change.module)
            edits.append(Edit(change.module, QUANTIZED_LAYER, layer))
    return edits
