"""Attention by hand inside torch.compile runs as it was written, and is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onepass
from tests.swap.attention_by_hand import TOKENS, WIDTH, NanoGPT

LOST = "inside torch.compile attention by hand runs as it was written"


class Norm(nn.Module):
    """A norm that no swap takes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.left = nn.LayerNorm(WIDTH), NanoGPT(), Norm()

    def forward(self, x):
        return self.left(x + self.attention(self.norm(x)))


def explained(model):
    """(operators that ran, reasons by the end of the name)"""
    torch._dynamo.reset()
    found = onepass.explain(model, torch.randn(2, TOKENS, WIDTH))
    reasons = {e["name"].removeprefix("_orig_mod."): e["reason"] for e in found.not_accelerated}
    return {call["op"] for call in found.calls}, reasons


@pytest.mark.parametrize("how", ["around", "in place"])
def test_explain_names_what_compilation_loses(how):
    model = compiled = Block()
    onepass.swap(model, kinds="attention")
    if how == "in place":
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    operators, reasons = explained(compiled)
    assert "attention" not in operators
    assert reasons["attention"].startswith(LOST)
    assert reasons["norm"] == "not swapped: onepass.swap(model) before torch.compile"
    assert reasons["left"] == "has no eps"


def test_a_module_that_is_left_out_of_compilation_is_taken():
    model = Block()
    onepass.swap(model)
    model.attention.forward = torch.compiler.disable(model.attention.forward)
    operators, reasons = explained(torch.compile(model, backend="eager"))
    assert "attention" in operators and reasons == {"left": "has no eps"}


def test_the_report_says_it_in_one_sentence():
    report = onepass.swap(Block())
    (note,) = [note for note in report.notes if LOST in note]
    assert note.startswith(f"attention: {LOST}; ") and "torch.compiler.disable" in note
    assert not any("F.scaled_dot_product_attention" in note for note in report.notes)
    assert not any(LOST in note for note in onepass.swap(nn.LayerNorm(8)).notes)
