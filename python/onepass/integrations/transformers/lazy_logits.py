"""Logits that are computed when they are read: `onepass.swap(model, lazy_logits=True)` makes the
head of a language model return them, so that its loss needs no logits.

A model of transformers computes ``logits = self.lm_head(hidden)``, then
``self.loss_function(logits=logits, labels=labels, ...)``, and returns both. In a step with labels
and gradients the head of a swapped model returns `LazyLogits`: a tensor with shape, dtype and
place in the graph, and no numbers. The loss of `losses.py` finds hidden states and weight in it and
calls `linear_cross_entropy`, which makes logits chunk by chunk.

Readers never get wrong numbers. Every torch operator on lazy logits passes through
`LazyLogits.__torch_dispatch__`, below autograd, which computes the numbers with the head's product,
once, and runs the operator on them; gradients flow through `_Head`. A few operators that
models apply to logits before the loss (a softcap, a factor, a wider dtype) stay lazy. The loss of
logits that were read, or changed in place, is that of these numbers. Once the weight has changed
(after `optimizer.step()`), the logits of the previous step are lost, and reading them raises.

The loss may do without logits only if its gradient would have gone through the head and the lazy
operators alone. So it looks for `_Head` in the graph of its logits, and reads them if they were
detached, are a leaf, or passed through a function of the user's.

The alternatives were None, which breaks code that reads logits in training, and logits without a
graph, which are wrong for a loss of the user's own. There is no condition on `model.training`:
gradients of a model in eval mode have the same logits, and `verify` may run that way. Without
gradients (the Trainer's evaluation, `generate`), without labels, and under `torch.compile`, logits
are made at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction

from onepass import _stock
from onepass._hooks import is_on_each_output
from onepass._ops.differentiation import are_transforms_active
from onepass._policy import small_calls
from onepass._policy.precision import precision_of
from onepass.functional._internal import (
    linear_cross_entropy_in_float32,
    linear_where_it_gains,
)
from onepass.nn._parts import has_hooks
from onepass.swapping import classes
from onepass.swapping.inputs import has_kernels
from onepass.swapping.reasons import Reason, SkipReason, replaced_forward

_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHANGED = (
    "lazy logits: must be read before the {} changes, got one that was changed since the forward: "
    "the loss was computed without them (onepass.swap with lazy_logits=True); read them before "
    "optimizer.step(), and before FSDP frees the weight, or swap without lazy_logits"
)
_NO_HOOK = (
    "lazy logits: {} must not be asked of them, the loss was computed without them (onepass.swap "
    "with lazy_logits=True); swap without lazy_logits"
)
_NO_SHAPE = (
    "lazy logits: {} must not change them, their shape is fixed (onepass.swap with "
    "lazy_logits=True); use the operator that returns a new tensor, or swap without lazy_logits"
)
# FSDP; ModuleTracker, which FlopCounterMode has.
_PLAIN = (Tensor, nn.Parameter)
_SAMPLED = 64  # rows and columns of a weight, or up to twice as many


# ---- the tensor ----------------------------------------------------------------------------------


class _Source:
    """How to compute some logits, and the numbers once they are computed. It is not part of the
    graph, so that detached logits do not keep one alive.

    Attributes:
        hidden, weight, bias: of the head's product, detached.
        dtype: in which it is computed, autocast's where that is on.
        precision: of the head's products of float32.
        applied: operators after it, as (operator, further arguments).
        value: the numbers; None until they are read.
    """

    def __init__(self, hidden, weight, bias, dtype, product: Callable, precision: str | None):
        self.hidden, self.weight, self.bias = (
            None if t is None else t.detach() for t in (hidden, weight, bias)
        )
        self.dtype, self.precision = dtype, precision
        self.applied: tuple = ()
        self.value: Tensor | None = None
        self._product = product
        self._versions = [None if t is None else t._version for t in self._tensors()]
        # Optimizers that write to `weight.data` do not change its version. But a gradient of logits
        # has no zeros, so a step changes all rows of the weight: a sample of numbers shows it.
        self._sample = _sample(self.weight)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.hidden, self.weight, self.bias

    def then(self, operator, *further) -> _Source:
        """The source of logits with one more operator applied."""
        source = object.__new__(_Source)
        vars(source).update(vars(self), applied=(*self.applied, (operator, further)))
        return source

    def read(self) -> Tensor:
        """The numbers, computed at the first call.

        Raises:
            RuntimeError: the weight has changed since.
        """
        if self.value is None:
            self._check()
            plainly = torch.autocast(self.hidden.device.type, enabled=False)
            with torch.inference_mode(False), torch.no_grad(), plainly:
                tensors = (None if t is None else t.to(self.dtype) for t in self._tensors())
                value = self._product(*tensors)
                for operator, further in self.applied:
                    value = operator(value, *further)
            self.value = value
        return self.value

    def _check(self) -> None:
        names = ("hidden state", "weight of the head", "bias of the head")
        for name, tensor, version in zip(names, self._tensors(), self._versions, strict=True):
            if tensor is None:
                continue
            gone = tensor.untyped_storage().size() < tensor.numel() * tensor.itemsize
            if gone or tensor._version != version:
                raise RuntimeError(_CHANGED.format(name))
        if type(self._sample) in _running.without_data:
            return
        if not torch.equal(_sample(self.weight), self._sample):
            raise RuntimeError(_CHANGED.format("weight of the head"))

    def formula(self) -> tuple[float, float] | None:
        """(scale, softcap) of the operators after the product; None if they are something else."""
        before, after, capped = 1.0, 1.0, False
        for operator, further in self.applied:
            if operator is _aten.tanh.default:
                if capped:
                    return None
                before, after, capped = after, 1.0, True
            elif operator is _aten.mul.Tensor:
                after *= further[0]
            elif operator is _aten.div.Tensor:
                after /= further[0]
        if not capped:
            return after, 0.0
        if after <= 0.0:
            return None
        scale = before * after  # of c tanh(scale x / c), c being `after`
        return 1.0 if abs(scale - 1.0) < 1e-12 else scale, after


def _sample(weight: Tensor) -> Tensor:
    """The bits of some numbers, in evenly spaced rows and columns."""
    some = weight[tuple(slice(None, None, max(size // _SAMPLED, 1)) for size in weight.shape)]
    return some.clone().view(torch.int32 if some.itemsize == 4 else torch.int16)


class LazyLogits(Tensor):
    """Logits without numbers, until an operator reads them."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _source: _Source

    @staticmethod
    def __new__(cls, source: _Source, shape: torch.Size, dtype: torch.dtype) -> LazyLogits:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=source.hidden.device)
        made._source = source
        # C++ code that reads memory without an operator gets an error instead of a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags and func is not _aten.detach_.default:
            raise RuntimeError(_NO_SHAPE.format(func.overloadpacket))
        lazily = _lazily(func, args, kwargs)
        if lazily is not None:
            return lazily
        read = {}  # lazy logits by the ids of their numbers

        def numbers(x):
            if not isinstance(x, LazyLogits):
                return x
            value = x._source.read()
            read[id(value)] = x
            return value

        result = func(*_mapped(numbers, args), **_mapped(numbers, kwargs))
        # An operator that writes returns its argument, which stays the tensor that it is.
        return _mapped(lambda x: read.get(id(x), x), result)

    def numbers(self) -> Tensor:
        """An ordinary tensor with the same numbers and the same place in the graph."""
        return self.view(self.shape)

    def __repr__(self, **options) -> str:
        return self.numbers().__repr__(**options)

    def __reduce_ex__(self, protocol):
        return self.numbers().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.numbers().__deepcopy__(memo)

    # torch reads memory in these without an operator.

    @property
    def data(self) -> Tensor:
        return self.detach().numbers()

    def numpy(self, **options):
        return self.numbers().numpy(**options)

    def __array__(self, *args, **options):
        return self.numbers().__array__(*args, **options)

    def tolist(self) -> list:
        return self.numbers().tolist()

    def apply_(self, function: Callable) -> LazyLogits:
        self.numbers().apply_(function)
        return self

    def data_ptr(self) -> int:
        return self._source.read().data_ptr()

    def untyped_storage(self):
        return self._source.read().untyped_storage()

    def storage(self):
        return self._source.read().storage()

    def __dlpack__(self, **options):
        return self.numbers().__dlpack__(**options)

    # The gradient of the loss does not pass here.

    def retain_grad(self) -> None:
        raise RuntimeError(_NO_HOOK.format("their gradient"))

    def register_hook(self, hook: Callable):
        if is_on_each_output(hook):
            return super().register_hook(hook)  # the loss has it too
        raise RuntimeError(_NO_HOOK.format("a hook on their gradient"))


