"""Modules that are left as they are: related ones without a rule are listed as unknown, and not
their wrappers; those that refuse another class are listed as skipped."""

import copy
import json
import pickle

import pytest
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.swapping.reasons import Reason
from tests.swap.reported import names, types


class AdaptiveNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.scale = nn.Linear(8, 8)


class ConditionedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(8, 8)


class DropPath(nn.Module):
    pass


class SlidingAttention(nn.Module):
    def forward(self, x):
        return x


def test_related_modules_without_a_rule_are_unknown(torchs_products):
    model = nn.ModuleDict(
        {
            "attention": SlidingAttention(),
            "dropout2d": nn.Dropout2d(),
            "alpha": nn.AlphaDropout(),
            "path": DropPath(),
            "adaptive": AdaptiveNorm(),
            "conditioned": ConditionedNorm(),
            "linear": nn.Linear(8, 8),
        }
    )
    for report in (onepass.swap(model), onepass.swap(model)):  # the second finds them swapped
        assert names(report.unknown) == set(model) - {"linear", "adaptive"}
        assert names(report.swapped) == {"adaptive.norm"} and not report.skipped
    assert names(onepass.swap(model, kinds="norm").unknown) == {"conditioned"}


def test_wrappers_are_listed_by_what_is_in_them():
    class OuterAttention(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    refused = nn.MultiheadAttention(8, 2)
    refused.forward = refused.forward
    for inner, listed in ((refused, "skipped"), (SlidingAttention(), "unknown")):
        report = onepass.swap(OuterAttention(OuterAttention(inner)))
        assert names(getattr(report, listed)) == {"inner.inner"}
        assert len(report.unknown) + len(report.skipped) == 1


def test_a_reason_has_a_kind_beside_its_text():
    model = nn.Sequential(nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Dropout2d(0.1))
    report = onepass.swap(model, exclude="2")
    reasons = [entry["reason"] for entry in (*report.skipped, *report.unknown)]
    kinds = [Reason.BATCH_NORM, Reason.EXCLUDED, Reason.OTHER_DROPOUT]
    for found in (reasons, copy.deepcopy(reasons), pickle.loads(pickle.dumps(reasons))):
        assert [reason.kind for reason in found] == kinds
        assert found[1] == "excluded by '2'"
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert len(Reason.__members__) == len(Reason), "two members of one text would be one"


class Stubborn(nn.LayerNorm):
    def __setattr__(self, name, value):
        if name == "__class__":
            raise RuntimeError("my class stays")
        super().__setattr__(name, value)


class Counting(nn.LayerNorm):
    writes = 0

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        vars(self)["writes"] = self.writes + 1


def test_a_module_that_refuses_another_class_is_skipped():
    model = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1), Stubborn(8), Counting(8))
    before = types(model), model[3].writes
    planned = onepass.swap(model, dry_run=True)
    assert before == (types(model), model[3].writes)
    report = onepass.swap(model)
    assert report.to_dict()["skipped"] == planned.to_dict()["skipped"] == [
        {
            "name": "2",
            "type": f"{__name__}.Stubborn",
            "reason": "it refuses another class: my class stays",
        }
    ]  # fmt: skip
    assert names(report.swapped) == {"0", "1", "3"} and type(model[2]) is Stubborn
    assert onepass.unswap(model) == ["0", "1", "3"] and types(model) == before[0]
    with pytest.raises(RuntimeError, match="strict, got '2'.*my class stays"):
        onepass.swap(model, strict=True)
    assert types(model) == before[0]


class Disguised(nn.LayerNorm):
    """Another class to `isinstance`, as proxies are."""

    @property
    def __class__(self):
        return nn.LayerNorm


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_class_that_is_a_property_stays(dry_run):
    model = nn.Sequential(Disguised(8), nn.LayerNorm(8))
    report = onepass.swap(model, dry_run=dry_run)
    assert names(report.swapped) == {"1"} and type(model[0]) is Disguised
    assert report.skipped[0]["reason"] == "it refuses another class: it has a __class__ of its own"


class Attends(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner or nn.Identity()

    def forward(self, x):
        return self.inner(F.scaled_dot_product_attention(x, x, x))


class Frozen(Attends):
    def __setattr__(self, name, value):
        if "inner" in self._modules:
            raise AttributeError(f"{name} may not be set")
        super().__setattr__(name, value)


def test_calls_around_a_module_that_refuses_stay():
    model = nn.ModuleList([Attends(Frozen()), Attends()])
    report = onepass.swap(model, kinds="attention")
    assert names(report.swapped) == {"1"} and names(report.skipped) == {"0", "0.inner"}
