"""Scores of attention written by hand, `softmax(scale * q @ k.T + mask) @ v`, without their matrix.

While a swapped forward runs, the product of two activations is a `Scores`: a tensor with shape and
dtype but no data, which remembers its factors. Scaling, masks, softmax, dropout, casts and views
are recorded on it. The product with values is then one call of attention
(:mod:`onepass.swapping.by_hand`). Whatever else touches a `Scores` gets real numbers: the recorded
calls are made then, as they were written.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onepass._ops import small_calls
from onepass.swapping.factors import SUMS, factors_of

FEW_KEYS = "it has fewer keys than a head has columns, and would not gain"
SCORES = object()  # the place of the scores among recorded arguments


class Step(NamedTuple):
    """A recorded call; `kind`: "cast", "view" or "dropout", which a proof treats otherwise."""

    function: Callable
    args: tuple
    kwargs: dict
    kind: str = ""
    lead: tuple[int, ...] = ()  # the leading sizes after a view
    versions: tuple[int, ...] = ()  # of the tensors among args

    def recorded(self) -> Step:
        return self._replace(versions=self._versions())

    def check_unchanged(self) -> None:
        _check(self.versions, self._versions())

    def _versions(self) -> tuple[int, ...]:
        return tuple(_version(x) for x in self.args if isinstance(x, Tensor))

    def __call__(self, scores: Tensor) -> Tensor:
        args, kwargs = pytree.tree_map(
            lambda leaf: scores if leaf is SCORES else leaf, (self.args, self.kwargs)
        )
        return self.function(*args, **kwargs)


class Term(NamedTuple):
    """A tensor that broadcasts to scores whose leading sizes are `lead`."""

    tensor: Tensor
    lead: tuple[int, ...]
    version: int

    @classmethod
    def of(cls, tensor: Tensor, lead: tuple[int, ...]) -> Term:
        return cls(tensor, lead, _version(tensor))


@dataclass(frozen=True)
class Form:
    """What the recorded calls compute, in attention's own terms.

    Attributes:
        query: (*lead, seq_q, head_dim).
        key: the same with seq_k rows.
        multiply: the product as it was written, of query and key.
        factors: of each query, a learned temperature for example.
        terms: added to the scores.
        blocked: True where a query may not attend to a key.
        least: the largest number that blocked scores are set to.
    """

    query: Tensor
    key: Tensor
    multiply: Callable[[Tensor, Tensor], Tensor]
    lead: tuple[int, ...]
    versions: tuple[int, int]
    scale: float = 1.0
    is_tanh: bool = False  # until a factor follows
    options: tuple[tuple[str, float], ...] = ()  # by their names in attention
    factors: tuple[Term, ...] = ()
    terms: tuple[Term, ...] = ()
    blocked: tuple[Term, ...] = ()
    least: float = -math.inf
    is_softmax: bool = False
    dropout_p: float = 0.0
    steps: tuple[Step, ...] = ()

    @classmethod
    def of(cls, query: Tensor, key: Tensor, multiply: Callable) -> Form:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        return cls(query, key, multiply, tuple(lead), (_version(query), _version(key)))

    def check_unchanged(self) -> None:
        """Raises RuntimeError if a tensor was written after it was recorded."""
        terms = (*self.factors, *self.terms, *self.blocked)
        versions = *self.versions, *(term.version for term in terms)
        tensors = self.query, self.key, *(term.tensor for term in terms)
        _check(versions, tuple(map(_version, tensors)))


def _check(versions: tuple[int, ...], now: tuple[int, ...]) -> None:
    if now != versions:
        raise RuntimeError(
            "swap: query, key and masks of attention by hand must not be written before its scores "
            "are read, got a write; onepass.swap(model, exclude=...) leaves the module as it is"
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Deferred(torch.autograd.Function):
    """Gives scores `requires_grad`; code that Python cannot follow must not lose gradients."""

    @staticmethod
    def forward(ctx, size: torch.Size, dtype: torch.dtype, query: Tensor, *others) -> Scores:
        ctx.set_materialize_grads(False)
        ctx.inputs = 3 + len(others)
        return Scores(size, dtype, query.device)

    @staticmethod
    def backward(ctx, gradient):
        if gradient is None:  # DDP's own function around all outputs
            return (None,) * ctx.inputs
        raise RuntimeError(
            "swap: scores of attention by hand must be used by torch's functions, got an "
            "autograd.Function or compiled code; onepass.swap(model, exclude=...) leaves the "
            "module as it is"
        )


class Scores(Tensor):
    """Scores, or probabilities after a softmax, that are computed where they are read."""

    recorded: ClassVar[dict[Callable, Callable]] = {}  # of :mod:`onepass.swapping.recorded`
    metadata: ClassVar[set[Callable]] = set()  # functions that read no number

    form: Form
    recorder: Recorder
    before: Scores | None  # what the last step was applied to
    is_shared: bool  # a view, or followed by other scores: a write would have to reach both
    is_taken: bool  # by a call of attention
    is_turned: bool  # (..., keys, queries)
    numbers: Tensor | None
    version: int  # of the numbers when they were computed
    modes: tuple[bool, bool, torch.dtype]  # in which the last step was recorded

    @staticmethod
    def __new__(cls, size: torch.Size, dtype: torch.dtype, device: torch.device) -> Scores:
        return Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)

    @classmethod
    def of(cls, form: Form, size, dtype: torch.dtype, recorder: Recorder, before=None) -> Scores:
        terms = (term.tensor for term in (*form.factors, *form.terms))
        made_of = [x for x in (form.query, form.key, *terms) if x.requires_grad]
        if torch.is_grad_enabled() and made_of:
            made = _Deferred.apply(size, dtype, *made_of)
        else:
            made = Scores(size, dtype, form.query.device)
        made.form, made.recorder, made.before = form, recorder, before
        made.is_shared = made.is_taken = made.is_turned = False
        made.numbers, made.modes = None, _modes()
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in cls.metadata:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        record = cls.recorded.get(function)
        if record is not None:
            with torch._C.DisableTorchFunctionSubclass():
                result = record(function, *args, **kwargs)
            if result is not None:
                return result
        args, kwargs = pytree.tree_map_only(Scores, _read_by(function), (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(Scores, _read_by(function), (args, kwargs or {}))
        return function(*args, **kwargs)

    def is_open(self) -> bool:
        """Whether they may be followed: they have not been read, and gradients are on as they were
        (in the forward of an autograd.Function, whose backward would be lost, they are off)."""
        is_whole = self.numbers is None and not self.is_turned
        return is_whole and self.modes[0] is torch.is_grad_enabled()

    def mark_taken(self) -> None:
        """They, and what they follow from, get no gradient from the call of attention."""
        scores: Scores | None = self
        while scores is not None:
            scores.is_taken, scores = True, scores.before

    def compute(self) -> Tensor:
        """Their real numbers: the recorded calls, as they were written."""
        if self.numbers is None:
            self.numbers = self._computed()
            self.version = _version(self.numbers)
        return self.numbers

    def _computed(self) -> Tensor:
        if self.before is None:
            self.form.check_unchanged()
            with _within(*self.modes):
                return self.form.multiply(self.form.query, self.form.key)
        step = self.form.steps[-1]
        is_view = step.kind == "view" or self.is_turned
        before = self.before.compute() if is_view else self.before.unwritten()
        step.check_unchanged()
        with _within(*self.modes):
            return step(before)

    def unwritten(self) -> Tensor:
        """The numbers that the next step was applied to: later code may have read and written
        them."""
        if self.numbers is None or not self._may_be_written():
            return self.compute()
        if self.form.dropout_p:
            raise RuntimeError(
                "swap: dropped probabilities of attention by hand must not be written before what "
                "follows from them is read, got a write; onepass.swap(model, exclude=...) leaves "
                "the module as it is"
            )
        return self._computed()

    def _may_be_written(self) -> bool:
        if self.numbers.is_inference():  # no version is counted
            return not self.form.dropout_p
        return self.numbers._version != self.version


def _modes() -> tuple[bool, bool, torch.dtype]:
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), enabled, dtype


@contextmanager
def _within(has_gradients: bool, enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """The modes in which a call was recorded, without torch functions' overrides."""
    with (
        torch._C.DisableTorchFunction(),
        torch.set_grad_enabled(has_gradients),
        torch.autocast("cpu", dtype=dtype, enabled=enabled),
    ):
        yield


