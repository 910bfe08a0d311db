"""`swap(sample=)`: what gains on a batch is swapped, by a clock that counts given costs."""

import itertools
import json
import random
import sys
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

import onepass
from onepass.swapping import by_name, matchers, sample
from onepass.swapping.classes import Swapped
from onepass.swapping.plan import Plan
from onepass.swapping.reasons import Reason
from onepass.tools import harness
from onepass.tools.harness import Timing
from tests.support.injection import bits

STOCK_COST, FASTER, SLOWER = 1e-3, 0.5e-3, 2e-3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = nn.ModuleList([Block(8), Block(8)]), Block(16)
        self.up, self.statistics = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.unused = nn.LayerNorm(8)

    def forward(self, x):
        for block in self.small:
            x = block(x)
        return self.statistics(self.large(self.up(x)))


@pytest.fixture
def costs(monkeypatch):
    """The cost of a call of a swapped module, by a function of the module; stock's is STOCK_COST.

    A batch of calls takes the sum of the costs of the modules that it calls.
    """
    table = {"cost": lambda module: FASTER, "all": lambda: 0.0, "sum": 0.0}

    def count(module, args):
        if isinstance(module, Swapped):
            table["sum"] += table["cost"](module)
        elif isinstance(module, (nn.LayerNorm, nn.Dropout, nn.MultiheadAttention)):
            table["sum"] += STOCK_COST
        elif isinstance(module, Net) and isinstance(module.large.norm, Swapped):
            table["sum"] += table["all"]()

    def seconds(self, function, calls):
        table["sum"] = 0.0
        for _ in range(calls):
            function()
        return table["sum"] + 1e-5

    monkeypatch.setattr(harness.HostClock, "seconds", seconds)
    measure_little(monkeypatch)
    hook = register_module_forward_pre_hook(count)
    yield table
    hook.remove()


def measure_little(monkeypatch) -> None:
    monkeypatch.setattr(sample, "SECONDS", 0.0)
    monkeypatch.setattr(sample, "STEPS", 0)


def dropouts_are_slower(module) -> float:
    return SLOWER if isinstance(module, nn.Dropout) else FASTER


def batch():
    return torch.randn(4, 8)


def swap(model, *kinds, sample=None, **options):
    sample = batch() if sample is None else sample
    return onepass.swap(model, kinds=kinds or "norm", sample=sample, **options)


def kinds_of(report):
    return {entry["name"]: entry["kind"] for entry in report.swapped}


def reasons_of(report):
    return {entry["name"]: entry["reason"].kind for entry in report.skipped}


def swapped_in(model):
    return {name for name, module in model.named_modules() if isinstance(module, Swapped)}


@pytest.mark.parametrize("training", [True, False])
def test_a_kind_that_is_slower_is_left_out(costs, training):
    costs["cost"] = dropouts_are_slower
    model = Net().train(training)
    report = swap(model, "norm", "dropout")
    assert kinds_of(report) == dict.fromkeys(("small.0.norm", "small.1.norm", "large.norm"), "norm")
    assert swapped_in(model) == {*kinds_of(report)}
    left = reasons_of(report)
    assert left.pop("unused") is Reason.NOT_CALLED
    assert {left[f"{name}.drop"] for name in ("small.0", "small.1", "large")} == {Reason.NO_GAIN}
    text = next(e["reason"] for e in report.skipped if e["name"] == "large.drop")
    assert text.startswith("dropout: no gain on the sample: 0.50 [0.50-0.50] times")
    step = "forward and backward" if training else "forward"
    assert report.notes[0].startswith(f"measured on the sample, {step}: 1.")
    assert report.notes[0].endswith("times as fast on this CPU, most of it norm")
    assert report.verify(batch()).ok


def test_shapes_are_decided_apart(costs):
    costs["cost"] = lambda module: FASTER if module.normalized_shape == (16,) else SLOWER
    report = swap(Net())
    assert kinds_of(report) == {"large.norm": "norm"}
    assert reasons_of(report)["small.1.norm"] is Reason.NO_GAIN


def test_what_gains_alike_is_not_named_as_most_of_the_gain(costs):
    report = swap(Block(8), "norm", "dropout")
    assert len(report.swapped) == 2 and report.notes[0].endswith(" times as fast on this CPU")
    assert not any("times" in note for note in onepass.swap(Net()).notes)  # not measured


