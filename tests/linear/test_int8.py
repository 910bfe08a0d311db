"""Products of float32 whose factors are quantised to 8 bits, because the user said so."""

import functools
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import _dispatch_log, explain, functional, reference
from onepass._policy import precision as policy
from onepass.reference.products import INT8_FORWARD, INT8_INPUT, INT8_WEIGHT, MOST_DEPTH, ROUNDED
from tests.linear.test_precision import (
    assert_right,
    assert_rows_stand_alone,
    global_precision,
    operands,
    rounded,
)

F32 = torch.float32
RAW = torch.ops.onepass
ALL = INT8_FORWARD | INT8_INPUT | INT8_WEIGHT
# (rows, in_features, out_features): one, odd ends of strips, panels and cells, several blocks of
# cells, several pieces.
SIZES = [
    (1, 1, 1), (2, 33, 17), (5, 3, 70), (13, 130, 65), (64, 96, 32), (200, 257, 40), (30, 1700, 33),
    (230, 64, 300),
]  # fmt: skip


def quantized(x, dim):
    """Codes times scales, in float64."""
    largest = x.abs().amax(dim, keepdim=True)
    most = torch.full_like(largest, 127)
    codes = torch.where(largest == 0, 0, (x * (most / largest)).round())
    return codes.double() * (largest / most).double()


def exact(left, right):
    """The product of quantised factors."""
    return quantized(left, 1) @ quantized(right, 0)


def in_float32(left, right):
    return quantized(left, 1).float() @ quantized(right, 0).float()


def draws_of(size, count=4):
    for seed in range(count):
        x, w, b = operands(*size, seed)
        random = torch.Generator().manual_seed(seed + 100)
        yield x, w, b, torch.randn(size[0], size[2], generator=random)


@pytest.mark.isa
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_quantised_factors(size):
    """By the numerics rule: exact products of codes and scales."""
    ours, ref, base = [], [], []
    for x, w, b, _ in draws_of(size):
        ours.append(functional.linear(x, w, b, precision="int8"))
        ref.append(exact(x, w.t()) + b)
        base.append(in_float32(x, w.t()) + b)
    assert_right(ours, ref, base)


