"""The ceilings, split and profile of the report, with stand-ins for device and Nsight Compute."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from onepass.tools.sensors import Load
from tests.bench.machines import BENCHMARKS, program
from tests.install import nvcc
from tests.support import compiled

import gpu_kernels  # isort: skip
import gpu_load  # isort: skip

MANGLED = (
    "void onepass::cuda::(anonymous namespace)::attention_backward_kernel<onepass::BFloat16, "
    "(int)128, (bool)0, (bool)1>(AttentionBackward, onepass::cuda::BackwardWork)"
)
NAME = "attention_backward_kernel<BFloat16, 128, 0, 1>"
SMALL = ("--device", "cpu", "--scale", "512")


def test_names_of_kernels():
    kind = (
        "attention_forward_kernel<onepass::Float16, 128, (onepass::cuda::{0}ForwardKind)2, false>"
    )
    told = {
        f"void onepass::cuda::{scope}{kind.format(scope)}(A)": kind
        for scope in ("", "(anonymous namespace)::", "<unnamed>::")
    }
    told = dict.fromkeys(told, "attention_forward_kernel<Float16, 128, 2, false>")
    told |= {MANGLED: NAME, "Memset (Device)": "Memset"}
    told["onepass::cuda::attention_delta_kernel(Args)"] = "attention_delta_kernel"
    assert {name: gpu_kernels.kernel_name(name) for name in told} == told


# ---- split ---------------------------------------------------------------------------------------


def test_split_of_a_call():
    """The mean of each kernel's time, in the order in which they first run."""
    call = [("Memset (Device)", 2.0), (MANGLED, 100.0), ("attention_dquery_kernel(A)", 5.0)]
    events = [
        SimpleNamespace(name=name, device_type="DeviceType.CUDA", device_time_total=us)
        for name, us in call * gpu_kernels.REPEATS
    ]
    events += [SimpleNamespace(name="aten::zero_", device_type="DeviceType.CPU")]
    found = gpu_kernels.times_of(events, "cuda")
    assert found == {"Memset": 2.0, NAME: 100.0, "attention_dquery_kernel": 5.0}
    assert list(found) == ["Memset", NAME, "attention_dquery_kernel"]


