"""The operators on a CUDA device, through the public functions: values, gradients, layouts.

The checks are the CPU's own (norm/cases.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import functional, numerics, reference
from tests.device.common import (
    BF16,
    DEVICE,
    F32,
    F64,
    ON_CUDA,
    assert_equal,
    check_draws,
    dtypes,
    make,
    needs_device,
    on_cuda_only,
    randn,
    results,
)
from tests.norm import cases as norm_cases
from tests.norm.cases import (
    ALIGNED,
    DTYPES,
    FLOATS,
    KINDS,
    LONG,
    UNALIGNED,
    check,
    kinds,
    outputs_and_gradients,
)
from tests.support.seeds import drawn_seed

pytestmark = needs_device


# ---- values and gradients ------------------------------------------------------------------------


@kinds
@dtypes
def test_columns(rms, residual, dtype):
    for cols in ALIGNED + UNALIGNED:
        check_draws(rms, 5, cols, dtype, residual=residual, draws=8 if cols < 16 else 4)


@kinds
@dtypes
def test_rows_too_long_for_registers(rms, residual, dtype):
    for cols in (LONG[dtype], LONG[dtype] + 3):
        check_draws(rms, 3, cols, dtype, residual=residual, draws=2)


@kinds
@pytest.mark.parametrize("rows", [1, 4, 33, 300, 5000])
def test_rows(rms, residual, rows):
    check_draws(rms, rows, 72, residual=residual)


@kinds
def test_mixed_dtypes(rms, residual):
    for input_, weight, stream in norm_cases.mixes(residual):
        for cols in (129, 136):
            options = dict(weight_dtype=weight, residual=residual, residual_in=stream)
            check_draws(rms, (3, 13), cols, input_, **options)


@kinds
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_16_bit_results_are_unbiased(rms, residual, dtype):
    check(make(rms, 128, 256, dtype, residual=residual))  # above the rule's 4,096 elements


@pytest.mark.parametrize("rms", [False, True])
@dtypes
def test_dropout_before_the_add(rms, dtype):
    for cols in (72, 33, 2056):
        for wrt in (None, ["input"], ["residual"], ["weight"]):
            check_draws(rms, 9, cols, dtype, residual=True, dropout_p=0.25, wrt=wrt)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("residual_dtype", FLOATS, ids=str)
def test_residual_dtype(rms, residual_dtype):
    stream = dict(residual=True, residual_in=F32, residual_dtype=residual_dtype)
    check_draws(rms, 9, 104, BF16, **stream)


def test_optional_arguments():
    for dtype, weight in itertools.product(DTYPES, (False, True)):
        check_draws(True, 6, 72, dtype, weight=weight, weight_offset=1.0 if weight else 0.0)
        check_draws(False, 6, 72, dtype, weight=weight, bias=not weight)
    for wrt in (["input"], ["weight"], ["bias"], ["input", "bias"]):
        check_draws(False, 21, 65, wrt=wrt)


@pytest.mark.parametrize("through", ["y", "residual_out"])
def test_gradients_through_one_output(through):
    for rms in (False, True):
        cases = [make(rms, 21, 65, residual=True, seed=seed) for seed in range(4)]
        for case in cases:
            g = torch.randn_like(case.input)
            case.gradients = (g, None) if through == "y" else (None, g)
        check(*cases)


def test_extremes():
    shifted = [make(False, 9, 1000, seed=seed) for seed in range(4)]
    for case in shifted:
        case.input = case.input + 1e4
    check(*shifted)
    for rms, magnitude in itertools.product((False, True), (1e-6, 1e15)):
        scaled = [make(rms, 9, 200, eps=0.0, seed=seed) for seed in range(4)]
        for case in scaled:
            case.input = case.input * magnitude
        check(*scaled)
    constant = make(False, 4, 72)
    constant.input = torch.full_like(constant.input, 3.7)
    assert not outputs_and_gradients(constant.ours, constant)[0]["y"].isnan().any()


@kinds
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_not_finite_row_spoils_no_other(rms, residual, value):
    case = make(rms, 6, 50, residual=residual)
    (clean, _), others = outputs_and_gradients(case.ours, case), [0, 1, 2, 4, 5]
    case.input[3, 17] = value
    spoilt, gradients = outputs_and_gradients(case.ours, case)
    assert torch.equal(spoilt["y"][others], clean["y"][others])
    assert spoilt["y"][3].isnan().any() and not gradients["input"][others].isnan().any()


@kinds
@pytest.mark.parametrize("size", [(0, 8), (3, 0), (0, 0)])
def test_empty(rms, residual, size):
    case = make(rms, size[:-1], size[-1], residual=residual)
    outputs, gradients = outputs_and_gradients(case.ours, case)
    assert outputs["y"].shape == size
    for name, gradient in gradients.items():
        assert gradient.shape == getattr(case, name).shape and not gradient.any()


@pytest.mark.parametrize("residual", [False, True])
def test_second_derivatives(residual):
    tensors = [randn(3, 5, dtype=F64, requires_grad=True) for _ in range(2 if residual else 1)]
    weight = randn(5, dtype=F64, requires_grad=True)

    def function(x, *rest):
        torch.manual_seed(3)  # the same fate of every element in each evaluation
        if residual:
            return functional.add_layer_norm(x, rest[0], 5, rest[1], dropout_p=0.4)
        return functional.rms_norm(x, 5, rest[0])

    assert torch.autograd.gradcheck(function, (*tensors, weight))
    assert torch.autograd.gradgradcheck(function, (*tensors, weight))


# ---- dropout -------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("size", [1, 7, 64, 1000, 8200, 9001, 100_003])
def test_dropout_is_bitwise_the_cpus(dtype, size):
    """From one seed."""
    x, stream, seed = torch.randn(size).to(dtype), torch.randn(size).to(dtype), drawn_seed(9)
    for p, residual in itertools.product((1e-6, 0.3, 1.0), (None, stream)):
        arguments = (x, residual, seed, p, None)
        moved = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in arguments]
        expected = torch.ops.onepass.dropout_forward(*arguments)
        found = torch.ops.onepass.dropout_forward(*moved)
        assert torch.equal(expected, found.cpu()), f"{p=} {residual is None=}"


@pytest.mark.parametrize("wide", [False, True])
@dtypes
def test_dropout_and_add_dropout(dtype, wide):
    stream_dtype = F32 if wide and dtype != F64 else dtype
    for shape in ((33, 65), (32, 64)):
        x, r = randn(shape, dtype=dtype), randn(shape, dtype=stream_dtype)
        g, seed = randn(shape, dtype=stream_dtype), drawn_seed(5, DEVICE)
        leaves = [t.clone().requires_grad_() for t in (x, r)]
        torch.manual_seed(5)
        y = functional.add_dropout(*leaves, 0.3)
        dx, dr = torch.autograd.grad(y, leaves, g)
        assert y.dtype == stream_dtype and dx.dtype == dtype and torch.equal(dr, g)
        ref = reference.dropout.add_dropout(x.double(), r.double(), 0.3, seed)
        numerics.assert_close(y, ref, reference.dropout.add_dropout(x, r, 0.3, seed))
        factor = reference.dropout.keep_scale(seed, g.numel(), 0.3, F64, DEVICE).view(shape)
        numerics.assert_close(dx, g.double() * factor, (g * factor.to(g.dtype)).to(dtype))
        exact = F64 if stream_dtype is F64 else F32  # rounded once
        factor = reference.dropout.keep_scale(seed, g.numel(), 0.3, exact, DEVICE).view(shape)
        torch.manual_seed(5)
        assert torch.equal(functional.dropout(g, 0.3), (g.to(exact) * factor).to(stream_dtype))


def test_dropout_draws_what_manual_seed_says():
    x = torch.ones(1000, device=DEVICE)
    torch.manual_seed(1)
    first, second = functional.dropout(x), functional.dropout(x)
    torch.manual_seed(1)
    assert torch.equal(functional.dropout(x), first) and not torch.equal(first, second)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_restores_the_dropout(use_reentrant):
    x, add = randn(50, 48), onepass.nn.AddLayerNorm(48, dropout_p=0.5).to(DEVICE)

    def block(t):
        return functional.dropout(add(t, t)[0], 0.5)

    gradients = []
    for wrapped in (block, lambda t: checkpoint(block, t, use_reentrant=use_reentrant)):
        torch.manual_seed(6)
        leaf = x.clone().requires_grad_()
        wrapped(leaf).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


# ---- linear --------------------------------------------------------------------------------------


@dtypes
def test_linear_and_what_comes_after_it(dtype):
    """On CUDA the products are torch's own, and what comes after them is as on the CPU."""
    tensors = [
        randn(*size, dtype=dtype, requires_grad=True) for size in ((33, 40), (64, 40), (64,))
    ]
    tensors.append(randn(33, 64, dtype=dtype, requires_grad=True))
    doutput, seed = randn(33, 64, dtype=dtype), drawn_seed(5, DEVICE)

    def formula(*tensors):
        *layer, residual = tensors
        products = F.silu(F.linear(*layer))
        return residual + reference.dropout.dropout(products, 0.3, seed)

    def ours(*tensors):
        *layer, residual = tensors
        torch.manual_seed(5)
        options = {"activation": "silu", "dropout_p": 0.3, "residual": residual}
        return functional.linear(*layer, **options)

    def everything(function, tensors):
        output = function(*tensors)
        return output, *torch.autograd.grad(output, tensors, doutput.to(output.dtype))

    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    three = everything(ours, tensors), everything(formula, wide), everything(formula, tensors)
    for found, ref, base in zip(*three, strict=True):
        assert found.dtype == dtype
        numerics.assert_close(found, ref, base)


