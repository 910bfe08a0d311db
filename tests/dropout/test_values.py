"""Dropout and add_dropout: the stream, gradients, and randomness as in torch."""

import math

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional, numerics, reference
from tests.emulator.executors import everywhere
from tests.support.dtypes import F32
from tests.support.refused import assert_refused
from tests.support.seeds import drawn_seed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PROBABILITIES = (1e-6, 0.1, 0.5, 32768.5 / 65536, 0.9, 1.0)


# ---- values and gradients -----------------------------------------------------------------------


@everywhere
@pytest.mark.isa
@pytest.mark.grid(3)
@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 127, 511, 512, 513, 4099, 100_003])
def test_the_stream_is_the_references(p, numel):
    x = torch.randn(numel)
    seed = drawn_seed(5)
    torch.manual_seed(5)
    assert torch.equal(functional.dropout(x, p), reference.dropout.dropout(x, p, seed))


@everywhere
@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stream", [None, "same", "wide"])
def test_values_and_gradients_in_every_dtype(stream, dtype):
    """Of dropout, and of add_dropout, whose result has the residual's dtype."""
    out_dtype = F32 if stream == "wide" and dtype != torch.float64 else dtype
    x, r, g = (torch.randn(33, 65).to(d) for d in (dtype, out_dtype, out_dtype))
    leaves = [x.requires_grad_(), r.requires_grad_()][: 1 + bool(stream)]
    seed = drawn_seed(5)
    torch.manual_seed(5)
    y = functional.add_dropout(x, r, 0.3) if stream else functional.dropout(x, 0.3)
    dx, *dr = torch.autograd.grad(y, leaves, g)
    assert y.dtype == out_dtype and dx.dtype == dtype and all(torch.equal(d, g) for d in dr)
    of = reference.dropout.add_dropout if stream else reference.dropout.dropout
    given = [leaf.detach() for leaf in leaves]
    numerics.assert_close(y, of(*(t.double() for t in given), 0.3, seed), of(*given, 0.3, seed))
    factor = reference.dropout.keep_scale(seed, g.numel(), 0.3, torch.float64).view(g.shape)
    numerics.assert_close(dx, g.double() * factor, (g * factor.to(g.dtype)).to(dtype))


@everywhere
@pytest.mark.isa
def test_scales_beyond_float16():
    """One element in 65,536 kept, scaled by 65,536: the product fits where the factor does not."""
    x = torch.full((400_000,), 0.5, dtype=torch.float16)
    seed = drawn_seed(5)
    torch.manual_seed(5)
    y = functional.dropout(x, 65535 / 65536)
    ref = reference.dropout.dropout(x.double(), 65535 / 65536, seed)
    assert (ref == 32768).any()
    assert torch.equal(y.double(), ref)


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_probability_out_of_range(p):
    x = torch.ones(3)
    with pytest.raises(ValueError, match="dropout: p must lie between 0 and 1"):
        functional.dropout(x, p)
    with pytest.raises(ValueError, match="add_dropout: p must lie between 0 and 1"):
        functional.add_dropout(x, x, p)
    with pytest.raises(RuntimeError, match="^dropout: p must lie between 0 and 1, got"):
        torch.ops.onepass.dropout_forward(x, None, drawn_seed(0), p, None)
    if p == p:
        with pytest.raises(ValueError, match="dropout probability"):
            onepass.nn.Dropout(p)


def test_messages():
    x = torch.ones(3, 4)
    seed = torch.zeros(2, dtype=torch.int64)
    right = dict(input=x, residual=None, seed=seed, p=0.5, out_dtype=None)
    must = "seed must be a dense int64 tensor of shape (2,) on cpu, got"
    wrong = {
        "input must have dtype float32, bfloat16, float16 or float64, got int64": (
            dict(input=x.long())
        ),
        f"{must} (2,) of float32 on cpu": dict(seed=seed.float()),
        "seed must be given but for p = 0 with a residual, got none": dict(seed=None),
    }
    assert_refused(torch.ops.onepass.dropout_forward, "dropout", right, wrong)
    wrong = {
        "residual must have shape (3, 4), got (4,)": dict(residual=x[0]),
        "out_dtype must not be given with a residual, got one": dict(out_dtype=F32),
        "residual must be on the device of input, cpu, got meta": dict(residual=x.to("meta")),
    }
    assert_refused(torch.ops.onepass.dropout_forward, "add_dropout", right | {"residual": x}, wrong)


# ---- layouts ------------------------------------------------------------------------------------


@everywhere
def test_fate_follows_the_logical_index_whatever_the_strides():
    x = torch.randn(6, 5, 8)
    torch.manual_seed(1)
    expected = functional.dropout(x, 0.5)
    for layout in (x.transpose(0, 2).contiguous().transpose(0, 2), torch.cat([x, x], 2)[..., :8]):
        torch.manual_seed(1)
        assert torch.equal(functional.dropout(layout, 0.5), expected)
        torch.manual_seed(1)
        assert torch.equal(functional.add_dropout(x, layout, 0.5), x + expected)


