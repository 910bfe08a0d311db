"""Runs functions of the tests on several processes that share a gloo process group.

The processes of a group are started once and run every function passed to them, so that a test
costs its collectives and not two imports of torch. They are forked from one process that has
imported torch and onepass.
"""

import atexit
import faulthandler
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from tests.support import costs

TIMEOUT = 300  # seconds for one function, on a slow and busy machine
GRACE = 3  # seconds for the other ranks after the first failure

# Marks of the modules of such tests. All run in one worker of pytest-xdist, so that the processes
# are started once.
distributed = [
    pytest.mark.distributed,
    pytest.mark.xdist_group("distributed"),
    pytest.mark.skipif(
        not torch.distributed.is_available() or sys.platform != "linux",
        reason="torch.distributed is not available",
    ),
]


class RankError(AssertionError):
    """The errors of the ranks."""


def run(size: int, body: Callable, *args, timeout: float = TIMEOUT) -> list:
    """body(*args) on each of `size` processes; the results by rank.

    `body` is a function at the top of its module; arguments and results are pickled. Every call
    begins with the same seed and one thread.

    Raises:
        RankError: with the traceback of every rank that failed, and the stack of every rank that
            gave no answer in time. The next call starts new processes.
    """
    group = _groups.get(size)
    if group is None:
        group = _groups[size] = _Group(size)
    try:
        return group.run(body, args, timeout)
    except BaseException:
        del _groups[size]
        group.close()
        raise


def on_ranks(size: int) -> Callable:
    """A test whose body runs on each of `size` processes, with the test's arguments."""

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def test(**arguments) -> None:
            run(size, test, arguments)

        test.on_rank = lambda arguments: body(**arguments)
        return test

    return decorate


def as_of_torchrun():
    """A patch of the environment, in which packages look for the process group of a rank."""
    rank, size = (str(call()) for call in (dist.get_rank, dist.get_world_size))
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="localhost")
    return mock.patch.dict(os.environ, names | {"MASTER_PORT": "1", "OMP_NUM_THREADS": "1"})


class _Group:
    def __init__(self, size: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "onepass"]
        )
        self.folder = Path(tempfile.mkdtemp(prefix="onepass-ranks-"))
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, str(self.folder), there), daemon=True
            )
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def run(self, body: Callable, args: tuple, timeout: float) -> list:
        work = pickle.dumps((body, args))
        for connection in self.connections:
            connection.send_bytes(work)
        results: dict[int, object] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < len(self.connections):
            waiting = [
                connection
                for rank, connection in enumerate(self.connections)
                if rank not in results and rank not in failures
            ]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = self.connections.index(connection)
                try:
                    passed, pickled, seconds = pickle.loads(connection.recv_bytes())
                    answer = pickle.loads(pickled)
                    costs.elsewhere += seconds
                except EOFError:
                    self.processes[rank].join(GRACE)
                    stack = (self.folder / f"{rank}.stack").read_text()
                    passed = False
                    answer = f"ended with code {self.processes[rank].exitcode}\n{stack}"
                (results if passed else failures)[rank] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        if len(results) == len(self.connections):
            return [results[rank] for rank in range(len(results))]
        for rank, process in enumerate(self.processes):
            if rank not in results and rank not in failures:
                failures[rank] = f"no answer; it is at\n{self._stack(rank, process)}"
        raise RankError(
            "\n".join(
                f"rank {rank} of {len(self.connections)}: {failures[rank]}"
                for rank in sorted(failures, key=lambda rank: "no answer" in failures[rank][:9])
            )
        )

    def _stack(self, rank: int, process) -> str:
        file = self.folder / f"{rank}.stack"
        if not file.exists() or process.pid is None:
            return "its start\n"
        os.kill(process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if text := file.read_text():
                break
        return text

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(rank: int, size: int, folder: str, calls: Connection) -> None:
    """The loop of a process, until its connection is closed."""
    stack = open(f"{folder}/{rank}.stack", "w")
    faulthandler.enable(file=stack)  # of a rank that a signal ends
    faulthandler.register(signal.SIGUSR1, file=stack)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    told = 0.0  # of its CPU seconds
    while True:
        try:
            work = calls.recv_bytes()
        except EOFError:
            return
        try:
            body, args = pickle.loads(work)
            torch.manual_seed(0)
            body = getattr(body, "on_rank", body)
            passed, answer = True, pickle.dumps(body(*args))
        except Exception:
            passed, answer = False, pickle.dumps(traceback.format_exc())
        seconds = time.process_time() - told
        told += seconds
        calls.send_bytes(pickle.dumps((passed, answer, seconds)))


@atexit.register
def _close() -> None:
    for group in _groups.values():
        group.close()


_groups: dict[int, _Group] = {}
