"""The sweep of tiles: the tables that it makes, and its verdicts on programs that stand in."""

import dataclasses
import json
import shutil
import struct

import pytest

from onepass.tools.sensors import Load
from tests.bench import machines
from tests.support import compiled

import gpu_sweep  # isort: skip

CASE = gpu_sweep.CASES[0]
FIRST, SECOND, THIRD = CASE.candidates[:3]


@pytest.mark.parametrize("case", gpu_sweep.CASES, ids=lambda case: case.name)
def test_a_candidate_is_one_line_of_the_table(case):
    """The first is the table's own: beside it, all tables of a case differ in that line alone."""
    table = gpu_sweep.TABLE.read_text()
    tables = [gpu_sweep.edited(table, case, candidate) for candidate in case.candidates]
    assert case.line.format(case.candidates[0]) in table
    for candidate, other in zip(case.candidates, tables, strict=True):
        pairs = zip(tables[0].splitlines(), other.splitlines(), strict=True)
        changed = [after for before, after in pairs if before != after]
        assert len(changed) == (candidate != case.candidates[0])
        assert all(candidate in line for line in changed)


def test_a_table_of_another_form_is_refused():
    with pytest.raises(ValueError, match="in the table 0 times"):
        gpu_sweep.edited("constexpr int nothing = 0;\n", CASE, FIRST)


def test_without_a_device_a_program_says_so(capsys, monkeypatch):
    """One candidate, compiled as it is shipped, and kept."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")

    def built(nvcc, arch, case, number, work):
        table = compiled.BUILD / "gpu_sweep" / "cuda" / "attention" / "table.h"
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(gpu_sweep.edited(gpu_sweep.TABLE.read_text(), case, FIRST))
        *words, _, _ = gpu_sweep.compile_command(nvcc, arch, case, table.parents[2], work)
        sources = table, gpu_sweep.ROOT / "benchmarks" / "gpu_sweep.cu"
        (program,) = compiled.made([compiled.Recipe("gpu_sweep", tuple(words), sources)])
        return program, ""

    monkeypatch.setattr(gpu_sweep, "built", built)
    monkeypatch.setattr(gpu_sweep, "CASES", (dataclasses.replace(CASE, candidates=(FIRST,)),))
    assert gpu_sweep.main(["--nvcc", nvcc, "--arch", "90"]) == 2
    assert capsys.readouterr().err.startswith("gpu_sweep: no device: ")


def words_of(*floats: float) -> bytes:
    return b"".join(struct.pack("<f", value)[2:] for value in floats)


class Sensors:
    """Of a device that is 10 MHz slower at each figure."""

    mhz = 1990

    def between(self, start: float, end: float) -> Load:
        self.mhz -= 10
        return Load(self.mhz, 650.0)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes a program that prints these times and leaves these values."""

    def make(name: str, times: tuple[float, float], *values: float, code: int = 0):
        (tmp_path / f"{name}.data").write_bytes(words_of(*values))
        lines = "".join(
            f"echo 'figure sweep, {CASE.name}{kind}, '$1': {us} us, 1.0 TFLOP/s'\n"
            for kind, us in zip(("", " causal"), times, strict=True)
        )
        text = f"{lines}cp {tmp_path}/{name}.data $2\nexit {code}"
        return machines.program(tmp_path / name, text), ""

    monkeypatch.setattr(gpu_sweep, "SECONDS", 1)
    return make


def test_the_best_of_a_case_and_the_line_to_change(program):
    said: list[str] = []
    case = dataclasses.replace(CASE, candidates=(FIRST, SECOND, THIRD))
    programs = [
        program("first", (100.0, 60.0), 1.0, -0.5),
        program("second", (80.0, 55.0), 1.0, -0.5078125),
        program("third", (70.0, 90.0), 1.0, -0.5),
    ]
    row = gpu_sweep.run_case(case, programs, said.append, Sensors())
    names = ("forward 64", "forward 64 causal")
    assert row["microseconds"][SECOND] == dict(zip(names, (80.0, 55.0), strict=True))
    assert row["load"][SECOND] == {
        name: {"sm_mhz": mhz, "watts": 650.0} for name, mhz in zip(names, (1960, 1950), strict=True)
    }
    assert said[1].startswith(f"figure sweep, {names[1]}, {FIRST}: 60.0 us, ")
    assert len(said) == 6 and not row["left_out"] and json.dumps(row)
    line = f"if (bucket == 64 && !terms) return {SECOND};"
    assert gpu_sweep.summary(case, row).endswith(f"csrc/cuda/attention/table.h: {line}")
    row["microseconds"][FIRST] = {"forward 64": 1.0}
    assert gpu_sweep.summary(case, row).endswith("the table's own is best")


def test_what_is_wrong_or_fails_is_left_out(program, tmp_path):
    case = dataclasses.replace(CASE, candidates=CASE.candidates[:5])
    waits = program("waits", (10.0, 6.0), 1.0, -0.5)
    waits[0].write_text("#!/bin/sh\nexec sleep 60\n")
    programs = [
        program("first", (100.0, 60.0), 1.0, -0.5), program("wrong", (10.0, 6.0), 1.0, -0.4),
        program("fails", (10.0, 6.0), 1.0, -0.5, code=1), waits,
        (tmp_path / "none", "error: no such tile"),
    ]  # fmt: skip
    row = gpu_sweep.run_case(case, programs, lambda line: None, Sensors())
    assert row["microseconds"].keys() == row["load"].keys() == {FIRST}
    reasons = ("other results than the first", "exit code 1", "did not end within 1 s")
    reasons += ("error: no such tile",)
    assert row["left_out"] == dict(zip(case.candidates[1:], reasons, strict=True))


def test_where_no_candidate_runs(program):
    case = dataclasses.replace(CASE, candidates=(FIRST,))
    row = gpu_sweep.run_case(case, [program("fails", (1.0, 1.0), code=1)], print, Sensors())
    assert gpu_sweep.summary(case, row).endswith("no candidate ran")
