"""`onepass profile-swap`: measurements, advice, the command."""

import argparse
import dataclasses
import itertools
import json
import shlex
import time
from collections import OrderedDict

import pytest
import torch
from torch import nn

from onepass import cli
from onepass.swapping import classes
from onepass.tools import profile_swap
from onepass.tools.command import WIDTH_OFF_TERMINAL
from onepass.tools.compare import memory
from onepass.tools.compare.settings import read_settings
from onepass.tools.compare.variants import STOCK, SWAPPED, of_kinds
from onepass.tools.compare.workload import workload_of
from onepass.tools.errors import BadInput
from onepass.tools.harness import Timing
from onepass.tools.profile_swap import measure, report
from tests.compare.cases import peaks_of_a_byte, refusal, run_here, run_json

pytestmark = pytest.mark.xdist_group("compare")
QUICK = ("--quick", "--threads", "1", "--pairs", "3")
MIB = 1 << 20


def make():
    """A norm, and dropout, of which stock keeps 4 MiB of factors."""
    parts = dict(norm=nn.LayerNorm(256), drop=nn.Dropout(0.5), head=nn.Linear(256, 4))
    return nn.Sequential(OrderedDict(parts)), torch.randn(4096, 256)


def make_nothing():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8)


MODEL = ("--model", f"{__name__}:make")


def settings_of(*flags):
    parser = argparse.ArgumentParser()
    profile_swap.add_arguments(parser)
    args = parser.parse_args([*QUICK, *flags])
    return read_settings(args, profile_swap.COMMAND, profile_swap.add_arguments)


def profiled(*flags):
    settings = settings_of(*flags)
    with measure.Turns(workload_of(settings, None, None), settings) as turns:
        return measure.profile(turns, settings, lambda: None)


def slowed(monkeypatch, cls, seconds):
    forward = cls.forward

    def slow(self, *args, **kwargs):
        time.sleep(seconds)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", slow)


@pytest.fixture
def peaks_of_one_byte(monkeypatch):
    monkeypatch.setattr(memory, "peaks_of_steps", peaks_of_a_byte)


def test_a_kind_that_is_slow_is_left_out_and_that_is_proven(monkeypatch, peaks_of_one_byte):
    slowed(monkeypatch, classes.LayerNormForward, 0.2)
    found = profiled(*MODEL, "--kinds", "norm", "dropout")
    assert list(found.variants) == [STOCK, SWAPPED, "swapped: norm", "swapped: dropout"]
    assert [variant.modules for variant in found.variants.values()] == [0, 2, 1, 1]
    assert measure.verdict(found.times_stock("swapped: norm")) is False
    assert found.milliseconds_bought("swapped: norm").median < -100
    assert found.milliseconds_bought("swapped: dropout").median > -100
    assert found.advice.leave_out == ("norm",) and found.advice.keep == ("dropout",)
    assert found.advice.ratio.low > 1.0 and found.advice.proven
    assert report.sentence(found).startswith(("Leave out norm", "Do not swap", "No gain"))


def test_the_steps_run_on_what_their_variant_says_and_the_model_ends_as_it_was(
    monkeypatch, peaks_of_one_byte
):
    """Checks the classes of the modules while a step runs; the order is that of the rounds."""
    seen = []
    step = measure.Trainer.step

    def watched(self, batch):
        model = self.model
        seen.append(tuple(isinstance(m, classes.Swapped) for m in (model.norm, model.drop)))
        seen_models.add(model)
        return step(self, batch)

    seen_models = set()
    monkeypatch.setattr(measure.Trainer, "step", watched)
    profiled(*MODEL, "--kinds", "norm", "dropout")
    stock, both, norm, drop = (False, False), (True, True), (True, False), (False, True)
    first = [stock, both, norm, drop]
    assert seen[:12] == [*first, *first[::-1], *first]
    (model,) = seen_models
    assert type(model.norm) is nn.LayerNorm and type(model.drop) is nn.Dropout


def test_a_failing_step_leaves_the_model_stock(monkeypatch):
    settings = settings_of(*MODEL)
    turns = measure.Turns(workload_of(settings, None, None), settings)
    with pytest.raises(KeyboardInterrupt), turns:
        turns.become(SWAPPED)
        assert isinstance(turns.trainer.model.norm, classes.Swapped)
        raise KeyboardInterrupt
    assert type(turns.trainer.model.norm) is nn.LayerNorm


@pytest.mark.slow
def test_memory_is_that_of_each_kind_alone():
    """Dropout keeps none of its factors; peaks are of real processes."""
    variants = profiled(*MODEL, "--kinds", "norm", "dropout").variants
    factors = 4096 * 256 * 4
    stock, dropout = variants[STOCK], variants["swapped: dropout"]
    assert stock.saved_bytes - dropout.saved_bytes == pytest.approx(factors, rel=0.01)
    assert stock.peak_bytes - dropout.peak_bytes >= 0.5 * factors
    assert all(variant.peak_bytes > 8 * MIB for variant in variants.values())


