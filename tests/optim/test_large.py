"""More elements than 32 bits can count."""

import psutil
import pytest
import torch

import onepass

ELEMENTS = (1 << 31) + 4097
NEEDED = 10 << 30  # bytes: parameter and gradient, and room

needs_memory = pytest.mark.skipif(
    psutil.virtual_memory().available < NEEDED, reason="needs 10 GiB of free memory"
)


@pytest.mark.slow
@needs_memory
def test_more_than_two_to_the_31_elements():
    """Both ends of a parameter, and the border, are stepped; the norm counts all of them."""
    torch.set_num_threads(2)
    p = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=torch.bfloat16))
    p.grad = torch.zeros(ELEMENTS, dtype=torch.bfloat16)
    places = [0, (1 << 31) - 1, 1 << 31, ELEMENTS - 1]
    for place in places:
        p.grad[place] = 1.0
    optimizer = onepass.optim.SGD([p], lr=0.5, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm == 2.0
    # Clipped to a norm of one, each of the four gradients is a half.
    assert [p[place].item() for place in places] == [0.75] * 4
    assert p.detach()[1:1000].eq(1).all() and p.detach()[-1000:-1].eq(1).all()
