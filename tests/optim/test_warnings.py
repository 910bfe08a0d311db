"""Combinations that are known to stall are warned of by name."""

import warnings

import pytest
import torch

import onepass
from tests.optim.cases import SHAPES, made, names, ours
from tests.support.dtypes import BF16, F16, F32

ONE = r"with master=None are .*: parameters are"
BOTH = "with master=None and state_dtype=None are .*: parameters and second moments are rounded to"


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    "name, options, message",
    [("AdamW", {}, BOTH), ("Adam", {}, BOTH), ("AdamW", {"state_dtype": BF16}, ONE)]
    + [("AdamW", {"state_dtype": "int8"}, ONE), ("SGD", {"momentum": 0.9}, ONE)]
    + [(name, {}, ONE) for name in ("Lion", "Muon", "LAMB", "Adafactor")],
)
def test_what_is_known_to_stall_is_warned_of_by_name(name, options, message, dtype):
    params = [torch.ones(4, 4, dtype=dtype).requires_grad_()]
    word = str(dtype).removeprefix("torch.")
    with pytest.warns(UserWarning, match=f"^{name}: {word} parameters {message}") as caught:
        ours(name)(params, **options)
    assert len(caught) == 1


def test_of_muon_and_adamw_each_group_is_warned_of():
    params = [torch.ones(4, 4, dtype=BF16).requires_grad_() for _ in range(2)]
    groups = [{"params": [p], "use_muon": k == 0} for k, p in enumerate(params)]
    with pytest.warns(UserWarning) as caught:
        onepass.optim.MuonWithAdamW(groups)
    muon, adamw = (str(warning.message) for warning in caught)
    assert "second moments" not in muon and "second moments" in adamw


@names
@pytest.mark.parametrize("master", [None, "fp32", "remainder16", "stochastic"])
def test_nothing_else_is_warned_of(master, name, recwarn):
    made(name, SHAPES, BF16 if master else F32, master=master)
    assert not recwarn.list


def test_a_warning_is_given_once():
    """By Python's default filter."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            onepass.optim.AdamW([torch.ones(4, dtype=BF16, requires_grad=True)])
    assert len(caught) == 1
