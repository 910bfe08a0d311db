"""`onepass compare` as a command: output, JSON, picture, flags, bad input."""

import argparse
import functools
import json
import shlex
import statistics
import sys

import pytest
import torch

import onepass
from onepass import _library, _malloc
from onepass.tools.compare import attribution, kept, memory, settings, train, variants
from onepass.tools.machine import medium_has_effect
from tests.compare.cases import refusal, run_here, run_json

pytestmark = pytest.mark.xdist_group("compare")  # most tests read one run
QUICK = ("--quick", "--threads", "1", "--steps", "4", "--pairs", "2")
MEDIUM = (variants.MEDIUM, variants.SWAPPED_MEDIUM) if medium_has_effect() else ()
KEPT = ("stock, kept memory", "swapped, kept memory")
ONE_LAYER = ("--layers", "1", "--width", "16", "--heads", "2", "--block", "32", "--batch", "1")
MASTER = "onepass bf16, master {}, bfloat16 moments".format


def model(name):
    return "--model", f"tests.compare.models:{name}"


def parsed(*flags):
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return parser.parse_args(flags)


def read(*flags):
    return settings.read_settings(parsed(*flags))


def check_times(variant, ratio):
    step, ratio = variant["step_ms"], variant[ratio]
    assert len(step["rounds"]) == 2 and 0 < step["p10"] <= step["median"] <= step["p90"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Of one run: what it prints, what it says on standard error, its JSON and its picture."""
    folder = tmp_path_factory.mktemp("compare")
    flags = [*QUICK, "--json", f"{folder}/out.json", "--plot", f"{folder}/out.png", "--rmsnorm"]
    flags += ["--seed", "3", "--master", "remainder16", "stochastic", "--state-dtype", "bfloat16"]
    said = run_here("compare", *flags)
    return *said, json.loads((folder / "out.json").read_text()), folder / "out.png"


def test_output(outcome):
    printed, told, data, picture = outcome
    assert all(line.startswith("compare: ") for line in told.splitlines())
    assert "\x1b" not in printed and "\r" not in printed and "…" not in printed
    flat = " ".join(printed.split())
    assert data["verdict"]["sentence"] in flat
    assert torch.__version__ in flat and data["machine"]["cpu"] in flat
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_json_schema(outcome):
    data = outcome[2]
    assert list(data) == [
        "schema_version", "command", "machine", "settings", "data", "parameters", "objective",
        "speed", "first_step", "sameness", "optimizers", "swap_report", "verdict", "seconds",
    ]  # fmt: skip
    assert data["schema_version"] == 1
    assert {"cpu", "isa", "threads", "torch", "commit"} <= set(data["machine"])
    assert [speed["dropout"] for speed in data["speed"]] == [0.1, 0.0]
    for speed in data["speed"]:
        assert list(speed["variants"]) == ["stock", "swapped", *MEDIUM]
        for variant in speed["variants"].values():
            assert list(variant) == [
                "step_ms", "page_faults", "items_per_second", "ratio_to_stock",
                "ratio_to_baseline", "baseline", "parts_ms", "saved_bytes", "peak_bytes",
                "linear_gflops",
            ]  # fmt: skip
            check_times(variant, "ratio_to_stock")
            rate, median = None, variant["step_ms"]["median"]
            if parts := variant["parts_ms"]:
                assert sum(attribution.by_part(parts).values()) == pytest.approx(median)
                seconds = sum(phase["linear"] for phase in parts.values()) / 1e3
                rate = pytest.approx(speed["linear_operations"] / seconds / 1e9)
            assert variant["linear_gflops"] == rate
            assert variant["saved_bytes"] > 0 and variant["peak_bytes"] == 1
            items = 1e3 * speed["items_per_batch"] / median
            assert variant["items_per_second"] == pytest.approx(items)
    saved = {n: v["saved_bytes"] for n, v in data["speed"][0]["variants"].items()}
    assert saved["swapped"] < saved["stock"]  # which keeps a mask of dropout
    assert list(data["first_step"]) == ["swapped", *MEDIUM]
    first = data["first_step"]["swapped"]
    assert abs(first["loss_difference"]) < 1e-5 and first["gradient_error"] < 1e-3
    assert first["dropout"] == "on, with the same masks"
    for phase in data["sameness"]:
        assert phase["steps"][0] == 0 and phase["steps"][-1] == 4
        assert len(phase["stock_losses"]) == train.STOCK_RUNS
        assert len(phase["swapped_losses"]) == len(phase["steps"])
        if MEDIUM:
            assert len(phase["medium_losses"]) == len(phase["steps"])
            assert 0 < phase["medium_gap"] < 0.1
    differing = [phase["stock_runs_differ_by"] for phase in data["sameness"]]
    assert differing == ["dropout seed", "summation order"]
    kinds = {entry["kind"] for entry in data["swap_report"]["swapped"]}
    assert kinds - {"linear"} == {"norm", "attention", "dropout"}  # linear: on some CPUs
    assert data["settings"]["seed"] == 3 and data["settings"]["rmsnorm"] is True


def test_json_schema_of_the_optimizers(outcome):
    data = outcome[2]
    compared = data["optimizers"]
    assert list(compared) == [
        "dropout", "parameters", "baseline", "variants", "steps", "stock_gap", "left_out",
    ]  # fmt: skip
    assert compared["dropout"] == 0.0 and compared["parameters"] == data["parameters"]
    assert compared["baseline"] == "torch fused" and compared["left_out"] == {}
    assert compared["steps"] == data["sameness"][1]["steps"]
    assert compared["stock_gap"] == data["sameness"][1]["stock_gap"]
    assert list(compared["variants"]) == [
        "torch default", "torch fused", "onepass", "torch fused bf16",
        MASTER("remainder16"), MASTER("stochastic"),
    ]  # fmt: skip
    for name, variant in compared["variants"].items():
        assert list(variant) == [
            "library", "cast_to", "master", "state_dtype", "step_ms", "page_faults",
            "ratio_to_baseline", "share_of_step", "state_bytes_per_parameter",
            "bytes_per_parameter", "losses", "gap", "same",
        ]  # fmt: skip
        check_times(variant, "ratio_to_baseline")
        is_cast = variant["cast_to"] is not None
        assert (variant["share_of_step"] is None) is is_cast is ("bf16" in name)
        assert not is_cast or (variant["same"] is None and 0 < variant["gap"] < 0.1)
        if name not in ("torch default", "torch fused"):
            assert len(variant["losses"]) == len(compared["steps"])
        else:
            assert variant["losses"] is variant["gap"] is variant["same"] is None
    sizes = {"onepass": 8, MASTER("remainder16"): 6, MASTER("stochastic"): 4}
    for name, size in sizes.items():
        found = compared["variants"][name]["state_bytes_per_parameter"]
        assert found == pytest.approx(size, abs=0.01)
    ours = compared["variants"]["onepass"]
    assert ours["gap"] < 1e-5 and data["verdict"]["optimizer_same"] is ours["same"] is not None


def test_command_repeats_the_run(outcome):
    data = outcome[2]
    words = shlex.split(data["command"])
    assert words[:2] == ["onepass", "compare"]
    again = read(*words[2:])
    assert again.to_dict() == data["settings"]
    assert settings.Settings.from_dict(again.to_dict(), again.command) == again


def test_json_to_stdout_is_nothing_but_json(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox " * 200)
    flags = ("--dropout", "0", "--text", str(text), "--dtype", "bfloat16")
    data = run_json("compare", *QUICK, *ONE_LAYER, *flags)
    assert [speed["dropout"] for speed in data["speed"]] == [0.0]
    assert data["speed"][0]["items_per_batch"] == 32
    sizes = {"layers": 1, "heads": 2, "width": 16, "block": 32, "batch": 1}
    assert data["settings"]["speed"] == sizes and data["settings"]["dtype"] == "bfloat16"
    assert data["data"].startswith(str(text)) and data["machine"]["threads"] == 1


def test_defaults_are_those_of_the_documentation():
    default = read()
    assert default.speed == settings.Sizes(6, 6, 384, 1024, 2)
    assert default.dropouts == (0.1, 0.0) and default.pairs == 8 and default.steps == 200
    assert default.dtype == torch.float32 and default.device == torch.device("cpu")
    assert default.optimizers == ("default", "fused", "onepass")
    assert default.masters == default.state_dtypes == () and not default.keep_memory
    assert default.command == "onepass compare"
    assert parsed("--plot").plot == "onepass-compare.png"


def check_own(data):
    (speed,), (phase,) = data["speed"], data["sameness"]
    assert speed["dropout"] is None and speed["items_per_batch"] == 8
    assert phase["curve"] == "training loss" and phase["steps"][-1] == 4
    assert len(phase["swapped_losses"]) == len(phase["steps"])
    assert data["first_step"]["swapped"]["gradient_error"] < 1e-3
    kinds = {entry["kind"] for entry in data["swap_report"]["swapped"]}
    assert kinds - {"linear"} == {"dropout", "norm"}  # linear: where torch is slow


@pytest.mark.skipif(bool(_malloc.obstacle()), reason=_malloc.obstacle())
def test_own_model_with_kept_memory():
    """Peaks are of real processes."""
    flags = (*QUICK, "--optimizers", "fused", "--keep-memory", *model("fixed"))
    data = run_json("compare", *flags, peaks=memory.peaks_of_steps)
    check_own(data)
    assert read(*shlex.split(data["command"])[2:]).to_dict() == data["settings"]
    found = data["speed"][0]["variants"]
    assert [found[name]["baseline"] for name in KEPT] == [KEPT[0]] * 2
    assert found[KEPT[0]]["saved_bytes"] == found["stock"]["saved_bytes"]
    assert found[KEPT[0]]["parts_ms"] is None and found["stock"]["parts_ms"]
    assert all(found[name]["peak_bytes"] >= 0 for name in (*KEPT, "stock", "swapped"))


def test_own_model_in_bfloat16_with_a_batch_of_each_step():
    flags = ("--optimizers", "onepass", "--master", "stochastic")
    data = run_json("compare", *QUICK, *model("by_step"), *flags)
    check_own(data)
    assert not data["settings"]["keep_memory"]
    compared = data["optimizers"]
    assert list(compared["variants"]) == [
        "torch fused", "onepass", "torch fused bf16", "onepass bf16, master stochastic",
    ]  # fmt: skip
    assert compared["dropout"] is None and compared["steps"][-1] == 4
    assert all(v["losses"] for n, v in compared["variants"].items() if n != "torch fused")


def test_own_model_of_transformers_is_attached():
    pytest.importorskip("transformers", reason="the model is one of its own")
    data = run_json("compare", *QUICK, "--optimizers", "fused", *model("transformer"))
    to = [entry["to"] for entry in data["swap_report"]["swapped"] if entry["kind"] == "attention"]
    assert to == ["onepass's attention, by transformers' registry"] * 2
    assert data["first_step"]["swapped"]["gradient_error"] < 1e-3
    for variant in ("stock", "swapped"):
        parts = data["speed"][0]["variants"][variant]["parts_ms"]
        assert parts["forward"]["attention"] > 0 and parts["backward"]["attention"] > 0


def test_a_loss_of_zero_cannot_tell():
    data = run_json("compare", *QUICK, *model("zero"))
    assert data["verdict"]["same"] is None and data["sameness"][0]["same"] is None
    assert data["first_step"]["swapped"]["gradient_error"] is None


def test_an_optimizer_that_is_left_out_is_told(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no kernels for this [device]")

    monkeypatch.setattr(onepass.optim, "AdamW", refuse)
    file = tmp_path / "out.json"
    printed, _ = run_here("compare", *QUICK, *model("fixed"), "--json", str(file))
    data = json.loads(file.read_text())
    assert data["optimizers"]["left_out"] == {"onepass": "no kernels for this [device]"}
    assert list(data["optimizers"]["variants"]) == ["torch default", "torch fused"]
    assert data["optimizers"]["steps"] is data["verdict"]["optimizer_same"] is None
    assert "onepass: no kernels for this [device]" in " ".join(printed.split())


def test_compile_adds_two_variants(monkeypatch):
    # The graph is captured and differentiated, but not compiled to C++: that takes half a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    data = run_json("compare", *QUICK, "--optimizers", "fused", *model("fixed"), "--compile")
    found = data["speed"][0]["variants"]
    assert list(found) == ["stock", "swapped", "compiled stock", "compiled swapped", *MEDIUM]
    assert found["compiled swapped"]["baseline"] == "compiled stock"
    assert found["compiled swapped"]["parts_ms"] is None
    assert found["compiled swapped"]["saved_bytes"] > 0


@pytest.mark.skipif(bool(_malloc.obstacle()), reason=_malloc.obstacle())
def test_kept_memory_is_kept_in_a_process_of_its_own():
    """The step takes 64 MiB, which malloc returns to the system by default; text that the model
    prints is not taken for a result."""
    with kept.steps(None, read(*QUICK, "--keep-memory", *model("large"))) as others:
        assert list(others.saved) == list(KEPT) and min(others.saved.values()) >= 64 << 20
        found = [others.step(KEPT[0], number) for number in range(16)]
    seconds, faults = zip(*found, strict=True)
    assert min(seconds) > 0
    # Fewer than with huge pages. In a single step the system may have taken pages back.
    assert statistics.median(faults) < 32


def test_an_error_in_the_process_of_kept_memory_is_told():
    found = read(*QUICK, "--keep-memory", *model("not_when_kept"))
    with pytest.raises(RuntimeError, match="(?s)steps with kept memory failed.*only there"):
        with kept.steps(None, found):
            pass


BAD_INPUT = [  # of files: tests/faults/test_output_files.py too
    (["--text", "no-such-file"], "--text must name readable files: no-such-file"),
    (["--text", "short.txt"], "text must be longer"),
    (["--dtype", "fp8"], "--dtype must be auto, float32 or bfloat16, got 'fp8'"),
    (["--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
    (["--device", "meta"], "--device must be cpu or cuda, got 'meta'"),
    (["--heads", "5"], "--width must be a multiple of --heads"),
    (["--layers", "0"], "--layers must be at least 1, got 0"),
    (["--dropout", "1.5"], "--dropout must lie in [0, 1), got 1.5"),
    (["--dropout", "0", "0"], "--dropout must list different values"),
    (["--steps", "0"], "--steps must be at least 1, got 0"),
    (["--seed", "-1"], "--seed must be at least 0"),
    (["--optimizers", "sgd"], "--optimizers must be of default, fused, onepass, got 'sgd'"),
    (["--master", "fp8"], "--master must be of none, fp32, remainder16, stochastic, got 'fp8'"),
    (["--master", "fp32", "fp32"], "--master must list different values, got fp32 fp32"),
    (["--state-dtype", "int4"], "--state-dtype must be of float32, bfloat16, int8, got 'int4'"),
    (["--optimizers", "fused", "--master", "fp32"], "must list onepass, got fused"),
    ([*model("half"), "--master", "remainder16"],
     "onepass, master remainder16 cannot train this model: AdamW: params must be bfloat16"),
    ([*model("float32_inside"), "--master", "fp32"],
     "--master trains the model with bfloat16 parameters, and its forward fails: "),
    (["--json", "no-such-folder/out.json"], "--json must name a file to write: No such file"),
    (["--plot", "no-such-folder/out.png"], "--plot must name a file to write: No such file"),
    (["--plot", "out.docx"], "--plot must end in one of "),
    (["--model", "models"], "--model must be package.module:function"),
    ([*model("fixed"), "--layers", "2"], "--model brings its own sizes"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_bytes(b"short")
    assert message in refusal("compare", "--quick", *flags)


@pytest.fixture
def one_device(monkeypatch):
    """Makes torch see one CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(_library, "not_loaded", {})
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    return chosen


UNUSABLE = [  # flags, what is changed here, what the error says
    (["--device", "cuda"], (torch.cuda, "is_available", bool), "torch has no CUDA"),
    (["--device", "cuda"], (_library, "not_loaded", {"libonepass_cuda.so": "built without CUDA"}),
     "--device must be one that onepass runs on, got 'cuda': built without CUDA"),
    (["--device", "cuda:1"], (), "one that torch sees, got 'cuda:1': it sees 1"),
    (["--keep-memory", "--device", "cuda"], (_malloc, "obstacle", str),
     "--keep-memory must come with --device cpu, got cuda"),
    (["--keep-memory"], (_malloc, "obstacle", lambda: "this C library is not glibc"),
     "--keep-memory must have glibc's malloc: this C library is not glibc"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "changed", "message"), UNUSABLE)
def test_what_this_machine_lacks_is_one_line(one_device, monkeypatch, flags, changed, message):
    if changed:
        monkeypatch.setattr(*changed)
    assert message in refusal("compare", *flags)


def test_cuda_settings(one_device):
    found = read("--device", "cuda")
    assert found.device == torch.device("cuda") and found.dtype == torch.bfloat16
    settings.make_current(found.device)
    settings.make_current(torch.device("cpu"))
    assert one_device == []  # torch's own choice stays
    settings.make_current(read("--device", "cuda:0").device)
    assert one_device == ["cuda:0"]


def test_missing_tools_are_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    told = refusal("compare", "--quick")
    assert told == "compare: rich is missing: pip install 'onepass[tools]'\n"
