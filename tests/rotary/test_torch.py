"""Rotary embedding under autograd, torch.compile, export, vmap and autocast."""

import pytest
import torch

from onepass import functional, numerics, reference
from tests.rotary.cases import BOTH, DTYPES, Case
from tests.support.allocations import allocated
from tests.support.dtypes import BF16, F16, F32
from tests.support.results import assert_equal


@pytest.mark.parametrize("norms", [("key",), BOTH], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.grid
def test_second_derivatives_of_norms(dtype, norms):
    """Those of the formula, by the numerics rule."""
    case = Case(dtype, norms=norms, rotary_dim=16, positions="tokens")
    formula = reference.rotary.rotary_embedding
    generator = torch.Generator().manual_seed(5)

    def randn(like):
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    given = case.tensors()
    names = [*norms, *(f"{name}_weight" for name in norms)]
    upstream = [randn(given[name]) for name in norms]
    second = [randn(given[name]) for name in names]

    def gradients(function, dtype_of=lambda t: t):
        own = {n: dtype_of(t.clone()) if t.is_floating_point() else t for n, t in given.items()}
        leaves = [own[name].requires_grad_() for name in names]
        outputs = dict(zip(BOTH, function(**own, **case.options), strict=True))
        outputs = [outputs[name] for name in norms]
        first = torch.autograd.grad(
            outputs, leaves, [dtype_of(t) for t in upstream], create_graph=True
        )
        return torch.autograd.grad(first, leaves, [dtype_of(t) for t in second])

    ours, base = gradients(functional.rotary_embedding), gradients(formula)
    exact = gradients(formula, lambda t: t.double())
    for name, *each in zip(names, ours, exact, base, strict=True):
        numerics.assert_close(*each, name)


def test_the_norm_is_that_of_rms_norm():
    """To the bit: between norm and rotation nothing is rounded."""
    tensors = Case(norms=BOTH, head_dim=40, rotary_dim=24).tensors()
    options = {"eps": 1e-3, "weight_offset": 1.0}
    ours = functional.rotary_embedding(**tensors, **options)
    for name in BOTH:
        weight = tensors.pop(f"{name}_weight")
        tensors[name] = functional.rms_norm(tensors[name], weight.shape, weight, **options)
    assert_equal(ours, functional.rotary_embedding(**tensors))


@pytest.mark.parametrize("name", ["query", "key", "cos", "sin"])
def test_views_are_not_copied(name):
    """Except views whose columns are not dense."""
    tensors = Case(batch=3, table_batch=3).tensors()
    arguments = None, 32, False, False, False, False

    def taken(view):
        given = tensors | {name: view(tensors[name].repeat_interleave(2, -1))}
        return allocated(torch.ops.onepass.rotary_forward, *given.values(), *arguments)

    width = tensors[name].shape[-1]
    in_place = taken(lambda wide: wide[..., :width])
    assert in_place == allocated(torch.ops.onepass.rotary_forward, *tensors.values(), *arguments)
    assert taken(lambda wide: wide[..., ::2]) == in_place + tensors[name].nbytes


@pytest.mark.parametrize("norms", [(), BOTH], ids=["alone", "normed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_under_autocast_are_the_compositions(dtype, norms):
    tensors = Case(dtype, norms=norms).tensors()
    with torch.autocast("cpu", dtype=F16 if dtype is F16 else BF16):
        ours = functional.rotary_embedding(**tensors)
        stock = reference.rotary.rotary_embedding(**tensors)
    assert [x.dtype for x in ours] == [x.dtype for x in stock] == [dtype] * 2
