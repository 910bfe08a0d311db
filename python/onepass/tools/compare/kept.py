"""Steps of stock and swapped in a process that keeps the memory it has freed.

Runs as ``python -m onepass.tools.compare.kept JSON``: malloc is configured for a whole process,
which can be undone only in part, so the other variants would be affected too. The process makes a
step on request, in turn with the variants of the measuring process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

import onepass
from onepass.tools.compare.settings import Settings
from onepass.tools.compare.variants import kept_names, trainer_of
from onepass.tools.compare.workload import workload_of
from onepass.tools.data import load_text
from onepass.tools.machine import page_faults


class Steps:
    """The other process, as seen by the measuring one."""

    def __init__(self, process: subprocess.Popen, errors):
        self._process, self._errors = process, errors
        self.saved: dict[str, int] = self._answer()

    def step(self, name: str, number: int) -> tuple[float, int]:
        """Seconds and page faults of a variant's step on this batch."""
        self._process.stdin.write(f"{json.dumps([name, number])}\n")
        self._process.stdin.flush()
        seconds, faults = self._answer()
        return seconds, faults

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"compare: steps with kept memory failed\n{self._errors.read()}")
        return json.loads(line)


@contextlib.contextmanager
def steps(dropout: float | None, settings: Settings) -> Iterator[Steps]:
    """Starts the process, which has made a step of each variant; ends it."""
    task = {"dropout": dropout, "settings": settings.task()}
    command = [sys.executable, "-m", "onepass.tools.compare.kept", json.dumps(task)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        with process:
            try:
                yield Steps(process, errors)
            finally:
                process.kill()


def main(task_text: str) -> None:
    """Answers each line [variant, number of the batch] by [seconds, page faults]."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that a model's output is no answer
    task = json.loads(task_text)
    settings = Settings.from_dict(task["settings"], command="")
    onepass.keep_freed_memory()
    torch.set_num_threads(settings.threads)
    text = None if settings.model else load_text(settings.text)
    workload = workload_of(settings, text, task["dropout"])
    trainers = {
        name: trainer_of(name, workload.build(), settings)[0] for name in kept_names(settings)
    }
    torch.manual_seed(settings.seed)
    answer = {name: trainer.saved_bytes(workload.batch(0)) for name, trainer in trainers.items()}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            break
        name, number = json.loads(line)
        batch = workload.batch(number)
        faults, start = page_faults(), time.perf_counter()
        trainers[name].step(batch)
        answer = time.perf_counter() - start, page_faults() - faults


if __name__ == "__main__":
    main(sys.argv[1])
