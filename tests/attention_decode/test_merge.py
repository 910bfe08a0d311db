"""merge_attention_states: merged attention to parts of the keys equals attention to all keys."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from onepass import functional, numerics, reference
from tests.attention_decode.cases import NAN, assert_same
from tests.support.dtypes import BF16, F16, F32, F64

merge = functional.merge_attention_states
INF = math.inf
DTYPES = (F32, BF16, F16, F64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Divisions of the keys: one part, even and odd parts, parts of one key and of none.
CUTS = {
    "one": (),
    "two": (64,),
    "odd": (1, 2, 37, 100),
    "empty": (0, 0, 50, 50),
    "many": tuple(range(8, 129, 8)),
}


def formula(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The definition in the accumulator's dtype, without a special case for -inf."""
    lses = torch.stack(lses)
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp()[..., None].nan_to_num(0.0)
    wide = torch.stack(outputs).to(lse.dtype)
    return (weights * wide).sum(0).to(outputs[0].dtype), lse


def split(attend, q, k, v, cuts) -> tuple[list[Tensor], list[Tensor]]:
    parts = [attend(q, *kv) for kv in zip(*(x.tensor_split(cuts, 2) for x in (k, v)), strict=True)]
    return [output for output, _ in parts], [lse for _, lse in parts]


def ours(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, return_lse=True)


def defined(q, k, v):
    output, lse = reference.attention.attention(q, k, v)
    return output, lse.to(F64 if lse.dtype is F64 else F32)


def inputs(dtype, seed=0, keys=129):
    generator = torch.Generator().manual_seed(seed)
    sizes = (2, 3, 20, 32), (2, 3, keys, 32), (2, 3, keys, 24)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


# ---- values and gradients ------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("cut", CUTS)
def test_parts_merged_are_the_whole(cut, dtype):
    q, k, v = inputs(dtype)
    found = merge(*split(ours, q, k, v, CUTS[cut]))
    assert found[0].dtype is dtype and found[1].dtype is (F64 if dtype is F64 else F32)
    ref = defined(q.double(), k.double(), v.double())
    parts = split(defined, q.float(), k.float(), v.float(), CUTS[cut])
    if dtype is F64:
        base = ref
    else:  # parts by the definition in float32, rounded
        base = formula([output.to(dtype) for output in parts[0]], parts[1])
    for one, exact, stock in zip(found, ref, base, strict=True):
        numerics.assert_close(one, exact, stock)


@dtypes
def test_a_stacked_tensor_is_as_good_as_a_list(dtype):
    outputs, lses = split(ours, *inputs(dtype), CUTS["odd"])
    expected = merge(outputs, lses)
    for found in (
        merge(torch.stack(outputs), torch.stack(lses)),
        merge(tuple(outputs), torch.stack(lses)),
        merge(torch.stack(outputs, 1).unbind(1), lses),
    ):
        assert_same(dict(zip("ol", found, strict=True)), dict(zip("ol", expected, strict=True)))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (2, 1, 3, 4, 2), (0,), (2, 0, 3)], ids=str)
def test_any_leading_dimensions(shape):
    """Every index of them is an independent row."""
    outputs, lses = torch.randn(3, *shape, 8), torch.randn(3, *shape)
    output, lse = merge(outputs, lses)
    flat = merge(outputs.reshape(3, -1, 8), lses.reshape(3, -1))
    assert output.shape == (*shape, 8) and lse.shape == shape
    torch.testing.assert_close((output.reshape(-1, 8), lse.reshape(-1)), flat)


# ---- rows without keys ---------------------------------------------------------------------------


@dtypes
def test_rows_without_keys(dtype):
    """A part without keys is ignored; a row without keys in any part gives 0 and -inf, not NaN."""
    outputs = torch.randn(3, 2, 7, 8).to(dtype)
    lses = torch.randn(3, 2, 7, dtype=F64 if dtype is F64 else F32)
    lses[1, 0, 2] = lses[0, 1, 3] = lses[2, 1, 3] = -INF
    lses[:, :, 5] = -INF
    outputs[lses == -INF] = NAN  # must not be used
    outputs.requires_grad_(), lses.requires_grad_()
    output, lse = merge(outputs, lses)
    assert output.isfinite().all() and not output[:, 5].any()
    assert (lse[:, 5] == -INF).all() and lse[:, :5].isfinite().all()
    torch.testing.assert_close(output[1, 3], outputs[1, 1, 3])
    others = merge(outputs[::2, :1, 2], lses[::2, :1, 2])
    torch.testing.assert_close((output[:1, 2], lse[:1, 2]), others)
    loss = output.double().square().sum() + lse[lse > -INF].double().sum()
    for gradient, of in zip(
        torch.autograd.grad(loss, (outputs, lses)), (outputs, lses), strict=True
    ):
        assert gradient.isfinite().all()
        assert not gradient[(lses == -INF).expand(of.shape[:3])].any()


@dtypes
def test_a_gradient_into_a_log_sum_exp_that_is_infinite(dtype):
    outputs = torch.randn(2, 4, 8, dtype=dtype, requires_grad=True)
    lses = torch.full((2, 4), -INF, requires_grad=True)
    output, lse = merge(outputs, lses)
    ones = torch.ones_like(output), torch.ones_like(lse)
    for gradient in torch.autograd.grad((output, lse), (outputs, lses), ones):
        assert not gradient.any()  # nor NaN


@dtypes
@pytest.mark.parametrize("offset", [-1e4, -200.0, 200.0, 1e4])
def test_log_sum_exps_far_from_zero(offset, dtype):
    """Only differences matter."""
    outputs = torch.randn(3, 5, 8).to(dtype)
    lses = torch.randint(-3, 3, (3, 5)).float()
    expected, near = merge(outputs, lses)
    found, far = merge(outputs, lses + offset)
    assert torch.equal(found, expected)
    wide = torch.logsumexp(lses.double() + offset, 0)
    numerics.assert_close(far, wide, (near.double() + offset).float())


# ---- errors --------------------------------------------------------------------------------------

ONE, LSE = torch.randn(2, 3, 8), torch.randn(2, 3)
WRONG = [
    ([], [], "outputs must hold at least one tensor, got none"),
    (torch.zeros(0, 2, 3, 8), torch.zeros(0, 2, 3),
     "outputs must hold at least one tensor, got none"),
    (torch.tensor(1.0), [LSE], "outputs must have the parts in its first dimension, got none"),
    ([ONE], torch.tensor(1.0), "lses must have the parts in its first dimension, got none"),
    ([ONE, ONE], [LSE], "lses must hold as many tensors as outputs, 2, got 1"),
    ([ONE], [LSE, LSE], "lses must hold as many tensors as outputs, 1, got 2"),
    ([ONE, ONE[:1]], [LSE, LSE],
     "outputs must have one shape (..., dim) and dtype, got (2, 3, 8) float32 and (1, 3, 8) "
     "float32"),
    ([ONE, ONE.half()], [LSE, LSE],
     "outputs must have one shape (..., dim) and dtype, got (2, 3, 8) float32 and (2, 3, 8) "
     "float16"),
    ([ONE, ONE], [LSE, LSE[:, :2]],
     "lses must have shape (2, 3), that of outputs without the last dimension, got (2, 2)"),
    ([ONE], [LSE.t()],
     "lses must have shape (2, 3), that of outputs without the last dimension, got (3, 2)"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_messages(number):
    outputs, lses, message = WRONG[number]
    with pytest.raises(RuntimeError, match=f"^merge_attention_states: {re.escape(message)}$"):
        merge(outputs, lses)
