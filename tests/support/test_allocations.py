"""Bytes are counted, whichever library allocates them."""

import torch

import onepass  # noqa: F401  (which registers the operators)
from tests.support.allocations import allocated


def test_the_bytes_are_counted():
    assert allocated(lambda x: x.clone(), torch.zeros(4096)) >= 16384
    gate, up = torch.zeros(64, 128)[:, ::2], torch.zeros(64, 64)  # one that is copied
    assert allocated(torch.ops.onepass.gate_forward, gate, up, 2, False) == 2 * up.nbytes
