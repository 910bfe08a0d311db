"""Rotary embedding of infinities, NaN and numbers near the limits of a dtype: as torch's."""

import pytest
import torch

from onepass import functional, reference
from tests.emulator.executors import everywhere
from tests.rotary.cases import BOTH, TABLES, Case, check_tensors
from tests.support.dtypes import BF16, F16, F32

pytestmark = [everywhere, pytest.mark.isa]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("head_dim", [48, 45])
def test_columns_that_are_not_rotated_are_the_same_bits(head_dim, dtype):
    """NaN's bits too."""
    case = Case(dtype, head_dim=head_dim, rotary_dim=16)
    bits = torch.randint(-(2**15), 2**15, (2, 4, 5, head_dim), dtype=torch.int16)
    query, _ = functional.rotary_embedding(**case.tensors() | {"query": bits.view(dtype)})
    assert torch.equal(query.view(torch.int16)[..., 16:], bits[..., 16:])


@pytest.mark.parametrize("tokens_first", [False, True])
def test_rows_of_zeros(tokens_first):
    """They stay zero; other rows are not affected."""
    case = Case(F32, norms=BOTH, tokens_first=tokens_first)
    tensors = case.tensors()
    tensors["query"][:, :, 1] = 0
    tensors["key"][1] = 0
    check_tensors(case, tensors)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name, norms",
    [*((name, ()) for name in ("query", *TABLES)),
     *((name, BOTH) for name in ("query", "query_weight", "cos"))],
)  # fmt: skip
def test_what_is_not_finite_shows_as_in_torch(name, norms, special, interleaved):
    """Only in its own row; after a norm in columns that are not rotated too."""
    case = Case(interleaved=interleaved, norms=norms, rotary_dim=16)
    for column in (3, 20):
        tensors = case.tensors()
        columns = tensors[name] if name == "query_weight" else tensors[name][..., 2, :]
        columns[..., column % columns.shape[-1]] = special
        ours = functional.rotary_embedding(**tensors, **case.options)
        formula = reference.rotary.rotary_embedding(**tensors, **case.options)
        for one, other in zip(ours, formula, strict=True):
            finite = other.isfinite()
            assert torch.equal(one.isfinite(), finite) and torch.equal(one.isnan(), other.isnan())
            torch.testing.assert_close(one[finite], other[finite])


@pytest.mark.parametrize("norms", [(), BOTH], ids=["alone", "normed"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e-7, 1e4])
def test_tiny_and_large(scale, dtype, norms):
    if norms and scale == 1e-35:
        return  # whose squares float32 does not hold
    case = Case(dtype, table_dtype=F32, norms=norms)
    tensors = case.tensors()
    for name in BOTH:
        tensors[name] = (tensors[name].float() * scale).to(dtype)
    check_tensors(case, tensors)
