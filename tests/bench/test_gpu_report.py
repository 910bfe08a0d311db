"""The command `make gpu-report`, as far as it goes without a device, its archive and rehearsal."""

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.bench.machines import BENCHMARKS, FACTS, ROOT, TOOLS
from tests.bench.test_gpu_step import python_step, results_of

import gpu_archive  # isort: skip
import gpu_build  # isort: skip
import gpu_plan  # isort: skip
import gpu_report  # isort: skip
import gpu_step  # isort: skip

SCRIPT = BENCHMARKS / "gpu_report.py"
H100 = "nvidia-h100-80gb-hbm3"


@pytest.fixture
def with_steps(tmp_path, monkeypatch):
    """Installs the steps of a call `check` on a machine with a device."""
    monkeypatch.setattr(gpu_build, "SITE", tmp_path / "work" / "site")
    monkeypatch.setattr(gpu_report, "find_all", lambda environment: (dict(FACTS), TOOLS))

    def install(*steps: gpu_step.Step) -> None:
        calls = {"check": gpu_plan.Call(30.0, 2, list(steps))}
        monkeypatch.setattr(gpu_plan, "plan", lambda where: calls)

    return install


def run(folder: Path, *words: str) -> int:
    return gpu_report.main(["check", "--out", str(folder), *words])


def names_in(archive: Path) -> set[str]:
    with tarfile.open(archive / "gpu-report.tar.gz") as tar:
        return set(tar.getnames())


