"""`onepass doctor` on a sound installation, and its verdict on a wrong operator."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from onepass import _C, cli, doctor, functional

OPERATORS = ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "dropout", "add_dropout"]


def test_everything_in_order(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "everything is in order" in text and "FAIL" not in text
    for operator in OPERATORS:
        assert f"ok   self-test {operator}" in text


def test_json_names_levels_and_switches(capsys, monkeypatch):
    monkeypatch.setenv("ONEPASS_LOG", "nothing")
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    lines = {line["name"]: line["value"] for line in report["lines"]}
    assert lines["CPU level in use"].startswith(_C.cpu_level())
    assert lines["ONEPASS_LOG"].startswith("nothing")
    assert lines["torch"].startswith(torch.__version__)
    for switch in doctor.SWITCHES:
        assert switch in lines


def test_every_operator_has_a_self_test():
    tested = {line.name.removeprefix("self-test ") for line in doctor._self_tests()}
    assert tested == set(functional.__all__) == set(OPERATORS)


def test_a_wrong_operator_fails_with_a_fix(capsys, monkeypatch):
    right = functional.rms_norm
    monkeypatch.setattr(
        functional, "rms_norm", lambda *args, **kwargs: right(*args, **kwargs) * 1.0001
    )
    assert doctor.main(argparse.Namespace(json=False)) == 1
    text = capsys.readouterr().out
    assert "FAIL self-test rms_norm" in text and "fix: " in text and "1 failed" in text


def test_random_state_is_left_alone():
    before = torch.get_rng_state()
    list(doctor.findings())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_bad_command_lines_exit_with_2(argv):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