def _mapped(function: Callable, given):
    """Applies a function to tensors, and lists of them, in an operator's arguments or result."""
    if isinstance(given, dict):
        return {name: _mapped(function, x) for name, x in given.items()}
    if type(given) in (list, tuple):
        return type(given)(_mapped(function, x) for x in given)
    return function(given)


def _lazily(func, args: tuple, kwargs: dict) -> LazyLogits | None:
    """The result of an operator that needs no numbers yet; None if it needs them."""
    x = args[0] if args else None
    if not isinstance(x, LazyLogits):
        return None
    if func is _aten.detach.default:
        return LazyLogits(x._source, x.shape, x.dtype)  # of the same source
    if x._source.value is not None:
        return None
    if func is _aten._to_copy.default and set(kwargs) == {"dtype"}:
        dtype = kwargs["dtype"]
        if dtype is torch.float32:
            return LazyLogits(x._source.then(Tensor.to, dtype), x.shape, dtype)
    elif func is _aten.tanh.default:
        return LazyLogits(x._source.then(func), x.shape, x.dtype)
    elif func in (_aten.mul.Tensor, _aten.div.Tensor) and not kwargs:
        factor = args[1]
        if type(factor) in (int, float) and factor > 0:
            return LazyLogits(x._source.then(func, factor), x.shape, x.dtype)
    return None