@pytest.mark.parametrize("shares", [(0.95, 1.03), (1e3,)], ids=["no difference", "loss"])
def test_what_gains_nothing_together_is_left_out(costs, shares):
    """Every norm gains alone; a model that holds them has other costs, shares of the gain."""
    turns = itertools.cycle(shares)
    costs["all"] = lambda: next(turns) * 3 * (STOCK_COST - FASTER)
    model = Net()
    report = swap(model)
    assert not report.swapped and not swapped_in(model)
    left = reasons_of(report)
    assert {left[f"{name}.norm"] for name in ("small.0", "large")} == {Reason.NO_GAIN_IN_ALL}


def test_the_model_and_the_generator_stay_as_they_were(costs):
    model = Net().train()
    model.small[1].eval()
    x = batch().requires_grad_()
    state = bits(model.state_dict())
    flags = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    swap(model, "norm", "dropout", sample=x)
    assert torch.equal(torch.get_rng_state(), before) and bits(model.state_dict()) == state
    assert flags == [module.training for module in model.modules()]
    assert all(p.grad is None for p in model.parameters()) and x.grad is None
    assert not any(module._forward_pre_hooks for module in model.modules())


class Failing(Net):
    def forward(self, x):
        self.touched = True
        raise ZeroDivisionError("of the model's own")


def test_an_error_of_the_model_is_the_users_and_changes_nothing():
    model = Failing()
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    with pytest.raises(ZeroDivisionError, match="of the model's own"):
        swap(model)
    for module, (cls, attributes) in zip(model.modules(), before, strict=True):
        assert type(module) is cls and vars(module) == attributes


class Keyworded(Net):
    def forward(self, x, *, scale=1.0):
        return super().forward(x * scale)


FORMS = [lambda x: (x,), lambda x: [x], lambda x: {"x": x, "scale": 2.0}]


@pytest.mark.parametrize("form", FORMS, ids=["tuple", "list", "keywords"])
def test_forms_of_samples(costs, form):
    """A dry run measures and changes nothing."""
    model = Keyworded()
    assert len(swap(model, sample=form(batch()), dry_run=True).swapped) == 3
    assert not swapped_in(model)


class WithAttention(Net):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = x[None]
        return super().forward(self.attention(x, x, x, need_weights=False)[0][0])


def test_calls_that_cannot_be_repeated_are_measured_by_steps(costs, monkeypatch):
    """The same choice, from whole steps."""
    monkeypatch.setattr(sample, "_copied", lambda call: None)
    costs["cost"] = dropouts_are_slower
    report = swap(WithAttention(), "norm", "dropout", "attention")
    assert {*kinds_of(report).values()} == {"norm", "attention"}
    assert {r for n, r in reasons_of(report).items() if "drop" in n} == {Reason.NO_GAIN}


def test_copies_of_calls():
    """None if they hold foreign objects; a tensor that is given twice stays one, since attention
    has another path where query, key and value are one."""
    call = sample.Call((torch.ones(2), [3, None]), {"key": object()})
    assert sample._copied(call) is None
    plain = call._replace(kwargs={"key": "text"})
    copied = sample._copied(plain)
    assert copied.args[0] is not plain.args[0] and torch.equal(copied.args[0], plain.args[0])
    assert sample._signature(copied) == sample._signature(plain)
    x = torch.ones(2, requires_grad=True)
    for made in (sample._copied, sample._fresh):
        query, key = made(sample.Call((x, x), {"value": x})).args
        assert query is key and query is not x and query.is_leaf and query.requires_grad


def small_llama():
    """(model, batch), with attention by name in its config, and rotary functions."""
    from tests.integrations import transformers_cases  # which skips without transformers

    ids = torch.arange(8)[None]
    model = transformers_cases.build("llama", num_hidden_layers=1, attention_dropout=0.1)
    return model.train(), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("faster", [True, False])
def test_attention_by_name_is_measured_by_steps(monkeypatch, faster):
    """The cost of a step is that of the attention that its config names."""
    model = small_llama()[0].eval()

    def seconds(self, function, calls):
        seen = []
        hook = model.register_forward_pre_hook(
            lambda module, args: seen.append(module.config._attn_implementation)
        )
        for _ in range(calls):
            function()
        hook.remove()
        return sum(FASTER if (name == "onepass") is faster else SLOWER for name in seen) + 1e-5

    monkeypatch.setattr(harness.HostClock, "seconds", seconds)
    measure_little(monkeypatch)
    report = swap(model, "attention", sample={"input_ids": torch.randint(32, (1, 8))})
    assert bool(report.swapped) is faster
    assert (model.config._attn_implementation == "onepass") is faster
    assert onepass.unswap(model) is not None
    assert model.config._attn_implementation != "onepass"


