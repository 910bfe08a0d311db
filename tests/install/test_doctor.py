"""`onepass doctor` on a sound installation, and its verdict on a wrong operator."""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

from onepass import _C, _malloc, cli, functional
from onepass._ops import gate
from onepass._policy import products
from onepass.tools import doctor


def test_everything_in_order(capsys):
    before = torch.get_rng_state()
    assert cli.main(["doctor"]) == 0
    assert torch.equal(before, torch.get_rng_state())
    text = capsys.readouterr().out
    assert "everything is in order" in text and "FAIL" not in text
    assert set(re.findall(r"ok   self-test (\w+)", text)) == set(functional.__all__)


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_are_folded_in_a_terminal_alone(capsys, monkeypatch, terminal):
    monkeypatch.setenv("COLUMNS", "80")
    value = "loaded from a folder " * 6
    found = [doctor.Line("libonepass_cpu.so", value.strip(), False, "reinstall")]
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert doctor.main(argparse.Namespace(json=False)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (max(map(len, lines)) <= 80) is terminal
    said = " ".join(" ".join(lines).split())
    assert value.strip() in said and "fix: reinstall" in said


def test_json_names_levels_and_switches(capsys, monkeypatch):
    monkeypatch.setenv("ONEPASS_LOG", "nothing")
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    lines = {line["name"]: line["value"] for line in report["lines"]}
    assert lines["CPU level in use"].startswith(_C.cpu_level())
    assert lines["ONEPASS_LOG"].startswith("nothing")
    assert lines["torch"].startswith(torch.__version__)
    for switch in doctor.SWITCHES:
        assert switch in lines


def test_wrong_operators_fail_with_a_fix_and_hide_no_others(capsys, monkeypatch):
    @functools.wraps(functional.layer_norm)
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")

    right = gate._gate.run

    def wrong(*args):
        is_definition = forward_ad._current_level >= 0
        return right(*args) * (1.0 if is_definition else 1.00001)

    monkeypatch.setattr(gate._gate, "run", wrong)
    monkeypatch.setattr(functional, "layer_norm", broken)
    assert doctor.main(argparse.Namespace(json=False)) == 1
    text = capsys.readouterr().out
    assert "FAIL self-test silu_mul" in text and "fix: " in text and "4 failed" in text
    assert re.search(r"FAIL self-test layer_norm +RuntimeError: no such kernel", text)
    assert "ok   self-test dropout" in text


def test_a_level_that_is_not_there_fails_with_a_fix(monkeypatch):
    def unknown():
        raise RuntimeError("onepass: ONEPASS_CPU_ISA must be one of baseline, got avx1024")

    monkeypatch.setattr(_C, "cpu_level", unknown)
    (line,) = [line for line in doctor.findings() if line.name == "CPU level in use"]
    assert line.ok is False and line.fix == "unset ONEPASS_CPU_ISA"


@pytest.mark.parametrize("as_fast", [None, "bfloat16 products, by oneDNN"])
def test_slow_products_are_named_and_what_does_them(as_fast, monkeypatch):
    times = {torch.bfloat16: 39.6, torch.float16: 1.2}
    monkeypatch.setattr(doctor, "_times_float32", times.__getitem__)
    monkeypatch.setattr(products, "as_fast", lambda dtype: as_fast)
    (line,) = doctor._products()  # none of float16
    assert line.name == "bfloat16 products" and line.ok is None
    assert line.value.startswith("run 40 times slower than float32 in this torch on this CPU")
    assert ("onepass.swap" in line.value) == (as_fast is None)


def test_slow_products_are_measured_once(monkeypatch):
    """Fast products are timed a few times. The first call may compile a kernel, and is not counted.
    One thread, since threads of a busy machine wait for each other."""
    now, calls, linear = 0.0, [], torch.nn.functional.linear

    def timed(x, weight):
        nonlocal now
        first = x.dtype not in {dtype for dtype, _ in calls}
        now += 60.0 if first else 3.0 if x.dtype is torch.float16 else 0.001
        calls.append((x.dtype, torch.get_num_threads()))
        return linear(x, weight)

    monkeypatch.setattr(doctor.time, "perf_counter", lambda: now)
    monkeypatch.setattr(torch.nn.functional, "linear", timed)
    torch.set_num_threads(2)
    assert doctor._times_float32(torch.float16) == pytest.approx(3000)
    assert torch.get_num_threads() == 2
    assert calls.count((torch.float16, 1)) == 2 and calls.count((torch.float32, 1)) > 5
    assert {threads for _, threads in calls} == {1}


@pytest.mark.parametrize(
    ("faults", "obstacle", "expected"),
    [
        (16384, "", "costs 16,384 page faults, 48 ms: .*; onepass.keep_freed_memory"),
        (16384, "memory is that of libother.so", r"16,384 .*\(memory is that of libother.so\)$"),
        (32, "", "costs 32 page faults$"),  # huge pages
    ],
)
def test_freed_memory(faults, obstacle, expected, monkeypatch):
    monkeypatch.setattr(doctor, "_of_new_tensor", lambda: (faults, 0.048))
    monkeypatch.setattr(_malloc, "obstacle", lambda: obstacle)
    monkeypatch.setattr(_malloc, "told", dict)
    (line,) = doctor._memory()
    assert line.name == "freed memory" and line.ok is None and re.search(expected, line.value)


@pytest.mark.slow
@pytest.mark.skipif(bool(_malloc.obstacle()), reason=_malloc.obstacle())
def test_page_faults_are_measured():
    """In a new process, whose heap has no free block of that size."""
    code = "from onepass.tools import doctor; print(next(doctor._memory()).value)"
    kept = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
    for variables in ({}, kept):
        command = [sys.executable, "-c", code]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        value = subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, check=True
        ).stdout
        found = int(re.search(r"costs ([\d,]+) page faults", value)[1].replace(",", ""))
        assert (found < 32) == ("the environment says" in value) == bool(variables)


