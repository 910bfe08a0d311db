"""Report.verify passes equal models, finds differences, and leaves no trace."""

from __future__ import annotations

import copy
import json
import math
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import onepass
from onepass.swapping import classes
from tests.swap.foreign_norms import OnePlusRMS


class Model(nn.Module):
    """`then` is made of its logits."""

    def __init__(self, then=None, width: int = 24):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.norm = nn.LayerNorm(width)
        self.foreign = OnePlusRMS(width)
        self.mlp = nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)
        self.head, self.then = nn.Linear(width, 11), then

    def forward(self, ids, labels=None):
        x = self.embedding(ids)
        logits = self.head(self.foreign(x + self.drop(self.mlp(self.norm(x)))))
        if labels is None:
            return logits if self.then is None else self.then(logits)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}


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


@pytest.mark.parametrize("factor", [1.0001, math.nan])
@pytest.mark.parametrize("cls", [classes.LayerNormForward, classes.ForeignNormForward])
def test_different(monkeypatch, cls, factor, judged):
    report = onepass.swap(Model())
    broken(monkeypatch, cls, factor)
    result = report.verify(IDS, loss_fn=lambda logits: logits.square().mean())
    assert not result.ok and str(result).startswith("DIFFERENT: loss ")
    assert not result.deviations[0].error <= result.deviations[0].allowed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (nn.Identity(), torch.Tensor.detach),
        (torch.Tensor.detach, nn.Identity()),
        (nn.Identity(), lambda y: y[..., :1]),
    ],
    ids=["no graph", "no gradient", "another shape"],
)
def test_a_lost_graph_and_another_shape_are_differences(monkeypatch, before, after):
    report = onepass.swap(nn.Sequential(nn.LayerNorm(8)))
    right = classes.LayerNormForward.forward
    wrong = lambda self, x: after(right(self, before(x)))  # noqa: E731
    monkeypatch.setattr(classes.LayerNormForward, "forward", wrong)
    assert report.verify(torch.randn(4, 8, requires_grad=True)).ok is False


def bottleneck(sharpness: float = 300.0) -> Model:
    """All activations are multiples of one number, so one rounding error affects all of them."""
    return Model(lambda logits: logits * (2.0 + torch.sin(sharpness * logits.mean())))


def test_one_lucky_draw_of_stock_is_no_difference(judged):
    for seed in (2, 5, 6, 13, 14):  # of 16, those where one draw would not do
        torch.manual_seed(seed)
        result = onepass.swap(bottleneck(), probe=False).verify(IDS)
        assert result.ok, f"{seed=}: {result}"
        assert result.judged == judged and len(str(result).splitlines()) == 1


def test_stock_in_float64_may_have_nan_where_stock_has_none():
    def masked(logits):
        """As transformers' eager attention: a mask of the model's dtype, a softmax in float32."""
        mask = torch.full_like(logits, torch.finfo(logits.dtype).min)
        return logits * (logits + mask).softmax(-1, dtype=torch.float32)

    result = onepass.swap(Model(masked)).verify(IDS)
    assert result.ok and result.judged == "rounding"
    assert "nan" not in str(result)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_in_stock_either_is_the_same(monkeypatch, value):
    report = onepass.swap(Model(lambda logits: (logits, torch.full_like(logits, value))))
    loss_fn = lambda output: output[0].square().mean()  # noqa: E731
    result = report.verify(IDS, loss_fn=loss_fn)
    assert result.ok and result.judged == "float64"
    broken(monkeypatch, classes.LayerNormForward, 1.0001)
    assert not report.verify(IDS, loss_fn=loss_fn).ok


def test_runs_either_way_after_unswap_and_swap():
    model = Model()
    report = onepass.swap(model)
    onepass.unswap(model)
    assert report.verify(IDS).ok and type(model.norm) is nn.LayerNorm


class Attributes(dict):
    """A dict with attributes, as the outputs of transformers are."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    "output",
    [
        lambda y: (y, y.mean()),
        lambda y: {"y": y, "none": None, "count": torch.tensor(3)},
        lambda y: Attributes(loss=y.mean(), logits=y),
    ],
    ids=["tuple with loss", "dict", "object"],
)
def test_outputs_of_any_form(output):
    result = onepass.swap(Model(output)).verify(IDS)
    assert result.ok and any(d.name.startswith("gradient of norm") for d in result.deviations)


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
