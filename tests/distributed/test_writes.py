"""A tensor is written after a call: the backward is refused, or is as if it was not written."""

import functools
import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor

from onepass import functional
from onepass._dtensor import plans
from tests.distributed.dtensors import mesh_of, placed_as, spread, whole
from tests.distributed.ranks import distributed, on_ranks
from tests.distributed.test_operators import CASES, S0, S2, R, drawn, listed, upstream

pytestmark = distributed
REFUSED = "modified by an inplace operation"


def backward(call: Callable, given: dict, written: int | None) -> list[torch.Tensor] | None:
    """Gradients, None if refused, after a write to one of the inputs and outputs."""
    given = list(given.values())
    outputs = listed(call())
    if written is not None:
        with torch.no_grad():
            [*given, *outputs][written].mul_(2.0)
    wanted = map(placed_as, outputs, upstream(outputs))
    try:
        found = torch.autograd.grad(outputs, given, list(wanted))
    except RuntimeError as error:
        assert REFUSED in str(error), error
        return None
    return [x.to_local() if isinstance(x, DTensor) else x for x in found]


def number_of_tensors(case) -> int:
    given = drawn(case, torch.float32)
    return len(given) + len(listed(case.call(**given)))


def refused_of_plain(case) -> list[bool]:
    found = []
    for written in range(number_of_tensors(case)):
        given = {n: x.requires_grad_() for n, x in drawn(case, torch.float32).items()}
        found.append(backward(functools.partial(case.call, **given), given, written) is None)
    return found


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_a_write_is_refused_where_it_is_on_plain_tensors(name: str) -> list[bool]:
    case, mesh = CASES[name], mesh_of((2,))
    plain = refused_of_plain(case)

    def found(place, written):
        given = {
            name: spread(x, mesh, [place.get(name, R)]).requires_grad_()
            for name, x in drawn(case, torch.float32).items()
        }
        return backward(functools.partial(case.call, **given), given, written)

    for place in case.places:
        right = found(place, None)
        for written, is_refused in enumerate(plain):
            plans.known.clear()
            for _ in range(2):  # the second has a plan
                gradients = found(place, written)
                assert (gradients is None) == is_refused, (place, written)
                assert is_refused or all(map(torch.equal, gradients, right)), (place, written)
    return plain


def test_the_cases_have_writes_of_both_kinds():
    refused = [is_refused for case in CASES.values() for is_refused in refused_of_plain(case)]
    assert 50 < sum(refused) < len(refused) - 50


def made(*shape: int) -> DTensor:
    return spread(torch.linspace(-1, 1, math.prod(shape)).reshape(shape), mesh_of((2,)), [S0])


def norm(x: DTensor) -> DTensor:
    return functional.rms_norm(x, 8)


def ones(*shape: int) -> DTensor:
    return spread(torch.ones(shape), mesh_of((2,)), [R])


def causal(query: DTensor, key: DTensor) -> DTensor:
    return functional.scaled_dot_product_attention(query, key, key, is_causal=True)


def refused(function, *args) -> bool:
    try:
        function(*args)
    except RuntimeError as error:
        assert REFUSED in str(error), error
        return True
    return False


@on_ranks(2)
def test_other_writes() -> None:
    for _ in range(2):  # the second has a plan
        # A view, and the memory of the part itself.
        x = made(4, 8).requires_grad_()
        hidden = x * 2.0
        y = norm(hidden)
        hidden.view(4, 2, 4).mul_(2.0)
        assert refused(y.sum().backward)
        hidden = x * 2.0
        y = norm(hidden)
        with torch.no_grad():
            hidden.to_local().mul_(2.0)
        assert refused(y.sum().backward)
        # One that is not alive any more.
        hidden = x * 2.0
        y = norm(hidden)
        hidden.mul_(2.0)
        del hidden
        assert refused(y.sum().backward)
        # A weight without a gradient.
        weight = ones(8)
        y = functional.rms_norm(x, 8, weight)
        weight.mul_(2.0)
        assert refused(y.sum().backward)

        # One that is not alive any more, made of a tensor that is.
        local = x.to_local().detach() * 2.0
        y = functional.rms_norm(spread_from(local), 8, weight.requires_grad_())
        local.mul_(2.0)
        assert refused(y.sum().backward)
        # The part of one whose call has no plan.
        query, key = made(2, 1, 4, 8).requires_grad_() * 2.0, ones(2, 1, 4, 8)
        for written in (query, key):
            y = causal(query, key)
            with torch.no_grad():
                written.to_local().mul_(2.0)
            assert refused(y.sum().backward)
        # A plain mask, each of whose parts one process takes.
        mask = torch.zeros(2, 1, 4, 4)
        y = functional.scaled_dot_product_attention(
            made(2, 1, 4, 8).requires_grad_(), key, key, mask
        )
        mask.fill_(1.0)
        assert refused(y.sum().backward)
        # The sum that a norm saved, which needs no gradient.
        y, total = functional.add_rms_norm(made(4, 8), made(4, 8), 8, weight)
        total.mul_(2.0)
        assert refused(y.sum().backward)