@pytest.mark.isa
@pytest.mark.parametrize("precision", ["int8", "int8:output+dinput+dweight", "int8:dweight"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_are_those_of_quantised_factors(size, precision):
    """The gradient of the bias is a sum of numbers that are not quantised; that of the weight takes
    factors rounded to bfloat16, where there are dot products, if it is not quantised."""
    found = [[] for _ in range(3)]
    rounds = rounded if policy.HAS_PAIR_PRODUCTS else lambda x: x
    for x, w, b, dy in draws_of(size):
        given = [t.requires_grad_() for t in (x, w, b)]
        y = functional.linear(*given, precision=precision)
        found[0].append(torch.autograd.grad(y, given, dy))
        x, w = x.detach(), w.detach()
        for way, product in ((1, exact), (2, in_float32)):
            dtype = torch.float64 if way == 1 else F32
            dx, dw = (rounds(a).to(dtype) @ rounds(b).to(dtype) for a, b in ((dy, w), (dy.t(), x)))
            dx = product(dy, w) if precision != "int8:dweight" else dx
            dw = product(dy.t(), x) if "dweight" in precision else dw
            found[way].append((dx, dw, dy.to(dtype).sum(0)))
    for ours, ref, base in zip(*(zip(*way, strict=True) for way in found), strict=True):
        assert_right(list(ours), list(ref), list(base))


def test_the_distance_from_float32_is_that_of_8_bits():
    """A code is off by half of largest / 127 at most."""
    x, w, _ = operands(200, 512, 96)
    error = (functional.linear(x, w, precision="int8").double() - x.double() @ w.double().t()).abs()
    sizes = x.abs().amax(1)[:, None].double() * w.abs().amax(1).double() * 512
    assert 1e-5 < (error / sizes).max() < 1 / 127


@pytest.mark.isa
def test_rows_stand_alone():
    assert_rows_stand_alone((200, 1030, 165), "int8")


def products(seed):
    x, w, b = operands(37, 1030, 65)
    dy = torch.randn(37, 65, generator=torch.Generator().manual_seed(5))
    y = RAW.linear_forward(x, w, b, None, ALL)
    return (x, w, dy), (y, *RAW.linear_backward(dy, x, w, F32, F32, F32, ALL, seed))


@pytest.mark.isa
@pytest.mark.parametrize("seed", [None, torch.tensor([-7, 3])], ids=["nearest", "stochastic"])
def test_memory_orders_give_the_same_bits(seed):
    given, (y, dx, dw, db) = products(seed)
    x, w, dy = (t.t().contiguous().t() for t in given)
    assert torch.equal(RAW.linear_forward(x, w, operands(37, 1030, 65)[2], None, ALL), y)
    found = RAW.linear_backward(dy, x, w, F32, F32, F32, ALL, seed)
    assert torch.equal(found[0], dx) and torch.equal(found[1], dw)
    assert found[1].stride() == w.stride()


SCRIPT = """
import hashlib, torch
from tests.linear.test_int8 import products
_, found = products(torch.tensor([-7, 3]))
print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in found[:3])).hexdigest())
"""


def test_levels_and_instructions_give_the_same_bits():
    """With and without VNNI."""
    levels = onepass._C.cpu_levels()
    digests = {}
    for level, vnni in [(level, "") for level in levels] + [(levels[-1], "0"), ("avx2", "0")]:
        if level in levels:
            digests[level, vnni] = subprocess.run(
                [sys.executable, "-c", SCRIPT],
                env=os.environ | {"ONEPASS_CPU_ISA": level, "ONEPASS_CPU_VNNI": vnni},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
    assert len({*digests.values()}) == 1, digests


@pytest.mark.isa
def test_stochastic_rounding_is_the_definitions():
    seed = torch.tensor([2**40 + 5, -9])
    (x, w, dy), found = products(seed)
    ref = reference.linear.linear_backward(
        *(t.double() for t in (dy, x, w)), factor_mask=ALL, rounding_seed=seed
    )
    for ours, right in zip(found[1:], ref, strict=True):
        assert (ours - right).abs().max() <= 2e-6 * right.abs().max()


def test_stochastic_rounding_is_unbiased_and_repeats():
    x, w, _ = (t.requires_grad_() for t in operands(40, 64, 48))
    dy = torch.randn(40, 48, generator=torch.Generator().manual_seed(1))
    precision = "int8:dinput+stochastic"

    def gradient():
        return torch.autograd.grad(functional.linear(x, w, precision=precision), x, dy)[0]

    torch.manual_seed(3)
    draws = [gradient() for _ in range(400)]
    torch.manual_seed(3)
    assert torch.equal(gradient(), draws[0]) and not torch.equal(draws[0], draws[1])
    mean = torch.stack(draws).double().mean(0)
    right = dy.double() @ quantized(w.detach(), 0)
    nearest = exact(dy, w.detach())
    assert (mean - right).norm() < 0.3 * (nearest - right).norm()


@pytest.mark.isa
def test_lines_of_zeros_and_of_tiny_and_large_numbers():
    x, w, b = operands(6, 100, 20)
    x[0], x[1], x[2], w[3] = 0.0, x[1] * 1e-36, x[2] * 1e30, 0.0
    y = functional.linear(x, w, b, precision="int8")
    assert torch.equal(y[0], b) and torch.equal(y[1], b) and torch.equal(y[:, 3], b[3].expand(6))
    right = exact(x[2:3], w.t()) + b
    assert (y[2:3] - right).abs().max() <= 1e-6 * right.abs().max()


def test_scales_whose_product_overflows():
    x, w = torch.tensor([[1e22, 1.0], [1e30, 0.0]]), torch.tensor([[1.0, 1e22], [0.0, 1e30]])
    for factors in ((x, w), (x, w * 1e-30), (x * 1e-25, w)):
        found = functional.linear(*factors, precision="int8")
        right = exact(factors[0], factors[1].t()).float()
        # A conversion and two products, each rounded to float32.
        torch.testing.assert_close(found, right, rtol=3 * 2**-24, atol=0)
    x = torch.full((2, 1000), 1e-20)
    torch.testing.assert_close(functional.linear(x, x, precision="int8"), x @ x.t())


@pytest.mark.isa
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_lines_that_are_not_finite_give_what_float32_gives(value):
    x, w, b = operands(40, 64, 48)
    clean = functional.linear(x, w, b, precision="int8")
    x[2, 7], x[31, 0], w[9, 5] = value, value, value
    x[31, 3], w[11, 1], w[11, 60] = -value, value, -value
    b[9], b[12] = -value, value
    found, right = (functional.linear(x, w, b, precision=p) for p in ("int8", "highest"))
    bad = [2, 31]
    torch.testing.assert_close(found[bad], right[bad], equal_nan=True)
    for column in (9, 11):
        torch.testing.assert_close(found[:, column], right[:, column], equal_nan=True)
    rows = [row for row in range(40) if row not in bad]
    columns = [column for column in range(48) if column not in (9, 11, 12)]
    assert torch.equal(found[rows][:, columns], clean[rows][:, columns])


def test_epilogues_come_after_it():
    x, w, b = operands(40, 64, 48)
    residual = torch.randn(40, 48)
    sums = functional.linear(x, w, b, precision="int8")
    found = functional.linear(x, w, b, activation="relu", residual=residual, precision="int8")
    assert torch.equal(found, residual + sums.relu())
    torch.manual_seed(0)
    found = functional.linear(x, w, b, dropout_p=0.4, residual=residual, precision="int8")
    torch.manual_seed(0)
    assert torch.equal(found, residual + functional.dropout(sums, 0.4))
    narrow = functional.linear(x, w, b, residual=residual.bfloat16(), precision="int8")
    assert narrow.dtype is torch.bfloat16
    torch.testing.assert_close(narrow, (residual.bfloat16() + sums).bfloat16())


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("precision", ["int8", "int8:output+dinput+dweight+stochastic"])
def test_transforms_and_compilers(activation, precision):
    """Compilers, checkpointing, and torch's setting changed before the backward, bit for bit;
    and export."""
    given = [t.requires_grad_() for t in operands(40, 64, 48)]
    torch._dynamo.reset()

    def call(x, w, b):
        return functional.linear(x, w, b, activation=activation, precision=precision)

    def gradients(function):
        torch.manual_seed(0)
        return torch.autograd.grad(function(*given).square().sum(), given)

    eager = gradients(call)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    if "stochastic" not in precision:  # a compiler draws seeds in its own order
        assert all(map(torch.equal, gradients(compiled), eager))
    recomputed = gradients(lambda *t: checkpoint(call, *t, use_reentrant=False))
    assert all(map(torch.equal, recomputed, eager))
    torch.manual_seed(0)
    y = call(*given)
    with global_precision("medium"):
        assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), given), eager))

    class Layer(torch.nn.Module):
        def forward(self, x, w, b):
            return call(x, w, b)

    program = torch.export.export(Layer(), tuple(t.detach() for t in given))
    torch.testing.assert_close(program.module()(*given), call(*given))


