"""A swap keeps nothing alive once the model is deleted or unswapped."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.swapping import classes
from tests.swap.foreign_norms import RMS

# Each kind's base class, what its forward returns, and its arguments.
KINDS = {
    "norm": ("RMS", "super().forward(x)", "8"),
    "attention": ("nn.Module", "F.scaled_dot_product_attention(x, x, x)", ""),
    "heads": ("nn.MultiheadAttention", "super().forward(x, x, x)[0]", "8, 2"),
    "unrelated": ("nn.Module", "x", ""),
}


def make(kind: str) -> nn.Module:
    """A module of a new class, whose code nothing else holds (as a constant of a function here)."""
    base, result, arguments = KINDS[kind]
    lines = f"class Own({base}):", " def forward(self, x):", f"  return {result}"
    namespace = {"RMS": RMS, "nn": nn, "F": F, "__name__": "made"}
    exec("\n".join([*lines, f"module = Own({arguments})"]), namespace)
    return namespace["module"]


def swap_and_unswap(model):
    onepass.swap(model)
    onepass.unswap(model)


def swap_in_a_block(model):
    with onepass.swapped(model):
        pass


CALLS = {
    "swap": onepass.swap,
    "swap and unswap": swap_and_unswap,
    "swap in a block": swap_in_a_block,
    "swap and verify": lambda model: onepass.swap(model).verify(torch.randn(2, 3, 8)),
    "explain": lambda model: onepass.explain(model, torch.randn(2, 3, 8)),
    "dry run": lambda model: onepass.swap(model, dry_run=True),
    "force": lambda model: onepass.swap(model, force="*"),
}


@pytest.mark.parametrize(
    ("kind", "call"),
    [(kind, call) for kind in ("attention", "heads", "unrelated") for call in CALLS]
    + [("norm", "swap and unswap"), ("norm", "force")],  # each probes
)
def test_a_users_class_goes_with_its_last_module(kind, call):
    module = make(kind)
    model = nn.Sequential(module)
    gone = [weakref.ref(x) for x in (type(module), type(module).forward.__code__, module)]
    CALLS[call](model)
    gone.append(weakref.ref(type(module)))  # the swapped class, where it stays swapped
    del module, model
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_a_class_is_made_once_while_something_has_it():
    first, second = make("attention"), make("attention")
    second.__class__ = type(first)
    onepass.swap(first)
    onepass.swap(second)
    assert type(first) is type(second)
    onepass.unswap(first)
    onepass.swap(first)
    assert type(first) is type(second)


def test_the_cache_is_empty_afterwards():
    gc.collect()
    model = nn.Sequential(make("attention"), make("attention"))
    before = len(classes._MADE)
    onepass.swap(model)
    assert len(classes._MADE) == before + 2
    del model
    gc.collect()
    assert len(classes._MADE) == before
