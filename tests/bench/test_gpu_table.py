"""The table of `make gpu-report`, from figures that `onepass bench` and `compare` write."""

from __future__ import annotations

import fnmatch
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.machines import FACTS

import gpu_plan  # isort: skip
from gpu_step import read_json  # isort: skip
from gpu_table import markdown  # isort: skip

ROOT = Path(__file__).parents[2]


def row(name: str, eager: float, compiled: float | None, share: float | None) -> dict:
    interval = lambda value: value and {"median": value, "low": value, "high": value}  # noqa: E731
    return {
        "name": name, "times": {"ours": {"median_us": 9.0}, "eager": {"median_us": 12.5}},
        "against_eager": interval(eager), "against_compile": interval(compiled),
        "against_others": {}, "share_of_copy": share, "right": True,
    }  # fmt: skip


def attention_row(name: str, share: float, others: dict[str, float], **more) -> dict:
    found = row(name, 1.5, None, None)
    del found["share_of_copy"]
    ceiling = "arithmetic" if name.startswith("attention/") else "update"
    found |= {f"share_of_{ceiling}": share, **more}
    found["against_others"] = {
        other: {"median": value, "low": value, "high": value} for other, value in others.items()
    }
    return found


BENCH = {
    "machine": {"gpu": FACTS["gpu"], "driver": "580.1", "cuda": "13.0", "commit": "none"},
    "ceilings": {"copy_gbps": 3012.3},
    "failed": {"norm/add_rms_norm/bfloat16/65536x1024/forward": "RuntimeError: no"},
    "left_out": ["dropout/dropout/float32/65536x1024/forward"],
    "rows": [
        row("norm/layer_norm/float32/4x8/forward under grad", 1.4, None, None),
        row("norm/layer_norm/bfloat16/65536x1024/forward", 1.25, 1.01, 0.93),
        row("norm/layer_norm/bfloat16/65536x1024/backward", 1.5, None, 0.80),
        row("norm/rms_norm/bfloat16/65536x1024/forward+backward", 2.0, 1.1, 0.7),
    ],
}
COMPARED = {
    "parameters": 85_900_000,
    "settings": {"dtype": "bfloat16", "speed": {"batch": 8, "block": 1024}},
    "speed": [
        {
            "dropout": 0.1,
            "variants": {
                "swapped": {"ratio_to_stock": {"median": 1.0512, "low": 1.05, "high": 1.052}}
            },
        }
    ],
    "verdict": {"same": True, "sentence": "1.05x"},
}
REPORT = {
    "date": "2026-11-21",
    "machine": FACTS,
    "steps": [
        {"name": "build", "result": "ok", "detail": "", "seconds": 41.2},
        {"name": "memcheck", "result": "left out", "detail": "3 s | left", "seconds": 0.0},
    ],
}


def test_table():
    text = markdown(REPORT, [BENCH], [COMPARED])
    lines = text.splitlines()
    assert "driver 580.1, cuda 13.0, torch 2.11.0+cu130, commit 0123456789ab" in lines[2]
    assert "Copy of a large tensor: 3012 GB/s. Goals of speed reached in 2 of 3 cases." in text
    assert "layer_norm forward under grad 9.0 us (eager 12.5)." in text
    assert {
        "## NVIDIA H100 80GB HBM3",
        "| layer_norm bfloat16 65536x1024 | 1.25 / 1.50 / - | 1.01 / - / - | 93 % / 80 % / - |",
        "| rms_norm bfloat16 65536x1024 | - / - / 2.00 | - / - / 1.10 | - / - / 70 % |",
        "failed: norm/add_rms_norm/bfloat16/65536x1024/forward",
        "left out: dropout/dropout/float32/65536x1024/forward",
        "| GPT, 86M, batch 8x1024, bfloat16 | 1.051 [1.050-1.052] (dropout 0.1) | same |",
        "| build | ok | 41 |  |",
        "| memcheck | left out | 0 | 3 s / left |",
    } <= set(lines)
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert tables == [5] * 4 + [4] * 3 + [5] * 4, "all rows of a table have its columns"
    without = markdown(REPORT, [], [])
    assert "| build | ok | 41 |  |" in without and "eager" not in without


