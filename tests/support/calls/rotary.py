"""Rotary embedding."""

from collections.abc import Iterator

import torch

from tests.support.calls.call import Call, public, randn, raw


def calls() -> Iterator[Call]:
    def own():
        return {
            "query": randn(2, 4, 5, 8), "key": randn(2, 2, 5, 8, seed=1),
            "cos": randn(7, 6, seed=2), "sin": randn(7, 6, seed=3),
            "positions": torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]),
        }  # fmt: skip

    def weights():
        return {"query_weight": randn(8, seed=4), "key_weight": randn(8, seed=5)}

    def with_weights():
        return own() | weights()

    name, optional = "rotary_embedding", ("key", "positions")
    trained = {"differentiable": True, "constant": ("cos", "sin")}  # tables get no gradient
    yield public(name, own, optional=optional)
    yield public(name, own, " of one table", optional=("key",), **trained)
    normed = {"eps": 1e-3}
    yield public(name, with_weights, " after norms", options=normed,
                 optional=("positions", *weights()))  # fmt: skip
    yield public(name, with_weights, " trained after norms", options=normed,
                 optional=tuple(weights()), **trained)  # fmt: skip
    written = ("query", "key")
    yield public(name, own, " in place", options={"inplace": True}, written=written,
                 optional=optional)  # fmt: skip

    options = {"rotary_dim": 6, "interleaved": True}
    places = {"query_bshd": False, "key_bshd": False}
    norms = {"eps": 1e-3, "weight_offset": 1.0, "optional": ("positions", *weights())}

    forward = options | places | {"transposed": False}
    yield from raw("rotary_forward", own, optional=optional, **forward)
    yield from raw("rotary_forward", with_weights, " after norms", **norms, **forward)

    yield from raw("rotary_forward_inplace", with_weights, written=written, **options, **norms)

    def upstream():
        own = {"dquery_out": randn(2, 4, 5, 8, seed=6), "dkey_out": randn(2, 2, 5, 8, seed=7)}
        return own | with_weights()

    yield from raw("rotary_backward", upstream, grad_mask=15, **options, **places, **norms)
