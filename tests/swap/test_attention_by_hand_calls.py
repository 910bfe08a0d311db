"""swap, kind "attention" by hand: the calls of torch's functions in it."""

import contextlib
from random import Random as Rng

import pytest
import torch
from torch import einsum
from torch.nn import functional as F

from onepass.swapping.by_hand import fate
from tests.swap import attention_by_hand as cases
from tests.swap.attention_by_hand import assert_same, outcome, swapped, tokens


class Modes(cases.Base):
    """Some of its calls run without gradients, or without autocast."""

    without: tuple[str, ...] = ()
    how = contextlib.nullcontext

    def within(self, call: str):
        return type(self).how() if call in self.without else contextlib.nullcontext()

    def attend(self, q, k, v):
        with self.within("product"):
            scores = q @ k.mT
        with self.within("softmax"):
            self.weights = scores.softmax(-1)
        with self.within("values"):
            return self.weights @ v


MODES = [("product",), ("softmax",), ("product", "softmax"), ("product", "softmax", "values")]
OTHER_ARGUMENTS = {
    "softmax": lambda q, k, v: torch.softmax(input=q @ k.mT, dim=-1) @ v,
    "dtype by position": lambda q, k, v: torch.softmax(q @ k.mT, -1, torch.float32).to(v.dtype) @ v,
    "method's dtype": lambda q, k, v: (q @ k.mT).softmax(-1, torch.float32).type_as(v) @ v,
    "multiply": lambda q, k, v: torch.mul(input=q @ k.mT, other=0.3).softmax(-1) @ v,
    "where": lambda q, k, v: (
        torch.where(condition=k[..., :1].mT > -1, input=q @ k.mT, other=-1e9).softmax(-1) @ v
    ),
    "fill": lambda q, k, v: (
        (q @ k.mT).masked_fill(value=-1e9, mask=k[..., :1].mT < -1).softmax(-1) @ v
    ),
    "values": lambda q, k, v: torch.matmul(input=(q @ k.mT).softmax(-1), other=v),
    "train": lambda q, k, v: torch.dropout((q @ k.mT).softmax(-1), 0.0, train=True) @ v,
    "out": lambda q, k, v: torch.add(
        q.detach() @ k.detach().mT, v.detach()[..., :1], out=q.new_empty(*q.shape[:3], k.shape[2])
    ).softmax(-1) @ v,
    "softmax's out": lambda q, k, v: torch.softmax(
        q.detach() @ k.detach().mT, -1, out=q.new_empty(*q.shape[:3], k.shape[2])
    ) @ v,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", OTHER_ARGUMENTS)
def test_other_arguments(call, dtype):
    """Names and places other than the usual ones."""
    stock, ours = (m.to(dtype) for m in swapped(cases.by_hand(OTHER_ARGUMENTS[call])))
    assert_same(stock, ours, [tokens(8, dtype=dtype) for _ in range(8)])


OTHER_TENSORS = {
    "fill": lambda scores, mask, bias: scores.masked_fill(mask=mask, value=-1e9),
    "subtract": lambda scores, mask, bias: scores.sub(other=bias),
    "where": lambda scores, mask, bias: torch.where(mask, torch.tensor([-1e9]), scores),
}


@pytest.mark.parametrize("call", OTHER_TENSORS)
def test_other_tensors(call):
    """In more rows than a proof has, of a wider dtype, and written to before a read."""

    class Named(cases.Base):
        def attend(self, q, k, v):
            count = q.shape[2]
            self.query, self.mask = q, ~self.causal[..., :count, :count]
            self.bias = self.mask.float()
            scores = OTHER_TENSORS[call](q @ k.mT, self.mask, self.bias)
            self.weights = scores.softmax(-1)
            return self.weights.to(v.dtype) @ v

    stock, ours = swapped(Named)
    stock, ours = stock.bfloat16(), ours.bfloat16()
    assert_same(stock, ours, torch.randn(8, 2, 40, cases.WIDTH, dtype=torch.bfloat16))
    assert fate(ours).taken == 8 and ours.weights.dtype is stock.weights.dtype
    with torch.no_grad():
        ours(tokens(dtype=torch.bfloat16))
        {"fill": ours.mask, "subtract": ours.bias, "where": ours.query}[call].zero_()
    with pytest.raises(RuntimeError, match="must not be written before its scores are read"):
        ours.weights.sum()


LAYOUTS = {
    "matmul": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "viewed": lambda q, k, v: ((q @ k.mT).softmax(-1) @ v).view(-1, *v.shape[2:]),
    "five dimensions": lambda q, k, v: (q[:, None] @ k[:, None].mT).softmax(-1) @ v[:, None],
    "one head of keys": lambda q, k, v: (q @ k[:, :1].mT).softmax(-1) @ v[:, :1],
    "einsum": lambda q, k, v: einsum(
        "bhij,bhjd->bhid", einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "tokens first": lambda q, k, v: einsum(
        "bhij,bhjd->bihd", einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "tokens last": lambda q, k, v: einsum(
        "bhij,bhjd->bhdi", einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "heads first": lambda q, k, v: einsum(
        "bhij,bhjd->hbid", einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "channels first": lambda q, k, v: einsum(
        "bts,bcs->bct", *(einsum("bct,bcs->bts", *(x.flatten(0, 1).mT for x in (q, k))).softmax(-1),
                          v.flatten(0, 1).mT)
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", LAYOUTS)
def test_layout_of_the_output(call):
    """It has the strides of torch's: code after it may view it in other sizes."""

    class Laid(cases.Base):
        def attend(self, q, k, v):
            self.y = LAYOUTS[call](q, k, v)
            return v * self.y.sum() + (0.0 if call else torch.softmax(q @ k.mT, -1) @ v)

    stock, ours = swapped(Laid)
    x = tokens()
    stock(x), ours(x)
    assert fate(ours).taken == 1
    assert ours.y.stride() == stock.y.stride()
    torch.testing.assert_close(ours.y, stock.y)


def test_other_dtypes():
    """The dtypes of a view and of a softmax."""
    found = []

    def attend(q, k, v):
        found.append(((q @ k.mT).view(torch.int16), torch.softmax(q @ k.mT, -1, torch.float32)))
        return found[-1][1].to(v.dtype) @ v

    stock, ours = (module.bfloat16() for module in swapped(cases.by_hand(attend)))
    x = tokens(dtype=torch.bfloat16)
    stock(x), ours(x)
    assert fate(ours).taken and torch.equal(found[1][0], found[0][0])
    assert found[1][1].dtype is found[1][1].add(0).dtype is torch.float32


@pytest.mark.parametrize("without", MODES)
def test_without_gradients_in_parts(without, monkeypatch):
    """Query and key get a gradient only through what is computed with gradients."""
    monkeypatch.setattr(Modes, "without", without)
    monkeypatch.setattr(Modes, "how", torch.no_grad)
    stock, ours = swapped(Modes)
    assert_same(stock, ours, [tokens() for _ in range(3)])
    assert bool(fate(ours).taken) == (len(without) == 3)


@pytest.mark.parametrize("without", MODES)
def test_without_autocast_in_parts(without, monkeypatch):
    monkeypatch.setattr(Modes, "without", without)
    monkeypatch.setattr(Modes, "how", lambda: torch.autocast("cpu", enabled=False))
    monkeypatch.setattr(
        Modes, "split", lambda self, x: [t.float() for t in cases.Base.split(self, x)]
    )
    stock, ours = swapped(Modes)
    for module in (stock, ours):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(tokens())
    assert fate(ours).taken
    assert ours.weights.dtype is stock.weights.dtype is ours.weights.add(0).dtype


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


FOLLOWED_BY_A_WRITE = {
    "in place": lambda s: (s * 2, s.add_(0.5))[0],
    "after a read": lambda s: (s * 2, s.sum(), s.mul_(3.0))[0],
    "through a view": lambda s: (s * 2, s[..., :2].fill_(1.0))[0],
    "twice": lambda s: ((s * 2) / 3, s.add_(0.5), s.add_(0.5))[0],
    "of a view": lambda s: (s.view(s.shape), s.add_(0.5))[0],
    "of a cast": lambda s: (s.to(torch.bfloat16).to(s.dtype), s.add_(0.5))[0],
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("write", FOLLOWED_BY_A_WRITE)
def test_a_write_after_the_next_step(write, mode):
    """What follows from scores before they are written has their old numbers; a view the new."""

    def attend(q, k, v):
        return FOLLOWED_BY_A_WRITE[write](q @ k.mT).tanh().softmax(-1) @ v

    stock, ours = swapped(cases.by_hand(attend))
    inputs = [tokens() for _ in range(4)]
    if mode is torch.enable_grad:
        assert_same(stock, ours, inputs)
    with mode():
        for x in inputs:
            torch.testing.assert_close(ours(x), stock(x))


def test_a_write_of_dropped_probabilities_after_the_next_step_raises():
    """They cannot be drawn again."""

    kept = []

    def attend(q, k, v):
        dropped = F.dropout((q @ k.mT).softmax(-1), 0.5)
        kept.append(dropped.bfloat16())
        dropped.mul_(3.0)
        return dropped @ v

    _, ours = swapped(cases.by_hand(attend))
    ours(tokens())
    with pytest.raises(RuntimeError, match="must not be written before what follows"):
        kept[0].sum()


@pytest.mark.parametrize("seed", range(8))
def test_random_steps(seed):
    """Whatever is done to scores: taken or not, it computes the same."""
    random = Rng(seed)
    for _ in range(8):
        stock, ours = swapped(Random, random=random)
        inputs = [tokens(2) for _ in range(8)]
        try:
            outcome(stock, inputs[0])
        except RuntimeError:  # torch refuses some writes
            continue
        try:
            assert_same(stock, ours, inputs)
        except AssertionError as error:
            raise AssertionError(f"{stock.before}, softmax, {stock.after}: {error}") from None
