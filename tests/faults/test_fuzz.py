"""The fuzzer's cases; fuzz.py says which results are right, and how to run one case again."""

import pytest

from tests.faults import fuzz

SEED = 0
PART = 250  # cases of a test, so that workers share them
QUICK = 2 * PART  # a second for each thirty


def check(first: int, last: int) -> None:
    found = fuzz.fuzz(SEED, first, last)
    texts = [f"{text}\n    {fuzz.command(SEED, index)}" for index, text in found.items()]
    assert not found, f"{len(found)} of {last - first}, seed {SEED}:\n" + "\n".join(texts)


@pytest.mark.parametrize("first", range(0, QUICK, PART))
def test_random_calls(first):
    check(first, first + PART)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, 10_000, 2 * PART))
def test_more_random_calls(first):
    check(first, first + 2 * PART)


def test_a_case_is_the_same_whenever_it_is_run():
    kinds = [fuzz.kind_of(fuzz.Random(f"3/{index}")) for index in range(200)]
    assert set(kinds) == set(fuzz.KINDS)
    assert kinds == [fuzz.kind_of(fuzz.Random(f"3/{index}")) for index in range(200)]


def test_what_lies_around_a_tensor_is_watched():
    border = fuzz.Border(fuzz.Random(1))
    carved = border.carve("input", fuzz.torch.randn(3, 4))
    border.check()
    beyond = carved.as_strided((1,), (1,), 3)
    beyond.zero_()
    beyond.add_(1e-3)
    with pytest.raises(AssertionError, match="input, or what lies around it, was written"):
        border.check()
