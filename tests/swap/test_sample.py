"""`swap(sample=)`: what gains on a batch is swapped, by a clock that counts given costs."""

import itertools
import json
import sys

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import onepass
from onepass.bench import harness
from onepass.swapping import sample
from onepass.swapping.classes import Swapped
from onepass.swapping.plan import Plan
from onepass.swapping.reasons import Reason
from onepass.swapping.walk import Choice

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
    monkeypatch.setattr(sample, "SECONDS", 0.0)
    monkeypatch.setattr(sample, "STEPS", 0)
    hook = register_module_forward_pre_hook(count)
    yield table
    hook.remove()


def batch():
    return torch.randn(4, 8)


def kinds_of(report):
    return {entry["name"]: entry["kind"] for entry in report.swapped}


def reasons_of(report):
    return {entry["name"]: entry["reason"].kind for entry in report.skipped}


@pytest.mark.parametrize("training", [True, False])
def test_a_kind_that_is_slower_is_left_out(costs, training):
    costs["cost"] = lambda module: SLOWER if isinstance(module, nn.Dropout) else FASTER
    model = Net().train(training)
    report = onepass.swap(model, sample=batch(), kinds=("norm", "dropout"))
    assert kinds_of(report) == dict.fromkeys(("small.0.norm", "small.1.norm", "large.norm"), "norm")
    assert type(model.large.norm) is not nn.LayerNorm and type(model.large.drop) is nn.Dropout
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
    report = onepass.swap(Net(), sample=batch(), kinds="norm")
    assert kinds_of(report) == {"large.norm": "norm"}
    assert reasons_of(report)["small.1.norm"] is Reason.NO_GAIN


def test_what_gains_alike_is_not_named_as_most_of_the_gain(costs):
    model = nn.ModuleDict({"block": Block(8)})
    model.forward = lambda x: model["block"](x)
    report = onepass.swap(model, sample=batch(), kinds=("norm", "dropout"))
    assert len(report.swapped) == 2 and report.notes[0].endswith(" times as fast on this CPU")


def test_no_gain_is_told_that_was_not_measured():
    assert not any("times" in note for note in onepass.swap(Net()).notes)


def test_no_difference_is_no_gain(costs):
    costs["cost"] = lambda module: STOCK_COST
    model = Net()
    classes = [type(module) for module in model.modules()]
    report = onepass.swap(model, sample=batch(), kinds="norm")
    assert not report.swapped and classes == [type(module) for module in model.modules()]


@pytest.mark.parametrize("shares", [(0.95, 1.03), (1e3,)], ids=["no difference", "loss"])
def test_what_gains_nothing_together_is_left_out(costs, shares):
    """Every norm gains alone; a model that holds them has other costs, shares of the gain."""
    turns = itertools.cycle(shares)
    costs["all"] = lambda: next(turns) * 3 * (STOCK_COST - FASTER)
    model = Net()
    report = onepass.swap(model, sample=batch(), kinds="norm")
    assert not report.swapped
    left = reasons_of(report)
    assert {left[f"{name}.norm"] for name in ("small.0", "large")} == {Reason.NO_GAIN_IN_ALL}
    assert not any(isinstance(module, Swapped) for module in model.modules())


def test_the_model_and_the_generator_stay_as_they_were(costs):
    model = Net().train()
    model.small[1].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    x = batch().requires_grad_()
    torch.set_rng_state(before)
    onepass.swap(model, sample=x, kinds=("norm", "dropout"))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
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
        onepass.swap(model, sample=batch())
    for module, (cls, attributes) in zip(model.modules(), before, strict=True):
        assert type(module) is cls and vars(module) == attributes


class Keyworded(Net):
    def forward(self, x, *, scale):
        return super().forward(x * scale)


@pytest.mark.parametrize("form", [tuple, list, lambda args: args[0]])
def test_positional_samples(costs, form):
    report = onepass.swap(Net(), sample=form([batch()]), kinds="norm")
    assert len(report.swapped) == 3


def test_keywords(costs):
    report = onepass.swap(Keyworded(), sample={"x": batch(), "scale": 2.0}, kinds="norm")
    assert len(report.swapped) == 3


