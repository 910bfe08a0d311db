"""Products of float32 whose factors are rounded to bfloat16, because the user said so."""

import contextlib

import pytest
import torch

import onepass
from onepass import _C, explain, functional, numerics, reference
from onepass._ops.decomposition import FORMULAS
from onepass._ops.linear import Activation
from onepass._policy import precision as policy
from onepass._policy import products
from onepass.reference.products import ROUNDED

HAS_DOTS = _C.cpu_level() == "avx512_bf16"
needs_dots = pytest.mark.skipif(not HAS_DOTS, reason="this CPU level has no dot products")
# (rows, in_features, out_features): few rows and many, whole vectors and odd ends.
SIZES = [
    (1, 64, 48), (2, 33, 17), (5, 1, 3), (16, 130, 65), (17, 31, 40), (64, 96, 32), (70, 257, 33),
    (200, 512, 96),
]  # fmt: skip


def operands(rows, columns, outputs, seed=0, transposed=False):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    weight = normal(columns, outputs).t() if transposed else normal(outputs, columns)
    return normal(rows, columns), weight, normal(outputs)


def rounded(x):
    return x.bfloat16().to(x.dtype)


@contextlib.contextmanager
def global_precision(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def assert_right(ours, ref, base):
    verdict = numerics.compare(ours, ref, base)
    assert verdict.ok, verdict.text


@needs_dots
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_rounded_factors(size, transposed):
    """By the numerics rule: exact products of factors that are rounded once."""
    draws = [operands(*size, seed, transposed) for seed in range(4)]
    ours, ref, base = [], [], []
    for x, w, b in draws:
        ours.append(functional.linear(x, w, b, precision="medium"))
        ref.append(rounded(x).double() @ rounded(w).double().t() + b)
        base.append(rounded(x) @ rounded(w).t() + b)
    assert_right(ours, ref, base)


@needs_dots
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_are_those_of_rounded_factors(size, activation):
    """Of the gradient of the sums, as the epilogue's operator computes it in float32. That of the
    bias is a sum of numbers that are not rounded."""
    found = [[] for _ in range(3)]
    for seed in range(4):
        x, w, b = (t.requires_grad_() for t in operands(*size, seed))
        dy = torch.randn(size[0], size[2], generator=torch.Generator().manual_seed(9))
        y = functional.linear(x, w, b, activation=activation, precision="medium")
        found[0].append(torch.autograd.grad(y, (x, w, b), dy))
        with torch.no_grad():
            ds = dy
            if activation is not None:
                sums = functional.linear(x, w, b, precision="medium")
                kind = int(Activation[activation.upper()])
                ds = torch.ops.onepass.linear_epilogue_backward(dy, sums, None, 0.0, kind, None)
            for way, dtype in ((1, torch.float64), (2, torch.float32)):
                factor = rounded(ds).to(dtype)
                dx, dw = factor @ rounded(w).to(dtype), factor.t() @ rounded(x).to(dtype)
                found[way].append((dx, dw, ds.to(dtype).sum(0)))
    for ours, ref, base in zip(*(zip(*way, strict=True) for way in found), strict=True):
        assert_right(list(ours), list(ref), list(base))


@needs_dots
def test_the_distance_from_float32_is_that_of_bfloat16():
    """A factor is off by 2^-9 of itself at most, so a product by 2^-8, and a sum of products of
    random signs by much less than the sum of their sizes."""
    x, w, _ = operands(200, 512, 96)
    exact = x.double() @ w.double().t()
    error = (functional.linear(x, w, precision="medium").double() - exact).abs()
    sizes = x.double().abs() @ w.double().abs().t()
    assert 2**-16 < (error / sizes).max() < 2**-8


def assert_rows_stand_alone(size, precision):
    """A row has the same bits with any other rows, and on any number of threads."""
    x, w, b = operands(*size)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = functional.linear(x, w, b, precision=precision)
        for rows in (1, 2, 7, 16, 17, 64):
            assert torch.equal(functional.linear(x[:rows], w, b, precision=precision), whole[:rows])
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(functional.linear(x, w, b, precision=precision), whole)
    finally:
        torch.set_num_threads(before)


@needs_dots
def test_rows_stand_alone():
    assert_rows_stand_alone((200, 257, 65), "medium")


@needs_dots
def test_torchs_global_setting_is_followed():
    x, w, b = operands(40, 64, 48)
    medium, exact = (functional.linear(x, w, b, precision=p) for p in ("medium", "highest"))
    assert not torch.equal(medium, exact)
    for precision, expected in (("highest", exact), ("high", exact), ("medium", medium)):
        with global_precision(precision):
            assert torch.equal(functional.linear(x, w, b), expected)
            assert torch.equal(functional.linear(x, w, b, precision="highest"), exact)
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert torch.equal(functional.linear(x, w, b), medium)
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        assert torch.equal(functional.linear(x, w, b), exact)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@needs_dots
def test_the_backward_has_the_precision_of_its_forward():
    x, w, b = (t.requires_grad_() for t in operands(40, 64, 48))
    with global_precision("medium"):
        y = functional.linear(x, w, b)
        inside = torch.autograd.grad(y.sum(), (x, w, b), retain_graph=True)
    outside = torch.autograd.grad(y.sum(), (x, w, b))
    assert all(map(torch.equal, inside, outside))


@needs_dots
def test_16_bits_and_autocast_decide_before_it():
    x, w, b = operands(40, 64, 48)
    narrow = [t.bfloat16() for t in (x, w, b)]
    expected = functional.linear(*narrow)
    assert torch.equal(functional.linear(*narrow, precision="medium"), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(functional.linear(x, w, b, precision="medium"), expected)
    wide = [t.double() for t in (x, w, b)]
    assert torch.equal(functional.linear(*wide, precision="medium"), functional.linear(*wide))


@needs_dots
@pytest.mark.parametrize("rows", [5, 40])
def test_rows_that_are_not_finite_stay_by_themselves(rows):
    x, w, b = operands(rows, 64, 48)
    expected = functional.linear(x, w, b, precision="medium")
    x[2, 7], x[3, 0] = float("nan"), float("inf")
    found = functional.linear(x, w, b, precision="medium")
    assert found[2].isnan().all() and not found[3].isfinite().any()
    others = [row for row in range(rows) if row not in (2, 3)]
    assert torch.equal(found[others], expected[others])


@needs_dots
def test_compiled():
    x, w, b = (t.requires_grad_() for t in operands(40, 64, 48))

    def loss(x, w, b):
        return functional.linear(x, w, b, activation="silu", precision="medium").square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    eager = torch.autograd.grad(loss(x, w, b), (x, w, b))
    assert all(map(torch.equal, torch.autograd.grad(compiled(x, w, b), (x, w, b)), eager))


@needs_dots
def test_second_derivatives_are_those_of_rounded_factors():
    """The derivative of a rounding is taken to be 1."""
    x, w, b = (t.requires_grad_() for t in operands(40, 64, 48))
    dy = torch.randn(40, 48, generator=torch.Generator().manual_seed(9)).requires_grad_()

    def second(first, of):
        return torch.autograd.grad(sum(g.square().sum() for g in first), of)

    y = functional.linear(x, w, b, precision="medium")
    ours = second(torch.autograd.grad(y, (x, w, b), dy, create_graph=True), (x, w, dy))
    of = [t.detach().double().requires_grad_() for t in (x, w, dy)]
    first = reference.linear.linear_backward(of[2], of[0], of[1], factor_mask=ROUNDED)
    for mine, right in zip(ours, second(first, of), strict=True):
        assert (mine - right).abs().max() <= 1e-5 * right.abs().max()


@needs_dots
@pytest.mark.parametrize("dtypes", [(0, 1), (1, 0), (0, 2), (2, 0)], ids=str)
def test_a_factor_in_16_bits_beside_one_in_float32_keeps_both_as_they_are(dtypes):
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    x, w, _ = operands(40, 64, 48)
    x, w = (t.to(kinds[kind]) for t, kind in zip((x, w), dtypes, strict=True))
    given = [t.detach().requires_grad_() for t in (x, w)]
    medium, exact = (functional.linear(*given, precision=p) for p in ("medium", "highest"))
    assert torch.equal(medium, exact)
    ones = torch.ones_like(exact)
    gradients = (torch.autograd.grad(y, given, ones) for y in (medium, exact))
    assert all(map(torch.equal, *gradients))
    op = torch.ops.onepass.linear_forward  # and its definition, which verify compares with
    definition = FORMULAS[op.default](x, w, None, None, ROUNDED)
    torch.testing.assert_close(op(x, w, None, None, ROUNDED), definition)


@needs_dots
def test_a_change_of_the_global_setting_compiles_again():
    x, w, b = operands(40, 64, 48)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: functional.linear(x, w, b), backend="eager", fullgraph=True)
    exact = functional.linear(x, w, b)
    assert torch.equal(compiled(x), exact)
    with global_precision("medium"):
        assert torch.equal(compiled(x), functional.linear(x, w, b, precision="medium"))
    assert torch.equal(compiled(x), exact)


@needs_dots
def test_a_swapped_model_is_verified_in_float32(monkeypatch):
    """torch's small products stay in float32 under its setting, and ours would differ."""
    monkeypatch.setattr(products, "gains", lambda *_: True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.SiLU(), torch.nn.Linear(64, 8))
    report = onepass.swap(model, kinds="linear", include="*")
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with global_precision("medium"):
        assert report.verify(x).ok
        assert torch.get_float32_matmul_precision() == "medium"


@needs_dots
def test_explain_names_the_rounding():
    x, w, b = operands(40, 64, 48)
    for rows in (5, 40):
        (call,) = explain(lambda: functional.linear(x[:rows], w, b, precision="medium")).calls
        assert "rounded" in call["reason"], call["reason"]


def test_without_dot_products_nothing_changes(monkeypatch):
    monkeypatch.setattr(policy, "HAS_PAIR_PRODUCTS", False)
    x, w, b = operands(40, 64, 48)
    exact = functional.linear(x, w, b, precision="highest")
    assert torch.equal(functional.linear(x, w, b, precision="medium"), exact)
    with global_precision("medium"):
        assert torch.equal(functional.linear(x, w, b), exact)
