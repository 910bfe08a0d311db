"""attach: the loss of models of transformers, with and without their logits."""

import copy
import pickle

import pytest
import torch
from torch import nn

import onepass
import onepass.integrations.transformers as integration
from onepass._policy import small_calls
from onepass.integrations.transformers import losses, models
from onepass.swapping.reasons import Reason
from tests.support import fresh
from tests.support.pairs import halved
from tests.swap.lazy_logits_cases import (
    VOCABULARY,
    assert_same,
    count,
    labelled,
    make,
    transformers,
    waits,
)
from tests.swap.reported import types

MODELS = ("GPT2", "Llama")
TO = {False: "cross_entropy", True: "linear_cross_entropy"}


@pytest.fixture(autouse=True)
def every_call_gains(swapped_run_ours, monkeypatch):
    monkeypatch.setattr(small_calls, "LEAST_LOSS_CALLS", 0)
    monkeypatch.setattr(small_calls, "CHUNK_OF_WORD", 0)


def losses_of(report: models.Attachment) -> list[dict[str, str]]:
    return [entry for entry in report.attached if entry["kind"] == "loss"]


# ---- the loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lazy", "dtype"), halved(MODELS, (False, True), (torch.float32, torch.bfloat16))
)
def test_the_loss_and_its_gradients(name, lazy, dtype, tmp_path):
    stock, batch = make(name).to(dtype), labelled()
    model = copy.deepcopy(stock)
    report = integration.attach(model, lazy_logits=lazy, strict=True)
    (entry,) = losses_of(report)
    assert entry["name"] == "" and entry["type"].endswith(type(stock).__name__)
    assert entry["before"] == "ForCausalLMLoss" and entry["to"] == TO[lazy]
    assert any("computed when they are read" in note for note in report.notes) is lazy
    assert model.loss_function is losses.causal_lm_loss
    output = model(**batch)
    assert waits(output.logits) is lazy and type(output).__name__ == type(stock(**batch)).__name__
    assert count(lambda: model(**batch)) == 1
    assert_same(model, stock, {**batch, "num_items_in_batch": torch.tensor(7)})
    twin = pickle.loads(pickle.dumps(model))
    assert waits(twin(**batch).logits) is lazy and models.is_attached(twin)
    model.save_pretrained(tmp_path)
    assert type(type(stock).from_pretrained(tmp_path)) is type(stock)
    assert integration.detach(twin)[0] == "" and type(twin) is type(stock)
    assert torch.equal(twin(**batch).loss, stock(**batch).loss) and models.is_attached(model)


def test_verify_compares_with_the_loss_from_before(monkeypatch):
    model = make()
    report = integration.attach(model, kinds="loss")
    batch = labelled()
    assert report.verify(batch).ok and type(model).loss_function is not make().loss_function
    ours = losses.cross_entropy_in_float32
    monkeypatch.setattr(losses, "cross_entropy_in_float32", lambda *a: ours(*a) * 1.001)
    assert not report.verify(batch).ok
    integration.detach(model)
    with pytest.raises(RuntimeError, match="verify: model must be attached still"):
        report.verify(batch)


def test_a_pickled_model_loads_in_another_process(tmp_path):
    model, batch = make(), labelled()
    integration.attach(model, lazy_logits=True)
    torch.save((model, batch, model(**batch).loss.item()), tmp_path / "model.pt")
    code = f"""
import sys, torch
model, batch, loss = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
assert abs(model(**batch).loss.item() - loss) < 1e-4
import onepass.integrations.transformers as integration
assert integration.detach(model)[0] == ""
assert type(model).__mro__[0].__module__.startswith("transformers.models.llama")
assert not hasattr(model, "_onepass_original")
assert "transformers.trainer_callback" not in sys.modules  # it takes a second
"""
    fresh.run(code, check=True)


