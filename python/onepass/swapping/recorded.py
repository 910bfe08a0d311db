"""The calls of torch that are recorded on `Scores`, and what they mean to attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from onepass._hooks import is_on_each_output
from onepass.swapping.factors import PRODUCTS
from onepass.swapping.scores import SCORES, Form, Scores, Step, Term, dtype_after

LARGEST_FILL = -1e4  # that blocks a key: a score set to a larger number is no mask


def _next(
    scores: Scores, form: Form, step: Step, *, dtype=None, size=None, is_written: bool = False
) -> Scores:
    """Scores after a step; with `is_written` the same object.

    Their dtype is that of the scores, or a wider one of the step's tensors.
    """
    form = replace(form, steps=(*scores.form.steps, step.recorded()))
    if dtype is None:
        dtypes = (x.dtype for x in step.tensors() if x.dim() and not is_written)
        dtype = functools.reduce(torch.promote_types, dtypes, scores.dtype)
    size = scores.shape if size is None else size
    made = Scores.of(form, size, dtype, scores.recorder, scores)
    if not is_written:
        scores.is_shared = True
        return made
    # The old state moves to an object of its own, which the new one follows.
    made.form, made.before, made.modes, modes = scores.form, scores.before, scores.modes, made.modes
    scores.form, scores.before, scores.modes = form, made, modes
    if any(x.requires_grad for x in step.tensors()):
        scores.take_gradients()
    return scores


def _number(value: object, scores: Scores) -> float | None:
    """The value of a number, or of a tensor that is one and needs no gradient."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if type(value) is not Tensor or value.numel() != 1 or not value.is_cpu:
        return None
    if value.requires_grad or value.is_complex() or value.dim() > scores.dim():
        return None
    return float(value)


def _fits(tensor: object, scores: Scores) -> bool:
    """Whether a tensor broadcasts to scores without making them larger."""
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    if not tensor.is_cpu or tensor.dim() > scores.dim():
        return False
    wanted = scores.shape[scores.dim() - tensor.dim() :]
    return all(size in (1, of) for size, of in zip(tensor.shape, wanted, strict=True))


def _is_open(scores: object) -> bool:
    return isinstance(scores, Scores) and scores.is_open()


def _writes(function: Callable) -> bool:
    name = function.__name__
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _recorded(take: Callable) -> Callable:
    """A handler of calls whose first argument is scores: take(form, scores, *args) gives the new
    form, or None; `function` may write into the scores."""

    def record(function, scores, *args, **kwargs):
        if not _is_open(scores):
            return None
        is_written = _writes(function)
        if is_written and scores.is_shared:
            return None
        form = take(scores.form, scores, *args, **kwargs)
        if form is None:
            return None
        step = Step(function, (SCORES, *args), kwargs)
        return _next(scores, form, step, is_written=is_written)

    return record


def _reflected(take: Callable) -> Callable:
    """The same for functions of two arguments that commute, with the scores in either place."""
    direct = _recorded(take)

    def record(function, input, other, **kwargs):
        if isinstance(input, Scores):
            return None if isinstance(other, Scores) else direct(function, input, other, **kwargs)
        if kwargs or not _is_open(other) or _writes(function):
            return None

        def swapped(x, y):
            return function(y, x)

        swapped.__name__ = function.__name__
        return direct(swapped, other, input)

    return record


def _multiply(form: Form, scores: Scores, other) -> Form | None:
    number = _number(other, scores)
    if form.is_softmax:
        return None
    if number is None:
        return _scale_queries(form, scores, other)
    if not math.isfinite(number) or number == 0:
        return None
    if form.is_tanh:
        if number < 0:
            return None
        options = (*form.options, ("softcap", number))
        return replace(form, is_tanh=False, options=options, scale=number * form.scale)
    fill = form.fill * number if form.blocked else form.fill
    if form.options or (form.blocked and not fill <= LARGEST_FILL):
        return None
    terms = tuple(Term.of(term.tensor * number, term.lead) for term in form.terms)
    return replace(form, scale=form.scale * number, terms=terms, fill=fill)


def _scale_queries(form: Form, scores: Scores, other) -> Form | None:
    """A factor of each query."""
    if form.is_tanh or form.options or form.terms or form.blocked or not _fits(other, scores):
        return None
    if not other.is_floating_point() or (other.dim() and other.shape[-1] != 1):
        return None
    return replace(form, factors=(*form.factors, Term.of(other, form.lead)))


