"""The memory of tensors over a step: every storage from its first tensor to its last.

A dispatch mode sees the results of each operator, and a weak reference to a storage tells when the
last tensor, saved for the backward or not, releases it. Views share a storage, which counts once.
Temporary memory inside an operator is not seen, but for a chunk of logits. With a fake mode nothing
large is computed: :mod:`onepass.tools.estimate.fakes`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as module_hooks

from onepass._policy.small_calls import CHUNK_OF_WORD
from onepass.tools.errors import BadModel
from onepass.tools.estimate.fakes import Fakes, tensors_of

_CAST = torch.ops.aten._to_copy.default
_LOSSES = (
    "log_softmax", "nll_loss", "cross_entropy", "mse_loss", "l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy", "ctc_loss",
)  # fmt: skip

BEFORE, FORWARD, BACKWARD, UPDATE = "before", "forward", "backward", "update"  # phases
GRADIENTS, SCRATCH = "gradients", "scratch"
CASTS = "(weights that autocast casts)"
LOSS = "(loss)"


@dataclass
class Block:
    """A storage that is alive."""

    nbytes: int
    phase: str  # in which it was made, or GRADIENTS
    owner: str  # the module in whose forward it was made, CASTS or LOSS
    order: int  # among all that were made
    reference: weakref.ref


@dataclass
class Peak:
    """The most bytes at once in a phase."""

    total: int = 0
    parts: dict[str, int] = field(default_factory=dict)  # by the phase of the storages
    at: str = ""  # the operator


def _computes_itself(cls: type) -> bool:
    """Whether a class of tensors has a dispatch of its own, but for fakes."""
    is_plain = cls.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return not is_plain and not issubclass(cls, FakeTensor)


@functools.cache
def _returns_an_argument(function) -> bool:
    """Whether the results are arguments that it writes into. Where such an argument has data and
    others are fakes, torch returns a fake with another storage, which no real step makes."""
    returned = getattr(getattr(function, "_schema", None), "returns", ())
    return any(each.alias_info is not None and each.alias_info.is_write for each in returned)


def _chunk_of_logits(input: Tensor, weight: Tensor) -> int:
    """Bytes that grow with the vocabulary alone: too large to ignore, unlike other scratch."""
    words, rows = weight.shape[0], input.shape[0]
    return words * min(CHUNK_OF_WORD, rows * input.itemsize)


class Timeline(Fakes):
    """Counts the bytes that are alive, by the phase in which they were made."""

    def __init__(self, fake: FakeTensorMode | None, model: nn.Module):
        super().__init__(fake)
        self.blocks: dict[int, Block] = {}
        self.live: Counter[str] = Counter()  # bytes by phase
        self.total = 0
        self.phase = BEFORE
        self.peaks = {BEFORE: Peak()}
        self.saved: set[int] = set()  # keys of blocks that autograd saved
        # By phase, of each new storage: the operator, and the bytes alive by phase; None: not kept.
        self.events: dict[str, list[tuple[str, dict[str, int]]]] | None = None
        self.last_module_end = 0  # the order of blocks after which no module but the model made any
        self._order = 0
        self._names = {id(module): name for name, module in model.named_modules()}
        self._model = model
        self._owners = [""]
        self._weights: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(_computes_itself(cls) for cls in types):
            return NotImplemented  # by operators that are seen
        result = self.run(function, types, args, kwargs or {})
        for tensor in () if _returns_an_argument(function) else tensors_of(result):
            try:
                key = tensor.untyped_storage()._cdata
            except NotImplementedError:
                got = f"one of {tensor.layout} from {function.name()}"
                raise BadModel(f"must compute with dense tensors, got {got}") from None
            if key not in self.blocks:
                self._add(key, tensor, self._owner(function, args), function)
        if function is torch.ops.onepass.linear_loss.default:
            self._pass_by(_chunk_of_logits(*args[:2]), function)
        return result

    def begin_with(self, tensors, weights=()) -> None:
        """Registers memory from before: it counts, but not as an activation."""
        for tensor in (*weights, *tensors):
            key = tensor.untyped_storage()._cdata
            if key not in self.blocks:
                self._add(key, tensor, "", None)
        self._weights = {tensor.untyped_storage()._cdata for tensor in weights}

    def enter(self, phase: str) -> None:
        """Starts a phase: new storages belong to it, and its peak is recorded."""
        self.phase = phase
        self.peaks[phase] = Peak(self.total, dict(self.live))
        if self.events is not None:
            self.events[phase] = [("", dict(self.live))]

    def is_gradient(self, tensor: Tensor) -> None:
        """Counts a storage as a gradient from here on."""
        block = self.blocks.get(tensor.untyped_storage()._cdata)
        if block is not None and block.phase != GRADIENTS:
            self.live[block.phase] -= block.nbytes
            self.live[GRADIENTS] += block.nbytes
            block.phase = GRADIENTS

    def made_in(self, phase: str) -> dict[int, Block]:
        """The storages of a phase that are alive, by key."""
        return {key: block for key, block in self.blocks.items() if block.phase == phase}

    def _owner(self, function, args) -> str:
        name = function.name()
        if any(loss in name for loss in _LOSSES):
            return LOSS
        if function is _CAST and args[0].untyped_storage()._cdata in self._weights:
            return CASTS
        return self._owners[-1]

    def _add(self, key: int, tensor: Tensor, owner: str, function) -> None:
        storage = tensor.untyped_storage()
        nbytes, phase = storage.nbytes(), self.phase
        self._order += 1
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self.blocks[key] = Block(nbytes, phase, owner, self._order, reference)
        self.live[phase] += nbytes
        self.total += nbytes
        self._look(function)

    def _pass_by(self, nbytes: int, function) -> None:
        """Counts memory that an operator takes while it runs."""
        self.live[SCRATCH] += nbytes
        self.total += nbytes
        self._look(function)
        self.live[SCRATCH] -= nbytes
        self.total -= nbytes

    def _look(self, function) -> None:
        phase = self.phase
        is_peak = self.total > self.peaks[phase].total
        if not is_peak and self.events is None:
            return
        at = function.name() if function else ""
        if is_peak:
            self.peaks[phase] = Peak(self.total, dict(self.live), at)
        if self.events is not None:
            self.events.setdefault(phase, []).append((at, dict(self.live)))

    def _forget(self, key: int) -> None:
        block = self.blocks.pop(key, None)
        if block is not None:
            self.live[block.phase] -= block.nbytes
            self.total -= block.nbytes
            self.saved.discard(key)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, operators are seen, and the modules in whose forwards they run."""

        def begin(module, args):
            self._owners.append(self._names.get(id(module), self._owners[-1]))

        def end(module, args, output):
            self._owners.pop()
            if module is not self._model and not isinstance(module, nn.modules.loss._Loss):
                self.last_module_end = self._order

        before = module_hooks.register_module_forward_pre_hook(begin)
        after = module_hooks.register_module_forward_hook(end, always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

    def saving(self) -> contextlib.AbstractContextManager:
        """Inside, storages that autograd saves are recorded in `saved`."""

        def pack(tensor: Tensor) -> Tensor:
            self.saved.add(tensor.untyped_storage()._cdata)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
