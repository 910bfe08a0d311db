"""Small calls of the public functions on a CUDA device: what torch makes of them, as
tests/all_families has it on the CPU."""

import functools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import onepass
from tests.all_families import test_opcheck
from tests.device.common import DEVICE, OTHER, needs_device, on_cuda_only, to_device
from tests.support.calls import CALLS
from tests.support.dtypes import BF16, F16, F32, F64

pytestmark = needs_device
FUNCTIONS = ("norm", "dropout", "attention", "attention_with_kv_cache")
NAMES = [
    name
    for name in CALLS
    if name.startswith("functional.") and name.partition(" ")[0].endswith(FUNCTIONS)
]
DIFFERENTIABLE = [name for name in NAMES if CALLS[name].differentiable]
LIKE_TORCHS = [name for name in DIFFERENTIABLE if CALLS[name].stock]


def leaves_of(call, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: given[name].requires_grad_() for name in call.wanted(given)}


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_a_call_and_its_backward(name):
    call = CALLS[name]
    given = to_device(call.tensors())
    leaves = leaves_of(call, given) if call.differentiable else {}
    with test_opcheck.Recorded() as recorded:
        outputs = [y for y in call.results(given | leaves) if y.requires_grad]
        if outputs:
            upstream = [torch.ones_like(y) for y in outputs]
            torch.autograd.grad(outputs, list(leaves.values()), upstream)
    assert recorded.calls
    for op, args, kwargs in recorded.calls:
        torch.library.opcheck(op, args, kwargs)


@pytest.mark.parametrize("cast", [BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("name", LIKE_TORCHS)
def test_dtypes_under_autocast_are_torchs(name, dtype, cast):
    call = CALLS[name]
    given = to_device(call.typed(dtype))
    leaves = leaves_of(call, given)
    with torch.autocast(DEVICE.type, dtype=cast):
        found, stock = call.run(**given | leaves), call.stock(**given | leaves)
    assert [y.dtype for y in found] == [y.dtype for y in stock]
    gradients = torch.autograd.grad([y.float().sum() for y in found], list(leaves.values()))
    assert [gradient.dtype for gradient in gradients] == [dtype] * len(leaves)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_checkpoints_draw_the_same_again(name, use_reentrant):
    call, found = CALLS[name], []

    def run(*tensors):
        outputs = call.run(**given | dict(zip(leaves, tensors, strict=True)))
        return tuple(y for y in outputs if y.is_floating_point())

    for function in (run, functools.partial(checkpoint, run, use_reentrant=use_reentrant)):
        given = to_device(call.tensors())
        leaves = leaves_of(call, given)
        torch.manual_seed(6)
        outputs = function(*leaves.values())
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        found.append([leaf.grad for leaf in leaves.values()])
    for first, again in zip(*found, strict=True):
        torch.testing.assert_close(first, again)  # sums need not repeat; what is dropped does


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_two_devices_are_refused(name):
    call = CALLS[name]
    given = to_device(call.tensors())
    first, *others = given
    for other in others:
        with pytest.raises(RuntimeError, match=f"{other}|device"):
            call.run(**given | {other: given[other].to(OTHER)})
        assert all(y.isfinite().all() for y in call.run(**given) if y.is_floating_point())


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivatives(name):
    call = CALLS[name]
    given = to_device(call.typed(F64))
    leaves = {n: t for n, t in leaves_of(call, given).items() if n != "alibi_slopes"}  # float32

    def together(*tensors):
        results = call.results(given | dict(zip(leaves, tensors, strict=True)))
        return torch.cat([y.flatten() for y in results])

    assert gradgradcheck(
        lambda *leaves: together(*leaves) ** 2, list(leaves.values()), fast_mode=True
    )
    assert gradcheck(together, list(leaves.values()), fast_mode=True)


@on_cuda_only
@pytest.mark.parametrize("name", NAMES)
def test_explain_names_the_device_kernels(name):
    call = CALLS[name]
    given = to_device(call.tensors())
    found = onepass.explain(lambda: call.run(**given)).calls
    assert found and all(one["level"] == "cuda" and one["reason"] for one in found)
