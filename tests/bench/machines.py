"""A machine that is not here, stand-ins for programs, and the modules of `make gpu-report`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as where its programs are run as scripts

FACTS = {
    "gpu": "NVIDIA H100 80GB HBM3", "capability": 90, "torch": "2.11.0+cu130", "cuda": "13.0",
    "commit": "0123456789ab",
}  # fmt: skip
TOOLS = {name: f"/usr/bin/{name}" for name in ("nvcc", "compute-sanitizer", "ncu")}


def program(file: Path, text: str = "", by: str = "/bin/sh") -> Path:
    """The file, which becomes a program of these lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!{by}\n{text}\n")
    file.chmod(0o755)
    return file