def test_without_a_device_it_says_so_and_exits_2(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_report.main([]) == 2
    said, errors = capsys.readouterr()
    assert said == "" and errors.count("\n") == 1 and errors.startswith("gpu-report: torch ")
    assert "built without CUDA" in errors or "sees no CUDA device" in errors


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_passes_the_python_and_the_flags_on():
    words = ["make", "--dry-run", "gpu-report", "PYTHON=my-python", "ARGS=check --budget 60"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=alone)
    assert result.stdout.strip() == "my-python benchmarks/gpu_report.py check --budget 60"


@pytest.mark.parametrize(("code", "expected"), [("", 0), ("raise SystemExit(1)", 1)])
def test_main_writes_the_report(tmp_path, with_steps, capsys, code, expected):
    with_steps(python_step("build", ""), python_step("tests", code), python_step("bench norm", ""))
    folder = tmp_path / "out" / H100
    folder.mkdir(parents=True)
    (folder / "bench-norm.json").write_text("of an earlier run")
    assert run(tmp_path / "out") == expected
    report = json.loads((folder / "report.json").read_text())
    found = {step["name"]: step["result"] for step in report["steps"]}
    assert found == {"build": "ok", "tests": "failed" if expected else "ok", "bench norm": "ok"}
    assert report["machine"] == FACTS and 0 <= report["seconds"] < 30
    assert not (folder / "bench-norm.json").exists()
    table = (folder / "table.md").read_text()
    assert table in capsys.readouterr().out and "| build | ok |" in table


def test_each_run_adds_to_those_before_it(tmp_path, with_steps, monkeypatch):
    """On the same machine, also at another commit; a step that runs again is replaced."""
    names = ("build", "device tests", "bench norm", "bench decode", "memcheck tests")
    with_steps(*(python_step(name, "") for name in names))
    folder = tmp_path / H100
    folder.mkdir()
    for name in ("bench-norm", "bench-attention"):
        (folder / f"{name}.json").write_text('{"rows": []}')
    steps = lambda: json.loads((folder / "report.json").read_text())["steps"]  # noqa: E731
    run(tmp_path, "--only", "bench*", "*check *")
    assert {step["name"] for step in steps()} == {"build", *names[2:]}
    assert not (folder / "bench-norm.json").exists()
    assert (folder / "bench-attention.json").exists()
    later = FACTS | {"commit": "fedcba987654"}
    monkeypatch.setattr(gpu_report, "find_all", lambda environment: (later, TOOLS))
    for _ in range(2):
        run(tmp_path, "--only", "device tests")
        commits = {step["name"]: step["commit"] for step in steps()}
        assert len(steps()) == 5 and commits["bench norm"] == FACTS["commit"]
        assert commits["build"] == commits["device tests"] == later["commit"]
        assert (folder / "logs" / "bench-norm.log").exists()
    monkeypatch.setattr(gpu_report, "find_all", lambda environment: (FACTS | {"cuda": "14"}, TOOLS))
    run(tmp_path, "--only", "bench norm")
    assert {step["name"] for step in steps()} == {"build", "bench norm"}


def test_a_wrong_name_costs_no_build(tmp_path, with_steps, monkeypatch, capsys):
    with_steps(python_step("build", ""), python_step("smoke norm", ""))
    monkeypatch.setattr(gpu_step.Runner, "execute", lambda *_: pytest.fail("a step runs"))
    assert run(tmp_path, "--only", "smoke*", "device-tests", "profiles") == 2
    said = capsys.readouterr().err
    assert "no step is named device-tests, profiles; steps are: 'build', 'smoke norm'" in said
    assert gpu_report.main(["mesure"]) == 2
    assert "no call is named mesure; calls are: prepare, check" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_archive_alone_in_a_folder(tmp_path, with_steps):
    with_steps(python_step("build", ""))
    carried = tmp_path / "carried"
    assert run(tmp_path / "out", "--archive", str(carried)) == 0
    assert [file.name for file in carried.iterdir()] == ["gpu-report.tar.gz"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == [H100]
    names = {"report.json", "table.md", "logs/build.log"}
    assert names_in(carried) == {f"{H100}/{name}" for name in names}


@pytest.mark.parametrize("name", ["table.md", "report.json"])
def test_what_cannot_be_written_is_no_success(tmp_path, with_steps, capsys, name):
    """A folder is in the place of a file: before the steps, or since one of them."""
    blocked, is_late = tmp_path / "out" / H100 / name, name == "report.json"
    with_steps(python_step("build", f"import os; os.makedirs({str(blocked)!r})" * is_late))
    if not is_late:
        blocked.mkdir(parents=True)
    code = run(tmp_path / "out")
    output, errors = capsys.readouterr()
    if is_late:
        assert code == 1 and "| build | ok |" in output
        assert "gpu-report: report.json could not be written: " in errors
    else:
        assert (code, output) == (2, "") and "gpu-report: --out must be writable: Is a" in errors


def test_the_report_is_written_after_each_step(tmp_path):
    """Also as the archive that is carried away."""
    counts, folder = [], tmp_path / "device"
    folder.mkdir()
    steps = [python_step("build", ""), python_step("next", "")]

    def keep(records) -> None:
        gpu_report.write(folder, FACTS, time.monotonic(), [], records, tmp_path)
        counts.append(len(json.loads((folder / "report.json").read_text())["steps"]))
        assert f"| {records[-1]['name']} | ok |" in (folder / "table.md").read_text()
        with tarfile.open(tmp_path / "gpu-report.tar.gz") as archive:
            packed = json.loads(archive.extractfile("device/report.json").read())
        assert len(packed["steps"]) == counts[-1]

    gpu_step.Runner(tmp_path / "log", say=lambda line: None, keep=keep).execute(steps, 60.0)
    assert counts == [1, 2]


def test_figures_in_an_unknown_form_cost_the_table_alone(tmp_path, capsys):
    folder = tmp_path / "device"
    folder.mkdir()
    (folder / "bench-norm.json").write_text('{"machine": {}}')
    records = [{"name": "build", "result": "ok", "detail": "", "seconds": 1.0}]
    table, written = gpu_report.write(folder, FACTS, 0.0, [], records, tmp_path)
    assert not written and "There is no table: KeyError('ceilings')" in table
    assert "there is no table: KeyError('ceilings')" in capsys.readouterr().err
    names = {"bench-norm.json", "report.json", "table.md"}
    assert names_in(tmp_path) == {f"device/{name}" for name in names}


@pytest.mark.slow
def test_a_rehearsal_of_the_first_call(tmp_path):
    """Builds onepass._C alone, and runs every step on the CPU within the time of the call."""
    start = time.monotonic()
    command = [sys.executable, SCRIPT, "check", "--rehearse", "--out", tmp_path]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    assert time.monotonic() - start < 330, said
    report = json.loads((tmp_path / "rehearsal-on-the-cpu" / "report.json").read_text())
    names = {step["name"] for step in report["steps"]}
    assert "failed" not in results_of(report["steps"]), said
    logs = {file.stem for file in (tmp_path / "rehearsal-on-the-cpu" / "logs").iterdir()}
    assert {gpu_report.slug(name) for name in names} <= logs, said


@pytest.fixture
def results(tmp_path) -> Path:
    folder = tmp_path / "nvidia-h100"
    folder.mkdir()
    drawn = random.Random(0)
    for name, size in (("report.json", 300), ("table.md", 500), ("report.log", 9000)):
        (folder / name).write_bytes(drawn.randbytes(size))  # which gzip makes no smaller
    return folder


def unpacked(files: list[Path]) -> dict[str, bytes]:
    data = b"".join(file.read_bytes() for file in files)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {name: archive.extractfile(name).read() for name in archive.getnames()}


def test_one_file_holds_all_results(results, tmp_path):
    files = gpu_archive.pack(results, tmp_path)
    assert files == [tmp_path / "gpu-report.tar.gz"]
    assert unpacked(files) == {
        f"nvidia-h100/{file.name}": file.read_bytes() for file in results.iterdir()
    }


def test_parts_of_a_large_one_and_what_takes_their_place(results, tmp_path):
    files = gpu_archive.pack(results, tmp_path, part=2000)
    assert [file.name for file in files] == [f"gpu-report.tar.gz.{i}" for i in range(len(files))]
    assert 5 <= len(files) <= 8 and all(file.stat().st_size <= 2000 for file in files)
    assert unpacked(files)["nvidia-h100/report.log"] == (results / "report.log").read_bytes()
    assert gpu_archive.pack(results, tmp_path) == [tmp_path / "gpu-report.tar.gz"]
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["gpu-report.tar.gz"]


def test_the_largest_are_left_out_if_parts_do_not_suffice(results, tmp_path):
    files = gpu_archive.pack(results, tmp_path, part=500, parts=6)
    assert len(files) <= 6
    names = ("report.json", "table.md", "left-out.txt")
    assert unpacked(files).keys() == {f"nvidia-h100/{name}" for name in names}
    assert unpacked(files)["nvidia-h100/left-out.txt"] == b"nvidia-h100/report.log\n"


def test_an_earlier_archive_survives_a_full_disk(results, tmp_path, monkeypatch):
    (before,) = gpu_archive.pack(results, tmp_path)
    data = before.read_bytes()

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        gpu_archive.pack(results, tmp_path)
    assert before.read_bytes() == data