@on_cuda_only
def test_products_on_cuda_are_torchs():
    x, module = randn(33, 40), onepass.nn.Linear(40, 64, device=DEVICE)
    assert torch.equal(module(x), F.linear(x, module.weight, module.bias))
    (call,) = onepass.explain(module, x).calls
    assert call["kernel"] == "torch.nn.functional.linear" and "CUDA" in call["reason"]
    with torch.autocast("cuda", torch.bfloat16):
        assert module(x).dtype is BF16


# ---- layouts -------------------------------------------------------------------------------------


def strided(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another layout, inside a buffer that is NaN everywhere else."""
    a, b, c = tensor.shape
    buffers = {
        "every other": ((a, 2 * b, c), lambda t: t[:, ::2]),
        "wide rows": ((a, b, c + 5), lambda t: t[..., 3 : 3 + c]),
        "wide aligned rows": ((a, b, c + 16), lambda t: t[..., 8 : 8 + c]),
        "transposed": ((b, a, c), lambda t: t.transpose(0, 1)),
        "columns first": ((c, a, b), lambda t: t.permute(1, 2, 0)),
        "odd offset": ((a * b * c + 1,), lambda t: t[1:].view(a, b, c)),
    }
    size, view = buffers[layout]
    buffer = torch.full(size, float("nan"), dtype=tensor.dtype, device=tensor.device)
    view(buffer).copy_(tensor)
    return view(buffer)


LAYOUTS = ["every other", "wide rows", "wide aligned rows", "transposed", "columns first"]


@kinds
@pytest.mark.parametrize("layout", [*LAYOUTS, "odd offset"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_layouts(rms, residual, layout, dtype):
    for cols in (40, 2056):
        cases = [make(rms, (6, 5), cols, dtype, residual=residual, seed=seed) for seed in range(4)]
        for case in cases:
            case.input = strided(case.input, layout)
            if residual:
                case.residual = strided(case.residual, "wide rows")
        check(*cases)


def test_weights_and_gradients_of_any_layout():
    cases = [make(False, 12, 48, seed=seed) for seed in range(4)]
    for case in cases:
        nan = torch.full((96,), float("nan"), device=DEVICE)
        case.weight = nan[1:49].copy_(case.weight)
        case.bias = nan.clone()[::2].copy_(case.bias)
    check(*cases)
    transposed, row = randn(48, 12).t(), randn(48).expand(12, 48)
    for gradient in (transposed, row, torch.ones((), device=DEVICE).expand(12, 48)):
        for residual in (False, True):
            cases = [make(False, 12, 48, residual=residual, seed=seed) for seed in range(4)]
            for case in cases:
                case.gradients = (gradient, gradient) if residual else (gradient,)
            check(*cases)


def test_dropout_follows_the_logical_index():
    x = randn(6, 5, 8)
    torch.manual_seed(1)
    expected = functional.dropout(x, 0.5)
    for layout in (x.transpose(0, 2).contiguous().transpose(0, 2), torch.cat([x, x], 2)[..., :8]):
        torch.manual_seed(1)
        assert torch.equal(functional.dropout(layout, 0.5), expected)


# ---- contracts -----------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("cols", [72, 33, 2056, 16395])
def test_bitwise_repeatable(rms, residual, cols):
    case = make(rms, 3000 if cols < 3000 else 100, cols, residual=residual)
    case.dropout_p = 0.2 if residual else 0.0
    first = results(case)
    for _ in range(3):
        assert_equal(first, results(case), case.text)


@kinds
@pytest.mark.parametrize("cols", [40, 33, 2056, 16395])
def test_a_row_does_not_depend_on_its_batch(rms, residual, cols):
    whole, wrt = make(rms, 7, cols, residual=residual), ["input"]
    outputs, gradients = outputs_and_gradients(whole.ours, whole, wrt=wrt)
    for rows in (slice(3, 4), slice(0, 2), slice(2, 6)):
        part = make(rms, 7, cols, residual=residual)
        part.input = part.input[rows].clone()
        part.residual = part.residual[rows].clone() if residual else None
        found, of_part = outputs_and_gradients(part.ours, part, wrt=wrt)
        for name, value in found.items():
            assert torch.equal(value, outputs[name][rows]), f"{rows} {name}"
        assert torch.equal(of_part["input"], gradients["input"][rows]), f"{rows} gradient"


@on_cuda_only
def test_explain_names_the_device_kernels():
    x = randn(64, 1024, requires_grad=True)
    found = onepass.explain(lambda: functional.layer_norm(x, 1024).sum().backward())
    assert [call["level"] for call in found.calls] == ["cuda", "cuda"]
    assert [call["kernel"][:5] for call in found.calls] == ["norm_", "norm_"]


# ---- for compute-sanitizer -----------------------------------------------------------------------


@pytest.mark.parametrize("cols", [72, 33, 1000, 2056, 16395])
def test_small_for_sanitizers(cols):
    """Each kernel once on little data, and next to nothing of torch's own."""
    for (rms, residual), dtype in itertools.product(KINDS, (F32, BF16)):
        case = make(rms, 9 if cols < 2000 else 3, cols, dtype, residual=residual)
        case.dropout_p = 0.25 if residual and rms else 0.0
        results(case)
        functional.dropout(case.input, 0.25)
    if ON_CUDA:
        torch.cuda.synchronize()
