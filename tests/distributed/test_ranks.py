"""The helper that runs functions on several processes: a failure is never a hang."""

import os
import time

import pytest
import torch

from tests.distributed.ranks import RankError, distributed, on_ranks, run

pytestmark = distributed


def summed(number):
    total = torch.tensor(number * (torch.distributed.get_rank() + 1))
    torch.distributed.all_reduce(total)
    return int(total), os.getpid()


def fails_on_one():
    if torch.distributed.get_rank() == 1:
        raise ValueError("as planted")
    torch.distributed.barrier()


def ends_on_one():
    if torch.distributed.get_rank() == 0:
        os._exit(7)
    torch.distributed.barrier()


def aborts_on_one():
    if torch.distributed.get_rank() == 0:
        os.abort()
    torch.distributed.barrier()


def misses_one():
    if torch.distributed.get_rank() == 0:
        torch.distributed.all_reduce(torch.ones(()))


@on_ranks(2)
def fails_on_the_second():
    if torch.distributed.get_rank() == 1:
        raise ValueError("as planted")


def test_a_test_on_ranks_fails_where_one_of_them_does():
    with pytest.raises(RankError, match="rank 1 of 2: Traceback[^|]*ValueError: as planted"):
        fails_on_the_second()


def test_processes_are_started_once():
    (one, first), (other, second) = run(2, summed, 5)
    assert one == other == 15
    assert [first, second] == [pid for _, pid in run(2, summed, 6)]


@pytest.mark.parametrize(
    "body, message, timeout",
    [
        (fails_on_one, "rank 1 of 2: Traceback[^|]*ValueError: as planted[^|]*rank 0 of 2", 20),
        (ends_on_one, "rank 0 of 2: ended with code 7", 20),
        (aborts_on_one, "rank 0 of 2: ended with code -6[^|]*in aborts_on_one", 20),
        (misses_one, "rank 0 of 2: no answer; it is at[^|]*in misses_one", 2),
    ],
)
def test_a_failure_on_one_rank_ends_the_call(body, message, timeout):
    begin = time.monotonic()
    with pytest.raises(RankError, match=message):
        run(2, body, timeout=timeout)
    assert time.monotonic() - begin < 30
    assert [one for one, _ in run(2, summed, 1)] == [3, 3]
