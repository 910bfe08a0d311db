"""The examined model and batch, without the memory that they would take."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from onepass.tools.estimate.fakes import MOST_COMPUTED, Fakes, fake_mode, tensors_of, without_logs
from onepass.tools.model import each_tensor
from onepass.tools.user_model import batch_of, check_batch, check_trainable, checked_pair


class Subject:
    """A model whose tensors are on "meta", its batch, and the fake mode that both are run in.

    The given model is not changed; with real=True a copy of it is run with its data.
    """

    def __init__(self, model: nn.Module, batch, fake: FakeTensorMode | None = None, real=False):
        check_batch(batch)
        check_trainable(model, needs_data=real)
        self.real = real
        self.fake = None if real else fake or fake_mode()
        self.batch = batch if real else each_tensor(batch, self._with_a_device)
        self._model = copy.deepcopy(model) if real else _on_meta(model)

    def model(self, dtype: torch.dtype | None) -> nn.Module:
        """A copy in training mode, its parameters cast to dtype (None: unchanged)."""
        # Not a deep copy of tensors on "meta": that would separate tensors that share a storage.
        model = (copy.deepcopy if self.real else _on_meta)(self._model).train()
        return model.to(dtype) if dtype else model

    @contextlib.contextmanager
    def in_force(self, model: nn.Module) -> Iterator[None]:
        """Turns tensors on "meta" into fakes on the CPU, for the block.

        Not before a swap, which looks at the class of parameters.
        """
        if self.real:
            yield
            return
        fakes: dict[int, Tensor] = {}
        before = []
        for holder, name, tensor in _held(model):
            if tensor.device.type == "meta":
                before.append((holder, name, tensor))
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = self._fake(tensor)
                holder[name] = fakes[id(tensor)]
        try:
            yield
        finally:
            for holder, name, tensor in before:
                holder[name] = tensor

    def _with_a_device(self, tensor: Tensor) -> Tensor:
        return self._fake(tensor) if tensor.is_meta and type(tensor) is Tensor else tensor

    def _fake(self, tensor: Tensor) -> Tensor:
        # Shares its storage, so that tensors with a common storage keep it.
        fake = FakeTensor(self.fake, tensor.detach(), torch.device("cpu"))
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

    def floating(self) -> list[Tensor]:
        """Whether a cast would change it."""
        tensors = (*self._model.parameters(), *self._model.buffers(), *tensors_of(self.batch))
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    @property
    def rows(self) -> int | None:
        """The size of the batch: of the first dimension of its first tensor that has any."""
        return next((t.shape[0] for t in tensors_of(self.batch) if t.dim()), None)

    def batch_of(self, rows: int | None, dtype: torch.dtype | None):
        """The batch with so many rows (None: its own), floating-point tensors cast to dtype."""

        def change(tensor: Tensor) -> Tensor:
            if rows is not None and tensor.dim() and tensor.shape[0] == self.rows:
                tensor = self._resized(tensor, rows)
            if dtype and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            return tensor

        return each_tensor(self.batch, change)

    def _resized(self, tensor: Tensor, rows: int) -> Tensor:
        if rows == tensor.shape[0]:
            return tensor
        nbytes = rows * tensor[0].nbytes
        if self.fake and (isinstance(tensor, FakeTensor) or nbytes > MOST_COMPUTED):
            with self.fake:
                return torch.empty(
                    (rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device
                )
        return tensor[torch.arange(rows, device=tensor.device) % tensor.shape[0]]


def made(make: Callable[[], tuple[nn.Module, object]], real: bool = False) -> Subject:
    """The subject of a function that returns (model, batch), called without the memory of its
    parameters, or, if that fails, normally."""
    if not real:
        fake = fake_mode()
        random = torch.get_rng_state()
        try:
            with Fakes(fake), without_logs():
                model, batch = checked_pair(make())
            return Subject(model, batch_of(batch, 0), fake)
        except Exception:  # it may need data; real errors are raised again below
            torch.set_rng_state(random)
    model, batch = checked_pair(make())
    return Subject(model, batch_of(batch, 0), real=real)


def _held(model: nn.Module) -> Iterator[tuple[dict, str, Tensor]]:
    """Places of each parameter and buffer; a tied one has several."""
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for name, tensor in list(holder.items()):
                if tensor is not None:
                    yield holder, name, tensor


def _on_meta(model: nn.Module) -> nn.Module:
    """A deep copy whose parameters and floating-point buffers have no data.

    Integers keep their data: the path of a forward may depend on positions and masks.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    memo: dict[int, object] = {}
    for _, _, tensor in _held(model):
        has_data = not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
        if isinstance(tensor, nn.Parameter) or tensor.is_floating_point() or not has_data:
            memo[id(tensor)] = _empty_like(tensor, storages)
    return copy.deepcopy(model, memo)


def _empty_like(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
    empty = torch.empty(0, dtype=tensor.dtype, device="meta")
    empty.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
