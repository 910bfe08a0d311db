"""Values and gradients of modulated norms, against torch's compositions by the numerics rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional, numerics
from tests.emulator.executors import everywhere
from tests.modulated_norm.cases import (
    BF16,
    F16,
    F32,
    F64,
    LONG,
    PER,
    check,
    check_draws,
    dtypes,
    kinds,
    make,
    pers,
    raw_backward,
    raw_forward,
    results,
)
from tests.support.results import assert_same_bits

pytestmark = pytest.mark.isa
rms_or_layer = pytest.mark.parametrize("rms", [False, True])


@pytest.mark.emulator_grid(2)
@kinds
@pers
@dtypes
def test_values_and_gradients(executor, dtype, per, rms, form):
    # A block of four rows and a single row; full and partly filled warps; a tail.
    for cols in (72, 1001) if executor.is_cuda else (7, 100):
        draws = 8 if cols < 16 else executor.draws
        check_draws(rms, 2, 5, cols, dtype, per, form, draws=draws)


@everywhere
@dtypes
@pytest.mark.parametrize("form", ["plain", "add", "gated"])
@pytest.mark.parametrize("eps", [1e-5, 1e-12])
def test_one_column_has_no_gradient(form, dtype, eps):
    """A large factor, 1 / sqrt(eps), of a difference that must be 0."""
    case = make(False, 3, 16, 1, dtype, form=form)
    case.eps = eps
    found = results(case.ours, case)
    assert torch.equal(found["y"], case.tensors["shift"][:, None].expand(3, 16, 1))
    assert not found["dscale"].any()
    through = torch.zeros_like(case.gradients[0]) if form == "plain" else case.gradients[1]
    if form != "plain":
        assert torch.equal(found["dresidual"], through)
    if form == "gated":
        through = through * case.tensors["gate"][:, None]
    assert torch.equal(found["dinput"], through)


@pytest.mark.emulator_grid
@kinds
@dtypes
def test_long_rows(executor, dtype, rms, form):
    """On CUDA too long for registers."""
    for cols in (LONG[dtype], LONG[dtype] + 3):
        check(make(rms, 2, 2, cols, dtype, "ones", form))


@everywhere
@pytest.mark.parametrize("form", ["plain", "gated"])
@pytest.mark.parametrize("batch, tokens", [(1, 300), (3, 128), (2, 64), (5, 1), (1, 1)])
def test_rows(batch, tokens, form):
    """On the CPU a sample's gradients sum one chunk, several, or several runs in each."""
    check(*(make(False, batch, tokens, 264, form=form, seed=seed) for seed in range(2)))


@everywhere
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pers
def test_16_bit_results_are_unbiased(dtype, per):
    check(make(False, 2, 32, 256, dtype, per, "gated"))


@everywhere
@pers
@pytest.mark.parametrize(
    "dtype, scale, residual",
    [(BF16, F32, BF16), (BF16, F32, F32), (F16, F32, F16), (F32, BF16, F32), (BF16, F16, BF16)],
    ids=str,
)
def test_mixed_dtypes(executor, dtype, scale, residual, per):
    """Scale, shift and gate of a timestep in float32; the output has the input's dtype."""
    options = dict(scale_dtype=scale, residual_dtype=residual, draws=executor.draws)
    for cols in (129, 136):
        check_draws(False, 2, 5, cols, dtype, per, "gated", **options)
    check_draws(True, 2, 5, 136, dtype, per, scale_dtype=scale, draws=executor.draws)


@everywhere
@rms_or_layer
@pytest.mark.parametrize("form", ["plain", "add"])
@pytest.mark.parametrize("shift", [False, True])
def test_without_shift_or_gate(executor, shift, form, rms):
    check_draws(rms, 2, 6, 72, form=form, shift=shift, draws=executor.draws)


@pytest.mark.parametrize("residual_dtype", [F32, BF16], ids=str)
def test_add_of_two_dtypes(residual_dtype):
    check(make(False, 2, 9, 600, BF16, form="add", residual_dtype=residual_dtype))


@everywhere
@pytest.mark.parametrize("cols", [65, 2056])
def test_gradients_for_some_arguments_only(cols):
    expected = results((case := make(False, 2, 40, cols, form="gated")).ours, case)
    for names in (("input",), ("residual",), ("scale",), ("shift",), ("gate",), ("input", "gate")):
        found = results(case.ours, case, wrt=names)
        assert_same_bits(found, {name: expected[name] for name in found}, str(names))
        assert {f"d{name}" for name in names} <= found.keys()