# ---- attach, detach, swap, unswap ----------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["attention", "loss", ("attention", "loss"), {"attention"}])
def test_kinds_and_back(kinds):
    model = make()
    before = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
    report = integration.attach(model, kinds=kinds, strict=True)
    assert {entry["kind"] for entry in report.attached} == set(
        (kinds,) if isinstance(kinds, str) else kinds
    )
    assert models.is_attached(model) is ("attention" in kinds)
    assert (type(model) is type(make())) is ("loss" not in kinds)
    assert integration.detach(model)[0] == ""
    assert before == [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
    assert integration.detach(model) == []


@pytest.mark.parametrize(
    "options, error, text",
    [
        (dict(kinds="norm"), ValueError, "kinds must be of"),
        (dict(kinds=()), ValueError, "kinds must be of"),
        (dict(kinds=3), TypeError, "kinds must hold names, got int"),
        (dict(kinds=([],)), ValueError, "kinds must be of"),
        (dict(kinds="attention", lazy_logits=True), ValueError, "must hold 'loss'"),
        (dict(lazy_logits=1), TypeError, "lazy_logits must be True or False, got int"),
    ],
)
def test_options_of_a_wrong_value(options, error, text):
    with pytest.raises(error, match=f"attach: .*{text}"):
        integration.attach(make(), **options)


@pytest.mark.parametrize("swap_first", [False, True])
def test_unswap_leaves_the_attached_loss(swap_first):
    model, stock, batch = make(), make(), labelled()
    calls = [
        lambda: integration.attach(model, lazy_logits=True),
        lambda: onepass.swap(model, lazy_logits=True),
    ]
    for call in reversed(calls) if swap_first else calls:
        call()
    again = onepass.swap(model, lazy_logits=True)
    assert any("since an earlier attach" in note for note in again.notes)
    assert again.verify(batch).ok and not again.skipped
    attached = copy.deepcopy(stock)
    integration.attach(attached, lazy_logits=True)
    onepass.unswap(model)
    assert types(model) == types(attached) and waits(model(**batch).logits)
    assert onepass.unswap(model) == []
    assert integration.detach(model)[0] == "" and types(model) == types(stock)
    assert [sorted(vars(m)) for m in model.modules()] == [sorted(vars(m)) for m in stock.modules()]


def test_detach_leaves_the_loss_of_an_earlier_swap():
    model = make()
    onepass.swap(model, kinds="loss")
    swapped = type(model)
    integration.attach(model)
    assert integration.detach(model)[0] == "" and type(model) is swapped
    assert onepass.unswap(model) == [""] and types(model) == types(make())


def test_lazy_logits_after_a_loss_with_logits():
    model = make()
    integration.attach(model)
    (entry,) = integration.attach(model, lazy_logits=True).skipped
    assert entry["reason"].kind is Reason.LOGITS_BEFORE
    integration.detach(model)
    assert not integration.attach(model, lazy_logits=True).skipped
    assert waits(model(**labelled()).logits)


def test_losses_outside_of_models_of_transformers_stay():
    model = nn.ModuleDict({"model": make(), "loss": nn.CrossEntropyLoss()})
    report = integration.attach(model)
    assert [entry["name"] for entry in losses_of(report)] == ["model"] and not report.skipped
    assert type(model["loss"]) is nn.CrossEntropyLoss
    assert integration.detach(model)[0] == "model"


def test_compiled_models_keep_their_loss():
    model = torch.compile(make(), backend="eager")
    report = integration.attach(model)
    assert [e["kind"] for e in report.attached] == ["attention"]
    assert report.skipped[0]["reason"].kind is Reason.IN_COMPILED
    assert not any("nothing in this model" in note for note in report.notes)
    assert integration.detach(model)[0] == "_orig_mod"


def test_classes_that_changed_since_stay():
    """As fully_shard makes them: unswap has nothing to undo, and detach refuses."""
    model = make()
    integration.attach(model, kinds="loss")
    changed = type("Changed", (type(model),), {})
    model.__class__ = changed
    assert onepass.unswap(model) == []
    with pytest.raises(RuntimeError, match="detach: model must have the classes that attach gave"):
        integration.detach(model)
    assert type(model) is changed


def test_the_report_names_the_loss_that_a_forward_calls():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2
    )
    (entry,) = losses_of(integration.attach(transformers.T5ForConditionalGeneration(config)))
    assert entry["before"] == "cross_entropy"  # not its loss_function, which it does not call
