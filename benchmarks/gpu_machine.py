"""The machine of `make gpu-report`: its device, its tools, and what it lacks."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NSIGHT = Path("/opt", "nvidia", "nsight-compute")  # a folder for each version, in which is ncu
PACKAGES = ("pip", "scikit-build-core", "pybind11", "numpy", "rich", "pytest", "hypothesis")

PROBE = """
import json
try:
    import torch
except ImportError as error:
    facts = {"obstacle": f"torch cannot be imported ({error}): install torch 2.10 or newer"}
else:
    if torch.version.cuda is None:
        facts = {"obstacle": f"torch {torch.__version__} is built without CUDA"}
    elif not torch.cuda.is_available():
        facts = {"obstacle": f"torch {torch.__version__} sees no CUDA device"}
    else:
        major, minor = torch.cuda.get_device_capability()
        facts = {
            "gpu": torch.cuda.get_device_name(),
            "capability": 10 * major + minor,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        if major < 8:
            facts["obstacle"] = f"{facts['gpu']} is sm_{major}{minor}, and onepass needs sm_80 on"
print(json.dumps(facts))
"""


class Obstacle(Exception):
    """The reason why nothing can run, in one line."""


def facts_of_device(python: str = sys.executable) -> dict:
    """Name, capability and torch of the device that torch uses; raises Obstacle."""
    result = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    try:
        facts = json.loads(result.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (result.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise Obstacle(f"torch could not be asked for its device: {last}") from None
    if "obstacle" in facts:
        raise Obstacle(facts["obstacle"])
    return facts


def find_tool(name: str, environment: Mapping[str, str]) -> str:
    """The path of a program of the CUDA toolkit, from PATH, CUDA_HOME or the usual place, or ""."""
    homes = [environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [environment.get("PATH", "")]
    folders += [os.path.join(home, sub) for home in homes if home for sub in ("bin", name)]
    folders += sorted(map(str, NSIGHT.glob("*")), reverse=True)
    return shutil.which(name, path=os.pathsep.join(folders)) or ""


def missing_packages(names: Sequence[str] = PACKAGES) -> list[str]:
    """Distributions that this Python does not have.

    Looked up by the name of the distribution: a search for the module `pip` makes setuptools leave
    distutils alone, and inductor then fails in this process.
    """
    missing = []
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def find_all(environment: Mapping[str, str]) -> tuple[dict, dict[str, str]]:
    """(facts of device and software, paths of the toolkit's tools); raises Obstacle."""
    facts = facts_of_device()
    tools = {name: find_tool(name, environment) for name in ("nvcc", "compute-sanitizer", "ncu")}
    tools["nvcc"] = environment.get("CUDACXX") or tools["nvcc"]
    if not tools["nvcc"]:
        raise Obstacle("there is no nvcc on PATH or in CUDA_HOME: install the CUDA toolkit")
    if missing := missing_packages():
        raise Obstacle(f"this Python lacks {', '.join(missing)}: install them with pip")
    return facts | {"commit": commit()}, tools


def commit() -> str:
    """The commit of this checkout, "unknown" for a copy without git."""
    try:
        git = ["git", "-C", str(ROOT)]
        run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
        head = run([*git, "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        changed = run([*git, "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
        return head + (" and changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def slug(device: str) -> str:
    """A folder's name for the device."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
