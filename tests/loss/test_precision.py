"""`linear_cross_entropy` in float32 whose products take factors rounded to bfloat16."""

import pytest
import torch
import torch.nn.functional as F

from onepass import functional, numerics
from tests.linear.test_precision import global_precision, needs_dots

lce = functional.linear_cross_entropy


def operands(seed, rows=300, columns=40, classes=130):
    random = torch.Generator().manual_seed(seed)
    x, w, b = (
        torch.randn(s, generator=random) for s in ((rows, columns), (classes, columns), classes)
    )
    return x, w, b, torch.randint(classes, (rows,), generator=random)


def rounded(x):
    return x.bfloat16().to(x.dtype)


class RoundedGradient(torch.autograd.Function):
    """x, and its gradient rounded, as a factor of the next products."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return rounded(dx)


def composed(tensors, target, dtype, rounds_gradient, **options):
    """The loss of products of factors that are rounded; the bias is no factor."""
    x, w, b = (t.detach().to(dtype).requires_grad_() for t in tensors)
    sums = rounded(x) @ rounded(w).t()
    logits = (RoundedGradient.apply(sums) if rounds_gradient else sums) + b
    loss = F.cross_entropy(logits, target, **options)
    upstream = torch.ones_like(loss)
    return loss.detach(), *torch.autograd.grad(loss, (x, w, b), upstream)


@needs_dots
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_products_are_those_of_rounded_factors(reduction):
    ways = [[], [], []]
    for seed in range(3):
        *tensors, target = operands(seed)
        x, w, b = (t.requires_grad_() for t in tensors)
        loss = lce(x, w, target, linear_bias=b, reduction=reduction, precision="medium")
        gradients = torch.autograd.grad(loss, (x, w, b), torch.ones_like(loss))
        ways[0].append((loss.detach(), *gradients))
        ways[1].append(composed(tensors, target, torch.float64, False, reduction=reduction))
        ways[2].append(composed(tensors, target, torch.float32, True, reduction=reduction))
    for ours, ref, base in zip(*(zip(*way, strict=True) for way in ways), strict=True):
        verdict = numerics.compare(list(ours), list(ref), list(base))
        assert verdict.ok, verdict.text


@needs_dots
def test_torchs_setting_is_followed_and_autocast_decides_before_it():
    x, w, b, target = operands(0)
    exact, medium = (lce(x, w, target, linear_bias=b, precision=p) for p in ("highest", "medium"))
    assert not torch.equal(exact, medium)
    with global_precision("medium"):
        assert torch.equal(lce(x, w, target, linear_bias=b), medium)
        assert torch.equal(lce(x, w, target, linear_bias=b, precision="high"), exact)
    with torch.autocast("cpu", torch.bfloat16):
        expected = lce(x, w, target, linear_bias=b)
        assert torch.equal(lce(x, w, target, linear_bias=b, precision="medium"), expected)


@needs_dots
def test_compiled_and_differentiated_twice():
    x, w, b, target = operands(0, 20, 8, 12)
    leaves = [t.requires_grad_() for t in (x, w, b)]

    def loss(x, w, b):
        return lce(x, w, target, linear_bias=b, precision="medium")

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    pairs = [torch.autograd.grad(f(*leaves), leaves) for f in (loss, compiled)]
    assert all(map(torch.equal, *pairs))

    def second(f, leaves):
        first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    def exact(x, w, b):
        return F.cross_entropy(x @ w.t() + b, target)

    doubles = [t.detach().double().requires_grad_() for t in leaves]
    for ours, right in zip(second(loss, leaves), second(exact, doubles), strict=True):
        assert (ours - right).norm() < 0.03 * right.norm()
