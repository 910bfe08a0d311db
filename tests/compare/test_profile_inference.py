"""`onepass profile-swap --generate`: each kind alone in calls of inference."""

import pytest
import torch
from torch import nn

from onepass.swapping import classes
from onepass.tools.compare import inference
from onepass.tools.harness import HostClock
from onepass.tools.profile_swap import measure
from tests.compare.cases import refusal, run_here, run_json
from tests.compare.test_generation import Writer, prompts


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


def flags_of(model: str, *kinds: str) -> tuple[str, ...]:
    flags = "--quick", "--threads", "1", "--pairs", "3", "--generate", "5"
    return *flags, "--model", f"{__name__}:{model}", "--kinds", *kinds


def test_decoding(slower_norm):
    flags = flags_of("writer", "norm", "dropout", "loss")
    found = run_json("profile-swap", *flags)
    assert found["settings"]["generate"] == 5 and found["parameters"] == 16 * 8 + 2 * 8
    (profile,) = found["profiles"]
    assert profile["dropout"] is None and profile["items_per_batch"] == 12
    assert profile["absent"] == {"dropout": measure.IDLE, "loss": measure.IDLE}
    stock, norm = (profile["variants"][name] for name in ("stock", "swapped: norm"))
    assert stock["step_ms"]["median"] == 5e3 and norm["step_ms"]["median"] == 7.5e3
    times = {phase: times["ms"] for phase, times in stock["phases"].items()}
    assert times == {"prefill": 1e3, "decode": 4e3}
    assert norm["phases"]["decode"]["times_stock"]["median"] == pytest.approx(1 / 1.5)
    assert norm["modules"] == 1
    assert norm["pays"] is False and norm["saved_bytes"] is None
    assert profile["advice"]["call"] is None
    assert profile["advice"]["sentence"].startswith("Do not swap this model: it would be 0.667x")
    printed, _ = run_here("profile-swap", *flags)
    assert "prefill  decode" in printed


def test_what_pays_is_advised(slower_norm):
    flags = flags_of("attends", "norm", "attention")
    assert "a forward" in run_here("profile-swap", *flags)[0]
    found = run_json("profile-swap", *flags)
    advice = found["profiles"][0]["advice"]
    assert advice["call"] == "onepass.swap(model, kinds=('attention',))"
    assert advice["leave_out"] == ["norm"]
    ratios = [advice[f"ratio_to_{of}"]["median"] for of in ("all", "stock")]
    assert ratios == pytest.approx([1.625, 1.25])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--quick", "--generate", "5"), "--generate must come with --model, got none"),
        (flags_of("layers", "dropout"), "(dropout: does nothing in these"),
    ],
)
def test_bad_input_is_one_line(flags, message):
    assert message in refusal("profile-swap", *flags)
