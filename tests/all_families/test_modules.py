"""Modules: those that torch has are torch's, and copies of each compute the same."""

import copy
import pickle

import pytest
import torch
from torch import nn

import onepass
from tests.support.calls import CALLS
from tests.support.calls.classes import MODULES
from tests.support.seeds import set_seed

BF16 = torch.bfloat16
# With options that change parameters, or the text: alike in torch, and of our own.
OPTIONS = {
    "LayerNorm of two dimensions": lambda of: of.LayerNorm((3, 8), eps=1e-3),
    "LayerNorm without a bias": lambda of: of.LayerNorm(8, bias=False),
    "LayerNorm without parameters": lambda of: of.LayerNorm(8, elementwise_affine=False),
    "RMSNorm without a weight": lambda of: of.RMSNorm((3, 8), elementwise_affine=False),
    "GroupNorm without parameters": lambda of: of.GroupNorm(3, 12, 1e-3, affine=False),
    "Linear in bfloat16": lambda of: of.Linear(20, 6, bias=False, dtype=BF16),
    "Dropout in place": lambda of: of.Dropout(0.25, inplace=True),
    "MultiheadAttention of other widths": lambda of: of.MultiheadAttention(
        8, 2, kdim=4, vdim=6, add_bias_kv=True
    ),
    "TransformerDecoderLayer without biases": lambda of: of.TransformerDecoderLayer(
        8, 2, 16, bias=False
    ),
}
LOSS = {"weight": torch.rand(30), "softcap": 2.0, "z_loss": 0.1}
OWN = {
    "GroupNorm with silu": lambda of: of.GroupNorm(2, 8, activation="silu", dtype=BF16),
    "CrossEntropyLoss": lambda of: of.CrossEntropyLoss(**LOSS),
    "LinearCrossEntropyLoss": lambda of: of.LinearCrossEntropyLoss(8, 30, **LOSS),
    "GatedMLP with biases": lambda of: of.GatedMLP(8, 24, "gelu", bias=True, dtype=BF16),
    "AddRMSNorm": lambda of: of.AddRMSNorm(8, dropout_p=0.5, residual_dtype=torch.float32),
    "ModulatedLayerNorm": lambda of: of.ModulatedLayerNorm((8,), eps=0.5),
    "DropPath": lambda of: of.DropPath(0.3, scale_by_keep=False),
    "RotaryEmbedding": lambda of: of.RotaryEmbedding(16, interleaved=True),
}
TORCHS = {n: make for n, make in MODULES.items() if CALLS[n].stock} | OPTIONS
TORCHS.pop("nn.LinearCrossEntropyLoss", None)  # torch's has other arguments


def made(make, namespace) -> nn.Module:
    set_seed(3)
    return make(namespace)


@pytest.mark.parametrize("name", TORCHS)
def test_instances_are_torchs_with_the_same_keys_and_start(name):
    ours, stock = made(TORCHS[name], onepass.nn), made(TORCHS[name], nn)
    assert isinstance(ours, type(stock)) and repr(ours) == repr(stock)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert all(map(torch.equal, ours.parameters(), stock.parameters()))
    for parameter in stock.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    if name in CALLS and "Dropout" not in name:  # which draws in another way
        call = CALLS[name]
        torch.testing.assert_close(call.run(**call.tensors()), call.stock(**call.tensors()))


@pytest.mark.parametrize("name", MODULES | OPTIONS | OWN)
def test_copies_are_whole(name):
    module = made((MODULES | OPTIONS | OWN)[name], onepass.nn)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert [type(part) for part in twin.modules()] == [type(part) for part in module.modules()]
        assert repr(twin) == repr(module)
        for part, other in zip(twin.modules(), module.modules(), strict=True):
            of_part, of_other = ({**vars(p), "training": None} for p in (part, other))
            for attribute in ("_parameters", "_buffers", "_modules"):
                of_part.pop(attribute), of_other.pop(attribute)
            assert of_part == of_other
        tensors = ([*m.parameters(), *m.buffers()] for m in (twin, module))
        for one, two in zip(*tensors, strict=True):
            assert one.dtype is two.dtype and torch.equal(one, two)
