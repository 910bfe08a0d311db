"""The norm family among other code: several norms in one compiled graph, many rows, aliased and
edited tensors, torch's dtype mixes. A single call on a small input does not show these."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional, numerics, reference
from tests.norm.cases import DTYPES, FLOATS, make, outputs_and_gradients, raw_backward

NORMS = ("layer_norm", "rms_norm")
norms = pytest.mark.parametrize("name", NORMS)
adds = pytest.mark.parametrize("rms", [False, True], ids=["add_layer_norm", "add_rms_norm"])


# ---- values and gradients -----------------------------------------------------------------------


def weight_gradients(name: str, rows: int, cols: int, seed: int):
    """(ours, float64 reference, torch's) gradient of the weight."""
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(rows, cols, generator=generator) for _ in range(2))
    w = torch.randn(cols, generator=generator)
    g = g + 0.5

    def gradient(norm, *tensors):
        x, w, g = tensors
        w = w.clone().requires_grad_()
        return torch.autograd.grad(norm(x, (cols,), w, eps=1e-5), w, g)[0]

    definition = getattr(reference.norm, name)
    return (
        gradient(getattr(functional, name), x, w, g),
        gradient(definition, x.double(), w.double(), g.double()),
        gradient(getattr(F, name), x, w, g),
    )


# A batch of 2048 and of 16384 tokens; then more rows than any chunk count divides evenly.
# torch sums rms_norm's weight gradient in a cascade, with an error that hardly grows with the rows.
MANY_ROWS = [(2048, 96), (16_384, 64), (100_003, 3)]


@pytest.mark.parametrize(
    "name, rows, cols",
    [(name, *size) for name, size in itertools.product(NORMS, MANY_ROWS)],
)
def test_weight_gradients_over_many_rows(name, rows, cols):
    draws = [weight_gradients(name, rows, cols, seed) for seed in range(6 if cols < 16 else 2)]
    numerics.assert_close(*zip(*draws, strict=True), f"{name} {rows} x {cols}: dweight")


@norms
def test_one_tensor_as_both_input_and_residual(name):
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    gradients = []
    for module in (functional, reference.norm):
        y, stream = getattr(module, f"add_{name}")(x, x, 8, eps=1e-5)
        gradients.append(torch.autograd.grad(y.pow(3).sum() + stream.pow(2).sum(), x)[0])
    ours, ref = gradients
    numerics.assert_close(ours, ref, ref)


@norms
def test_gradients_of_input_and_residual_are_not_one_storage(name):
    """They are equal, and computed once; accumulating into one must not change the other."""
    x, r = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    y, stream = getattr(functional, f"add_{name}")(x, r, 8)
    (2 * y.sum() + stream.pow(2).sum()).backward()
    assert torch.equal(x.grad, r.grad)
    expected = r.grad.clone()
    x.grad.add_(1)
    assert torch.equal(r.grad, expected)


@norms
def test_a_graph_kept_for_a_second_backward_repeats_it(name):
    x, w = torch.randn(40, 80, requires_grad=True), torch.randn(80, requires_grad=True)
    loss = getattr(functional, name)(x, 80, w).pow(2).sum()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, (x, w)), strict=True):
        assert torch.equal(one, other)


@norms
def test_editing_what_the_backward_needs_raises(name):
    x, r = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    y, stream = getattr(functional, f"add_{name}")(x, r, 8)
    stream.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, _ = getattr(functional, f"add_{name}")(x, r, 8)
    y.mul_(3)  # the output is not needed
    (found,) = torch.autograd.grad(y.sum(), x)
    y, _ = getattr(functional, f"add_{name}")(x, r, 8)
    (expected,) = torch.autograd.grad(y.sum(), x, torch.tensor(3.0))
    torch.testing.assert_close(found, expected)


# ---- contracts ----------------------------------------------------------------------------------


@adds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [5, 1000, 5000])  # within a vector; one pass; more than one block
def test_rows_follow_a_permutation_of_the_batch(rms, dtype, cols):
    """Outputs and gradients of a row do not depend on its neighbours or its place, bit for bit."""
    stream = torch.float32 if dtype != torch.float64 else dtype
    case = make(rms, 9, cols, dtype, residual=True, residual_in=stream)
    case.gradients = (torch.randn(9, cols).to(dtype), torch.randn(9, cols).to(stream))
    before = outputs_and_gradients(case.ours, case, wrt=("input", "residual"))
    order = torch.randperm(9)
    case.input, case.residual = case.input[order], case.residual[order]
    case.gradients = tuple(gradient[order] for gradient in case.gradients)
    after = outputs_and_gradients(case.ours, case, wrt=("input", "residual"))
    for expected, found in zip(before, after, strict=True):
        for name in expected:
            assert torch.equal(expected[name][order], found[name]), name


