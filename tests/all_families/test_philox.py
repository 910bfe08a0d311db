"""The frozen random stream: known answers, and its layout over elements."""

import pytest
import torch

from onepass import functional
from onepass.reference.dropout import keep_scale, philox4x32

pytestmark = pytest.mark.isa

# Known-answer vectors of Philox4x32-10 as the authors publish them with Random123: counter, key,
# output.
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("counter, key, answer", KNOWN)
def test_known_answers(counter, key, answer):
    drawn = philox4x32(tuple(words(key)), tuple(torch.tensor([w]) for w in words(counter)))
    assert [int(word) for word in drawn] == words(answer)


def test_golden_dropout():
    """Counter (block, 0, 0, offset) and key = seed, eight 16-bit values a block, low halves first.

    Frozen: a change of these bits is a change of every seeded run.
    """
    drawn = philox4x32((0x89ABCDEF, 0x01234567), tuple(torch.tensor([w]) for w in (2, 0, 0, 42)))
    halves = [(int(word) >> shift) & 0xFFFF for word in drawn for shift in (0, 16)]
    seed = torch.tensor([0x0123456789ABCDEF, 42])
    for index, half in enumerate(halves):
        threshold = half + 1  # the smallest that drops this element
        factor = keep_scale(seed, 24, threshold / 65536)
        assert factor[16 + index] == 0
        if half:
            assert keep_scale(seed, 24, half / 65536)[16 + index] == 65536 / (65536 - half)


@pytest.mark.parametrize("first", [0, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize("second", [0, -1, 2**32 - 1, 2**40 + 5])
def test_seeds_of_any_sign_and_size(first, second):
    seed = torch.tensor([first, second])
    x = torch.ones(300)
    output = torch.ops.onepass.dropout_forward(x, None, seed, 0.37, None)
    assert torch.equal(output, keep_scale(seed, 300, 0.37))


def test_fused_norm_drops_what_dropout_drops():
    x, r = torch.randn(7, 13), torch.zeros(7, 13)
    torch.manual_seed(9)
    _, stream = functional.add_rms_norm(x, r, 13, dropout_p=0.5)
    torch.manual_seed(9)
    assert torch.equal(stream, functional.dropout(x, 0.5))
