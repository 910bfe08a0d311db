"""Helpers of the device tests.

ONEPASS_TEST_DEVICE=cpu runs their bodies on the CPU, to try them where there is no CUDA device;
tests that need streams, graphs or a second device are left out there.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.emulator.executors import DEVICE, NO_DEVICE
from tests.norm import cases as norm_cases

ON_CUDA = DEVICE.type == "cuda"

needs_device = [pytest.mark.device, pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE or "-")]
on_cuda_only = pytest.mark.skipif(not ON_CUDA, reason="needs streams, graphs or device memory")
OTHER = "cpu" if ON_CUDA else "meta"  # a device that tensors are not on

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
make = functools.partial(norm_cases.make, device=DEVICE)


def randn(*size, dtype: torch.dtype = F32, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE).to(dtype).requires_grad_(requires_grad)


check_draws = functools.partial(norm_cases.check_draws, draws=4, device=DEVICE)


def assert_equal(ones, others, text: str = "") -> None:
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other), text


def to_device(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in t.items()}


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Raises if the host asks torch for a value that the device has not computed yet."""
    if not ON_CUDA:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def late(tensors: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """The result of `run` on a separate stream, on which the values of `tensors`, NaN until then,
    arrive late: a kernel on any other stream would miss them."""
    values = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        found = run()
    stream.synchronize()
    return found


def captured(run: Callable):
    """(the graph of a call, the tensors that it writes)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def needs_gigabytes(count: int) -> None:
    if not ON_CUDA:
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < count:
        pytest.skip(f"needs {count} GiB of device memory, {free:.0f} are free")
