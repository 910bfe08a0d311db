"""`explain` and the dispatch log: they print the plans that ran."""

import json
import os

import pytest
import torch

import onepass
from onepass import _C, _dispatch_log, cli, functional
from tests.support import fresh
from tests.support.calls import CALLS, FUNCTIONS


def calls_of(function, *args) -> list[dict]:
    return onepass.explain(function, *args).calls


# What is told of the arguments, by function.
ARGUMENTS = {
    "add_layer_norm of a scaled branch": "dropout 0.3, column_scale float32, row_scale",
    "modulated_layer_norm of a gated sum": "a scale for 3 rows, gate float32",
    "group_norm": "2 x 8 x 30, 2 groups, channels first, input float32, weight float32, silu",
    "gated_activation of halves": "relu of 6 x 20, halves of one tensor, gate float32",
    "gelu_mul": "gelu_tanh of 6 x 40, contiguous, gate float32, up float32",
    "cross_entropy": "6 x 40, float32, mean, weights, label_smoothing 0.1",
    "linear with options": "6 x 40 by 40 x 24, float32 by float32, output float32, relu, dropout",
    "rotary_embedding in place": "6 columns in distant pairs, float32, cos float32, in place",
}


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n in CALLS and not CALLS[n].composed])
def test_every_function_is_explained(name):
    call = CALLS[name]
    found = calls_of(lambda: call.run(**call.tensors()))
    assert found and all(record["count"] == 1 for record in found)
    for record in found:
        assert record["level"] == _C.cpu_level() and record["kernel"].endswith("_kernel")
        assert record["op"] in text_of(name) and record["reason"]
        assert ARGUMENTS.get(name.removeprefix("functional."), "") in record["arguments"]


def text_of(name: str) -> str:
    """The names of operators that a function may run."""
    family = {"silu_mul": "gated_activation", "gelu_mul": "gated_activation"}
    family |= {"linear_cross_entropy": "linear cross_entropy", "varlen_attention": "attention"}
    family |= {"attention_with_kv_cache": "attention_decode attention_decode_append"}
    family |= {"scaled_dot_product_attention": "attention", "chunk_kda": "delta_rule"}
    family |= dict.fromkeys(
        ("fused_recurrent_gated_delta_rule", "fused_recurrent_kda"), "delta_rule_update"
    )
    function = name.split(" ")[0].removeprefix("functional.")
    return family.get(function, function)


def test_a_function_gets_a_batch_as_it_is():
    """Modules: tests/compare/test_user_model.py."""
    (call,) = calls_of(lambda batch: functional.layer_norm(batch["x"], 16), {"x": torch.ones(16)})
    assert call["op"] == "layer_norm"


def test_the_plan_follows_shape_and_threads():
    def norm(rows, cols):
        (call,) = calls_of(functional.rms_norm, torch.randn(rows, cols), cols)
        return call

    torch.set_num_threads(2)
    large, small, single = norm(600, 4096), norm(4, 8), norm(1, 100_000)
    assert large["threads"] == 2 and large["rows_per_tile"] == 4
    assert small["threads"] == 1 and "too small" in small["reason"]
    assert single["threads"] == 1 and "one row" in single["reason"]
    assert norm(600, 512)["rows_per_tile"] == 1
    torch.set_num_threads(1)
    assert norm(600, 512)["threads"] == 1


def test_backward_and_counts():
    x = torch.randn(5, 16, requires_grad=True)

    def step():
        for _ in range(3):
            functional.layer_norm(x, 16).sum().backward()

    explanation = onepass.explain(step)
    assert [(c["op"], c["count"]) for c in explanation.calls] == [
        ("layer_norm", 3),
        ("layer_norm_backward", 3),
    ]
    text = str(explanation)
    assert "3 x layer_norm_backward" in text and f"CPU level {_C.cpu_level()}" in text
    assert "layer_norm_backward" in explanation._repr_html_()
    assert json.loads(json.dumps(explanation.to_dict())) == explanation.to_dict()