def test_split_runs_every_call(tmp_path, capsys, monkeypatch):
    """On the CPU, by its operators."""
    monkeypatch.setattr(gpu_load, "BUSY", 0.0)
    file = tmp_path / "split.json"
    assert gpu_kernels.main(["split", *SMALL, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    lines = [line for line in capsys.readouterr().out.splitlines() if "figure split, " in line]
    assert len(lines) == len(rows) and all(len(row["kernels"]) == 1 for row in rows)
    operators = {name for row in rows for name in row["kernels"]}
    families = ("attention_forward", "attention_backward", "norm_forward", "norm_backward")
    wanted = {f"onepass::{name}" for name in (*families, "attention_decode", "optimizer_step")}
    assert operators == wanted
    assert all((row["sm_mhz"], row["watts"]) == (None, None) for row in rows)  # no device here


def test_split_has_clock_and_power(monkeypatch, capsys):
    """Of BUSY seconds of a call, before the profiler runs it a few times more."""
    calls: list[float] = []
    times = {"kernel": 3.25}
    monkeypatch.setattr(gpu_load, "BUSY", 0.05)
    call = lambda: calls.append(time.perf_counter())  # noqa: E731
    monkeypatch.setattr(gpu_kernels, "calls", lambda *_: {"a call": lambda: call})
    monkeypatch.setattr(gpu_kernels, "times_of", lambda *_: times)
    asked: list[tuple[float, float]] = []

    def between(start: float, end: float):
        asked.append((start, end))
        return Load(1755.0, 650.1)

    (row,) = gpu_kernels.split("cpu", 1, print, SimpleNamespace(between=between))
    assert row == {"call": "a call", "kernels": times, "sm_mhz": 1755.0, "watts": 650.1}
    assert capsys.readouterr().out == "figure split, a call: kernel 3.2 us, 1755 MHz, 650 W\n"
    ((start, end),) = asked
    before = [of for of in calls if of <= end]
    assert end - start == pytest.approx(0.05) and len(calls) - len(before) == gpu_kernels.REPEATS
    assert before[-1] - before[0] >= 0.04 and before[0] <= start + 0.01


def test_a_call_that_fails_takes_no_other_with_it(capsys, monkeypatch):
    def fails():
        raise RuntimeError("an illegal memory access\nand more")

    makers = {"one": fails, "two": lambda: lambda: None}
    monkeypatch.setattr(gpu_load, "BUSY", 0.01)
    monkeypatch.setattr(gpu_kernels, "calls", lambda device, scale: makers)
    assert gpu_kernels.main(["split", *SMALL]) == 1  # without kernels nothing is known
    first, second = capsys.readouterr().out.splitlines()
    assert first == "figure split, one: failed: an illegal memory access"
    assert second.startswith("figure split, two: ")
    assert gpu_kernels.main(["calls", *SMALL]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[::2] == ["call one", "call two"] and "one: failed: an illegal" in said[1]


# ---- profile -------------------------------------------------------------------------------------


NCU = """
import json, pathlib, subprocess, sys
folder = pathlib.Path({folder!r})
words = sys.argv[1:]
first = next(i for i, word in enumerate(words) if word.endswith('gpu_kernels.py')) - 1
(folder / 'options').write_text(json.dumps(words[:first]))
if {runs}:
    print(subprocess.run(words[first:], capture_output=True, text=True, check=True).stdout)
print({said!r})
sys.exit({code})
"""


def ncu(folder: Path, *lines: str, code: int = 0, runs: bool = False) -> Path:
    """A stand-in that notes its arguments, runs the program that it is given, and prints these."""
    text = NCU.format(folder=str(folder), runs=runs, said="\n".join(lines), code=code)
    return program(folder / "ncu", text, by="/usr/bin/env python3")


def row_of(number: int, name: str, *values: str) -> str:
    return ",".join(f'"{cell}"' for cell in (number, "1", name, *values))


HEADER = row_of("ID", "Kernel Name", *gpu_kernels.METRICS.values()).replace('"1",', '"Process ID",')
UNITS = row_of("", "", *["%"] * 6, "ns", "", "", "hz")
VALUES = ("61.5", "30", "80.25", "70", "12", "12.4", "1,234,000", "2,000", "10", "1,755,000,000")


def metrics_of(options: list[str]) -> set[str]:
    return set(options[options.index("--metrics") + 1].split(","))


def test_profile_of_a_kernel(tmp_path, capsys):
    row = row_of(0, MANGLED, *VALUES)
    by = ncu(tmp_path, "==PROF== Connected", HEADER, UNITS, row, runs=True)
    file = tmp_path / "profile.json"
    assert gpu_kernels.main(["profile", "--ncu", str(by), *SMALL, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())
    values = (61.5, 30, 80.25, 70, 12, 12.4, 1234, 2000, 10, 1755)
    wanted = dict(zip(gpu_kernels.METRICS, values, strict=True))
    assert row == {"call": "adamw", "kernel": NAME, **wanted}  # the last call that was named
    assert capsys.readouterr().out.startswith(f"figure profile, adamw, {NAME}: tensor 62 %, ")
    options = json.loads((tmp_path / "options").read_text())
    assert options[:2] == ["--clock-control", "none"] and "--nvtx" in options
    assert metrics_of(options) == set(gpu_kernels.METRICS.values())


def test_the_call_of_a_row():
    """Nsight Compute prints all rows after the program has ended; n/a where a metric is not."""
    column = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
    header = HEADER.replace('"ID",', f'"ID","{column}",')

    def row(number: int, ranges: str = "") -> str:
        return row_of(number, MANGLED, *VALUES).replace(",", f',"{ranges}",', 1)

    told = ["call one, forward\n", '==PROF== Profiling "attention_f..." - 0: 0%....100% - 9 passes']
    told += ["call two\n", '==PROF== Profiling "attention_b..." - 1 (2/3): 0%....100% - 9 passes']
    told += ['==PROF== Profiling "attention_b..." - 2: 0%....100% - 9 passes', "call three\n"]
    with_ranges = [row(i, f"{i}:<default domain>:{of}:none") for i, of in enumerate(CALLS)]
    for rows in (with_ranges, [row(i).replace("61.5", "n/a") for i in range(3)]):
        found = gpu_kernels.profile([*told, header, UNITS, *rows], lambda line: None)
        assert [row["call"] for row in found] == CALLS and {row["lsu"] for row in found} == {30}
        assert {row["tensor"] for row in found} == {61.5 if rows is with_ranges else None}
    (found,) = gpu_kernels.profile([header, with_ranges[0]], lambda line: None)
    assert found["call"] == ""


CALLS = ["one, forward", "two", "two"]


@pytest.mark.parametrize("form", ["regex:^{}(avg|sum)$", "{}"])
def test_a_metric_that_nsight_compute_does_not_know(tmp_path, capsys, form):
    """It then profiles nothing; without that metric it does."""
    unknown, other = gpu_kernels.METRICS["lsu"], gpu_kernels.METRICS["tensor"]
    name = unknown.partition(".")[0] + "." if "(" in form else unknown
    said = f"==ERROR== Failed to find metric {form.format(name)}".replace(".", "\\.")
    knows = ncu(tmp_path, HEADER, UNITS, row_of(0, MANGLED, *VALUES)).rename(tmp_path / "knows")
    by = program(
        tmp_path / "ncu",
        f'case "$*" in *{unknown}*) echo \'{said}\'; exit 1;; esac\nexec {knows} "$@"',
    )
    assert gpu_kernels.main(["profile", "--ncu", str(by), *SMALL]) == 0
    assert f"without {unknown}, which ncu does not know\n" in capsys.readouterr().out
    metrics = metrics_of(json.loads((tmp_path / "options").read_text()))
    assert other in metrics and len(metrics) == len(gpu_kernels.METRICS) - 1


@pytest.mark.parametrize(
    "said, code, expected",
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 1, 3),
        ("==ERROR== unrecognised option", 1, 1),
        ("==WARNING== No kernels were profiled.", 0, 1),
    ],
)
def test_no_profile(tmp_path, capsys, said, code, expected):
    by = ncu(tmp_path, said, code=code)
    assert gpu_kernels.main(["profile", "--ncu", str(by), *SMALL]) == expected
    assert said in capsys.readouterr().err


# ---- ceilings ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cubin() -> Path:
    return nvcc.cubin(BENCHMARKS / "gpu_ceilings.cu", "sm_90")


def test_loops_of_ceilings_do_what_is_counted(cubin):
    """Eight products, eight fragments or one addition a turn, and little else."""
    found = set()
    for code in nvcc.machine_code(cubin).values():
        for loop in nvcc.loops(code):
            counts = [loop.count(word) for word in ("HMMA", "LDSM", "RED")]
            if any(counts):
                assert "LDL" not in loop and "STL" not in loop
                assert loop.count("\n") < 4 * sum(counts) + 8
                found.add(tuple(counts))
    assert found == {(8, 0, 0), (0, 8, 0), (0, 0, 1)}


def test_ceilings_without_a_device_say_so(capfd):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("there is no nvcc")
    *words, _, _ = gpu_kernels.ceilings_command(compiler, "90", Path("program"))
    recipe = compiled.Recipe("gpu_ceilings", tuple(words), (BENCHMARKS / "gpu_ceilings.cu",))
    assert gpu_kernels.main(["ceilings", "--program", str(compiled.made([recipe])[0])]) == 2
    assert capfd.readouterr().err.startswith("gpu_ceilings: no device: ")


def test_ceilings_have_clock_and_power(tmp_path, smi, monkeypatch, capsys):
    """By an nvcc that gives a program which takes its time for each figure, then fails."""
    made = program(
        tmp_path / "program",
        "for of in bfloat16 float16; do\n"
        '  sleep 0.6; echo "figure ceiling, mma.sync $of: 613.4 TFLOP/s"\n'
        "done\necho torn >&2\nexit 1",
    )
    compiler = program(tmp_path / "nvcc", f'for last; do :; done\ncp {made} "$last"')
    smi("1755, 650.1", again=0.05)
    with_device = gpu_load.sensors
    monkeypatch.setattr(gpu_load, "sensors", lambda: with_device("GPU-1"))
    file = tmp_path / "ceilings.json"
    assert gpu_kernels.main(["ceilings", "--nvcc", str(compiler), "--json", str(file)]) == 1
    figure = {"value": 613.4, "unit": "TFLOP/s", "sm_mhz": 1755.0, "watts": 650.1}
    names = [f"mma.sync {of}" for of in ("bfloat16", "float16")]
    assert json.loads(file.read_text()) == dict.fromkeys(names, figure)
    said = capsys.readouterr()
    assert said.out.count(": 613.4 TFLOP/s, 1755 MHz, 650 W\n") == 2 and said.err == "torn\n"


def test_programs_are_busy_for_as_long_as_is_looked_at():
    source = (BENCHMARKS / "gpu_fastest.cuh").read_text()
    assert f"constexpr double kBusySeconds = {gpu_load.BUSY};" in source
