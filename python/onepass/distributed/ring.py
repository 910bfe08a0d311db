"""Attention of a sequence whose shards are on the processes of a group.

Keys and values go round: each process attends with its queries to the shard that it holds, while
the next one arrives (Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers, ICLR 2024).
The parts' outputs are merged by their log-sum-exps. In the backward keys and values go round once
more, and their gradients with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from onepass._memory_order import empty_rows
from onepass._ops.attention import BITS, DIFFERENTIABLE, Options
from onepass._random import draw_seed
from onepass.distributed.sequence import Chunk, chunks, place

_forward = torch.ops.onepass.attention_forward.default
_check = torch.ops.onepass.attention_forward_check.default
_backward = torch.ops.onepass.attention_backward.default

# Tags of messages, for back ends that use them.
_KEYS, _GRADIENTS = 0, 1


class Ring:
    """A process's place among those of a group; without a process group it is alone."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank, self.size = place("ring_attention", group)

    def peer(self, steps: int) -> int:
        """The global rank of the process that many places further."""
        rank = (self.rank + steps) % self.size
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def same(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, on all processes."""
        if self.size > 1:
            dist.broadcast(tensor, self.peer(-self.rank), self.group)
        return tensor


class Exchange:
    """Tensors on their way to the next process, while those of the one before are received."""

    def __init__(self, ring: Ring, sent: list[Tensor], tag: int):
        self._sent = [tensor.contiguous() for tensor in sent]  # alive until they have gone
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        peers = ((dist.isend, self._sent, 1), (dist.irecv, self._received, -1))
        messages = [
            dist.P2POp(send_or_receive, tensor, ring.peer(steps), ring.group, tag)
            for send_or_receive, tensors, steps in peers
            for tensor in tensors
            if tensor.numel()
        ]
        self._works = dist.batch_isend_irecv(messages) if messages else []

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        self._works.clear()  # they hold tensors too
        self._sent.clear()
        return self._received


class Call(NamedTuple):
    """The settings of a call beside its tensors."""

    ring: Ring
    layout: str
    options: Options  # of each part, except those that depend on the part
    deterministic: bool

    def given(self, alibi_slopes: Tensor | None) -> Call:
        """The options with the slopes, which autograd keeps, if there are any."""
        if alibi_slopes is None:
            return self
        return self._replace(options=self.options | {"alibi_slopes": alibi_slopes})

    def shards(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(whose, key, value) of each process, from this one's on; the next is on its way."""
        ring = self.ring
        for step in range(ring.size):
            last = step == ring.size - 1
            exchange = None if last else Exchange(ring, [key, value], _KEYS)
            yield (ring.rank - step) % ring.size, key, value
            if exchange is not None:
                key, value = exchange.wait()

    def chunks(self, owner: int, rows: int) -> list[Chunk]:
        """A shard's chunks; the whole shard if positions do not matter: fewer, larger calls."""
        counts = ("window_left", "window_right", "alibi_slopes", "dropout_p")
        if not any(name in self.options for name in counts):
            return [Chunk(owner * rows, 0, rows)]
        return chunks(owner, self.ring.size, rows, self.layout)

    def parts(self, queries: int, keys: int, owner: int) -> Iterator[tuple[Chunk, Chunk, Options]]:
        """The pairs of chunks in which some query sees some key, with their options."""
        if queries == keys and self._is_only_causal():
            yield from self._causal_parts(queries, owner)
            return
        left, right = (self.options.get(f"window_{side}", -1) for side in ("left", "right"))
        for query in self.chunks(self.ring.rank, queries):
            for key in self.chunks(owner, keys):
                nearest = query.position - (key.position + key.end - key.begin - 1)
                farthest = query.position + query.end - query.begin - 1 - key.position
                if 0 <= left < nearest or 0 <= right < -farthest:
                    continue
                offsets = {"query_offset": query.position, "key_offset": key.position}
                options = self.options | {name: at for name, at in offsets.items() if at}
                yield query, key, options

    def _is_only_causal(self) -> bool:
        """Whether a query sees all keys up to its own position, and positions matter for nothing
        else."""
        if "alibi_slopes" in self.options or "dropout_p" in self.options:
            return False
        return self.options.get("window_right") == 0 and self.options.get("window_left", -1) < 0

    def _causal_parts(self, rows: int, owner: int) -> Iterator[tuple[Chunk, Chunk, Options]]:
        """One pair for a shard at most."""
        if owner == self.ring.rank:  # the order of its rows is that of their positions
            whole = Chunk(0, 0, rows)
            yield whole, whole, self.options
            return
        # A query of another shard sees all of a chunk or nothing. In both layouts the queries that
        # see any see the same, and they are neighbours, as these keys are.
        mine, theirs = self.chunks(self.ring.rank, rows), self.chunks(owner, rows)
        seen = [(q, k) for q in mine for k in theirs if k.position < q.position]
        if seen:
            query, key = (
                Chunk(0, min(c.begin for c in chunks), max(c.end for c in chunks))
                for chunks in zip(*seen, strict=True)
            )
            yield query, key, {n: v for n, v in self.options.items() if n != "window_right"}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    layout: str,
    group: dist.ProcessGroup | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """(output, lse) of this process's queries. `options` are the raw operator's, as of `attention`;
    they are the call's own, and change."""
    ring = Ring(group)
    # Before anything is sent or drawn; the seed is not there yet.
    _check(query, key, value, **{n: v for n, v in options.items() if n != "dropout_p"})
    if "dropout_p" in options:
        options["seed"] = ring.same(draw_seed(query.device))
    # A sink belongs to one part alone, and a row's parts depend on its position: so the operator
    # does not get the sinks here.
    sinks, alibi_slopes = (options.pop(name, None) for name in ("sinks", "alibi_slopes"))
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    call = Call(ring, layout, options, deterministic)
    return _RingAttention.apply(query, key, value, sinks, alibi_slopes, call)


_VALUE = 2  # the place of the only argument that lse does not depend on


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, alibi_slopes, call):
        output, lse, lse_rest = _attend(query, key, value, sinks, call.given(alibi_slopes))
        ctx.call = call
        if not any(needed for place, needed in enumerate(ctx.needs_input_grad) if place != _VALUE):
            ctx.mark_non_differentiable(lse)  # it depends on nothing that is trained
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, sinks, alibi_slopes, output, lse, lse_rest)
        return output, lse

    @staticmethod
    def backward(ctx, doutput, dlse):
        if torch.is_grad_enabled():
            raise RuntimeError("ring_attention: create_graph must be False, got True")
        needs = ctx.needs_input_grad
        if doutput is None and dlse is None:
            return (None,) * len(needs)
        gradients = _gradients(ctx, doutput, dlse)
        return (*(g if need else None for g, need in zip(gradients, needs, strict=False)), None)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: Call
) -> tuple[Tensor, ...]:
    """(output, lse, lse_rest) of all keys: lse + lse_rest has twice the digits of lse."""
    accumulator, rows = _accumulator(query), query.shape[2]
    merged = None if sinks is None else _nothing(query, value, sinks, call)
    for owner, keys, values in call.shards(key, value):
        for at, of, options in call.parts(rows, keys.shape[2], owner):
            part, lse, rest = _forward(at.of(query), of.of(keys), of.of(values), **options)
            lse = lse.double() + rest
            if merged is None and at.covers(rows):
                merged = part.to(accumulator), lse
                continue
            merged = merged or _nothing(query, value, None, call)
            _merge(*map(at.of, merged), part, lse)
    output, total = merged or _nothing(query, value, None, call)
    lse = total.to(accumulator)
    rest = (total - lse.double()).masked_fill_(lse == -torch.inf, 0.0).to(accumulator)
    return output.to(query.dtype), lse, rest


