"""Clock and power of a device, from a stand-in for nvidia-smi, and figures that are streamed."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from onepass.tools import bench
from onepass.tools.sensors import Load, Sensors
from tests.bench.test_harness import run


def load_of(sensors: Sensors, samples: int) -> Load:
    start = time.perf_counter()
    while len(sensors._samples) < samples and time.perf_counter() < start + 20:
        time.sleep(0.01)
    assert sensors.between(0.0, start - 60) == Load()  # of a time without samples
    found = sensors.between(start - 60, time.perf_counter())
    sensors.close()
    return found


@pytest.mark.parametrize(
    ("lines", "load", "text"),
    [
        (["1980, 310.5", "1410, 700.0", "1755, 650.1"], Load(1755.0, 650.1), "1755 MHz, 650 W"),
        (["1980, [N/A]", "1410, [N/A]"], Load(1695.0, None), "1695 MHz"),  # tells no power
    ],
)
def test_medians_of_clock_and_power(smi, lines, load, text):
    asked = smi(*lines)
    assert load_of(Sensors("GPU-1"), len(lines)) == load and str(load) == text
    assert {"--query-gpu=clocks.sm,power.draw", "--id=GPU-1"} <= set(asked.read_text().split())


def test_without_nvidia_smi_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_of(Sensors("GPU-1"), 0) == Load() and str(Load()) == ""


def test_the_device_is_torchs_current_one(smi, monkeypatch):
    asked = smi("1980, 310.5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for properties, device in (({"uuid": "ab-cd"}, "GPU-ab-cd"), ({}, "1")):
        of = SimpleNamespace(**properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, of=of: of)
        load_of(Sensors(), 1)
        assert f"--id={device}" in asked.read_text().split()


def test_without_a_device_nothing_is_asked(smi, monkeypatch):
    asked = smi("1980, 310.5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_of(Sensors(), 0) == Load() and not asked.exists()


def test_figures_are_streamed(capsys, tmp_path, monkeypatch):
    """One line for each row, when the file has it; on the CPU without clock and power."""
    case = "norm/rms_norm/float32/*/forward"
    words = ("norm", "--quick", "--no-compile", "--case", case, "--json", str(tmp_path / "f"))
    write, counts = bench._write_json, []

    def counted(file, result) -> bool:
        counts.append(len(result["rows"]))
        return write(file, result)

    monkeypatch.setattr(bench, "_write_json", counted)
    assert run(*words, "--stream") == 0
    assert counts == [1, 1]  # after the case, and at the end
    (row,) = json.loads((tmp_path / "f").read_text())["rows"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("figure ")]
    median = row["times"]["ours"]["median_us"]
    (line,) = lines
    assert line.startswith(f"figure {row['name']}: ours {median:.1f} us, ") and "x eager" in line
    assert row["sm_mhz"] is None and row["watts"] is None and "MHz" not in line
