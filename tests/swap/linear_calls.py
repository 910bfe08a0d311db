"""Helpers of the tests of modules that call F.linear."""

from torch import nn

import onepass
from onepass import _dispatch_log
from onepass._policy import products
from onepass._policy.products import Facts

SLOW = Facts("AuthenticAMD", mkl=True, bfloat16=False, float16=False)
FAST = Facts("GenuineIntel", mkl=True, bfloat16=True, float16=True)
CALLS = "onepass.functional.linear"


def set_facts(monkeypatch, facts: Facts) -> None:
    monkeypatch.setattr(products, "facts", lambda: facts)


def swap(model: nn.Module, **options) -> onepass.Report:
    return onepass.swap(model, kinds=("linear",), **options)


def count(run) -> int:
    """The number of our calls in the forward of `run`."""
    with _dispatch_log.record() as calls:
        run()
    return sum(call["kernel"] in ("linear_kernel", "linear_few_rows_kernel") for call in calls)


class Block(nn.Module):
    """Holds the module and never calls F.linear itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.norm = inner, nn.LayerNorm(16)

    def forward(self, x):
        return x + self.inner(self.norm(x))