class _Head(torch.autograd.Function):
    """A head whose product is not computed yet."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, source: _Source) -> LazyLogits:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.inputs, ctx.dtype = (hidden, weight, bias), source.dtype  # the loss needs them
        return LazyLogits(source, (*hidden.shape[:-1], weight.shape[0]), source.dtype)

    @staticmethod
    def backward(ctx, dlogits):
        hidden, weight, bias = ctx.saved_tensors
        needs, found = ctx.needs_input_grad, [None] * 4
        rows = dlogits.reshape(-1, dlogits.shape[-1])
        if needs[0]:
            found[0] = (dlogits @ weight.to(ctx.dtype)).to(hidden.dtype)
        if needs[1]:
            inputs = hidden.to(ctx.dtype).reshape(-1, hidden.shape[-1])
            found[1] = (rows.t() @ inputs).to(weight.dtype)
        if needs[2]:
            found[2] = rows.sum(0).to(bias.dtype)
        return tuple(found)


def _head_of(logits: LazyLogits) -> _Head | None:
    """The node of the head in the graph of logits, if only the applied operators are between."""
    node = logits.grad_fn
    for _ in logits._source.applied:
        if not getattr(node, "next_functions", ()) or isinstance(node, BackwardCFunction):
            return None  # a leaf; a function of the user's
        node = node.next_functions[0][0]
    return node if isinstance(node, _Head._backward_cls) else None


def loss(logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor | None:
    """The float32 cross entropy of lazy logits, which are not read; None for other logits, and for
    arguments that need them."""
    if not isinstance(logits, LazyLogits) or logits._source.value is not None:
        return None
    source = logits._source
    formula, head = source.formula(), _head_of(logits)
    if formula is None or head is None:
        return None
    hidden, weight, bias = head.inputs
    rows = hidden.reshape(-1, hidden.shape[-1])
    if target.shape != rows.shape[:1] or target.dtype is not torch.int64:
        return None
    if are_transforms_active() or forward_ad._current_level >= 0:
        return None
    scale, softcap = formula
    if scale != 1.0:
        rows, bias = rows * scale, None if bias is None else bias * scale
    return linear_cross_entropy_in_float32(
        rows,
        weight,
        target,
        bias,
        ignore_index,
        softcap,
        reduction,
        source.dtype,
        source.precision,
    )


# ---- the model -----------------------------------------------------------------------------------


class _Running(threading.local):
    """State of each thread.

    Attributes:
        model: whose forward uses lazy logits.
        without_data: classes of tensors that no operator computes; their logits wait too.
    """

    model: nn.Module | None = None
    without_data: tuple[type[Tensor], ...] = ()


_running = _Running()


@contextlib.contextmanager
def _in(model: nn.Module) -> Iterator[None]:
    before = _running.model
    _running.model = model
    try:
        yield
    finally:
        _running.model = before


@contextlib.contextmanager
def also_of(*classes: type[Tensor]) -> Iterator[None]:
    """Inside, heads are lazy for these classes of tensors, which have no data, too."""
    before = _running.without_data
    _running.without_data = classes
    try:
        yield
    finally:
        _running.without_data = before


def forward_of(original: Callable) -> Callable:
    """A model's forward, during which its head is lazy if there are labels and gradients."""
    names = list(inspect.signature(original).parameters)
    place = names.index("labels") - 1 if "labels" in names else None

    @functools.wraps(original)
    def forward(self, *args, **named):
        labels = named.get("labels")
        if labels is None and place is not None and place < len(args):
            labels = args[place]
        if torch.compiler.is_compiling() or labels is None or not torch.is_grad_enabled():
            return original(self, *args, **named)
        with _in(self):
            return original(self, *args, **named)

    return forward


