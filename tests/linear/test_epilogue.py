"""Epilogues: activation, dropout and residual, against the same steps of torch after F.linear, by
the numerics rule."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import _C, functional
from onepass._ops.linear import Activation
from tests.linear.cases import ACTIVATIONS, FLOATS, RAW, check, dtypes, make, results
from tests.support.dtypes import F32, F64
from tests.support.results import bits

pytestmark = pytest.mark.isa
some = pytest.mark.parametrize("activation", list(ACTIVATIONS))


# ---- values and gradients ------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("with_residual", [False, True])
def test_values(with_residual, p, activation, dtype):
    residual = dtype if with_residual else None
    cases = [make(29, 40, 70, dtype, residual=residual, seed=seed) for seed in range(3)]
    check(*cases, activation=activation, p=p)


@pytest.mark.parametrize(
    "rows, in_features, out_features",
    [(1, 1, 1), (13, 3, 15), (5, 400, 33), (40, 7, 1100), (0, 4, 5), (3, 0, 5), (3, 4, 0)],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shapes(dtype, rows, in_features, out_features):
    """Less than a vector, tails, several blocks of the sum, more columns than a tile of dropout."""
    sizes = rows, in_features, out_features
    # Not 0.2, whose scale of nearly 1.25 makes many products of 8 bits nearly ties.
    check(*(make(*sizes, dtype, residual=dtype, seed=seed) for seed in range(6)),
          activation="gelu", p=0.3)  # fmt: skip


@some
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_bias_in_more_dimensions(dtype, activation):
    options = {"bias": False, "residual": dtype}
    cases = [make((2, 3, 5), 40, 24, dtype, **options, seed=seed) for seed in range(3)]
    check(*cases, activation=activation, p=0.1)


@pytest.mark.parametrize("residual", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_residual_gives_the_dtype(dtype, residual):
    cases = [make(20, 64, 48, dtype, residual=residual, seed=seed) for seed in range(3)]
    check(*cases, activation="silu")


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_everything_is_dropped(activation):
    case = make(5, 8, 20, residual=F32)

    def dropped(**tensors):
        return functional.linear(**tensors, activation=activation, dropout_p=1.0)

    found = results(dropped, case)
    assert torch.equal(found["output"], case.residual)
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
    one = torch.ones(1, 1, dtype=dtype)
    infinite = torch.full((5, 1), torch.inf, dtype=dtype)
    assert (functional.linear(infinite, one, activation=activation) == torch.inf).all()
    special = SPECIAL[1:] if activation == "gelu" else SPECIAL
    x = special.to(dtype)[:, None].requires_grad_()
    both = [functional.linear(x, one, activation=activation), ACTIVATIONS[activation](x)]
    both += [torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in both]
    torch.testing.assert_close(both[::2], both[1::2], equal_nan=True)


def test_relu_of_nothing_hides_what_comes_back():
    """A gradient that is NaN where relu is 0 stays there, as in torch."""
    x, one = torch.tensor([[-1.0], [0.0], [2.0], [torch.nan]], requires_grad=True), torch.ones(1, 1)
    upstream = torch.tensor([[torch.nan], [torch.inf], [torch.nan], [5.0]])
    (found,) = torch.autograd.grad(functional.linear(x, one, activation="relu"), x, upstream)
    (expected,) = torch.autograd.grad(F.relu(x), x, upstream)
    torch.testing.assert_close(found, expected, equal_nan=True)


# ---- the same bits -------------------------------------------------------------------------------


@dtypes
def test_sums_are_those_without_an_epilogue(dtype):
    """The saved preactivation is linear's output; relu and a residual of zeros do not change it,
    and saving changes no output."""
    case = make(50, 300, 530, dtype)
    given = list(case.tensors().values())
    plain = functional.linear(*given)
    for kind in Activation:
        output, saved = RAW.linear_epilogue_forward(*given, None, None, 0.0, kind, True)
        assert torch.equal(bits(saved), bits(plain)), kind
        alone, _ = RAW.linear_epilogue_forward(*given, None, None, 0.0, kind, False)
        assert torch.equal(output, alone), kind
    assert torch.equal(functional.linear(*given, activation="relu"), F.relu(plain))
    assert torch.equal(functional.linear(*given, residual=torch.zeros_like(plain)), plain)
