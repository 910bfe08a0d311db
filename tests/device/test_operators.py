"""The operators on tensors of a CUDA device, through the public functions.

Values, layouts and extremes on copies of CPU tensors are tested by the executor "device"
(tests/emulator/executors.py).
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional, numerics, reference
from tests.device.common import (
    DEVICE,
    ON_CUDA,
    assert_equal,
    make,
    needs_device,
    on_cuda_only,
    randn,
)
from tests.norm.cases import KINDS, dtypes, kinds, results
from tests.support.dtypes import BF16, F32
from tests.support.seeds import drawn_seed

pytestmark = needs_device


@dtypes
def test_linear_and_what_comes_after_it(dtype):
    """On CUDA the products are torch's own; activation, dropout and residual are as on the CPU."""
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


@kinds
@pytest.mark.parametrize("cols", [72, 33, 2056, 16395])
def test_bitwise_repeatable(rms, residual, cols):
    case = make(rms, 3000 if cols < 3000 else 100, cols, residual=residual)
    case.dropout_p = 0.2 if residual else 0.0
    first = results(case)
    for _ in range(3):
        assert_equal(first, results(case), case.text)


@pytest.mark.parametrize("cols", [72, 33, 1000, 2056, 16395])
def test_small_for_sanitizers(cols):
    """Each kernel once on little data, with few kernels of torch's own."""
    for (rms, residual), dtype in itertools.product(KINDS, (F32, BF16)):
        case = make(rms, 9 if cols < 2000 else 3, cols, dtype, residual=residual)
        case.dropout_p = 0.25 if residual and rms else 0.0
        results(case)
        functional.dropout(case.input, 0.25)
    if ON_CUDA:
        torch.cuda.synchronize()
