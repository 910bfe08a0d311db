"""Values and gradients of cross entropy, against torch's by the numerics rule."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from onepass import numerics, reference
from tests.emulator.executors import everywhere
from tests.loss.cases import OPTIONS, RAW, check, dtypes, make, make_linear, options, results
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.results import assert_same_bits

pytestmark = pytest.mark.isa
KINDS = ["logits", "layer"]
LACKING = {"softcap", "z_loss"}  # in torch


@everywhere
@pytest.mark.emulator_grid(2)
@options
@dtypes
def test_values_and_gradients(executor, dtype, option):
    """Rows of one warp, and more columns than a tile of the CPU's.

    Only the targets' gradients are large in 16 bits, too few to measure a bias: so cases have fewer
    elements than the bias rule needs.
    """
    check(*(make(4, 190, dtype, **OPTIONS[option], seed=seed) for seed in range(5)))
    draws = range(1 if dtype.itemsize == 2 else 4 * executor.draws)
    check(*(make(1, 2053, dtype, **OPTIONS[option], seed=seed) for seed in draws))


@options
def test_larger_logits_in_later_tiles(option):
    """The sums of earlier tiles, of exponentials and of logits, are those below the new maximum."""
    cases = [make(2, 4200, **OPTIONS[option], ignored=False, seed=seed) for seed in range(8)]
    for case in cases:
        case.input = case.input.sort(-1).values
    check(*cases)


@everywhere
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_16_bit_gradients_are_unbiased(dtype, softcap):
    check(make(1500, 8, dtype, reduction="none", softcap=softcap))


@everywhere
@pytest.mark.parametrize("option", ["mean", "none", "sum"])
@pytest.mark.parametrize(
    "make", [partial(make, 1, 300), partial(make_linear, 1, 12, 300)], ids=KINDS
)
def test_one_row_without_a_batch(make, option):
    case = make(**OPTIONS[option])
    expected = results(case.ours, case)
    case.input, case.target = case.input[0], case.target[0]
    case.dloss = case.dloss.reshape(())
    found = results(case.ours, case)
    expected["loss"], expected["dinput"] = expected["loss"].reshape(()), expected["dinput"][0]
    assert_same_bits(found, expected, option)


@everywhere
@dtypes
@options
@pytest.mark.grid(2)
def test_a_gradient_in_place_has_the_same_bits(option, dtype):
    case = make(5, 1001, dtype, **OPTIONS[option])
    assert_same_bits(results(case.inplace, case), results(case.ours, case))


@everywhere
def test_losses_of_another_dtype():
    """Under autocast: a float32 loss of 16-bit logits, not rounded in between."""
    case = make(6, 700, BF16, reduction="none")
    exact = case.formula(case.input.double())
    loss, statistics, _ = RAW.loss_forward(case.input, case.target, None, -100, 0, 0, 0, 0, F32)
    base = F.cross_entropy(case.input.float(), case.target, reduction="none")
    numerics.assert_close(loss, exact, base)
    assert statistics.dtype is F32 and loss.dtype is F32


@everywhere
def test_an_upstream_gradient_of_another_dtype():
    """A dtype that autograd never passes."""
    case = make(6, 700, BF16, reduction="none")
    arguments = (case.input, case.target, None, -100, 0.0, 0.0, 0)
    _, *saved = RAW.loss_forward(*arguments, 0.0, None)
    expected = RAW.loss_backward(*arguments, case.dloss, *saved)
    for wide in (F32, F16):
        dloss = case.dloss.to(wide)
        found = RAW.loss_backward(*arguments, dloss, *saved)
        exact = RAW.loss_backward(*arguments, dloss.to(BF16), *saved)
        assert torch.equal(found, expected) and torch.equal(exact, expected)


@everywhere
@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16], ids=str)
def test_weights_of_another_dtype(weight_dtype):
    """torch refuses them; here all are float32, which holds each of them."""
    case = make(6, 300, BF16, weighted=True, label_smoothing=0.1)
    case.weight = case.weight.to(weight_dtype)
    exact = case.formula(case.input.double(), weight=case.weight.double())
    found = case.ours(case.input, weight=case.weight)
    base = case.torchs(case.input, weight=case.weight.bfloat16())
    numerics.assert_close(found, exact, base)


@everywhere
@pytest.mark.parametrize("index", [-100, 3, -1, 10**12])
def test_ignored_rows(index):
    case = make(8, 50, ignore_index=index, reduction="sum")
    case.target[[0, 4]] = index
    check(case)
    assert not results(case.ours, case)["dinput"][case.target == index].any()


def test_any_number_of_threads():
    """The mean of rows: all_families/test_parallel.py."""
    case = make(29, 5003, **OPTIONS["all"] | {"reduction": "mean"})
    expected = results(case.ours, case)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert_same_bits(results(case.ours, case), expected)


@pytest.mark.parametrize("option", [o for o in OPTIONS if not LACKING & {*OPTIONS[o]}])
def test_the_reference_is_torchs(option):
    """Where torch has the option."""
    case = make(6, 40, F64, **OPTIONS[option])
    torch.testing.assert_close(results(case.formula, case), results(case.torchs, case))


def test_the_reference_of_what_torch_lacks():
    case = make(6, 40, F64, ignored=False, reduction="none")
    x, capped = case.input, 2.0 * (case.input / 2.0).tanh()
    assert torch.allclose(
        reference.loss.cross_entropy(x, case.target, softcap=2.0, reduction="none"),
        F.cross_entropy(capped, case.target, reduction="none"),
    )
    assert torch.allclose(
        reference.loss.cross_entropy(x, case.target, z_loss=0.5, reduction="none"),
        F.cross_entropy(x, case.target, reduction="none") + 0.5 * x.logsumexp(-1) ** 2,
    )
