"""swap, kind "attention": random steps between the products of attention by hand, and its sizes."""

from __future__ import annotations

from random import Random as Rng

import pytest
import torch

from onepass._ops import small_calls
from onepass.swapping.by_hand import fate
from tests.swap import attention_by_hand as cases
from tests.swap.by_hand_beside_stock import assert_same, outcome, swapped, tokens

STEPS = {
    "multiply": lambda s, mask, bias: s * 0.4,
    "multiply in place": lambda s, mask, bias: s.mul_(0.7),
    "multiply from the left": lambda s, mask, bias: torch.tensor(0.5) * s,
    "divide": lambda s, mask, bias: s / 3,
    "negate": lambda s, mask, bias: s * -0.5,
    "add": lambda s, mask, bias: s + bias,
    "add to": lambda s, mask, bias: bias[:, :1] + s,
    "add in place": lambda s, mask, bias: s.add_(bias[:, :, :1]),
    "subtract": lambda s, mask, bias: s - bias,
    "subtract from": lambda s, mask, bias: bias - s,
    "fill": lambda s, mask, bias: s.masked_fill(mask, -torch.inf),
    "fill in place": lambda s, mask, bias: s.masked_fill_(mask[:1], -1e9),
    "fill a little": lambda s, mask, bias: s.masked_fill(mask, -2.0),
    "where": lambda s, mask, bias: torch.where(mask, -1e30, s),
    "where not": lambda s, mask, bias: torch.where(~mask, s, torch.tensor(-1e30)),
    "tanh": lambda s, mask, bias: 2 * torch.tanh(s / 2),
    "tanh alone": lambda s, mask, bias: s.tanh(),
    "view": lambda s, mask, bias: s.view(-1, *s.shape[2:]).view(s.shape),
    "transposed": lambda s, mask, bias: s.transpose(0, 1).transpose(0, 1),
    "clone": lambda s, mask, bias: s.clone(),
    "cast": lambda s, mask, bias: s.type_as(bias),
    "clamp": lambda s, mask, bias: s.clamp(-1, 1),
    "twice": lambda s, mask, bias: s + s * 0.1,
    "kept": lambda s, mask, bias: (s * 2, s.add_(1.0))[0],
    "softmax": lambda s, mask, bias: s.softmax(-1),
}


class Random(cases.Base):
    """A few random steps before and after the softmax."""

    def __init__(self, random):
        super().__init__()
        self.before = random.sample(sorted(STEPS), random.randint(0, 4))
        self.after = random.sample(sorted(STEPS), random.choice((0, 0, 0, 1)))

    def attend(self, q, k, v):
        batch, heads, count, _ = q.shape
        generator = torch.Generator().manual_seed(5)
        bias = torch.randn(batch, heads, count, count, generator=generator).to(q.dtype)
        mask = torch.rand(batch, 1, count, count, generator=generator) < 0.3
        mask[..., 2] = False
        scores = q @ k.transpose(-1, -2)
        for name in self.before:
            scores = STEPS[name](scores, mask, bias)
        scores = scores.softmax(-1)
        for name in self.after:
            scores = STEPS[name](scores, mask, bias)
        return torch.matmul(scores, v)


@pytest.mark.parametrize("seed", range(8))
def test_random_steps(seed):
    """Whatever is done to scores: taken or not, it computes the same."""
    random = Rng(seed)
    for _ in range(12):
        stock, ours = swapped(Random, random=random)
        inputs = [tokens(2) for _ in range(3)]
        try:
            outcome(stock, inputs[0])
        except RuntimeError:  # torch refuses some writes
            continue
        try:
            assert_same(stock, ours, inputs)
        except AssertionError as error:
            raise AssertionError(f"{stock.before}, softmax, {stock.after}: {error}") from None


@pytest.mark.parametrize(("cls", "is_masked"), [(cases.NanoGPT, True), (cases.Shortest, False)])
def test_small_calls_run_as_written(monkeypatch, cls, is_masked):
    """Bounds are those of modules with masks until the first call shows that there are none."""
    masked, without = 2**12, 2**14
    monkeypatch.setattr(small_calls, "LEAST_MASKED_BY_HAND", {torch.float32: (masked, masked)})
    monkeypatch.setattr(small_calls, "LEAST_BY_HAND", {torch.float32: (without, without)})
    monkeypatch.setattr(small_calls, "MOST_THREADS", 1)
    _, ours = swapped(cls)
    sizes = {batch: batch * cases.TOKENS**2 * cases.WIDTH for batch in (1, 4, 8)}
    assert sizes[1] < masked < sizes[4] < without < sizes[8]
    counts = []
    for batch in (1, 4, 4, 8):
        ours(tokens(batch))
        counts.append(fate(ours).taken)
    assert counts == ([0, 1, 2, 3] if is_masked else [0, 1, 1, 2])
    with small_calls.all_gain():
        ours(tokens(1))
    assert fate(ours).taken == counts[-1] + 1
