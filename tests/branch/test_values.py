"""Values and gradients of calls whose branch is scaled, against torch's compositions."""

from __future__ import annotations

import pytest
import torch

import onepass
from onepass import functional
from tests.branch.cases import (
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    LONG,
    check,
    check_draws,
    dtypes,
    forms,
    make,
    results,
    scales,
)
from tests.emulator.executors import everywhere, on_cuda
from tests.support.results import assert_same_bits

pytestmark = pytest.mark.isa


@pytest.mark.emulator_grid(2)
@forms
@scales
@dtypes
def test_values_and_gradients(executor, dtype, scale, form):
    # A tail, a whole vector; on CUDA rows of a warp, aligned and not.
    for cols in (72, 257) if executor.is_cuda else (7, 100, 1030):
        draws = 8 if cols < 16 else executor.draws
        check_draws(form, (3, 5, cols), dtype, scale, draws=draws)


@pytest.mark.emulator_grid(2)
@forms
@scales
@dtypes
def test_with_dropout(executor, dtype, scale, form):
    for cols in (72, 257) if executor.is_cuda else (40, 1030):
        check_draws(form, (3, 5, cols), dtype, scale, p=0.3, draws=2)


@pytest.mark.emulator_grid
@forms
@dtypes
def test_long_rows(executor, dtype, form):
    """On CUDA longer than the rows that a norm keeps in registers, and several tiles of columns."""
    for cols in (LONG[dtype], LONG[dtype] + 3):
        check(make(form, (3, 2, cols), dtype, p=0.25))


@everywhere
@forms
@pytest.mark.parametrize("batch, tokens", [(1, 300), (3, 128), (300, 1), (1, 1)])
def test_rows(batch, tokens, form):
    """Sums of one run of rows, of several, of several chunks."""
    check(*(make(form, (batch, tokens, 264), seed=seed) for seed in range(2)))


@everywhere
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@forms
def test_16_bit_results_are_unbiased(dtype, form):
    check(make(form, (2, 32, 256), dtype, "columns"))


@everywhere
@pytest.mark.parametrize("form", ["layer", "rms", "add"])
@pytest.mark.parametrize(
    "dtype, scale, residual",
    [(BF16, F32, BF16), (BF16, F32, F32), (F16, F32, F16), (F32, BF16, F32), (BF16, F16, BF16)],
    ids=str,
)
def test_mixed_dtypes(executor, dtype, scale, residual, form):
    options = dict(scale_dtype=scale, residual_dtype=residual, draws=executor.draws)
    for cols in (129, 136):
        check_draws(form, (3, 5, cols), dtype, **options)


@everywhere
def test_without_weight_or_with_an_offset(executor):
    for form in ("layer", "rms"):
        check_draws(form, (3, 4, 72), affine=False, draws=executor.draws)
    check_draws("rms", (3, 4, 72), offset=1.0, draws=executor.draws)


@everywhere
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("form", ["layer", "rms"])
@pytest.mark.parametrize("cols", [65, 2056])
def test_scales_of_one_are_the_plain_call(executor, cols, form, p):
    """To the bit where rows are summed in the same order: the same terms are added."""
    case = make(form, (2, 9, cols), p=p)
    case.tensors["column_scale"].fill_(1.0)
    case.row_scale = torch.ones(2)
    found = results(case.ours, case)
    del case.tensors["column_scale"]
    case.row_scale = None
    expected = results(case.ours, case)
    for name in ("h", "y", "dinput", "dresidual"):
        if name == "h" or not executor.is_cuda:  # of modulated instances on CUDA: other threads
            assert torch.equal(found[name], expected[name]), name


@everywhere
@forms
@pytest.mark.parametrize("cols", [65, 2056])
def test_gradients_for_some_arguments_only(cols, form):
    case = make(form, (2, 40, cols), p=0.2)
    expected = results(case.ours, case)
    for names in (("input",), ("column_scale",), ("residual",), ("weight", "column_scale")):
        names = tuple(name for name in names if name in case.tensors)
        if not names:
            continue
        found = results(case.ours, case, wrt=names)
        assert_same_bits(found, {name: expected[name] for name in found}, str(names))
        assert {f"d{name}" for name in names} <= found.keys()


