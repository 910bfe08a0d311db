"""Rows that begin anywhere, sizes that fit no vector, no rows; see all_families/test_layouts.py."""

import pytest
import torch

from onepass import functional, numerics
from tests.attention.cases import reserved
from tests.emulator.executors import everywhere
from tests.loss.cases import RAW, check, dtypes, make, results
from tests.support.allocations import allocated
from tests.support.dtypes import BF16, F32
from tests.support.results import assert_same_bits

pytestmark = pytest.mark.isa


def assert_same(executor, case, expected, function=None):
    """On CUDA the order of a row's sums depends on its address, so bits may differ; errors stay."""
    found = results(function or case.ours, case)
    if not executor.is_cuda:
        return assert_same_bits(found, expected)
    exact = results(case.formula, case, double=True)
    for name, tensor in found.items():
        numerics.assert_close(tensor, exact[name], expected[name], name)


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("cols", [1027, 1028, 1029, 1030, 1031, 1032])
def test_rows_that_begin_anywhere(executor, cols, dtype):
    """Rows of an odd number of columns, and parts of wider ones: nothing around them changes."""
    case = make(3, cols, dtype)
    expected = results(case.ours, case)
    for left in (0, 1, 5):
        buffer = torch.full((3, cols + 9), float("nan"), dtype=dtype)
        view = buffer[:, left : left + cols]
        case.input = view.copy_(case.input)
        assert_same(executor, case, expected)


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gradients_in_place_of_views(dtype):
    """Only the rows of the view are overwritten."""
    case = make(4, 1031, dtype)
    buffer = torch.full((4, 1040), 7.0, dtype=dtype)
    buffer[:, 3:1034] = case.input
    result = buffer.requires_grad_() * 1.0
    view = result[:, 3:1034]
    (expected,) = torch.autograd.grad(functional.cross_entropy(view, case.target), view, case.dloss)
    loss = functional.cross_entropy(view, case.target, inplace_backward=True)
    (found,) = torch.autograd.grad(loss, view, case.dloss)
    assert torch.equal(view, expected) and torch.equal(found, expected)
    assert (result[:, :3] == 7).all() and (result[:, 1034:] == 7).all()


@everywhere
@dtypes
@pytest.mark.parametrize(
    "rows, cols", [(1, 1), (5, 1), (4, 2), (2, 7), (4, 10), (7, 15), (3, 17), (4, 100), (1, 2049)]
)
@pytest.mark.grid(2)
def test_odd_sizes(executor, rows, cols, dtype):
    """Elements of a row share the error of one sum, so few rows need more draws."""
    draws = 1 + 20 * executor.draws // rows
    check(*(make(rows, cols, dtype, seed=seed) for seed in range(draws)))


@everywhere
def test_no_rows_and_no_classes():
    """Without classes all rows have to be ignored."""
    for reduction, value in (("mean", float("nan")), ("sum", 0.0)):
        case = make(0, 8, reduction=reduction)
        found = results(case.ours, case)
        torch.testing.assert_close(found["loss"], torch.tensor(value), equal_nan=True)
        assert found["dinput"].shape == (0, 8)
    case = make(0, 8, reduction="none")
    assert results(case.ours, case)["loss"].shape == (0,)
    case = make(3, 1, reduction="none")
    case.input, case.target = torch.empty(3, 0), torch.full((3,), -100)
    found = results(case.ours, case)
    assert torch.equal(found["loss"], torch.zeros(3)) and found["dinput"].shape == (3, 0)


def test_logits_are_not_copied():
    """If their columns are dense."""
    case = make(4, 3200, BF16, reduction="sum")
    view = torch.empty(4, 3700, dtype=BF16)[:, 300:3500].copy_(case.input)
    arguments = (view, case.target, None, -100, 0.0, 0.0, 2)
    assert allocated(RAW.loss_forward, *arguments, 0.0, None) < view.nbytes / 4
    _, *saved = RAW.loss_forward(*arguments, 0.0, None)
    taken = allocated(RAW.loss_backward, *arguments, case.dloss, *saved)
    assert case.input.nbytes <= taken < 1.25 * case.input.nbytes


def test_a_gradient_in_place_beyond_32_bits():
    """Rows 2^31 + 5 elements apart; the memory between them is never touched."""
    case, arguments = make(2, 40, BF16), (None, -100, 0.0, 0.0, 1)
    expected = results(case.ours, case)["dinput"]
    x = reserved(2**31 + 5 + 64, BF16).as_strided((2, 40), (2**31 + 5, 1)).copy_(case.input)
    _, *saved = RAW.loss_forward(x, case.target, *arguments, 0.0, None)
    RAW.loss_backward_inplace(x, case.target, *arguments, case.dloss, *saved)
    assert torch.equal(x, expected)
