"""Settings, tokens, a clock, and commands in this process, for tests of the tools."""

import argparse
import contextlib
import io
import json
import sys

import pytest
import torch

from onepass import cli
from onepass.tools.compare import memory
from onepass.tools.compare.settings import Settings, add_arguments, read_settings
from onepass.tools.model import Sizes

TINY = Sizes(layers=2, heads=2, width=16, block=16, batch=2)


def settings_of(*flags: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_settings(parser.parse_args(["--quick", "--threads", "1", *flags]))


def tokens(sizes=TINY):
    return torch.randint(256, (sizes.batch, sizes.block + 1), generator=torch.Generator())


def peaks_of_a_byte(names, *_, **__) -> dict[str, int]:
    """In place of memory.peaks_of_steps, which starts processes."""
    return dict.fromkeys(names, 1)


def run_here(*words: str, code: int = 0, peaks=peaks_of_a_byte) -> tuple[str, str]:
    """What a command prints, and what it says on standard error."""
    printed, told = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(memory, "peaks_of_steps", peaks)
        patch.setattr(sys, "stderr", told)
        patch.delenv("COLUMNS", raising=False)
        assert cli.main(list(words)) == code, told.getvalue()
    return printed.getvalue(), told.getvalue()


def run_json(command: str, *flags: str, **options) -> dict:
    """What a command prints with --json; on standard error it tells its progress alone."""
    printed, told = run_here(command, *flags, "--json", "-", **options)
    assert all(line.startswith(f"{command}: ") for line in told.splitlines())
    return json.loads(printed)


def refusal(command: str, *flags: str) -> str:
    """What a command says in one line, with exit code 2, before it prints anything."""
    printed, told = run_here(command, *flags, code=2)
    assert printed == "" and told.count("\n") == 1 and told.startswith(f"{command}: "), told
    return told


class FakeClock:
    """A clock that advances only where a test says so, and by `tick` at every reading."""

    def __init__(self, tick=0.0):
        self.now, self.tick, self.readings = 0.0, tick, 0

    def __call__(self):
        self.now += self.tick
        self.readings += 1
        return self.now
