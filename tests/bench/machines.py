"""A machine that is not here, as `make gpu-report` describes it."""

from __future__ import annotations

FACTS = {
    "gpu": "NVIDIA H100 80GB HBM3",
    "capability": 90,
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "commit": "0123456789ab",
}
