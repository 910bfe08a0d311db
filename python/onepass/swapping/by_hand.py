"""Attention written by hand, `softmax(q @ k.T) @ v`, as one call of onepass's.

The forward runs as it was written, on scores without data (:mod:`onepass.swapping.scores`), until
probabilities meet values. What was recorded then becomes one call of attention, after a proof: some
rows of that very call, computed both ways and in float64, outputs and gradients. A class is proven
once for each list of recorded functions. A module whose scores are read by other code, or whose
proof fails, runs its own forward from then on; `fate` tells why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from onepass import numerics
from onepass._ops import dispatch_log, small_calls, tracing
from onepass._ops.differentiation import are_transforms_active
from onepass.functional._internal import masked_attention
from onepass.swapping import probe, recorded  # noqa: F401 fills the table of Scores
from onepass.swapping.inputs import MOST_HEAD_DIM
from onepass.swapping.reasons import Because, Reason
from onepass.swapping.report import Change
from onepass.swapping.scores import FEW_KEYS, Form, Recorder, Scores, Term

NOTE = (
    "{names}: softmax(q k^T) v by hand, if it runs, becomes one call of attention; its first call "
    "proves that, and the report, printed again, tells"
)
_UNHOOKED = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
_ROWS = 16  # of each sequence, in a proof
_MOST_SCORES = 1 << 22  # in a proof, of which there are then fewer rows
_DRAWS = 2, 16  # at first, and where they differ
_MOST_IDLE = 2  # runs in which products, but no attention, were found

# Reasons for one call alone.
_NO_KEY = "a query of its may attend to no key"
_EMPTY = "it has no queries or keys"


def runs_as_written(module: nn.Module, args: tuple, named: dict) -> bool:
    """Whether nothing of this call of a forward is recorded."""
    if torch.compiler.is_compiling() or tracing.is_tracing() or tracing.is_making_graph():
        return True
    if forward_ad._current_level >= 0 or are_transforms_active():
        return True
    known = fate(module)
    is_masked = known.is_masked is not False
    return known.is_left or small_calls.attention_by_hand_is_small(module, args, is_masked)


def fates(
    model: nn.Module | None, changes: Iterable[Change]
) -> tuple[dict[str, Because], list[str]]:
    """(why modules of a report are left alone, by name, if they call no attention of torch's
    either; names of modules that have not run yet)."""
    left, waiting = {}, []
    names = {} if model is None else {id(module): name for name, module in model.named_modules()}
    for module, _, swapped, _ in changes:
        calls = getattr(swapped, "_onepass_spec", ())
        if "attention_by_hand" not in calls or id(module) not in names:
            continue
        known = fate(module)
        if known.reason and not known.taken and "attention" not in calls:
            left[names[id(module)]] = Reason.BY_HAND.because(known.reason)
        elif not known.reason and not known.taken:
            waiting.append(names[id(module)])
    return left, waiting


class Fate:
    """What became of a module's attention: taken how often, or why not yet.

    A module that `is_left` is not recorded any more. One that was taken always is: a checkpoint
    that recomputes an earlier call must save what that call saved.
    """

    def __init__(self):
        self.taken = self.idle = 0
        self.reason = ""  # why it was not taken
        self.is_left = False
        self.is_masked: bool | None = None  # in the first call that was taken


_FATES: WeakKeyDictionary[nn.Module, Fate] = WeakKeyDictionary()
_PROVEN: WeakKeyDictionary[type, dict[tuple, str]] = WeakKeyDictionary()


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


class ModuleRecorder(Recorder):
    """Records one run of a module's forward, and decides on its attention."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._module = module

    def attend(self, scores: Scores, value: Tensor) -> Tensor | None:
        call = _call_of(scores.form, value)
        if isinstance(call, str):
            self.reason = call
            return None
        proven = _PROVEN.setdefault(type(self._module), {})
        key = _signature(scores.form, value)
        if key not in proven:
            proven[key] = _proof(scores.form, value)
        if proven[key]:
            self.reason = proven[key]
            return None
        known = fate(self._module)
        if known.is_masked is None:
            known.is_masked = call.is_causal or call.mask is not None or call.bias is not None
        output = call.run(scores.form.dropout_p)
        return output.reshape(*scores.form.lead, *output.shape[-2:])

    def finish(self) -> None:
        """At the end of the forward."""
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
        known.is_left = known.reason not in ("", FEW_KEYS, _NO_KEY, _EMPTY)


class _Call(NamedTuple):
    """A call of attention; all tensors have four dimensions."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    mask: Tensor | None  # True where a query attends
    is_causal: bool
    scale: float
    options: tuple[tuple[str, float], ...]

    def run(self, dropout_p: float) -> Tensor:
        """The output, contiguous, as torch's products are."""
        query, key, value, bias, mask, is_causal, scale, options = self
        return masked_attention(
            query, key, value, bias=bias, mask=mask, dropout_p=dropout_p, is_causal=is_causal,
            scale=scale, keeps_order=False, **dict(options),
        )  # fmt: skip


