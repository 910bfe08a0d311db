"""`onepass compare` as a command: output, JSON, picture, flags, bad input."""

import argparse
import functools
import json
import re
import shlex
import statistics
import sys

import pytest
import torch

import onepass
from onepass import _library, _malloc, cli
from onepass.tools.compare import attribution, kept, measure, settings, train, variants
from onepass.tools.machine import medium_has_effect
from tests.compare.cases import peaks_of_a_byte, run_here

pytestmark = pytest.mark.xdist_group("compare")  # most tests read one run
QUICK = ("--quick", "--threads", "1", "--steps", "4", "--pairs", "2")
MEDIUM = (variants.MEDIUM, variants.SWAPPED_MEDIUM) if medium_has_effect() else ()
KEPT = ("stock, kept memory", "swapped, kept memory")
ONE_LAYER = ("--layers", "1", "--width", "16", "--heads", "2", "--block", "32", "--batch", "1")

USER_MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project, self.drop = nn.RMSNorm(16), nn.Linear(16, 4), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(self.project(self.norm(x)))


class WithLoss(Net):
    def forward(self, x, target):
        return Output((super().forward(x) - target).square().mean())


class Zero(Net):
    def forward(self, x):
        return 0.0 * super().forward(x).sum()


def zero():
    return Zero(), torch.randn(8, 16)


class Output:
    def __init__(self, loss):
        self.loss = loss


def fixed():
    return Net(), torch.randn(8, 16)


def by_step():
    def batch(step):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        return {"x": x, "target": torch.zeros(8, 4)}

    return WithLoss(), batch


def half():
    return Net().half(), torch.randn(8, 16).half()


class Float32Inside(Net):
    def forward(self, x):
        return super().forward(x) + x.float() @ self.project.weight.t()


def float32_inside():
    return Float32Inside(), torch.randn(8, 16)


def transformer():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )
    ids = torch.arange(64).reshape(2, 32)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        print("a word")
        return (x * self.weight).sum()


def large():
    return Large(), torch.ones(1 << 24)


def not_when_kept():
    import sys

    if sys.argv[0].endswith("kept.py"):
        raise KeyError("only there")
    return fixed()
