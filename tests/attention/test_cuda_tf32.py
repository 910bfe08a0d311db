"""Attention in float32 on CUDA where torch allows TF32, under the emulator: which calls take it,
and their errors. Values of every option are in the kernels' tests, where TF32 is one of the kinds.
"""

from dataclasses import replace

import pytest
import torch

from tests.attention import test_extremes as test_attention_extremes
from tests.attention.cases import Case, assert_same, definition, forward, ours
from tests.attention.cuda_cases import CAUSAL
from tests.support.dtypes import BF16, F16, F32, F64

pytestmark = pytest.mark.usefixtures("cuda")


def relative_errors(found: dict, case: Case, t: dict) -> dict[str, float]:
    """The largest error of each result, relative to its largest element."""
    exact = definition(case, t, F64)
    return {
        name: float((result.double() - exact[name]).abs().max() / exact[name].abs().max())
        for name, result in found.items()
    }


# Half a unit in tf32's last place is 2^-11 of a factor. Sums of many products have a smaller
# relative error, and differences a larger one.
TF32_ERRORS = (2.0**-15, 2.0**-8)


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
def test_of_float32_alone(dtype):
    case = Case(dtype, 264, batch=1, heads=1, seq_q=20, seq_k=40, bias="q")
    t = case.tensors()
    assert_same(ours(case, t, allow_tf32=True), ours(case, t))


def test_factors_are_rounded_to_nearest():
    """One key: the output is its value. Dropping bits instead would make all of it smaller."""
    case = Case(F32, 64, batch=1, heads=1, seq_q=1, seq_k=1, tf32=True)
    t = case.tensors()
    found, value = forward(case, t)["output"], t["value"]
    assert torch.equal(found.view(torch.int32), (value.view(torch.int32) + 0x1000) & -0x2000)
    assert (found.abs() > value.abs()).any() and (found.abs() < value.abs()).any()


@pytest.mark.parametrize("tf32", [False, True])
def test_numbers_that_tf32_has_no_room_for(tf32):
    """float32's largest number rounds to infinity in tf32, and parts of the smallest to 0."""
    case = Case(F32, 16, batch=1, heads=1, seq_q=20, seq_k=30, tf32=tf32)
    t = case.tensors()
    largest = torch.finfo(F32).max
    t["value"][..., :2] = 0.0
    t["value"][..., 7, 0], t["value"][..., 9, 1] = largest, -largest
    t["value"][..., 2] = torch.finfo(F32).smallest_normal
    t["query"][..., 3], t["key"][..., 3] = largest, 0.0
    found = forward(case, t)["output"]
    exact = definition(case, t, F64)["output"]
    tolerance = TF32_ERRORS[1] if tf32 else 2.0**-19
    for column in range(16):
        torch.testing.assert_close(
            found[..., column].double(), exact[..., column], rtol=0,
            atol=tolerance * float(exact[..., column].abs().max()),
        )  # fmt: skip


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x400000, -1], ids=hex)
def test_every_nan_that_arithmetic_makes_is_one(bits, tf32):
    case = Case(F32, 16, batch=1, heads=1, seq_q=20, seq_k=30, tf32=tf32)
    t = case.tensors()
    t["value"].view(torch.int32)[..., 7, 5] = bits
    found = forward(case, t)["output"].isnan()
    assert found[..., 5].all() and found.sum() == found[..., 5].numel()


@pytest.mark.parametrize("bias", ["q", ""])
@pytest.mark.parametrize("head_dim", [40, 264])
def test_backward_only_where_it_is_allowed(head_dim, bias):
    """dbias is computed by multiply-adds, from an LSE and a delta with the forward's errors."""
    case = Case(F32, head_dim, batch=1, heads=1, seq_q=66, seq_k=130, bias=bias)
    t = case.tensors()
    exact = relative_errors(ours(case, t), case, t)
    assert max(exact.values()) < 2.0**-18
    low, high = TF32_ERRORS
    for name, error in relative_errors(ours(replace(case, tf32=True), t), case, t).items():
        assert error < high, name
        assert low < error or name in ("lse", "dbias"), name


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_not_finite_inputs_spread_too(cuda, name, value):
    cuda.keywords["allow_tf32"] = True
    test_attention_extremes.test_not_finite_inputs_spread_as_in_torch(name, value, F32)


def test_reads_as_much_as_multiply_adds(cuda):
    """Except for numbers of a row, which half as many threads read in each tile of two kernels."""
    case = Case(F32, 64, batch=1, heads=2, kv_heads=1, seq_q=150, seq_k=230, **CAUSAL)
    reads = {"attention_forward": [], "attention_backward": []}
    for tf32 in (False, True):
        ours(replace(case, tf32=tf32))
        for call in cuda.done[-2:]:
            reads[call["op"]].append(call["read"])
    assert len(set(reads["attention_forward"])) == 1
    multiply_adds, products = reads["attention_backward"]
    rows = 0
    for queries in case.allowed().split(64):
        rows += sum(len(queries) for tile in queries.split(64, 1) if tile.any())
    assert multiply_adds - products == 2 * case.heads * rows * 12 * (16 - 8)


def test_a_bias_gradient_has_a_bound():
    """It recomputes scores in another way than the forward; large ones may differ by many units."""
    case = Case(F32, 64, batch=1, heads=1, seq_q=66, seq_k=130, bias="q", tf32=True)
    t = case.tensors()
    t["query"] *= 3000
    found = ours(case, t)["dbias"]
    most = (t["doutput"].double() @ t["value"].double().mT).abs().max()
    assert 0 < found.abs().max() < 2.01 * most  # of P (dP - delta)
