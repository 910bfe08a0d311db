"""Report.verify passes equal models, finds differences, and leaves no trace."""

from __future__ import annotations

import copy
import json
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import onepass
from onepass.swapping import classes
from tests.swap.foreign_norms import OnePlusRMS


class Model(nn.Module):
    def __init__(self, width: int = 24, p: float = 0.3):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.norm = nn.LayerNorm(width)
        self.foreign = OnePlusRMS(width)
        self.mlp = nn.Linear(width, width)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(width, 11)

    def forward(self, ids, labels=None):
        x = self.embedding(ids)
        x = x + self.drop(self.mlp(self.norm(x)))
        logits = self.head(self.foreign(x))
        if labels is None:
            return logits
        return {
            "logits": logits,
            "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        }


IDS = torch.arange(24).reshape(2, 12) % 11


def broken(monkeypatch, cls, factor: float):
    """Makes one swapped class wrong by a factor."""
    right = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: factor * right(self, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same(dtype, judged):
    model = Model().to(dtype)
    report = onepass.swap(model)
    result = report.verify({"ids": IDS, "labels": IDS})
    assert result.ok and result.judged == judged
    assert {deviation.name for deviation in result.deviations} == {"output", "output 1"} | {
        f"gradient of {name}" for name, _ in model.named_parameters()
    }
    assert str(result).startswith("same: loss ") and result.worst in str(result)
    assert "\n" not in str(result)
    assert "pre-wrap" in result._repr_html_() and result.worst in result._repr_html_()


@pytest.mark.parametrize("cls", [classes.LayerNormForward, classes.ForeignNormForward])
def test_different(monkeypatch, cls, judged):
    report = onepass.swap(Model())
    broken(monkeypatch, cls, 1.0001)
    result = report.verify(IDS, loss_fn=lambda logits: logits.square().mean())
    assert not result.ok and str(result).startswith("DIFFERENT: loss ")
    assert result.deviations[0].error > result.deviations[0].allowed


def test_wrong_gradient_is_found_by_name():
    model = Model()
    report = onepass.swap(model)

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.clone()

        @staticmethod
        def backward(ctx, dweight):
            return 1.001 * dweight

    cls = type(model.norm)
    right = cls.forward

    def forward(self, x):
        y = onepass.functional.layer_norm(x, (24,), Wrong.apply(self.weight), self.bias, self.eps)
        return y if self is model.norm else right(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "forward", forward)
        result = report.verify(IDS)
    assert not result.ok and result.worst == "gradient of norm.weight"
    assert "gradient of norm.weight" in str(result)
    assert report.verify(IDS).ok


@pytest.mark.parametrize("change", [torch.Tensor.detach, lambda y: y[..., :1]])
def test_a_lost_graph_and_another_shape_are_differences(monkeypatch, change):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(x)

    report = onepass.swap(Last())
    right = classes.LayerNormForward.forward
    wrong = lambda self, x: change(right(self, x))  # noqa: E731
    monkeypatch.setattr(classes.LayerNormForward, "forward", wrong)
    assert report.verify(torch.randn(4, 8)).ok is False


def test_nan_is_a_difference_unless_stock_has_it_too(monkeypatch):
    model = Model()
    report = onepass.swap(model)
    with monkeypatch.context() as patch:
        broken(patch, classes.LayerNormForward, float("nan"))
        assert not report.verify(IDS).ok
    assert report.verify(IDS).ok


class Bottleneck(Model):
    """All activations are multiples of one number, so one rounding error affects all of them."""

    def forward(self, ids):
        logits = super().forward(ids)
        return logits * (2.0 + torch.sin(300.0 * logits.mean()))


def test_one_lucky_draw_of_stock_is_no_difference(judged):
    for seed in range(16):
        torch.manual_seed(seed)
        result = onepass.swap(Bottleneck(), probe=False).verify(IDS)
        assert result.ok, f"{seed=}: {result}"
        assert result.judged == judged and len(str(result).splitlines()) == 1


def test_stock_in_float64_may_have_nan_where_stock_has_none():
    class Masked(Model):
        """transformers' eager attention: a mask of the model's dtype, a softmax in float32."""

        def forward(self, ids):
            logits = super().forward(ids)
            mask = torch.full_like(logits, torch.finfo(logits.dtype).min)
            return logits * (logits + mask).softmax(-1, dtype=torch.float32)

    result = onepass.swap(Masked()).verify(IDS)
    assert result.ok and result.judged == "rounding"
    assert "nan" not in str(result)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_not_finite_in_stock_either_is_the_same(monkeypatch, value):
    class NotFinite(Model):
        def forward(self, ids):
            logits = super().forward(ids)
            return logits, torch.full_like(logits, float(value))

    report = onepass.swap(NotFinite())
    loss_fn = lambda output: output[0].square().mean()  # noqa: E731
    result = report.verify(IDS, loss_fn=loss_fn)
    assert result.ok and result.judged == "float64"
    broken(monkeypatch, classes.LayerNormForward, 1.0001)
    assert not report.verify(IDS, loss_fn=loss_fn).ok


def test_leaves_no_trace():
    class Counting(Model):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, ids):
            self.calls += 1
            return super().forward(ids)

    model = Counting()
    model.drop.eval()
    report = onepass.swap(model)
    model(IDS).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    copies = {name: copy.deepcopy(gradient) for name, gradient in gradients.items()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = [(type(m), m.training, dict(vars(m))) for m in model.modules()]
    random = torch.get_rng_state()
    assert report.verify(IDS).ok
    assert torch.equal(torch.get_rng_state(), random)
    assert [(type(m), m.training, vars(m)) for m in model.modules()] == before
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert parameter.grad is None or torch.equal(parameter.grad, copies[name])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_restores_after_an_exception():
    model = Model().train()
    report = onepass.swap(model)
    before = [type(m) for m in model.modules()]

    def failing(logits):
        raise KeyError("loss")

    with pytest.raises(KeyError):
        report.verify(IDS, loss_fn=failing)
    assert [type(m) for m in model.modules()] == before and model.drop.training


def test_runs_either_way_after_unswap_and_swap():
    model = Model()
    report = onepass.swap(model)
    onepass.unswap(model)
    assert report.verify(IDS).ok and type(model.norm) is nn.LayerNorm


def test_dropout_and_other_noise_are_drawn_alike():
    class Noisy(Model):
        def forward(self, ids):
            return super().forward(ids) + torch.randn(1)

    report = onepass.swap(Noisy(p=0.9))
    random = torch.get_rng_state()
    result = report.verify(IDS)
    assert result.ok and max(deviation.stock_error for deviation in result.deviations) < 1e-5
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    "output",
    [
        lambda y: y,
        lambda y: (y, y.mean()),
        lambda y: {"y": y, "none": None, "count": torch.tensor(3)},
        lambda y: SimpleNamespaceOutput(loss=y.mean(), logits=y),
    ],
    ids=["tensor", "tuple with loss", "dict", "object"],
)
def test_outputs_of_any_form(output):
    class Wrapped(Model):
        def forward(self, ids):
            return output(super().forward(ids))

    result = onepass.swap(Wrapped()).verify(IDS)
    assert result.ok and any(d.name.startswith("gradient of norm") for d in result.deviations)


class SimpleNamespaceOutput(dict):
    """A dict with attributes, as the outputs of transformers are."""

    __getattr__ = dict.__getitem__


def test_a_mapping_of_keywords_is_a_batch():
    batch = UserDict(ids=IDS, labels=IDS)  # as tokenizers return
    report = onepass.swap(Model())
    result = report.verify(batch)
    assert result.ok and result.loss == report.verify(dict(batch)).loss


def test_gradients_of_inputs_that_want_one():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    report = onepass.swap(model)
    x = torch.randn(4, 8, requires_grad=True)
    result = report.verify(x)
    assert "gradient of input 0" in {deviation.name for deviation in result.deviations}
    assert result.ok and x.grad is None


def test_frozen_model_compares_outputs_alone():
    model = Model().requires_grad_(False)
    result = onepass.swap(model).verify(IDS)
    assert result.ok and result.worst == "output" and len(result.deviations) == 1


def test_to_dict_is_json():
    data = json.loads(json.dumps(onepass.swap(Model()).verify(IDS).to_dict()))
    assert data["ok"] is True and data["judged"] == "float64"
    assert set(data["tensors"][0]) == {
        *("name", "error", "stock_error", "allowed", "decides", "silent")
    }
    assert data["worst"] == data["tensors"][0]["name"]
    assert set(data["loss"]) == {"stock", "swapped"}


def test_what_cannot_be_verified():
    report = copy.deepcopy(onepass.swap(Model()))
    with pytest.raises(RuntimeError, match="the report must be swap's own, got a copy"):
        report.verify(IDS)
    with torch.device("meta"):
        model = Model()
    with pytest.raises(RuntimeError, match="must have data, got tensors on the meta device"):
        onepass.swap(model).verify(IDS)
    model = nn.Sequential(nn.LayerNorm(4))
    report = onepass.swap(model)
    model.forward = lambda x: SimpleNamespace(y=3)
    with pytest.raises(RuntimeError, match="must return floating-point tensors, got Simple"):
        report.verify(torch.randn(2, 4))
