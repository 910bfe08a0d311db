"""Rotary embedding."""

from collections.abc import Iterator

import torch

from onepass import functional
from tests.support.calls.call import Call, flat, randn, raw


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

    options = {"rotary_dim": 6, "interleaved": True}
    places = {"query_bshd": False, "key_bshd": False}
    norms = {"eps": 1e-3, "weight_offset": 1.0, "optional": ("positions", *weights())}

    def with_weights():
        return own() | weights()

    forward = options | places | {"transposed": False}
    yield from raw("rotary_forward", own, optional=optional, **forward)
    yield from raw("rotary_forward", with_weights, " after norms", **norms, **forward)

    def inplace(query, key, cos, sin, positions):
        options = {"positions": positions, "inplace": True}
        return flat(functional.rotary_embedding(query, key, cos, sin, **options))

    written = ("query", "key")
    yield Call(f"{name} in place", own, inplace, written=written, optional=optional)

    yield from raw("rotary_forward_inplace", with_weights, written=written, **options, **norms)

    def upstream():
        own = {"dquery_out": randn(2, 4, 5, 8, seed=6), "dkey_out": randn(2, 2, 5, 8, seed=7)}
        return own | with_weights()

    yield from raw("rotary_backward", upstream, grad_mask=15, **options, **places, **norms)