"""


@pytest.fixture
def peaks_of_one_byte(monkeypatch):
    """Without the processes that measure peaks."""
    monkeypatch.setattr(measure.memory, "peaks_of_steps", peaks_of_a_byte)


@pytest.fixture
def user_models(tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(USER_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("user_models", None)


def parsed(*flags):
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return parser.parse_args(flags)


def run_json(capsys, *flags):
    assert cli.main(["compare", "--json", *flags]) == 0
    output, errors = capsys.readouterr()
    assert all(line.startswith("compare: ") for line in errors.splitlines())
    return json.loads(output)


# Outcome


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
    for words in ("Where a step goes", "Sameness", "Optimizers: AdamW's step on", "other numerics"):
        assert words in printed
    flat = " ".join(printed.split())
    assert data["verdict"]["sentence"] in flat and "worst gradient error" in flat
    number = r"\d+\.\d+"
    assert re.search(rf"{number}x \[{number}-{number}\]", data["verdict"]["sentence"])
    assert re.search(r"training is (the same|DIFFERENT): ", data["verdict"]["sentence"])
    assert torch.__version__ in flat and data["machine"]["cpu"] in flat
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(header[16:20], "big") > 1000  # width


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
            if parts := variant["parts_ms"]:
                total = sum(attribution.by_part(parts).values())
                assert total == pytest.approx(variant["step_ms"]["median"])
                seconds = sum(phase["linear"] for phase in parts.values()) / 1e3
                rate = speed["linear_operations"] / seconds / 1e9
                assert variant["linear_gflops"] == pytest.approx(rate)
            else:
                assert variant["linear_gflops"] is None
            step = variant["step_ms"]
            assert len(step["rounds"]) == 2 and step["p10"] <= step["median"] <= step["p90"]
            ratio = variant["ratio_to_stock"]
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
            assert variant["saved_bytes"] > 0 and variant["peak_bytes"] == 1
            tokens = speed["items_per_batch"]
            assert variant["items_per_second"] == pytest.approx(1e3 * tokens / step["median"])
    saved = {n: v["saved_bytes"] for n, v in data["speed"][0]["variants"].items()}
    assert saved["swapped"] < saved["stock"]  # which keeps a mask of dropout
    assert list(data["first_step"]) == ["swapped", *MEDIUM]
    assert abs(data["first_step"]["swapped"]["loss_difference"]) < 1e-5
    assert data["first_step"]["swapped"]["gradient_error"] < 1e-3
    assert data["first_step"]["swapped"]["dropout"] == "on, with the same masks"
    for phase in data["sameness"]:
        assert phase["steps"][0] == 0 and phase["steps"][-1] == 4
        assert len(phase["stock_losses"]) == train.STOCK_RUNS
        assert len(phase["swapped_losses"]) == len(phase["steps"])
        if MEDIUM:
            assert len(phase["medium_losses"]) == len(phase["steps"])
            assert 0 < phase["medium_gap"] < 0.1
    assert [phase["stock_runs_differ_by"] for phase in data["sameness"]] == [
        "dropout seed",
        "summation order",
    ]
    swapped = data["swap_report"]["swapped"]
    kinds = {entry["kind"] for entry in swapped}
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
    master = "onepass bf16, master {}, bfloat16 moments".format
    assert list(compared["variants"]) == [
        "torch default", "torch fused", "onepass", "torch fused bf16",
        master("remainder16"), master("stochastic"),
    ]  # fmt: skip
    for name, variant in compared["variants"].items():
        assert list(variant) == [
            "library", "cast_to", "master", "state_dtype", "step_ms", "page_faults",
            "ratio_to_baseline", "share_of_step", "state_bytes_per_parameter",
            "bytes_per_parameter", "losses", "gap", "same",
        ]  # fmt: skip
        step = variant["step_ms"]
        assert len(step["rounds"]) == 2 and 0 < step["p10"] <= step["median"] <= step["p90"]
        ratio = variant["ratio_to_baseline"]
        assert ratio["low"] <= ratio["median"] <= ratio["high"]
        is_cast = variant["cast_to"] is not None
        assert is_cast is ("bf16" in name)
        assert (variant["share_of_step"] is None) is is_cast
        assert not is_cast or (variant["same"] is None and 0 < variant["gap"] < 0.1)
        if name not in ("torch default", "torch fused"):
            assert len(variant["losses"]) == len(compared["steps"])
        else:
            assert variant["losses"] is variant["gap"] is variant["same"] is None
    sizes = {n: v["state_bytes_per_parameter"] for n, v in compared["variants"].items()}
    assert sizes["onepass"] == pytest.approx(8, abs=0.01)
    assert sizes[master("remainder16")] == pytest.approx(6, abs=0.01)
    assert sizes[master("stochastic")] == pytest.approx(4, abs=0.01)
    ours = compared["variants"]["onepass"]
    assert ours["gap"] < 1e-5 and data["verdict"]["optimizer_same"] is ours["same"] is not None
    assert "AdamW's step: " in data["verdict"]["sentence"]


def test_command_repeats_the_run(outcome):
    data = outcome[2]
    words = shlex.split(data["command"])
    assert words[:2] == ["onepass", "compare"]
    again = settings.read_settings(parsed(*words[2:]))
    assert again.to_dict() == data["settings"]
    assert settings.Settings.from_dict(again.to_dict(), again.command) == again


# Flags


def test_json_to_stdout_is_nothing_but_json(capsys, tmp_path, peaks_of_one_byte):
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox " * 200)
    data = run_json(
        capsys, *QUICK, *ONE_LAYER, "--dropout", "0", "--text", str(text), "--dtype", "bfloat16"
    )
    assert [speed["dropout"] for speed in data["speed"]] == [0.0]
    assert data["speed"][0]["items_per_batch"] == 32
    assert data["settings"]["speed"] == {
        "layers": 1, "heads": 2, "width": 16, "block": 32, "batch": 1,
    }  # fmt: skip
    assert data["settings"]["dtype"] == "bfloat16"
    assert data["data"].startswith(str(text))
    assert data["machine"]["threads"] == 1
    assert " with dropout" not in data["verdict"]["sentence"]


def test_defaults_are_those_of_the_documentation():
    default = settings.read_settings(parsed())
    assert default.speed == settings.Sizes(6, 6, 384, 1024, 2)
    assert default.dropouts == (0.1, 0.0) and default.pairs == 8 and default.steps == 200
    assert default.dtype == torch.float32 and default.device == torch.device("cpu")
    assert default.optimizers == ("default", "fused", "onepass")
    assert default.masters == default.state_dtypes == () and not default.keep_memory
    assert default.command == "onepass compare"
    assert parsed("--plot").plot == "onepass-compare.png"


KEEPING = () if _malloc.obstacle() else ("--keep-memory",)


@pytest.mark.parametrize("function, flags", [("fixed", KEEPING), ("by_step", ())])
def test_own_model(capsys, user_models, request, function, flags):
    if not flags:
        request.getfixturevalue("peaks_of_one_byte")
    data = run_json(capsys, *QUICK, *flags, "--model", f"user_models:{function}")
    speed = data["speed"][0]
    assert data["settings"]["keep_memory"] is bool(flags)
    again = settings.read_settings(parsed(*shlex.split(data["command"])[2:]))
    assert again.to_dict() == data["settings"]
    if flags:
        found = speed["variants"]
        assert [found[name]["baseline"] for name in KEPT] == [KEPT[0]] * 2
        assert found[KEPT[0]]["saved_bytes"] == found["stock"]["saved_bytes"]
        assert found[KEPT[0]]["parts_ms"] is None and found["stock"]["parts_ms"]
        assert all(found[name]["peak_bytes"] >= 0 for name in KEPT)
    assert speed["dropout"] is None and speed["items_per_batch"] == 8
    assert speed["variants"]["swapped"]["peak_bytes"] >= 0
    phase = data["sameness"][0]
    assert phase["curve"] == "training loss" and phase["steps"][-1] == 4
    assert len(phase["swapped_losses"]) == len(phase["steps"])
    assert data["first_step"]["swapped"]["gradient_error"] < 1e-3
    kinds = [entry["kind"] for entry in data["swap_report"]["swapped"]]
    assert sorted({*kinds} - {"linear"}) == ["dropout", "norm"]  # linear: where torch is slow


def test_own_model_of_transformers_is_attached(capsys, user_models, peaks_of_one_byte):
    pytest.importorskip("transformers")
    data = run_json(capsys, *QUICK, "--model", "user_models:transformer")
    to = [entry["to"] for entry in data["swap_report"]["swapped"] if entry["kind"] == "attention"]
    assert to == ["onepass's attention, by transformers' registry"] * 2
    assert data["first_step"]["swapped"]["gradient_error"] < 1e-3
    parts = {name: v["parts_ms"] for name, v in data["speed"][0]["variants"].items()}
    for phase in ("forward", "backward"):
        for variant in ("stock", "swapped"):
            assert parts[variant][phase]["attention"] > 0


def test_own_model_in_bfloat16(capsys, user_models, peaks_of_one_byte):
    flags = ("--model", "user_models:by_step", "--optimizers", "onepass", "--master", "stochastic")
    compared = run_json(capsys, *QUICK, *flags)["optimizers"]
    assert list(compared["variants"]) == [
        "torch fused", "onepass", "torch fused bf16", "onepass bf16, master stochastic",
    ]  # fmt: skip
    assert compared["dropout"] is None and compared["steps"][-1] == 4
    assert all(v["losses"] for n, v in compared["variants"].items() if n != "torch fused")


def run_both(capsys, *flags):
    """(what is printed, the JSON) of one run."""
    assert cli.main(["compare", *QUICK, *flags, "--json", "out.json"]) == 0
    with open("out.json") as file:
        return " ".join(capsys.readouterr().out.split()), json.load(file)


def test_a_loss_of_zero_cannot_tell(capsys, user_models, peaks_of_one_byte):
    printed, data = run_both(capsys, "--model", "user_models:zero")
    assert "stock's gradients have no digits to compare" in printed
    assert "it cannot be told whether training is the same: losses differ" in printed
    assert data["verdict"]["same"] is None and data["sameness"][0]["same"] is None
    assert data["first_step"]["swapped"]["gradient_error"] is None


def test_an_optimizer_that_is_left_out_is_told(capsys, user_models, peaks_of_one_byte, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no kernels for this [device]")

    monkeypatch.setattr(onepass.optim, "AdamW", refuse)
    printed, data = run_both(capsys, "--model", "user_models:fixed")
    assert data["optimizers"]["left_out"] == {"onepass": "no kernels for this [device]"}
    assert list(data["optimizers"]["variants"]) == ["torch default", "torch fused"]
    assert data["optimizers"]["steps"] is data["verdict"]["optimizer_same"] is None
    assert "Left out: onepass: no kernels for this [device]." in printed
    assert "stock trained by" not in printed


def test_compile_adds_two_variants(capsys, user_models, peaks_of_one_byte, monkeypatch):
    # The graph is captured and differentiated, but not compiled to C++: that takes half a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    data = run_json(capsys, *QUICK, "--model", "user_models:fixed", "--compile")
    found = data["speed"][0]["variants"]
    assert list(found) == ["stock", "swapped", "compiled stock", "compiled swapped", *MEDIUM]
    assert found["compiled swapped"]["baseline"] == "compiled stock"
    assert found["compiled swapped"]["parts_ms"] is None
    assert found["compiled swapped"]["saved_bytes"] > 0


@pytest.mark.skipif(bool(_malloc.obstacle()), reason=_malloc.obstacle())
def test_kept_memory_is_kept_in_a_process_of_its_own(user_models):
    """The step takes 64 MiB, which malloc returns to the system by default; text that the model
    prints is not taken for a result."""
    read = settings.read_settings(parsed(*QUICK, "--keep-memory", "--model", "user_models:large"))
    with kept.steps(None, read) as others:
        assert list(others.saved) == list(KEPT) and min(others.saved.values()) >= 64 << 20
        found = [others.step(KEPT[0], number) for number in range(16)]
    seconds, faults = zip(*found, strict=True)
    assert min(seconds) > 0
    # Fewer than with huge pages. In a single step the system may have taken pages back.
    assert statistics.median(faults) < 32


def test_an_error_in_the_process_of_kept_memory_is_told(user_models):
    flags = ("--keep-memory", "--model", "user_models:not_when_kept")
    read = settings.read_settings(parsed(*QUICK, *flags))
    with pytest.raises(RuntimeError, match="(?s)steps with kept memory failed.*only there"):
        with kept.steps(None, read):
            pass


# Bad input


BAD_INPUT = [
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
    (["--model", "user_models:half", "--master", "remainder16"],
     "onepass, master remainder16 cannot train this model: AdamW: params must be bfloat16"),
    (["--model", "user_models:float32_inside", "--master", "fp32"],
     "--master trains the model with bfloat16 parameters, and its forward fails: "),
    (["--json", "no-such-folder/out.json"], "--json must name a file to write: No such file"),
    (["--plot", "no-such-folder/out.png"], "--plot must name a file to write: No such file"),
    (["--plot", "out.docx"], "--plot must end in one of "),
    (["--json", "/dev/full"], "--json must name a file to write: No space left"),
    (["--plot", "/dev/full"], "--plot must name a file to write: No space left"),
    (["--model", "user_models"], "--model must be package.module:function"),
    (["--model", "user_models:fixed", "--layers", "2"], "--model brings its own sizes"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(capsys, user_models, flags, message):
    with open("short.txt", "wb") as file:
        file.write(b"short")
    assert cli.main(["compare", "--quick", *flags]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1 and errors.startswith("compare: ")
    assert message in errors


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
def test_what_this_machine_lacks_is_one_line(
    capsys, one_device, monkeypatch, flags, changed, message
):
    if changed:
        monkeypatch.setattr(*changed)
    assert cli.main(["compare", *flags]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_cuda_settings(one_device):
    read = settings.read_settings(parsed("--device", "cuda"))
    assert read.device == torch.device("cuda") and read.dtype == torch.bfloat16
    settings.make_current(read.device)
    settings.make_current(torch.device("cpu"))
    assert one_device == []  # torch's own choice stays
    settings.make_current(settings.read_settings(parsed("--device", "cuda:0")).device)
    assert one_device == ["cuda:0"]


def test_missing_tools_are_asked_for_by_name(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["compare", "--quick"]) == 2
    assert capsys.readouterr().err == "compare: rich is missing: pip install 'onepass[tools]'\n"
