"""Calls of torch's functions in a swapped forward, redirected to onepass's where those gain."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function

import onepass.functional
from onepass._imported import is_a
from onepass._overrides import visibly
from onepass._policy import device_attention, small_calls
from onepass._policy.precision import precision_of
from onepass._refusals import or_torchs
from onepass.functional._internal import (
    cross_entropy_gains,
    is_mask,
    linear_gains,
    linear_where_it_gains,
)
from onepass.functional.linear import _has_products as has_products
from onepass.swapping import by_hand
from onepass.swapping.factors import PRODUCTS
from onepass.swapping.inputs import (
    MOST_HEAD_DIM,
    is_for_attention,
    is_for_loss,
    is_local,
    is_plain,
)

_linear = functools.partial(visibly, onepass.functional.linear)
_loss = functools.partial(visibly, onepass.functional.cross_entropy)


class _Redirection(TorchFunctionMode):
    """Redirects functions on this thread while it is active; torch's namespace does not change."""

    def __init__(self, kinds: list[str], module: nn.Module | None = None):
        super().__init__()
        self._attention, self._linear = "attention" in kinds, "linear" in kinds
        self._loss = "loss" in kinds
        self._recorder = by_hand.Recorder(module) if "attention_by_hand" in kinds else None
        self._precision = None if module is None else precision_of(module)

    def __exit__(self, error, *more):
        super().__exit__(error, *more)
        if self._recorder is not None and error is None:
            self._recorder.finish()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            func = torch.unflatten  # the same; the method calls super(), which Dynamo cannot follow
        if func is F.scaled_dot_product_attention and self._attention:
            ours = onepass.functional.scaled_dot_product_attention
            run = functools.partial(_attend, self._precision)
        elif func is F.linear and self._linear:
            ours, run = linear_where_it_gains, functools.partial(_multiply, self._precision)
        elif func is F.cross_entropy and self._loss:
            ours, run = F.cross_entropy, _cross_entropy
        elif self._recorder is not None and func in PRODUCTS:
            output = self._recorder.product(func, args, kwargs)
            return func(*args, **kwargs) if output is None else output
        else:
            return func(*args, **kwargs)
        traced = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.fx.Proxy)]
        if traced:
            return handle_torch_function(ours, traced, *args, **kwargs)  # a node that calls ours
        return run(*args, **kwargs)


def _attend(precision, query, key, value, attn_mask=None, *args, **named) -> Tensor:
    """onepass's attention, or torch's for calls that onepass does not compute."""
    taken = (
        all(map(is_local, (query, key, value)))
        and not is_a(attn_mask, "torch.nn.attention.bias", "CausalBias")  # a rule, not a mask
        and is_for_attention(query)
        and min(query.dim(), value.dim()) > 1
        and max(query.shape[-1], value.shape[-1]) <= MOST_HEAD_DIM
        and is_mask(attn_mask, query)
    )
    given, torchs = (query, key, value, attn_mask, *args), F.scaled_dot_product_attention
    if not taken:
        return torchs(*given, **named)
    return or_torchs(_at(precision, attend_visibly), torchs, *given, **named)


def _multiply(precision, input, weight, bias=None) -> Tensor:
    """onepass's products, or torch's if ours would not gain."""
    arguments = (input, weight, bias)
    usual = is_plain(input) and not any(map(has_products, arguments))
    if not usual or not linear_gains(*arguments, precision):
        return F.linear(*arguments)
    return or_torchs(_at(precision, _linear), F.linear, *arguments)


def _at(precision: str | None, function: Callable) -> Callable:
    """The function with its products of float32 at the module's precision, if that has one."""
    return function if precision is None else functools.partial(function, precision=precision)


def _cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
) -> Tensor:
    """onepass's loss, or torch's if ours would not gain."""
    named = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    arguments = (input, target, weight)
    is_usual = size_average is None and reduce is None and is_for_loss(input)
    if not (is_usual and cross_entropy_gains(*arguments, label_smoothing)):
        named |= dict(size_average=size_average, reduce=reduce)
        return F.cross_entropy(*arguments, **named)
    return or_torchs(_loss, F.cross_entropy, *arguments, **named)


def with_redirected_loss(function, *args, **named):
    """function(*args, **named) with its calls of F.cross_entropy redirected."""
    with _Redirection(["loss"]):
        return function(*args, **named)


def attend_visibly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **terms,
) -> Tensor:
    """Our attention, or torch's on a GPU that is left to torch, seen by modes as a call of torch's
    is."""
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if (
        query.is_cuda
        and not (terms.get("softcap") or terms.get("deterministic"))
        and attn_mask is None
        and terms.get("sinks") is None
        and dropout_p == 0.0
        and device_attention.is_torchs(query, key, value)
    ):
        return F.scaled_dot_product_attention(*arguments[:6], scale=scale, enable_gqa=enable_gqa)
    return visibly(onepass.functional.scaled_dot_product_attention, *arguments, **terms)


ARE_SMALL = {
    "attention": small_calls.attention_calls_are_small,
    "attention_by_hand": by_hand.runs_as_written,
    "linear": small_calls.linear_calls_are_small,
    "loss": small_calls.loss_calls_are_small,
}


def redirected(forward: Callable, kinds: list[str]) -> Callable:
    """The forward with its calls of these kinds redirected, where they gain."""

    def gaining_in(self, args: tuple, named: dict) -> list[str]:
        return [kind for kind in kinds if not ARE_SMALL[kind](self, args, named)]

    @functools.wraps(forward)
    def run(self, *args, **named):
        gaining = gaining_in(self, args, named)
        if "attention_by_hand" in gaining and by_hand.must_be_tried(self):
            with by_hand.trial(), _Redirection(gaining, self):
                forward(self, *args, **named)
            gaining = gaining_in(self, args, named)  # the trial may have left the module alone
        if not gaining:
            return forward(self, *args, **named)
        with _Redirection(gaining, self):
            return forward(self, *args, **named)

    return run
