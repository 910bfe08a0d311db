"""What causal convolutions promise beside values: bits, memory orders, memory, errors."""

import pytest
import torch

from onepass import functional
from tests.causal_conv.test_values import F32, drawn, numbers_of, orders, results
from tests.support.refused import assert_refused

OPS = torch.ops.onepass


def ours(**options):
    def run(x, weight, bias, state):
        return functional.causal_conv1d(
            x, weight, bias, activation="silu", initial_state=state, **options
        )

    return run


@orders
def test_a_sequence_does_not_depend_on_what_it_is_packed_with(last):
    lengths = (5, 1, 520, 74)
    x, weight, bias, _ = drawn((1, 40, sum(lengths)), 4, F32, last)
    doutput = torch.randn(1, 40, sum(lengths))
    packed = results(ours(seq_idx=numbers_of(lengths)), (x, weight, bias, None), doutput)
    parts = (t.split(lengths, -1) for t in (x, doutput, *packed[:2]))
    for own, of_own, output, dx in zip(*parts, strict=True):
        alone = results(ours(), (own, weight, bias, None), of_own)
        assert torch.equal(alone[0], output) and torch.equal(alone[1], dx)


def test_the_memory_order_is_that_of_x():
    weight = torch.randn(6, 4)
    tokens, channels = torch.randn(2, 6, 9), torch.randn(2, 9, 6).transpose(1, 2)
    for x in (tokens, channels):
        x.requires_grad_()
        y = functional.causal_conv1d(x, weight)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        assert y.stride() == dx.stride() == x.stride()


def test_empty():
    for shape in ((0, 3, 5), (2, 0, 5), (2, 3, 0)):
        tensors = [torch.randn(shape), torch.randn(shape[1], 4), torch.randn(shape[1]), None]
        found = results(ours(), tensors, torch.randn(shape))
        assert [t.shape for t in found] == [shape, *(t.shape for t in tensors[:-1])]
        assert all(not t.any() for t in found[2:])


X, W, B = torch.randn(2, 3, 5), torch.randn(3, 4), torch.randn(3)
STATE, NUMBERS = torch.randn(2, 3, 3), torch.zeros(2, 5, dtype=torch.int64)
CU = torch.tensor([0, 5], dtype=torch.int32)
LIKE_X = "have dtype float32 like x"
WRONG = {
    "x must have shape (batch, channels, length), got (3, 5)": dict(x=X[0]),
    "weight must have shape (channels, width) for 3 channels, got (2, 4)": dict(weight=W[:2]),
    "weight must have a width of 2 to 8, got 1": dict(weight=W[:, :1]),
    "weight must have a width of 2 to 8, got 9": dict(weight=torch.randn(3, 9)),
    "weight must have dtype float32, bfloat16 or float16 beside x, got float64": (
        dict(weight=W.double())
    ),
    "bias must have shape (3,), got (2,)": dict(bias=B[:2]),
    "initial_state must have shape (2, 3, 3), got (2, 3, 2)": dict(initial_state=STATE[..., 1:]),
    f"initial_state must {LIKE_X}, got float16": dict(initial_state=STATE.half()),
    "seq_idx must be an int32 tensor of shape (2, 5), got (1, 5) of int32": (
        dict(seq_idx=NUMBERS[:1])
    ),
    "seq_idx must hold integers, got torch.float32": dict(seq_idx=NUMBERS.float()),
    "x must have a batch of 1 beside cu_seqlens, got 2": dict(cu_seqlens=CU),
}
EXCLUDE = {
    "activation must be None or 'silu', got 'gelu'": dict(activation="gelu"),
    "cu_seqlens must be None beside seq_idx, got both": dict(seq_idx=NUMBERS, cu_seqlens=CU),
    "initial_state must be None beside seq_idx": dict(seq_idx=NUMBERS, initial_state=STATE),
    "return_final_state must be False": dict(x=X[:1], cu_seqlens=CU, return_final_state=True),
}


def test_messages():
    assert_refused(functional.causal_conv1d, "causal_conv1d", dict(x=X, weight=W), WRONG)
    for message, given in EXCLUDE.items():
        with pytest.raises(ValueError, match=f"^causal_conv1d: {message}"):
            functional.causal_conv1d(**{"x": X, "weight": W, **given})
    right = dict(x=X, weight=W, bias=B, initial_state=STATE, seq_idx=None)
    right |= dict(silu=True, channels_last=False)
    message = "initial_state must not be given beside seq_idx, got one"
    wrong = {message: dict(seq_idx=NUMBERS.int())}
    assert_refused(OPS.causal_conv1d_forward, "causal_conv1d", right, wrong)
    wrong = {
        f"doutput must {LIKE_X}, got float16": dict(doutput=X.half()),
        "doutput must have shape (2, 3, 5), got (2, 3, 4)": dict(doutput=X[..., 1:]),
    }
    right |= dict(doutput=X, grad_mask=15)
    assert_refused(OPS.causal_conv1d_backward, "causal_conv1d_backward", right, wrong)