def test_a_model_with_nothing_to_swap():
    with pytest.raises(
        BadInput, match="must have something to swap, got none .*norm: normalises over the batch"
    ):
        profiled("--model", f"{__name__}:make_nothing", "--kinds", "norm")


def timing_of(**milliseconds):
    """Steps that take a millisecond longer in every second round."""
    times = {STOCK: [100.0, 101.0] * 4}
    for name, ms in milliseconds.items():
        variant = SWAPPED if name == "all" else of_kinds((name,))
        times[variant] = [float(ms), ms + 1.0] * 4
    ones = dict.fromkeys(times, 1)
    return Timing({n: [ms / 1e3 for ms in taken] for n, taken in times.items()}, ones, ones)


def profile_of(timing, peaks, ratio=None, times_stock=None):
    kinds = tuple(name.partition(": ")[2] for name in timing.times if ": " in name)
    variants = {n: measure.Variant(None, 0, 0, peak) for n, peak in peaks.items()}
    found = measure.advise(kinds, timing)
    advice = measure.Advice(found.keep, found.leave_out, ratio, times_stock)
    return measure.Profile(None, 1, timing, variants, {}, advice)


def peaks_of(timing, **mebibytes_of_kinds):
    peaks = dict.fromkeys(timing.times, 1000 * MIB)
    return peaks | {of_kinds((kind,)): count * MIB for kind, count in mebibytes_of_kinds.items()}


FASTER, SLOWER, NEITHER = (report.Interval(m, m - 0.1, m + 0.1) for m in (1.2, 0.8, 1.01))


