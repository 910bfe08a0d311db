"""A swap that is cut short, by Ctrl-C at any bytecode or by an error at the n-th module, leaves the
model as it was. So do unswap, the context manager, attach and detach.

The last bytecode, the return of the outermost call, comes after the change: no signal is delivered
there, though the injection can do it.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.swapping import changes
from tests.support import injection

transformers = pytest.importorskip("transformers", reason="needs transformers")
integration = pytest.importorskip(
    "onepass.integrations.transformers", reason="needs a transformers that attach works with"
)
modeling_llama = pytest.importorskip(
    "transformers.models.llama.modeling_llama", reason="needs a transformers with Llama"
)

# Interrupts per call: among its last bytecodes, where all edits are made, and at some before.
END, STRIDE, BEFORE = 500, 15, 10


class Attention(nn.Module):
    """Calls torch's attention: swapping redirects its forward."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class ByName(transformers.PreTrainedModel):
    """A model of transformers with one module, which takes attention by the name in its config."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:  # transformers looks into its own source files
        return True

    def __init__(self):
        super().__init__(
            transformers.LlamaConfig(
                vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1,
            )
        )  # fmt: skip
        self.attention = modeling_llama.LlamaAttention(self.config, 0)


def model() -> nn.Module:
    """Every way in which a module is swapped, except norms that need the probe."""
    torch.manual_seed(0)
    parts = {
        "norm": nn.LayerNorm(4), "drop": nn.Dropout(0.1), "heads": nn.MultiheadAttention(4, 2),
        "calls": Attention(), "attend": ByName(), "odd": nn.BatchNorm1d(4),
    }  # fmt: skip
    parts["shared"] = parts["norm"]
    whole = nn.ModuleDict(parts)
    for part in whole.modules():
        part.register_forward_hook(lambda *_: None)
    return whole


def state(whole: nn.Module) -> list:
    """Everything that a swap may touch, per module; objects other than plain data by identity."""
    found = []
    for name, module in whole.named_modules():
        own = getattr(module, "config", None)
        attributes = {
            key: tuple(value) if isinstance(value, dict) else value
            for key, value in vars(module).items()
        }
        implementation = getattr(own, "_attn_implementation_internal", None)
        found.append((name, type(module), attributes, implementation, module.forward.__func__))
    found.append(injection.bits(dict(whole.state_dict())))
    found.append((torch.get_num_threads(), torch.get_rng_state().tolist()))
    return found


def swapped() -> nn.Module:
    whole = model()
    onepass.swap(whole, probe=False)
    return whole


def attached() -> nn.Module:
    whole = model()
    integration.attach(whole)
    return whole


def swap(whole):
    onepass.swap(whole, probe=False)


def enter_and_leave(whole):
    with onepass.swapped(whole, probe=False):
        pass


CALLS = {
    "swap": (model, swap), "unswap": (swapped, onepass.unswap), "swapped": (model, enter_and_leave),
    "attach": (model, integration.attach), "detach": (attached, integration.detach),
}  # fmt: skip


def interrupts_while_edits_are_made(monkeypatch, name, seed) -> Iterator[tuple[bool, bool]]:
    """(is the model as it was, had edits been made) per interrupt; seed None: every instruction."""
    make, call = CALLS[name]
    made = []
    make_edit = changes.Edit.make
    monkeypatch.setattr(changes.Edit, "make", lambda edit: (made.append(edit), make_edit(edit)))
    call(make())  # imports and registers everything first
    whole = make()
    last = injection.run_interrupted(lambda: call(whole), None)[1].count
    if seed is None:
        whole = make()
        points = [at for at in injection.every_instruction(lambda: call(whole)) if at < last]
    else:
        points = list(range(max(last - END, 1) + seed, last, STRIDE))
        points += random.Random(seed).sample(range(1, points[0]), min(BEFORE, points[0] - 1))
    for at in points:
        whole = make()
        before = state(whole)
        made.clear()
        interrupted, _ = injection.run_interrupted(lambda: call(whole), at)
        assert interrupted, f"{name}: the interrupt at bytecode {at} of {last} was swallowed"
        yield state(whole) == before, bool(made)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *((name, 0) for name in CALLS),
        *(slow(name, seed) for name in ("swap", "swapped") for seed in (5, 10)),
        *(slow(name, None) for name in ("unswap", "attach", "detach")),  # which are short
    ],
)
def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch, name, seed):
    seen = list(interrupts_while_edits_are_made(monkeypatch, name, seed))
    wrong = [number for number, (same, _) in enumerate(seen) if not same]
    assert not wrong, f"{name}: changed by interrupts {wrong} of {len(seen)}"
    edits = sum(made for _, made in seen)
    assert 4 < edits < len(seen) - BEFORE / 2  # as edits are made and after, and before


def test_every_kind_of_edit_is_among_them(torchs_products):
    report = onepass.swap(model(), probe=False)
    assert {entry["name"] for entry in report.swapped} == {
        "norm", "drop", "heads", "calls", "attend.attention"
    }  # fmt: skip


class Refuses(nn.LayerNorm):
    """The class of the one that is `stubborn` may not be set."""

    stubborn = None

    def __setattr__(self, name, value):
        if name == "__class__" and self is Refuses.stubborn:
            raise MemoryError("no room for another class")
        super().__setattr__(name, value)


@pytest.mark.parametrize("nth", range(4))
@pytest.mark.parametrize("call", [onepass.swap, onepass.unswap, enter_and_leave])
def test_a_module_that_refuses_its_class(monkeypatch, call, nth):
    whole = nn.Sequential(*(Refuses(4) for _ in range(4)), nn.Dropout(0.1))
    if call is onepass.unswap:
        onepass.swap(whole)
    before = state(whole)
    monkeypatch.setattr(Refuses, "stubborn", whole[nth])
    with pytest.raises(MemoryError, match="no room"):
        call(whole)
    assert state(whole) == before


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, ValueError])
def test_a_filter_that_raises_at_the_nth_module(error):
    asked = []
    onepass.swap(model(), filter_fn=lambda module, name: asked.append(name), probe=False)
    for last in asked:
        whole = model()
        before = state(whole)

        def filter_fn(module, name, last=last):
            if name == last:
                raise error("at the filter")
            return True

        with pytest.raises(error, match="at the filter"):
            onepass.swap(whole, filter_fn=filter_fn, probe=False)
        assert state(whole) == before
