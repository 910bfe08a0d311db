"""`onepass profile-swap --generate`: each kind alone in calls of inference."""

import json

import pytest
import torch
from torch import nn

from onepass import cli
from onepass.swapping import classes
from onepass.tools.compare import inference, memory
from onepass.tools.harness import HostClock
from onepass.tools.profile_swap import measure
from tests.compare.test_generation import Writer, prompts

HERE = "tests.compare.test_profile_inference"
QUICK = ("--quick", "--threads", "1", "--pairs", "3")


def writer():
    return Writer(), prompts()


class Layers(nn.Sequential):
    def forward(self, x):
        clock.count += 1.0
        return super().forward(x)


def layers():
    return Layers(nn.LayerNorm(8), nn.Dropout(0.5)), torch.randn(4, 8)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2)

    def forward(self, x):
        clock.count += 1.0
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=False)[0]


def attends():
    return Attends(), torch.randn(4, 2, 8)


class Clock(HostClock):
    """Its time is what models count."""

    count = 0.0

    def seconds(self, function, calls: int) -> float:
        start = self.count
        for _ in range(calls):
            function()
        return self.count - start


clock = Clock()


@pytest.fixture
def slower_norm(monkeypatch):
    """A stock token takes a second, one with a swapped norm half a second more, one with swapped
    attention less."""

    def takes(cls, seconds):
        forward = cls.forward

        def counted(self, *args, **options):
            clock.count += seconds
            return forward(self, *args, **options)

        monkeypatch.setattr(cls, "forward", counted)

    takes(Writer, 1.0)
    takes(classes.LayerNormForward, 0.5)
    takes(classes.MultiheadAttentionForward, -0.2)
    monkeypatch.setattr(inference, "clock_of", lambda device: clock)
    monkeypatch.setattr(memory, "peaks_of_steps", lambda names, **_: dict.fromkeys(names, 1))


def run(capsys, *flags) -> str:
    assert cli.main(["profile-swap", *QUICK, *flags]) == 0
    return capsys.readouterr().out


def test_decoding(capsys, slower_norm):
    flags = ("--generate", "5", "--model", f"{HERE}:writer", "--kinds", "norm", "dropout", "loss")
    found = json.loads(run(capsys, *flags, "--json"))
    assert found["settings"]["generate"] == 5 and found["parameters"] == 16 * 8 + 2 * 8
    (profile,) = found["profiles"]
    assert profile["dropout"] is None and profile["items_per_batch"] == 12
    assert profile["absent"] == {"dropout": measure.IDLE, "loss": measure.IDLE}
    stock, norm = (profile["variants"][name] for name in ("stock", "swapped: norm"))
    assert stock["step_ms"]["median"] == 5e3 and norm["step_ms"]["median"] == 7.5e3
    assert {phase: times["ms"] for phase, times in stock["phases"].items()} == {
        "prefill": 1e3, "decode": 4e3,
    }  # fmt: skip
    assert norm["phases"]["decode"]["times_stock"]["median"] == pytest.approx(1 / 1.5)
    assert norm["modules"] == 1
    assert norm["pays"] is False and norm["saved_bytes"] is None
    assert profile["advice"]["call"] is None
    assert profile["advice"]["sentence"].startswith("Do not swap this model: it would be 0.667x")
    out = run(capsys, *flags)
    assert "Each kind alone, prefill and decoding of 5 tokens; bought" in out
    assert "prefill  decode" in out and "AdamW" not in out


def test_what_pays_is_advised(capsys, slower_norm):
    flags = ("--generate", "5", "--model", f"{HERE}:attends", "--kinds", "norm", "attention")
    out = run(capsys, *flags)
    assert "onepass.swap(model, kinds=('attention',))" in out
    told = "Leave out norm: the swap without is 1.625x [1.625-1.625] as fast as all, and 1.250x"
    assert told in " ".join(out.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--generate must come with --model, got none"),
        (("--model", f"{HERE}:layers", "--kinds", "dropout"), "(dropout: does nothing in these"),
    ],
)
def test_bad_input_is_one_line(capsys, flags, message):
    assert cli.main(["profile-swap", *QUICK, "--generate", "5", *flags]) == 2
    assert message in capsys.readouterr().err
