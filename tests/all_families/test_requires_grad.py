"""`requires_grad` of several results: true of those alone that depend on what is trained."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.calls import CALLS
from tests.support.seeds import set_seed


def several(call) -> bool:
    set_seed(3)
    return call.differentiable and len(call.run(**call.tensors())) > 1


ARGUMENTS = [
    (name, argument)
    for name, call in CALLS.items()
    if several(call)
    for argument, tensor in call.tensors().items()
    if tensor.is_floating_point() and argument not in call.constant
]


@pytest.mark.parametrize("name, argument", ARGUMENTS)
def test_results_require_a_gradient_only_if_they_have_one(name, argument):
    call = CALLS[name]
    given = call.tensors()
    leaf = given[argument].requires_grad_()
    set_seed(3)
    results = call.run(**given)
    assert any(result.requires_grad for result in results)
    for result in results:
        if result.requires_grad:
            (gradient,) = torch.autograd.grad(result.sin().sum(), leaf, retain_graph=True)
            assert gradient.any()


class Zeros(TorchDispatchMode):
    """Counts tensors of zeros that autograd makes in place of gradients."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.zeros.default
        return function(*args, **(kwargs or {}))


# A module's results may be views of torch's.
FUNCTIONS = dict.fromkeys(name for name, _ in ARGUMENTS if not name.startswith("nn."))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_result_that_nobody_uses_gets_no_zeros(name):
    call = CALLS[name]
    given = call.tensors()
    leaves = [given[argument].requires_grad_() for argument in call.wanted(given)]
    set_seed(3)
    for result in call.run(**given):
        if result.requires_grad:
            upstream = torch.ones_like(result)
            with Zeros() as zeros:
                torch.autograd.grad(result, leaves, upstream, retain_graph=True, allow_unused=True)
            assert zeros.count == 0


def test_every_operator_with_several_results_is_here():
    names = {name for name, _ in ARGUMENTS}
    parts = ("add_layer_norm", "add_rms_norm", "modulated_layer_norm", "modulated_rms_norm")
    parts += ("rotary_embedding", "scaled_dot_product_attention", "varlen_attention")
    for part in (*parts, "merge_attention_states", "MultiheadAttention"):
        assert any(part in name for name in names), part
