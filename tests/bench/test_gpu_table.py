"""The table of `make gpu-report`, from figures that `onepass bench` and `compare` write."""

import fnmatch
import importlib
import json
import subprocess
import sys

import pytest

from tests.bench.machines import FACTS, ROOT

import gpu_plan  # isort: skip
from gpu_step import read_json  # isort: skip
from gpu_table import markdown  # isort: skip


def interval(value: float | None) -> dict | None:
    return value and {"median": value, "low": value, "high": value}


def row(name: str, eager: float, others: dict[str, float] | None = None, **more) -> dict:
    found = {
        "name": name, "times": {"ours": {"median_us": 9.0}, "eager": {"median_us": 12.5}},
        "against_eager": interval(eager), "against_compile": interval(more.pop("compiled", None)),
        "against_others": {other: interval(value) for other, value in (others or {}).items()},
        "right": True,
    }  # fmt: skip
    if name.startswith(("attention/", "decode/")):
        ceiling = "arithmetic" if name.startswith("attention/") else "update"
        return found | {f"share_of_{ceiling}": more.pop("share")} | more
    return found | {"share_of_copy": more.pop("share", None)} | more


BENCH = {
    "machine": {"gpu": FACTS["gpu"], "driver": "580.1", "cuda": "13.0", "commit": "none"},
    "ceilings": {"copy_gbps": 3012.3},
    "failed": {"norm/add_rms_norm/bfloat16/65536x1024/forward": "RuntimeError: no"},
    "left_out": ["dropout/dropout/float32/65536x1024/forward"],
    "rows": [
        row("norm/layer_norm/float32/4x8/forward under grad", 1.4),
        row("norm/layer_norm/bfloat16/65536x1024/forward", 1.25, compiled=1.01, share=0.93),
        row("norm/layer_norm/bfloat16/65536x1024/backward", 1.5, share=0.80),
        row("norm/rms_norm/bfloat16/65536x1024/forward+backward", 2.0, compiled=1.1, share=0.7),
    ],
}
COMPARED = {
    "parameters": 85_900_000,
    "settings": {"dtype": "bfloat16", "speed": {"batch": 8, "block": 1024}},
    "speed": [
        {"dropout": 0.1, "variants": {"swapped": {"ratio_to_stock": interval(1.051)}}}
    ],
    "verdict": {"same": True, "sentence": "1.05x"},
}  # fmt: skip
REPORT = {
    "date": "2026-11-21",
    "machine": FACTS,
    "steps": [
        {"name": "build", "result": "ok", "detail": "", "seconds": 41.2},
        {"name": "memcheck", "result": "left out", "detail": "3 s | left", "seconds": 0.0},
    ],
}
FULL = "attention/full/bfloat16/4x16x4096x128"
DECODE = "decode/grouped/bfloat16/1x32on8x1x32768x128"
ATTENTION = BENCH | {
    "ceilings": {"copy_gbps": 3012.3, "matmul_16_gflops": 701e3},
    "failed": {},
    "left_out": [],
    "rows": [
        row(f"{FULL}/forward", 1.5, {"flash": 1.25, "cudnn": 0.75}, share=0.5, gflops=350.4e3),
        row(f"{FULL}/backward", 1.5, {"flash": 1.5}, share=0.43, gflops=300.6e3),
        row("attention/mask/bfloat16/8x16x2048x128/forward", 1.5, {"none": 0.8}, share=0.4,
            gflops=280e3),
        row(DECODE, 1.5, {"flash": 2.0}, share=0.81, gbps=2500.2),
        row("optimizer/adamw/float32/300x768", 3.0, gbps=None),
    ],
}  # fmt: skip
# Lines of the table of these results.
OF_NORMS = {
    "## NVIDIA H100 80GB HBM3",
    "| layer_norm bfloat16 65536x1024 | 1.25 / 1.50 / - | 1.01 / - / - | 93 % / 80 % / - |",
    "| rms_norm bfloat16 65536x1024 | - / - / 2.00 | - / - / 1.10 | - / - / 70 % |",
    "failed: norm/add_rms_norm/bfloat16/65536x1024/forward",
    "left out: dropout/dropout/float32/65536x1024/forward",
    "| GPT, 86M, batch 8x1024, bfloat16 | 1.051 [1.051-1.051] (dropout 0.1) | same |",
    "| build | ok | 41 |  |",
    "| memcheck | left out | 0 | 3 s / left |",
}
OF_ATTENTION = {
    "| full bfloat16 4x16x4096x128 | 350 / 301 | 50 % / 43 % | 1.50 / 1.50 "
    "| flash 1.25 / 1.50, cudnn 0.75 / - |",
    "| mask bfloat16 8x16x2048x128 | 280 / - | 40 % / - | 1.50 / - | none 0.80 / - |",
    "| grouped bfloat16 1x32on8x1x32768x128 | 9.0 | 2500 | 81 % | 1.50 | flash 2.00 |",
    "| adamw float32 300x768 | 9.0 | - | - | 3.00 | - |",
}