@pytest.mark.parametrize("threads", [2, 3, 5])
@forms
@pytest.mark.parametrize("batch, tokens", [(1, 700), (5, 140)])
def test_any_number_of_threads(batch, tokens, form, threads):
    case = make(form, (batch, tokens, 256), p=0.1)
    expected = results(case.ours, case)
    torch.set_num_threads(threads)
    assert_same_bits(results(case.ours, case), expected)


@pytest.mark.parametrize("form", ["layer", "add"])
def test_samples_do_not_depend_on_the_batch(form):
    case = make(form, (4, 50, 100), BF16)
    expected = results(case.ours, case)
    one = make(form, (1, 50, 100), BF16)
    one.tensors |= {n: t[2:3] if t.dim() > 1 else t for n, t in case.tensors.items()}
    one.row_scale = case.row_scale[2:3]
    one.gradients = tuple(gradient[2:3] for gradient in case.gradients)
    found = results(one.ours, one)
    for name in set(found) & {"y", "h", "dinput", "dresidual"}:
        assert torch.equal(found[name], expected[name][2:3]), name


@on_cuda
@dtypes
@pytest.mark.parametrize("form", ["add", "alone"])
@pytest.mark.parametrize("shape", [(3, 5, 72), (3, 2, 257), (4, 8)], ids=str)
def test_bitwise_the_cpus(executor, shape, dtype, form):
    """From one seed: the sum, and the gradient of the branch."""
    case = make(form, shape, dtype, p=0.3)
    t, scales = case.tensors, (case.tensors["column_scale"], case.row_scale)
    seed = torch.tensor([3, 4])
    forward = (t["input"], t.get("residual"), *scales, seed, 0.3, None)
    assert torch.equal(RAW_FORWARD(*forward), torch.ops.onepass.branch_forward(*forward))
    backward = (case.gradients[0], t["input"], *scales, seed, 0.3, None, 1)
    found = torch.ops.onepass.branch_backward(*backward)[0]
    assert torch.equal(RAW_BACKWARD(*backward)[0], found)


RAW_FORWARD = torch.ops.onepass.branch_forward.default  # the CPU's, whatever the executor
RAW_BACKWARD = torch.ops.onepass.branch_backward.default


# ---- dropped samples -----------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("by_keep", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.25, 0.9, 1.0])
def test_factors_of_samples(p, by_keep):
    """timm's DropPath: 0 or 1 / keep, of whole samples, from dropout's stream."""
    x = torch.ones(400, 3, 2)
    torch.manual_seed(3)
    scale = functional.drop_path_scale(x, p, True, by_keep)
    if p == 0.0:
        assert scale is None
        return
    torch.manual_seed(3)
    expected = functional.dropout(torch.ones(400), p)
    assert torch.equal(scale, expected if by_keep else (expected != 0).float())
    assert scale.dtype == F32 and 0 < int((scale == 0).sum()) <= 400
    torch.manual_seed(3)
    y = onepass.nn.DropPath(p, by_keep)(x)
    assert torch.equal(y, scale[:, None, None].expand_as(x))
    assert functional.drop_path_scale(x.double(), p, True, by_keep).dtype == F64


def test_nothing_is_drawn_in_evaluation():
    x, state = torch.ones(4, 3), torch.get_rng_state()
    module = onepass.nn.DropPath(0.5).eval()
    assert module(x) is x and module.row_scale(x) is None
    assert onepass.nn.DropPath(0.0)(x) is x
    assert functional.drop_path_scale(x, 0.5, False) is None
    assert torch.equal(state, torch.get_rng_state())


@everywhere
@forms
@dtypes
def test_dropped_samples_are_not_read(dtype, form):
    """NaN in them has no effect: the stream passes, their gradient is 0, gamma's has no NaN."""
    case = make(form, (4, 5, 72), dtype, p=0.2)
    dropped = case.row_scale == 0
    expected = results(case.ours, case)
    case.tensors["input"][dropped] = float("nan")
    assert_same_bits(results(case.ours, case), expected)
    assert not expected["dinput"][dropped].any() and expected["dinput"][~dropped].any()
    if form != "alone":
        assert torch.equal(expected["h"][dropped], case.tensors["residual"][dropped])


@everywhere
@pytest.mark.parametrize("form", FORMS)
def test_an_infinite_scale_of_a_dropped_sample(form):
    case = make(form, (4, 5, 72))
    case.tensors["column_scale"].fill_(float("inf"))
    dropped = case.row_scale == 0
    found = results(case.ours, case)
    assert found["h"][dropped].isfinite().all() and not found["dinput"][dropped].any()


