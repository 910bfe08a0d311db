"""A machine that is not here, as `make gpu-report` describes it, and the report's own modules."""

from __future__ import annotations

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
