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


@pytest.mark.parametrize("name", OPTIONS)
def test_queries_in_two_parts(name):
    options = OPTIONS[name]

    def parts(q, k, v):
        first = seeded(q[:, :, :SPLIT], k, v, **options)
        second = seeded(q[:, :, SPLIT:], k, v, query_offset=SPLIT, **options)
        return [torch.cat(pair, 2) for pair in zip(first, second, strict=True)]

    check(name, parts, bitwise=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_keys_in_two_parts(name):
    options = OPTIONS[name]

    def parts(q, k, v):
        first = seeded(q, k[:, :, :SPLIT], v[:, :, :SPLIT], **options)
        second = seeded(q, k[:, :, SPLIT:], v[:, :, SPLIT:], key_offset=SPLIT, **options)
        return merge(*zip(first, second, strict=True))

    check(name, parts)


@pytest.mark.parametrize("name", OPTIONS)
def test_both_in_parts(name):
    options = OPTIONS[name]
    halves = (slice(SPLIT), slice(SPLIT, None))

    def parts(q, k, v):
        rows = []
        for of_q in halves:
            states = [
                seeded(
                    q[:, :, of_q], k[:, :, of_k], v[:, :, of_k],
                    query_offset=of_q.start or 0, key_offset=of_k.start or 0, **options,
                )
                for of_k in halves
            ]  # fmt: skip
            rows.append(merge(*zip(*states, strict=True)))
        return [torch.cat(pair, 2) for pair in zip(*rows, strict=True)]

    check(name, parts)


def check(name, parts, bitwise=False):
    """Output, log-sum-exp and gradients of the parts are those of the whole."""
    given = tensors()
    whole, found = seeded(*given, **OPTIONS[name]), parts(*given)
    exact = tensors(torch.float64)
    right = seeded(*exact, **OPTIONS[name])
    if bitwise:
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
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


def test_far_positions():
    """Only the distance counts, but for dropout."""
    q, k, v = tensors()
    near = attend(q, k, v, window_size=(5, 2), alibi_slopes=SLOPES)
    far = dict(query_offset=2**39, key_offset=2**39)
    assert torch.equal(attend(q, k, v, window_size=(5, 2), alibi_slopes=SLOPES, **far), near)


def test_a_compiled_call():
    q, k, v = (t.detach() for t in tensors())
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    options = dict(is_causal=True, query_offset=3, key_offset=1)
    assert torch.equal(compiled(q, k, v, **options), attend(q, k, v, **options))


@pytest.mark.parametrize("name", ["query_offset", "key_offset"])
def test_refusals(name):
    q, k, v = tensors()
    with pytest.raises(RuntimeError, match=f"{name} must not be negative, got -1"):
        attend(q, k, v, **{name: -1})
    with pytest.raises(RuntimeError, match=f"{name} must be below 2\\^40, got 1099511627776"):
        attend(q, k, v, **{name: 2**40})
    for wrong in (None, 1.5):
        with pytest.raises(TypeError, match=f"{name} must be a whole number, got"):
            attend(q, k, v, **{name: wrong})
