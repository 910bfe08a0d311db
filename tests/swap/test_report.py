"""The report of a swap: tables, notes, a line for a log, data and HTML; the line of `unswap`."""

import copy
import json
import pickle
import re

import pytest
import torch
from torch import nn

import onepass
from onepass._policy import device_attention, small_calls
from onepass.swapping import notes
from onepass.swapping.texts import first_clause
from tests.swap.foreign_norms import RMS
from tests.swap.test_swap import Model

pytestmark = pytest.mark.usefixtures("probed_once")


def test_report_is_not_a_model():
    hint = re.escape("swap changes the model in place; drop the assignment")
    model = onepass.swap(Model())
    with pytest.raises(TypeError, match=hint):
        model(torch.randn(2, 16))
    for attribute in ("parameters", "train", "eval", "state_dict", "to", "forward", "layers"):
        with pytest.raises(AttributeError, match=hint):
            getattr(model, attribute)


def test_report_prints_as_an_aligned_table(monkeypatch, torchs_products):
    monkeypatch.setenv("COLUMNS", "100")
    report = onepass.swap(nn.ModuleDict({"model": Model(3), "bn": nn.BatchNorm1d(4)}))
    lines = str(report).splitlines()
    assert lines[0] == "onepass.swap: swapped 13, 1 skipped, 0 unknown"
    rows = [line for line in lines if "layers.*" in line]
    assert len(rows) == 4 and "model.layers.*.norm3" in rows[2]
    assert all(" 3  norm " in row or " 3  dropout " in row for row in rows)  # of three layers
    assert any("BatchNorm1d" in line and "statistics" in line for line in lines)
    assert "notes (print(report.details()) has all of them)" in lines

    monkeypatch.setenv("COLUMNS", "64")  # the last column is on lines of its own
    narrow = str(report).splitlines()
    assert max(map(len, narrow)) <= 64 and "onepass.nn.LayerNorm" in map(str.strip, narrow)
    narrow = report.details().splitlines()
    monkeypatch.setenv("COLUMNS", "100")
    assert sorted(" ".join(narrow).split()) == sorted(report.details().split())


def test_report_as_a_line_for_a_log():
    norms = [nn.LayerNorm(4) for _ in range(3)]
    model = nn.Sequential(*norms, nn.Dropout(), nn.Dropout2d())
    report = onepass.swap(model, kinds=["norm", "dropout"], exclude=["1", "2"], dry_run=True)
    assert report.summary() == (
        "onepass.swap: would swap 2 (dropout 1, norm 1), skipped 2 (1: excluded by '1'; 2: "
        "excluded by '2'), unknown 1 (4: no rule for this kind of dropout)"
    )
    assert onepass.swap(nn.ReLU()).summary() == "onepass.swap: swapped 0"


def test_report_as_data_and_html():
    report = onepass.swap(nn.ModuleDict({"<b>": nn.LayerNorm(4), "bn": nn.BatchNorm1d(4)}))
    data = json.loads(json.dumps(report.to_dict()))
    modules = "torch.nn.modules"
    made = {"from": f"{modules}.normalization.LayerNorm", "to": "onepass.nn.LayerNorm"}
    assert data["swapped"] == [{"name": "<b>", "kind": "norm", **made}]
    assert data["skipped"][0]["type"] == f"{modules}.batchnorm.BatchNorm1d"
    assert set(data["skipped"][0]) == {"name", "type", "reason"} and data["unknown"] == []
    markup = report._repr_html_()
    assert "&lt;b&gt;" in markup and '<td style="text-align: left">BatchNorm1d</td>' in markup
    twin = copy.deepcopy(report)
    assert str(twin) == str(report) == str(pickle.loads(pickle.dumps(report)))


def test_notes_tell_what_changes_beyond_speed():
    assert not onepass.swap(nn.RMSNorm(4)).notes
    (note,) = onepass.swap(nn.Dropout(0.1)).notes
    assert "reproducible from manual_seed" in note and "unseeded shuffle" in note
    (note,) = onepass.swap(RMS(4)).notes
    assert "numeric probe" in note


def test_at_most_five_lines_of_notes_are_printed(monkeypatch):
    found = onepass.swap(nn.LayerNorm(4))
    found.notes = [f"point {number}; details" for number in range(7)]
    shown = str(found).splitlines()
    assert shown[-6] == "notes (print(report.details()) has all of them)"
    assert shown[-5:] == [f"  - point {number}" for number in range(5)]
    for text in (found.details(), found._repr_html_()):
        assert all(note in text for note in found.notes)
    found.notes = ["a point"]
    assert str(found).endswith("\nnotes\n  - a point") and str(found) == found.details()
    monkeypatch.setenv("COLUMNS", "60")
    found.notes = [" ".join(["long"] * 100)] * 3
    lines = str(found).splitlines()
    assert lines[-6].startswith("notes")
    assert lines[-1].endswith("...") and max(map(len, lines)) <= 60


def test_the_point_of_a_note_fits_into_a_line():
    texts = [
        text
        for module in (notes, small_calls, device_attention)
        for name, text in vars(module).items()
        if isinstance(text, str) and name.rpartition("_")[0] and name.isupper()
        if name not in ("ATTENTION_NOTE", "LINEAR_CALLS_NOTE", "LOSS_CALLS_NOTE")  # parts of others
    ]
    assert len(texts) > 15
    for text in texts:
        assert len(first_clause(text)) <= 96, text


def test_what_the_user_must_do_comes_before_what_is_good_to_know():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2, dropout=0.1), "norm": nn.LayerNorm(8)})
    found = onepass.swap(model, exclude="b").notes
    words = ("matches no module", "need_weights", "manual_seed", "layer norm")
    assert [word in note for word, note in zip(words, found, strict=False)] == [True] * 4


def test_unswap_prints_as_one_line():
    model, norm = Model(3), nn.LayerNorm(4)
    onepass.swap(model, kinds=("norm", "dropout"))
    restored = onepass.unswap(model)
    names = "layers.*.norm1, layers.*.norm2, layers.*.norm3 and 2 more"
    assert str(restored) == repr(restored) == f"onepass.unswap: restored 13 modules: {names}"
    assert restored == list(restored) and len(restored) == 13
    assert str(onepass.unswap(model)) == "onepass.unswap: nothing was swapped"
    onepass.swap(norm)
    assert str(onepass.unswap(norm)) == "onepass.unswap: restored 1 module: (root)"
