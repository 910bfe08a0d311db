"""What causal convolutions promise beside values: bits, memory orders, memory, errors."""

from __future__ import annotations

import pytest
import torch

from onepass import functional
from tests.causal_conv.test_values import F32, drawn, numbers_of, orders, results

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


def test_nothing_but_x_is_kept():
    x, weight, bias, _ = drawn((1, 32, 64), 4, F32, False)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional.causal_conv1d(x, weight.requires_grad_(), bias, activation="silu")
    assert max(kept) == 32 * 64 and sorted(kept)[-2] == weight.numel()


def test_empty():
    for shape in ((0, 3, 5), (2, 0, 5), (2, 3, 0)):
        tensors = [torch.randn(shape), torch.randn(shape[1], 4), torch.randn(shape[1]), None]
        found = results(ours(), tensors, torch.randn(shape))
        assert [t.shape for t in found] == [shape, *(t.shape for t in tensors[:-1])]
        assert all(not t.any() for t in found[2:])


X, W, B = torch.randn(2, 3, 5), torch.randn(3, 4), torch.randn(3)
STATE, NUMBERS = torch.randn(2, 3, 3), torch.zeros(2, 5, dtype=torch.int64)
CU = torch.tensor([0, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(x=X[0]), r"x must have shape \(batch, channels, length\), got \(3, 5\)"),
        (dict(weight=W[:2]), r"weight must have shape \(channels, width\) for 3 channels, got"),
        (dict(weight=W[:, :1]), "weight must have a width of 2 to 8, got 1"),
        (dict(weight=torch.randn(3, 9)), "weight must have a width of 2 to 8, got 9"),
        (dict(weight=W.double()), "weight must have dtype float32, bfloat16 or float16 beside x"),
        (dict(bias=B[:2]), r"bias must have shape \(3,\), got \(2,\)"),
        (dict(initial_state=STATE[..., 1:]), r"initial_state must have shape \(2, 3, 3\), got"),
        (dict(initial_state=STATE.half()), "initial_state must have dtype float32 like x, got"),
        (dict(seq_idx=NUMBERS[:1]), r"seq_idx must be an int32 tensor of shape \(2, 5\), got"),
        (dict(seq_idx=NUMBERS.float()), "seq_idx must hold integers, got torch.float32"),
        (dict(cu_seqlens=CU), "x must have a batch of 1 beside cu_seqlens, got 2"),
    ],
)  # fmt: skip
def test_errors(given, message):
    with pytest.raises(RuntimeError, match=f"^causal_conv1d: {message}"):
        functional.causal_conv1d(**{"x": X, "weight": W, **given})


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(activation="gelu"), "activation must be None or 'silu', got 'gelu'"),
        (dict(seq_idx=NUMBERS, cu_seqlens=CU), "cu_seqlens must be None beside seq_idx, got both"),
        (dict(seq_idx=NUMBERS, initial_state=STATE), "initial_state must be None beside seq_idx"),
        (dict(x=X[:1], cu_seqlens=CU, return_final_state=True), "return_final_state must be False"),
    ],
)  # fmt: skip
def test_arguments_that_exclude_each_other(given, message):
    with pytest.raises(ValueError, match=f"^causal_conv1d: {message}"):
        functional.causal_conv1d(**{"x": X, "weight": W, **given})


def test_a_state_beside_numbers_is_refused_by_the_operator():
    message = "causal_conv1d: initial_state must not be given beside seq_idx, got one"
    with pytest.raises(RuntimeError, match=f"^{message}"):
        OPS.causal_conv1d_forward(X, W, B, STATE, NUMBERS.int(), True, False)


def test_errors_of_the_backward():
    arguments = (X, W, B, None, None, True, False, 15)
    message = "^causal_conv1d_backward: doutput must have dtype float32 like x"
    with pytest.raises(RuntimeError, match=message):
        OPS.causal_conv1d_backward(X.half(), *arguments)
    with pytest.raises(RuntimeError, match=r"doutput must have shape \(2, 3, 5\), got"):
        OPS.causal_conv1d_backward(X[..., 1:], *arguments)
