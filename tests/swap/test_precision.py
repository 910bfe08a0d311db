"""`swap(precision=)`: products of float32 in one model, without torch's global setting."""

import copy
import io
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from onepass import explain, functional
from onepass._policy import precision as policy
from onepass.swapping import sample
from onepass.swapping.classes import Swapped
from tests.linear.test_precision import global_precision, needs_dots
from tests.swap.linear_calls import FAST, SLOW, set_facts
from tests.swap.test_sample import measure_little, timing

pytestmark = pytest.mark.usefixtures("slow_products")


class Attends(nn.Module):
    """Calls F.scaled_dot_product_attention and F.linear itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        q, k, v = (x.unflatten(-1, (2, 32)).transpose(1, 2) for _ in range(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).flatten(-2), self.weight)


class ByHand(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (2, 32)).transpose(1, 2)
        return ((q @ q.mT) * 0.2).softmax(-1) @ q


def encoder():
    return nn.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True)


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)),
    "attention": lambda: nn.MultiheadAttention(64, 2, batch_first=True),
    "encoder": encoder,
    "calls": Attends,
    "by hand": ByHand,
}
each_model = pytest.mark.parametrize("kind", MODELS)


def made(kind):
    torch.manual_seed(0)
    return MODELS[kind](), torch.randn(4, 160, 64)


def run(model, x):
    if isinstance(model, nn.MultiheadAttention):
        return model(x, x, x, need_weights=False)[0]
    return model(x)


def gradients(model, x):
    x = x.clone().requires_grad_()
    y = run(model, x)
    return torch.autograd.grad(y.square().sum(), (x, *model.parameters()))


def note_of(report, precision):
    notes = [note for note in report.notes if f"precision='{precision}'" in note]
    (note,) = (note for note in notes if "leaves in float32" not in note)
    return note


def distance(found, exact):
    """That of whole tensors. A code is off by half of 1/127 of the largest number of its line at
    most, which is some 1 % of a number of normal draws."""
    return ((found - exact).norm() / exact.norm()).item()


def left_in(report):
    """The note on layers that int8 leaves out, or none."""
    return next((note for note in report.notes if "leaves in float32" in note), "")


@needs_dots
@each_model
def test_results_are_those_of_torchs_setting(kind):
    model, x = made(kind)
    onepass.swap(model)
    exact = run(model, x)
    with global_precision("medium"):
        expected, of_expected = run(model, x), gradients(model, x)
    assert not torch.equal(expected, exact)
    onepass.unswap(model)
    onepass.swap(model, precision="medium")
    assert torch.equal(run(model, x), expected)
    assert all(map(torch.equal, gradients(model, x), of_expected))
    assert torch.get_float32_matmul_precision() == "highest"


@needs_dots
@pytest.mark.parametrize("rows", [4, 160], ids=["small", "large"])
@each_model
def test_highest_keeps_float32_whatever_torchs_setting(monkeypatch, kind, rows):
    """Also where torch's products, which round under its setting, are fast, and in small calls."""
    set_facts(monkeypatch, SLOW._replace(bfloat16=True))
    model, x = made(kind)
    x = x[:, :rows]
    onepass.swap(model, precision="highest")
    exact = run(model, x)
    with global_precision("medium"):
        found = run(model, x)
    # Small calls are torch's otherwise, which adds up in another order.
    torch.testing.assert_close(found, exact, rtol=0, atol=0 if rows > 4 else 2e-6)


