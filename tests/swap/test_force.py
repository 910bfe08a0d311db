"""`swap(force=...)`: modules that the user vouches for."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import onepass
from tests.swap.foreign_norms import RMS
from tests.swap.reported import names


class Counting(RMS):
    """Keeps state, which no probe accepts."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Doubled(RMS):
    def forward(self, x):
        return 2.0 * super().forward(x)


class NoisyDropout(nn.Dropout):
    pass


class OwnHeads(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OwnBlock(nn.TransformerEncoderLayer):
    def _sa_block(self, *args, **kwargs):
        return super()._sa_block(*args, **kwargs)


def test_a_norm_that_the_probe_refuses(torchs_products):
    model = nn.Sequential(nn.Linear(16, 16), Counting(16), nn.Linear(16, 4))
    assert names(onepass.swap(model).skipped) == {"1"}
    report = onepass.swap(model, force="1", strict=True)
    (entry,) = report.swapped
    assert entry["name"] == "1" and entry["to"] == "onepass rms_norm, forced"
    (note,) = (note for note in report.notes if note.startswith("1: forced"))
    assert "report.verify(batch)" in note
    x = torch.randn(5, 16)
    assert report.verify(x).ok
    with onepass._dispatch_log.record() as calls:
        model(x)
    assert [call["op"] for call in calls] == ["rms_norm"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x)) and type(twin[1])._onepass_spec.forced
    assert onepass.unswap(model) == ["1"]


def test_verify_finds_what_was_forced_wrongly(torchs_products):
    model = nn.Sequential(nn.Linear(16, 16), Doubled(16), nn.Linear(16, 4))
    report = onepass.swap(model, force="*")
    assert names(report.swapped) == {"1"}
    assert not report.verify(torch.randn(5, 16)).ok


def test_what_the_probe_accepts_is_not_called_forced():
    model = nn.Sequential(RMS(16))
    report = onepass.swap(model, force="*")
    assert report.swapped[0]["to"] == "onepass rms_norm"
    assert not any(": forced" in note for note in report.notes)


def test_without_a_probe_it_is_forced():
    model = nn.Sequential(RMS(16), RMS(16))
    report = onepass.swap(model, force="0", probe=False)
    assert names(report.swapped) == {"0"} and "forced" in report.swapped[0]["to"]
    assert report.verify(torch.randn(3, 16)).ok


@pytest.mark.parametrize(
    ("module", "listed", "to"),
    [
        (lambda: NoisyDropout(0.1), "skipped", "onepass.nn.Dropout"),
        (lambda: OwnHeads(8, 2), "unknown", "onepass.nn.MultiheadAttention"),
        (lambda: OwnBlock(8, 2, 8), "skipped", "onepass.nn.TransformerEncoderLayer"),
    ],
)
def test_subclasses_of_torchs(module, listed, to):
    model = nn.ModuleDict({"it": module()})
    before = type(model["it"])
    assert "it" in names(getattr(onepass.swap(model), listed))
    report = onepass.swap(model, force="it")
    assert {e["name"]: e["to"] for e in report.swapped}["it"] == to
    assert any(note.startswith("it: forced") for note in report.notes)
    assert isinstance(model["it"], before)
    onepass.unswap(model)
    assert type(model["it"]) is before


def test_force_cannot_do_everything():
    frozen = NoisyDropout(0.1)
    frozen.forward = frozen.forward
    model = nn.ModuleDict({"batch": nn.BatchNorm1d(4), "frozen": frozen, "drop": nn.Dropout2d()})
    report = onepass.swap(model, force="*")
    reasons = {entry["name"]: entry["reason"] for entry in report.skipped}
    assert set(reasons) == {"batch", "frozen"} and names(report.unknown) == {"drop"}
    assert all(reason.endswith("; force does not change that") for reason in reasons.values())
    assert reasons["frozen"].startswith("its forward is replaced on the instance")
    assert not any(": forced" in note for note in report.notes)
    with pytest.raises(RuntimeError, match="force does not change that"):
        onepass.swap(model, force="*", strict=True)


def test_exclude_wins_and_globs_without_a_match_are_noted():
    model = nn.ModuleDict({"it": NoisyDropout(0.1)})
    report = onepass.swap(model, force=["it", "that"], exclude="it")
    assert report.skipped[0]["reason"] == "excluded by 'it'" and not report.swapped
    assert "force pattern 'that' matches no module" in report.notes
    with pytest.raises(TypeError, match="force must hold globs, got 3"):
        onepass.swap(model, force=[3])
