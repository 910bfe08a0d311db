"""torch's activation checkpointing: both kinds over every operator; `onepass.sac_ops` with the
selective one, where kept operators do not run twice."""

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import onepass
from onepass import _dispatch_log, functional
from tests.emulator.executors import operators
from tests.support.calls import SAMPLES

selective = functools.partial(create_selective_checkpoint_contexts, onepass.sac_ops())
# Forwards that are bound by memory.
RECOMPUTED = {"dropout_forward", "gate_forward", "modulated_norm_forward", "norm_forward"}
RECOMPUTED |= {"branch_forward", "loss_forward", "rotary_forward", "group_norm_forward"}
RECOMPUTED |= {"causal_conv1d_forward", "selective_scan_forward", "mamba_chunk_scan_forward"}
RECOMPUTED |= {"delta_rule_forward"}


class Block(nn.Module):
    def __init__(self, dropout_p: float = 0.0):
        super().__init__()
        self.norm = onepass.nn.LayerNorm(32)
        self.qkv, self.out = onepass.nn.Linear(32, 96), onepass.nn.Linear(32, 32)
        self.dropout_p = dropout_p

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(
            *qkv.unbind(), dropout_p=self.dropout_p, is_causal=True
        )
        y = y.transpose(1, 2).flatten(2)
        return functional.linear(
            y, self.out.weight, self.out.bias, activation="gelu", dropout_p=self.dropout_p,
            residual=x,
        )  # fmt: skip


def gradients(call, x, parameters) -> tuple[list[torch.Tensor], Counter]:
    """Gradients, and how often each operator ran."""
    torch.manual_seed(1)
    with _dispatch_log.record() as calls:
        loss = call(x).square().sum()
        result = torch.autograd.grad(loss, [x, *parameters])
    return list(result), Counter(call["op"] for call in calls)


def test_every_forward_is_kept_or_recomputed_on_purpose():
    forwards = {name for name in operators("onepass") if name.endswith("_forward")}
    kept = {op._schema.name.removeprefix("onepass::") for op in onepass.sac_ops()}
    assert forwards - kept == RECOMPUTED and kept - forwards == {"linear_loss"}
    assert onepass.sac_ops() is not onepass.sac_ops()  # the caller may append to it


def dropping():
    return Block(0.3)


def swapped():
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)
    onepass.swap(layer)
    return layer


@pytest.mark.parametrize("make", [Block, dropping, swapped])
def test_attention_and_products_run_once_and_gradients_are_the_same(make):
    torch.manual_seed(0)
    block, x = make(), torch.randn(2, 16, 32, requires_grad=True)
    run = functools.partial(checkpoint, block, use_reentrant=False)
    expected, once = gradients(block, x, block.parameters())
    whole, twice = gradients(run, x, block.parameters())
    kept, counts = gradients(functools.partial(run, context_fn=selective), x, block.parameters())
    for one, other, stock in zip(whole, kept, expected, strict=True):
        assert torch.equal(one, stock) and torch.equal(other, stock)
    for op, runs in {"attention": 1, "linear": 2, "layer_norm": 2}.items():
        if make is not swapped or op == "attention":  # products may be left to torch
            assert (twice[op], counts[op]) == (2 * once[op], runs)


@pytest.mark.parametrize("kept", [True, False])
def test_compiled_graphs_keep_them_too(kept):
    graphs = []

    def note(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    block, x = Block(), torch.randn(2, 16, 32, requires_grad=True)
    options = {"context_fn": selective} if kept else {}

    @torch.compile(fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))
    def run(x):
        return checkpoint(block, x, use_reentrant=False, **options)

    found = torch.autograd.grad(run(x).square().sum(), [x, *block.parameters()])
    expected = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
    torch.testing.assert_close(found, expected)
    forward, backward = graphs
    for name in ("attention_forward", "linear_forward", "linear_epilogue_forward"):
        assert f"onepass.{name}.default" in forward
        assert (f"onepass.{name}.default" in backward) != kept


# A sum without dropout saves nothing.
@pytest.mark.parametrize("name", [n for n in SAMPLES if n != "add_dropout of nothing"])
def test_every_operator_is_recomputed_bit_for_bit(name):
    """By both kinds of checkpoint, and under torch's deterministic mode: what is drawn, too."""
    call, runs = SAMPLES[name], []

    def run(names, *tensors):
        runs.append(name)
        outputs = call.run(**dict(zip(names, tensors, strict=True)))
        return tuple(y for y in outputs if y.is_floating_point())

    def results(function):
        given = call_tensors()
        torch.manual_seed(3)
        outputs = function(list(given), *given.values())
        upstream = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) for y in outputs]
        torch.autograd.backward(outputs, upstream)
        return [*outputs, *(t.grad for t in given.values() if t.grad is not None)]

    def call_tensors():
        given = call.tensors()
        return {
            n: t.requires_grad_() if t.is_floating_point() and n not in call.constant else t
            for n, t in given.items()
        }

    expected, drawn = results(run), torch.rand(1)
    torch.use_deterministic_algorithms(True)
    try:
        repeated = [results(run)]
    finally:
        torch.use_deterministic_algorithms(False)
    for use_reentrant in (False, True):
        runs.clear()
        repeated.append(results(functools.partial(checkpoint, run, use_reentrant=use_reentrant)))
        assert len(runs) == 2 and torch.equal(torch.rand(1), drawn)
    for found in repeated:
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
