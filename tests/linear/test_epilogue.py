"""Epilogues: activation, dropout and residual, against the same steps of torch after F.linear, by
the numerics rule."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import _C, functional, numerics, reference
from onepass._ops.linear import Activation
from tests.linear.cases import FLOATS, RAW, dtypes, make, stock
from tests.support.results import assert_same_bits, bits
from tests.support.seeds import drawn_seed

pytestmark = pytest.mark.isa
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NAMES = ("input", "weight", "bias", "residual")
ACTIVATIONS = reference.linear.ACTIVATIONS
activations = pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
some = pytest.mark.parametrize("activation", list(ACTIVATIONS))


def tensors(case, residual: torch.dtype | None, seed: int = 0) -> dict[str, Tensor]:
    found = case.tensors()
    if residual is not None:
        generator = torch.Generator().manual_seed(100 + seed)
        found["residual"] = torch.randn(case.doutput.shape, generator=generator).to(residual)
    return found


def run(function, given: dict[str, Tensor], doutput: Tensor, wrt=NAMES, double=False) -> dict:
    """{"output": ..., and the gradient of each tensor in wrt by its name}."""
    torch.manual_seed(7)
    leaves = {
        name: (t.double() if double else t.detach()).requires_grad_(name in wrt)
        for name, t in given.items()
    }
    output = function(**leaves)
    asked = {name: t for name, t in leaves.items() if t.requires_grad}
    gradients = torch.autograd.grad(output, list(asked.values()), doutput.to(output.dtype))
    return {"output": output.detach(), **dict(zip(asked, gradients, strict=True))}


def composed(activation, p=0.0, seed=None):
    """The same by torch, step by step, with the elements dropped that ours drops."""

    def function(input, weight, bias=None, residual=None):
        output = stock(input, weight, bias)
        if activation is not None:
            output = ACTIVATIONS[activation](output)
        if p:
            output = reference.dropout.dropout(output, p, seed)
        return output if residual is None else (residual + output).to(residual.dtype)

    return function


def check(cases, activation, *, p=0.0, residual=None, wrt=NAMES) -> None:
    """The output and the gradients of cases, pooled."""
    draws = []
    for number, case in enumerate(cases):
        given = tensors(case, residual, number)
        seed = drawn_seed(7) if p else None

        def ours(**tensors):
            return functional.linear(**tensors, activation=activation, dropout_p=p)

        theirs = composed(activation, p, seed)
        draws.append(
            (
                run(ours, given, case.doutput, wrt),
                run(theirs, given, case.doutput, wrt, double=True),
                run(theirs, given, case.doutput, wrt),
            )
        )
    for name, found in draws[0][0].items():
        of = given[name] if name != "output" else given.get("residual", given["input"])
        assert found.dtype is of.dtype, name
        three = ([draw[index][name] for draw in draws] for index in range(3))
        numerics.assert_close(*three, f"{activation} {p} {cases[0].text}: {name}")


# ---- values and gradients ------------------------------------------------------------------------


@dtypes
@activations
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("with_residual", [False, True])
def test_values(with_residual, p, activation, dtype):
    cases = [make(29, 40, 70, dtype, seed=seed) for seed in range(3)]
    check(cases, activation, p=p, residual=dtype if with_residual else None)


@pytest.mark.parametrize("shape", [(1, 1, 1), (13, 3, 15), (5, 400, 33), (40, 7, 1100)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shapes(dtype, shape):
    """Less than a vector, tails, several blocks of the sum, more columns than a tile of dropout."""
    cases = [make(*shape, dtype, seed=seed) for seed in range(6)]
    # Not 0.2, whose scale of nearly 1.25 makes many products of 8 bits nearly ties.
    check(cases, "gelu", p=0.3, residual=dtype)


@some
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_bias_in_more_dimensions(dtype, activation):
    cases = [make((2, 3, 5), 40, 24, dtype, bias=False, seed=seed) for seed in range(3)]
    check(cases, activation, p=0.1, residual=dtype)


@pytest.mark.parametrize("residual", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_residual_gives_the_dtype(dtype, residual):
    check([make(20, 64, 48, dtype, seed=seed) for seed in range(3)], "silu", residual=residual)


@pytest.mark.parametrize("wrt", [w for n in (1, 2, 3) for w in itertools.combinations(NAMES, n)])
def test_some_gradients(wrt):
    check([make(20, 30, 40, seed=seed) for seed in range(2)], "gelu", p=0.2, residual=F32, wrt=wrt)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_everything_is_dropped(activation):
    case = make(5, 8, 20)
    given = tensors(case, F32)
    found = run(
        lambda **t: functional.linear(**t, activation=activation, dropout_p=1.0),
        given,
        case.doutput,
    )
    assert torch.equal(found["output"], given["residual"])
    assert not any(found[name].any() for name in ("input", "weight", "bias"))


# ---- the activations themselves ------------------------------------------------------------------

# Between 1e-30 and 30, of both signs: where a gate is 0, where it is 1, and between.
GRID = torch.cat([torch.logspace(-30, 1.47, 4000, dtype=F64), torch.linspace(0, 14, 4000).double()])
GRID = torch.cat([GRID, -GRID]).float()
EPS = torch.finfo(F32).eps
# Relative errors of values and derivatives, in float32's epsilon. The rounding of the exponent
# alone gives 44 times epsilon at exp(-44), the end of float32's range for gelu; torch's gelu has no
# correct digit below -5.5.
# Without fused multiply-adds the reduced exponent is rounded too.
MORE = 64 if _C.cpu_level() == "baseline" else 0
MOST = {"relu": (0, 0), "silu": (4, 6), "gelu": (48, 48), "gelu_tanh": (128, 128)}


def slope(activation, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(ACTIVATIONS[activation](x).sum(), x)[0]


def exact(activation, x: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, without the cancellation in 1 + erf(x) and 1 + tanh(x)."""
    x = x.double()
    if activation == "gelu":
        gate = 0.5 * torch.erfc(-x * 0.5**0.5)
        return x * gate, gate + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
    if activation == "gelu_tanh":
        u, du = (2 / torch.pi) ** 0.5 * 2 * torch.stack([x + 0.044715 * x**3, 1 + 0.134145 * x * x])
        gate = torch.sigmoid(u)
        return x * gate, gate + x * gate * torch.sigmoid(-u) * du
    return ACTIVATIONS[activation](x), slope(activation, x)


