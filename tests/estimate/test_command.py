"""`onepass estimate` as a command: tables, JSON, picture, flags, bad input, the largest batch."""

import argparse
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import onepass
from onepass.tools.errors import BadInput
from onepass.tools.estimate import command, configs
from onepass.tools.estimate.survey import largest
from tests.compare.cases import refusal, run_here, run_json

pytestmark = pytest.mark.xdist_group("estimate")  # most tests read one run

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 172, "num_attention_heads": 2, "num_hidden_layers": 1,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """(output at 80 columns, the JSON, the picture's file)"""
    folder = tmp_path_factory.mktemp("estimate")
    flags = ["--memory", "64MB", "--json", f"{folder}/e.json", "--plot", f"{folder}/e.svg"]
    printed, _ = run_here("estimate", "--config", str(config), *flags)
    return printed, json.loads((folder / "e.json").read_text()), folder / "e.svg"


def make():
    """For --model."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    return model, torch.randn(16, 32)


def make_reading():
    class Reading(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() < 1e9 and self.weight.sum() < 1e9 else x

    return Reading(8, 8), torch.randn(4, 8)


class Nested(nn.Module):
    """A norm after the inner module, which has a long name."""

    LONG = "layers_of_a_model_whose_authors_like_to_name_things_in_full"

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.add_module(self.LONG, inner)

    def forward(self, x):
        return self.norm(getattr(self, self.LONG)(x))


def make_nested():
    return Nested(Nested(Nested(nn.Linear(32, 32)))), torch.randn(16, 32)


MODEL = ["--model", f"{__name__}:make"]


def test_the_tables_fit_into_80_columns_and_nothing_is_cut(run):
    printed, found, picture = run
    assert max(map(len, printed.splitlines())) <= command.WIDTH
    assert "…" not in printed and f"{found['parameter_count']:,} parameters" in printed
    assert "model.layers.*.mlp" in printed and "AdamW, int8 moments" in printed
    assert "<svg" in picture.read_text()[:1000]


def test_the_json_says_what_the_tables_say(run):
    _, found, _ = run
    assert found["schema_version"] == 1 and found["rows"] == 1
    assert found["command"].startswith("onepass estimate --config")
    assert found["command"].endswith("e.svg") and " --memory 64MB --json " in found["command"]
    assert list(found["variants"]) == [
        "stock", "swapped", "stock, checkpointed", "swapped, checkpointed",
    ]  # fmt: skip
    for variant, entry in found["variants"].items():
        assert entry["peak"] == max(entry["peaks"].values()) == sum(entry["at_peak"].values())
        assert entry["parameters"] == 4 * found["parameter_count"] == entry["gradients"]
        assert entry["peak"] == found["optimizers"]["torch AdamW"]["peaks"][variant]
        assert bool(entry["swapped"]) == variant.startswith("swapped")
    assert found["dtypes"]["float32"]["stock"] == found["variants"]["stock"]["peak"]
    assert found["dtypes"]["bfloat16"]["stock"] < 0.7 * found["dtypes"]["float32"]["stock"]
    assert found["optimizers"]["AdamW"]["bytes_per_parameter"] == pytest.approx(8, rel=0.02)
    levers = {lever["name"]: lever for lever in found["levers"]}
    assert {"swap, norm", "swap", "checkpointing", "all of these"} <= set(levers)
    assert levers["swap"]["peak"] == found["variants"]["swapped"]["peak"]
    assert "swap, without logits" not in levers  # too few of them: they are made
    assert levers["all of these"]["peak"] == min(lever["peak"] for lever in found["levers"])
    assert levers["swap"]["rows"] == found["variants"]["swapped"]["largest_batch"]


def test_logits_that_nobody_reads_are_a_lever(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "vocab_size": 20_000, "max_position_embeddings": 512}))
    found = run_json("estimate", "--config", str(path), "--kinds", "loss")
    levers = {lever["name"]: lever["peak"] for lever in found["levers"]}
    logits = 512 * 20_000 * 4
    without = levers["swap, without logits"]
    assert levers["swap, loss in place"] - without > 0.49 * logits  # there are two chunks of them
    assert levers["all of these"] == min(levers.values())
    make = configs.maker(str(path), 1, None)
    assert without == onepass.estimate(make, swap=True, kinds="loss", lazy_logits=True).peak


def test_the_largest_batch_fits_and_one_more_does_not(run, config):
    most = run[1]["variants"]["stock"]["largest_batch"]
    assert most > 1
    fits, more = (
        onepass.estimate(configs.maker(str(config), rows, None)).peak for rows in (most, most + 1)
    )
    assert fits <= 64_000_000 < more


def test_words_of_the_picture_lie_in_it_and_apart():
    pytest.importorskip("matplotlib", reason="draws the picture")
    from onepass.tools.estimate import plot
    from tests.support import pictures

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--model", f"{__name__}:make_nested", "--memory", "1GB"])
    line = " ".join(["onepass estimate", *args.model.split(":") * 20])
    survey = dataclasses.replace(command._survey(args, command._settings(args)), command=line)
    figure = pictures.drawn(lambda: plot._figure(survey))
    pictures.assert_words_lie_apart(figure)
    names = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert any(name.startswith("...") for name in names)
    assert {axes.get_xlabel().split()[0] for axes in figure.axes} <= {"KiB", "MiB"}


def test_a_model_that_a_function_makes_in_another_dtype():
    flags = [*MODEL, "--dtype", "bfloat16", "--optimizer", "AdamW, remainder16", "--batch", "64"]
    found = run_json("estimate", *flags, "--kinds", "norm")
    assert found["rows"] == 64
    assert found["variants"]["swapped"]["swapped"] == {"norm": 1}
    # Two float32 moments and 16 bits.
    per_parameter = found["optimizers"]["AdamW, remainder16"]["bytes_per_parameter"]
    assert per_parameter == pytest.approx(10, rel=0.5)
    assert "stock, checkpointed" in found["left_out"]


def test_a_model_that_reads_is_refused_and_runs_with_real_data():
    flags = ["--model", f"{__name__}:make_reading"]
    told = refusal("estimate", *flags)
    assert told.startswith("estimate: --model must not read data") and "--real" in told
    found = run_json("estimate", *flags, "--real")
    assert found["variants"]["stock"]["parameters"] == 72 * 4


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "one of --model and --config must be given"),
        (["--config", "nowhere.json"], "--config must be a file or a folder with a config.json"),
        ([*MODEL, "--seq", "8"], "--seq must come with --config"),
        ([*MODEL, "--batch", "0"], "--batch must be at least 1, got 0"),
        ([*MODEL, "--memory", "much"], "--memory must be a size such as 24GB or 22.5GiB"),
        ([*MODEL, "--dtype", "int8"], "--dtype must be one of as given, float32, bfloat16"),
        ([*MODEL, "--kinds", "norms"], "--kinds must be of norm, attention"),
        ([*MODEL, "--optimizer", "Adam"], "--optimizer must be one of torch AdamW, "),
        ([*MODEL, "--json", "/nowhere/e.json"], "--json must name a file to write"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, message):
    assert message in refusal("estimate", *flags)


def test_sizes():
    sizes = {"24GB": 24e9, "22.5GiB": 22.5 * 2**30, "512 MiB": 2**29, "1e3": 1000, "1TB": 1e12}
    assert {text: command.size(text) for text in sizes} == sizes
    for text in ("80g", "0", "-1GB", "nanGB"):
        with pytest.raises(BadInput, match="--memory must be a size"):
            command.size(text)


# ---- the largest batch -------------------------------------------------------------------------


def bent(rows: int) -> int:
    """Three phases: the optimizer's step, which does not depend on rows, and two that grow."""
    return max(1100, 1000 + 10 * rows, 30 * rows)