def test_a_dry_run_measures_and_changes_nothing(costs):
    model = Net()
    report = onepass.swap(model, sample=batch(), kinds="norm", dry_run=True)
    assert len(report.swapped) == 3
    assert not any(isinstance(module, Swapped) for module in model.modules())


class Box:
    def __init__(self, value):
        self.value = value


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
    costs["cost"] = lambda module: SLOWER if isinstance(module, nn.Dropout) else FASTER
    report = onepass.swap(WithAttention(), sample=batch(), kinds=("norm", "dropout", "attention"))
    assert {*kinds_of(report).values()} == {"norm", "attention"}
    assert {r for n, r in reasons_of(report).items() if "drop" in n} == {Reason.NO_GAIN}


def test_arguments_that_hold_foreign_objects_are_not_repeated():
    call = sample.Call((torch.ones(2), [3, None]), {"key": Box(1)})
    assert sample._copied(call) is None
    plain = call._replace(kwargs={"key": "text"})
    copied = sample._copied(plain)
    assert copied.args[0] is not plain.args[0] and torch.equal(copied.args[0], plain.args[0])
    assert sample._signature(copied) == sample._signature(plain)


def test_a_tensor_that_is_given_twice_stays_one():
    """Attention has another path where query, key and value are one tensor."""
    x = torch.ones(2, requires_grad=True)
    for made in (sample._copied, sample._fresh):
        query, key = made(sample.Call((x, x), {"value": x})).args
        assert query is key and query is not x and query.is_leaf and query.requires_grad


def small_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("faster", [True, False])
def test_attention_by_name_is_measured_by_steps(monkeypatch, faster):
    """The cost of a step is that of the attention that its config names."""
    model = small_llama()

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
    monkeypatch.setattr(sample, "SECONDS", 0.0)
    monkeypatch.setattr(sample, "STEPS", 0)
    tokens = {"input_ids": torch.randint(64, (1, 8))}
    report = onepass.swap(model, sample=tokens, kinds="attention")
    assert bool(report.swapped) is faster
    assert (model.config._attn_implementation == "onepass") is faster
    assert onepass.unswap(model) is not None
    assert model.config._attn_implementation != "onepass"


@pytest.mark.parametrize("kind", ["rotary", "attention"])
def test_kinds_of_one_module_are_left_out_apart(kind):
    """A Llama's attention rotates by its class, and attends by the name in its config."""
    model = small_llama()
    choice = Choice(None, None, None, None)
    plan = Plan(model, ("rotary", "attention"), choice, True, False, False, False)
    modules = {id(change.module) for change in plan.classes} if kind == "rotary" else set()
    plan.leave_out(modules, Reason.NO_GAIN.format("0.5"), kind == "attention")
    (left,) = plan.left_out
    assert left.names == ["model.layers.0.self_attn"] and left.kinds == [kind]
    (kept,) = {"rotary", "attention"} - {kind}
    taken = [[left.names[0], kept]]
    choice = sample.Decision(taken, plan.left_out, []).to_dict()
    choice = json.loads(json.dumps(choice))
    report = onepass.swap(model, kinds=("rotary", "attention"), choice=choice)
    assert kinds_of(plan.report) == kinds_of(report) == {left.names[0]: kept}
    assert plan.report.skipped == report.skipped


def test_a_decision_is_repeated_for_another_copy(costs, monkeypatch):
    costs["cost"] = lambda module: SLOWER if isinstance(module, nn.Dropout) else FASTER
    options = {"kinds": ("norm", "dropout")}
    measured = onepass.swap(Net(), sample=batch(), dry_run=True, **options)
    monkeypatch.setattr(sample, "_Measurement", None)
    model = Net()
    repeated = onepass.swap(model, choice=measured.choice, **options)
    assert repeated.to_dict() == measured.to_dict() and reasons_of(repeated) == reasons_of(measured)
    assert isinstance(model.large.norm, Swapped) and type(model.large.drop) is nn.Dropout


def test_numpy_is_asked_for_by_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "onepass.bench.harness", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match=r"swap: sample needs numpy.*onepass\[tools\]"):
        onepass.swap(Net(), sample=batch())
