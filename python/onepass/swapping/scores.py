"""Scores of attention written by hand, `softmax(scale * q @ k.T + mask) @ v`, without their matrix.

While a swapped forward runs, the product of two activations is a `Scores`: a tensor with shape and
dtype but no data, which remembers its factors. Scaling, masks, softmax, dropout, casts and views
are recorded on it. The product with values is then one call of attention
(:mod:`onepass.swapping.by_hand`). Whatever else touches a `Scores` gets real numbers: the recorded
calls are made then, as they were written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

SCORES = object()  # the place of the scores among recorded arguments


class Recorder(Protocol):
    """Recorder of products of scores, which is told where they are read (see by_hand.py)."""

    def product(self, function: Callable, args: tuple, kwargs: dict) -> Tensor | None: ...

    def was_read(self, scores: Scores, name: str) -> None: ...


class Step(NamedTuple):
    """A recorded call; `kind`: "cast", "view" or "dropout", which a proof treats otherwise."""

    function: Callable
    args: tuple
    kwargs: dict
    kind: str = ""
    lead: tuple[int, ...] = ()  # the leading sizes after a view
    versions: tuple[int, ...] = ()  # of its tensors

    def recorded(self) -> Step:
        return self._replace(versions=self._versions())

    def check_unchanged(self) -> None:
        _check(self.versions, self._versions())

    def _versions(self) -> tuple[int, ...]:
        return tuple(map(_version, self.tensors()))

    def tensors(self) -> list[Tensor]:
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]

    def map(self, change: Callable) -> Step:
        """The step with `change` applied to each of its arguments."""
        kwargs = {name: change(value) for name, value in self.kwargs.items()}
        return self._replace(args=tuple(map(change, self.args)), kwargs=kwargs)

    def __call__(self, scores: Tensor) -> Tensor:
        args = (scores if x is SCORES else x for x in self.args)
        return self.function(*args, **self.kwargs)


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
    """The recorded calls' formula, in attention's own terms.

    Attributes:
        query: (*lead, seq_q, head_dim).
        key: the same with seq_k rows.
        multiply: the product as it was written, of query and key.
        factors: of each query, a learned temperature for example.
        terms: added to the scores.
        blocked: True where a query may not attend to a key.
        fill: the largest number that blocked scores are set to.
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
    fill: float = -math.inf
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


@dataclass
class _Reading:
    """The numbers of scores, once they were read."""

    numbers: Tensor | None = None  # where autograd follows
    version: int = 0  # of the numbers when they were computed
    unfollowed: Tensor | None = None  # elsewhere, with a graph of their own
    is_written: bool = False  # there, so that only there they are right


