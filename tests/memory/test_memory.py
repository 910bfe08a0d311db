"""`onepass.keep_freed_memory`: page faults, resident memory, its effects and its limits.

In separate processes (loops.py), at least one of which must show the claim: whether blocks are
returned depends on the memory that the loader put after the heap, and on earlier allocations.
"""

import functools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

import onepass
from onepass import _malloc
from tests.memory.loops import COUNTED

FRESH = COUNTED * 32  # page faults of COUNTED blocks, at least
TRIES = 5
TUNED = "glibc.malloc.mmap_max=2"
TOGETHER = (
    "backward", "undone", "undone_small", "below_the_limit", "beyond_the_limit",
    "forked", "in_threads", "in_the_heap", "apart",
)  # fmt: skip

on_glibc = pytest.mark.skipif(bool(_malloc.obstacle()), reason=_malloc.obstacle())


def run(names: tuple[str, ...], **variables: str) -> dict:
    kept = {name: v for name, v in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    process = subprocess.run(
        [sys.executable, "-m", "tests.memory.loops", *names],
        env=kept | variables, cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@functools.cache
def together() -> dict:
    """One process imports torch for all that needs no environment of its own."""
    return run(TOGETHER)


def shown(name: str, holds: Callable[..., bool], **variables: str) -> None:
    """Finds the figures of a loop in new processes until they hold."""
    figures = []
    for number in range(TRIES):
        first = number == 0 and name in TOGETHER
        figures.append((together() if first else run((name,), **variables))[name])
        if holds(*figures[-1]):
            return
    pytest.fail(f"in {TRIES} processes: {figures}")


# ---- effects, forks and threads ------------------------------------------------------------------

# What each loop must show, of the figures that it returns.
CLAIMS = {
    # The backward on the CPU runs in the calling thread, and so uses the same heap.
    "backward": lambda fresh, kept, same: same and fresh >= FRESH and kept < fresh / 4,
    "undone": lambda kept, after: kept >= 6 * 64 and after < 64,
    # Blocks of 8 MiB, which malloc keeps by itself; its thresholds at its start would unmap them.
    "undone_small": lambda small, large: large >= FRESH and small < large / 32,
    # As the peaks of `onepass compare` are measured: blocks mapped apart leave no holes.
    "in_the_heap": lambda left, obeyed: left >= 40,
    "apart": lambda left, obeyed: obeyed and left < 8,
    # The top of the heap goes back beyond the limit.
    "below_the_limit": lambda obeyed, held, left: obeyed and held >= 60 and left >= 60,
    "beyond_the_limit": lambda obeyed, held, left: obeyed and held >= 60 and left < 8,
    # Forks, such as workers of a DataLoader, inherit it.
    "forked": lambda kept: kept < FRESH,
    # The heaps of other threads have at most 64 MiB.
    "in_threads": lambda small, large, main: small < FRESH and main < FRESH <= large,
}


@on_glibc
@pytest.mark.parametrize("name", CLAIMS)
def test_what_is_kept_and_what_goes_back(name):
    shown(name, CLAIMS[name])


@on_glibc
@pytest.mark.slow
def test_page_faults_of_large_outputs_end_and_come_back():
    shown(
        "bench",
        lambda fresh, kept, after, obeyed: (
            obeyed and fresh >= FRESH and kept < fresh / 4 and after >= FRESH
        ),
    )


@on_glibc
@pytest.mark.slow
def test_with_one_arena_other_threads_are_covered():
    def holds(small, large, main):
        return max(small, large, main) < FRESH

    shown("in_threads", holds, MALLOC_ARENA_MAX="1")


# ---- the environment -----------------------------------------------------------------------------


@on_glibc
@pytest.mark.slow
def test_undone_the_environment_holds_again():
    variables = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
    shown("undone_twice", lambda started, after: started < FRESH and after < FRESH, **variables)


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, {}),
        ({"MALLOC_MMAP_MAX_": "0"}, {"mmap_max": 0}),
        ({"MALLOC_TRIM_THRESHOLD_": "-1"}, {"trim_threshold": -1}),
        ({"MALLOC_TOP_PAD_": "0x1000"}, {"top_pad": 4096}),
        ({"MALLOC_MMAP_THRESHOLD_": "much"}, {}),
        ({"GLIBC_TUNABLES": f"{TUNED}:glibc.malloc.arena_max=1"}, {"mmap_max": 2}),
        ({"GLIBC_TUNABLES": TUNED, "MALLOC_MMAP_MAX_": "3"}, {"mmap_max": 2}),
    ],
)
def test_what_the_environment_says(variables, expected, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _malloc.told() == expected


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 0, 1 << 20])
def test_another_c_library_is_left_alone_and_named(limit, monkeypatch):
    monkeypatch.setattr(_malloc, "_process", SimpleNamespace)
    with pytest.warns(UserWarning, match="keep_freed_memory: .*this C library is not glibc"):
        assert onepass.keep_freed_memory(limit) is False


def test_a_malloc_that_refuses_is_told(monkeypatch):
    monkeypatch.setattr(_malloc, "obstacle", str)
    refusing = SimpleNamespace(mallopt=lambda parameter, value: 0)
    monkeypatch.setattr(_malloc, "_process", lambda: refusing)
    with pytest.warns(UserWarning, match="nothing is changed: mallopt refused"):
        assert onepass.keep_freed_memory() is False


@on_glibc
def test_an_allocator_in_front_of_glibcs_is_named(tmp_path):
    source, library = tmp_path / "other.cpp", tmp_path / "libother.so"
    source.write_text(
        "#include <cstdlib>\n"
        'extern "C" int posix_memalign(void** to, size_t alignment, size_t size) {\n'
        "  *to = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);\n"
        "  return *to == nullptr;\n"
        "}\n"
    )
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    reason = "nothing is changed: memory is that of libother.so, not of glibc"
    shown(
        "refused",
        lambda obeyed, told: not obeyed and told == [f"keep_freed_memory: {reason}"],
        LD_PRELOAD=str(library),
    )


@on_glibc
@pytest.mark.parametrize("limit", [7, numpy.int64(7)])
def test_any_whole_number_is_a_limit(limit, monkeypatch):
    told = []
    monkeypatch.setattr(_malloc, "_set", lambda values: told.append(values) or True)
    assert onepass.keep_freed_memory(limit) is True
    assert told == [{"mmap_max": 0, "trim_threshold": 7}]
    assert type(told[0]["trim_threshold"]) is int  # ctypes takes no other


@pytest.mark.parametrize(
    "limit, error", [(-1, ValueError), (2**31, ValueError), (1e9, TypeError), (True, TypeError),
                     ("1", TypeError)],
)  # fmt: skip
def test_limits_that_cannot_be(limit, error, monkeypatch):
    monkeypatch.setattr(_malloc, "_set", lambda values: pytest.fail("malloc was told"))
    got = {ValueError: f"None or lie in [0, {2**31 - 1}], got {limit}"}.get(
        error, f"a whole number or None, got {type(limit).__name__}"
    )
    with pytest.raises(error, match=f"^keep_freed_memory: limit must be {re.escape(got)}$"):
        onepass.keep_freed_memory(limit)


@on_glibc
def test_nothing_is_said_where_it_works(monkeypatch):
    monkeypatch.setattr(_malloc, "_set", lambda values: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert onepass.keep_freed_memory() is True
