"""Operators on tensors without data, and a cache of what their results are.

With a fake mode nothing large is computed: a tensor is a shape, and a model of any size runs in the
memory of its Python objects. Small results that depend on the batch alone (positions, masks) are
computed all the same, so that a model may read them.

torch has a cache of its own, whose keys take most of the time of a step without data. The one here
has nothing that torch's refuses, but for our own operators and reshapes without their safety, whose
results follow from the same facts: :class:`Known`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

# The largest result, in bytes, that is computed if no input is a fake; and the largest one without
# tensor inputs, as parameters are made.
MOST_COMPUTED, MOST_MADE = 1 << 24, 1 << 20
MOST_KNOWN = 1 << 14  # calls; then the cache starts anew

_torch_log = logging.getLogger("torch._subclasses.fake_tensor")
_READ = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_BY_VALUES = {  # of which another tensor of the same shape may have another result
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
}  # fmt: skip
_PLAIN = frozenset((
    int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
))  # fmt: skip


def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    """Inside, torch does not log the traceback of an operator that refuses its fake arguments: the
    error is told as any other."""
    level = _torch_log.level
    _torch_log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _torch_log.setLevel(level)


def tensors_of(tree) -> list[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    found = []
    for item in tree:  # most are tensors or numbers, and this runs for every operator
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list, Mapping)):
            found += tensors_of(item)
    return found


class Fakes(TorchDispatchMode):
    """Runs operators without computing if an input is a fake or a result would be large."""

    def __init__(self, fake: FakeTensorMode | None):
        """fake: None computes everything."""
        super().__init__()
        self.fake = fake
        self.known = None if fake is None else _known_of(fake)
        self.number_read: float | None = None  # of any fake; None: an error

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.run(function, types, args, kwargs or {})

    def run(self, function, types, args, kwargs):
        if self.fake is None:
            return function(*args, **kwargs)
        if function is _DEVICE and type(args[0]) is FakeTensor:  # asked more often than all others
            return args[0].fake_device
        call = self.known.call(function, args, kwargs)
        entry = self.known.entries.get(call.key) if call else None
        if entry is _RUN:
            return function(*args, **kwargs)
        if entry is not None:
            return _made(entry, call.given, self.fake)
        given = tensors_of(args) + tensors_of(kwargs) if kwargs else tensors_of(args)
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            if self.number_read is not None and function is _READ:
                return self.number_read
            return self.known.dispatched(function, types, args, kwargs, call)
        if function is _READ:
            return function(*args, **kwargs)
        most = MOST_COMPUTED if given else MOST_MADE
        try:
            result = self.known.dispatched(function, types, args, kwargs, call)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return function(*args, **kwargs)
        if any(tensor.untyped_storage().nbytes() > most for tensor in tensors_of(result)):
            return result
        if call and _BY_VALUES.isdisjoint(function.tags):
            self.known.entries[call.key] = _RUN
        return function(*args, **kwargs)


# ---- what is known -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Given:
    """Result that aliases an argument, by its place among the tensors of the call."""

    number: int


@dataclass(frozen=True, slots=True)
class _New:
    """A result that is made; a view of an argument unless `of` is None."""

    of: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    attributes: dict[str, object]  # those of any such fake, but for its mode


@dataclass(frozen=True, slots=True)
class _Value:
    """A result that is no tensor."""

    value: object


_RUN = _Value("computed: small, and of tensors with data alone")


class _Call:
    """A call by all that its results depend on.

    Attributes:
        key: the operator, and of each tensor what torch's own cache looks at; other arguments as
            they are, with their types (1, 1.0 and True are equal).
        given: its tensors, in order.
        has_data: some of them are no fakes.
    """

    __slots__ = ("given", "has_data", "key")

    def __init__(self, key: tuple, given: list[Tensor], has_data: bool):
        self.key, self.given, self.has_data = key, given, has_data


class Known:
    """Results of calls on the fakes of one mode.

    A result is taken from torch: where torch's cache has it, it depends on nothing but the key
    there, of which the key here has every part. Our own operators are asked once for each key;
    their fakes look at shapes, strides, dtypes and options. A reshape without its safety has the
    storage of its argument, and else nothing of it. Tensors with data among fakes are made fakes
    first, as torch does, unless the operator writes.
    """

    def __init__(self, fake: FakeTensorMode):
        self._fake = weakref.ref(fake)  # which is the key that this is found by
        self.entries: dict[tuple, object] = {}

    def call(self, function, args, kwargs) -> _Call | None:
        """None: one that cannot be known."""
        if torch.is_inference_mode_enabled():
            return None
        given: list[Tensor] = []
        key = [function, torch.get_default_dtype(), torch._C._get_default_device()]
        fake = self._fake()
        try:
            if not _describe(args, fake, key, given):
                return None
            for name, value in kwargs.items():
                key.append(name)
                if not _describe((value,), fake, key, given):
                    return None
        except RuntimeError:  # no strides or no storage: sparse, nested
            return None
        return _Call(tuple(key), given, any(type(tensor) is not FakeTensor for tensor in given))

    def dispatched(self, function, types, args, kwargs, call: _Call | None):
        """Lets torch compute; keeps what it found for the next such call."""
        fake = self._fake()
        if call is None or not isinstance(function, torch._ops.OpOverload):
            return fake.__torch_dispatch__(function, types, args, kwargs)
        is_mutable = function._schema.is_mutable
        if call.has_data:
            if is_mutable or function.is_view or not any(
                type(tensor) is FakeTensor for tensor in call.given
            ):  # fmt: skip
                return fake.__torch_dispatch__(function, types, args, kwargs)
            args, kwargs = _as_fakes((args, kwargs), fake)
        before = _counts()
        result = fake.__torch_dispatch__(function, types, args, kwargs)
        hits, others = (now - then for now, then in zip(_counts(), before, strict=True))
        is_a_hit = hits == 1 and others == 0  # others: it called operators, which torch had
        is_ours = function.namespace == "onepass" and _BY_VALUES.isdisjoint(function.tags)
        if is_a_hit or is_ours or function is _UNSAFE_VIEW:
            entry = self._entry(result, call.given)
            if entry is not None:
                if len(self.entries) >= MOST_KNOWN:
                    self.entries.clear()
                self.entries[call.key] = entry
        return result

    def _entry(self, result, given: list[Tensor]):
        """How to make a result again; None: no way."""
        if isinstance(result, (tuple, list)):
            items = [self._entry(item, given) for item in result]
            if any(item is None for item in items):
                return None
            return items if isinstance(result, list) else tuple(items)
        if not isinstance(result, Tensor):
            return _Value(result) if type(result) in _PLAIN else None
        if type(result) is not FakeTensor or result.constant is not None:
            return None
        for number, tensor in enumerate(given):
            if tensor is result:
                return _Given(number)
        storage = result.untyped_storage()._cdata
        of = [
            number
            for number, tensor in enumerate(given)
            if type(tensor) is FakeTensor and tensor.untyped_storage()._cdata == storage
        ]
        entry = _New(
            of[0] if of else None,
            result.shape,
            result.stride(),
            result.storage_offset(),
            result.dtype,
            _attributes_of(result),
        )
        made = _made(entry, given, self._fake())
        same = vars(made).keys() == vars(result).keys() and _facts(made) == _facts(result)
        return entry if same else None


_all_known: weakref.WeakKeyDictionary[FakeTensorMode, Known] = weakref.WeakKeyDictionary()


def _known_of(fake: FakeTensorMode) -> Known:
    if fake not in _all_known:
        _all_known[fake] = Known(fake)
    return _all_known[fake]


def _counts() -> tuple[int, int]:
    """Calls so far that torch's cache had, and that it did not have."""
    mode = FakeTensorMode
    return mode.cache_hits, mode.cache_misses + sum(mode.cache_bypasses.values())


