"""What selective scans promise beside values: bits, memory orders, memory, errors."""

import pytest
import torch

from onepass import functional
from tests.selective_scan.test_values import F16, F32, F64, drawn, orders, ours
from tests.support.refused import assert_refused
from tests.support.scans import results

OPS = torch.ops.onepass
WHOLE = ours(delta_softplus=True)


def upstream_of(shape, state):
    return torch.randn(shape), torch.randn(shape[0], shape[1], state)


@orders
def test_the_same_bits_for_any_number_of_threads(last):
    shape = (2, 300, 140)
    tensors, upstream = drawn(shape, 8, F32, last, groups=2), upstream_of(shape, 8)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(WHOLE, tensors, upstream))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


@orders
def test_a_sequence_does_not_depend_on_what_it_is_packed_with(last):
    lengths = (5, 1, 300, 74)
    tensors = drawn((1, 40, sum(lengths)), 8, F32, last, without=("initial_state",))
    doutput, dlast = torch.randn(1, 40, sum(lengths)), torch.randn(len(lengths), 40, 8)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    packed = ours(delta_softplus=True, cu_seqlens=ends)
    found = results(packed, tensors, (doutput, dlast))
    found = dict(zip(("output", "last", *tensors), found, strict=True))
    for i, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        own = {n: t[..., begin:end] if t.dim() == 3 else t for n, t in tensors.items()}
        upstream = doutput[..., begin:end], dlast[i : i + 1]
        alone = results(WHOLE, own, upstream)
        alone = dict(zip(("output", "last", *tensors), alone, strict=True))
        assert torch.equal(found["last"][i : i + 1], alone["last"])
        for name in ("output", "u", "delta", "B", "C", "z"):
            assert torch.equal(found[name][..., begin:end], alone[name]), name


def test_a_sample_does_not_depend_on_its_batch():
    shape = (3, 21, 150)
    tensors, upstream = drawn(shape, 8, F32), upstream_of(shape, 8)
    found = dict(zip(("output", "last", *tensors), results(WHOLE, tensors, upstream), strict=True))
    shared = ("A", "D", "delta_bias")
    own = {n: t if n in shared else t[1:2] for n, t in tensors.items()}
    alone = results(WHOLE, own, [d[1:2] for d in upstream])
    for name, value in zip(("output", "last", *tensors), alone, strict=True):
        assert name in shared or torch.equal(found[name][1:2], value), name


@orders
@pytest.mark.parametrize("length", [128, 256])
def test_calls_after_each_other_are_one_call(length, last):
    """Bit for bit, where a call ends with a chunk."""
    tensors = drawn((2, 6, 300), 4, F32, last)
    whole, end = WHOLE(**tensors)
    state, outputs = tensors["initial_state"], []
    for begin in range(0, 300, length):
        part = {n: t[..., begin : begin + length] for n, t in tensors.items() if n in "uBCzdelta"}
        output, state = WHOLE(**tensors | part | {"initial_state": state})
        outputs.append(output)
    assert torch.equal(torch.cat(outputs, -1), whole)
    assert torch.equal(state, end)


def test_the_memory_order_is_that_of_u():
    for last in (False, True):
        tensors = drawn((2, 6, 9), 4, F32, last)
        u = torch.randn(2, 9, 6).mT if last else torch.randn(2, 6, 9)
        y = functional.selective_scan(**tensors | {"u": u.requires_grad_()})
        (du,) = torch.autograd.grad(y.square().sum(), u)
        assert y.stride() == du.stride() == u.stride()


def test_any_strides_are_read_in_place():
    tensors = drawn((2, 20, 30), 4, F32)
    expected = WHOLE(**tensors)
    for name, tensor in tensors.items():
        wide = torch.full((*tensor.shape, 3), float("nan"))
        wide[..., 1] = tensor
        found = WHOLE(**tensors | {name: wide[..., 1]})
        assert all(map(torch.equal, found, expected)), name


