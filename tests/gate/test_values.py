"""Values and gradients of gated activations, against torch's compositions by the numerics rule."""

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional, numerics, reference
from tests.emulator.executors import everywhere
from tests.gate.cases import activations, check, dtypes, forms, make, results
from tests.support.dtypes import BF16, F16, F32, F64

pytestmark = pytest.mark.isa


@everywhere
@pytest.mark.grid(4)
@activations
@dtypes
@forms
def test_values_and_gradients(executor, form, dtype, activation):
    # More than a tile of the CPU's, a tail, and draws for pooled errors; 16 bits have a bias.
    rows = 9 if dtype.itemsize == 2 else 3
    check(*(make(rows, 1001, dtype, activation, form, seed=seed) for seed in range(executor.draws)))


@everywhere
@pytest.mark.parametrize("doutput", [None, F32, F16], ids=str)
@pytest.mark.parametrize("dtype, up", [(BF16, F32), (F32, BF16), (F16, BF16), (F16, F32)], ids=str)
def test_mixed_dtypes_promote_as_torchs(dtype, up, doutput):
    case = make(3, 700, dtype, "gelu", up_dtype=up)
    assert case.doutput.dtype is F32
    if doutput is None:
        return check(case)
    # An upstream gradient of another dtype, which autograd never passes.
    gate, up = case.factors
    doutput = case.doutput.to(doutput)
    found = torch.ops.onepass.gate_backward(doutput, gate, up, 3, False, 3)
    case.doutput = doutput.double()
    exact, base = results(case.torchs, case, double=True), results(case.torchs, case)
    for name, gradient in zip(("dgate", "dup"), found, strict=True):
        numerics.assert_close(gradient, exact[name], base[name], name)


@everywhere
@dtypes
def test_a_backward_for_one_factor(dtype):
    case = make(5, 300, dtype)

    def backward(mask):
        return torch.ops.onepass.gate_backward(case.doutput, *case.factors, 2, False, mask)

    both = backward(3)
    for mask in range(3):
        for bit, (one, other) in enumerate(zip(backward(mask), both, strict=True)):
            assert one.dtype is dtype
            assert torch.equal(one, other) if mask >> bit & 1 else one.shape == (0,)


@activations
def test_halves_are_the_two_factors(activation):
    """Halves of one tensor give the same bits as two factors, and one gradient for both."""
    two = make(7, 96, BF16, activation)
    expected = results(two.ours, two)
    for order in (1, -1):
        halves = make(7, 96, BF16, activation, "halves" if order == 1 else "halves, gate last")
        halves.factors, halves.doutput = [torch.cat(two.factors[::order], -1)], two.doutput
        found = results(halves.ours, halves)
        assert torch.equal(found["output"], expected["output"])
        gradients = [expected["dgate"], expected["dup"]][::order]
        assert torch.equal(found["dgate"], torch.cat(gradients, -1))


def test_named_functions():
    gate, up = make(4, 50).factors
    both = torch.cat([gate, up], -1)
    gated = functional.gated_activation
    for factors in ((gate, up), (both,)):
        assert torch.equal(functional.silu_mul(*factors), gated(*factors))
        assert torch.equal(functional.gelu_mul(*factors), gated(*factors, activation="gelu"))
        assert torch.equal(
            functional.gelu_mul(*factors, approximate="tanh"),
            gated(*factors, activation="gelu_tanh"),
        )
    glu = gated(both, activation="sigmoid", gate_last=True)
    numerics.assert_close(glu, F.glu(both.double()), F.glu(both))


# ---- as models have them -------------------------------------------------------------------------


def test_llamas_mlp():
    """transformers' own, with its state_dict."""
    transformers = pytest.importorskip("transformers", reason="compares with its LlamaMLP")
    from transformers.models.llama.modeling_llama import LlamaMLP

    theirs = LlamaMLP(transformers.LlamaConfig(hidden_size=64, intermediate_size=136))
    ours, x = onepass.nn.GatedMLP(64, 136), torch.randn(3, 20, 64)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    numerics.assert_close(ours(x), theirs.double()(x.double()), theirs.float()(x))


@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(bias):
    module = onepass.nn.GatedMLP(16, 40, "gelu_tanh", bias)
    assert len(list(module.parameters())) == (6 if bias else 3)
    assert "activation='gelu_tanh'" in repr(module)
    x = torch.randn(5, 16)
    gate, up = module.gate_proj(x), module.up_proj(x)
    expected = module.down_proj(F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(module(x), expected)


def test_the_reference_is_torchs():
    x = torch.randn(50, dtype=F64)
    found = {name: f(x) for name, f in reference.gate.ACTIVATIONS.items()}
    expected = {
        "relu": x.clamp(min=0), "silu": x / (1 + (-x).exp()),
        "gelu": x * torch.distributions.Normal(0, 1).cdf(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"), "sigmoid": 1 / (1 + (-x).exp()),
        "relu2": x.clamp(min=0) ** 2, "quick_gelu": x / (1 + (-1.702 * x).exp()),
    }  # fmt: skip
    torch.testing.assert_close(found, expected)