@some
def test_activation_over_its_range(activation):
    """By a layer whose only weight is 1: relative to the value itself, in the tails too."""
    one, kind = torch.ones(1, 1), Activation[activation.upper()]
    value, derivative = exact(activation, GRID)
    found = functional.linear(GRID[:, None], one, activation=activation)[:, 0]
    upstream = torch.ones(GRID.shape)
    steep = RAW.linear_epilogue_backward(upstream, GRID, None, 0.0, kind, None)
    for ours, ref, most in zip((found, steep), (value, derivative), MOST[activation], strict=True):
        holds = ref.abs() > 1e-36
        error = (ours - ref).abs()
        small = holds if ours is found else holds & (ref.abs() > 0.05)  # not where it crosses zero
        assert (error[small] <= (most + MORE) * EPS * ref[small].abs()).all(), activation
        assert (error <= 3 * EPS * ref.abs().clamp(min=1)).all(), activation


SPECIAL = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 100.0, -100.0, 1e38, -1e38])


@some
@dtypes
def test_special_values(dtype, activation):
    """NaN, infinities and zeros in values and derivatives are torch's. But gelu of infinity is
    infinity, where torch's vector code gives NaN, and its scalar code does not."""
    special = SPECIAL[1:] if activation == "gelu" else SPECIAL
    x = special.to(dtype)[:, None].requires_grad_()
    one = torch.ones(1, 1, dtype=dtype)
    upstream = torch.ones(len(x), 1, dtype=dtype)
    found = functional.linear(x, one, activation=activation)
    expected = ACTIVATIONS[activation](x)
    torch.testing.assert_close(found, expected, equal_nan=True)
    (ours,) = torch.autograd.grad(found, x, upstream)
    (theirs,) = torch.autograd.grad(expected, x, upstream)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@dtypes