@needs_dots
@each_model
def test_copies_keep_it_and_unswap_takes_it_back(kind):
    model, x = made(kind)
    stock = run(model, x)
    onepass.swap(model, precision="medium")
    expected = run(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(run(twin, x), expected)
        onepass.unswap(twin)
        assert torch.equal(run(twin, x), stock)
        assert not any(policy.ATTRIBUTE in vars(module) for module in twin.modules())


def test_a_second_call_changes_what_its_options_take():
    model, _ = made("linear")
    onepass.swap(model)
    onepass.swap(model, precision="medium", exclude="2")
    assert [vars(module).get(policy.ATTRIBUTE) for module in model] == ["medium", None, None]


@needs_dots
def test_a_block_restores_it():
    model, x = made("linear")
    with onepass.swapped(model, precision="medium"):
        rounded = run(model, x)
    assert not any(policy.ATTRIBUTE in vars(module) for module in model.modules())
    onepass.swap(model)
    assert not torch.equal(run(model, x), rounded)


@needs_dots
@pytest.mark.parametrize("kind", ["linear", "attention", "encoder", "calls"])
def test_compiled(kind):
    model, x = made(kind)
    onepass.swap(model, precision="medium")
    expected = gradients(model, x)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    x = x.clone().requires_grad_()
    found = torch.autograd.grad(compiled(model, x).square().sum(), (x, *model.parameters()))
    assert all(map(torch.equal, found, expected))


@needs_dots
def test_a_change_compiles_again():
    model, x = made("calls")
    onepass.swap(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = []
    for precision in ("highest", "medium", "highest"):
        onepass.swap(model, precision=precision)
        found.append(compiled(x))
        assert torch.equal(found[-1], model(x))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


@needs_dots
@pytest.mark.parametrize("kind", ["linear", "attention", "encoder", "calls"])
def test_verify_tells_the_distance_from_float32(kind):
    model, x = made(kind)
    report = onepass.swap(model, precision="medium")
    batch = (x, x, x) if kind == "attention" else (x,)
    named = dict(need_weights=False) if kind == "attention" else {}
    found = report.verify(*batch, **named)
    assert found.ok, found
    rounding = found.rounding
    assert 0 < rounding.median <= rounding.largest < 0.1
    assert found.to_dict()["rounding"]["name"] == rounding.name
    verdict, second = str(found).split("\n")
    assert verdict.startswith("same") and "rounded to bfloat16" in second
    assert "medium" in {vars(m).get(policy.ATTRIBUTE) for m in model.modules()}
    onepass.unswap(model)
    assert onepass.swap(model).verify(*batch, **named).rounding is None


@needs_dots
def test_explain_names_the_rounding():
    model, x = made("linear")
    onepass.swap(model, precision="medium")
    calls = explain(model, x).calls
    assert len(calls) == 2 and all("rounded" in call["reason"] for call in calls)


@pytest.mark.parametrize(
    "own, has_dots, expected",
    [
        ("medium", True, "round float32 factors"),
        ("medium", False, "changes nothing"),
        ("high", True, "is float32 on a CPU"),
        ("highest", True, ""),
        (None, True, ""),
    ],
)
def test_explain_says_what_was_asked(monkeypatch, own, has_dots, expected):
    model, x = made("linear")
    onepass.swap(model, precision=own)
    monkeypatch.setattr(policy, "HAS_PAIR_PRODUCTS", has_dots)
    explanation = explain(model, x)
    assert expected in explanation.precision and bool(expected) == bool(explanation.precision)
    assert explanation.precision in str(explanation).replace("\n", " ")
    with global_precision("high"):
        assert own is not None or "precision high" in explain(model, x).precision


@needs_dots
def test_a_sample_measures_it():
    model, x = made("linear")
    report = onepass.swap(model, precision="medium", sample=x)
    assert {policy.ATTRIBUTE in vars(m) for m in model} == {bool(report.swapped), False}


def test_the_report_says_it(monkeypatch):
    model, _ = made("linear")
    monkeypatch.setattr(policy, "HAS_PAIR_PRODUCTS", True)
    report = onepass.swap(model, precision="medium", dry_run=True)
    assert not any(policy.ATTRIBUTE in vars(module) for module in model.modules())
    note = note_of(report, "medium")
    assert "2 modules" in note and "rounded to bfloat16" in note
    monkeypatch.setattr(policy, "HAS_PAIR_PRODUCTS", False)
    report = onepass.swap(model, precision="medium")
    note = note_of(report, "medium")
    assert "changes nothing on this CPU" in note


@needs_dots
def test_it_takes_layers_whose_float32_products_are_as_fast_in_torch(monkeypatch):
    """On a CPU of Intel's with dot products, for one."""
    set_facts(monkeypatch, FAST._replace(bfloat16=True))
    model, _ = made("linear")
    assert not onepass.swap(model, kinds="linear", dry_run=True).swapped
    assert len(onepass.swap(model, kinds="linear", precision="medium").swapped) == 2


def test_other_precisions_are_refused():
    with pytest.raises(ValueError, match="^swap: precision must be None, 'highest', 'high', 'm"):
        onepass.swap(nn.Linear(8, 8), precision="int4")


class Tied(nn.Module):
    """A head with the embedding's weight, before the last linear layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(600, 64)
        self.blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        self.head = nn.Linear(64, 600, bias=False)
        self.head.weight = self.embedding.weight
        self.value = nn.Linear(64, 600)

    def forward(self, x):
        y = self.blocks(x)
        return self.head(y) + self.value(y)


def quantized(model):
    return [n for n, m in model.named_modules() if vars(m).get(policy.ATTRIBUTE) == "int8"]


def tied():
    torch.manual_seed(0)
    return Tied(), torch.randn(4, 160, 64)


def test_int8_leaves_the_first_the_last_and_tied_layers():
    model, x = tied()
    stock = run(model, x)
    report = onepass.swap(model, precision="int8")
    assert quantized(model) == ["blocks.1", "blocks.2"]
    note = note_of(report, "int8")
    assert "2 modules" in note and "output and dinput" in note
    assert "leaves in float32: 'blocks.0', 'head', 'value';" in left_in(report)
    assert vars(model.head)[policy.ATTRIBUTE] == "highest"
    assert 1e-4 < distance(run(model, x), stock) < 0.03
    onepass.swap(model, precision="int8", include="*")
    assert len(quantized(model)) == 5
    onepass.swap(model, precision="int8", include="blocks.*", exclude="blocks.1")
    onepass.unswap(model)
    assert torch.equal(run(model, x), stock) and not quantized(model)
    onepass.swap(model, precision="int8", include="blocks.*", exclude="blocks.1")
    assert quantized(model) == ["blocks.0", "blocks.2"]


def test_int8_counts_layers_that_are_modules_of_their_own():
    """A model that multiplies by its embedding's weight comes before its layers."""

    class Calls(Tied):
        def forward(self, x):
            return F.linear(self.blocks(x), self.embedding.weight)

    model = Calls()
    del model.head, model.value
    report = onepass.swap(model, precision="int8")
    assert quantized(model) == ["blocks.1"]
    assert "leaves in float32: 'Calls', 'blocks.0', 'blocks.2';" in left_in(report)


@pytest.mark.parametrize(
    "make, options",
    [
        (lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), {}),
        (lambda: nn.Linear(64, 64), {}),
        (lambda: tied()[0], {"kinds": "norm"}),
        (lambda: tied()[0].double(), {}),
    ],
    ids=["ends", "one", "norms", "float64"],
)
def test_int8_says_that_it_changes_nothing(make, options):
    model = make()
    report = onepass.swap(model, precision="int8", **options)
    note = note_of(report, "int8")
    assert "changes nothing: no swapped linear layer" in note and "''" not in left_in(report)


def test_int8_quantises_swapped_linear_layers_alone():
    model, x = tied()
    onepass.swap(model, kinds="norm", precision="int8")
    assert not quantized(model)
    onepass.swap(model, precision="int8")
    left, blocks = model.blocks[0](x), model.blocks
    expected = left
    for block in blocks[1:]:
        expected = functional.linear(expected, block.weight, block.bias, precision="int8")
    assert torch.equal(blocks(x), expected)
    exact = left
    for block in blocks[1:]:
        exact = functional.linear(exact, block.weight, block.bias, precision="highest")
    assert not torch.equal(expected, exact)
    attention, x = made("attention")
    exact = onepass.swap(attention) and run(attention, x)
    onepass.swap(attention, precision="int8", include="*")
    found = run(attention, x)
    assert 1e-4 < distance(found, exact) < 0.03


@pytest.mark.parametrize("precision", ["int8", "int8:output+dinput+dweight+stochastic"])
def test_int8_is_kept_compiled_and_verified(precision):
    model, x = tied()
    report = onepass.swap(model, precision=precision)
    found = report.verify(x)
    assert found.ok and 1e-4 < found.rounding.median < 0.1
    assert "quantised to 8 bits: loss" in str(found).split("\n")[1]
    if policy.HAS_PAIR_PRODUCTS:
        vars(model.blocks[0])[policy.ATTRIBUTE] = "medium"
        second = str(report.verify(x)).split("\n")[1]
        assert "quantised to 8 bits and rounded to bfloat16: loss" in second
    torch.manual_seed(0)
    expected = gradients(model, x)
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    assert all(map(torch.equal, gradients(twin, x), expected))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    explanation = explain(model, x)
    reasons = [call["reason"] for call in explanation.calls if call["op"] == "linear"]
    assert sum("quantised" in reason for reason in reasons) == 1  # of two equal calls
    assert "precision int8" in explanation.precision


def test_int8_says_where_it_is_slow(monkeypatch):
    for module in ("onepass._policy.precision", "onepass.swapping.notes"):
        monkeypatch.setattr(f"{module}.HAS_BYTE_PRODUCTS", False)
    model, x = tied()
    report = onepass.swap(model, precision="int8")
    note = note_of(report, "int8")
    assert "has no VNNI" in note
    assert "without VNNI" in explain(model, x).precision


# ---- a second call, and a choice, which holds the precision --------------------------------------

ENDS = dict.fromkeys(("blocks.0", "head", "value"), "highest")


def own_precisions(model):
    found = {name: vars(m).get(policy.ATTRIBUTE) for name, m in model.named_modules()}
    return {name: precision for name, precision in found.items() if precision}


def through_json(report):
    return json.loads(json.dumps(report.choice))


def kept_in(report):
    return [note for note in report.notes if "of an earlier call stays in" in note]


def test_a_plain_second_call_keeps_it():
    model, _ = tied()
    first = onepass.swap(model, precision="int8")
    before = own_precisions(model)
    assert not kept_in(first) and len(before) == 5
    second = onepass.swap(model)
    assert own_precisions(model) == before
    assert [note.partition(";")[0] for note in kept_in(second)] == [
        "precision='highest' of an earlier call stays in 3 modules",
        "precision='int8' of an earlier call stays in 2 modules",
    ]
    assert second.choice == first.choice
    third = onepass.swap(model, precision="medium", include="head")
    assert own_precisions(model) == before | {"head": "medium"} and len(kept_in(third)) == 2


@pytest.mark.parametrize(
    "precision, options, differing",
    [
        (None, {}, {}),
        ("highest", {}, {}),
        ("medium", {}, {}),
        ("int8", {}, ENDS),
        ("int8:dinput+stochastic", {"include": "*"}, {}),
    ],
)
def test_a_choice_holds_the_precision(monkeypatch, precision, options, differing):
    """Also of layers that another CPU would leave to torch, and without the options again."""
    if precision == "medium":
        monkeypatch.setattr(policy, "HAS_PAIR_PRODUCTS", True)
    model, _ = tied()
    report = onepass.swap(model, precision=precision, dry_run=True, **options)
    choice = through_json(report)
    assert not own_precisions(model)
    assert (choice["precision"], choice["precisions"]) == (precision, differing)
    onepass.swap(model, precision=precision, **options)
    if policy.changes_factors(precision):
        set_facts(monkeypatch, FAST._replace(bfloat16=False))
    for given in (None, precision):
        twin, _ = tied()
        again = onepass.swap(twin, choice=choice, precision=given)
        assert own_precisions(twin) == own_precisions(model)
        assert again.choice == report.choice and again.notes == report.notes
    assert any(f"precision={precision!r}" in note for note in again.notes) is bool(precision)


def test_a_choice_of_several_precisions():
    model, x = tied()
    onepass.swap(model, precision="int8", include="blocks.*")
    report = onepass.swap(model, precision="medium", include="head")
    assert report.choice["precision"] == "medium"
    report = onepass.swap(model)
    choice = through_json(report)
    assert choice["precision"] == "int8" and choice["precisions"] == {
        "head": "medium",
        "value": None,
    }
    twin, _ = tied()
    again = onepass.swap(twin, choice=choice)
    assert own_precisions(twin) == own_precisions(model) and torch.equal(
        run(twin, x), run(model, x)
    )
    assert "3 modules with linear layers" in note_of(again, "int8") and not left_in(again)


@pytest.mark.parametrize(
    "stored, asked", [("int8", "medium"), ("int8", "int8:output"), (None, "int8")]
)
def test_another_precision_than_that_of_the_choice_is_refused(stored, asked):
    choice = onepass.swap(tied()[0], precision=stored).choice
    model, _ = tied()
    wrong = f"^swap: precision must be {stored!r} beside this choice, got {asked!r}$"
    with pytest.raises(ValueError, match=wrong):
        onepass.swap(model, choice=choice, precision=asked)
    assert not any(isinstance(m, Swapped) for m in model.modules()) and not own_precisions(model)


def test_a_choice_replaces_what_an_earlier_call_gave():
    choice = through_json(onepass.swap(tied()[0]))
    model, _ = tied()
    onepass.swap(model, precision="int8")
    with onepass.swapped(model, choice=choice) as report:
        assert not own_precisions(model) and not kept_in(report)
    assert len(own_precisions(model)) == 5
    onepass.swap(model, choice=choice)
    assert not own_precisions(model)


def test_an_older_choice_does_not_hold_it():
    choice = through_json(onepass.swap(tied()[0], precision="int8"))
    older = {name: choice[name] for name in ("swapped", "left_out", "notes")}
    for asked, expected in ((None, []), ("int8", ["blocks.1", "blocks.2"])):
        model, _ = tied()
        onepass.swap(model, choice=older, precision=asked)
        assert quantized(model) == expected
    assert sample.Decision.from_dict(older).to_dict() == older


def test_a_choice_with_other_precisions_is_refused():
    choice = onepass.swap(tied()[0], precision="int8").choice
    with pytest.raises(TypeError, match="^swap: choice must be a report's choice, got dict of"):
        onepass.swap(tied()[0], choice=choice | {"precisions": None})
    for wrong in ({"precision": "int4"}, {"precisions": {"head": "int4"}}):
        with pytest.raises(ValueError, match="^swap: precision must be None, .* got 'int4'$"):
            onepass.swap(tied()[0], choice=choice | wrong)


@pytest.fixture
def int8_gains(monkeypatch):
    """Calls of layers at "int8" gain, and others do not; returns their precisions, as measured."""
    seen = []

    def of_calls(self, unit, seconds):
        seen.append(policy.precision_of(unit.changes[0].module))
        gains = seen[-1] == "int8"
        return timing({sample.STOCK: [1.0] * 5, sample.SWAPPED: [0.5 if gains else 2.0] * 5})

    def timed(self, functions, seconds):
        return timing({n: [1.0 if n == sample.STOCK else 0.5] * 5 for n in functions})

    monkeypatch.setattr(sample._Measurement, "_of_calls", of_calls)
    monkeypatch.setattr(sample._Measurement, "_timed", timed)
    measure_little(monkeypatch)
    return seen


def test_layers_of_two_precisions_are_measured_apart(int8_gains):
    """Though they have one shape."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(8, 64, requires_grad=True)  # as the inputs of the other layers
    report = onepass.swap(model, kinds="linear", precision="int8", sample=x)
    assert sorted(int8_gains) == ["highest", "int8"]
    assert [entry["name"] for entry in report.swapped] == ["1", "2"]
    assert own_precisions(model) == {"1": "int8", "2": "int8"}
    assert report.notes[0].startswith("measured on the sample at precision='int8', forward")
    twin = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    again = onepass.swap(twin, kinds="linear", choice=through_json(report))
    assert own_precisions(twin) == own_precisions(model) and again.notes == report.notes


class Projects(nn.Module):
    """Calls F.linear with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return F.linear(x, self.weight)


def test_what_is_left_out_does_not_change_what_was_measured(int8_gains):
    """Without the last module, the one before it would be the last that could be swapped."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), Projects())
    report = onepass.swap(model, kinds="linear", precision="int8", sample=torch.randn(8, 64))
    assert own_precisions(model) == {"1": "int8", "2": "int8"} and not left_in(report)


def test_a_sample_is_measured_at_an_earlier_precision_and_its_choice_holds_it(int8_gains):
    model = nn.Sequential(nn.LayerNorm(64), *(nn.Linear(64, 64) for _ in range(3)))
    onepass.swap(model, kinds="linear", precision="int8")
    report = onepass.swap(model, sample=torch.randn(8, 64))
    assert report.choice["precision"] == "int8"
    assert report.choice["precisions"] == {"1": "highest", "3": "highest"}
