"""Threads: no bit depends on their number, and two share the work, as the plan says."""

from collections.abc import Callable

import pytest
import torch

import onepass
from onepass import _C, _dispatch_log, functional
from tests.all_families.test_samples import NAMES, repeated
from tests.support.calls import CALLS, FUNCTIONS
from tests.support.calls.memory import everything
from tests.support.results import Results, assert_same_bits

OPS = torch.ops.onepass
ELEMENTS = 1 << 17  # of the first argument, with work for many threads


def of_call(name: str) -> Callable[[bool], Callable[[], Results]]:
    """Forward and backward of few samples, or of many."""

    def make(is_large: bool) -> Callable[[], Results]:
        first = next(iter(FUNCTIONS[name].tensors().values()))
        _, given = repeated(name, ELEMENTS // first.numel() if is_large else 1)
        return lambda: everything(FUNCTIONS[name], given)

    return make


def of_tensors(small: int, large: int, make: Callable) -> Callable[[bool], Callable[[], Results]]:
    """What `make` returns for a size returns one or several tensors, of which some are trained."""

    def sized(is_large: bool) -> Callable[[], Results]:
        run, *leaves = make(large if is_large else small)

        def results() -> Results:
            found = run()
            found = found if isinstance(found, tuple | list) else (found,)
            if leaves:
                gradients = torch.autograd.grad([y.sum() for y in found], leaves)
                found = (*(y.detach() for y in found), *gradients)
            return {str(number): tensor for number, tensor in enumerate(found)}

        return results

    return sized


def loss(rows):
    x, target = torch.randn(rows, 64, requires_grad=True), torch.zeros(rows, dtype=torch.int64)
    return (lambda: functional.cross_entropy(x, target)), x


def linear_loss(rows):
    x, target = torch.randn(rows, 64, requires_grad=True), torch.zeros(rows, dtype=torch.int64)
    weight = torch.randn(64, 64, requires_grad=True)
    return (lambda: functional.linear_cross_entropy(x, weight, target)), x, weight


def plain_attention(queries):
    x = torch.randn(2, 4, queries, 16, dtype=torch.float64, requires_grad=True)
    return (lambda: functional.scaled_dot_product_attention(x, x, x)), x


def decode(keys):
    query, cache = torch.randn(2, 4, 1, 16), torch.randn(2, 4, keys, 16)
    return (lambda: functional.attention_with_kv_cache(query, cache, cache, cache_seqlens=keys),)


def gradients(elements):
    return [torch.randn(elements), torch.randn(4)]


def gradient_norm(elements):
    given = gradients(elements)
    return (lambda: OPS.gradient_norm(given),)


def clip(elements):
    given = gradients(elements)
    return (lambda: (OPS.clip_grad_norm(given, 1e-3, 2.0, False), *given),)


def optimizer(name):
    def make(elements):
        parameters = [torch.nn.Parameter(tensor) for tensor in gradients(elements)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        made = getattr(onepass.optim, name)(parameters, lr=1e-3)
        made.step()  # states are there from now on

        def run():
            made.step()
            return [parameter.detach() for parameter in parameters]

        return (run,)

    return make


# Calls, and the fifth part of their variants, but without work for two threads: attention to no
# keys, and products of a few classes.
SAMPLES = [name for name in NAMES if name in CALLS]
SAMPLES += [name for name in NAMES if name not in CALLS][::5]
SAMPLES = [n for n in SAMPLES if "no keys" not in n and "linear_cross_entropy" not in n]
CASES = {name: of_call(name) for name in SAMPLES}
CASES |= {
    "loss": of_tensors(16, 16384, loss),
    "linear_loss": of_tensors(4, 4096, linear_loss),
    "float64 attention": of_tensors(2, 64, plain_attention),
    "decode": of_tensors(16, 16384, decode),
    "gradient_norm": of_tensors(4096, 1 << 20, gradient_norm),
    "clip": of_tensors(4096, 1 << 20, clip),
}
CASES |= {n: of_tensors(2048, 1 << 20, optimizer(n)) for n in ("AdamW", "Adam", "SGD", "Lion")}


def spread(run: Callable) -> tuple[int, dict[str, int]]:
    """The parallel regions that a call enters, and by operator the most threads of its plans."""
    before, most = _C.parallel_regions(), {}
    with _dispatch_log.record() as records:
        run()
    for record in records:
        most[record["op"]] = max(most.get(record["op"], 0), record["threads"])
    return _C.parallel_regions() - before, most


@pytest.mark.isa
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_threads(name):
    found = []
    for threads in (1, 2, 3):
        torch.manual_seed(0)
        run = CASES[name](is_large=True)
        torch.set_num_threads(threads)
        found.append(run())
    for other in found[1:]:
        assert_same_bits(other, found[0], name)


@pytest.mark.parametrize("name", CASES)
def test_threads_have_enough_to_do(name):
    torch.set_num_threads(2)
    regions, plans = spread(CASES[name](is_large=False))
    assert regions == 0 and {*plans.values()} == {1}, plans
    regions, plans = spread(CASES[name](is_large=True))
    if name in FUNCTIONS and name not in CALLS:  # whose weights of a layer are few
        plans.pop("linear_backward: dweight", None)
    plans.pop("linear_backward: dbias", None)  # a call of its own where dweight is quantised
    assert regions > 0 and {*plans.values()} == {2}, plans


def test_a_step_of_nn_linear_4_4_enters_no_region():
    torch.set_num_threads(2)
    model = torch.nn.Linear(4, 4)
    made = onepass.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    assert [spread(made.step)[0] for _ in range(3)] == [0, 0, 0]


def test_many_short_tensors_are_counted_by_their_elements():
    torch.set_num_threads(2)
    short = [torch.ones(4) for _ in range(200)]
    assert spread(lambda: OPS.gradient_norm(short))[0] == 0