def _read_by(function: Callable) -> Callable[[Scores], Tensor]:
    def read(scores: Scores) -> Tensor:
        scores.recorder.was_read(scores, getattr(function, "__name__", str(function)))
        return scores.compute()

    return read


class Recorder(abc.ABC):
    """The scores of one run of a forward."""

    def __init__(self):
        self.made = self.taken = 0
        self.reason = ""  # not to record a product, or not to call attention
        self.reader = ""  # the first function that needed real numbers, before attention was called

    @abc.abstractmethod
    def attend(self, scores: Scores, value: Tensor) -> Tensor | None:
        """The product of probabilities and values by one call of attention, or None."""

    def product(self, function: Callable, args: tuple, kwargs: dict) -> Tensor | None:
        """Scores for a product of two activations, attention's result for one of probabilities and
        values; None for other products."""
        if function in SUMS:
            return self._sum(*args, **kwargs)
        takes_values = any(isinstance(x, Scores) for x in pytree.tree_leaves(args))
        factors = factors_of(function, args, kwargs, takes_values)
        if factors is None:
            return None
        left, right = factors.left, factors.right
        if isinstance(left, Scores):
            output = self._values(left, right, factors.value)
            return None if output is None else factors.arranged(output)
        if isinstance(right, Scores):  # values by turned probabilities
            if not right.is_turned or factors.letters:
                return None
            output = self._values(right.before, left, lambda: left.mT)
            return None if output is None else output.mT.contiguous()
        if not (_is_activation(left) and _is_activation(right)) or left.dtype != right.dtype:
            return None
        if not factors.is_outer or self.reason == FEW_KEYS:
            return None
        query, key = factors.query_key()
        if key.shape[-2] < small_calls.LEAST_KEYS * key.shape[-1]:
            self.reason = FEW_KEYS
            return None
        self.made += 1
        form = Form.of(query, key, factors.multiply)
        size = torch.Size((*form.lead, query.shape[-2], key.shape[-2]))
        return Scores.of(form, size, dtype_after(torch.matmul, query.dtype, query.dtype), self)

    def _values(self, scores: Scores, other: Tensor, value: Callable) -> Tensor | None:
        """The product of probabilities and `value()`, which is made of the other factor."""
        if not (scores.is_open() and scores.form.is_softmax and _is_activation(other)):
            return None
        scores.form.check_unchanged()
        output = self.attend(scores, value())
        if output is not None:
            self.taken += 1
            scores.mark_taken()
        return output

    def _sum(self, input, batch1, batch2, *, beta=1, alpha=1, out=None) -> Tensor | None:
        """`torch.baddbmm`'s, as a product, a factor and a term."""
        if out is not None or any(isinstance(x, Scores) for x in (input, batch1, batch2)):
            return None
        scores = self.product(torch.bmm, (batch1, batch2), {})
        if scores is None:
            return None
        scores = scores * alpha
        return scores + input * beta if beta else scores

    def was_read(self, scores: Scores, function: str) -> None:
        if not self.taken and not self.reader and (scores.form.steps or scores.form.is_softmax):
            self.reader = function


def _is_activation(tensor: object) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.dim() >= 3
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
    )


@functools.lru_cache(maxsize=256)
def _dtype_under(autocast, function, *dtypes: torch.dtype) -> torch.dtype:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        ones = [torch.ones(1, 1, dtype=dtype, device="cpu") for dtype in dtypes]
        return (function(*ones, -1) if function is torch.softmax else function(*ones)).dtype


def dtype_after(function: Callable, *dtypes: torch.dtype) -> torch.dtype:
    """The dtype that a function gives, autocast included."""
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    return _dtype_under(autocast, function, *dtypes)
