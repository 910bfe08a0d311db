"""Calls of a user's model in eval mode and without gradients: of `compare --generate` and
`profile-swap --generate`.

A model with `generate`, as transformers' have, continues the prompts of its batch greedily by N
tokens. The median time for a single token is that of the prefill; what N tokens take longer is that
of decoding. All other models are called on their batch: that is the whole measurement. Variants
share their parameters and take turns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import onepass
from onepass._batch import arguments
from onepass.bench.harness import Timing, clock_of, measure_pairs
from onepass.compare.errors import BadInput
from onepass.compare.model import move
from onepass.compare.settings import Settings
from onepass.compare.user_model import batch_of, load_user_model, telling_errors, tokens_in
from onepass.compare.variants import COMPILED, SWAPPED, kinds_of

ATTACHED = "attached"
PREFILL, DECODE, FORWARD = "prefill", "decode", "forward"
SECONDS = 4.0  # of timed calls, at least, unless --quick
_LABELS = ("labels", "targets")  # keywords of a batch that `generate` does not take

Call = Callable[[int], object]  # by how many tokens


class Inference:
    """The model of --model, its batch, and calls of its variants."""

    def __init__(self, settings: Settings):
        self.settings = settings
        model, batches = load_user_model(settings.model, settings.seed)
        self.model: nn.Module = model.to(settings.device).eval()
        self.batch = move(batch_of(batches, 0), settings.device)
        self.generates = callable(getattr(model, "generate", None))
        self.count = settings.generate if self.generates else 0  # tokens
        self.tokens = tokens_in(self.batch)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Where calls are made."""
        with telling_errors(self.model, self.batch), self.settings.autocast():
            yield

    def variant(self, name: str) -> tuple[Call, onepass.Report | None]:
        """A call of a variant, which shares the model's tensors; the report if it is swapped.

        Raises:
            Exception: `attach` does not take the model.
        """
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
        report = None
        if SWAPPED in name:
            report = self.settings.swap(model, kinds_of(name, self.settings))
        if name == ATTACHED:
            from onepass.integrations.transformers import attach

            attach(model)
        if name.startswith(COMPILED):
            model.forward = torch.compile(model.forward, dynamic=True)
        call = _generating if self.generates else _calling
        return call(model, self.batch), report

    def time(
        self, calls: Mapping[str, Call], seconds: float = SECONDS
    ) -> dict[str, tuple[Timing, int]]:
        """Times by variant and tokens of a call, by phase.

        Raises:
            BadInput: decoding takes no time that can be told from that of the prefill.
        """
        settings = self.settings
        measure = functools.partial(
            measure_pairs, rounds=settings.pairs, seconds=0.0 if settings.quick else seconds,
            clock=clock_of(settings.device.type),
        )  # fmt: skip
        if not self.generates:
            timing = measure({name: functools.partial(call, 0) for name, call in calls.items()})
            return {FORWARD: (timing, self.tokens)}
        timing = measure(
            {
                (count, name): functools.partial(call, count)
                for count in (1, self.count)
                for name, call in calls.items()
            }
        )
        ones, whole = ({n: timing.times[count, n] for n in calls} for count in (1, self.count))
        first = {n: statistics.median(ones[n]) for n in calls}
        decode = {n: [seconds - first[n] for seconds in whole[n]] for n in calls}
        if min(map(min, decode.values())) <= 0.0:
            raise BadInput(
                f"--generate must be more tokens than these {self.count}, whose decoding takes no "
                "longer than runs differ"
            )
        sequences = len(next(iter(calls.values()))(1))
        once, none = dict.fromkeys(calls, 1), dict.fromkeys(calls, 0.0)
        return {
            PREFILL: (Timing(ones, once, none), self.tokens),
            DECODE: (Timing(decode, once, none), sequences * (self.count - 1)),
        }


def _calling(model: nn.Module, batch: object) -> Call:
    args, kwargs = arguments(model, batch)

    def call(_: int) -> object:
        with torch.no_grad():
            return model(*args, **kwargs)

    return call


def _generating(model: nn.Module, batch: object) -> Call:
    """A call that continues the prompts by so many tokens, which it returns."""
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    kwargs = {name: value for name, value in kwargs.items() if name not in _LABELS}
    if not isinstance(batch, Mapping):
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        kwargs = {"input_ids": leaves[0]} if leaves else {}

    def call(count: int) -> Tensor:
        with torch.no_grad():
            found = model.generate(
                **kwargs, max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        return found[:, -count:]

    return call