def _divide(form: Form, scores: Scores, other, *, rounding_mode=None) -> Form | None:
    number = _number(other, scores)
    if number == 0 or rounding_mode is not None:
        return None
    return _multiply(form, scores, 1.0 / (other if number is None else number))


def _add(form: Form, scores: Scores, other, *, alpha=1) -> Form | None:
    if form.is_softmax or form.is_tanh or alpha != 1:
        return None
    number = None if isinstance(other, Tensor) else _number(other, scores)
    if number == 0:
        return form
    if number is not None and math.isfinite(number):
        other = torch.tensor(number, dtype=scores.dtype, device="cpu")
    if not _fits(other, scores) or not other.is_floating_point() or other.dtype is torch.float64:
        return None
    return replace(form, terms=(*form.terms, Term.of(other, form.lead)))


def _subtract(form: Form, scores: Scores, other, *, alpha=1) -> Form | None:
    return _add(form, scores, -other, alpha=alpha)


def _fill(form: Form, scores: Scores, mask, value) -> Form | None:
    number = _number(value, scores)
    if form.is_softmax or form.is_tanh or number is None or not number <= LARGEST_FILL:
        return None
    if not _fits(mask, scores) or mask.dtype is not torch.bool:
        return None
    blocked = (*form.blocked, Term.of(mask, form.lead))
    return replace(form, blocked=blocked, fill=max(form.fill, number))


def _where(function, condition, input, other, **kwargs):
    """`torch.where` with the scores kept where the condition is True, or where it is False."""
    if kwargs or not isinstance(condition, Tensor) or condition.dtype is not torch.bool:
        return None
    for scores, value, mask in ((input, other, ~condition), (other, input, condition)):
        if _is_open(scores) and not isinstance(value, Scores):
            form = _fill(scores.form, scores, mask, value)
            args = (condition, *((SCORES, other) if scores is input else (input, SCORES)))
            return form and _next(scores, form, Step(function, args, {}))
    return None


def _tanh(form: Form, scores: Scores) -> Form | None:
    if form.is_softmax or form.is_tanh or form.options or form.terms or form.blocked:
        return None
    return replace(form, is_tanh=True)


def _softmax(function, input, dim=None, dtype=None, _stacklevel=3):
    if not _is_open(input) or input.form.is_softmax or input.form.is_tanh:
        return None
    if dim is None or dim % input.dim() != input.dim() - 1 or dtype is torch.float64:
        return None
    given = {} if dtype is None else {"dtype": dtype}
    dtype = dtype or dtype_after(torch.softmax, input.dtype)
    step = Step(torch.softmax, (SCORES, -1), given)
    return _next(input, replace(input.form, is_softmax=True), step, dtype=dtype)


def _dropout(function, input, p=0.5, training=True, inplace=False):
    if not _is_open(input) or not input.form.is_softmax:
        return None
    if not training or p == 0.0:
        return input
    if inplace or input.form.dropout_p or not isinstance(p, float) or not 0.0 < p < 1.0:
        return None
    form = replace(input.form, dropout_p=p)
    return _next(input, form, Step(F.dropout, (SCORES, p, True), {}, "dropout"))


def _cast(function, scores, *args, **kwargs):
    """Casts to another floating dtype; calls with other arguments (a device, an order) are not
    taken."""
    if not isinstance(scores, Scores):  # another tensor, to their dtype
        return _of_their_size(function, scores, *args, **kwargs)
    if not _is_open(scores) or kwargs.keys() - {"dtype"}:
        return None
    args = pytree.tree_map_only(
        Scores, lambda like: torch.empty((), dtype=like.dtype, device="cpu"), args
    )
    with torch._C.DisableTorchFunction():
        sample = function(torch.ones((), dtype=scores.dtype, device="cpu"), *args, **kwargs)
    if not isinstance(sample, Tensor) or not sample.is_cpu or not sample.is_floating_point():
        return None
    if sample.dtype is torch.float64:
        return None
    if sample.dtype is scores.dtype:
        return scores
    step = Step(function, (SCORES, *args), kwargs, "cast")
    return _next(scores, scores.form, step, dtype=sample.dtype)


def _same(function, scores, *args, **kwargs):
    return scores if _is_open(scores) and not args and not kwargs else None


def _copy(function, scores, *args, **kwargs):
    """A copy, which is often kept beside the scores and not read."""
    if not _is_open(scores) or args or kwargs:
        return None
    return _next(scores, scores.form, Step(function, (SCORES,), {}))