def head_of(name: str) -> property:
    """A model's attribute `name`, the module of its head; while its forward uses lazy logits, a
    module with the same `__dict__` that returns them."""

    def head(self) -> nn.Module | None:
        if name not in self._modules:
            raise AttributeError(name)  # in the words of nn.Module, which Python asks next
        module = self._modules[name]
        if torch.compiler.is_compiling() or _running.model is not self or obstacle(module):
            return module
        lazy = object.__new__(_lazy_class(type(module)))
        lazy.__dict__ = module.__dict__
        return lazy

    return property(head)


def obstacle(head: nn.Module | None) -> SkipReason | None:
    """Why a head makes its logits at once; None if they can be lazy."""
    cls = type(head)
    if cls not in (nn.Linear, classes.Linear):
        return Reason.NO_HEAD.format(f"{cls.__module__}.{cls.__qualname__}")
    if because := replaced_forward(head):
        return because
    if has_hooks(head):
        return Reason.HOOKS_OF_HEAD.format()
    if _stock.parametrizations(head):
        return Reason.PARAMETRIZED.format()
    for name, parameter in head._parameters.items():
        if parameter is not None and type(parameter) not in (*_PLAIN, *_running.without_data):
            return Reason.PARAMETER_CLASS.format(name, type(parameter).__name__)
    return None


def head_name(model: nn.Module) -> str | None:
    """The name of the child that a model of transformers calls its output embeddings."""
    head = model.get_output_embeddings()
    return next((name for name, child in model._modules.items() if child is head), None)


@functools.cache
def _lazy_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The lazy class for nn.Linear, and for the class that swap gives it."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not _waits(input, weight, bias):
            return cls.forward(self, input)
        dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
        precision, product = None, F.linear
        if cls is classes.Linear:
            precision = precision_of(self)
            product = functools.partial(linear_where_it_gains, precision=precision)
        source = _Source(input, weight, bias, dtype, product, precision)
        return _Head.apply(input, weight, bias, source)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _waits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the logits of this call are lazy: gradients are needed, `linear_cross_entropy` takes
    these tensors, and it has more than one chunk of them."""
    tensors = [t for t in (input, weight, bias) if t is not None]
    return (
        torch.is_grad_enabled()
        and type(input) in (Tensor, *_running.without_data)
        and not (input.is_nested or input.is_meta)
        and has_kernels(input.device.type, "loss")
        and any(t.requires_grad for t in tensors)
        and all(t.dtype in _DTYPES and t.device == input.device for t in tensors)
        and (torch.is_autocast_enabled(input.device.type) or len({t.dtype for t in tensors}) == 1)
        and not torch.jit.is_tracing()
        and not are_transforms_active()
        and forward_ad._current_level < 0
        and not small_calls.logits_are_few(input, weight)
    )
