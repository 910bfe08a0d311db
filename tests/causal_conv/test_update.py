"""Causal convolutions of tokens while decoding, the latest inputs in place."""

import pytest
import torch

from onepass import functional, numerics
from onepass.reference.causal_conv import causal_conv1d_update as formula
from tests.causal_conv.test_values import BF16, F32, F64, dtypes
from tests.support.refused import assert_refused

update = functional.causal_conv1d_update

pytestmark = pytest.mark.isa


def drawn(batch, channels, tokens, width, before, dtype, weight_dtype=None):
    """x, conv_state, weight and bias."""
    tensors = {"x": torch.randn(batch, channels, tokens).to(dtype)}
    tensors["conv_state"] = torch.randn(batch, channels, before).to(dtype)
    tensors["weight"] = (torch.randn(channels, width) / width**0.5).to(weight_dtype or dtype)
    return tensors | {"bias": torch.randn(channels).to(weight_dtype or dtype)}


def results(tensors, activation="silu"):
    state = tensors["conv_state"].clone()
    return update(**tensors | {"conv_state": state}, activation=activation), state


@dtypes
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width, before", [(2, 1), (3, 3), (4, 3), (4, 4), (8, 7), (4, 9)])
@pytest.mark.grid(2)
def test_values(width, before, activation, dtype):
    draws, wide = [], torch.promote_types(dtype, F32)
    for tokens in (1, 1, 2, 5):
        tensors = drawn(3, 37, tokens, width, before, dtype)
        output, state = results(tensors, activation)
        after = torch.cat((tensors["conv_state"], tensors["x"]), -1)[..., tokens:]
        assert torch.equal(state, after)
        given = [tensors[n] for n in ("x", "conv_state", "weight", "bias")]
        exact = formula(*(t.double() for t in given), activation)[0]
        base = formula(*(t.to(wide) for t in given), activation)[0].to(dtype)
        draws.append([output, exact, base])
    numerics.assert_close(*map(list, zip(*draws, strict=True)), "output")


