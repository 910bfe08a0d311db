"""Forward-mode differentiation of every operator: tangents of the definition, of any order."""

import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass import _dispatch_log, functional, numerics
from tests.all_families.test_func_transforms import NAMES, drawn, tensors_of
from tests.support.calls import CALLS
from tests.support.seeds import set_seed

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@pytest.mark.parametrize("name", NAMES)
def test_tangents_are_those_of_our_backward(name):
    """<u, J v> is <J' u, v>: J v by the definition, J' u by the kernels."""
    call = CALLS[name]
    given, wanted = tensors_of(call)
    tangents = {n: drawn(given[n], number) for number, n in enumerate(wanted)}

    def run(**tensors):
        set_seed(3)
        return [r for r in call.run(**{**given, **tensors}) if r.is_floating_point()]

    with forward_ad.dual_level():
        dual = {n: forward_ad.make_dual(given[n], tangents[n]) for n in wanted}
        results = [forward_ad.unpack_dual(result) for result in run(**dual)]
    leaves = {n: given[n].clone().requires_grad_() for n in wanted}
    outputs = run(**leaves)
    upstream = [drawn(output, 10 + number) for number, output in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    forward = sum(
        float((u.double() * r.tangent.double()).sum())
        for u, r in zip(upstream, results, strict=True)
        if r.tangent is not None
    )
    backward = sum(
        float((g.double() * tangents[n].double()).sum())
        for n, g in zip(leaves, gradients, strict=True)
        if g is not None
    )
    size = sum(float((u * r.primal).abs().sum()) for u, r in zip(upstream, results, strict=True))
    # Gradients of slopes are float32.
    relative = 1e-10 if "alibi_slopes" not in wanted else 1e-5
    assert abs(forward - backward) <= relative * max(abs(forward), size), (forward, backward)
    assert any(r.tangent is not None and bool(r.tangent.any()) for r in results)
    for result, output in zip(results, outputs, strict=True):
        numerics.assert_close(output, result.primal.double(), result.primal, case=name)


# What is dropped differs from torch's; one number, as of a loss, says little about errors.
STOCK = [n for n in NAMES if CALLS[n].stock and not re.search("dropout|cross_entropy|nn.", n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STOCK)
def test_tangents_are_as_exact_as_torchs(name, dtype):
    call = CALLS[name]
    given = call.typed(dtype)
    tangents = {n: drawn(given[n], seed) for seed, n in enumerate(call.wanted(given))}

    def tangent(run, to):
        own = {n: t.to(to) if t.is_floating_point() else t for n, t in given.items()}

        def of(leaves):
            return run(**own | leaves)

        return jvp(
            of, ({n: own[n] for n in tangents},), ({n: tangents[n].to(to) for n in tangents},)
        )[1]

    with sdpa_kernel(SDPBackend.MATH):  # of torch's the one that has forward mode
        ref, base = (tangent(call.stock, to) for to in (torch.float64, dtype))
    for found in zip(tangent(call.run, dtype), ref, base, strict=True):
        numerics.assert_close(*found, name)


def test_dropout_under_vmap():
    x = torch.ones(4, 64)

    def tangent(x):
        return jvp(lambda x: functional.dropout(x, 0.5), (x,), (x,))[1]

    y = vmap(tangent, randomness="different")(x)
    assert sorted(set(y.flatten().tolist())) == [0.0, 2.0] and not torch.equal(y[0], y[1])
    y = vmap(tangent, randomness="same")(x)
    assert torch.equal(y[0], y[1])


def test_rotary_embedding_in_place():
    query = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    table = torch.randn(4, 8, dtype=torch.float64)

    def rotated(query, inplace):
        query = query * 1.0
        return functional.rotary_embedding(query, None, table, table.sin(), inplace=inplace)[0]

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, query.sin())
        found, expected = (forward_ad.unpack_dual(rotated(dual, i)) for i in (True, False))
    torch.testing.assert_close(found.tangent, expected.tangent)


def test_a_cache_has_no_tangents():
    query = torch.randn(1, 2, 1, 8)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="query must have no tangent"):
        functional.attention_with_kv_cache(forward_ad.make_dual(query, query), query, query)


def test_the_log_says_so():
    x = torch.randn(2, 8)
    with _dispatch_log.record() as calls:
        jvp(lambda x: functional.layer_norm(x, 8), (x,), (x,))
    (call,) = calls
    assert call["kernel"] == "the definition in torch's operators"
    assert call["reason"] == "kernels compute no tangents"


def test_a_backward_outside_has_no_tangents_to_lose():
    """The forward ran before; a tangent of the upstream gradient alone is refused, not dropped."""
    x = torch.randn(2, 8, requires_grad=True)
    y = functional.layer_norm(x, 8)
    with forward_ad.dual_level():
        upstream = forward_ad.make_dual(torch.ones(2, 8), torch.randn(2, 8))
        with pytest.raises(NotImplementedError, match="jvp"):
            torch.autograd.grad(y, x, upstream)