def test_vmap_is_a_call_for_each_sample():
    x, w, _ = operands(40, 64, 48)
    samples = x.unflatten(0, (5, 8))
    found = torch.vmap(lambda x: functional.linear(x, w, precision="int8"))(samples)
    assert torch.equal(found.flatten(0, 1), functional.linear(x, w, precision="int8"))


def test_vmap_of_the_backward_rounds_each_sample_alike():
    """The random numbers are those of a call with the sample alone."""
    x, w, _ = operands(6, 64, 8)
    dy = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(2))
    for options in ({}, {"activation": "relu"}):
        precision = "int8:dinput+stochastic"
        call = functools.partial(functional.linear, weight=w, precision=precision, **options)
        _, backward = torch.func.vjp(call, x)
        (found,) = torch.vmap(backward)(dy)
        assert all(torch.equal(one, backward(d)[0]) for one, d in zip(found, dy, strict=True))


def test_only_stochastic_rounding_draws_a_seed():
    x, w, _ = operands(4, 8, 8)
    state = torch.random.get_rng_state()
    functional.linear(x, w, precision="int8")
    assert torch.equal(torch.random.get_rng_state(), state)
    functional.linear(x, w, precision="int8:stochastic")
    assert not torch.equal(torch.random.get_rng_state(), state)


def test_vectors():
    """In forward mode, and differentiated twice."""
    w = torch.ones(3, 4, requires_grad=True)
    x = torch.ones(4, requires_grad=True)
    y, dy = torch.func.jvp(lambda x: functional.linear(x, w, precision="int8"), (x,), (x,))
    assert y.shape == dy.shape == (3,)
    (dx,) = torch.autograd.grad(
        functional.linear(x, w, precision="int8").sum(), x, create_graph=True
    )
    dx.sum().backward()
    assert dx.shape == (4,) and w.grad.shape == (3, 4)


def test_second_derivatives_are_those_of_quantised_factors():
    """The derivative of a rounding is taken to be 1."""
    x, w, _ = (t.requires_grad_() for t in operands(40, 64, 48))
    dy = torch.randn(40, 48, generator=torch.Generator().manual_seed(9)).requires_grad_()
    y = functional.linear(x, w, precision="int8:output+dinput+dweight")
    first = torch.autograd.grad(y, (x, w), dy, create_graph=True)
    ours = torch.autograd.grad(sum(g.square().sum() for g in first), (x, w, dy))
    x, w, dy = (t.detach().double().requires_grad_() for t in (x, w, dy))
    first = reference.linear.linear_backward(dy, x, w, factor_mask=ALL)[:2]
    right = torch.autograd.grad(sum(g.square().sum() for g in first), (x, w, dy))
    for mine, of_right in zip(ours, right, strict=True):
        assert (mine - of_right).abs().max() <= 1e-5 * of_right.abs().max()