ATTENTION = BENCH | {
    "ceilings": {"copy_gbps": 3012.3, "matmul_16_gflops": 701e3},
    "failed": {},
    "left_out": [],
    "rows": [
        attention_row(
            f"attention/full/bfloat16/4x16x4096x128/{phase}", share,
            {"flash": 1.25, "cudnn": 0.75} if phase == "forward" else {"flash": 1.5}, gflops=gflops,
        )
        for phase, share, gflops in (("forward", 0.5, 350.4e3), ("backward", 0.43, 300.6e3))
    ]
    + [
        attention_row(
            "attention/mask/bfloat16/8x16x2048x128/forward", 0.4, {"none": 0.8},
            gflops=280e3,
        ),
        attention_row(
            "decode/grouped/bfloat16/1x32on8x1x32768x128", 0.81, {"flash": 2.0}, gbps=2500.2
        ),
        row("optimizer/adamw/float32/300x768", 3.0, None, None) | {"gbps": None},
    ],
}  # fmt: skip


def test_table_of_attention():
    lines = markdown(REPORT, [BENCH, ATTENTION], []).splitlines()
    assert {
        "Copy of a large tensor: 3012 GB/s; torch's matmul in bfloat16: 701 TFLOP/s. Goals of "
        "speed reached in 2 of 2 cases.",
        "| full bfloat16 4x16x4096x128 | 350 / 301 | 50 % / 43 % | 1.50 / 1.50 "
        "| flash 1.25 / 1.50, cudnn 0.75 / - |",
        "| mask bfloat16 8x16x2048x128 | 280 / - | 40 % / - | 1.50 / - | none 0.80 / - |",
        "| grouped bfloat16 1x32on8x1x32768x128 | 9.0 | 2500 | 81 % | 1.50 | flash 2.00 |",
        "| adamw float32 300x768 | 9.0 | - | - | 3.00 | - |",
    } <= set(lines)
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert tables == [5] * 4 + [7] * 3 + [6] * 4 + [7] * 3 + [5] * 5 + [5] * 4


def test_predictions():
    """What falls short most is first; another device has none."""
    lines = markdown(REPORT, [BENCH, ATTENTION], []).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| Predicted before a"))
    case = "attention/full/bfloat16/4x16x4096x128"
    assert lines[first + 2 : first + 5] == [
        f"| {case}/forward | 310 to 350 TFLOP/s | 350 TFLOP/s | 1.13 |",
        f"| {case}/backward | 250 to 300 TFLOP/s | 301 TFLOP/s | 1.20 |",
        "| decode/grouped/bfloat16/1x32on8x1x32768x128 | 60 % to 70 % | 81 % | 1.35 |",
    ]
    other = REPORT | {"machine": FACTS | {"capability": 80}}
    assert "Predicted" not in markdown(other, [BENCH, ATTENTION], [])


def test_every_prediction_is_of_a_case():
    """By the names of bench's cases on a CUDA device."""
    predictions = json.loads((ROOT / "benchmarks" / "predictions.json").read_text())["90"]
    for family in {pattern.partition("/")[0] for pattern in predictions}:
        module = importlib.import_module(f"onepass.tools.bench.families.{family}")
        names = [case.name for case in module.cases(False, "cuda")]
        for pattern in predictions:
            assert pattern.partition("/")[0] != family or fnmatch.filter(names, pattern), pattern


@pytest.mark.slow
def test_bench_and_compare_write_what_the_table_reads(tmp_path):
    """The real things on the CPU; their cases have two phases there."""
    words = [sys.executable, "-m", "onepass"]
    bench = [*words, "bench", "norm", "--quick", "--no-compile", "--json", "bench.json"]
    compare = [*words, "compare", "--quick", "--steps", "2", "--pairs", "1", "--dropout", "0"]
    compare += ["--json", "compare.json", "--threads", "1"]
    for command in (bench, compare):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    figures = read_json(tmp_path / "bench.json")
    compared = read_json(tmp_path / "compare.json")
    text = markdown(REPORT, [figures], [compared])
    assert "| layer_norm float32 64x96 | " in text and "| GPT, " in text
    cases = f"{len(figures['rows'])} cases"
    assert gpu_plan.judge_bench(0, "", tmp_path / "bench.json").detail == cases
    attention = [*words, "bench", "attention", "decode", "--quick", "--threads", "1"]
    attention += ["--case", "*/causal/*/1x2x*", "--json", "attention.json"]
    subprocess.run(attention, cwd=tmp_path, check=True, capture_output=True)
    text = markdown(REPORT, [read_json(tmp_path / "attention.json")], [])
    assert "| causal float32 1x2x48x16 | " in text and "A call on a tensor of 1x2x4x8: " in text
    judged = gpu_plan.judge_compare(0, "", tmp_path / "compare.json")
    assert judged.result in ("ok", "failed") and judged.detail == compared["verdict"]["sentence"]
