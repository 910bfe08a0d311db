"""The state that running a model may change, recorded before and restored after."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from onepass.swapping.providers import MODELS, imported

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


class _Kept:
    """One module: its class, its attributes, and its containers' items, one level deep."""

    def __init__(self, module: nn.Module):
        self.module, self.cls, self.attributes = module, type(module), dict(vars(module))
        self.contents = [
            (value, value.copy())
            for value in self.attributes.values()
            if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        if type(self.module) is not self.cls:
            object.__setattr__(self.module, "__class__", self.cls)
        now = vars(self.module)
        for name in [name for name in now if name not in self.attributes]:
            del now[name]
        for name, value in self.attributes.items():
            if now.get(name, self) is not value:
                now[name] = value
        for container, before in self.contents:
            if not _same_items(container, before):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(before)


def _same_items(container, before) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, set):
        return container == before
    pairs = zip(container, before, strict=True)
    if isinstance(container, dict):
        pairs = zip(container.items(), before.items(), strict=True)
        return all(a is b and x is y for (a, x), (b, y) in pairs)
    return all(a is b for a, b in pairs)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Runs compiled code eagerly, as the block needs it for modes of torch: otherwise Dynamo would
    never compile again what it met in one."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes long
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class Random:
    """The random state of Python, of numpy if that is imported, and of torch on the devices of a
    model."""

    def __init__(self, model: nn.Module):
        self._python = random.getstate()
        self._numpy = None
        if "numpy" in sys.modules:
            name, numbers, *rest = sys.modules["numpy"].random.get_state()
            self._numpy = name, numbers.tolist(), *rest
        self._cpu = torch.get_rng_state()
        devices = {tensor.device.index for tensor in model.parameters() if tensor.is_cuda}
        self._cuda = [(index, torch.cuda.get_rng_state(index)) for index in sorted(devices)]

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for index, state in self._cuda:
            torch.cuda.set_rng_state(state, index)

    def __eq__(self, other) -> bool:
        ours, theirs = ([x._cpu, *(state for _, state in x._cuda)] for x in (self, other))
        return (
            (self._python, self._numpy) == (other._python, other._numpy)
            and len(ours) == len(theirs)
            and all(map(torch.equal, ours, theirs))
        )


class State:
    """A model's classes, attributes, buffers and attention, the random state, grad mode.

    Parameters keep their values: nothing that is run with this writes to them.
    """

    def __init__(self, model: nn.Module, others: Iterable[nn.Module] = ()):
        modules = {id(module): module for module in (*model.modules(), *others)}
        self._modules = [_Kept(module) for module in modules.values()]
        self._buffers = [
            (buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()
        ]
        self._configs = _configs(model)
        self._grad = torch.is_grad_enabled()
        self._random = Random(model)

    def around(self, function: Callable, *args):
        """Runs `function(*args)`; then restores everything, also after an error.

        Twice, so that after an interrupt during the first restore there is a second one.
        """
        try:
            try:
                return function(*args)
            finally:
                self.restore()
        finally:
            self.restore()

    def restore(self) -> None:
        """Restores everything; idempotent, also after an interrupted call."""
        torch.set_grad_enabled(self._grad)
        for kept in self._modules:
            kept.restore()
        for buffer, version, value in self._buffers:
            # Batch norm updates its statistics without a new version.
            if buffer._version != version or not torch.equal(buffer, value):
                buffer.detach().copy_(value)  # no_grad could be left half way
        for config, implementation in self._configs:
            config._attn_implementation_internal = implementation
        self._random.restore()


def _configs(model: nn.Module) -> list[tuple]:
    """(config, the attention that it names) of transformers' models, which verify sets."""
    integration = imported(MODELS)
    return [] if integration is None else integration.implementations(model)
