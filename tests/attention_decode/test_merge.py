"""merge_attention_states: merged attention to parts of the keys equals attention to all keys."""

import math
import re

import pytest
import torch
from torch import Tensor

from onepass import functional, numerics, reference
from tests.attention_decode.cases import NAN, equal
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


def split(attend, q, k, v, cuts, **options) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and log-sum-exps of parts of the keys, with the same seed for each."""
    parts, first = [], 0
    for key, value in zip(*(x.tensor_split(cuts, 2) for x in (k, v)), strict=True):
        torch.manual_seed(5)
        offset = {"key_offset": first} if options else {}
        parts.append(attend(q, key, value, **options, **offset))
        first += key.shape[2]
    return [output for output, _ in parts], [lse for _, lse in parts]


def ours(q, k, v, **options):
    return functional.scaled_dot_product_attention(q, k, v, return_lse=True, **options)


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


SLOPES = torch.tensor([0.5, 0.25, 0.1])
OPTIONS = {
    "causal": dict(is_causal=True),
    "window": dict(window_size=(9, 4)),
    "alibi": dict(is_causal=True, alibi_slopes=SLOPES),
    "dropout": dict(is_causal=True, dropout_p=0.4),
    "all": dict(window_size=(20, 3), alibi_slopes=SLOPES, dropout_p=0.2, softcap=3.0),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("cut", ["two", "odd"])
def test_parts_of_keys_have_positions(cut, name):
    """Output, log-sum-exp and gradients; the cuts lie within a tile, and within the eight keys that
    share a draw."""
    found = []
    for dtype, cuts in ((F32, CUTS[cut]), (F64, ()), (F32, ())):
        leaves = [x.to(dtype).requires_grad_() for x in inputs(F32)]
        output, lse = merge(*split(ours, *leaves, cuts, **OPTIONS[name], query_offset=60))
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        found.append((output, lse, *torch.autograd.grad(output, leaves, upstream)))
    for three in zip(*found, strict=True):
        numerics.assert_close(*three, name)


@dtypes
def test_a_stacked_tensor_is_as_good_as_a_list(dtype):
    outputs, lses = split(ours, *inputs(dtype), CUTS["odd"])
    stacked, expected = torch.stack(outputs), merge(outputs, lses)
    for given in (stacked, tuple(outputs), torch.stack(outputs, 1).unbind(1)):
        assert all(map(equal, merge(given, torch.stack(lses)), expected))


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
ONE_SHAPE = "outputs must have one shape (..., dim) and dtype, got (2, 3, 8) float32 and"
OF_LSES = "lses must have shape (2, 3), that of outputs without the last dimension, got"
WRONG = [
    ([], [], "outputs must hold at least one tensor, got none"),
    (torch.zeros(0, 2, 8), torch.zeros(0, 2), "outputs must hold at least one tensor, got none"),
    (torch.tensor(1.0), [LSE], "outputs must have the parts in its first dimension, got none"),
    ([ONE], torch.tensor(1.0), "lses must have the parts in its first dimension, got none"),
    ([ONE, ONE], [LSE], "lses must hold as many tensors as outputs, 2, got 1"),
    ([ONE], [LSE, LSE], "lses must hold as many tensors as outputs, 1, got 2"),
    ([ONE, ONE[:1]], [LSE, LSE], f"{ONE_SHAPE} (1, 3, 8) float32"),
    ([ONE, ONE.half()], [LSE, LSE], f"{ONE_SHAPE} (2, 3, 8) float16"),
    ([ONE, ONE], [LSE, LSE[:, :2]], f"{OF_LSES} (2, 2)"),
    ([ONE], [LSE.t()], f"{OF_LSES} (3, 2)"),
]  # fmt: skip


def test_messages():
    for outputs, lses, message in WRONG:
        with pytest.raises(RuntimeError, match=f"^merge_attention_states: {re.escape(message)}$"):
            merge(outputs, lses)