def _call_of(form: Form, value: Tensor) -> _Call | str:
    """The call that computes a form, or why there is none."""
    if form.is_tanh:
        return "its tanh is followed by no factor"
    leads = [term.lead for term in (*form.factors, *form.terms, *form.blocked)]
    own = torch.broadcast_shapes(form.query.shape[:-2], form.key.shape[:-2])
    lead = max((tuple(own), form.lead, *leads), key=len)
    query, key = (_led(t, own, lead) for t in (form.query, form.key))
    if torch.broadcast_shapes(value.shape[:-2], form.lead) != form.lead:
        return "its values have more dimensions than its scores"
    value = _led(value, form.lead, lead)
    if max(query.shape[-1], value.shape[-1]) > MOST_HEAD_DIM:
        return f"its head_dim is above {MOST_HEAD_DIM}"
    if not query.shape[-2] or not key.shape[-2] or key.shape[-2] != value.shape[-2]:
        return _EMPTY
    dtype = torch.promote_types(query.dtype, value.dtype)
    for factor in form.factors:
        query = query * _aligned(factor, lead)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    bias = None
    for term in form.terms:
        term = _aligned(term, lead)
        bias = term if bias is None else bias + term
    blocked, is_causal = None, False
    for term in form.blocked:
        term = _aligned(term, lead)
        if _is_future(term, query.shape[2], key.shape[2]):
            is_causal = True
        else:
            blocked = term if blocked is None else blocked | term
    if blocked is not None and _may_block_all(blocked, is_causal, query.shape[2]):
        return _NO_KEY
    if bias is not None and bias.dtype is not dtype:
        bias = bias.float()
    mask = None if blocked is None else ~blocked
    bias, mask = (_with_a_column_per_key(term, key.shape[2]) for term in (bias, mask))
    shared = key.shape[1] == value.shape[1] == 1  # which the operator reads as it is
    heads = max(query.shape[1], key.shape[1], value.shape[1])
    query = query.expand(-1, heads, -1, -1)
    key, value = (x if shared else x.expand(-1, heads, -1, -1) for x in (key, value))
    return _Call(query, key, value, bias, mask, is_causal, form.scale, form.options)


def _led(tensor: Tensor, own: tuple[int, ...], lead: tuple[int, ...]) -> Tensor:
    """(*own, rows, columns), or what broadcasts to it, as (batch, heads, rows, columns)."""
    size = tensor.shape[-2:]
    if tuple(own) != tuple(lead):
        tensor = tensor.expand(*own, *size).reshape(*lead, *size)
    if len(lead) == 1:
        return tensor.expand(*lead, *size).unsqueeze(1)
    if len(lead) == 2:
        return tensor[(None,) * (4 - tensor.dim())].expand(lead[0], -1, *size)
    return tensor.expand(*lead, *size).flatten(0, -4)


def _aligned(term: Term, lead: tuple[int, ...]) -> Tensor:
    """A term with four dimensions, each of which may be 1."""
    tensor, own, _ = term
    tensor = tensor[(None,) * (len(own) + 2 - tensor.dim())]
    sizes, size = tensor.shape[:-2], tensor.shape[-2:]
    if sizes.numel() == 1:
        return tensor.reshape(1, 1, *size)
    if own == lead and len(lead) == 2:
        return tensor
    if own == lead and sizes[:-1].numel() == 1 and len(lead) > 1:
        return tensor.reshape(1, sizes[-1], *size)
    return _led(tensor.expand(*own, *size), own, lead)


def _with_a_column_per_key(term: Tensor | None, seq_k: int) -> Tensor | None:
    return term if term is None else term.expand(*term.shape[:-1], seq_k)


def _future(seq_q: int, seq_k: int) -> Tensor:
    """True for keys after a query's own position."""
    keys, queries = (torch.arange(n, device="cpu") for n in (seq_k, seq_q))
    return keys > queries.unsqueeze(1)


def _is_future(blocked: Tensor, seq_q: int, seq_k: int) -> bool:
    """Whether exactly the keys after each query's own position are blocked."""
    if blocked.shape != (1, 1, seq_q, seq_k):
        return False
    return torch.equal(blocked[0, 0], _future(seq_q, seq_k))


def _may_block_all(blocked: Tensor, is_causal: bool, seq_q: int) -> bool:
    if is_causal and blocked.shape[-2] == 1:
        return bool(blocked[..., 0].any())  # the first query has the first key alone
    if is_causal:
        blocked = blocked | _future(seq_q, blocked.shape[-1])
    return bool(blocked.all(-1).any())


# ---- proof ---------------------------------------------------------------------------------------


def _signature(form: Form, value: Tensor) -> tuple:
    """What a proof is of."""
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
    with probe.isolated(), dispatch_log.unrecorded(), _UNHOOKED, torch._C.DisableTorchFunction():
        rows = torch.linspace(0, seq_q - 1, count, device="cpu").long()
        form = _of_rows(form, rows)
        random = torch.Generator("cpu").manual_seed(7)
        draws: list[tuple] = []
        for most in _DRAWS:
            while len(draws) < most:
                size = (*form.lead, count, value.shape[-1])
                draws.append(_draw(form, value, torch.randn(size, generator=random, device="cpu")))
            reason = _difference(draws)
            if not reason:
                break
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


def _difference(draws: list[tuple]) -> str:
    for number, name in enumerate(("output", "dq", "dk", "dv")):
        parts = ([results[number] for results in ways] for ways in zip(*draws, strict=True))
        verdict = numerics.compare(*parts)
        if not verdict.ok:
            return f"its {name} differs from that of one call of attention: {verdict.text}"
    return ""


def _outcome(run: Callable, form: Form, qkv, upstream: Tensor) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in qkv]
    output = run(replace(form, query=leaves[0], key=leaves[1]), leaves[2])
    gradients = torch.autograd.grad(output, leaves, upstream.to(output.dtype))
    return [output.detach(), *gradients]


def _as_one_call(form: Form, value: Tensor) -> Tensor:
    output = _call_of(form, value).run(0.0)
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
    steps = (step.map(probe.in_double) for step in form.steps if step.kind != "cast")
    return replace(form, steps=tuple(steps))