# Milliseconds of each swap, the MiB of a peak, the second measurement of what is kept; what the
# advice says, and the options of its call.
ADVICE = {
    "what is slower is left out": (
        dict(all=80, norm=90, mlp=120, loss=100), {}, (FASTER, FASTER),
        "Leave out mlp: the swap without is 1.200x [1.100-1.300] as fast as all",
        ", kinds=('norm', 'loss')",
    ),
    "what is not proven stays": (
        dict(all=80, norm=90, mlp=120), {}, (NEITHER, FASTER), "Slower alone: mlp; ", "",
    ),
    "a model that loses: all kinds and each but one, which makes no difference": (
        dict(all=110, norm=104, attention=108, dropout=100), dict(norm=900), (FASTER, NEITHER),
        "Do not swap this model: it would be 0.910x [0.909-0.910] as fast. Where memory is short: "
        "norm alone lowers the peak by 100.0 MiB (10 %) and is 0.962x", None,
    ),
    "a model that gains nothing": (
        dict(all=100, norm=100, mlp=120), {}, (FASTER, SLOWER),
        "No gain measured, 1.000x [1.000-1.000]: do not swap this model for speed.", None,
    ),
    "a kind that gains alone": (
        dict(all=100, norm=90, attention=100), {}, (), "Swap norm alone: 1.111x",
        ", kinds=('norm',)",
    ),
    "everything pays": (dict(all=80, norm=90), {}, (), "Nothing to leave out", ""),
    "a saving of 1 %": (
        dict(all=80, norm=90, mlp=120), dict(mlp=990), (FASTER, FASTER), "Leave out mlp: ",
        ", kinds=('norm',)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVICE)
def test_advice(name):
    milliseconds, mebibytes, proof, sentence, options = ADVICE[name]
    timing = timing_of(**milliseconds)
    found = profile_of(timing, peaks_of(timing, **mebibytes), *proof)
    assert report.sentence(found).startswith(sentence)
    assert report.call(found) == (None if options is None else f"onepass.swap(model{options})")
    assert found.saving == tuple(mebibytes)
    assert ("Where memory is short: " in report.sentence(found)) is bool(mebibytes)


def test_kinds_that_were_not_measured_are_not_swapped():
    timing = timing_of(all=80, norm=90)
    found = dataclasses.replace(profile_of(timing, peaks_of(timing)), limited=True)
    assert report.call(found) == "onepass.swap(model, kinds=('norm',))"


@pytest.mark.parametrize(("peak", "part"), [(991, 1), (500, 1000)])
def test_a_saving_below_a_percent_or_a_mebibyte_is_none(peak, part):
    timing = timing_of(all=80, norm=90, mlp=120)
    peaks = {name: size // part for name, size in peaks_of(timing, mlp=peak).items()}
    assert profile_of(timing, peaks, FASTER, FASTER).saving == ()


@pytest.mark.parametrize("all_, norm", list(itertools.product((90, 100, 110), repeat=2)))
@pytest.mark.parametrize("mlp", [90, 100, 110])
@pytest.mark.parametrize("rest", [FASTER, SLOWER, NEITHER])
def test_no_swap_is_advised_that_was_not_measured_to_gain(all_, norm, mlp, rest):
    timing = timing_of(all=all_, norm=norm, mlp=mlp)
    left_out = 0 < (norm > 100) + (mlp > 100) < 2
    proof = (FASTER, rest) if left_out else ()
    found = profile_of(timing, peaks_of(timing, norm=1, mlp=1), *proof)
    gains = {found.kinds: all_ < 100, ("norm",): norm < 100, ("mlp",): mlp < 100, (): True}
    if left_out:  # the second measurement of what is kept counts
        gains[found.advice.keep] = rest is FASTER
    assert gains[found.swaps]
    assert bool(found.swaps) is any(gains[kinds] for kinds in gains if kinds)
    assert (report.call(found) is None) is (not found.swaps)
    assert report.sentence(found)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What a run on the GPT of compare prints, says on standard error, and writes as JSON."""
    file = tmp_path_factory.mktemp("profile") / "out.json"
    said = run_here("profile-swap", *QUICK, "--json", str(file))
    return *said, json.loads(file.read_text())


def test_the_table_fits_and_says_what_the_json_says(outcome):
    printed, told, found = outcome
    assert all(line.startswith("profile-swap: ") for line in told.splitlines())
    assert "\x1b" not in printed and "…" not in printed
    assert all(p["advice"]["sentence"] in " ".join(printed.split()) for p in found["profiles"])
    tables = [line for line in printed.splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= WIDTH_OFF_TERMINAL


def test_json_schema(outcome):
    found = outcome[2]
    assert list(found) == [
        "schema_version", "command", "machine", "settings", "data", "parameters", "objective",
        "profiles", "seconds",
    ]  # fmt: skip
    assert [profile["dropout"] for profile in found["profiles"]] == [0.1, 0.0]
    for profile in found["profiles"]:
        assert list(profile) == [
            "dropout", "items_per_batch", "variants", "absent", "note", "advice",
        ]  # fmt: skip
        names = list(profile["variants"])
        assert names[:2] == [STOCK, SWAPPED]
        kinds = [name.removeprefix("swapped: ") for name in names[2:]]
        assert {"norm", "attention"} <= set(kinds) and "dropout" in {*kinds, *profile["absent"]}
        assert not set(kinds) & set(profile["absent"])
        assert profile["variants"][STOCK]["kinds"] is None
        assert profile["variants"][SWAPPED]["kinds"] == kinds
        for variant in profile["variants"].values():
            assert list(variant) == [
                "kinds", "modules", "step_ms", "times_stock", "ms_bought", "saved_bytes",
                "peak_bytes", "pays", "phases",
            ]  # fmt: skip
            assert len(variant["step_ms"]["rounds"]) == 3
            ratio, bought = variant["times_stock"], variant["ms_bought"]
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
            assert bought["low"] <= bought["median"] <= bought["high"]
            assert variant["peak_bytes"] > 0
        assert list(profile["advice"]) == [
            "leave_out", "keep", "where_memory_is_short", "ratio_to_all", "ratio_to_stock",
            "sentence", "call",
        ]  # fmt: skip


def test_a_model_of_the_users_and_one_kind(peaks_of_one_byte):
    """Kinds of which there is nothing have a reason; one kind alone is measured once."""
    found = profiled(*MODEL)
    assert found.objective == "mean square of the output: it has no loss"
    assert {"attention", "mlp", "rotary"} <= set(found.absent)
    assert found.absent["attention"] == measure.NONE_OF_IT
    assert not {"norm", "dropout"} & set(found.absent)
    (profile,) = run_json("profile-swap", *QUICK, *MODEL, "--kinds", "norm")["profiles"]
    assert profile["dropout"] is None and profile["items_per_batch"] == 4096
    assert list(profile["variants"]) == [STOCK, "swapped: norm"]


def test_the_command_repeats_the_run(outcome):
    found = outcome[2]
    words = shlex.split(found["command"])
    assert words[:2] == ["onepass", "profile-swap"]
    assert settings_of(*words[2:]).to_dict().items() >= found["settings"].items()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model", "nowhere"], "--model must be package.module:function, got 'nowhere'"),
        ([*MODEL, "--kinds", "nrom"], "--kinds must be of norm, attention"),
        (["--model", f"{__name__}:make_nothing", "--kinds", "norm"],
         "the model must have something to swap"),
        ([*MODEL, "--json", "/no/such/folder/x.json"], "--json must name a file to write"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(flags, message):
    assert message in refusal("profile-swap", "--quick", *flags)


def test_an_option_of_compare_is_none_of_this(capsys):
    with pytest.raises(SystemExit):
        cli.main(["profile-swap", "--compile"])
    assert "unrecognized arguments: --compile" in capsys.readouterr().err