def _view(function, scores, *args, **kwargs):
    """Other leading dimensions."""
    if not _is_open(scores):
        return None
    like = torch.empty(scores.shape, dtype=scores.dtype, device="meta")
    with torch._C.DisableTorchFunction():
        result = function(like, *args, **kwargs)
    size = result.shape
    if len(size) < 3 or size[-2:] != scores.shape[-2:] or result.dtype is not scores.dtype:
        return None
    form = replace(scores.form, lead=tuple(size[:-2]))
    step = Step(function, (SCORES, *args), kwargs, "view", form.lead)
    viewed = _next(scores, form, step, size=size)
    viewed.is_shared = True
    return viewed


def _turn(function, scores, *args, **kwargs):
    """Probabilities with queries and keys exchanged, which values are multiplied by."""
    if not _is_open(scores) or not scores.form.is_softmax:
        return None
    places = list(range(2, scores.dim() + 2))  # sizes that tell dimensions apart
    with torch._C.DisableTorchFunction():
        result = function(torch.empty(places, device="meta"), *args, **kwargs)
    if list(result.shape) != [*places[:-2], places[-1], places[-2]]:
        return None
    step = Step(function, (SCORES, *args), kwargs)
    turned = _next(scores, scores.form, step, size=scores.shape[:-2] + scores.shape[:-3:-1])
    turned.is_turned = turned.is_shared = True
    return turned


def _of_their_size(function, *args, **kwargs):
    """Functions that read the size and dtype alone of scores."""
    args, kwargs = pytree.tree_map_only(
        Scores,
        lambda like: torch.empty((), dtype=like.dtype, device="cpu").expand(like.shape),
        (args, kwargs),
    )
    return function(*args, **kwargs)


def _gradient(function, scores, *args):
    """Looks at the gradient of scores."""
    if not scores.is_taken:
        return None
    if args and is_on_each_output(args[0]):
        return function(scores, *args)  # attention's output has it too
    raise RuntimeError(
        "swap: probabilities of attention by hand must not be asked for the gradient that they get "
        f"from values, got {function.__name__}; onepass.swap(model, exclude=...) leaves the module "
        "as it is"
    )


def _product(function, *args, **kwargs):
    scores = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Scores))
    return scores.recorder.product(function, args, kwargs)


def _by_torchs_names(handler: Callable) -> Callable:
    """A handler that leaves calls alone whose arguments it does not know, such as `out`."""

    def record(function, *args, **kwargs):
        try:
            return handler(function, *args, **kwargs)
        except TypeError:
            return None

    return record


def _all(names: str) -> list[Callable]:
    """Methods of Tensor and functions of torch and torch.nn.functional with these names."""
    return [
        function
        for name in names.split()
        for owner in (torch, Tensor, F)
        if (function := getattr(owner, name, None)) is not None
    ]


_HANDLERS = (
    ("mul multiply mul_ multiply_ __mul__ __rmul__ __imul__", _reflected(_multiply)),
    ("div divide div_ divide_ true_divide __truediv__ __itruediv__", _recorded(_divide)),
    ("add add_ __add__ __radd__ __iadd__", _reflected(_add)),
    ("sub subtract sub_ __sub__ __isub__", _recorded(_subtract)),
    ("masked_fill masked_fill_", _recorded(_fill)),
    ("where", _where),
    ("tanh tanh_", _recorded(_tanh)),
    ("softmax", _softmax),
    ("dropout", _dropout),
    ("to type type_as float half bfloat16", _cast),
    ("transpose swapaxes swapdims permute", _turn),
    ("contiguous", _same),
    ("clone", _copy),
    ("retain_grad register_hook", _gradient),
    ("expand_as zeros_like ones_like full_like empty_like", _of_their_size),
    ("new_zeros new_ones new_full new_empty new_tensor", _of_their_size),
    ("view reshape unflatten flatten unsqueeze squeeze", _view),
)
for _names, _handler in _HANDLERS:
    Scores.recorded |= dict.fromkeys(_all(_names), _by_torchs_names(_handler))
Scores.recorded |= dict.fromkeys(PRODUCTS, _product) | {Tensor.mT.__get__: _turn}
_PROPERTIES = (
    "shape dtype device ndim layout is_cpu is_cuda is_mps is_meta is_sparse is_nested is_quantized "
    "requires_grad is_leaf"
)
_METHODS = (
    "size dim ndimension numel nelement is_floating_point is_complex is_contiguous element_size "
    "__len__ get_device is_inference"
)
Scores.metadata |= {getattr(Tensor, name).__get__ for name in _PROPERTIES.split()}
Scores.metadata.update(_all(_METHODS))
