"""Calls of the group norm family: tensors, and results by ours, by torch, in float64."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from tests.support.results import check_cases

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (F32, BF16, F16, F64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
activations = pytest.mark.parametrize("activation", [None, "silu"], ids=str)
orders = pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
RAW = torch.ops.onepass
NAMES = ("output", "dinput", "dweight", "dbias")


def channels_last(tensor: Tensor) -> Tensor:
    """The same with channels last in memory, whatever the number of dimensions."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


@dataclass
class Case:
    """One call: input, weight and bias (or None), and the upstream gradient."""

    tensors: list[Tensor | None]
    num_groups: int
    doutput: Tensor
    activation: str | None = None
    eps: float = 1e-5

    @property
    def text(self) -> str:
        tensors = " ".join(
            "none" if t is None else f"{str(t.dtype)[6:]}{tuple(t.shape)}" for t in self.tensors
        )
        return f"{self.activation} {tensors} {self.num_groups=} {self.tensors[0].stride()}"

    @property
    def input(self) -> Tensor:
        return self.tensors[0]

    def ours(self, input, weight=None, bias=None) -> Tensor:
        return functional.group_norm(
            input, self.num_groups, weight, bias, self.eps, activation=self.activation
        )

    def torchs(self, input, weight=None, bias=None) -> Tensor:
        if weight is None and bias is not None:  # of which torch's backward knows nothing
            weight = torch.ones_like(bias)
        y = F.group_norm(input, self.num_groups, weight, bias, self.eps)
        return F.silu(y) if self.activation else y

    def raw_backward(self, mask: int = 7, doutput: Tensor | None = None):
        """The operator's results, on statistics of its own forward."""
        kind, last = (
            2 if self.activation else 0,
            self.input.dim() > 3 and not (self.input.is_contiguous()),
        )
        forward = self.num_groups, self.eps, kind, last, None, True
        _, mean, rstd = RAW.group_norm_forward(*self.tensors, *forward)
        rest = self.num_groups, kind, last, mask
        doutput = self.doutput if doutput is None else doutput
        return RAW.group_norm_backward(doutput, *self.tensors, mean, rstd, *rest)


def make(
    shape: tuple[int, ...],
    num_groups: int,
    dtype: torch.dtype = F32,
    activation: str | None = "silu",
    *,
    last: bool = False,
    weight: bool = True,
    bias: bool = True,
    weight_dtype: torch.dtype | None = None,
    offset: float = 0.0,
    seed: int = 0,
) -> Case:
    """Random tensors; `last`: with channels last in memory."""
    generator = torch.Generator().manual_seed(seed)

    def random(size, dtype, offset=0.0):
        return torch.randn(size, generator=generator).add(offset).to(dtype)

    images = [random(shape, dtype, offset), random(shape, dtype)]
    if last:
        images = [channels_last(t) for t in images]
    channels = shape[1]
    weights = [random(channels, weight_dtype or dtype, 0.5) if w else None for w in (weight, bias)]
    return Case([images[0], *weights], num_groups, images[1], activation)


def results(function, case: Case, *, double: bool = False) -> dict[str, Tensor]:
    """{"output", "dinput" and, if there are, "dweight", "dbias"}."""
    # torch's own with channels last loses digits where means are large, in float64 too.
    leaves = [
        None if t is None else (t.double().contiguous() if double else t.detach()).requires_grad_()
        for t in case.tensors
    ]
    output = function(*leaves)
    given = [leaf for leaf in leaves if leaf is not None]
    gradients = iter(torch.autograd.grad(output, given, case.doutput.to(output.dtype)))
    found = {"output": output.detach()}
    for name, leaf in zip(NAMES[1:], leaves, strict=True):
        if leaf is not None:
            found[name] = next(gradients)
    return found


def check(*cases: Case) -> None:
    check_cases(results, cases)