def test_numpy_is_asked_for_by_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "onepass.tools.harness", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match=r"swap: sample needs numpy.*onepass\[tools\]"):
        swap(Net())


# ---- noise, and a choice that is made again ------------------------------------------------------

FAST, STEADY, SMALL, WIDE = [0.5] * 6, [1.0] * 6, [0.97, 1.03] * 3, [0.5, 1.6] * 3  # of a call
MEASURE = "onepass.tools.harness.measure_pairs"


def timing(times) -> Timing:
    return Timing(times, dict.fromkeys(times, 1), dict.fromkeys(times, 0.0))


def timing_of(functions, swapped) -> Timing:
    """Stock's times are 1."""
    return timing({n: [1.0] * len(swapped) if n == sample.STOCK else swapped for n in functions})


def net():
    return nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 8))


@pytest.fixture
def timings(monkeypatch):
    """The swapped times of each measurement, in turn; stock's are 1."""
    answers = []
    monkeypatch.setattr(MEASURE, lambda functions, **_: timing_of(functions, answers.pop(0)))
    return answers


DECISIONS = [
    ([STEADY], Reason.NO_GAIN, "times as fast", ""),
    ([SMALL], Reason.NO_GAIN, "times as fast", ""),
    ([WIDE] * 2, Reason.TOO_NOISY, "norm: too noisy to tell: 1.", "the machine is busy: 1 of 1"),
    ([FAST, WIDE, WIDE], Reason.TOO_NOISY_IN_ALL, "", "the machine is busy: 1 of 2 measurements"),
]


@pytest.mark.parametrize(("times", "reason", "text", "note"), DECISIONS)
def test_what_cannot_be_told_is_measured_again(timings, times, reason, text, note):
    """A wide interval around 1, of a module or of the whole step."""
    timings[:] = times
    report = swap(net())
    (entry,) = report.skipped
    assert entry["reason"].kind is reason and text in entry["reason"] and not timings
    if note:
        assert report.notes[0].startswith(note)
    assert note or not any("busy" in said for said in report.notes)


def test_more_rounds_can_decide(timings):
    timings[:] = [WIDE, FAST * 10, FAST]  # the last is of a whole step
    report = swap(net())
    assert [entry["name"] for entry in report.swapped] == ["0"] and not timings
    assert report.notes[0].startswith("measured on the sample")


@pytest.mark.parametrize(("threads", "now"), [(1, time.thread_time), (2, time.perf_counter)])
def test_one_thread_is_timed_by_its_own_time(monkeypatch, threads, now):
    """So that other programs do not count."""
    clocks = []

    def measured(functions, *, clock, **_):
        clocks.append(clock.now)
        return timing_of(functions, STEADY)

    monkeypatch.setattr(MEASURE, measured)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    swap(net())
    assert clocks == [now]


@pytest.fixture
def chosen(timings):
    """A choice of the dropout alone, through JSON."""
    timings[:] = [FAST, [2.0] * 6, FAST]
    report = swap(net(), "norm", "dropout")
    assert [(entry["name"], entry["kind"]) for entry in report.swapped] == [("1", "dropout")]
    return report, json.loads(json.dumps(report.choice))


def test_a_choice_is_made_again_without_measuring(chosen, monkeypatch):
    report, choice = chosen
    monkeypatch.setattr(sample, "_Measurement", None)
    model = net()
    repeated = onepass.swap(model, choice=choice, kinds=("norm", "dropout"))
    assert repeated.to_dict() == report.to_dict() and repeated.choice == report.choice
    assert reasons_of(repeated) == reasons_of(report) and swapped_in(model) == {"1"}


def test_a_choice_for_another_model(chosen):
    """Nothing is taken that it does not name, and what cannot be is told."""
    report = onepass.swap(nn.Sequential(*net(), nn.Dropout(0.2)), choice=chosen[1])
    assert [entry["name"] for entry in report.swapped] == ["1"]
    assert reasons_of(report)["3"] is Reason.NOT_CHOSEN
    report = onepass.swap(nn.Sequential(nn.LayerNorm(8), nn.Identity()), choice=chosen[1])
    assert report.notes[0] == "chosen and not swapped: dropout of 1"
    with pytest.raises(ValueError, match="swap: choice must be None beside sample, got both"):
        swap(net(), choice=chosen[1])


