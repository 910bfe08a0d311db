"""The machine of `make gpu-report`: what is found on it, with stand-ins for what is not here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as where it is run as a script
import gpu_machine

from tests.bench.machines import FACTS


def test_torch_that_is_missing_or_broken(tmp_path, monkeypatch):
    for source, message in [
        ("raise ImportError('no such file')", r"cannot be imported \(no such file\)"),
        ("raise SystemExit('torn')", "could not be asked for its device: torn"),
    ]:
        (tmp_path / "torch.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(gpu_machine.Obstacle, match=message):
            gpu_machine.facts_of_device()


def test_facts_of_a_device(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    torch_of = (
        "from types import SimpleNamespace as N\n"
        "__version__, version = '2.11.0+cu130', N(cuda='13.0')\n"
        "cuda = N(is_available=lambda: True, get_device_capability=lambda: {},\n"
        "         get_device_name=lambda: '{}')\n"
    )
    (tmp_path / "torch.py").write_text(torch_of.format((9, 0), FACTS["gpu"]))
    assert gpu_machine.facts_of_device() | {"commit": FACTS["commit"]} == FACTS
    (tmp_path / "torch.py").write_text(torch_of.format((7, 5), "Tesla T4"))
    with pytest.raises(gpu_machine.Obstacle, match="^Tesla T4 is sm_75, and .* sm_80 on"):
        gpu_machine.facts_of_device()


def test_tools_are_found_on_the_path_or_in_the_toolkit(tmp_path, monkeypatch):
    def program(*parts: str) -> str:
        file = tmp_path.joinpath(*parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
        return str(file)

    on_path = program("path", "some-tool")
    in_toolkit = program("cuda", "some-tool", "some-tool")
    in_bin = program("cuda", "bin", "other-tool")
    cuda = {"CUDA_HOME": str(tmp_path / "cuda")}
    path = {"PATH": str(tmp_path / "path")}
    assert gpu_machine.find_tool("some-tool", cuda | path) == on_path
    assert gpu_machine.find_tool("some-tool", cuda) == in_toolkit
    assert gpu_machine.find_tool("other-tool", cuda | path) == in_bin
    assert gpu_machine.find_tool("no-such-tool", cuda | path) == ""
    of_nsight = [program("nsight", version, "ncu") for version in ("2024.1.0", "2025.3.1")]
    monkeypatch.setattr(gpu_machine, "NSIGHT", tmp_path / "nsight")
    assert gpu_machine.find_tool("ncu", path) == of_nsight[1]


def test_no_nvcc_or_package_is_one_line(monkeypatch):
    monkeypatch.setattr(gpu_machine, "facts_of_device", lambda: dict(FACTS))
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name, environment: "")
    with pytest.raises(gpu_machine.Obstacle, match="there is no nvcc on PATH"):
        gpu_machine.find_all({})
    facts, tools = gpu_machine.find_all({"CUDACXX": "my-nvcc"})
    assert (
        tools == {"nvcc": "my-nvcc", "compute-sanitizer": "", "ncu": ""}
        and facts["gpu"] == FACTS["gpu"]
    )
    assert gpu_machine.missing_packages(["torch", "no-such-package"]) == ["no-such-package"]
    monkeypatch.setattr(gpu_machine, "missing_packages", lambda: ["rich", "pytest"])
    with pytest.raises(gpu_machine.Obstacle, match="lacks rich, pytest: install them with pip"):
        gpu_machine.find_all({"CUDACXX": "my-nvcc"})


@pytest.mark.parametrize(
    ("device", "folder"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "nvidia-geforce-rtx-4070-ti-super"),
        ("Tesla T4 (MIG 1g.5gb)", "tesla-t4-mig-1g-5gb"),
    ],
)
def test_slug(device, folder):
    assert gpu_machine.slug(device) == folder
