"""The numerics rule itself: results that it accepts, and results that it refuses."""

import math

import pytest
import torch

from onepass import numerics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_ulp_is_the_distance_to_the_next_number(dtype):
    for value in (1.0, 1.5, 0.75, 100.0, 3e-3):
        number = torch.tensor(value, dtype=dtype)
        up = torch.nextafter(number, torch.tensor(math.inf, dtype=dtype))
        assert numerics.ulp(dtype, float(number)) == float(up) - float(number)
    assert numerics.ulp(dtype, 0.0) > 0


def test_accepts_what_torch_itself_does():
    ref = torch.randn(100, dtype=torch.float64)
    assert numerics.compare(ref.float(), ref, ref.float()).ok


def test_refuses_more_than_twice_the_error_and_an_ulp():
    ref = torch.ones(10, dtype=torch.float64)
    base = (ref + 1e-4).float()
    assert numerics.compare((ref + 1.9e-4).float(), ref, base).ok
    result = numerics.compare((ref + 2.1e-4).float(), ref, base)
    assert not result.ok
    with pytest.raises(AssertionError, match="some case: error 2.1"):
        numerics.assert_close((ref + 2.1e-4).float(), ref, base, "some case")


def test_float64_is_held_to_1e_minus_11():
    ref = torch.ones(10, dtype=torch.float64)
    assert numerics.compare(ref + 1e-12, ref, ref).ok
    assert not numerics.compare(ref + 1e-10, ref, ref + 1e-3).ok


def test_a_small_bias_shows_in_many_16_bit_elements():
    torch.manual_seed(0)
    ref = torch.randn(100_000, dtype=torch.float64)
    base = ref.bfloat16()
    scaled = (ref * 1.002).bfloat16()  # half an ulp: every element alone may pass
    result = numerics.compare(scaled, ref, base)
    assert result.max_error <= result.bound and not result.ok
    assert result.bias > result.bias_bound
    assert numerics.compare(scaled[:100], ref[:100], base[:100]).ok  # too few to tell


def test_a_few_large_elements_tell_no_bias():
    """Their rounding errors are nearly all of the mean, however many small ones there are."""
    torch.manual_seed(0)
    ref = torch.randn(100_000, dtype=torch.float64) * 1e-6
    ref[:20] += torch.linspace(1, 2, 20, dtype=torch.float64)
    ours, base = ref.half(), ref.half()
    up, down = torch.tensor([9.0, -9.0]).half()
    ours[:20] = torch.nextafter(ours[:20], up)  # all on one side
    base[:20:2], base[1:20:2] = (
        torch.nextafter(base[:20:2], up), torch.nextafter(base[1:20:2], down),
    )  # fmt: skip
    result = numerics.compare(ours, ref, base)
    assert result.ok and result.bias_bound == 0


def test_not_finite_elements_must_stand_where_the_references_do():
    ref = torch.tensor([1.0, math.nan, math.inf, -math.inf], dtype=torch.float64)
    assert numerics.compare(ref.float(), ref, ref.float()).ok
    for index, wrong in ((0, math.nan), (1, 0.0), (2, -math.inf), (3, 0.0)):
        ours = ref.float()
        ours[index] = wrong
        assert not numerics.compare(ours, ref, ref.float()).ok


def test_overflow_in_the_results_dtype_is_its_infinity():
    ref = torch.tensor([1e6, 1.0], dtype=torch.float64)
    assert numerics.compare(ref.half(), ref, ref.half()).ok


def test_draws_are_pooled():
    ref = [torch.ones(1, dtype=torch.float64)] * 2
    ours = [(r + 1e-4).float() for r in ref]
    base = [ref[0].float(), (ref[1] + 1e-4).float()]  # one lucky draw
    assert not numerics.compare(ours[0], ref[0], base[0]).ok
    assert numerics.compare(ours, ref, base).ok


def test_shapes_must_agree():
    ref = torch.ones(3, dtype=torch.float64)
    assert not numerics.compare(torch.ones(2), ref, ref).ok


def test_every_exception_has_a_reason():
    for name, reason in numerics.EXCEPTIONS.items():
        assert name and len(reason) > 40
