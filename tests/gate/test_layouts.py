"""Every layout of every tensor: the same bits as dense ones, read in place or copied once."""

import pytest
import torch

from onepass import functional
from tests.emulator.executors import everywhere
from tests.gate.cases import RAW, check, dtypes, forms, make, results
from tests.support.allocations import allocated
from tests.support.layouts import LAYOUTS, strided

pytestmark = pytest.mark.isa


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1])
def test_views_are_not_copied(which, layout):
    """Except views whose columns are not dense: nothing but the output is allocated."""
    case = make((24, 3), 32)
    case.factors[which] = strided(case.factors[which], layout)
    is_copied = case.factors[which].stride(-1) != 1
    taken = allocated(RAW.gate_forward, *case.factors, 2, False)
    assert taken == (1 + is_copied) * case.doutput.nbytes


@everywhere
@pytest.mark.grid(2)
@dtypes
@forms
@pytest.mark.parametrize("rows, cols", [(1, 1), (5, 1), (2, 7), (7, 15), (3, 17), (1, 2049)])
def test_odd_sizes(executor, rows, cols, form, dtype):
    """Few elements need more draws."""
    draws = 1 + 40 * executor.draws // (rows * cols)
    check(*(make(rows, cols, dtype, form=form, seed=seed) for seed in range(draws)))


@pytest.mark.grid(2)
@dtypes
@forms
@pytest.mark.parametrize("cols", [4096, 4100, 4093])
def test_outputs_larger_than_the_caches(cols, form, dtype):
    """From 16 MiB on they are stored past the caches, where tiles begin at a multiple of a vector:
    the same bits as those of a few rows, by another number of threads."""
    rows = (16 << 20) // cols // dtype.itemsize + 1
    few = make((97,), cols, dtype, form=form)
    case = make((1,), cols, dtype, form=form)
    repeats = rows // 97 + 1
    case.factors = [factor.repeat(repeats, 1) for factor in few.factors]
    case.doutput = few.doutput.repeat(repeats, 1)
    expected = results(few.ours, few)
    torch.set_num_threads(3)
    for name, found in results(case.ours, case).items():
        found = found.view(repeats, 97, -1)
        assert torch.equal(found, expected[name].expand_as(found)), name


@everywhere
@forms
@pytest.mark.parametrize("size, cols", [((0,), 8), ((3, 0), 8), ((3,), 0), ((0,), 0)], ids=str)
def test_empty(size, cols, form):
    case = make(size, cols, form=form)
    found = results(case.ours, case)
    assert found["output"].shape == (*size, cols)
    assert functional.silu_mul(torch.tensor(1.0), torch.tensor(2.0)).shape == ()
    for name, factor in zip(("dgate", "dup"), case.factors, strict=False):
        assert found[name].shape == factor.shape
