"""Positions of parts of a sequence: `query_offset` and `key_offset` of the public function."""

from __future__ import annotations

import pytest
import torch

from onepass import functional, numerics
from onepass.reference.attention import attention as reference

attend = functional.scaled_dot_product_attention
merge = functional.merge_attention_states

SLOPES = torch.tensor([0.5, 0.25])
OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window": dict(window_size=(9, 4)),
    "alibi": dict(is_causal=True, alibi_slopes=SLOPES),
    "dropout": dict(is_causal=True, dropout_p=0.4),
    "all": dict(window_size=(20, 3), alibi_slopes=SLOPES, dropout_p=0.2, softcap=3.0),
}
SPLIT = 21  # no multiple of a tile, nor of the eight keys that share a draw


def tensors(dtype=torch.float32, queries=50, keys=50):
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 2, queries, 16), (2, 2, keys, 16), (2, 2, keys, 8))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def seeded(*args, **options):
    """The same seed in each call."""
    torch.manual_seed(5)
    return attend(*args, return_lse=True, **options)


def gradients(output, of):
    generator = torch.Generator().manual_seed(2)
    upstream = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return torch.autograd.grad(output, of, upstream.to(output.dtype))


def in_parts(given, of_queries: tuple[slice, ...], of_keys: tuple[slice, ...], options: dict):
    """Output and log-sum-exp of these queries, merged over these keys."""
    q, k, v = given
    rows = []
    for of_q in of_queries:
        states = [
            seeded(
                q[:, :, of_q], k[:, :, of_k], v[:, :, of_k], query_offset=of_q.start or 0,
                key_offset=of_k.start or 0, **options,
            )
            for of_k in of_keys
        ]  # fmt: skip
        rows.append(merge(*zip(*states, strict=True)) if len(states) > 1 else states[0])
    return [torch.cat(pair, 2) for pair in zip(*rows, strict=True)]


WHOLE, HALVES = (slice(None),), (slice(SPLIT), slice(SPLIT, None))
PARTS = {"queries": (HALVES, WHOLE), "keys": (WHOLE, HALVES), "both": (HALVES, HALVES)}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_are_the_whole(name, parts):
    """Output, log-sum-exp and gradients; of queries alone, outputs to the bit."""
    options, given, exact = OPTIONS[name], tensors(), tensors(torch.float64)
    whole, right = seeded(*given, **options), seeded(*exact, **options)
    found = in_parts(given, *PARTS[parts], options)
    if parts == "queries":
        assert all(map(torch.equal, found, whole))
    results = (
        (*found, *gradients(found[0], given)),
        (*right, *gradients(right[0], exact)),
        (*whole, *gradients(whole[0], given)),
    )
    for result, ref, base in zip(*results, strict=True):
        numerics.assert_close(result, ref, base, case=name)


@pytest.mark.parametrize("bottom_right", [False, True])
def test_the_definition(bottom_right):
    q, k, v = tensors(torch.float64, queries=30, keys=40)
    output, lse = attend(
        q, k, v, is_causal=True, alibi_slopes=SLOPES, return_lse=True, query_offset=17,
        key_offset=6, causal_alignment="bottom_right" if bottom_right else "top_left",
    )  # fmt: skip
    ref = reference(
        q, k, v, window_right=0, alibi_slopes=SLOPES.double(), query_offset=17, key_offset=6,
        bottom_right=bottom_right,
    )  # fmt: skip
    for result, right in zip((output, lse), ref, strict=True):
        numerics.assert_close(result, right, right)
