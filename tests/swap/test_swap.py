"""swap, unswap, swapped: changes in a model, unchanged parts, the options, and modules that the
user vouches for by force."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import onepass
from onepass.swapping import plan
from tests.support import fresh
from tests.swap.foreign_norms import RMS, Counting, Max, OnePlusRMS
from tests.swap.reported import names, types
from tests.swap.test_kept import OwnBlock, OwnMultihead, SpatialDropout
from tests.swap.test_norm_constants import NormOfItsClass

pytestmark = pytest.mark.usefixtures("probed_once")


class NamedLayerNorm(nn.LayerNorm):
    """A subclass that inherits forward."""


class Block(nn.Module):
    def __init__(self, width: int = 16, p: float = 0.1):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.RMSNorm(width)
        self.norm3 = RMS(width)
        self.mlp = nn.Linear(width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.mlp(self.norm1(x) + self.norm2(x) + self.norm3(x)))


class Model(nn.Module):
    def __init__(self, layers: int = 2, width: int = 16):
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.final = NamedLayerNorm(width)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.final(x)


NORMS = {f"layers.{i}.norm{j}" for i in (0, 1) for j in (1, 2, 3)} | {"final"}
DROPOUTS = {"layers.0.drop", "layers.1.drop"}


# ---------------------------------------------------------------- unchanged parts


def test_dropout_drops_and_keeps_its_inplace_flag():
    model = nn.Sequential(nn.Dropout(0.25, inplace=True), nn.Dropout(0.25))
    onepass.swap(model)
    x = torch.ones(100, 100)
    kept = model[1](x)
    assert abs((kept == 0).float().mean().item() - 0.25) < 0.03
    assert torch.equal(kept.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert model[0](x) is x and (x == 0).any()
    assert model.eval()(x) is x


def test_shared_modules_are_swapped_once_and_stay_shared(torchs_products):
    norm = nn.LayerNorm(8)
    model = nn.Sequential(norm, nn.Linear(8, 8), norm)
    report = onepass.swap(model)
    assert [entry["name"] for entry in report.swapped] == ["0"]
    assert model[0] is model[2] is norm
    assert onepass.unswap(model) == ["0"] and type(norm) is nn.LayerNorm


def test_swap_leaves_random_state_and_gradients_alone(torchs_products):
    model = Model()
    model(torch.randn(2, 16)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    hooked = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: hooked.append(1))
    state = torch.get_rng_state()
    # Nor does the mode that holds outside matter. What is foreign is proven anew.
    with torch.inference_mode(), plan.verdicts_shared():
        report = onepass.swap(model)
    assert names(report.swapped) == NORMS | DROPOUTS
    assert torch.equal(torch.get_rng_state(), state) and not hooked
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


class WithReduce(RMS):
    def __reduce__(self):
        return type(self), (self.weight.shape[0],), {"weight": self.weight}

    def __setstate__(self, state):
        self.weight = state["weight"]


def test_pickle_of_a_class_with_its_own_reduce():
    norm = WithReduce(8)
    nn.init.normal_(norm.weight)
    onepass.swap(norm)
    twin = pickle.loads(pickle.dumps(norm))
    assert type(twin) is type(norm) and torch.equal(twin.weight, norm.weight)


def test_saved_model_loads_in_a_fresh_process(tmp_path):
    model = nn.Sequential(
        nn.LayerNorm(8), RMS(8), OnePlusRMS(8), NamedLayerNorm(8), nn.Dropout(0.1)
    ).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    onepass.swap(model)
    x = torch.randn(1 << 16, 8)  # enough for ours: small layer norms run torch's
    torch.save({"model": model, "x": x, "y": model(x)}, tmp_path / "model.pt")
    code = (
        f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "torch.set_num_threads(1)\n"
        "saved = torch.load(sys.argv[1], weights_only=False)\n"
        "model = saved['model']; assert torch.equal(model(saved['x']), saved['y'])\n"
        "import onepass; print(len(onepass.unswap(model)), [type(m).__name__ for m in model])"
    )
    done = fresh.run(code, tmp_path / "model.pt", check=True)
    expected = ["LayerNorm", "RMS", "OnePlusRMS", "NamedLayerNorm", "Dropout"]
    assert done.stdout.strip() == f"5 {expected}"


def test_replica_as_data_parallel_makes_it():
    model = Model().eval()
    onepass.swap(model)
    norm = model.layers[0].norm3
    replica = norm._replicate_for_data_parallel()
    replica._parameters = {"weight": nn.Parameter(2 * norm.weight.detach())}
    x = torch.randn(3, 16)
    torch.testing.assert_close(replica(x), 2 * norm(x))


# ---------------------------------------------------------------- undoing


def test_unswap_leaves_native_onepass_modules_alone():
    model = nn.Sequential(onepass.nn.LayerNorm(8), nn.LayerNorm(8), onepass.nn.Dropout(0.1))
    report = onepass.swap(model)
    assert names(report.swapped) == {"1"} and not report.skipped and not report.unknown
    assert onepass.unswap(model) == ["1"] and type(model[0]) is onepass.nn.LayerNorm


def test_context_manager_restores_what_was_there_before_it():
    """Earlier swaps too, also after exceptions, and what was unswapped inside."""
    model = Model()
    stock = types(model)
    onepass.swap(model, kinds="dropout")
    before = types(model)
    with onepass.swapped(model, kinds="norm") as report:
        assert names(report.swapped) == NORMS and types(model) != before
    assert types(model) == before
    with pytest.raises(KeyError), onepass.swapped(model):
        assert types(model) != before
        raise KeyError
    assert types(model) == before
    with onepass.swapped(model):
        onepass.unswap(model)
    assert types(model) == stock


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kinds": ("norm",)}, NORMS),
        ({"kinds": "dropout"}, DROPOUTS),
        ({"include": "layers.0.*"}, {n for n in NORMS | DROPOUTS if n.startswith("layers.0.")}),
        ({"include": ["final", "*.drop"]}, {"final"} | DROPOUTS),
        ({"include": "layers.*", "exclude": "*.norm?"}, DROPOUTS),
        ({"exclude": ["final", "layers.1.*"]}, {n for n in NORMS | DROPOUTS if "s.0" in n}),
        ({"filter_fn": lambda module, name: isinstance(module, nn.RMSNorm)},
         {"layers.0.norm2", "layers.1.norm2"}),
        ({"probe": False}, (NORMS | DROPOUTS) - {"layers.0.norm3", "layers.1.norm3"}),
    ],
    ids=["kinds", "kind as text", "include", "includes", "exclude wins", "excludes", "filter_fn",
         "no probe"],
)  # fmt: skip
def test_options_choose(options, expected, torchs_products):
    model = Model()
    report = onepass.swap(model, **options)
    assert names(report.swapped) == expected
    changed = {
        name for name, module in model.named_modules() if hasattr(type(module), "_onepass_original")
    }
    assert changed == expected


def test_options_are_reasons_in_the_report_and_filter_fn_is_asked_last(torchs_products):
    asked = []
    report = onepass.swap(
        Model(),
        include="layers.*",
        exclude="*.drop",
        filter_fn=lambda module, name: asked.append(name) or "norm1" not in name,
    )
    reasons = {entry["name"]: entry["reason"] for entry in report.skipped}
    assert reasons["final"] == "not in include"
    assert reasons["layers.0.drop"] == "excluded by '*.drop'"
    assert reasons["layers.1.norm1"] == "filter_fn returned False"
    assert set(asked) == NORMS - {"final"}


def test_globs_see_every_name_of_a_shared_module_and_are_noted_without_a_match():
    norm = nn.LayerNorm(8)
    model = nn.ModuleDict({"first": norm, "second": norm})
    assert names(onepass.swap(model, include="second").swapped) == {"first"}
    onepass.unswap(model)
    report = onepass.swap(model, exclude=["layer.*", "second"])
    assert not report.swapped
    assert "exclude pattern 'layer.*' matches no module" in report.notes
    assert not any("'second'" in note for note in report.notes)


def test_dry_run_changes_nothing_and_says_the_same(torchs_products):
    model = Model()
    before = types(model)
    dry = onepass.swap(model, dry_run=True)
    assert types(model) == before and "would swap 9" in str(dry)
    assert dry.to_dict() == onepass.swap(model).to_dict()
    with pytest.raises(RuntimeError, match="verify: the report must come from a swap, got a dry"):
        dry.verify(torch.randn(2, 16))


def test_strict_raises_on_a_refused_candidate():
    model = nn.Sequential(nn.LayerNorm(8), Max(8), nn.BatchNorm1d(8))
    before = types(model)
    with pytest.raises(RuntimeError, match=r"swap: model must hold no refused .*'1' \(Max\).*'2'"):
        onepass.swap(model, strict=True)
    assert types(model) == before
    report = onepass.swap(model, strict=True, exclude=["1", "2"])
    assert names(report.swapped) == {"0"} and names(report.skipped) == {"1", "2"}


class SlidingAttention(nn.Module):
    def forward(self, x):
        return x


def test_strict_raises_on_an_explicit_kind_without_a_match():
    model = nn.Sequential(nn.LayerNorm(8), SlidingAttention())
    with pytest.raises(RuntimeError, match="got no match for 'dropout'"):
        onepass.swap(model, kinds=("norm", "dropout"), strict=True)
    with pytest.raises(RuntimeError, match="got no match for 'attention'"):
        onepass.swap(model, kinds="attention", strict=True)
    assert type(model[0]) is nn.LayerNorm
    assert names(onepass.swap(model, strict=True).swapped) == {"0"}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: onepass.swap([]), TypeError, "swap: model must be a torch.nn.Module, got list"),
        (lambda: onepass.unswap(3), TypeError, "unswap: model must be a torch.nn.Module, got int"),
        (lambda: onepass.swap(Model(), kinds=("norms",)), ValueError, "kinds must be of .*'norms'"),
        (lambda: onepass.swap(Model(), include=[3]), TypeError, "include must hold globs, got 3"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---------------------------------------------------------------- refused


def test_devices_without_kernels_are_refused(monkeypatch):
    has_kernels = onepass.swapping.matchers.has_kernels
    assert has_kernels("cpu") and has_kernels("meta") and has_kernels("cpu", "attention")
    assert not has_kernels("mps", "attention") and not has_kernels("no such device")
    monkeypatch.setattr(onepass.swapping.matchers, "has_kernels", lambda device, kind: False)
    (entry,) = onepass.swap(nn.LayerNorm(8)).skipped
    assert entry["reason"] == "onepass has no kernels for its device, cpu, in this build"


def test_parametrizing_after_the_swap_forbids_unswap():
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    onepass.swap(model)
    nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    before = types(model)
    with pytest.raises(RuntimeError, match="got '1', whose class became ParametrizedLayerNorm"):
        onepass.unswap(model)
    assert types(model) == before
    (entry,) = onepass.swap(model).skipped
    assert entry["name"] == "1" and entry["reason"] == "its class was changed after a swap"


# ---------------------------------------------------------------- by force


class Doubled(RMS):
    def forward(self, x):
        return 2.0 * super().forward(x)


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


def test_what_the_probe_accepts_is_forced_without_a_probe_alone():
    model = nn.Sequential(RMS(16), RMS(16))
    assert [e["to"] for e in onepass.swap(model, force="*").swapped] == ["onepass rms_norm"] * 2
    onepass.unswap(model)
    report = onepass.swap(model, force="0", probe=False)
    assert names(report.swapped) == {"0"} and "forced" in report.swapped[0]["to"]
    assert report.verify(torch.randn(3, 16)).ok


@pytest.mark.parametrize(
    ("module", "listed", "to"),
    [
        (lambda: SpatialDropout(0.1), "skipped", "onepass.nn.Dropout"),
        (lambda: OwnMultihead(8, 2), "unknown", "onepass.nn.MultiheadAttention"),
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
    frozen = SpatialDropout(0.1)
    frozen.forward = frozen.forward
    norms = {"batch": nn.BatchNorm1d(4), "constant": NormOfItsClass(bias=False)}
    model = nn.ModuleDict({**norms, "frozen": frozen, "drop": nn.Dropout2d()})
    report = onepass.swap(model, force="*")
    reasons = {entry["name"]: entry["reason"] for entry in report.skipped}
    assert set(reasons) == {*norms, "frozen"} and names(report.unknown) == {"drop"}
    assert all(reason.endswith("; force does not change that") for reason in reasons.values())
    assert reasons["frozen"].startswith("its forward is replaced on the instance")
    assert not any(": forced" in note for note in report.notes)
    with pytest.raises(RuntimeError, match="force does not change that"):
        onepass.swap(model, force="*", strict=True)


def test_exclude_wins_and_globs_without_a_match_are_noted():
    model = nn.ModuleDict({"it": SpatialDropout(0.1)})
    report = onepass.swap(model, force=["it", "that"], exclude="it")
    assert report.skipped[0]["reason"] == "excluded by 'it'" and not report.swapped
    assert "force pattern 'that' matches no module" in report.notes
    with pytest.raises(TypeError, match="force must hold globs, got 3"):
        onepass.swap(model, force=[3])