def test_forward_mode_and_the_definitions_gradients():
    x, w, _ = operands(40, 64, 48)
    dx = torch.randn_like(x)
    _, tangent = torch.func.jvp(lambda x: functional.linear(x, w, precision="int8"), (x,), (dx,))
    torch.testing.assert_close(tangent, dx @ w.t())
    given = [t.double().requires_grad_() for t in (x, w)]
    y = reference.linear.linear(*given, factor_mask=ALL)
    dy = torch.ones_like(y)
    found = torch.autograd.grad(y, given, dy)
    right = reference.linear.linear_backward(dy, *given, factor_mask=ALL)
    assert all(map(torch.equal, found, right))


def test_16_bits_and_autocast_decide_before_it():
    x, w, b = operands(40, 64, 48)
    narrow = [t.bfloat16() for t in (x, w, b)]
    expected = functional.linear(*narrow)
    assert torch.equal(functional.linear(*narrow, precision="int8"), expected)
    with torch.autocast("cpu", torch.bfloat16):
        expected = functional.linear(x, w, b)
        assert torch.equal(functional.linear(x, w, b, precision="int8"), expected)
    wide = [t.double() for t in (x, w, b)]
    assert torch.equal(functional.linear(*wide, precision="int8"), functional.linear(*wide))
    mixed = x, narrow[1], b
    assert torch.equal(functional.linear(*mixed, precision="int8"), functional.linear(*mixed))


def test_empty_tensors():
    for rows, columns, outputs in ((0, 4, 3), (5, 0, 3), (5, 4, 0)):
        x, w, b = (t.requires_grad_() for t in operands(rows, columns, outputs))
        y = functional.linear(x, w, b, precision="int8:output+dinput+dweight")
        assert torch.equal(y, b.expand(rows, outputs))
        found = torch.autograd.grad(y.sum(), (x, w, b))
        assert all(not g.count_nonzero() for g in found[:2])


def test_sums_that_could_overflow_are_not_of_codes():
    x, w = torch.ones(2, MOST_DEPTH + 1), torch.ones(3, MOST_DEPTH + 1)
    y = functional.linear(x, w, precision="int8")
    assert torch.equal(y, functional.linear(x, w, precision="medium"))
    x, w = x[:, 1:], w[:, 1:]
    mixed = torch.ones(1, MOST_DEPTH)
    mixed[:, ::2] = -1
    for factor, sum in ((x, MOST_DEPTH), (-x, -MOST_DEPTH), (mixed, 0)):
        y = functional.linear(factor, w, precision="int8")
        assert torch.equal(y, torch.full((len(factor), 3), float(sum)))


def test_scratch_is_a_byte_for_each_number():
    """And rows are padded from 12 to 16 in it."""
    x, w = torch.ones(4800, 512), torch.ones(320, 512)
    with _dispatch_log.record() as calls:
        RAW.linear_forward(x, w, None, None, INT8_FORWARD)
    (call,) = calls
    codes = 512 * (4800 + 320) * (1 if policy.HAS_BYTE_PRODUCTS else 2)
    assert codes <= call["workspace_bytes"] < 1.4 * codes + (1 << 20)


def test_explain_names_the_codes():
    x, w, b = operands(40, 64, 48)
    (call,) = explain(lambda: functional.linear(x, w, b, precision="int8")).calls
    assert "quantised while packing" in call["reason"]


@pytest.mark.parametrize(
    "precision",
    [
        "int4",
        "int8:",
        "int8:x",
        "int8:output+output",
        "int8:stochastic+dweight",
        "int8:stochastic+output",
        8,
        "INT8",
    ],
)
def test_other_precisions_are_refused(precision):
    x, w, b = operands(4, 8, 8)
    with pytest.raises(ValueError, match="^linear: precision must be None, 'highest', 'high', 'm"):
        functional.linear(x, w, b, precision=precision)


def test_parts_are_named():
    rounding = ROUNDED * policy.HAS_PAIR_PRODUCTS
    assert policy.factors_of("int8") == (INT8_FORWARD | INT8_INPUT | rounding, False)
    assert policy.factors_of("int8:dinput") == (INT8_INPUT | rounding, False)
    assert policy.factors_of("int8:stochastic") == policy.factors_of("int8")[:1] + (True,)
    assert policy.factors_of("highest") == (0, False)


def test_factors_and_seeds_are_checked():
    x, w, _ = operands(4, 8, 8)
    seed = torch.zeros(3, dtype=torch.int64)
    epilogue = (x, w, None, None, None, 0.0, 1, False)
    for name, call, given in (
        ("linear", RAW.linear_forward, (x, w, None, None)),
        ("linear", RAW.linear_epilogue_forward, epilogue),
        ("linear_backward", RAW.linear_backward, (x, None, w, F32, None, None)),
    ):
        with pytest.raises(RuntimeError, match=f"^{name}: factor_mask must be .*, got 16"):
            call(*given, 16)
        if call is not RAW.linear_forward:
            with pytest.raises(RuntimeError, match=f"^{name}: rounding_seed must be a dense int64"):
                call(*given, 4, seed)
