"""Shared by all tests: threads, seeds, and the runs at lower CPU levels."""

import gc
import os
import resource
import signal

import pytest
import torch

from tests.emulator import executors
from tests.emulator.executors import cuda, emulator, executor  # noqa: F401
from tests.support import costs, cpus, grids, seeds, threads


@pytest.fixture(autouse=True)
def same_start():
    """Every test begins with the same seed and one thread, whatever ran before it.

    One, because the spinning threads of two pytest workers slow each other down tenfold; results do
    not depend on the number, which has tests of its own, and `make test-cpus` takes three.
    """
    seeds.set_seed(0)
    torch.set_num_threads(int(os.environ.get("ONEPASS_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def swapped_run_ours(nothing_left_behind, monkeypatch):
    """Swapped modules run ours at every size; otherwise the small calls of tests would run torch's.

    Attention runs ours on a GPU of any age.
    """
    from onepass._policy import device_attention, small_calls

    monkeypatch.setattr(device_attention, "TORCHS_FROM", (99, 0))
    monkeypatch.setattr(small_calls, "LEAST_NORM", {})
    monkeypatch.setattr(small_calls, "LEAST_GROUP_NORM", {})
    monkeypatch.setattr(small_calls, "LEAST_ACTIVATED", {})
    monkeypatch.setattr(small_calls, "LEAST_ACTIVATION", {})
    monkeypatch.setattr(small_calls, "LEAST_ATTENTION", {})
    monkeypatch.setattr(small_calls, "LEAST_BY_HAND", {})
    monkeypatch.setattr(small_calls, "LEAST_MASKED_BY_HAND", {})
    monkeypatch.setattr(small_calls, "LEAST_KEYS", 0)
    monkeypatch.setattr(small_calls, "LEAST_LINEAR", {})
    monkeypatch.setattr(small_calls, "LEAST_LINEAR_CALLS", {})
    monkeypatch.setattr(small_calls, "LEAST_GATE", {})
    monkeypatch.setattr(small_calls, "LEAST_ROTARY", {})
    monkeypatch.setattr(small_calls, "LEAST_LOSS", {})


@pytest.fixture
def one_thread():
    """For tests of what grows with threads: bounds of small calls, scratch of torch's operators."""
    with threads.one_thread():
        yield


@pytest.fixture
def torchs_products(monkeypatch):
    """A swap leaves linear layers to torch, as where its products are fast in every dtype: for
    tests that count what is swapped, or run torch's linear layers within modules of ours."""
    from tests.swap import linear_calls

    linear_calls.set_facts(monkeypatch, linear_calls.FAST)


@pytest.fixture(autouse=True)
def unfolded(monkeypatch):
    """Reports have lines of any length, unless a test says otherwise: in pytest's parallel workers
    COLUMNS is 80."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def few_draws(nothing_left_behind, monkeypatch):
    """Probes of other libraries' norms take few draws, except in tests of the probe.

    For few columns, as in tests, they would take 16 times as many, half a second a norm.
    """
    from onepass.swapping import probe

    monkeypatch.setattr(probe, "_MOST_REPEATS", 3)


@pytest.fixture(scope="module", autouse=True)
def nothing_older():
    """Garbage collections look only at objects that this file's tests have made.

    To go through those of ten thousand tests, torch's compiler and transformers takes up to a
    second, and some tests make dozens of collections.
    """
    gc.collect()
    gc.freeze()


def _process_state() -> dict:
    """Settings that a test could leave changed for later tests in this process."""
    return {
        "address space": resource.getrlimit(resource.RLIMIT_AS),
        "file size": resource.getrlimit(resource.RLIMIT_FSIZE),
        "SIGINT": signal.getsignal(signal.SIGINT),
        "SIGALRM": signal.getsignal(signal.SIGALRM),
        # Other variables change when torch's compiler or transformers are imported.
        "variables": {name: v for name, v in os.environ.items() if name.startswith("ONEPASS_")},
        "folder": os.getcwd(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "nested autocasts": _nested_autocasts(),
    }


def _nested_autocasts() -> int:
    """torch's count; while it is above 0, autocast keeps its casts of the weights."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No test leaves a limit, a variable or a mode of the process changed."""
    before = _process_state()
    yield
    after = _process_state()
    assert after == before, [name for name in before if after[name] != before[name]]


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(costs.Costs(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    from tests.support import shares

    return shares.scheduler(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest asks for marks
def pytest_collection_modifyitems(items: list) -> None:
    """ONEPASS_TEST_EVERY=10 keeps every tenth test, for the quick runs of test_lower_levels, and
    ONEPASS_TEST_FIRST=device the first of each file that has this mark (tests/device)."""
    for item in items:  # workers of xdist must collect the same names
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"a test's name must hold no address, got {item.nodeid}")
    grids.mark(items)
    cpus.mark(items)
    items[:] = executors.of_this_level(items)
    items[:] = items[:: int(os.environ.get("ONEPASS_TEST_EVERY", "1"))]
    if mark := os.environ.get("ONEPASS_TEST_FIRST"):
        marked = [item for item in reversed(items) if item.get_closest_marker(mark)]
        items[:] = reversed({item.path: item for item in marked}.values())


def pytest_report_header() -> str:
    from onepass import _C

    wanted = os.environ.get("ONEPASS_CPU_ISA", "not set")
    return f"onepass: CPU level {_C.cpu_level()} (ONEPASS_CPU_ISA {wanted})"
