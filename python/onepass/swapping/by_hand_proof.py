"""The proof that a call of attention computes what was written by hand: some rows of that very
call, both ways and in float64, outputs and gradients.

Where these differ by a hair, random queries, keys and values with the call's masks decide: what was
written may suit the call's own numbers better, as the gradient of keys that share an offset.

In float32 a random call may be off by twice the rule's bound: the backward takes sum(P dP) from the
saved output, which is rounded. That was up to 1.1 times the bound in 160 draws of 64 to 4,096 keys.
Another formula is off by thousands of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from onepass import _dispatch_log, numerics
from onepass.swapping import trials
from onepass.swapping.by_hand_call import call_of
from onepass.swapping.scores import Form, Term

_UNHOOKED = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
_ROWS = 16  # of each sequence
_MOST_SCORES = 1 << 22  # of which there are then fewer rows
_DRAWS, _RANDOM_DRAWS = 2, 16
_MOST_BOUNDS = 2  # of the rule, in random draws
_PROVEN: WeakKeyDictionary[type, dict[tuple, str]] = WeakKeyDictionary()


def refusal(cls: type[nn.Module], form: Form, value: Tensor) -> str:
    """Why one call of attention may not compute this form in modules of a class; empty if it may.

    Proven once for a class, the recorded functions and dtypes.
    """
    proven = _PROVEN.setdefault(cls, {})
    key = _signature(form, value)
    if key not in proven:
        proven[key] = _proof(form, value)
    return proven[key]


def _signature(form: Form, value: Tensor) -> tuple:
    """Key of a proof."""
    steps = tuple(
        (step.function.__name__, step.kind, *map(_kind, (*step.args, *step.kwargs.values())))
        for step in form.steps
    )
    return steps, form.query.dtype, value.dtype, len(form.lead), form.query.dim(), value.dim()


def _kind(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.dim(), tuple(size == 1 for size in argument.shape)
    return type(argument)


def _proof(form: Form, value: Tensor) -> str:
    """Empty if some rows are the same both ways, by the rule of `onepass.numerics`; or why not."""
    seq_q, keys = form.query.shape[-2], math.prod((*form.lead, form.key.shape[-2]))
    count = max(1, min(_ROWS, seq_q, _MOST_SCORES // keys))
    # Hooks of its own: those of a checkpoint around the call count what is saved.
    with trials.isolated(), _dispatch_log.unrecorded(), _UNHOOKED, torch._C.DisableTorchFunction():
        rows = torch.linspace(0, seq_q - 1, count, device="cpu").long()
        form = _of_rows(form, rows)
        normal = trials.normals(7, torch.float32)

        def like(tensor: Tensor) -> Tensor:
            drawn = normal(*tensor.shape)
            return (drawn * tensor.detach().float().square().mean().sqrt()).to(tensor.dtype)

        def draw(form: Form, value: Tensor) -> tuple[list[Tensor], ...]:
            size = (*form.lead, count, value.shape[-1])
            return _draw(form, value, normal(*size))

        reason = _difference([draw(form, value) for _ in range(_DRAWS)])
        if reason:
            drawn = []
            for _ in range(_RANDOM_DRAWS):
                others = replace(form, query=like(form.query), key=like(form.key))
                drawn.append(draw(others, like(value)))
            is_float32 = form.query.dtype is value.dtype is torch.float32
            reason = _difference(drawn, _MOST_BOUNDS if is_float32 else 1.0)
    return reason


def _draw(form: Form, value: Tensor, upstream: Tensor) -> tuple[list[Tensor], ...]:
    """The outcomes of one call, of the formula in float64 and of the code as written."""
    qkv = form.query, form.key, value
    exact = [tensor.double() for tensor in qkv]
    return (
        _outcome(_as_one_call, form, qkv, upstream),
        _outcome(_as_written, _in_double(form), exact, upstream),
        _outcome(_as_written, form, qkv, upstream),
    )


def _difference(draws: list[tuple], bounds: float = 1.0) -> str:
    for number, name in enumerate(("output", "dq", "dk", "dv")):
        parts = ([results[number] for results in ways] for ways in zip(*draws, strict=True))
        verdict = numerics.compare(*parts)
        if verdict.max_error > bounds * verdict.bound or verdict.bias > verdict.bias_bound:
            return f"its {name} differs from that of one call of attention: {verdict.text}"
    return ""


def _outcome(run: Callable, form: Form, qkv, upstream: Tensor) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in qkv]
    of_leaves = replace(form, query=leaves[0], key=leaves[1])
    return trials.outcome(lambda: run(of_leaves, leaves[2]), leaves, lambda _: upstream)


def _as_one_call(form: Form, value: Tensor) -> Tensor:
    output = call_of(form, value).run(0.0, "highest")
    return output.reshape(*form.lead, *output.shape[-2:])


def _as_written(form: Form, value: Tensor) -> Tensor:
    scores = form.multiply(form.query, form.key)
    for step in form.steps:
        if step.kind == "view":
            scores = scores.reshape(*step.lead, *scores.shape[-2:])
        elif step.kind != "dropout":
            scores = step(scores)
    return torch.matmul(scores.to(value.dtype), value)


def _of_rows(form: Form, rows: Tensor) -> Form:
    """The form of some queries alone."""
    seq_q = form.query.shape[-2]

    def chosen(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[-2] == seq_q:
            return leaf.detach().index_select(-2, rows)
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    def of_terms(terms: tuple[Term, ...]) -> tuple[Term, ...]:
        return tuple(Term.of(chosen(term.tensor), term.lead) for term in terms)

    return replace(
        form,
        query=chosen(form.query),
        factors=of_terms(form.factors),
        terms=of_terms(form.terms),
        blocked=of_terms(form.blocked),
        steps=tuple(step.map(chosen) for step in form.steps),
    )


def _in_double(form: Form) -> Form:
    """The form in float64, without its casts."""
    steps = (step.map(trials.in_double) for step in form.steps if step.kind != "cast")
    return replace(form, steps=tuple(steps))
