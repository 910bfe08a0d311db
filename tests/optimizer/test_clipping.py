"""The optimizer family's operators: norms of gradients, and clipping."""

import itertools

import pytest
import torch

from onepass import _dispatch_log, numerics, reference
from onepass.optim import clip_grad_norm_
from tests.emulator.executors import everywhere
from tests.optimizer.cases import PIECE, shifted
from tests.support.dtypes import BF16, F16, F32, F64

INF = float("inf")
ORDERS = (1.0, 2.0, INF)
op = torch.ops.onepass.clip_grad_norm


def parameters(*sizes, dtype=F32, scale=1.0):
    """Parameters with random gradients."""
    made = []
    for size in sizes:
        parameter = torch.zeros(size, dtype=dtype, requires_grad=True)
        parameter.grad = (torch.randn(size) * scale).to(dtype)
        made.append(parameter)
    return made


def copies(of):
    twins = [p.detach().clone().requires_grad_() for p in of]
    for twin, original in zip(twins, of, strict=True):
        twin.grad = None if original.grad is None else original.grad.clone()
    return twins


def check(of, max_norm, order=2.0):
    """The norm and every gradient by the numerics rule; the memory around them must not change."""
    gradients = [p.grad.clone() for p in of if p.grad is not None]
    norm, expected = reference.optimizer.clip_grad_norm(
        [g.double() for g in gradients], max_norm, order
    )
    stock = copies(of)
    stock_norm = torch.nn.utils.clip_grad_norm_(stock, max_norm, order)
    found = clip_grad_norm_(of, max_norm, order)
    assert found.shape == () and found.dtype == stock_norm.dtype
    numerics.assert_close(found, norm, stock_norm)
    ours, bases = ([p.grad for p in ps if p.grad is not None] for ps in (of, stock))
    for one, ref, base in zip(ours, expected, bases, strict=True):
        if one.numel():
            numerics.assert_close(one, ref, base)


# ---- values --------------------------------------------------------------------------------------


@everywhere
@pytest.mark.isa
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_values(order, dtype, max_norm):
    sizes = [1, 7, (3, 5), 64, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 77]
    for is_aligned in (True, False):
        of = parameters(*sizes, dtype=dtype, scale=0.1)
        for p in of:
            p.grad = p.grad if is_aligned else shifted(p.grad)
        check(of, max_norm, order)


@everywhere
@pytest.mark.isa
@pytest.mark.parametrize("order", ORDERS)
def test_mixed_dtypes(order):
    for dtypes in ((F32, BF16), (BF16, F16), (F64, F32), (BF16, F16, F32, F64)):
        of = [p for dtype in dtypes for p in parameters(100, 5000, dtype=dtype)]
        check(of, 0.5, order)


@everywhere
def test_a_norm_within_the_limit_leaves_gradients_as_they_are():
    of = parameters(10, 5000)
    before = [p.grad.clone() for p in of]
    assert clip_grad_norm_(of, 1e9) > 0
    assert all(torch.equal(p.grad, g) for p, g in zip(of, before, strict=True))


def test_single_tensor_generator_and_missing_gradients():
    (one,) = parameters(9)
    check([one], 0.1)
    with_none = [*parameters(9, 8), torch.zeros(3, requires_grad=True)]
    check(with_none, 0.1)
    assert with_none[-1].grad is None
    (alone,) = parameters(9)
    norm = alone.grad.norm()
    assert clip_grad_norm_(alone, 0.1) == norm and alone.grad.norm() < 0.11
    assert clip_grad_norm_((p for p in parameters(9)), 0.1) > 0
    assert clip_grad_norm_([torch.zeros(3, requires_grad=True)], 1.0) == 0
    with pytest.warns(UserWarning, match="empty generator"):
        assert clip_grad_norm_((p for p in []), 1.0) == 0


# ---- layouts -------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("order", ORDERS)
def test_layouts(order):
    """Permuted gradients are read in place; those with gaps go to torch's own function."""
    of = parameters((6, 5), (2, 3, 4, 5), (4, 1, 3), ())
    memory = torch.full((40,), 7.0)
    of[0].grad = memory[5:35].normal_().view(5, 6).t()
    of[1].grad = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(of, 0.1, order)
    whole = torch.randn(6, 10)  # what lies around stays
    (gaps,) = parameters((6, 5))
    gaps.grad = whole[:, ::2]
    others = whole[:, 1::2].clone()
    check([*of, gaps], 0.05, order)
    assert torch.equal(whole[:, 1::2], others)
    assert (memory[:5] == 7.0).all() and (memory[35:] == 7.0).all()


@everywhere
def test_empty_gradients():
    check(parameters(0, 5, (3, 0)), 0.1)
    for order, sizes in itertools.product(ORDERS, ((0,), (0, 1, 0), (1,), (0, 0, 5))):
        gradients = [p.grad for p in parameters(*sizes)]
        together = torch.cat([torch.zeros(1), *gradients]).double()  # of nothing: 0
        ref = torch.linalg.vector_norm(together, order).item()
        found = torch.ops.onepass.gradient_norm(gradients, order).item()
        assert found == pytest.approx(ref, rel=1e-7)
    empty = parameters(0, (3, 0))
    assert clip_grad_norm_(empty, 1.0) == 0


# ---- contract ------------------------------------------------------------------------------------


