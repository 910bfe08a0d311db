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

    def weights():
        return {"query_weight": randn(8, seed=4), "key_weight": randn(8, seed=5)}

    def public(query, key, cos, sin, positions, **norms):
        options = {"positions": positions, "eps": 1e-3 if norms else None, **norms}
        return flat(functional.rotary_embedding(query, key, cos, sin, **options))

    optional = ("key", "positions")

    name, more = "functional.rotary_embedding", {"optional": ("key",), "differentiable": True}
    more |= {"constant": ("cos", "sin")}  # tables get no gradient
    yield Call(name, own, public, optional=optional)
    yield Call(f"{name} of one table", own, public, **more)
    yield Call(
        f"{name} after norms", lambda: own() | weights(), public, optional=("positions", *weights())
    )
    more["optional"] = tuple(weights())
    yield Call(f"{name} trained after norms", lambda: own() | weights(), public, **more)

    def raw(op):
        def run(query, key, cos, sin, positions):
            return flat(op(query, key, cos, sin, positions, 6, True, False, False, False))

        return run

    for op in (RAW.rotary_forward, RAW.rotary_forward_check):
        yield Call(f"ops.{op.__name__}", own, raw(op), optional=optional)

    def raw_normed(op):
        def run(query, key, cos, sin, positions, query_weight, key_weight):
            options = (6, True, False, False, False, query_weight, key_weight, 1e-3, 1.0)
            return flat(op(query, key, cos, sin, positions, *options))

        return run

    for op in (RAW.rotary_forward, RAW.rotary_forward_check):
        yield Call(f"ops.{op.__name__} after norms", lambda: own() | weights(), raw_normed(op),
                   optional=("positions", *weights()))  # fmt: skip

    def inplace(query, key, cos, sin, positions):
        options = {"positions": positions, "inplace": True}
        return flat(functional.rotary_embedding(query, key, cos, sin, **options))

    written = ("query", "key")
    yield Call(f"{name} in place", own, inplace, written=written, optional=optional)

    def raw_inplace(op):
        def run(query, key, cos, sin, positions, query_weight, key_weight):
            options = (6, True, query_weight, key_weight, 1e-3, 1.0)
            return flat(op(query, key, cos, sin, positions, *options))

        return run

    for op in (RAW.rotary_forward_inplace, RAW.rotary_forward_inplace_check):
        yield Call(f"ops.{op.__name__}", lambda: own() | weights(), raw_inplace(op),
                   written=written if op is RAW.rotary_forward_inplace else (),
                   optional=("positions", *weights()))  # fmt: skip

    def upstream():
        return {"dquery_out": randn(2, 4, 5, 8, seed=6), "dkey_out": randn(2, 2, 5, 8, seed=7)}

    def raw_backward(op):
        def run(dquery_out, dkey_out, query, key, cos, sin, positions, query_weight, key_weight):
            options = (6, True, False, False, query_weight, key_weight, 1e-3, 1.0, 15)
            return flat(op(dquery_out, dkey_out, query, key, cos, sin, positions, *options))

        return run

    for op in (RAW.rotary_backward, RAW.rotary_backward_check):
        yield Call(f"ops.{op.__name__}", lambda: upstream() | own() | weights(), raw_backward(op),
                   optional=("positions", *weights()))  # fmt: skip
