"""Attention of a sequence whose shards lie on the processes of a group.

Keys and values go round: each process attends with its queries to the shard that it holds, while
the next one arrives (Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers, ICLR 2024).
The parts' outputs are merged by their log-sum-exps. In the backward keys and values go round once
more, and their gradients with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from onepass._ops.attention import BITS, DIFFERENTIABLE
from onepass._ops.attention_layout import empty_rows
from onepass._ops.attention_options import Options
from onepass._ops.random import draw_seed
from onepass.distributed.sequence import Chunk, chunks, place

_forward = torch.ops.onepass.attention_forward.default
_backward = torch.ops.onepass.attention_backward.default

# Whose gradients are those of this process's queries.
_TERMS = ("sinks", "alibi_slopes")
# Tags of messages, for a back end that tells them apart.
_KEYS, _GRADIENTS = 0, 1


class Ring:
    """A process's place among those of a group; without a process group it is alone."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank, self.size = place(group)

    def start(self, tensors: list[Tensor], tag: int) -> Exchange:
        """Sends these to the next process while those of the one before are received."""
        return Exchange(self, tensors, tag)

    def peer(self, steps: int) -> int:
        """The global rank of the process so many places further."""
        rank = (self.rank + steps) % self.size
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def same(self, tensor: Tensor) -> Tensor:
        """The first process's, on all of them."""
        if self.size > 1:
            dist.broadcast(tensor, self.peer(-self.rank), self.group)
        return tensor


class Exchange:
    """Tensors on their way: `wait` returns those received."""

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
        self._works.clear()  # which hold tensors too
        self._sent.clear()
        return self._received


class Call(NamedTuple):
    """What a call has beside its tensors."""

    ring: Ring
    layout: str
    options: Options  # of each part, but for what depends on the part
    deterministic: bool

    def given(self, terms: Sequence[Tensor | None]) -> Call:
        """With those of `_TERMS` that there are, which autograd keeps."""
        there_are = {n: term for n, term in zip(_TERMS, terms, strict=True) if term is not None}
        return self._replace(options=self.options | there_are)

    def shards(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(whose, key, value) of each process, from this one's on; the next is on its way."""
        ring = self.ring
        for step in range(ring.size):
            last = step == ring.size - 1
            exchange = None if last else ring.start([key, value], _KEYS)
            yield (ring.rank - step) % ring.size, key, value
            if exchange is not None:
                key, value = exchange.wait()

    def chunks(self, owner: int, rows: int) -> list[Chunk]:
        """Whole shards where no position counts: fewer and larger calls."""
        counts = ("window_left", "window_right", "alibi_slopes", "dropout_p")
        if not any(name in self.options for name in counts):
            return [Chunk(owner * rows, 0, rows)]
        return chunks(owner, self.ring.size, rows, self.layout)

    def parts(self, queries: int, keys: int, owner: int) -> Iterator[tuple[Chunk, Chunk, Options]]:
        """The pairs of chunks of which some query sees some key, with the options of each."""
        left, right = (self.options.get(f"window_{side}", -1) for side in ("left", "right"))
        own = owner == self.ring.rank
        for i, query in enumerate(self.chunks(self.ring.rank, queries)):
            for j, key in enumerate(self.chunks(owner, keys)):
                nearest = query.position - (key.position + key.end - key.begin - 1)
                farthest = query.position + query.end - query.begin - 1 - key.position
                if 0 <= left < nearest or 0 <= right < -farthest:
                    continue
                offsets = {"query_offset": query.position, "key_offset": key.position}
                options = self.options | {name: at for name, at in offsets.items() if at}
                if not (own and i == j):
                    options.pop(
                        "sinks", None
                    )  # a sink is in one part alone, which a row always has
                yield query, key, options


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
    if "dropout_p" in options:
        options["seed"] = ring.same(draw_seed(query.device))
    terms = [options.pop(name, None) for name in _TERMS]
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    call = Call(ring, layout, options, deterministic)
    return _RingAttention.apply(query, key, value, *terms, call)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, alibi_slopes, call):
        output, lse, lse_rest = _attend(query, key, value, call.given((sinks, alibi_slopes)))
        ctx.call = call
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
        bits = dict(zip(("query", "key", "value", *DIFFERENTIABLE), BITS, strict=True))
        names = ("query", "key", "value", *_TERMS)
        mask = sum(bits[name] for name, need in zip(names, needs, strict=False) if need)
        gradients = _gradients(ctx, doutput, dlse, mask)
        wanted = (g if need else None for g, need in zip(gradients, needs, strict=False))
        return (*wanted, None)


