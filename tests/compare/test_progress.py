"""The progress of a run: the time left, on a terminal and off it."""

import io
import re
import time

import pytest

pytest.importorskip("rich", reason="draws the bar")

from onepass.tools import progress
from onepass.tools.compare.optimizers import BASELINE, Choice
from onepass.tools.compare.phases import phases_of
from onepass.tools.compare.train import STOCK_RUNS, curves_of
from onepass.tools.progress import Phase, Progress
from tests.compare.cases import settings_of

PHASES = [
    Phase("Speed, dropout 0.1", 10), Phase("Speed, dropout 0", 10),
    Phase("Sameness, dropout 0", 0, 60.0), Phase("Optimizers"),
]  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "clock", lambda: now[0])
    return now


def test_time_left_is_that_of_this_phase_and_of_those_ahead(clock):
    shown = Progress("compare", PHASES)
    assert shown.times() == (0.0, None)
    advance = shown.next()
    clock[0] = 4.0
    advance()
    advance()
    # Two seconds a step; the same again without dropout, a minute, and the mean of all so far.
    assert shown.times() == (4.0, 16.0 + 20.0 + 60.0 + 20.0)
    assert shown.line() == "Speed, dropout 0.1: step 2 of 10; 0:04 of about 2:00, 1:56 left"
    clock[0] = 30.0
    for _ in range(9):
        advance()
    assert shown.line().startswith("Speed, dropout 0.1: step 11; ")
    advance = shown.next()
    clock[0] = 31.0
    advance()
    assert shown.times() == (31.0, 9.0 + 60.0 + 10.0)
    shown.next()
    clock[0] = 41.0
    assert shown.times()[1] == 50.0 + (60.0 + 1.0) / 2
    shown.next()()
    assert shown.line() == "Optimizers: step 1; 0:41 so far"


def test_a_phase_that_takes_longer_than_expected(clock):
    longer = Progress("compare", [Phase("One", 1, 5.0)])
    longer.next()()
    clock[0] = 1.0
    assert longer.line().endswith("; 0:01 of about 0:05, 0:04 left")
    clock[0] = 6.0
    assert longer.line() == "One: step 1 of 1; 0:06 so far, longer than expected"


def test_a_line_every_ten_seconds_off_a_terminal(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.02)
    monkeypatch.setattr("sys.stderr", told := io.StringIO())
    with Progress("compare", PHASES) as shown:
        shown.next()()
        deadline = time.monotonic() + 30.0
        while told.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = told.getvalue().splitlines()
    form = r"compare: Speed, dropout 0.1: step 1 of 10; \d+:\d\d of about \d+:\d\d, \d+:\d\d left"
    assert len(lines) >= 2 and all(re.fullmatch(form, line) for line in lines)


def test_a_terminal_gets_a_bar_with_the_time_left(monkeypatch):
    told = io.StringIO()
    told.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr", told)
    with Progress("compare", PHASES) as shown:
        shown.next()()
        shown._bars.refresh()
    assert "Speed, dropout 0.1: step 1 of 10" in told.getvalue() and " left" in told.getvalue()


def test_phases_know_their_least_steps_and_seconds():
    choices = [BASELINE, Choice("onepass")]
    quick = phases_of(settings_of("--steps", "5"), (0.1, 0.0), choices)
    kinds = [phase.name.partition(",")[0] for phase in quick]
    assert kinds == ["Speed", "Speed", "Sameness", "Sameness", "Optimizers"]
    assert all(phase.steps and not phase.seconds for phase in quick)
    runs = curves_of(settings_of())
    assert runs in (STOCK_RUNS + 1, STOCK_RUNS + 2)  # with one under medium precision
    assert quick[3].steps == 5 * runs and quick[4].steps == 3 * 2 + 5
    auto = phases_of(settings_of("--auto", "--dropout", "0"), (0.0,), [BASELINE])
    assert [phase.kind for phase in auto][:2] == ["Choice", "Speed"]
    flags = "--auto", "--dropout", "0", "--precision"
    single, two = (
        phases_of(settings_of(*flags, p), (0.0,), [BASELINE])[0] for p in ("float32", "int8")
    )
    assert two.seconds == 2 * single.seconds
