"""Cases of the selective scan family against the loop over tokens that models run without a kernel.

Arithmetic is the limit: per token and number of a channel's state an exp and three multiply-adds
forward; backward the exp again and twelve. The ceiling is that of multiply-adds, of which an exp
counts as many as it has instructions. "exp alone" is torch's exp of as many numbers, in the cache.

Of an update the state must be read and written, and Mamba 1's A read: the ceiling is an update in
place. States lie in no cache, as those of a model's layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from onepass.tools.bench.case import Case, Operator

SHAPE = (1, 2048, 512)  # batch, channels, tokens
SHORT = (1, 2048, 64)  # backward, the loop takes time that grows with the length's square
QUICK = (1, 24, 40)
CHECKED = (1, 40, 160)
STATE = 16
EXP = 14  # instructions
FORWARD, BOTH = EXP + 3, 2 * EXP + 15
IN_CACHE = 1 << 15
# Of updates: (batch, channels, state), and (batch, heads, channels, state) of Mamba 2.
ONE, HEADS = (8, 5120, 16), (8, 80, 64, 128)
QUICK_ONE, QUICK_HEADS = (2, 24, 16), (2, 4, 8, 32)


def _ours(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor]:
    return (functional.selective_scan(u, delta, A, B, C, D),)


def _loop(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor]:
    """The fallback of transformers."""
    decays = torch.exp(A[:, None] * delta[..., None])
    inputs = (delta * u)[..., None] * B.mT[:, None]
    h, outputs = decays.new_zeros((len(u), *A.shape)), []
    for t in range(u.shape[-1]):
        h = decays[:, :, t] * h + inputs[:, :, t]
        outputs.append(torch.matmul(h.to(C.dtype), C[..., t, None])[..., 0])
    return ((torch.stack(outputs, -1) + D[:, None] * u).to(u.dtype),)


def _formula(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor]:
    dtype = torch.promote_types(u.dtype, torch.float32)
    wide = [tensor.to(dtype) for tensor in (u, delta, A, B, C, D)]
    return (reference.selective_scan.selective_scan(*wide)[0].to(u.dtype),)


def _exp_alone(u: Tensor, *others: Tensor) -> tuple[Tensor]:
    numbers = torch.full((IN_CACHE,), -0.5, device="cpu")
    result = torch.empty_like(numbers)
    for _ in range(u.numel() * STATE // IN_CACHE):
        torch.exp(numbers, out=result)
    return (u,)


FORWARD_OPERATOR = Operator(_ours, _loop, _formula, _formula, others={"exp alone": _exp_alone})
OPERATOR = Operator(_ours, _loop, _formula, _formula)


def _update(*tensors: Tensor) -> tuple[Tensor]:
    return (functional.selective_state_update(*tensors, dt_softplus=True),)


def _stock_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, *others: Tensor):
    """The fallback of transformers."""
    B, C, D, z, bias = others
    if state.dim() == 4:
        B, C = (f.repeat_interleave(state.shape[1] // f.shape[1], 1) for f in (B, C))
    step = F.softplus(dt + bias.to(dt.dtype)).to(A.dtype)
    after = state.to(A.dtype) * torch.exp(step[..., None] * A)
    after = after + step[..., None] * B[..., None, :].to(A.dtype) * x[..., None].to(A.dtype)
    state.copy_(after.to(state.dtype))
    output = torch.matmul(after.to(C.dtype), C[..., None])[..., 0] + x * D
    return ((output * F.silu(z)).to(x.dtype),)


def _formula_of_update(*tensors: Tensor) -> tuple[Tensor]:
    dtype = torch.promote_types(tensors[1].dtype, torch.float32)
    wide = [tensor.to(dtype) for tensor in tensors]
    output, _ = reference.selective_scan.selective_state_update(*wide, dt_softplus=True)
    return (output.to(tensors[1].dtype),)


UPDATE = Operator(_update, _stock_update, _formula_of_update, _formula_of_update)


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a CPU; CUDA has no kernel. `quick` keeps a small shape."""
    if device != "cpu":
        return
    for order in ("channels last", "channels first"):
        for dtype in (torch.float32, torch.bfloat16):
            yield _case(order, QUICK if quick else SHAPE, dtype, "forward")
            if dtype is torch.float32:  # the loop in 16 bits takes minutes
                yield _case(order, QUICK if quick else SHORT, dtype, "forward+backward")
    for dtype in (torch.float32, torch.bfloat16):
        yield _update_case("update", QUICK_ONE if quick else ONE, dtype)
        yield _update_case("update of heads", QUICK_HEADS if quick else HEADS, dtype)


def _update_case(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    batch, *own, state = shape

    def make() -> list[Tensor]:
        numbers = -torch.arange(1.0, state + 1, device="cpu")
        if len(own) == 2:  # one for all channels and numbers of a head
            A, dt, D, bias = (
                drawn.expand(*of)
                for drawn, of in (
                    (-torch.rand(own[0], 1, 1, device="cpu"), (*own, state)),
                    (torch.randn(batch, own[0], 1, device="cpu").to(dtype), (batch, *own)),
                    (torch.randn(own[0], 1, device="cpu"), own),
                    (torch.randn(own[0], 1, device="cpu"), own),
                )
            )
            factor = (batch, 1, state)
        else:
            A, factor = numbers.expand(*own, -1).contiguous(), (batch, state)
            dt = torch.randn(batch, *own, device="cpu").to(dtype)
            D, bias = (torch.randn(own, device="cpu") for _ in "Db")
        B, C = (torch.randn(factor, device="cpu").to(dtype) for _ in "BC")
        x, z = (torch.randn(batch, *own, device="cpu").to(dtype) for _ in "xz")
        return [torch.randn(shape, device="cpu").to(dtype), x, dt, A, B, C, D, z, bias]

    of_state = dtype.itemsize * batch * state * math.prod(own)
    of_A = 0 if len(own) == 2 else 4 * state * own[0]
    return Case(
        f"selective_scan/{kind}/{str(dtype).removeprefix('torch.')}/{'x'.join(map(str, shape))}/"
        "forward",
        UPDATE,
        make,
        False,
        tensors=None,
        moved=2 * of_state + of_A,
        cold=True,
        compiles=False,
    )


def _case(order: str, shape: tuple[int, int, int], dtype: torch.dtype, phase: str) -> Case:
    batch, channels, length = shape
    backward = phase != "forward"

    def of_tokens(size: int, batch: int, length: int) -> Tensor:
        drawn = torch.randn(batch, length, size, device="cpu").mT
        return drawn if order == "channels last" else drawn.contiguous()

    def make(shape: tuple[int, int, int] = shape) -> list[Tensor]:
        batch, channels, length = shape
        x, step = (of_tokens(channels, batch, length) for _ in "xs")
        tensors = [x.to(dtype), F.softplus(step - 2).to(dtype)]
        numbers = torch.arange(1.0, STATE + 1, device="cpu")
        tensors.append(-numbers.expand(channels, -1).contiguous())
        tensors += [of_tokens(STATE, batch, length).to(dtype) for _ in "BC"]
        tensors.append(torch.ones(channels, device="cpu"))
        return [tensor.requires_grad_(backward) for tensor in tensors]

    return Case(
        f"selective_scan/{order}/{str(dtype).removeprefix('torch.')}/{batch}x{channels}x{length}/"
        f"{phase}",
        OPERATOR if backward else FORWARD_OPERATOR,
        make,
        backward,
        tensors=None,
        make_checked=None if shape == QUICK else partial(make, CHECKED),
        flops=2 * (BOTH if backward else FORWARD) * batch * channels * length * STATE,
        compiles=False,
    )
