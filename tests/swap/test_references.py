"""A swap keeps nothing alive once the model is deleted or unswapped."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.swapping import classes
from tests.swap.foreign_norms import RMS

SOURCES = {
    "norm": """
class Own(RMS):
    def forward(self, x):
        return super().forward(x)
module = Own(8)
""",
    "attention": """
class Own(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)
module = Own()
""",
    "heads": """
class Own(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]
module = Own(8, 2)
""",
    "unrelated": """
class Own(nn.Module):
    def forward(self, x):
        return x
module = Own()
""",
}


def make(kind: str) -> nn.Module:
    """A module of a new class, whose code nothing else holds (as a constant of a function here)."""
    namespace = {"RMS": RMS, "nn": nn, "F": F, "__name__": "made"}
    exec(SOURCES[kind], namespace)
    return namespace["module"]


def swap(model):
    onepass.swap(model)


def swap_and_unswap(model):
    swap(model)
    onepass.unswap(model)


def swap_in_a_block(model):
    with onepass.swapped(model):
        pass


def swap_and_verify(model):
    onepass.swap(model).verify(torch.randn(2, 3, 8))


def explain(model):
    onepass.explain(model, torch.randn(2, 3, 8))


def dry_run(model):
    onepass.swap(model, dry_run=True)


def force(model):
    onepass.swap(model, force="*")


CALLS = (swap, swap_and_unswap, swap_in_a_block, swap_and_verify, explain, dry_run, force)


@pytest.mark.parametrize(
    ("kind", "call"),
    [(kind, call) for kind in ("attention", "heads", "unrelated") for call in CALLS]
    + [("norm", swap_and_unswap), ("norm", force)],  # each probes
)
def test_a_users_class_goes_with_its_last_module(kind, call):
    module = make(kind)
    model = nn.Sequential(module)
    gone = [weakref.ref(x) for x in (type(module), type(module).forward.__code__, module)]
    call(model)
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
