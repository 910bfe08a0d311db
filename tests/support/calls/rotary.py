"""Rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from onepass import functional
from tests.support.calls.call import RAW, Call, flat, randn


def calls() -> Iterator[Call]:
    def own():
        return {
            "query": randn(2, 4, 5, 8),
            "key": randn(2, 2, 5, 8, seed=1),
            "cos": randn(7, 6, seed=2),
            "sin": randn(7, 6, seed=3),
            "positions": torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]),
        }

    def public(query, key, cos, sin, positions):
        return flat(functional.rotary_embedding(query, key, cos, sin, positions=positions))

    optional = ("key", "positions")

    def rows():
        return {name: own()[name] for name in ("query", "key")}

    def trained(query, key):  # the tables get no gradient
        return public(**own() | {"query": query, "key": key})

    name, more = "functional.rotary_embedding", {"optional": ("key",), "differentiable": True}
    yield Call(name, own, public, optional=optional)
    yield Call(f"{name} of one table", rows, trained, **more)

    def raw(op):
        def run(query, key, cos, sin, positions):
            return flat(op(query, key, cos, sin, positions, 6, True, False, False, False))

        return run

    for op in (RAW.rotary_forward, RAW.rotary_forward_check):
        yield Call(f"ops.{op.__name__}", own, raw(op), optional=optional)
