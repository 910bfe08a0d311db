"""Results and gradients of a sample have the same bits whatever the rest of its batch is."""

import re

import pytest
import torch

from tests.support.calls import CALLS, FUNCTIONS
from tests.support.calls.memory import everything, of_samples, samples, with_upstream
from tests.support.results import Results, same_bits
from tests.support.seeds import set_seed

# Packed sequences have no batch, one row is none, a mean is of all rows, a merge is torch's. Few
# rows of a quantised layer have other bits than many: tests/quantized_linear has its test.
WITHOUT = ("varlen", "merge", "linear of () rows", "cross_entropy", "quantized_linear")
NAMES = [n for n, c in FUNCTIONS.items() if c.differentiable and not any(w in n for w in WITHOUT)]
NAMES += [name for name in FUNCTIONS if re.search("cross_entropy (none|all)", name)]


def repeated(name: str, times: int) -> tuple[int, Results]:
    """The number of samples, and the arguments of `times` as many."""
    call = FUNCTIONS[name]
    given = call.tensors()
    count = len(next(iter(given.values())))
    return count, with_upstream(call, samples(given, torch.arange(times * count) % count))


def check(name: str) -> None:
    call, (count, given) = FUNCTIONS[name], repeated(name, 5)
    set_seed(3)
    own, state = of_samples(given), torch.get_rng_state()
    whole = everything(call, given)
    parts = [slice(0, 1), slice(0, 3), slice(1, 2), slice(count, 4 * count)]
    # What is drawn belongs to a place in the batch.
    is_drawn = not torch.equal(state, torch.get_rng_state())
    for rows in parts[:2] if is_drawn else parts:
        found = everything(call, samples(given, rows))
        for result, tensor in found.items():
            argument = result.removeprefix("gradient of ")
            if argument in own or result.startswith("result") and tensor.dim():
                expected = whole[result][rows]
                assert same_bits({"": tensor}, {"": expected}), f"{name}: {result} of {rows}"


@pytest.mark.isa
@pytest.mark.parametrize("name", NAMES)
def test_every_operator(name):
    check(name)


@pytest.mark.parametrize("name", [name for name in NAMES if name in CALLS])
def test_on_cuda(cuda, name):
    check(name)
