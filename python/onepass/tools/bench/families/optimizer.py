"""Cases of the optimizer family: clipping the gradients of a whole model, and AdamW's step.

``within`` the limit, gradients are only read; ``clipped``, they are written too. All functions are
called as a training loop calls them: with parameters that have gradients.

Eager is torch's fused step; for bfloat16 parameters with a float32 master, which torch does not
have, it is the usual code: gradients copied to float32, the fused step on float32 copies of
the parameters, the copies rounded back. The bytes that must move are those of the table in
csrc/cpu/optimizer/step.cpp's story: every operand read and written once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from onepass import optim
from onepass.reference import optimizer as reference
from onepass.tools.bench.case import Case, Function, Operator

MANY_SMALL = (400, 768)
LARGE = (8, 1 << 21)
ONE_LARGE = (1, 1 << 24)
QUICK = (5, 512)
# On CUDA: a billion parameters, a quarter of that if several copies must fit, and as many small
# tensors as a model of a billion has, where the host's time dominates a step.
CUDA_HUGE = (64, 1 << 24)
CUDA_LARGE = (16, 1 << 24)
CUDA_SMALL = (300, 768)
EMA_WEIGHT = 1e-3
MAX_NORM = {"within": 1e6, "clipped": 0.5}
CHECKED_SHAPES = ((768,), (5000,), (3, 7), (8192,))


_parameters: dict[int, list[Tensor]] = {}  # kept by the first gradient, made once


def _with(gradients: tuple[Tensor, ...]) -> list[Tensor]:
    """Parameters with these gradients.

    Real parameters: an operator that releases a gradient without a parameter takes Python's lock
    (torch 2.13), which does not happen in a training loop.
    """
    held = _parameters.get(id(gradients[0]))
    if held is None or held[0].grad is not gradients[0]:
        _parameters.clear()
        held = _parameters[id(gradients[0])] = [torch.empty_like(g) for g in gradients]
        for parameter, gradient in zip(held, gradients, strict=True):
            parameter.grad = gradient
    return held


def _clipping(max_norm: float) -> Operator:
    def formula(*gradients: Tensor) -> tuple[Tensor, ...]:
        norm, scaled = reference.clip_grad_norm(gradients, max_norm)
        return norm, *scaled

    def stock(*gradients: Tensor) -> tuple[Tensor, ...]:
        return torch.nn.utils.clip_grad_norm_(_with(gradients), max_norm), *gradients

    def ours(*gradients: Tensor) -> tuple[Tensor, ...]:
        return optim.clip_grad_norm_(_with(gradients), max_norm), *gradients

    return Operator(ours, stock, formula, base=stock)


# ---- the step ------------------------------------------------------------------------------------


class _Steps:
    """A variant of the step: an optimizer on copies of the first half of its tensors, with the
    second half as gradients. It is kept while the tensors are the same and alive, because those of
    all cases together do not fit on a device.

    Copies, since parameters stepped by another variant have changed from outside, and a master
    would be reseeded in every step.
    """

    def __init__(self, make: Callable[[list[Tensor]], Callable[[], object]]):
        self._make = make
        self._forget()

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._first() is not tensors[0]:
            self._first = weakref.ref(tensors[0], self._forget)
            half = len(tensors) // 2
            self._params = [tensor.detach().clone() for tensor in tensors[:half]]
            for param, gradient in zip(self._params, tensors[half:], strict=True):
                param.grad = gradient
            self._step = self._make(self._params)
        self._step()
        return tuple(self._params)

    def _forget(self, first: object = None) -> None:
        self._first = self._step = lambda: None
        self._params: list[Tensor] = []


def _optimizer(cls: type, **options) -> _Steps:
    return _Steps(lambda params: cls(params, **options).step)


def _stock_with_clipping(params: list[Tensor]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(params, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def _chain(params: list[Tensor]) -> Callable[[], object]:
    """Float32 masters by hand."""
    masters = [param.float() for param in params]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, fused=True)

    def step() -> None:
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
        optimizer.step()
        torch._foreach_copy_(params, masters)

    return step


def _then_averaged(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> Callable[[list[Tensor]], Callable[[], object]]:
    """An optimizer's step, and float32 averages of its parameters in a separate pass."""

    def made(params: list[Tensor]) -> Callable[[], object]:
        optimizer = make(params)
        averages = [param.float().clone() for param in params]

        def step() -> None:
            optimizer.step()
            torch._foreach_lerp_(averages, [param.float() for param in params], EMA_WEIGHT)

        return step

    return made


