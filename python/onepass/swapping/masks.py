"""Dropout alike in stock and swapped, so that a step with dropout is compared exactly.

In both forms every call of torch's dropout draws a seed from torch's generator, as onepass's
operators do, and drops by their definition in :mod:`onepass.reference`. So from the same random
state both drop the same elements, and draw all other numbers alike.

The swapped form runs first and notes each operator that takes a seed: of what shape its mask is,
and whether it belongs to scores of attention, whose masks are defined differently. A call of stock
that draws the seed gets that mask. Stock in float64 is given the random numbers of stock, because
torch draws others for that dtype.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from onepass._random import draw_seed
from onepass.functional.attention import _autocast
from onepass.nn.dropout import _is_channels_last
from onepass.reference import attention, dropout
from onepass.swapping.undisturbed import Random, uncompiled

_attend = torch._scaled_dot_product_attention_math
_DROPOUTS = (F.dropout, torch.dropout, torch.dropout_)
# Functions of torch that call others, of which dropout may be one: checkpoints run in a backward.
_CALLING = (
    F.multi_head_attention_forward,
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
)
# Operators of torch whose results are random numbers alone.
_SAMPLERS = {
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "poisson"),
    *("multinomial", "normal", "normal_", "rand", "rand_like", "randn", "randn_like", "uniform_"),
}
# Arguments with which attention numbers scores by positions in sequences of their own.
_POSITIONS = ("cu_seq_q", "seqused_k", "block_table", "query_offset", "key_offset")


class _DropoutCall(NamedTuple):
    """A call of dropout: `shape` is that of its mask, empty if stock has none like it."""

    p: float
    shape: tuple[int, ...]
    of_scores: bool
    is_operators: bool = False

    def keep(self, seed: Tensor) -> Tensor:
        """The mask: True for elements that are kept."""
        if self.of_scores:
            rows, cols = self.shape[-2:]
            heads = math.prod(self.shape[:-2])
            return attention.keep_scale(seed, (1, heads, rows, cols), self.p) != 0
        numel = math.prod(self.shape)
        return dropout.keep_scale(seed, numel, self.p, device=seed.device) != 0

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether elements of a tensor of this shape have the order of the mask's: the first
        dimensions of either may be merged."""
        few, many = sorted((self.shape, shape), key=len)
        tail = few[1:]
        is_same = few == many or (tail and tail == many[-len(tail) :])
        return bool(is_same) and math.prod(few) == math.prod(many)


class Unpaired(Exception):
    """Why stock cannot have the masks of the swapped form."""


class Masks:
    """The masks of one step.

    Attributes:
        calls: by seed.
    """

    def __init__(self):
        self._problem = ""
        self.calls: dict[tuple, _DropoutCall] = {}
        self._keep: dict[tuple, Tensor] = {}
        self._noise: list[tuple] = []  # (numbers, state of the generator after them)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Runs the swapped form inside."""
        with uncompiled(), _Dropouts(self, notes=True), _Operators(self):
            yield

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Runs stock inside."""
        self._noise = []
        with uncompiled(), _Dropouts(self), _Noise(self._noise):
            yield

    @contextlib.contextmanager
    def repeated_exactly(self) -> Iterator[None]:
        """Runs stock in float64 inside, with the random numbers of the last run of stock."""
        with uncompiled(), _Dropouts(self), _Noise(self._noise, replays=True):
            yield

    def check(self, swapped: Random, stock: Random) -> None:
        """Raises Unpaired if masks or other random numbers differed.

        Args:
            swapped, stock: the random state after each run.
        """
        if self._problem:
            raise Unpaired(self._problem)
        if swapped != stock:
            raise Unpaired("stock and swapped draw different random numbers")

    def note(self, seed: Tensor, call: _DropoutCall) -> None:
        self.calls.setdefault(tuple(seed.tolist()), call)

    def keep(self, seed: Tensor, input: Tensor, call: _DropoutCall) -> Tensor:
        """The mask of a call of torch's dropout."""
        key, shape = tuple(seed.tolist()), call.shape
        made = self.calls.get(key)
        moved = (shape[0], *shape[2:], shape[1]) if len(shape) in (4, 5) else ()
        is_moved = (
            made is not None
            and made.is_operators
            and not made.of_scores
            and made.shape == moved != ()
            and _is_channels_last(input)
        )
        if made is None:
            self._problem = self._problem or "stock drops elements where the swapped model does not"
        elif not (is_moved or made.fits(shape)):
            self._problem = self._problem or "stock drops elements of tensors of other shapes"
        if made is None or self._problem:
            return call.keep(seed).view(shape)
        if key not in self._keep:
            self._keep[key] = made._replace(p=call.p).keep(seed)
        mask = self._keep[key]
        return mask.view(moved).movedim(-1, 1) if is_moved else mask.view(shape)