def _facts(tensor: Tensor) -> tuple:
    """All that an operator's fake may look at."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.requires_grad,
        torch._C._dispatch_keys(tensor).raw_repr(),  # device, layout, conj, neg, inference
        tensor.untyped_storage().nbytes(),
    )


def _describe(tree, fake: FakeTensorMode, key: list, given: list[Tensor]) -> bool:
    """Adds to a key and to the tensors of a call; False: it cannot be known."""
    for item in tree:
        kind = type(item)
        if kind is FakeTensor:
            if item.fake_mode is not fake or item.constant is not None:
                return False
            key += _facts(item)
            key.append(item.fake_device)
            given.append(item)
        elif kind in _PLAIN:
            key.append(kind)
            key.append(item)
        elif kind is list or kind is tuple:
            key.append(kind)
            key.append(len(item))
            if not _describe(item, fake, key, given):
                return False
        elif kind is Tensor or kind is nn.Parameter:
            if item.device.type != "cpu":
                return False
            key.append("data")
            key += _facts(item)
            given.append(item)
        else:
            return False
    return True


def _as_fakes(tree, fake: FakeTensorMode):
    if isinstance(tree, Tensor):
        known = isinstance(tree, FakeTensor)
        return tree if known else fake.fake_tensor_converter.from_real_tensor(fake, tree)
    if isinstance(tree, dict):
        return {name: _as_fakes(value, fake) for name, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_as_fakes(item, fake) for item in tree)
    return tree


def _attributes_of(fake: FakeTensor) -> dict[str, object]:
    """Attributes that torch gives to a fake of this device, copied from one made again. Without the
    mode: what is known of a mode must not keep it alive."""
    with torch._C._DisableTorchDispatch():
        empty = torch.empty(0, dtype=fake.dtype, device="meta")
    attributes = dict(vars(FakeTensor(fake.fake_mode, empty, fake.fake_device)))
    del attributes["fake_mode"]
    return attributes


def _made(entry, given: list[Tensor], fake: FakeTensorMode):
    """The results of a known call."""
    kind = type(entry)
    if kind is _New:
        with torch._C._DisableTorchDispatch():
            if entry.of is None:
                empty = torch.empty_strided(
                    entry.shape, entry.stride, dtype=entry.dtype, device="meta"
                )
            else:
                empty = torch.empty(0, dtype=entry.dtype, device="meta")
                storage = given[entry.of].untyped_storage()
                empty.set_(storage, entry.offset, entry.shape, entry.stride)
        # What FakeTensor's constructor does, without its checks.
        made = Tensor._make_subclass(
            FakeTensor,
            empty,
            False,
            dispatch_device=True,
            device_for_backend_keys=entry.attributes["_fake_device"],
        )
        if not fake._allow_unsafe_data_ptr_access:
            torch._C._set_throw_on_mutable_data_ptr(made)
        else:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        made.__dict__.update(entry.attributes)
        made.fake_mode = fake
        return made
    if kind is _Given:
        return given[entry.number]
    if kind is _Value:
        return entry.value
    return kind(_made(item, given, fake) for item in entry)