def check_columns(lines: list[str]) -> None:
    """All rows of a table have its columns."""
    for line, following in zip(lines, lines[1:], strict=False):
        if line.startswith("|") and following.startswith("|"):
            assert line.count("|") == following.count("|"), following


def test_table():
    text = markdown(REPORT, [BENCH], [COMPARED])
    lines = text.splitlines()
    assert "torch 2.11.0+cu130, commit 0123456789ab" in lines[2] and "driver 580.1" in lines[2]
    assert "3012 GB/s. Goals of speed reached in 2 of 3 cases." in text
    assert "layer_norm forward under grad 9.0 us (eager 12.5)." in text
    assert set(lines) >= OF_NORMS
    check_columns(lines)
    lines = markdown(REPORT, [BENCH, ATTENTION], []).splitlines()
    assert set(lines) >= OF_ATTENTION
    said = "torch's matmul in bfloat16: 701 TFLOP/s. Goals of speed reached in 2 of 2 cases."
    assert any(line.endswith(said) for line in lines)
    check_columns(lines)
    without = markdown(REPORT, [], [])
    assert "| build | ok | 41 |  |" in without and "eager" not in without


def test_predictions():
    """What falls short most is first; another device has none."""
    lines = markdown(REPORT, [BENCH, ATTENTION], []).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| Predicted before a"))
    assert lines[first + 2 : first + 5] == [
        f"| {FULL}/forward | 310 to 350 TFLOP/s | 350 TFLOP/s | 1.13 |",
        f"| {FULL}/backward | 250 to 300 TFLOP/s | 301 TFLOP/s | 1.20 |",
        f"| {DECODE} | 60 % to 70 % | 81 % | 1.35 |",
    ]
    other = REPORT | {"machine": FACTS | {"capability": 80}}
    assert "Predicted" not in markdown(other, [BENCH, ATTENTION], [])


def test_every_prediction_is_of_a_case():
    """By the names of bench's cases on a CUDA device."""
    predictions = json.loads((ROOT / "benchmarks" / "predictions.json").read_text())["90"]
    for pattern in predictions:
        family = pattern.partition("/")[0]
        module = importlib.import_module(f"onepass.tools.bench.families.{family}")
        names = [case.name for case in module.cases(False, "cuda")]
        assert fnmatch.filter(names, pattern), pattern


@pytest.mark.slow
def test_bench_and_compare_write_what_the_table_reads(tmp_path):
    """The real things on the CPU; their cases have two phases there."""

    def figures(*words: str) -> dict:
        command = [sys.executable, "-m", "onepass", *words, "--quick", "--threads", "1"]
        file = tmp_path / f"{words[0]}.json"
        subprocess.run([*command, "--json", str(file)], check=True, capture_output=True)
        return read_json(file)

    bench = figures("bench", "norm", "--no-compile")
    cases = f"{len(bench['rows'])} cases"
    assert gpu_plan.judge_bench(0, "", tmp_path / "bench.json").detail == cases
    compared = figures("compare", "--steps", "2", "--pairs", "1", "--dropout", "0")
    text = markdown(REPORT, [bench], [compared])
    assert "| layer_norm float32 64x96 | " in text and "| GPT, " in text
    attention = figures("bench", "attention", "decode", "--case", "*/causal/*/1x2x*")
    text = markdown(REPORT, [attention], [])
    assert "| causal float32 1x2x48x16 | " in text and "A call on a tensor of 1x2x4x8: " in text
    judged = gpu_plan.judge_compare(0, "", tmp_path / "compare.json")
    assert judged.result in ("ok", "failed") and judged.detail == compared["verdict"]["sentence"]