def test_memory_grows_with_the_length_alone():
    """A state of 128 tokens is saved, not that of each."""
    tensors = {n: t.requires_grad_() for n, t in drawn((1, 8, 1024), 16, F32).items()}
    given, saved = {t.data_ptr() for t in tensors.values()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.selective_scan(**tensors)
    own = [t for t in saved if t.data_ptr() not in given]
    assert [t.shape for t in own] == [(1, 1024 // 128, 16, 8)]


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=str)
def test_empty(shape):
    tensors, upstream = drawn(shape, 4, F32), upstream_of(shape, 4)
    output, last, *gradients = results(WHOLE, tensors, upstream)
    assert output.shape == shape and torch.equal(last, tensors["initial_state"])
    for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True):
        assert gradient.shape == tensor.shape
        assert torch.equal(gradient, upstream[1]) if name == "initial_state" else not gradient.any()


SHAPE = (2, 4, 5)
RIGHT = {n: torch.ones_like(t) for n, t in drawn(SHAPE, 3, F32).items()}
ENDS = torch.tensor([0, 5], dtype=torch.int32)
OTHER = "have dtype float32, bfloat16 or float16 beside u, got float64"
WRONG = {
    "u must have shape (batch, channels, length), got (4, 5)": dict(u=RIGHT["u"][0]),
    "delta must have shape (2, 4, 5), got (2, 4, 4)": dict(delta=RIGHT["u"][..., 1:]),
    "A must have shape (channels, state) for 4 channels, got (3, 3)": dict(A=RIGHT["A"][1:]),
    "A must have shape (channels, state) for 4 channels, got (4, 0)": dict(A=RIGHT["A"][:, :0]),
    "B must have shape (2, 3, 5), got (2, 2, 5)": dict(B=RIGHT["B"][:, 1:]),
    "B must have a number of groups that divides 4 channels, got 3": (
        dict(B=torch.ones(2, 3, 3, 5), C=torch.ones(2, 3, 3, 5))
    ),
    "C must have shape (2, 3, 5), got (2, 1, 3, 5)": dict(C=RIGHT["C"][:, None]),
    "D must have shape (4,), got (3,)": dict(D=RIGHT["D"][1:]),
    "z must have shape (2, 4, 5), got (2, 3, 5)": dict(z=RIGHT["z"][:, 1:]),
    "delta_bias must have shape (4,), got (3,)": dict(delta_bias=RIGHT["D"][1:]),
    "initial_state must have shape (2, 4, 3), got (1, 4, 3)": (
        dict(initial_state=RIGHT["initial_state"][1:])
    ),
    **{f"{name} must {OTHER}": {name: t.to(F64)} for name, t in RIGHT.items() if name != "u"},
    "u must have a batch of 1 beside cu_seqlens, got 2": dict(cu_seqlens=ENDS),
    "cu_seqlens must hold integers, got torch.float32": dict(cu_seqlens=ENDS.float()),
    "cu_seqlens must be an int32 tensor of shape (sequences + 1,), got (1, 2) of int32": (
        dict(cu_seqlens=ENDS[None])
    ),
}


def test_messages():
    assert_refused(functional.selective_scan, "selective_scan", RIGHT, WRONG)
    one = {n: t[:1] if t.dim() == 3 else t for n, t in RIGHT.items()}
    wrong = {
        "cu_seqlens must begin with 0, got 1": dict(cu_seqlens=ENDS.clamp(1)),
        "cu_seqlens must end with the length of u, 5, got 4": dict(cu_seqlens=ENDS.clamp(0, 4)),
        "cu_seqlens must not decrease, got 2 after 3": (
            dict(cu_seqlens=torch.tensor([0, 3, 2, 5]), initial_state=None)
        ),
        "cu_seqlens must not decrease, got 5 after 2147483647": (
            dict(cu_seqlens=torch.tensor([0, 2**32 + 1, 5]), initial_state=None)
        ),
    }
    assert_refused(functional.selective_scan, "selective_scan", one, wrong)
    backward = RIGHT | dict(doutput=RIGHT["u"], dlast_state=RIGHT["initial_state"])
    backward |= dict(states=torch.ones(2, 1, 3, 4), cu_seqlens=None, delta_softplus=True)
    backward |= dict(channels_last=False, grad_mask=511)
    wrong = {
        "doutput must have dtype float32 like u, got float16": dict(doutput=RIGHT["u"].to(F16)),
        "doutput must have shape (2, 4, 5), got (2, 4, 4)": dict(doutput=RIGHT["u"][..., 1:]),
        "dlast_state must have shape (2, 4, 3), got (1, 4, 3)": (
            dict(dlast_state=RIGHT["initial_state"][1:])
        ),
        "states must have shape (2, 1, 3, 4), got (2, 2, 3, 4)": dict(
            states=torch.ones(2, 2, 3, 4)
        ),
        "states must have dtype float32, got float16": dict(states=torch.ones(2, 1, 3, 4).half()),
    }
    assert_refused(OPS.selective_scan_backward, "selective_scan_backward", backward, wrong)