def _nothing(
    query: Tensor, value: Tensor, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp before the first part. A sink is a part without a value."""
    shape, bshd = (*query.shape[:3], value.shape[-1]), bool(call.options.get("out_bshd"))
    output = empty_rows(query, shape, _accumulator(query), bshd).zero_()
    total = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float64)
    if sinks is not None:
        total.copy_(sinks[:, None])
    return output, total


def _merge(output: Tensor, total: Tensor, part: Tensor, lse: Tensor) -> None:
    """Merges `part` into `output` and its log-sum-exp `total`, in place."""
    both = torch.logaddexp(total, lse)
    # Where there is nothing yet the difference would be NaN, and any weight is right.
    weight = (lse - both).masked_fill_(both == -torch.inf, 0.0).exp_()
    output.lerp_(part.to(output.dtype), weight.to(output.dtype)[..., None])
    total.copy_(both)


def _gradients(ctx, doutput: Tensor | None, dlse: Tensor | None) -> list[Tensor | None]:
    """All gradients, summed in float32 (float64 for float64)."""
    query, key, value, sinks, alibi_slopes, output, lse, lse_rest = ctx.saved_tensors
    call, accumulator = ctx.call.given(alibi_slopes), _accumulator(query)
    names = ("query", "key", "value", *DIFFERENTIABLE)
    wanted = ("query", "key", "value") + ("alibi_slopes",) * ctx.needs_input_grad[4]
    mask = sum(bit for name, bit in zip(names, BITS, strict=True) if name in wanted)

    def add(into: Tensor | None, at: Chunk, gradient: Tensor, like: Tensor) -> Tensor:
        if into is None and at.covers(like.shape[2]):
            return gradient.to(accumulator)
        into = zeros(like) if into is None else into
        at.of(into).add_(gradient)
        return into

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros_like(like, dtype=accumulator)

    dquery, dslopes = None, None if alibi_slopes is None else zeros(alibi_slopes)
    arriving = None  # gradients of the shard that is looked at, by the processes before
    for step, (owner, keys, values) in enumerate(call.shards(key, value)):
        dkey = dvalue = None
        for at, of, options in call.parts(query.shape[2], keys.shape[2], owner):
            upstream = (None if d is None else at.of(d) for d in (doutput, dlse))
            dq, dk, dv, terms = _backward(
                *upstream, at.of(query), of.of(keys), of.of(values), at.of(output),
                at.of(lse), at.of(lse_rest), **options, grad_mask=mask,
                deterministic=call.deterministic,
            )  # fmt: skip
            dquery = add(dquery, at, dq, query)
            dkey, dvalue = add(dkey, of, dk, keys), add(dvalue, of, dv, values)
            if "alibi_slopes" in wanted:
                dslopes += terms[DIFFERENTIABLE.index("alibi_slopes")]
        if dkey is None:  # no query of this process sees a key of that one
            dkey, dvalue = zeros(keys), zeros(values)
        if step:
            for into, gradient in zip((dkey, dvalue), arriving.wait(), strict=True):
                into += gradient
        if call.ring.size > 1:
            arriving = Exchange(call.ring, [dkey, dvalue], _GRADIENTS)
    if arriving is not None:
        dkey, dvalue = arriving.wait()
    if dquery is None:  # no query sees a key
        dquery = zeros(query)
    dsinks = None
    if ctx.needs_input_grad[3]:
        dsinks = _of_sinks(sinks, doutput, dlse, output, lse, lse_rest)
    gradients = (dquery, dkey, dvalue, dsinks, dslopes)
    of = (query, key, value, sinks, alibi_slopes)
    return [None if g is None else g.to(t.dtype) for g, t in zip(gradients, of, strict=True)]


def _of_sinks(
    sinks: Tensor,
    doutput: Tensor | None,
    dlse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    lse_rest: Tensor,
) -> Tensor:
    """-sum(exp(sink - lse) * delta) with delta = sum(doutput * output) - dlse."""
    delta = 0.0
    if doutput is not None:
        delta = (doutput.to(lse.dtype) * output).sum(-1, dtype=torch.float64)
    if dlse is not None:
        delta = delta - dlse.double()
    probability = (sinks.double()[:, None] - lse.double() - lse_rest.double()).exp_()
    # Without a key and with a sink of -inf there is no probability.
    return -(probability.masked_fill_(lse == -torch.inf, 0.0) * delta).sum((0, 2))


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
