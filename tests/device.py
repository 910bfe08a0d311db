"""The device that the device tests run on, and what they share.

ONEPASS_TEST_DEVICE=cpu runs their bodies on the CPU, to try them where there is no CUDA device;
what needs streams, graphs or a second device is left out there.
"""

from __future__ import annotations

import functools
import itertools
import os

import norm_cases
import pytest
import torch
from norm_cases import DTYPES, Case, check, outputs_and_gradients

from onepass import _library

DEVICE = torch.device(os.environ.get("ONEPASS_TEST_DEVICE", "cuda"))
ON_CUDA = DEVICE.type == "cuda"
_OBSTACLE = _library.no_cuda() if ON_CUDA else ""

needs_device = pytest.mark.skipif(bool(_OBSTACLE), reason=_OBSTACLE or "-")
on_cuda_only = pytest.mark.skipif(not ON_CUDA, reason="needs streams, graphs or device memory")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
KINDS = list(itertools.product((False, True), (False, True)))
kinds = pytest.mark.parametrize(
    "rms, residual", KINDS, ids=["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"]
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
make = functools.partial(norm_cases.make, device=DEVICE)


def randn(*size, dtype: torch.dtype = F32, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE).to(dtype).requires_grad_(requires_grad)


def check_draws(*arguments, draws: int = 4, wrt=None, **keywords) -> None:
    """Several draws of one case, pooled: by one, torch may be exact where it is lucky."""
    check(*(make(*arguments, seed=seed, **keywords) for seed in range(draws)), wrt=wrt)


def results(case: Case) -> list[torch.Tensor]:
    """Outputs and gradients of one call."""
    return [value for of in outputs_and_gradients(case.ours, case) for value in of.values()]


def assert_equal(ones, others, text: str = "") -> None:
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other), text