def _formula(*tensors: Tensor, max_norm: float = math.inf) -> tuple[Tensor, ...]:
    half = len(tensors) // 2
    _, gradients = reference.clip_grad_norm(tensors[half:], max_norm)
    return tuple(
        reference.adamw(param, gradient, torch.zeros_like(param), torch.zeros_like(param), 1)[0]
        for param, gradient in zip(tensors[:half], gradients, strict=True)
    )


def _make(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    params = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    return [*params, *(torch.randn_like(param) * 1e-2 for param in params)]


def gpt2_small() -> list[tuple[int, ...]]:
    """The parameters of GPT-2 small, 124 million in 148 tensors."""
    width, layers, words, positions = 768, 12, 50257, 1024
    layer = [
        (width,),
        (width,),
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        (width,),
        (width,),
        (width, 4 * width),
        (4 * width,),
        (4 * width, width),
        (width,),
    ]
    return [(words, width), (positions, width), *layer * layers, (width,), (width,)]


def _step_case(
    name: str,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    ours: Function,
    stock: Function,
    bytes_each: float | None,
    *,
    others: dict[str, Function] | None = None,
    formula: Function = _formula,
    device: str = "cpu",
) -> Case:
    elements = sum(math.prod(shape) for shape in shapes)
    return Case(
        f"optimizer/{name}",
        Operator(ours, stock, formula, base=stock, others=others or {}),
        partial(_make, shapes, dtype, device),
        False,
        None if bytes_each is None else 1,
        moved=None if bytes_each is None else int(bytes_each * elements),
        compiles=False,
        make_checked=partial(_make, CHECKED_SHAPES, dtype, device),
        device=device,
    )


def _steps(quick: bool, device: str) -> Iterator[Case]:
    float32, bfloat16 = torch.float32, torch.bfloat16
    on_cuda = device == "cuda"
    case = partial(_step_case, device=device)

    def shapes_of(many: tuple[int, int]) -> list[tuple[int]]:
        count, numel = QUICK if quick else many
        return [(numel,)] * count

    large = shapes_of(CUDA_LARGE if on_cuda else LARGE)
    small = shapes_of(CUDA_SMALL if on_cuda else MANY_SMALL)
    first = shapes_of(CUDA_HUGE) if on_cuda else large
    large_name, small_name, first_name = (f"{len(s)}x{s[0][0]}" for s in (large, small, first))
    stock = partial(_optimizer, torch.optim.AdamW)
    ours = partial(_optimizer, optim.AdamW)

    yield case(
        f"adamw/float32/{first_name}",
        first,
        float32,
        ours(),
        stock(fused=True),
        28,
        others={} if on_cuda else {"default": stock()},  # its temporaries need as much again
    )
    if not quick:  # which has the same shapes for both
        yield case(
            f"adamw/float32/{small_name}",
            small,
            float32,
            ours(),
            stock(fused=True),
            None,
            others={"default": stock()},
        )
        yield case(
            "adamw+clip/float32/gpt2-small",
            gpt2_small(),
            float32,
            ours(max_grad_norm=1.0),
            _Steps(_stock_with_clipping),
            32,
            formula=partial(_formula, max_norm=1.0),
        )
    averages = {"ema_decay": 1.0 - EMA_WEIGHT}
    averaged = ((large_name, large, 36), (small_name, small, None))
    for name, shapes, bytes_each in averaged[:1] if quick else averaged:
        yield case(
            f"adamw+ema/float32/{name}",
            shapes,
            float32,
            ours(**averages),
            _Steps(_then_averaged(partial(torch.optim.AdamW, fused=True))),
            bytes_each,
            others={"without": ours(), "apart": _Steps(_then_averaged(optim.AdamW))},
        )
    remainder = {"master": "remainder16", "state_dtype": bfloat16}
    yield case(
        f"adamw+ema/bfloat16/{large_name}/remainder16-26B",
        large,
        bfloat16,
        ours(**remainder, **averages),
        _Steps(_then_averaged(partial(torch.optim.AdamW, fused=True))),
        26,
        others={
            "without": ours(**remainder),
            "apart": _Steps(_then_averaged(partial(optim.AdamW, **remainder))),
        },
    )
    full = {"master": "fp32", "state_dtype": float32}
    yield case(
        f"adamw/bfloat16/{large_name}/master-28B",
        large,
        bfloat16,
        ours(**full),
        _Steps(_chain),
        28,
    )
    yield case(
        f"adamw/bfloat16/{large_name}/remainder16-18B",
        large,
        bfloat16,
        ours(master="remainder16", state_dtype=bfloat16),
        _Steps(_chain),
        18,
        others={"28 B": ours(**full)},
    )
    yield case(
        f"adamw/bfloat16/{large_name}/stochastic-14B",
        large,
        bfloat16,
        ours(master="stochastic", state_dtype=bfloat16),
        _Steps(_chain),
        14,
        others={"28 B": ours(**full)},
    )
    yield case(
        f"adamw/float32/{large_name}/int8-16B",
        large,
        float32,
        ours(state_dtype="int8"),
        stock(fused=True),
        16 + 4 * 4 / 256,
        others={"float32 states": ours()},
    )


# ---- Muon ----------------------------------------------------------------------------------------

MATRICES = {
    "200x64x64": 200 * [(64, 64)],
    "48x128x128": 48 * [(128, 128)],
    "gpt2-2-layers": 2 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)],
}
CHECKED_MATRICES = ((24, 40), (40, 24), (16, 16), (16, 16))


