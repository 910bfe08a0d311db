"""Attention on a CUDA device: sizes of models, TF32, and repeatability.

Options, layouts and extremes are tested by the executor "device", on copies of tensors. The
definition in float64, and torch's function as the base of the numerics rule, run on the CPU.
"""

import math
from dataclasses import replace

import pytest
import torch

from onepass import functional
from tests.attention import cases as attention_cases
from tests.attention.cases import DTYPES, Case, assert_same, backward, forward, ours
from tests.device.common import BF16, F16, F32, F64, ON_CUDA, needs_device, to_device

pytestmark = needs_device
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
halves = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
INF = math.inf


def check(case: Case) -> None:
    """Every result by the numerics rule."""

    def compute(drawn: Case):
        t = drawn.tensors()
        on_device = to_device(t)
        found = ours(drawn, on_device)
        for name, tensor in on_device.items():
            assert attention_cases.equal(tensor.cpu(), t[name]), f"{name} was written"
        for name, dtype in attention_cases.expected_dtypes(drawn, t).items():
            assert name not in found or found[name].dtype == dtype, f"{case}: {name}"
        ref = attention_cases.definition(drawn, t, F64)
        assert found.keys() == ref.keys()
        return found, ref, ref if drawn.dtype is F64 else attention_cases.base(drawn, t)

    attention_cases.check(case, compute)


def repeatable(case: Case, t: dict[str, torch.Tensor], **changes) -> dict[str, torch.Tensor]:
    """Outputs and gradients of tensors on the device, the same bits each time."""
    found = forward(case, t, **changes)
    return found | backward(case, t, found, deterministic=True, **changes)


EVERYTHING = dict(
    head_dim=72, value_dim=40, heads=4, kv_heads=2, seq_q=130, seq_k=260, window_left=200,
    window_right=0, bottom_right=True, bias="hq", mask="b", alibi="b", sinks=F32, softcap=3.0,
    dropout_p=0.25, dlse=True,
)  # fmt: skip

# As models have them: many blocks, many tiles in each.
REALISTIC = {
    "GPT": Case(BF16, 64, heads=12, seq_q=512, seq_k=512, window_right=0),
    "grouped": Case(BF16, 128, batch=1, heads=16, kv_heads=4, seq_q=768, seq_k=768, window_right=0),
    "cross": Case(F16, 128, batch=1, heads=4, seq_q=1023, seq_k=1025),
    "wide": Case(BF16, 256, batch=1, heads=4, kv_heads=1, seq_q=640, seq_k=640, window_right=0),
    "biased": Case(F16, 80, heads=4, seq_q=577, seq_k=577, bias="h", dropout_p=0.1),
    "float32": Case(F32, 64, batch=1, heads=4, seq_q=512, seq_k=512, window_right=0),
}


@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_sizes(name):
    check(REALISTIC[name])


# The base is the formula with TF32 products; the CPU has none.
TF32 = {
    "causal": Case(F32, 64, heads=4, kv_heads=2, seq_q=200, seq_k=300, window_right=0, tf32=True),
    "bias": Case(F32, 40, seq_q=130, seq_k=200, bias="hq", tf32=True),
    "everything": Case(F32, **EVERYTHING, tf32=True),
    "long dim": Case(F32, 264, heads=2, seq_q=70, seq_k=130, tf32=True),
    "packed": Case(F32, 64, heads=4, storage="packed", seq_q=130, seq_k=200, tf32=True),
}


@pytest.mark.parametrize("name", TF32)
def test_tf32(name):
    check(TF32[name])


REPEATED = {
    "bfloat16": Case(BF16, 64, heads=8, kv_heads=2, seq_q=500, seq_k=500, window_right=0),
    "float16": Case(F16, 128, heads=4, seq_q=300, seq_k=700, bias="hq", sinks=F32, alibi=""),
    "wide": Case(BF16, 256, heads=4, kv_heads=1, seq_q=300, seq_k=300, dropout_p=0.2),
    "float32": Case(F32, 64, heads=4, kv_heads=2, seq_q=300, seq_k=300, mask="b"),
    "packed": Case(BF16, 64, heads=4, storage="packed", seq_q=300, seq_k=400, alibi="b"),
}
repeated = pytest.mark.parametrize("name", REPEATED)


@repeated
def test_deterministic_gradients_repeat_bit_for_bit(name):
    case = REPEATED[name]
    t = to_device(case.tensors())
    first = repeatable(case, t)
    for _ in range(5):
        assert_same(repeatable(case, t), first, name)


@repeated
def test_torchs_switch_makes_gradients_deterministic(name):
    case = replace(REPEATED[name], storage="dense", bias=None)
    t = to_device(case.tensors())
    leaves = [t[name].requires_grad_() for name in ("query", "key", "value")]

    def gradients(**options):
        output = functional.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=True, **options
        )
        return torch.autograd.grad(output, leaves, t["doutput"])

    expected = gradients(deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            for one, other in zip(gradients(), expected, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.use_deterministic_algorithms(False)


SMALL = {
    "causal": dict(window_right=0),
    "everything": EVERYTHING | dict(seq_q=40, seq_k=70),
    "packed": dict(storage="packed", seq_q=40, seq_k=70),
    "paged": dict(storage="paged", seq_q=20, seq_k=40),
    "wide": dict(head_dim=200, seq_q=40, seq_k=70, kv_heads=1),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_for_sanitizers(name):
    """Each kernel once on little data, with few kernels of torch's own."""
    for dtype in (BF16, F32):
        case = Case(dtype, **SMALL[name])
        t = to_device(case.tensors())
        ours(case, t)
        if case.storage != "paged":
            repeatable(case, t)
    if ON_CUDA:
        torch.cuda.synchronize()
