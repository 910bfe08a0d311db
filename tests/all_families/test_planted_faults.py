"""The suite itself: a small operator passes its tests, and with one planted fault it fails."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.all_families import (
    test_autocast,
    test_checkpointing,
    test_compiled,
    test_derivatives,
    test_func_transforms,
    test_messages,
    test_opcheck,
)
from tests.support.calls import CALLS, SAMPLES, Call
from tests.support.calls.call import randn

F32 = torch.float32
calls = itertools.count()


class Scale(torch.autograd.Function):
    """(x w, x), of rows x and a weight of their columns."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w, fault):
        return x * w, x.clone()

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        x, w, ctx.fault = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx, dy, dx):
        (x, w), fault, needs = ctx.saved_tensors, ctx.fault, ctx.needs_input_grad
        if dy is None:
            return dx, torch.ones_like(w) if fault == "a result that nobody uses" else None, None
        if fault == "another formula with create_graph" and torch.is_grad_enabled():
            dy = dy * (1 + 1e-6)
        through = dy * (w.detach() if fault == "no second derivative" else w)
        if dx is not None and fault != "a gradient is dropped":
            through = through + dx
        dw = (dy * x).sum_to_size(w.shape)
        if fault == "the wrong bit of a mask" and not needs[1]:
            through = torch.zeros_like(through)
        return through, dw, None


class Mixed(Scale):
    """Under vmap every slice gets the first."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x, w, fault):
        results = Scale.apply(*(t if d is None else t.movedim(d, 0)[:1] for t, d in
                                zip((x, w), in_dims, strict=False)), fault)  # fmt: skip
        return tuple(y.expand(info.batch_size, *y.shape[1:]) for y in results), (0, 0)


def scale(fault: str) -> Call:
    def run(x, w):
        without = isinstance(x, FakeTensor) or x.is_meta
        if x.shape[-1:] != w.shape[-1:] and not (fault == "no message without data" and without):
            raise RuntimeError(f"scale: w must have shape {x.shape[-1:]}, got {w.shape}")
        if without and fault == "no message without data":
            return [torch.empty_like(x)]
        function = Mixed if fault == "slices are mixed" else Scale
        y, copy = function.apply(x, w, fault)
        if fault == "autocast gives another dtype" and torch.is_autocast_enabled("cpu"):
            y = y.to(torch.bfloat16)
        if fault == "drawn anew when recomputed":
            y = y * (1 + next(calls))
        if fault == "another order without data" and without:
            y = y.contiguous()
        if fault == "compiled to something else" and torch.compiler.is_compiling():
            y = y + 1e-6
        return [y, copy]

    def tensors():
        return {"x": randn(4, 6), "w": randn(6, seed=1)}

    def stock(x, w):
        return [x * w, x.clone()]

    return Call(fault, tensors, run, stock, differentiable=True, grows={"x": (0,)})


FAULTS = {
    "a gradient is dropped": lambda n: test_derivatives.test_gradcheck(n),
    "no second derivative": lambda n: test_derivatives.test_gradcheck(n),
    "another formula with create_graph": lambda n: (
        test_derivatives.test_gradients_are_the_same_whatever_is_asked_for(n, F32)
    ),
    "the wrong bit of a mask": lambda n: (
        test_derivatives.test_gradients_are_the_same_whatever_is_asked_for(n, F32)
    ),
    "a result that nobody uses": lambda n: test_derivatives.test_a_result_that_nobody_uses(n),
    "another order without data": lambda n: test_opcheck.test_calls_without_data(
        n, test_opcheck.strided, F32
    ),
    "no message without data": lambda n: test_messages.test_without_data(n),
    "slices are mixed": lambda n: test_func_transforms.test_every_operator_under_vmap(n),
    "autocast gives another dtype": lambda n: test_autocast.test_dtypes_are_torchs(
        n, F32, torch.bfloat16
    ),
    "drawn anew when recomputed": lambda n: (
        test_checkpointing.test_every_operator_is_recomputed_bit_for_bit(n)
    ),
    "compiled to something else": lambda n: test_compiled.test_one_graph_for_all_sizes(
        n, "aot_eager"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    monkeypatch.setitem(SAMPLES, "scale", scale("none"))
    monkeypatch.setitem(CALLS, "scale", scale("none"))
    FAULTS[fault]("scale")
    monkeypatch.setitem(SAMPLES, "scale", scale(fault))
    monkeypatch.setitem(CALLS, "scale", scale(fault))
    with pytest.raises((AssertionError, RuntimeError)):
        FAULTS[fault]("scale")