class _Dropouts(TorchFunctionMode):
    """Calls torch's dropout by onepass's definition."""

    def __init__(self, masks: Masks, notes: bool = False):
        super().__init__()
        self._masks, self._notes = masks, notes

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not all(cls in (Tensor, nn.Parameter) for cls in types):
            return func(*args, **kwargs)
        if any(func is f for f in _CALLING):
            with self:
                return _without_overrides(func)(*args, **kwargs)
        ours = None
        if any(func is f for f in _DROPOUTS):
            ours = self._dropout(func, *args, **kwargs)
        elif func is F.scaled_dot_product_attention:
            ours = self._attention(*args, **kwargs)
        return func(*args, **kwargs) if ours is None else ours

    def _dropout(self, func, input, p=0.5, training=True, inplace=False, *, train=True):
        if not (training and train and _is_drawn(input, p)):
            return None
        keep, scale = self._mask(input, p, tuple(input.shape), False)
        factor = keep.to(input.dtype) * scale
        return input.mul_(factor) if inplace or func is torch.dropout_ else input * factor

    def _attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False,
    ):  # fmt: skip
        if not _is_drawn(query, dropout_p):
            return None
        keep, factor = self._mask(query, dropout_p, (*query.shape[:-1], key.shape[-2]), True)
        query, key, value = _autocast(query, key, value)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            attn_mask = attn_mask.to(query.dtype)
        _warn_once()
        with torch.autocast(query.device.type, enabled=False):
            return _attend(
                query, key, value, attn_mask, 1 - 1 / factor, is_causal, keep, scale=scale,
                enable_gqa=enable_gqa,
            )[0]  # fmt: skip

    def _mask(self, input, p, shape, of_scores) -> tuple[Tensor, float]:
        """(the mask, the factor of what is kept)."""
        seed, call = draw_seed(input.device), _DropoutCall(float(p), shape, of_scores)
        if self._notes:
            self._masks.note(seed, call)
        kept = 1 - math.floor(65536 * p + 0.5) / 65536
        return self._masks.keep(seed, input, call), 1 / kept


@functools.cache
def _warn_once() -> None:
    """Has torch warn, unseen, that masks of dropout are for tests: it does so once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.ones(1, 1, 1, 1, device="cpu")
        _attend(x, x, x, None, 0.5, False, x > 0)


def _is_drawn(input, p) -> bool:
    """Whether torch draws a mask that can be ours."""
    return isinstance(input, Tensor) and not input.is_nested and 0.0 < p < 1.0 - 2.0**-16


def _without_overrides(function: types.FunctionType) -> types.FunctionType:
    """A function of torch that does not ask for overrides of itself, so that those of the functions
    that it calls apply."""
    asks = ("has_torch_function", "has_torch_function_unary")
    variables = {**function.__globals__, **dict.fromkeys(asks, lambda _: False)}
    copy = types.FunctionType(
        function.__code__, variables, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Operators(TorchDispatchMode):
    """Notes the operators of onepass that take a seed."""

    supports_higher_order_operators = True

    def __init__(self, masks: Masks):
        super().__init__()
        self._masks = masks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "onepass":
            names = (argument.name for argument in func._schema.arguments)
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("seed") is not None:
                self._masks.note(given["seed"], _call_of(given, result))
        return result


def _call_of(given: dict, result) -> _DropoutCall:
    p = given["p"] if "p" in given else given["dropout_p"]
    if "query" not in given:
        first = result if isinstance(result, Tensor) else result[0]
        return _DropoutCall(p, tuple(first.shape), False, True)
    if any(isinstance(value, Tensor) or value for value in map(given.get, _POSITIONS)):
        return _DropoutCall(p, (), True, True)
    return _DropoutCall(p, (*given["query"].shape[:-1], given["key"].shape[-2]), True, True)


class _Noise(TorchDispatchMode):
    """Records the random numbers of a run, or gives them to a run in another dtype."""

    supports_higher_order_operators = True

    def __init__(self, noise: list[tuple], replays: bool = False):
        super().__init__()
        self._noise, self._replayed = noise, iter(noise) if replays else None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or func._schema.name.partition("::")[2] not in _SAMPLERS:
            return result
        if self._replayed is None:
            self._noise.append((result.clone(), _generator(result.device).get_state()))
            return result
        numbers, state = next(self._replayed, (None, None))
        if numbers is not None and numbers.shape == result.shape:
            result.copy_(numbers)
            _generator(result.device).set_state(state)
        return result


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