def _formula_of_muon(*tensors: Tensor) -> tuple[Tensor, ...]:
    half = len(tensors) // 2
    return tuple(
        reference.muon(param, gradient, torch.zeros_like(param))[0]
        for param, gradient in zip(tensors[:half], tensors[half:], strict=True)
    )


def _muon_cases(quick: bool, device: str) -> Iterator[Case]:
    """torch's products are always bfloat16. Ours have the dtype that is fast on the device, the
    default without ns_dtype; both dtypes are also timed by name. Arithmetic binds, so no bytes are
    counted."""
    shapes = {"4x64x64": 4 * [(64, 64)]} if quick else MATRICES
    for name, matrices in shapes.items():
        yield Case(
            f"optimizer/muon/float32/{name}",
            Operator(
                _optimizer(optim.Muon),
                _optimizer(torch.optim.Muon),
                _formula_of_muon,
                base=_optimizer(torch.optim.Muon),
                others={
                    f"ours, {dtype}": _optimizer(optim.Muon, ns_dtype=dtype)
                    for dtype in ("float32", "bfloat16")
                },
            ),
            partial(_make, matrices, torch.float32, device),
            False,
            None,
            compiles=False,
            make_checked=partial(_make, CHECKED_MATRICES, torch.float32, device),
            device=device,
        )


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps small shapes."""
    on_cuda = device == "cuda"
    for count, numel in (QUICK,) if quick else (CUDA_SMALL if on_cuda else MANY_SMALL, ONE_LARGE):
        for phase, max_norm in MAX_NORM.items():
            large = (count, numel) == ONE_LARGE
            yield Case(
                f"optimizer/clip_grad_norm/float32/{count}x{numel}/{phase}",
                _clipping(max_norm),
                lambda count=count, numel=numel: [
                    torch.randn(numel, device=device) for _ in range(count)
                ],
                False,
                (1 if phase == "within" else 3) if large else None,
                device=device,
            )
    yield from _steps(quick, device)
    yield from _muon_cases(quick, device)