@everywhere
@pytest.mark.parametrize("through", [0, 1])
def test_gradients_through_one_output(through):
    case = make(False, 2, 6, 40, form="gated")
    leaves = {name: tensor.requires_grad_() for name, tensor in case.tensors.items()}
    found = torch.autograd.grad(
        case.ours(**leaves)[through], list(leaves.values()), case.gradients[0], allow_unused=True
    )
    base = torch.autograd.grad(
        case.torchs(**leaves)[through], list(leaves.values()), case.gradients[0], allow_unused=True
    )
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in leaves.items()}
    exact = torch.autograd.grad(
        case.definition(**dict(wide))[through],
        list(wide.values()),
        case.gradients[0].double(),
        allow_unused=True,
    )
    for name, one, ref, other in zip(leaves, found, exact, base, strict=True):
        assert (one is None) == (ref is None), name
        if one is not None:
            numerics.assert_close(one, ref, other, name)


@everywhere
def test_a_backward_of_the_operator():
    """Gradients outside the mask have size 0; an upstream gradient may have another dtype."""
    case = make(False, 2, 5, 64, BF16, form="gated", scale_dtype=F32)
    t, (doutput, dh) = case.tensors, case.gradients
    _, h, mean, rstd = raw_forward(**t)
    rest = dict(branch=t["input"], gate=t["gate"], mean=mean, rstd=rstd, shift=t["shift"])
    every = raw_backward(h, t["scale"], doutput=doutput, dresidual_out=dh, **rest)
    expected = results(case.ours, case)
    names = ("dinput", "dresidual", "dscale", "dshift", "dgate")
    assert_same_bits(dict(zip(names, every, strict=True)), {n: expected[n] for n in names})
    for mask in (0, 2, 9, 20):
        found = raw_backward(
            h, t["scale"], doutput=doutput, dresidual_out=dh, grad_mask=mask, **rest
        )
        for bit, (one, other) in enumerate(zip(found, every, strict=True)):
            assert one.dtype == other.dtype
            assert torch.equal(one, other) if mask >> bit & 1 else one.shape == (0,)
    wide = raw_backward(h, t["scale"], doutput=doutput.float(), dresidual_out=dh, **rest)
    for one, other in zip(wide, every, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("batch, tokens", [(1, 700), (5, 140)])
def test_any_number_of_threads(batch, tokens, per, threads):
    case = make(False, batch, tokens, 256, per=per, form="gated")
    expected = results(case.ours, case)
    torch.set_num_threads(threads)
    assert_same_bits(results(case.ours, case), expected)


@pytest.mark.parametrize("cols", [96, 1000])
def test_samples_do_not_depend_on_the_batch(cols):
    """Outputs and gradients of a sample do not depend on others or on its place, bit for bit."""
    case = make(False, 4, 150, cols, BF16, "ones", "gated", scale_dtype=F32)
    expected = results(case.ours, case)
    one = make(False, 1, 150, cols)
    one.tensors = {name: tensor[2:3] for name, tensor in case.tensors.items()}
    one.gradients = tuple(gradient[2:3] for gradient in case.gradients)
    assert_same_bits(results(one.ours, one), {n: t[2:3] for n, t in expected.items()})


@everywhere
@pers
def test_as_a_plain_norm_with_weight_and_bias(per):
    """One scale for all: a weight that is 1 + scale, bit for bit on the CPU's path of rows."""
    x, scale, shift = torch.randn(1, 12, 72), torch.randn(72), torch.randn(72)
    size = {"sample": (1, 72), "ones": (1, 1, 72), "row": (1, 12, 72)}[per]
    found = functional.modulated_layer_norm(x, 72, scale.expand(size), shift.expand(size))
    assert torch.equal(found, functional.layer_norm(x, 72, 1 + scale, shift))


# ---- as models have them -------------------------------------------------------------------------


def three_ways(ours, theirs, *tensors, dtype):
    """(ours, in float64, theirs) of a composition, and of its gradients."""
    found = []
    for function, of in ((ours, dtype), (theirs, F64), (theirs, dtype)):
        leaves = [t.to(of).detach().requires_grad_() for t in tensors]
        outputs = function(*leaves)
        loss = sum(output.float().square().sum() for output in outputs)
        found.append([*outputs, *torch.autograd.grad(loss, leaves)])
    return zip(*found, strict=True)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_diffusers_ada_layer_norm_zero(dtype):
    """DiT's, and the gated residual after it as in diffusers' BasicTransformerBlock."""
    normalization = pytest.importorskip("diffusers.models.normalization")
    module = normalization.AdaLayerNormZero(48)
    x, branch, embedding = torch.randn(3, 20, 48), torch.randn(3, 20, 48), torch.randn(3, 48)
    parts = module.linear(module.silu(embedding)).detach()

    def theirs(x, parts, branch):
        module.emb, module.silu, module.linear = None, torch.nn.Identity(), torch.nn.Identity()
        y, gate, shift_mlp, scale_mlp, _ = module(x, emb=parts)
        h = x + gate.unsqueeze(1) * branch
        return y, module.norm(h) * (1 + scale_mlp[:, None]) + shift_mlp[:, None], h

    def ours(x, parts, branch):
        shift, scale, gate, shift_mlp, scale_mlp, _ = parts.chunk(6, dim=1)
        norm = onepass.nn.ModulatedLayerNorm(48, eps=1e-6)
        return norm(x, scale, shift), *norm(branch, scale_mlp, shift_mlp, x, gate)

    for three in three_ways(ours, theirs, x, parts, branch, dtype=dtype):
        numerics.assert_close(*three)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_diffusers_ada_layer_norm_continuous(dtype, kind):
    normalization = pytest.importorskip("diffusers.models.normalization")
    module = normalization.AdaLayerNormContinuous(
        48, 32, elementwise_affine=False, eps=1e-6, norm_type=kind
    )
    parts = module.linear(module.silu(torch.randn(3, 32))).detach()
    module.silu = module.linear = torch.nn.Identity()

    def ours(x, parts):
        scale, shift = parts.chunk(2, dim=1)
        function = getattr(functional, f"modulated_{kind}")
        return (function(x, 48, scale, shift, 1e-6),)

    x = torch.randn(3, 20, 48)
    for three in three_ways(ours, lambda *t: (module(*t),), x, parts, dtype=dtype):
        numerics.assert_close(*three)


def test_diffusers_fp32_layer_norm_of_a_float32_timestep():
    """As Wan's block: float32 modulation of a bfloat16 stream, in float32 and back."""
    normalization = pytest.importorskip("diffusers.models.normalization")
    norm = normalization.FP32LayerNorm(64, eps=1e-6, elementwise_affine=False)
    table = torch.randn(2, 6, 64)
    shift, scale, gate = table.chunk(6, dim=1)[:3]
    x, branch = torch.randn(2, 9, 64).to(BF16), torch.randn(2, 9, 64).to(BF16)

    def theirs(x, branch, of):
        h = (x.to(of) + branch.to(of) * gate.to(of)).to(x.dtype)
        return (norm(h.to(of)) * (1 + scale.to(of)) + shift.to(of)).to(x.dtype), h

    ours = functional.modulated_layer_norm(branch, 64, scale, shift, 1e-6, residual=x, gate=gate)
    assert torch.equal(ours[1], theirs(x, branch, F32)[1])
    h = ours[1].double()
    exact = F.layer_norm(h, (64,), eps=1e-6) * (1 + scale.double()) + shift.double()
    numerics.assert_close(ours[0], exact, theirs(x, branch, F32)[0])


@rms_or_layer
def test_modules(rms):
    name = "RMSNorm" if rms else "LayerNorm"
    module = getattr(onepass.nn, f"Modulated{name}")(16, eps=1e-3)
    case = make(rms, 2, 5, 16, form="gated")
    case.eps = 1e-3
    t = case.tensors
    found = module(t["input"], t["scale"], t["shift"], t["residual"], t["gate"])
    for one, other in zip(found, case.ours(**t), strict=True):
        assert torch.equal(one, other)
    assert torch.is_tensor(module(t["input"], t["scale"]))
    assert not list(module.parameters()) and not module.state_dict()
    assert repr(module) == f"Modulated{name}((16,), eps=0.001)"
    assert getattr(onepass.nn, f"Modulated{name}")((4, 16)).eps == (None if rms else 1e-5)