# ---- as models have them -------------------------------------------------------------------------


class Block(torch.nn.Module):
    """The second half of a block of timm's VisionTransformer, as timm writes it."""

    def __init__(self, dim: int, scale: torch.nn.Module, drop_path: torch.nn.Module):
        super().__init__()
        self.ls, self.drop_path, self.norm = scale, drop_path, torch.nn.LayerNorm(dim)

    def forward(self, branch, x):
        x = x + self.drop_path(self.ls(branch))
        return self.norm(x), x


@dtypes
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_a_block_of_a_vision_transformer(p, dtype):
    """Separate modules, and one call: the same seed drops the same samples."""
    ours = Block(64, onepass.nn.LayerScale(64, 0.1), onepass.nn.DropPath(p)).to(dtype)
    branch, x = torch.randn(6, 9, 64).to(dtype), torch.randn(6, 9, 64).to(dtype)
    torch.manual_seed(1)
    modules = ours(branch, x)
    torch.manual_seed(1)
    fused = functional.add_layer_norm(
        branch,
        x,
        64,
        ours.norm.weight,
        ours.norm.bias,
        column_scale=ours.ls.gamma,
        row_scale=ours.drop_path.row_scale(branch),
    )
    if dtype in (F32, F64):  # 16-bit modules round between
        torch.testing.assert_close(fused, modules)
    kept = (fused[1] != x).flatten(1).any(1)
    assert torch.equal(kept, (modules[1] != x).flatten(1).any(1))
    assert kept.all() == (p == 0.0)


def test_modules():
    drop_path = onepass.nn.DropPath(0.12345)
    assert repr(drop_path) == "DropPath(drop_prob=0.123)" and not drop_path.state_dict()
    assert drop_path.scale_by_keep is True and onepass.nn.DropPath().drop_prob == 0.0
    scale = onepass.nn.LayerScale(8, init_values=0.5, dtype=BF16)
    assert list(scale.state_dict()) == ["gamma"] and scale.gamma.dtype == BF16
    assert torch.equal(scale.gamma, torch.full((8,), 0.5, dtype=BF16))
    x = torch.randn(2, 3, 8)
    assert torch.equal(scale(x), x * 0.5)
    into = onepass.nn.LayerScale(8, 0.5, inplace=True).requires_grad_(False)
    assert into(x) is x
    norm = onepass.nn.AddLayerNorm(8)
    gamma, factors = torch.randn(8), torch.tensor([0.0, 2.0])
    found = norm(x, x, gamma, factors)
    expected = functional.add_layer_norm(
        x, x, 8, norm.weight, norm.bias, column_scale=gamma, row_scale=factors
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    rms = onepass.nn.AddRMSNorm(8)
    found = rms(x, x, row_scale=factors)
    assert torch.equal(found[1][0], x[0]) and torch.equal(found[1][1], 3 * x[1])


@pytest.mark.parametrize("format", [torch.channels_last, torch.contiguous_format])
def test_drop_path_of_images(format):
    x = torch.randn(6, 4, 3, 5).to(memory_format=format).requires_grad_()
    torch.manual_seed(1)
    y = onepass.nn.DropPath(0.5)(x)
    assert y.is_contiguous(memory_format=format)
    torch.manual_seed(1)
    factors = functional.drop_path_scale(x, 0.5)
    assert torch.equal(y, x * factors.view(6, 1, 1, 1))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, factors.view(6, 1, 1, 1).expand_as(x))


@everywhere
def test_without_a_residual():
    """The first block: residual_out is the scaled branch, in residual_dtype."""
    x, gamma, factors = torch.randn(3, 4, 2, 8), torch.randn(2, 8), torch.tensor([0.0, 2.0, 1.0])
    y, stream = functional.add_layer_norm(
        x.to(BF16), None, (2, 8), residual_dtype=F32, column_scale=gamma, row_scale=factors
    )
    expected = x.to(BF16).float() * gamma * factors.view(3, 1, 1, 1)
    assert y.dtype == BF16 and stream.dtype == F32
    torch.testing.assert_close(stream, expected)
    assert torch.equal(y, functional.layer_norm(stream, (2, 8)).to(BF16))
