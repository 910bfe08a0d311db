"""The lowest versions that pyproject.toml claims build onepass, and run its tools."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from tests.install.test_packages import BUILDS, ROOT

tomllib = pytest.importorskip("tomllib", reason="reads pyproject.toml: from Python 3.11 on")
LEFT_OUT = (".git", ".venv", "build", "__pycache__", "_lib", "*.so")


def floors() -> list[str]:
    """Of what builds onepass and of its tools; torch stays the installed one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["optional-dependencies"]["tools"],
    ]
    wanted.append("cmake" + project["tool"]["scikit-build"]["cmake"]["version"])
    assert all(text.count(">=") == 1 for text in wanted), wanted
    return [text.replace(">=", "==") + ".0" * (2 - text.count(".")) for text in wanted]


@BUILDS
@pytest.mark.slow
def test_the_lowest_versions(tmp_path):
    """Compiles the plainest level of the CPU part: two minutes."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    path = os.pathsep.join((os.fspath(python.parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "ONEPASS_CPU_ISA": "baseline"}

    def run(*words: object) -> str:
        command = [os.fspath(python), "-m", *map(str, words)]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        return result.stdout

    run("pip", "install", *floors(), "ninja")
    site = tmp_path / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    torchs = Path(torch.__file__).parents[1]
    (site / "site-packages" / "torchs.pth").write_text(f"{torchs}\n")
    settings = (
        "-C", "cmake.define.ONEPASS_CUDA=OFF", "-C", "cmake.define.ONEPASS_CPU_LEVELS=baseline",
    )  # fmt: skip
    run("pip", "install", "--no-deps", "--no-build-isolation", *settings, tree)
    assert "everything is in order" in run("onepass", "doctor")
    run("onepass", "bench", "norm", "--quick", "--seconds", "0.01", "--threads", "1")
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make():\n"
        "    layers = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)\n"
        "    return torch.nn.Sequential(*layers), torch.randn(4, 16)\n"
    )
    run("onepass", "compare", "--model", "mine:make", "--quick", "--plot", "picture.svg")
    run("onepass", "estimate", "--model", "mine:make")