def test_gelu_of_infinity(dtype):
    x, one = torch.full((5, 1), torch.inf, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    assert (functional.linear(x, one, activation="gelu") == torch.inf).all()


def test_relu_of_nothing_hides_what_comes_back():
    """A gradient that is NaN where relu is 0 stays there, as in torch."""
    x, one = torch.tensor([[-1.0], [0.0], [2.0], [torch.nan]], requires_grad=True), torch.ones(1, 1)
    upstream = torch.tensor([[torch.nan], [torch.inf], [torch.nan], [5.0]])
    (found,) = torch.autograd.grad(functional.linear(x, one, activation="relu"), x, upstream)
    (expected,) = torch.autograd.grad(F.relu(x), x, upstream)
    torch.testing.assert_close(found, expected, equal_nan=True)


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_those_without_an_epilogue(dtype):
    """The saved preactivation is linear's output; relu and a residual of zeros do not change it."""
    case = make(50, 300, 530, dtype)
    given = list(case.tensors().values())
    plain = functional.linear(*given)
    for kind in Activation:
        saved = RAW.linear_epilogue_forward(*given, None, None, 0.0, kind, True)[1]
        assert torch.equal(bits(saved), bits(plain)), kind
    assert torch.equal(functional.linear(*given, activation="relu"), F.relu(plain))
    assert torch.equal(functional.linear(*given, residual=torch.zeros_like(plain)), plain)


@some
@pytest.mark.parametrize("dtype", [*FLOATS, F64], ids=str)
def test_saving_changes_no_output(dtype, activation):
    given = list(make(30, 200, 70, dtype).tensors().values())
    kind = Activation[activation.upper()]
    outputs = [
        RAW.linear_epilogue_forward(*given, None, None, 0.0, kind, save)[0]
        for save in (False, True)
    ]
    assert torch.equal(*outputs)


@dtypes
def test_rows_do_not_depend_on_one_another(dtype):
    case = make(70, 100, 90, dtype)
    whole = functional.linear(*case.tensors().values(), activation="gelu")
    for rows in (1, 2, 3, 7, 13, 24, 25):
        part = functional.linear(case.input[:rows], case.weight, case.bias, activation="gelu")
        assert torch.equal(part, whole[:rows]), rows


@pytest.mark.parametrize("rows", [3, 300])
def test_any_number_of_threads(rows):
    case = make(rows, 130, 1100)
    given = tensors(case, F32)
    before = torch.get_num_threads()

    def step(**leaves):
        return functional.linear(**leaves, activation="gelu", dropout_p=0.3)

    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(run(step, given, case.doutput))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize("activation", [None, "silu"])
def test_drops_the_elements_of_dropout(activation):
    case = make(60, 20, 1030)
    kept = torch.full_like(case.doutput, 1.0)
    torch.manual_seed(5)
    factor = functional.dropout(kept, 0.4)
    torch.manual_seed(5)
    found = functional.linear(*case.tensors().values(), activation=activation, dropout_p=0.4)
    assert torch.equal(found == 0, factor == 0)
    assert 0.37 < (found == 0).float().mean() < 0.43


# ---- layouts -------------------------------------------------------------------------------------


def test_strided_tensors():
    case = make((6, 5), 20, 30)
    given = tensors(case, F32)
    upstream = case.doutput.transpose(0, 1).contiguous().transpose(0, 1)
    strided = {
        "input": given["input"].transpose(0, 1).contiguous().transpose(0, 1),
        "weight": given["weight"].t().contiguous().t(),
        "bias": torch.stack([given["bias"]] * 2, 1)[:, 0],
        "residual": given["residual"]
        .flip(0)
        .flip(0)
        .permute(2, 0, 1)
        .contiguous()
        .permute(1, 2, 0),
    }

    def step(**leaves):
        return functional.linear(**leaves, activation="gelu", dropout_p=0.25)

    found = run(step, strided, upstream)
    assert_same_bits(found, run(step, given, case.doutput))


def test_an_expanded_upstream_gradient():
    x, w = torch.randn(7, 20, requires_grad=True), torch.randn(9, 20)
    (found,) = torch.autograd.grad(functional.linear(x, w, activation="silu").sum(), x)
    (expected,) = torch.autograd.grad(F.silu(F.linear(x, w)).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)], ids=str)
def test_empty(shape):
    check([make(*shape)], "gelu", residual=F32)
