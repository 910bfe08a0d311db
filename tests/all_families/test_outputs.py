"""Of an operator with several results, each requires a gradient if it has one, and only then."""

from __future__ import annotations

import pytest
import torch

from tests.support.calls import CALLS


def trained(call) -> list[str]:
    """Arguments that may require a gradient."""
    return [
        name
        for name, tensor in call.tensors().items()
        if tensor.is_floating_point() and name not in call.constant
    ]


def results(call, name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the argument, the results), where that argument alone requires a gradient."""
    tensors = call.tensors()
    leaf = tensors[name].detach().clone().requires_grad_()
    torch.manual_seed(0)
    return leaf, call.run(**{**tensors, name: leaf})


def has_gradient(result: torch.Tensor, leaf: torch.Tensor) -> bool:
    (gradient,) = torch.autograd.grad(
        result, leaf, torch.randn_like(result), allow_unused=True, retain_graph=True
    )
    return gradient is not None and bool(gradient.any())


SEVERAL = {
    name: call
    for name, call in CALLS.items()
    if call.differentiable and len(call.run(**call.tensors())) > 1
}


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name in SEVERAL for argument in trained(SEVERAL[name])]
)
def test_each_result_requires_a_gradient_if_it_has_one(name, argument):
    leaf, found = results(SEVERAL[name], argument)
    assert any(result.requires_grad for result in found)
    for result in found:
        if result.requires_grad:
            assert has_gradient(result, leaf)


def test_there_are_such_operators():
    for part in ("add_layer_norm", "rotary_embedding", "varlen_attention"):
        assert any(part in name for name in SEVERAL), part
