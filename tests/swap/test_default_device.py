"""swap and verify work on the model's device, whatever torch's default device is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onepass
from tests.swap.test_mlp import WIDTH, Llamas, OtherOrder
from tests.swap.test_rotary import HEAD_DIM, Attention
from tests.swap.test_swap import Model


class Conditioned(nn.Module):
    """Parts of diffusers whose forward swap tries on small twins."""

    def __init__(self):
        super().__init__()
        normalization = pytest.importorskip("diffusers.models.normalization")
        resnet = pytest.importorskip("diffusers.models.resnet")
        self.norm = normalization.AdaLayerNormZero(32, num_embeddings=None)
        self.block = resnet.ResnetBlock2D(in_channels=32, temb_channels=16)

    def forward(self, x):
        embedding = x[..., 0, 0]
        return self.norm(x.flatten(2).mT, emb=embedding)[0], self.block(x, embedding[:, :16])


def rotated():
    angles = torch.randn(2, 5, HEAD_DIM)
    return Attention(), (torch.randn(2, 5, 32), angles.cos(), angles.sin())


CASES = {
    "norms": lambda: (Model(), (torch.randn(3, 5, 16),)),
    "gated": lambda: (nn.Sequential(Llamas(), OtherOrder()), (torch.randn(3, WIDTH),)),
    "rotary": rotated,
    "diffusers": lambda: (Conditioned(), (torch.randn(2, 32, 4, 4),)),
}


@pytest.mark.parametrize("case", CASES)
def test_swap_and_verify(case):
    expected = onepass.swap(CASES[case]()[0].eval())
    assert expected.swapped
    model, inputs = CASES[case]()
    model.eval()
    with torch.device("meta"):
        report = onepass.swap(model)
        verified = report.verify(*inputs)
    assert report.swapped == expected.swapped and report.skipped == expected.skipped
    assert verified.ok