def spread_from(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, mesh_of((2,)), [S0], run_check=False)


@on_ranks(2)
def test_writes_before_second_backwards() -> None:
    """Between a backward with create_graph=True and that of its gradients."""
    key = ones(2, 1, 4, 8)
    for call in (norm, lambda x: causal(x, key)):  # the second has no plan
        for _ in range(2):
            x = made(2, 1, 4, 8).requires_grad_()
            hidden = x * 2.0
            loss = (call(hidden) * made(2, 1, 4, 8)).sum()  # linear: its backward is not run again
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            torch.autograd.grad(gradient.sum(), x, retain_graph=True)
            hidden.mul_(2.0)
            assert refused(gradient.sum().backward)


@on_ranks(2)
def test_written_results() -> None:
    """A backward after one that found results written, which no operator had saved."""

    def equal_twice(loss, x):
        first, second = (
            whole(torch.autograd.grad(loss, x, retain_graph=True)[0]) for _ in range(2)
        )
        assert first.any() and torch.equal(first, second)

    for place in (S0, S2):  # the second is moved, and its call has no plan
        for _ in range(2):
            x = spread(torch.linspace(-1, 1, 128).reshape(4, 4, 8), mesh_of((2,)), [place])
            stream = norm(x.requires_grad_())
            stream.mul_(2.0)
            equal_twice((norm(stream) ** 3).sum(), x)
            part = stream.to_local()  # of other operators
            equal_twice((part**3).sum(), x)


@on_ranks(2)
def test_inference_tensors() -> None:
    """They have no version, and beside others they are refused where autograd would save them."""
    for _ in range(2):
        x = made(4, 8).requires_grad_()
        with torch.inference_mode():
            residual = made(4, 8)
            local = residual.to_local() * 1.0
        for other in (residual, spread_from(local)):
            functional.add_dropout(x, other, 0.0).sum().backward()
            assert torch.equal(x.grad.to_local(), torch.ones(2, 8))
            x.grad = None


@on_ranks(2)
def test_writes_between_calls() -> None:
    """A call after a write is not refused for one before it, in any order of backwards."""
    for order in ((0, 1), (1, 0), (1, 1, 0), (0, 1, 1)):
        x = made(4, 8).requires_grad_()
        hidden = x * 2.0
        dropped = functional.add_dropout(hidden, hidden, 0.0)  # saves neither
        hidden.mul_(2.0)
        results = dropped.sum(), norm(hidden).sum()
        for number in order:
            (gradient,) = torch.autograd.grad(results[number], x, retain_graph=True)
            if number == 0:
                assert torch.equal(gradient.to_local(), torch.full_like(gradient.to_local(), 4.0))
        plain = x.to_local().detach().requires_grad_()
        (wanted,) = torch.autograd.grad(functional.rms_norm(plain * 4.0, 8).sum(), plain)
        (gradient,) = torch.autograd.grad(results[1], x)
        assert torch.equal(gradient.to_local(), wanted)


@on_ranks(2)
def test_nothing_is_kept_alive() -> None:
    """What is kept for that keeps nothing alive that the operator does not save."""
    for _ in range(2):
        x = made(4, 8).requires_grad_()
        hidden = x * 2.0
        y = functional.add_dropout(hidden, hidden, 0.0)
        alive = weakref.ref(hidden), weakref.ref(hidden._local_tensor)
        memory = weakref.ref(hidden._local_tensor.untyped_storage())
        del hidden
        gc.collect()
        assert [x() for x in (*alive, memory)] == [None] * 3
        y.sum().backward()
        y = norm(x)
        memory = weakref.ref(y._local_tensor.untyped_storage())
        z = y + 1.0
        del y
        gc.collect()
        assert memory() is None and z.requires_grad