def test_stock_modules_are_named(torchs_products):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    before = onepass.explain(model, torch.randn(2, 8))
    assert before.calls == []
    assert [entry["name"] for entry in before.not_accelerated] == ["1"]
    assert "no onepass operator ran" in str(before) and "not swapped" in str(before)
    onepass.swap(model)
    after = onepass.explain(model, torch.randn(2, 8))
    assert [call["op"] for call in after.calls] == ["layer_norm"]
    assert after.not_accelerated == []


def test_modules_of_equal_layers_share_a_line_that_a_terminal_folds(monkeypatch):
    layers = [torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)) for _ in range(12)]
    explanation = onepass.explain(torch.nn.Sequential(*layers), torch.randn(2, 8))
    assert len(explanation.not_accelerated) == 24
    stock = [line for line in str(explanation).splitlines() if line.startswith("stock")]
    assert len(stock) == 2 and stock[0].startswith("stock: *.0 (12 x LayerNorm): ")
    assert "white-space: pre-wrap" in explanation._repr_html_()
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, str(explanation).splitlines())) <= 40


def test_nothing_is_recorded_outside():
    functional.rms_norm(torch.randn(2, 8), 8)
    with _dispatch_log.record() as records:
        pass
    assert records == []


def test_a_lower_level_says_who_asked_for_it():
    code = (
        "import torch, onepass;"
        "print(onepass.explain(onepass.functional.rms_norm, torch.ones(2, 8), 8))"
    )
    result = fresh.run(code, env=os.environ | {"ONEPASS_CPU_ISA": "baseline"}, check=True)
    assert "baseline" in result.stdout
    if len(_C.cpu_levels()) > 1:
        assert "ONEPASS_CPU_ISA asks for it" in result.stdout


def test_blocks_inside_each_other_see_the_same_calls():
    x = torch.randn(4, 16)
    with _dispatch_log.record() as outer:
        functional.rms_norm(x, 16)
        with _dispatch_log.record() as inner:
            functional.layer_norm(x, 16)
            assert _dispatch_log.is_recording()
        functional.rms_norm(x, 16)
    assert [call["op"] for call in inner] == ["layer_norm"]
    assert [call["op"] for call in outer] == ["rms_norm", "layer_norm", "rms_norm"]
    assert not _dispatch_log.is_recording()


def test_calls_are_explained_while_they_are_logged():
    code = (
        "import torch, onepass; "
        "print(onepass.explain(onepass.nn.RMSNorm(8), torch.ones(2, 8)).calls[0]['op'])"
    )
    done = fresh.run(code, env={**os.environ, "ONEPASS_LOG": "dispatch"}, check=True)
    assert done.stdout == "rms_norm\n" and done.stderr.startswith("onepass: rms_norm (2 x 8")


def test_dispatch_log_writes_each_line_once():
    code = (
        "import torch, onepass\n"
        "x = torch.ones(2, 8, requires_grad=True)\n"
        "for _ in range(3): onepass.functional.rms_norm(x, 8).sum().backward()\n"
    )
    result = fresh.run(code, env={**os.environ, "ONEPASS_LOG": "dispatch"}, check=True)
    lines = [line for line in result.stderr.splitlines() if line.startswith("onepass: ")]
    assert len(lines) == 2
    assert "rms_norm (2 x 8" in lines[0] and "rms_norm_backward" in lines[1]


@pytest.mark.parametrize("value", ["garbage", "dispatch,garbage", "1"])
def test_other_logs_are_refused(value):
    result = fresh.run("import onepass", env={**os.environ, "ONEPASS_LOG": value})
    wrong = value.rpartition(",")[2]
    message = f"ValueError: ONEPASS_LOG must be 'dispatch' or empty, got '{wrong}'"
    assert result.returncode != 0 and message in result.stderr


def test_command(capsys, tmp_path, monkeypatch):
    (tmp_path / "somebodys_model.py").write_text(
        "import torch\ndef make():\n    return torch.nn.LayerNorm(8), torch.randn(2, 8)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["explain", "--model", "somebodys_model:make", "--as-it-is"]) == 0
    assert "not swapped" in capsys.readouterr().out
    assert cli.main(["explain", "--model", "somebodys_model:make", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calls"][0]["op"] == "layer_norm"