@pytest.mark.parametrize(
    ("capability", "archs", "expected"),
    [
        (80, "80", "sm_80 code"), (90, "80", "compute_80 PTX, compiled by the driver"),
        (75, "80", ""), (110, "80-real, 90-real, 100-real, 120", ""),
        (89, "80-real, 90-real, 100, 120-real", "sm_80 code"),
        (103, "80-real, 90-real, 100, 120-real", "sm_100 code"),
        (110, "80-real, 90-real, 100, 120-real", "compute_100 PTX, compiled by the driver"),
        (121, "80-real, 90-real, 100, 120-real", "sm_120 code"),
        (130, "80-real, 90-real, 100, 120-real", "compute_100 PTX, compiled by the driver"),
    ],
)  # fmt: skip
def test_which_code_a_device_runs(capability, archs, expected):
    assert doctor.code_for(capability, archs) == expected


def test_a_device():
    for capability, ok, fix in (
        (86, True, ""), (75, False, "use a device of sm_80 or newer; "),
        (90, False, "pip install with --config-settings=cmake.define.ONEPASS_CUDA_ARCHS=90"),
    ):  # fmt: skip
        line = doctor.device_line(1, "NVIDIA Something", capability, "80-real")
        assert line.name == "CUDA device 1" and line.ok is ok and line.fix.startswith(fix)
        assert line.value.startswith(f"NVIDIA Something, sm_{capability}: ")


def test_every_switch_is_listed():
    root = Path(__file__).parents[2]
    sources = [*root.glob("python/**/*.py"), *root.glob("csrc/**/*.c*"), *root.glob("csrc/**/*.h")]
    read = re.compile(r'(?:environ\.get|environ|getenv|switches)[(\[]\s*"(ONEPASS_\w+)"')
    switches = {name for path in sources for name in read.findall(path.read_text())}
    assert switches == set(doctor.SWITCHES)


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_bad_command_lines_exit_with_2(argv):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
