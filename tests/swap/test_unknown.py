"""Modules listed as unknown: related ones without a rule, but not wrappers of listed ones."""

from __future__ import annotations

import copy
import json
import pickle

from torch import nn

import onepass
from onepass.swapping.reasons import Reason
from tests.swap.reported import names


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
