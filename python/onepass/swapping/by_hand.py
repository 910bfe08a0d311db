"""Attention written by hand, `softmax(q @ k.T) @ v`, as one call of onepass's.

The forward runs as it was written, on scores without data (:mod:`onepass.swapping.scores`), until
probabilities meet values. What was recorded then becomes one call of attention
(:mod:`onepass.swapping.by_hand_call`), after a proof (:mod:`onepass.swapping.by_hand_proof`). A
module whose scores are read by other code, or whose proof fails, runs its own forward from then on;
`fate` tells why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from onepass._imported import is_fake
from onepass._ops import tracing
from onepass._ops.differentiation import are_transforms_active
from onepass._policy import small_calls
from onepass._policy.precision import precision_of
from onepass.swapping import recorded  # noqa: F401 fills the table of Scores
from onepass.swapping.by_hand_call import EMPTY, NO_KEY, call_of
from onepass.swapping.by_hand_proof import refusal
from onepass.swapping.changes import Change
from onepass.swapping.factors import SUMS, factors_of
from onepass.swapping.reasons import Reason, SkipReason
from onepass.swapping.scores import Form, Scores, dtype_after

NOTE = (
    "{names}: softmax(q k^T) v by hand becomes one call of attention, once a first call of it has "
    "proven that; the report, printed again after that call, tells whether it was made"
)
IN_PART = "{names}: {reason}; calls of F.scaled_dot_product_attention are onepass's"
IN_COMPILED = (
    "inside torch.compile attention by hand runs as it was written; compile the rest, or leave the "
    "attention's module out with torch.compiler.disable"
)
_MOST_IDLE = 2  # runs in which products, but no attention, were found
_FEW_KEYS = "it has fewer keys than a head has columns, and would not gain"
_FLOAT64 = "its query and key are float64"
NO_DATA = "its tensors have no data"
# Reasons that do not hold for the next call.
_OF_ONE_CALL = (_FEW_KEYS, _FLOAT64, NO_KEY, EMPTY, NO_DATA)


def runs_as_written(module: nn.Module, args: tuple, named: dict) -> bool:
    """Whether nothing of this call of a forward is recorded."""
    if torch.compiler.is_compiling() or tracing.is_tracing() or tracing.is_making_graph():
        return True
    if forward_ad._current_level >= 0 or are_transforms_active():
        return True
    known = fate(module)
    is_masked = known.is_masked is not False
    return known.is_left or small_calls.attention_by_hand_is_small(module, args, is_masked)


def left_alone(module: nn.Module) -> SkipReason | None:
    """Why a swapped module's attention runs as it was written; None while that is not known."""
    known = fate(module)
    return Reason.BY_HAND.format(known.reason) if known.reason and not known.taken else None


class Fates(NamedTuple):
    """Outcomes for the modules of a report, by name."""

    left: dict[str, SkipReason]  # why they are left alone
    in_part: dict[str, SkipReason]  # the same of those that call torch's attention, too
    waiting: list[str]  # have not run yet


def fates(model: nn.Module | None, changes: Iterable[Change]) -> Fates:
    found = Fates({}, {}, [])
    names = {} if model is None else {id(module): name for name, module in model.named_modules()}
    for module, _, swapped in changes:
        calls = getattr(swapped, "_onepass_spec", ())
        if "attention_by_hand" not in calls or id(module) not in names:
            continue
        name, reason = names[id(module)], left_alone(module)
        if reason:
            (found.in_part if "attention" in calls else found.left)[name] = reason
        elif not fate(module).taken:
            found.waiting.append(name)
    return found


def is_lost_in_graphs(module: nn.Module) -> bool:
    """Whether torch.compile compiles the attention by hand of a swapped module as it was
    written."""
    calls = getattr(type(module), "_onepass_spec", ())
    by_hand = "attention_by_hand" in calls and ("attention" not in calls or fate(module).taken > 0)
    return by_hand and not getattr(module.forward, "_torchdynamo_disable", False)