@everywhere
@pytest.mark.parametrize("size", [(0,), (3, 0), ()])
def test_empty_and_scalar(size):
    x = torch.ones(size, requires_grad=True)
    y = functional.dropout(x, 0.5)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape


# ---- randomness ---------------------------------------------------------------------------------


@everywhere
def test_manual_seed():
    x = torch.randn(1000)
    torch.manual_seed(1)
    first, second = functional.dropout(x), functional.dropout(x)
    torch.manual_seed(1)
    assert torch.equal(functional.dropout(x), first)
    assert not torch.equal(first, second)


def test_nothing_is_drawn_when_nothing_is_dropped():
    x = torch.randn(10)
    state = torch.get_rng_state()
    assert functional.dropout(x, 0.0) is x
    assert functional.dropout(x, 0.5, training=False) is x
    assert torch.equal(functional.add_dropout(x, x, 0.0), x + x)
    assert torch.equal(functional.add_dropout(x, x, 0.5, training=False), x + x)
    module = onepass.nn.Dropout(0.5).eval()
    assert module(x) is x
    assert torch.equal(state, torch.get_rng_state())


@everywhere
def test_nan_and_infinity_show_through_as_in_torch():
    x = torch.tensor([float("nan"), float("inf"), -float("inf")] * 50)
    for p in (0.5, 1.0):
        torch.manual_seed(0)
        ours = functional.dropout(x, p)
        # Kept infinities stay, dropped ones are inf * 0: as in torch, never 0.
        assert (ours.isnan() | ours.isinf()).all()
        stock = F.dropout(x, p)
        assert (stock.isnan() | stock.isinf()).all()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate_and_neighbours(p):
    """Five standard deviations of a binomial: a false alarm once in 1.7 million runs per assert.

    Dropped pairs at distance 1, 8 (one block) and 128 (one vector of blocks) are independent.
    """
    n = 1_000_000
    torch.manual_seed(11)
    dropped = functional.dropout(torch.ones(n), p) == 0
    quantised = round(65536 * p) / 65536
    tolerance = 5 * math.sqrt(quantised * (1 - quantised) / n)
    assert abs(dropped.double().mean() - quantised) < tolerance
    pair = quantised**2
    for distance in (1, 8, 128):
        both = (dropped[distance:] & dropped[:-distance]).double().mean()
        # Overlapping pairs are correlated: their variance is at most three times a binomial's.
        assert abs(both - pair) < 5 * math.sqrt(3 * pair * (1 - pair) / n)


# ---- beside torch's dropout, which must pass the same tests --------------------------------------

functions = pytest.mark.parametrize("function", [functional.dropout, F.dropout])


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.3, 0.77])
def test_16_bit_results_are_rounded_once(dtype, p):
    """The scale stays in float32. torch rounds it to the tensor's dtype: 0.16 % at p = 0.1,
    which a bound from torch's own error does not see."""
    x = torch.randn(10_007).to(dtype)  # no multiple of a vector or a block
    factor = reference.dropout.keep_scale(drawn_seed(5), x.numel(), p)
    torch.manual_seed(5)
    assert torch.equal(functional.dropout(x, p), (x.float() * factor).to(dtype))
    torch.manual_seed(5)
    residual = torch.zeros(x.shape)
    assert torch.equal(functional.add_dropout(x, residual, p), x.float() * factor)


@functions
def test_in_place_on_a_strided_view_writes_the_view_alone(function):
    x = torch.ones(3, 8)
    view = x[:, ::2]
    assert function(view, 1.0, True, True) is view
    assert torch.equal(x[:, ::2], torch.zeros(3, 4)) and torch.equal(x[:, 1::2], torch.ones(3, 4))


@functions
def test_in_place_on_an_expanded_tensor_is_refused(function):
    x = torch.ones(1, 4).expand(3, 4)
    with pytest.raises(RuntimeError):
        function(x, 0.5, True, True)
    assert torch.equal(x, torch.ones(3, 4))


@functions
def test_in_place_on_a_view_of_a_hidden_tensor_reaches_its_gradient(function):
    leaf = torch.ones(4, 4, requires_grad=True)
    hidden = leaf * 2
    function(hidden[1], 1.0, True, True)
    hidden.sum().backward()
    expected = torch.full((4, 4), 2.0)
    expected[1] = 0
    assert torch.equal(leaf.grad, expected)


def test_inplace_and_vmap_of_samples_that_are_not_contiguous():
    x = torch.ones(3, 2, 4, 5, 6).transpose(2, 3)
    y = torch.vmap(onepass.nn.Dropout(0.5), randomness="different")(x)
    assert y.shape == x.shape and 0 < int((y == 0).sum()) < y.numel()
    torch.manual_seed(1)
    expected = functional.dropout(x, 0.5)
    torch.manual_seed(1)
    assert onepass.nn.Dropout(0.5, inplace=True)(x) is x and torch.equal(x, expected)