@pytest.mark.parametrize("memory", [0, 1099, 1100, 1109, 1110, 1499, 1500, 1530, 30_000, 1_000_000])
@pytest.mark.parametrize("rows", [1, 2, 7, 300])
def test_the_largest_batch_of_a_peak_that_bends(rows, memory):
    asked = []

    def peak(rows: int) -> int:
        asked.append(rows)
        return bent(rows)

    expected = max((n for n in range(1, 40_000) if bent(n) <= memory), default=0)
    assert largest(peak, rows, memory) == expected
    assert len(asked) == len(set(asked)) <= 20


# ---- configs -----------------------------------------------------------------------------------


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {"model_type": "bert", "intermediate_size": 64, **SIZES}
CLASSES = {  # whose models have a loss, but for the last
    "BertForSequenceClassification": BERT,
    "BertForTokenClassification": BERT,
    "BertForQuestionAnswering": BERT,
    "ViTForImageClassification": {**BERT, "model_type": "vit", "image_size": 32},
    "T5ForConditionalGeneration": {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64,
                                   "num_heads": 2, "num_layers": 1, "decoder_start_token_id": 0},
    None: {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2},
    "BertModel": BERT,
}  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES)
def test_configs_of_other_classes_train(cls, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path / "config.json"
    entry = {**CLASSES[cls], "vocab_size": 100, "architectures": [cls] if cls else None}
    path.write_text(json.dumps(entry))
    model, batch = configs.maker(str(path), 2, 16)()
    has_loss = getattr(model(**batch), "loss", None) is not None
    assert has_loss == (cls != "BertModel")


@pytest.mark.slow
def test_a_7b_config_needs_no_memory_to_speak_of_and_little_time(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
        "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **sizes, "max_position_embeddings": 4096}))
    code = (
        "import resource, sys; from onepass import cli; "
        f"code = cli.main(['estimate', '--config', {str(path)!r}, '--json']); "
        "used = resource.getrusage(resource.RUSAGE_SELF); "
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["parameter_count"] == 6_738_415_616
    seconds, most = map(float, done.stderr.split()[-2:])
    assert most * 1024 < 2e9
    # 11 on a quiet Xeon; 22 without the cache of `onepass.tools.estimate.fakes`.
    assert seconds < 20, f"{seconds:.1f} CPU seconds"


class ByHand(nn.Module):
    """Attention as many write it, in a layer that has a norm for the swap too."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.drop(torch.softmax(q @ k.mT / 4.0, dim=-1)) @ v


def by_hand():
    return ByHand(), torch.randn(2, 256, 16)


def test_attention_by_hand_without_data_is_counted_as_written_and_that_is_said():
    without, real = (
        onepass.estimate(*by_hand(), swap=True, real=is_real) for is_real in (False, True)
    )
    assert real.activations < without.activations
    note = "attention by hand is counted as it is written, not as one call of attention"
    assert without.note == f"{note}: real=True counts the call"
    assert str(without).endswith(without.note) and not real.note and "call" not in str(real)
    assert not onepass.estimate(*by_hand()).note and not onepass.estimate(*make(), swap=True).note
    for flags in ((), ("--real",)):
        printed, _ = run_here("estimate", "--model", f"{__name__}:by_hand", *flags)
        assert (f"{note}: --real counts the call." in " ".join(printed.split())) is (not flags)