class Fate:
    """Outcome for a module's attention: how often it was taken, or why not yet.

    A module that `is_left` is not recorded any more. One that was taken always is: a checkpoint
    that recomputes an earlier call must save what that call saved.
    """

    def __init__(self):
        self.taken = self.idle = 0
        self.reason = ""  # why it was not taken
        self.is_left = False
        self.is_masked: bool | None = None  # in the first call that was taken


_FATES: WeakKeyDictionary[nn.Module, Fate] = WeakKeyDictionary()


def fate(module: nn.Module) -> Fate:
    if module not in _FATES:
        _FATES[module] = Fate()
    return _FATES[module]


def must_be_tried(module: nn.Module) -> bool:
    """Whether a checkpoint, or another hook on saved tensors, sees a module's first call: the call
    must save the same as later ones."""
    if not torch.is_grad_enabled() or fate(module).taken or fate(module).reason:
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def trial() -> Iterator[None]:
    """A call of the forward whose result is dropped."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        yield


class Recorder:
    """Records one run of a module's forward, and decides on its attention."""

    def __init__(self, module: nn.Module):
        self._module = module
        self.made = self.taken = 0
        self.reason = ""  # not to record a product, or not to call attention
        self.reader = ""  # the first function that needed real numbers, before attention was called

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
        if left.dtype is torch.float64:
            self.reason = self.reason or _FLOAT64
            return None
        if self.reason == _FEW_KEYS:
            return None
        query, key = factors.query_key()
        if key.shape[-2] < small_calls.LEAST_KEYS * key.shape[-1]:
            if not self.made:  # else these may be values, by probabilities that were read
                self.reason = _FEW_KEYS
            return None
        self.made += 1
        if is_fake(left):
            self.reason = self.reason or NO_DATA
            return None
        form = Form.of(query, key, factors.multiply)
        size = torch.Size((*form.lead, query.shape[-2], key.shape[-2]))
        return Scores.of(form, size, dtype_after(torch.matmul, query.dtype, query.dtype), self)

    def _values(self, scores: Scores, other: Tensor, value: Callable) -> Tensor | None:
        """The product of probabilities and `value()`, which is made of the other factor."""
        if not (scores.is_open() and scores.form.is_softmax and _is_activation(other)):
            return None
        if other.dtype is torch.float64:
            return None
        scores.form.check_unchanged()
        output = self._attention(scores.form, value())
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

    def _attention(self, form: Form, value: Tensor) -> Tensor | None:
        """The product of probabilities and values by one call of attention, or None."""
        call = call_of(form, value)
        reason = call if isinstance(call, str) else refusal(type(self._module), form, value)
        if reason:
            self.reason = reason
            return None
        known = fate(self._module)
        if known.is_masked is None:
            known.is_masked = call.is_causal or call.mask is not None or call.bias is not None
        output = call.run(form.dropout_p, precision_of(self._module))
        return output.reshape(*form.lead, *output.shape[-2:])

    def was_read(self, scores: Scores, function: str) -> None:
        if not self.taken and not self.reader and (scores.form.steps or scores.form.is_softmax):
            self.reader = function

    def finish(self) -> None:
        """Ends the forward."""
        known = fate(self._module)
        known.taken += self.taken
        known.idle += bool(self.made)
        if known.taken:
            known.reason = ""
        elif self.reason:
            known.reason = self.reason
        elif self.reader:
            known.reason = f"its scores are read by {self.reader}"
        elif known.idle >= _MOST_IDLE:
            known.reason = "none of its products are softmax(q k^T) v"
        known.is_left = known.reason not in ("", *_OF_ONE_CALL)


def _is_activation(tensor: object) -> bool:
    return (
        (type(tensor) is Tensor or is_fake(tensor))
        and tensor.is_cpu
        and tensor.dim() >= 3
        and tensor.is_floating_point()
    )