def test_a_swap_without_a_sample_has_a_choice_too():
    report = onepass.swap(net(), kinds="norm")
    known = {"precision": None, "precisions": {}}
    assert report.choice == {"swapped": [["0", "norm"]], "left_out": [], "notes": []} | known


@pytest.mark.parametrize("wrong", [torch.ones(1), {"x": 1}, "text", {"swapped": 1}])
def test_other_objects_are_no_choice(wrong):
    with pytest.raises(TypeError, match=r"swap: choice must be a report's choice, got \w+"):
        onepass.swap(net(), choice=wrong)


# ---- combinations: the report lists what runs, and unswap undoes that ----------------------------

KINDS = ("norm", "attention", "mlp", "rotary", "linear", "loss")


def running(model):
    """(name, kind) of all that runs onepass, from classes and configs alone."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, Swapped):
            found |= {(name, kind) for kind in module._onepass_to}
        match = matchers.match(module, ("attention",))
        if match and match.named and by_name.is_attached(module):
            found.add((name, "attention"))
    return found


@pytest.fixture
def gains(monkeypatch):
    """The variants of measurements that gain, each asked once, in the order of the units."""
    answers = []

    def timed(self, functions, seconds):
        times = {name: [1.0] * 5 for name in functions}
        for name in functions:
            if name != sample.STOCK:
                times[name] = [0.5 if answers.pop(0) else 2.0] * 5
        return timing(times)

    judged, verdicts = Plan._judged, {}

    def judged_once(self, key, *args):
        """For all models of a test."""
        if key not in verdicts:
            verdicts[key] = judged(self, key, *args)
        return verdicts[key]

    monkeypatch.setattr(Plan, "_judged", judged_once)
    monkeypatch.setattr(sample._Measurement, "_timed", timed)
    measure_little(monkeypatch)
    monkeypatch.setattr(matchers, "_as_fast", lambda weights, small, precision: None)
    return answers


def check(model, report):
    assert {(e["name"], e["kind"]) for e in report.swapped} == running(model)
    left = {e["name"] for e in report.skipped} & {name for name, _ in running(model)}
    for entry in report.skipped:  # what runs for one kind, and not for another, is told apart
        if entry["name"] in left:
            kind = entry["reason"].partition(":")[0]
            assert kind in KINDS and (entry["name"], kind) not in running(model), entry


def test_the_report_lists_what_runs(gains):
    draw = random.Random(1)
    drawn = [[draw.random() < 0.5 for _ in range(20)] for _ in range(2)]
    singles = [[number == left for number in range(20)] for left in range(8)]
    for answers in singles + drawn:
        gains[:] = answers + [True] * 9
        model, batch = small_llama()
        report = onepass.swap(model, sample=batch, kinds=KINDS)
        check(model, report)
        choice = json.loads(json.dumps(report.choice))
        repeated = onepass.swap(small_llama()[0], choice=choice, kinds=KINDS)
        assert repeated.to_dict() == report.to_dict()
        restored = {name for name, _ in running(model)}
        assert {*onepass.unswap(model)} == restored and not running(model)


@pytest.mark.parametrize("kind", ["attention", "rotary", "norm"])
@pytest.mark.parametrize("gain", [True, False])
def test_what_an_earlier_swap_took_stays(gains, kind, gain):
    gains[:] = [gain] * 30
    model, batch = small_llama()
    onepass.swap(model, kinds=kind)
    report = onepass.swap(model, sample=batch, kinds=KINDS)
    check(model, report)
    assert {entry["kind"] for entry in report.swapped} >= {kind}


class Both(nn.Module):
    """One class for two kinds of calls."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        x = F.linear(x, self.weight)
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("kind", ["attention", "linear"])
def test_a_choice_keeps_kinds_of_one_module_apart(gains, kind):
    choice = onepass.swap(Both(), kinds=kind).choice
    model = Both()
    report = onepass.swap(model, choice=choice)
    check(model, report)
    assert [entry["kind"] for entry in report.swapped] == [kind]
    assert onepass.swap(Both()).choice["swapped"] == [["", "attention"], ["", "linear"]]


def test_explain_gives_the_reason_of_the_sample(gains):
    gains[:] = [False] * 30
    model, batch = small_llama()
    onepass.swap(model, sample=batch, kinds=KINDS)

    def reasons():
        return {entry["reason"] for entry in onepass.explain(model, batch).not_accelerated}

    assert all("no gain on the sample: 0.50" in reason for reason in reasons())
    onepass.unswap(model)
    assert reasons() == {"not swapped: onepass.swap(model)"}