@adds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, cols", [(7, 33), (5, 8), (3, 1000)])
def test_borders_of_strided_tensors(rms, dtype, rows, cols):
    """Inputs and upstream gradients lie in buffers of NaN, which must not be read or written."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    buffers = [torch.full((2 * rows + 2, cols + 9), float("nan"), dtype=dtype) for _ in range(4)]
    views = [buffer[1 : 1 + 2 * rows : 2, 4 : 4 + cols] for buffer in buffers]
    for view in views:
        view.copy_(torch.randn(rows, cols))
    before = [buffer.view(integers).clone() for buffer in buffers]
    case = make(rms, rows, cols, dtype, residual=True)
    case.input, case.residual, case.gradients = views[0], views[1], tuple(views[2:])
    for results in outputs_and_gradients(case.ours, case):
        for name, value in results.items():
            assert not value.isnan().any(), f"{name} has read a neighbour"
    for buffer, bits in zip(buffers, before, strict=True):
        assert torch.equal(buffer.view(integers), bits)


def test_messages_of_the_backward_name_its_own_arguments():
    """Errors that only a direct call can make; each message uses the backward's argument names."""
    x, w = torch.randn(4, 6), torch.ones(6)
    call = dict(
        doutput=x, x=x, weight=w, bias=w, mean=torch.zeros(4), rstd=torch.ones(4), grad_mask=15
    )
    wrong = {
        "x must have dtype float32, bfloat16, float16 or float64, got int64": {"x": x.long()},
        r"x must end in normalized_shape \(5,\), got shape \(4, 6\)": {"normalized_shape": [5]},
        "input_dtype must have dtype float32, .*, got int32": {"input_dtype": torch.int32},
        "input_dtype must have dtype .* beside x, got float64": {"input_dtype": torch.float64},
        "residual_dtype must have dtype float32, .*, got bool": {"residual_dtype": torch.bool},
        r"weight must have shape \(6,\), got \(5,\)": {"weight": w[:5]},
        r"bias must have shape \(6,\), got \(1, 6\)": {"bias": w[None]},
        "dropout_p must lie between 0 and 1, got -1": {"dropout_p": -1.0},
    }
    for message, changes in wrong.items():
        with pytest.raises(RuntimeError, match=f"^layer_norm_backward: {message}"):
            raw_backward(**call | changes)


@pytest.mark.parametrize("name", [*NORMS, "dropout"])
def test_a_parameter_on_meta_is_checked_like_any_tensor(name):
    parameter = torch.nn.Parameter(torch.empty(4, 6, device="meta"))
    if name == "dropout":
        with pytest.raises(RuntimeError, match="^add_dropout: residual must have shape"):
            functional.add_dropout(parameter, torch.empty(4, device="meta"), 0.5)
        return
    with pytest.raises(RuntimeError, match=rf"^{name}: input must end in normalized_shape \(5,\)"):
        getattr(functional, name)(parameter, 5)


# ---- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, stride, shape",
    [
        ((1, 4, 1, 16), (999, 16, 777, 1), (16,)),  # strides of single elements mean nothing
        ((4, 16, 1), (16, 1, 55), (16, 1)),
        ((5, 16), (3, 1), (16,)),  # overlapping rows
        ((2,) * 10, (512, 1, 2, 256, 4, 128, 8, 64, 16, 32), (2,)),  # nothing merges
    ],
)
@norms
def test_odd_strides(name, size, stride, shape):
    x = torch.randn(1024).as_strided(size, stride)
    found = getattr(functional, name)(x, shape, eps=1e-5)
    assert torch.equal(found, getattr(functional, name)(x.clone().contiguous(), shape, eps=1e-5))
    torch.testing.assert_close(found, getattr(F, name)(x, shape, eps=1e-5))


def test_views_with_the_negative_bit():
    x, w = torch._neg_view(torch.randn(4, 8)), torch._neg_view(torch.randn(8))
    torch.testing.assert_close(functional.rms_norm(x, 8, w), F.rms_norm(x, (8,), w))
    assert torch.equal(functional.add_dropout(x, torch.zeros(4, 8), 0.0), x.resolve_neg())


# ---- torch --------------------------------------------------------------------------------------


@norms
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_output_dtypes_are_torchs_for_every_mix(name, autocast):
    mixes = 0
    for dtype, weight_dtype in [*itertools.product(FLOATS, FLOATS), (torch.float64,) * 2]:
        x, w = torch.randn(2, 8).to(dtype), torch.randn(8).to(weight_dtype)
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            ours = getattr(functional, name)(x, (8,), w)
            try:
                stock = getattr(F, name)(x, (8,), w)
            except RuntimeError:  # torch's layer_norm does not take every mix on CPU
                assert ours.dtype == dtype
                continue
        assert ours.dtype == stock.dtype, f"{dtype} with weight {weight_dtype}"
        mixes += 1
    assert mixes >= 4


class Block(torch.nn.Module):
    """The skeleton of a pre-norm transformer block: two norms and two dropouts in one graph."""

    def __init__(self, norm, width: int, **keywords):
        super().__init__()
        self.first, self.second = norm(width, **keywords), norm(width, **keywords)
        self.linear = torch.nn.Linear(width, width)
        self.dropout = onepass.nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout(self.linear(self.first(x)))
        return x + self.dropout(self.linear(self.second(x)))


@pytest.mark.parametrize("norm", [onepass.nn.LayerNorm, onepass.nn.RMSNorm])
@pytest.mark.parametrize("eps", [1e-5, 1])
def test_several_norms_in_one_dynamic_graph(norm, eps):
    """dynamic=True makes symbolic floats of eps and of weight_offset's default."""
    block = Block(norm, 16, eps=eps)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9):
        gradients = []
        for function in (block, compiled):
            x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))
            x.requires_grad_()
            torch.manual_seed(2)
            gradients.append(torch.autograd.grad(function(x).pow(2).sum(), x)[0])
        torch.testing.assert_close(*gradients)


def test_weight_offset_in_a_dynamic_graph():
    w = torch.randn(16)

    def function(x, offset):
        for _ in range(2):
            x = functional.rms_norm(x, (16,), w, weight_offset=offset)
        return x

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for offset in (1.0, 0.25, 0.0):
        x = torch.randn(4, 16, requires_grad=True)
        torch.testing.assert_close(compiled(x, offset), function(x, offset))