@pytest.mark.parametrize("last", [False, True], ids=["tokens dense", "channels dense"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_token_by_token_is_the_convolution(dtype, last):
    """Bit for bit."""
    tensors = drawn(2, 21, 9, 4, 3, dtype, F32)
    x, weight, bias = tensors["x"], tensors["weight"], tensors["bias"]
    x = x.mT.contiguous().mT if last else x
    state = torch.zeros(2, 21, 3, dtype=dtype)
    found = [update(token, state, weight, bias, "silu") for token in x.unbind(-1)]
    whole = functional.causal_conv1d(x, weight, bias, activation="silu")
    assert torch.equal(torch.stack(found, -1), whole)
    assert torch.equal(state, x[..., -3:])


def test_the_same_bits_for_any_number_of_threads():
    tensors = drawn(5, 700, 2, 4, 4, F32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(tensors))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


def test_any_strides_are_read_and_written_in_place():
    tensors = drawn(2, 11, 3, 4, 4, F32)
    expected = results(tensors)
    for name, tensor in tensors.items():
        wide = torch.full((*tensor.shape, 3), float("nan"))
        wide[..., 1] = tensor
        given = tensors | {"conv_state": tensors["conv_state"].clone()} | {name: wide[..., 1]}
        output = update(**given, activation="silu")
        assert torch.equal(output, expected[0]), name
        assert torch.equal(given["conv_state"], expected[1]), name
        assert wide[..., ::2].isnan().all(), name  # nothing beside the state was written


@pytest.mark.parametrize("shape", [(0, 3, 1), (2, 0, 1), (2, 3, 0)], ids=str)
def test_empty(shape):
    tensors = drawn(*shape, 4, 3, F32)
    output, state = results(tensors)
    assert output.shape == shape and torch.equal(state, tensors["conv_state"])


def test_where_a_gradient_is_wanted():
    tensors = drawn(2, 5, 2, 4, 4, F64)
    leaves = {n: t.clone().requires_grad_(n != "conv_state") for n, t in tensors.items()}
    output, state = update(**leaves, activation="silu"), leaves["conv_state"]
    again = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    y, after = formula(*(again[n] for n in ("x", "conv_state", "weight", "bias")), "silu")
    numerics.assert_close([output.detach()], [y.detach()], [y.detach()], "output")
    assert torch.equal(state, after)
    names = [n for n in tensors if n != "conv_state"]
    found = torch.autograd.grad((output * 3).sum() + state.sum(), [leaves[n] for n in names])
    wanted = torch.autograd.grad((y * 3).sum() + after.sum(), [again[n] for n in names])
    for name, one, other in zip(names, found, wanted, strict=True):
        numerics.assert_close([one], [other], [other], name)


def test_where_a_gradient_is_wanted_in_compiled_code():
    tensors = drawn(2, 5, 2, 4, 4, F32)
    after = results(tensors)[1]
    given = [tensors[n].clone() for n in ("x", "conv_state", "weight", "bias")]
    exact, base = (formula(*(t.to(d) for t in given), "silu")[0] for d in (F64, F32))
    tensors["x"].requires_grad_()
    compiled = torch.compile(update, backend="eager", fullgraph=True)
    output = compiled(**tensors, activation="silu")
    assert output.requires_grad and torch.equal(tensors["conv_state"], after)
    numerics.assert_close([output.detach()], [exact], [base], "output")


def test_autograd_knows_that_the_state_has_changed():
    tensors = drawn(2, 5, 1, 4, 4, F32)
    version = tensors["conv_state"]._version
    update(**tensors)
    assert tensors["conv_state"]._version > version


def test_a_number_that_is_not_finite_reaches_its_channel_alone():
    tensors = drawn(2, 19, 1, 4, 3, F32)
    clean = results(tensors)[0]
    tensors["x"][1, 4] = float("nan")
    found = results(tensors)[0]
    reached = torch.zeros(2, 19, 1, dtype=torch.bool)
    reached[1, 4] = True
    assert found[reached].isnan().all() and torch.equal(found[~reached], clean[~reached])


RIGHT = drawn(2, 3, 5, 4, 4, F32)
STATE = RIGHT["conv_state"]
WRONG = {
    "x must have shape (batch, channels) or (batch, channels, tokens), got (3,)": (
        dict(x=RIGHT["x"][0, :, 0])
    ),
    "weight must have shape (channels, width) for 3 channels, got (2, 4)": (
        dict(weight=RIGHT["weight"][1:])
    ),
    "weight must have a width of 2 to 8, got 1": dict(weight=RIGHT["weight"][:, :1]),
    "bias must have shape (3,), got (2,)": dict(bias=RIGHT["bias"][1:]),
    "conv_state must have shape (batch, channels, at least 3), got (2, 3, 2)": (
        dict(conv_state=STATE[..., 2:])
    ),
    "conv_state must have shape (2, 3, 4), got (2, 2, 4)": dict(conv_state=STATE[:, 1:]),
    "conv_state must have dtype float32 like x, got float16": dict(conv_state=STATE.half()),
    "conv_state must have a place for each element, it is updated in place, got shape (2, 3, 4) "
    "with strides (0, 4, 1)": dict(conv_state=STATE[:1].expand(2, -1, -1)),
    "x must lie apart from conv_state, which is updated in place, got shared memory": (
        dict(x=STATE[..., :1])
    ),
    "bias must lie apart from conv_state, which is updated in place, got shared memory": (
        dict(bias=STATE[0, :, 0])
    ),
}


def test_messages():
    assert_refused(update, "causal_conv1d_update", RIGHT, WRONG)
    with pytest.raises(ValueError, match=r"^causal_conv1d_update: activation must be None or"):
        update(**RIGHT, activation="gelu")
