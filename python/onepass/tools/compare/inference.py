"""Calls of a user's model in eval mode and without gradients: of `compare --generate` and
`profile-swap --generate`.

A model with `generate`, as transformers' or nanoGPT's, continues the prompts of its batch by N
tokens, greedily if it can. The median time for a single token is that of the prefill; what N tokens
take longer is that of decoding. All other models are called on their batch: that is the whole
measurement. Variants share their parameters and take turns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import statistics
from collections.abc import Callable, Container, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import onepass
from onepass._batch import arguments, binds
from onepass.tools.compare.settings import Settings
from onepass.tools.compare.variants import COMPILED, SWAPPED, kinds_of
from onepass.tools.errors import BadInput, BadModel
from onepass.tools.harness import Timing, clock_of, measure_pairs
from onepass.tools.model import move
from onepass.tools.user_model import batch_of, load_user_model, telling_errors, tokens_in

ATTACHED = "attached"
PREFILL, DECODE, FORWARD = "prefill", "decode", "forward"
SECONDS = 4.0  # of timed calls, at least, unless --quick
_LABELS = ("labels", "targets")  # keywords of a batch that `generate` does not take

Call = Callable[[int], object]  # by how many tokens


class Inference:
    """The model of --model, its batch, and calls of its variants.

    Attributes:
        note: why its `generate` is not called; empty without it, or if it is.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        model, batches = load_user_model(settings.model, settings.seed)
        self.model: nn.Module = model.to(settings.device).eval()
        self.batch = move(batch_of(batches, 0), settings.device)
        generate, self.note = getattr(model, "generate", None), ""
        self.generates = callable(generate) and _generating(self.model, self.batch) is not None
        if callable(generate) and not self.generates:
            self.note = (
                "The forward alone: generate must take a prompt and max_new_tokens, got "
                f"{inspect.signature(generate)}"
            )
        self.count = settings.generate if self.generates else 0  # tokens
        self.tokens = tokens_in(self.batch)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context in which calls are made."""
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


def _generating(model: nn.Module, batch: object) -> Call | None:
    """A call that continues the prompts by so many tokens, which it returns; None if `generate`
    cannot be called for that."""
    given = dict(batch) if isinstance(batch, Mapping) else {}
    given = {name: value for name, value in given.items() if name not in _LABELS}
    leaves = [leaf for leaf in pytree.tree_leaves(given or batch) if isinstance(leaf, Tensor)]
    if not isinstance(batch, Mapping):
        given = {"input_ids": leaves[0]} if leaves else {}
    signature = inspect.signature(model.generate)

    def options(count: int, taken: Container[str]) -> dict[str, object]:
        """Options of greedy decoding; those of `taken` alone."""
        named = {"min_new_tokens": count, "do_sample": False, "top_k": 1}
        return {"max_new_tokens": count} | {n: v for n, v in named.items() if n in taken}

    for args, kwargs, taken in (
        ((), given, ("min_new_tokens", "do_sample")),  # as transformers'
        (tuple(leaves[:1]), {}, signature.parameters),
    ):
        if binds(signature, args, kwargs | options(1, taken)):
            break
    else:
        return None

    def call(count: int) -> Tensor:
        torch.manual_seed(0)  # one that samples all the same draws alike
        with torch.no_grad():
            found = model.generate(*args, **kwargs, **options(count, taken))
        if not isinstance(found, Tensor):
            raise BadModel(f"generate must return a tensor of tokens, got {type(found).__name__}")
        return found[:, -count:]

    return call
