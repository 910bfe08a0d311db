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
from onepass.distributed import plans
from tests.distributed.dtensors import mesh_of, spread
from tests.distributed.ranks import distributed, run
from tests.distributed.test_operators import CASES, S0, R, drawn, listed, upstream

pytestmark = distributed
REFUSED = "modified by an inplace operation"


def backward(call: Callable, given: dict, written: int | None) -> list[torch.Tensor] | None:
    """Gradients, None if refused, after a write to one of the inputs and outputs."""
    given = list(given.values())
    outputs = listed(call())
    if written is not None:
        with torch.no_grad():
            [*given, *outputs][written].mul_(2.0)
    wanted = map(_like, upstream(outputs), outputs)
    try:
        found = torch.autograd.grad(outputs, given, list(wanted))
    except RuntimeError as error:
        assert REFUSED in str(error), error
        return None
    return [x.to_local() if isinstance(x, DTensor) else x for x in found]


def _like(value, output):
    if not isinstance(output, DTensor):
        return value
    placements = [R if p.is_partial() else p for p in output.placements]
    return spread(value, output.device_mesh, placements)


def number_of_tensors(case) -> int:
    given = drawn(case, torch.float32)
    return len(given) + len(listed(case.call(**given)))


def refused_of_plain(case) -> list[bool]:
    found = []
    for written in range(number_of_tensors(case)):
        given = {n: x.requires_grad_() for n, x in drawn(case, torch.float32).items()}
        found.append(backward(functools.partial(case.call, **given), given, written) is None)
    return found


def body_of_case(name: str) -> list[bool]:
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
            for _ in range(3):  # the second has a plan
                gradients = found(place, written)
                assert (gradients is None) == is_refused, (place, written)
                assert is_refused or all(map(torch.equal, gradients, right)), (place, written)
    return plain


@pytest.mark.parametrize("name", CASES)
def test_a_write_is_refused_where_it_is_on_plain_tensors(name):
    run(2, body_of_case, name)


def test_the_cases_have_writes_of_both_kinds():
    refused = [is_refused for case in CASES.values() for is_refused in refused_of_plain(case)]
    assert 50 < sum(refused) < len(refused) - 50


def made(*shape: int) -> DTensor:
    return spread(torch.linspace(-1, 1, math.prod(shape)).reshape(shape), mesh_of((2,)), [S0])


def norm(x: DTensor) -> DTensor:
    return functional.rms_norm(x, 8)


def refused(function, *args) -> bool:
    try:
        function(*args)
    except RuntimeError as error:
        assert REFUSED in str(error), error
        return True
    return False


def body_of_other_writes() -> None:
    for _ in range(3):
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
        weight = spread(torch.ones(8), mesh_of((2,)), [R])
        y = functional.rms_norm(x, 8, weight)
        weight.mul_(2.0)
        assert refused(y.sum().backward)


def body_between_calls() -> None:
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


def body_of_memory() -> None:
    """The counters keep nothing alive that the operator does not save."""
    for _ in range(3):
        x = made(4, 8).requires_grad_()
        hidden = x * 2.0
        y = functional.add_dropout(hidden, hidden, 0.0)
        alive = weakref.ref(hidden), weakref.ref(hidden._local_tensor)
        memory = weakref.ref(hidden._local_tensor.untyped_storage())
        del hidden
        gc.collect()
        assert [x() for x in (*alive, memory)] == [None] * 3
        y.sum().backward()


@pytest.mark.parametrize(
    "body", [body_of_other_writes, body_between_calls, body_of_memory], ids=lambda b: b.__name__[5:]
)
def test_writes(body):
    run(2, body)