def _attend(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    """(output, lse, lse_rest) of all keys: lse + lse_rest has twice the digits of lse."""
    accumulator = _accumulator(query)
    rows = query.shape[:3]
    bshd = bool(call.options.get("out_bshd"))
    output = empty_rows(query, (*rows, value.shape[-1]), accumulator, bshd)
    total = query.new_full(rows, -torch.inf, dtype=torch.float64)
    begun = set()
    for owner, keys, values in call.shards(key, value):
        for at, of, options in call.parts(rows[2], keys.shape[2], owner):
            part, lse, rest = _forward(at.of(query), of.of(keys), of.of(values), **options)
            lse = lse.double() + rest
            if at in begun:
                _merge(at.of(output), at.of(total), part, lse)
            else:
                begun.add(at)
                at.of(output).copy_(part)
                at.of(total).copy_(lse)
    for at in call.chunks(call.ring.rank, rows[2]):
        if at not in begun:
            at.of(output).zero_()
    lse = total.to(accumulator)
    rest = (total - lse.double()).masked_fill_(lse == -torch.inf, 0.0).to(accumulator)
    return output.to(query.dtype), lse, rest


def _merge(output: Tensor, total: Tensor, part: Tensor, lse: Tensor) -> None:
    """`output` and its log-sum-exp `total` become those of what they stand for and of `part`."""
    both = torch.logaddexp(total, lse)
    nothing = both == -torch.inf  # where the difference would be no number

    def weight(of: Tensor) -> Tensor:
        return (of - both).masked_fill_(nothing, 0.0).exp_().to(output.dtype)[..., None]

    output.mul_(weight(total)).add_(weight(lse) * part)
    total.copy_(both)


def _gradients(ctx, doutput: Tensor | None, dlse: Tensor | None, mask: int) -> list[Tensor | None]:
    """Of query, key, value and `_TERMS`, summed up in float32 (float64 of float64)."""
    query, key, value, *terms, output, lse, lse_rest = ctx.saved_tensors
    call, accumulator = ctx.call.given(terms), _accumulator(query)

    def zeros(like: Tensor | None) -> Tensor | None:
        return None if like is None else torch.zeros_like(like, dtype=accumulator)

    dquery, dterms = zeros(query), [zeros(term) for term in terms]
    arriving = None  # gradients of the shard that is looked at, by the processes before
    for step, (owner, keys, values) in enumerate(call.shards(key, value)):
        dkey, dvalue = zeros(keys), zeros(values)
        for at, of, options in call.parts(query.shape[2], keys.shape[2], owner):
            upstream = (None if d is None else at.of(d) for d in (doutput, dlse))
            dq, dk, dv, others = _backward(
                *upstream, at.of(query), of.of(keys), of.of(values), at.of(output),
                at.of(lse), at.of(lse_rest), **options, grad_mask=_present(mask, options),
                deterministic=call.deterministic,
            )  # fmt: skip
            found = dict(zip(DIFFERENTIABLE, others, strict=True))
            sums = [(at.of(dquery), dq), (of.of(dkey), dk), (of.of(dvalue), dv)]
            sums += [(s, found[name]) for s, name in zip(dterms, _TERMS, strict=True)]
            for into, gradient in sums:
                if into is not None and gradient.numel():
                    into += gradient
        if step:
            for into, gradient in zip((dkey, dvalue), arriving.wait(), strict=True):
                into += gradient
        if call.ring.size > 1:
            arriving = call.ring.start([dkey, dvalue], _GRADIENTS)
    if arriving is not None:
        dkey, dvalue = arriving.wait()
    gradients = zip((dquery, dkey, dvalue, *dterms), (query, key, value, *terms), strict=True)
    return [None if like is None else gradient.to(like.dtype) for gradient, like in gradients]


def _present(mask: int, options: Options) -> int:
    """Without the bits of terms that this part does not have."""
    of_terms = zip(DIFFERENTIABLE, BITS[3:], strict=True)
    return mask & ~sum(bit for name, bit in of_terms if name not in options)


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