def test_all_tensors_are_one_list_of_pieces():
    """The plans show it: two tensors of one and three pieces."""
    with _dispatch_log.record() as calls:
        op([torch.ones(5), torch.ones(2 * PIECE + 1)], 1.0, 2.0, False)
    assert [(call["kernel"], call["splits"]) for call in calls] == [
        ("gradient_norm_kernel", 4),
        ("scale_gradients_kernel", 4),
    ]


def test_messages():
    floats = "float32, bfloat16, float16 or float64"
    gaps = r"gradients must have no gaps between their elements, got shape \(3,\) with strides"
    for message, gradients, order in (
        ("norm_type must be 1, 2 or inf, got 3", [torch.ones(2)], 3.0),
        (f"gradients must have dtype {floats}, got int64", [torch.ones(2, dtype=torch.int64)], 2.0),
        (gaps, [torch.ones(6)[::2]], 2.0),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(gradients, 1.0, order, False)
        with pytest.raises(RuntimeError, match=message):
            torch.ops.onepass.gradient_norm(gradients, order)


# ---- extremes ------------------------------------------------------------------------------------


@everywhere
@pytest.mark.isa
def test_no_magnitude_is_larger_than_nan():
    """In any lane and piece."""
    for where in (0, 1, 17, PIECE - 1, PIECE, 2 * PIECE + 5):
        gradient = torch.ones(3 * PIECE)
        gradient[where] = float("nan")
        assert torch.ops.onepass.gradient_norm([gradient], INF).isnan(), where


@everywhere
@pytest.mark.isa
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_squares_beyond_float32(dtype, order):
    """torch's own norm of order 2 is infinite here, and its gradients become zero."""
    of = parameters(5000, dtype=dtype, scale=1e38) + parameters(100)
    of[0].grad.clamp_(-3e38, 3e38)  # float32 ends at 3.4e38
    if order == 2.0:
        stock = copies(of)
        assert torch.nn.utils.clip_grad_norm_(stock, 2.0).isinf() and not stock[0].grad.any()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.double() for p in of]), order)
    direction = of[0].grad.double() / expected
    norm = torch.ops.onepass.gradient_norm([p.grad for p in of], order)
    assert norm.dtype is F64 and abs(norm / expected - 1) < 1e-6
    if norm < 3e38:
        clip_grad_norm_(of, 2.0, order)
        assert (of[0].grad.double() - 2 * direction).abs().max() < 2 * torch.finfo(dtype).eps


@everywhere
@pytest.mark.isa
@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("place", [0, 31, 257, PIECE - 1, PIECE, 4999])
@pytest.mark.grid(3)
def test_not_finite_as_torch(bad, order, place):
    of = parameters(100, 5000)
    of[1].grad[place] = bad
    stock = copies(of)
    expected = torch.nn.utils.clip_grad_norm_(stock, 1.0, order)
    found = clip_grad_norm_(of, 1.0, order)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
    for one, two in zip(of, stock, strict=True):
        assert torch.equal(one.grad.isnan(), two.grad.isnan())
        assert torch.equal(one.grad.nan_to_num(), two.grad.nan_to_num())


@everywhere
@pytest.mark.parametrize("order", ORDERS)
def test_nan_beside_infinity(order):
    for dtype in (F32, BF16, F16, F64):
        (p,) = parameters(5000, dtype=dtype)
        p.grad[[3, 1000]] = torch.tensor([INF, float("nan")], dtype=dtype)
        norm = torch.ops.onepass.gradient_norm([p.grad], order)
        assert norm.isnan() and norm.dtype is F64


@pytest.mark.parametrize("order", ORDERS)
def test_error_if_nonfinite_changes_nothing(order):
    of = parameters(100, 5000)
    of[1].grad[7] = INF
    before = [p.grad.clone() for p in of]
    messages = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped") as raised:
            clip(of, 1.0, order, error_if_nonfinite=True)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert all(torch.equal(p.grad, g) for p, g in zip(of, before, strict=True))


@everywhere
def test_limits_of_zero_and_below():
    for max_norm in (0.0, -1.0):
        check(parameters(5000), max_norm)


# ---- calls that are left to torch's function -----------------------------------------------------


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", ["complex", "sparse", "subclass", "order"])
def test_others_go_to_torch(kind):
    of = parameters(10, (4, 5))
    order = 3.0 if kind == "order" else 2.0
    if kind == "complex":
        of = [torch.zeros(5, dtype=torch.complex64, requires_grad=True)]
        of[0].grad = torch.randn(5, dtype=torch.complex64)
    elif kind == "sparse":
        of = [torch.zeros(4, 5, requires_grad=True)]
        of[0].grad = torch.randn(4, 5).relu().to_sparse()
    elif kind == "subclass":
        of[1].grad = of[1].grad.as_subclass(Tagged)
    results = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        twins = copies(of)
        try:
            norm = clip(twins, 0.1, order)
            results.append([norm, *(p.grad for p in twins)])
        except RuntimeError as error:
            results.append(str(error))
    if isinstance(results[1], str):
        assert results[0] == results[1]
        return
    for one, two in itertools.zip_longest(*results):
        torch.testing.assert_close(one, two)


def test_what_goes_to_torch_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(_dispatch_log, "_enabled", True)
    (p,) = parameters(6)
    p.grad = torch.randn(12)[::2]
    monkeypatch.setattr(_dispatch_log.logger, "propagate", True)
    with caplog.at_level("INFO", logger=_dispatch_log.logger.name):
        clip_grad_norm_([p], 0.1)
    assert "clip_grad_norm_: torch's own function, since" in caplog.text
    assert "must have no gaps" in caplog.text
