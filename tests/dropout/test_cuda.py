"""Dropout's CUDA kernel under the emulator: one pass, no races.

Its values are those of test_values.py.
"""

import pytest
import torch

from onepass import functional
from tests.emulator import emulated
from tests.emulator.executors import all_instances
from tests.support.seeds import drawn_seed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
cpus = torch.ops.onepass.dropout_forward.default


def test_one_pass(cuda):
    x = torch.randn(8000)
    functional.dropout(x, 0.3)
    functional.add_dropout(x.bfloat16(), x, 0.3)
    plain, added = cuda.of("dropout_forward")
    seeds = [16 * 256 * call["splits"] for call in (plain, added)]  # read by every thread
    assert (plain["read"], plain["written"]) == (4 * 8000 + seeds[0], 4 * 8000)
    assert (added["read"], added["written"]) == ((2 + 4) * 8000 + seeds[1], 4 * 8000)


def each_instance(cuda, build: str = "plain") -> None:
    """Calls that run each instance; also on a device, see tests/device/test_smoke.py."""
    with cuda.sanitized(build, "dropout.cu"):
        # Races do not depend on the dtypes, and the thread sanitizer takes its time.
        for dtype in (*DTYPES, None)[:: 4 if build == "thread" else 1]:
            # All tensors aligned, or all except the input, the residual or the output.
            for size, misaligned in ((1000, -1), (1001, -1), (1001, 0), (1000, 1), (1000, 3)):
                cuda.set(shift=0 if misaligned < 0 else 8, misaligned=misaligned)
                x, residual = torch.randn(size), torch.randn(size).to(dtype)
                x = x.to(dtype or torch.bfloat16)
                seed, wide = drawn_seed(7), torch.float32 if dtype is torch.bfloat16 else None
                for arguments in (
                    (x, residual, seed, 0.3, None), (x, None, seed, 0.3, wide),
                    (x, None, seed, 1.0, None), (x, residual, None, 0.0, None),
                ):  # fmt: skip
                    found = torch.ops.onepass.dropout_forward(*arguments)
                    assert torch.equal(found, cpus(*arguments))


@pytest.mark.parametrize("build", emulated.SANITIZERS)
def test_each_instance(cuda, build):
    """Without races or bad accesses; none is left out."""
    each_instance(cuda, build)
    dropouts = {name for name in all_instances() if "dropout_" in name}
    assert dropouts == cuda.instances or build == "thread"
