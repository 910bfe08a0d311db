"""The optimizers on torch's own test inputs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from onepass import numerics
from tests.optim.cases import ours, same, snapshot, steps, stock, through_pickle, torch_names
from tests.support import fresh
from tests.support.dtypes import F32, F64

# ---- torch's own inputs --------------------------------------------------------------------------

# Read by another process, since importing torch's test helpers forbids later changes of
# torch.backends' flags. They import expecttest, which torch does not install, for one base class.
READ_INPUTS = """
import pickle, sys, types, unittest
try:
    import expecttest
except ImportError:
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase
import torch
from torch.testing._internal import common_optimizers as theirs
found = {}
for name in ("AdamW", "Adam", "SGD"):
    inputs = getattr(theirs, f"optim_inputs_func_{name.lower()}")("cpu", torch.float32)
    errors = getattr(theirs, f"optim_error_inputs_func_{name.lower()}")("cpu", torch.float32)
    found[name] = (
        [(one.desc, one.kwargs) for one in inputs],
        [
            (
                one.optimizer_error_input.desc,
                one.optimizer_error_input.params,
                one.optimizer_error_input.kwargs,
                one.error_on.name,
                one.error_type,
                one.error_regex,
            )
            for one in errors
        ],
    )
with open(sys.argv[1], "wb") as file:
    pickle.dump(found, file)
"""


@pytest.fixture(scope="module")
def torchs_inputs(tmp_path_factory):
    """{name: (inputs, inputs that raise)}."""
    path = tmp_path_factory.mktemp("inputs") / "inputs.pickle"
    fresh.run(READ_INPUTS, path, check=True)
    return pickle.loads(path.read_bytes())


def optimized(cls, dtype=F32, count=7, **kwargs):
    torch.manual_seed(21)
    params = [torch.randn(s).to(dtype).requires_grad_() for s in ((20, 7), (7,), (), (300, 17))]
    return steps(cls(params, **copy.deepcopy(kwargs)), count)


@torch_names
def test_every_input_of_torch(name, torchs_inputs):
    inputs, _ = torchs_inputs[name]
    assert len(inputs) >= 5
    for desc, kwargs in inputs:
        results = [
            optimized(cls, dtype, **kwargs)
            for cls, dtype in ((ours(name), F32), (stock(name), F64), (stock(name), F32))
        ]
        found, ref, base = (snapshot(optimizer) for optimizer in results)
        assert found.keys() == base.keys(), desc
        for key in {key for _, key in base} - {"step", "grad"}:
            pooled = [[v for k, v in s.items() if k[1] == key] for s in (found, ref, base)]
            numerics.assert_close(*pooled, case=f"{desc}: {key}")


@torch_names
def test_every_error_of_torch(name, torchs_inputs):
    _, errors = torchs_inputs[name]
    assert len(errors) >= 7
    for desc, params, kwargs, when, error, regex in errors:
        assert when == "CONSTRUCTION_ERROR", desc
        for cls in (stock(name), ours(name)):
            expects = pytest.warns if issubclass(error, Warning) else pytest.raises
            with expects(error, match=regex):
                cls(params, **kwargs)


@torch_names
def test_zero_gradients_and_copies_of_every_input(name, torchs_inputs):
    """torch's test_step_is_noop_for_zero_grads and test_deepcopy_copies_all_public_attrs."""
    for _, kwargs in torchs_inputs[name][0]:
        p = torch.randn(5).requires_grad_()
        before = p.detach().clone()
        optimizer = ours(name)([p], **{**copy.deepcopy(kwargs), "weight_decay": 0})
        p.grad = torch.zeros(5)
        optimizer.step()
        assert same(p.detach(), before)
        for twin in (copy.deepcopy(optimizer), through_pickle(optimizer)):
            public, others = (
                {key for key in one.__dict__ if key[0] != "_"} for one in (optimizer, twin)
            )
            assert public == others
