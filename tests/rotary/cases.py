"""A case of rotary embedding, and how it is checked: outputs and gradients by the numerics rule."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onepass import functional, numerics, reference
from tests.support.dtypes import BF16, F16, F32, F64

DTYPES = (F32, BF16, F16, F64)


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = F32
    table_dtype: torch.dtype | None = None  # of cos and sin; None: dtype
    batch: int = 2
    heads: int = 4
    key_heads: int = 2  # 0: no key
    tokens: int = 5
    head_dim: int = 32
    rotary_dim: int | None = None  # None: head_dim
    half_width: bool = False
    interleaved: bool = False
    positions: str = ""  # "tokens" or "batch": their shape
    rows: int = 11  # of the table, with positions
    table_batch: int = 0  # 0: cos has two dimensions
    tokens_first: bool = False  # in memory
    seq_first: bool = False
    norms: tuple[str, ...] = ()  # which of query and key have one
    weight_dtype: torch.dtype | None = None  # None: dtype
    eps: float | None = 1e-6
    weight_offset: float = 0.0
    seed: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """query, key, cos, sin, positions and weights; key, positions and weights only if there are
        any."""
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape, dtype):
            return torch.randn(shape, generator=generator).to(dtype)

        def heads(count):
            if not self.tokens_first:
                x = randn(self.batch, count, self.tokens, self.head_dim, dtype=self.dtype)
            else:
                x = randn(self.batch, self.tokens, count, self.head_dim, dtype=self.dtype)
                x = x.transpose(1, 2)
            return x.transpose(1, 2) if self.seq_first else x

        width = self.turned // 2 if self.half_width else self.turned
        leading = (self.table_batch, self.tokens) if self.table_batch else (self.tokens,)
        shape = (*((self.rows,) if self.positions else leading), width)
        found = {"query": heads(self.heads), "key": heads(self.key_heads)}
        if not self.key_heads:
            del found["key"]
        found |= {name: randn(*shape, dtype=self.table_dtype or self.dtype) for name in TABLES}
        if self.positions:
            shape = (self.batch, self.tokens) if self.positions == "batch" else (self.tokens,)
            found["positions"] = torch.randint(self.rows, shape, generator=generator)
        for name in self.norms:
            weight = randn(self.head_dim, dtype=self.weight_dtype or self.dtype)
            found[f"{name}_weight"] = weight
        return found

    @property
    def turned(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def options(self) -> dict:
        return {
            "interleaved": self.interleaved,
            "rotary_dim": self.turned if self.half_width else None,
            "seq_first": self.seq_first,
        } | ({"eps": self.eps, "weight_offset": self.weight_offset} if self.norms else {})


TABLES = ("cos", "sin")
BOTH = ("query", "key")
LEAVES = (*BOTH, "query_weight", "key_weight")  # in the order of their gradients


def outputs_and_gradients(function, case: Case, tensors: dict[str, Tensor], wide=False) -> list:
    """Outputs and gradients of query and key, and gradients of the weights, with the same upstream
    gradients for every function."""
    own = {n: t.double() if wide and t.is_floating_point() else t for n, t in tensors.items()}
    leaves = {n: own[n].detach().requires_grad_() for n in LEAVES if n in own}
    given = {"key": None, **own, **leaves}
    outputs = [x for x in function(**given, **case.options) if x is not None]
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(x.shape, generator=generator).to(case.dtype) for x in outputs]
    upstream = [g.to(x.dtype) for g, x in zip(upstream, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    return [*(x.detach() for x in outputs), *gradients]


def check_tensors(case: Case, *draws: dict[str, Tensor]) -> None:
    """Several draws are judged together."""
    formula = reference.rotary.rotary_embedding
    found = []
    for tensors in draws:
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        ours = outputs_and_gradients(functional.rotary_embedding, case, tensors)
        ref = outputs_and_gradients(formula, case, tensors, wide=True)
        base = outputs_and_gradients(formula, case, tensors)
        dtypes = [tensors[name].dtype for name in (*BOTH, *LEAVES) if name in tensors]
        assert [x.dtype for x in ours] == dtypes
        found.append(list(zip(ours, ref, base, strict=True)))
        for name, tensor in tensors.items():
            assert torch.equal(tensor, before[name]), f"{name} was written"
    for number, of_draws in enumerate(zip(*found, strict=True)):
        numerics.assert_close(*zip(*of_draws, strict=True), f"{case}: result {number}")


def check(case: Case, **changes) -> None:
    """Narrow weights have few numbers, so several draws are pooled."""
    case = replace(case, **changes)
    seeds = range(1 + 64 // case.head_dim if case.norms else 1)
    check_tensors(case, *(replace(case, seed=seed).tensors() for seed in seeds))