class _Deferred(torch.autograd.Function):
    """Gives scores `requires_grad` for code that Python does not follow: a `torch.jit.script`
    function, an autograd.Function. The gradient from there goes on to the numbers that it read."""

    @staticmethod
    def forward(ctx, scores: Scores, *made_of: Tensor) -> Scores:
        ctx.set_materialize_grads(False)
        ctx.reading, ctx.made_of = scores.reading, made_of
        ctx.mark_dirty(scores)
        return scores

    @staticmethod
    def backward(ctx, gradient):
        if gradient is None:  # DDP's own function around all outputs
            return (None,) * (1 + len(ctx.made_of))
        if ctx.reading.unfollowed is None:
            raise RuntimeError(
                "swap: scores of attention by hand must be read by the code that gives them a "
                "gradient, got none that was; onepass.swap(model, exclude=...) leaves the module "
                "as it is"
            )
        more = torch.is_grad_enabled()
        of_inputs = torch.autograd.grad(
            ctx.reading.unfollowed, ctx.made_of, gradient,
            retain_graph=True, create_graph=more, allow_unused=True,
        )  # fmt: skip
        return None, *of_inputs


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
    reading: _Reading
    modes: tuple[bool, bool, torch.dtype]  # in which the last step was recorded

    @staticmethod
    def __new__(cls, size: torch.Size, dtype: torch.dtype, device: torch.device) -> Scores:
        return Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)

    @classmethod
    def of(cls, form: Form, size, dtype: torch.dtype, recorder: Recorder, before=None) -> Scores:
        made = Scores(size, dtype, form.query.device)
        made.form, made.recorder, made.before = form, recorder, before
        made.is_shared = made.is_taken = made.is_turned = False
        made.reading, made.modes = _Reading(), _modes()
        made.take_gradients()
        return made

    def take_gradients(self) -> None:
        """Makes them require a gradient if what they are made of does."""
        terms = (term.tensor for term in (*self.form.factors, *self.form.terms))
        made_of = [x for x in (self.form.query, self.form.key, *terms) if x.requires_grad]
        if torch.is_grad_enabled() and made_of:
            with torch._C.DisableTorchFunctionSubclass():
                _Deferred.apply(self, *made_of)

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
        name = getattr(function, "__name__", str(function))
        read = _read_by(name, Scores.read)
        args, kwargs = pytree.tree_map_only(Scores, read, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Runs code that Python does not follow; it gets numbers without their graph, which
        `_Deferred` has. What it writes is read from the same numbers."""
        read = _read_by("code that Python does not follow", Scores.unfollowed)
        given: dict[int, Scores] = {}

        def numbers_of(scores: Scores) -> Tensor:
            scores.reading.is_written |= function._schema.is_mutable
            numbers = read(scores).detach()
            given[id(numbers)] = scores
            return numbers

        with torch.overrides.enable_reentrant_dispatch():
            args, kwargs = pytree.tree_map_only(Scores, numbers_of, (args, kwargs or {}))
        result = function(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda found: given.get(id(found), found), result)

    def is_open(self) -> bool:
        """Whether they may be followed: they have not been read, and gradients are on as they were
        (in the forward of an autograd.Function, whose backward would be lost, they are off)."""
        is_read = self.reading.numbers is not None or self.reading.unfollowed is not None
        return not (is_read or self.is_turned) and self.modes[0] is torch.is_grad_enabled()

    def mark_taken(self) -> None:
        """They, and what they follow from, get no gradient from the call of attention."""
        scores: Scores | None = self
        while scores is not None:
            scores.is_taken, scores = True, scores.before

    def read(self) -> Tensor:
        """Their numbers for one of torch's functions, which may be in an autograd.Function."""
        if self.reading.is_written:
            with torch._C.DisableTorchFunctionSubclass():
                return torch.ops.aten.alias.default(self)
        is_followed = not self.modes[0] or torch.is_grad_enabled()
        return self.compute() if is_followed else self.unfollowed()

    def compute(self) -> Tensor:
        """Their real numbers: the recorded calls, as they were written."""
        if self.reading.numbers is None:
            numbers = self._computed(Scores.compute)
            self.reading.numbers, self.reading.version = numbers, _version(numbers)
        return self.reading.numbers

    def unfollowed(self) -> Tensor:
        """The same for code that autograd does not follow: with a graph of their own, unless they
        were drawn, or written."""
        reading = self.reading
        if self.form.dropout_p or (reading.numbers is not None and self._may_be_written()):
            reading.unfollowed = self.compute()
        elif reading.unfollowed is None:
            reading.unfollowed = self._computed(Scores.unfollowed)
        return reading.unfollowed

    def _computed(self, numbers_of: Callable[[Scores], Tensor]) -> Tensor:
        if self.before is None:
            self.form.check_unchanged()
            with _within(*self.modes):
                return self.form.multiply(self.form.query, self.form.key)
        step = self.form.steps[-1]
        is_view = step.kind == "view" or self.is_turned
        before = numbers_of(self.before) if is_view else self.before.unwritten(numbers_of)
        step.check_unchanged()
        with _within(*self.modes):
            return step(before)

    def unwritten(self, numbers_of: Callable[[Scores], Tensor]) -> Tensor:
        """The numbers that the next step was applied to: later code may have read and written
        them."""
        if self.reading.numbers is None or not self._may_be_written():
            return numbers_of(self)
        if self.form.dropout_p:
            raise RuntimeError(
                "swap: dropped probabilities of attention by hand must not be written before what "
                "follows from them is read, got a write; onepass.swap(model, exclude=...) leaves "
                "the module as it is"
            )
        return self._computed(numbers_of)

    def _may_be_written(self) -> bool:
        numbers = self.reading.numbers
        if numbers.is_inference():  # no version is counted
            return not self.form.dropout_p
        return numbers._version != self.reading.version


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


def _read_by(name: str, numbers_of: Callable[[Scores], Tensor]) -> Callable[[Scores], Tensor]:
    def read(scores: Scores) -> Tensor:
        scores.recorder.was_read(scores, name)
        return numbers_of(scores)

    return read


@functools.lru_cache(maxsize=256)
def _dtype_under(autocast, function, *dtypes: torch.dtype) -> torch.dtype:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        ones = [torch.ones(1, 1, dtype=dtype, device="cpu") for dtype in dtypes]
        return (function(*ones, -1) if function is torch.softmax else function(*ones)).dtype


def dtype_after(function: Callable, *dtypes: torch.dtype) -> torch.dtype:
    """The dtype that a function gives, autocast included."""
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    return _dtype_under(autocast, function, *dtypes)
