"""The machine of `make gpu-report`: what is found on it, with stand-ins for what is not here."""

import pytest

from tests.bench.machines import FACTS, program

import gpu_machine  # isort: skip

DEVICE = """
from types import SimpleNamespace as N
__version__, version = '2.11.0+cu130', N(cuda='13.0')
cuda = N(is_available=lambda: True, get_device_capability=lambda: {},
         get_device_name=lambda: {!r})
"""


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        ("raise ImportError('no such file')", r"cannot be imported \(no such file\)"),
        ("raise SystemExit('torn')", "could not be asked for its device: torn"),
        (DEVICE.format((7, 5), "Tesla T4"), "^Tesla T4 is sm_75, and .* sm_80 on"),
        (DEVICE.format((9, 0), FACTS["gpu"]), None),
    ],
)
def test_facts_of_a_device(tmp_path, monkeypatch, torch, message):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text(torch)
    if message is None:
        assert gpu_machine.facts_of_device() | {"commit": FACTS["commit"]} == FACTS
        return
    with pytest.raises(gpu_machine.Obstacle, match=message):
        gpu_machine.facts_of_device()


def test_tools_are_found_on_the_path_or_in_the_toolkit(tmp_path, monkeypatch):
    on_path = program(tmp_path / "path" / "some-tool")
    in_toolkit = program(tmp_path / "cuda" / "some-tool" / "some-tool")
    in_bin = program(tmp_path / "cuda" / "bin" / "other-tool")
    cuda, path = {"CUDA_HOME": str(tmp_path / "cuda")}, {"PATH": str(tmp_path / "path")}
    assert gpu_machine.find_tool("some-tool", cuda | path) == str(on_path)
    assert gpu_machine.find_tool("some-tool", cuda) == str(in_toolkit)
    assert gpu_machine.find_tool("other-tool", cuda | path) == str(in_bin)
    assert gpu_machine.find_tool("no-such-tool", cuda | path) == ""
    nsight = tmp_path / "nsight"
    of_nsight = [program(nsight / version / "ncu") for version in ("2024.1.0", "2025.3.1")]
    monkeypatch.setattr(gpu_machine, "NSIGHT", nsight)
    assert gpu_machine.find_tool("ncu", path) == str(of_nsight[1])


def test_no_nvcc_or_package_is_one_line(monkeypatch):
    monkeypatch.setattr(gpu_machine, "facts_of_device", lambda: dict(FACTS))
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name, environment: "")
    with pytest.raises(gpu_machine.Obstacle, match="there is no nvcc on PATH"):
        gpu_machine.find_all({})
    facts, tools = gpu_machine.find_all({"CUDACXX": "my-nvcc"})
    assert tools == {"nvcc": "my-nvcc", "compute-sanitizer": "", "ncu": ""}
    assert facts["gpu"] == FACTS["gpu"]
    assert gpu_machine.missing_packages(["torch", "no-such-package"]) == ["no-such-package"]
    monkeypatch.setattr(gpu_machine, "missing_packages", lambda: ["rich", "pytest"])
    with pytest.raises(gpu_machine.Obstacle, match="lacks rich, pytest: install them with pip"):
        gpu_machine.find_all({"CUDACXX": "my-nvcc"})


def test_slug():
    assert gpu_machine.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert gpu_machine.slug("Tesla T4 (MIG 1g.5gb)") == "tesla-t4-mig-1g-5gb"
