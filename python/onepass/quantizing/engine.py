"""`quantize` and `dequantize`: the choice of layers, and their exchange."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onepass import _batch, _flops
from onepass._arguments import check_arguments
from onepass._imported import is_a
from onepass.nn import Linear
from onepass.nn._parts import is_untouched
from onepass.nn.quantized_linear import (
    QuantizedLinear,
    _check_activations,
    _check_finite,
    _check_weights,
    _group_size_of,
)
from onepass.quantizing.report import QuantizationReport
from onepass.swapping import providers
from onepass.swapping.reasons import Reason
from onepass.swapping.walk import Choice, Found, globs, walk

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_Places = dict[int, list[tuple[nn.Module, str]]]


def quantize(
    model: nn.Module,
    weights: str,
    *,
    group_size: int | None = None,
    activations: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    skip_head: bool = True,
    batch: object = None,
) -> QuantizationReport:
    """Quantises the weights of linear layers in place: each layer becomes a
    `onepass.nn.QuantizedLinear` of the same name, whose weight is frozen.

    A layer's weight is freed as soon as its codes are made, so memory never exceeds the model and
    one layer. Names, biases and the training flag are kept. All layers are checked before the first
    is changed; an interrupt leaves those that were done quantised, and the model works. If peft has
    been imported, it takes quantised layers from then on (`onepass.integrations.peft`).

    Args:
        model: its `torch.nn.Linear`, also swapped ones, and `Conv1D` of transformers are quantised.
        weights: "int8" (a scale for each row), "int4" (a scale and a shift for each group), "nf4"
            (bitsandbytes' codes) or "mxfp4" (OCP's).
        group_size: neighbours along in_features that share a scale, a multiple of 8; None: the row
            for int8; 64 for int4 and nf4, 32 for mxfp4, or the next lower multiple of 8 that
            divides in_features, or else the row.
        activations: None, or "int8" to quantise the layers' inputs too, row by row, for int8
            weights: products of whole numbers, faster for many rows, and less exact.
        include, exclude: globs on fully qualified names (`*.mlp.*`); exclude wins.
        skip_head: leaves the layer that makes the logits as it is: that of
            `model.get_output_embeddings()`, or else the last linear layer.
        batch: for the error of each layer's output beside that of its weight: the model runs on it
            once, before it is changed. A mapping is given as keywords, a tuple or list item by
            item.

    Returns:
        QuantizationReport: prints what was quantised, its bytes and errors, and what was not, and
        why; `verify(batch)` checks the kernels on the model.

    Raises:
        ValueError: weights, group_size or activations is none of these or does not fit a layer, or
            a weight has NaN or Inf; nothing was changed.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10))
        >>> report = onepass.quantize(model, "int4")
        >>> report.quantized[0]["name"], type(model[0]).__name__
        ('0', 'QuantizedLinear')
    """
    try:
        choice = Choice(
            globs("include", include, "quantize"), globs("exclude", exclude, "quantize"), None, None
        )
        return _quantize(model, weights, group_size, activations, choice, skip_head, batch)
    except Exception:
        check_arguments(quantize, locals())
        raise


def _quantize(
    model: nn.Module,
    weights: str,
    group_size: int | None,
    activations: str | None,
    choice: Choice,
    skip_head: bool,
    batch: object,
) -> QuantizationReport:
    _flops.register()
    of_layer = {"weights": weights, "group_size": group_size, "activations": activations}
    report, taken = choose(model, choice, skip_head, **of_layer)
    errors = {} if batch is None else _output_errors(model, batch, taken, of_layer)
    places = _places(walk(model))
    while taken:
        item = taken.pop(0)
        layer = quantized(item.module, **of_layer)
        report.add(item, layer, errors.get(item.names[0]))
        _put(layer, places[id(item.module)])
        del item, layer  # and the weight with them
    report.notes += told_peft(model)
    return report


def told_peft(model: nn.Module) -> list[str]:
    """Lets peft, if it has been imported, take a model's quantised layers; notes if it cannot."""
    if "peft" not in sys.modules:
        return []
    problem = providers.provider(providers.PEFT).prepared(model)
    return [] if problem is None else [problem]


def choose(
    model: nn.Module,
    choice: Choice,
    skip_head: bool,
    weights: str,
    group_size: int | None,
    activations: str | None,
) -> tuple[QuantizationReport, list[Found]]:
    """The layers of a model to quantise, checked, and a report of the others.

    Raises:
        ValueError: as `quantize`.
    """
    found = walk(model)
    report = QuantizationReport(model, weights)
    report.notes += choice.without_a_match(found)
    refusal = _Refusal(model, found, choice, skip_head)
    taken = []
    for item in found:
        if isinstance(item.module, QuantizedLinear):
            report.skip(item, f"is quantised already, to {item.module.weights}")
        elif isinstance(item.module, nn.Linear) or _is_conv1d(item.module):
            reason = refusal(item)
            if reason is None:
                taken.append(item)
            else:
                report.skip(item, reason)
    _check_weights(weights)
    _check_activations(activations, weights, True)
    for item in taken:
        _check(item, weights, group_size, activations)
    weights_of = [item.module.weight for item in taken]
    trained = sum(weight.requires_grad and not weight.is_meta for weight in weights_of)
    if trained:
        report.notes.append(
            f"{trained} weights that could be trained are frozen now; an optimizer that has them "
            "keeps them, and their memory"
        )
    for item in taken:
        if others := refusal.other_users(item):
            report.notes.append(
                f"{item.names[0]} shared its weight with {others[0]}, which keeps it; no memory of "
                "it is freed"
            )
    return report, taken


def exchange(model: nn.Module, before: nn.Module, layer: nn.Module) -> None:
    """Puts a layer everywhere in a model where another one is."""
    _put(layer, _places(walk(model))[id(before)])


def dequantize(model: nn.Module) -> list[str]:
    """Gives a model plain linear layers back, with the weights that the codes stand for: what
    quantising took away stays away.

    Weights have the dtype that they had, or that the model was converted to since, and require no
    gradient.

    Returns:
        The names of the layers.

    Raises:
        ValueError: model is itself a quantised layer.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10))
        >>> report = onepass.quantize(model, "int8")
        >>> onepass.dequantize(model)
        ['0']
    """
    found = walk(model)
    places, names = _places(found), []
    if isinstance(model, QuantizedLinear):
        raise ValueError("dequantize: model must be a module around the layers, got one of them")
    for item in found:
        if isinstance(item.module, QuantizedLinear):
            _put(_plain(item.module), places[id(item.module)])
            names.append(item.names[0])
    return names


class _Refusal:
    """Why a linear layer of a model is left as it is; None if it is not."""

    def __init__(self, model: nn.Module, found: list[Found], choice: Choice, skip_head: bool):
        self.model, self.choice, self.skip_head = model, choice, skip_head
        head = _head_of(model, found)  # or what is wrapped around it
        self.head = set() if head is None else {id(part) for part in head.modules()}
        self.users: dict[int, list[str]] = collections.defaultdict(list)  # of a parameter
        self.adapters, self.read = set(), {}
        for item in found:
            for own in item.module._parameters.values():
                if own is not None:
                    self.users[id(own)].append(item.names[0])
            # peft's names: adapters beside a base layer, and copies that are trained whole.
            children = dict(item.module.named_children())
            for name, frozen in _TRAINED_BESIDE.items():
                if name in children:
                    kept = children.get(frozen)
                    inside = set() if kept is None else {id(part) for part in kept.modules()}
                    self.adapters |= {id(part) for part in item.module.modules()} - inside
            read = set(_weights_read_by(type(item.module)))
            if isinstance(item.module, nn.TransformerEncoderLayer):
                read |= {"linear1", "linear2"}  # in inference, by torch's C++
            self.read |= {id(children[n]): type(item.module) for n in read if n in children}

    def __call__(self, item: Found) -> str | None:
        layer, weight = item.module, getattr(item.module, "weight", None)
        own = vars(type(layer)).get("_onepass_original", type(layer))  # before a swap
        refused = self.choice.refusal(item)
        if item.wrapped:
            is_sharded = item.wrapped[0].kind is Reason.SHARDED
            return (
                "is sharded (FSDP); quantize before sharding"
                if is_sharded
                else "is compiled; quantize before torch.compile"
            )
        if refused is not None:
            return str(refused)
        if layer is self.model:
            return "is the model itself, which is changed in place; put it into a Sequential"
        if parametrize.is_parametrized(layer):
            return "its weight is parametrized"
        if own not in (nn.Linear, Linear) and not _is_conv1d(layer):
            return f"its class is {own.__name__}, not torch.nn.Linear"
        if not is_untouched(layer):
            return "has hooks, or a forward of its own"
        if id(layer) in self.read:
            return f"its weight is read by {self.read[id(layer)].__name__} without a call"
        if set(layer._parameters) | set(layer._buffers) != {"weight", "bias"}:
            return "has parameters or buffers beside weight and bias"
        if id(layer) in self.adapters:
            return "is an adapter, or a copy of a layer, to be trained"
        if type(weight) not in (nn.Parameter, Tensor):
            return f"its weight is a {type(weight).__name__}"
        if weight.dtype not in _DTYPES:
            return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
        if weight.numel() == 0:
            return "its weight has no elements"
        if id(layer) in self.head:
            return "makes the logits (skip_head=False takes it)" if self.skip_head else None
        others = self.other_users(item)
        return f"shares its weight with {others[0]}" if others else None

    def other_users(self, item: Found) -> list[str]:
        """Other modules that have the layer's weight."""
        users = self.users[id(item.module.weight)]
        return [name for name in users if name != item.names[0]]


# Names of peft's: a child that says that others beside it are trained, and the frozen one.
_TRAINED_BESIDE = {"base_layer": "base_layer", "modules_to_save": "original_module"}
_SETUP = ("__init__", "_init_weights", "reset_parameters", "tie_weights")


@functools.cache
def _weights_read_by(cls: type[nn.Module]) -> frozenset[str]:
    """Names of children whose `weight` a class reads by name in its methods, such as T5's: a
    quantised layer has none."""
    found = set()
    own = [base for base in cls.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    for name, method in (item for base in own for item in vars(base).items()):
        if isinstance(method, FunctionType) and name not in _SETUP:
            with contextlib.suppress(OSError, TypeError):  # no source
                found |= set(re.findall(r"\bself\.(\w+)\.weight\b", inspect.getsource(method)))
    return frozenset(found)


def _head_of(model: nn.Module, found: list[Found]) -> nn.Module | None:
    """The layer that makes the logits, or what is wrapped around it. transformers knows a language
    model's; that of a classifier is the last one outside of its base model. Elsewhere it is the
    last one."""
    layers = [item.module for item in found if is_linear(item.module)]
    if callable(get := getattr(model, "get_output_embeddings", None)):
        if (head := get()) is not None:
            return head
        inside = {id(part) for part in getattr(model, "base_model", model).modules()}
        outside = [layer for layer in layers if id(layer) not in inside]
        return outside[-1] if outside else None
    return layers[-1] if len(layers) > 1 else None


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, QuantizedLinear)) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    return is_a(module, "transformers.pytorch_utils", "Conv1D")


def weight_of(layer: nn.Module) -> Tensor:
    """(out_features, in_features)"""
    weight = layer.weight.detach()
    return weight.t() if _is_conv1d(layer) else weight


def _check(item: Found, weights: str, group_size: int | None, activations: str | None) -> None:
    name, weight = item.names[0], weight_of(item.module)
    in_features = weight.shape[1]
    size = _group_size_of(weights, group_size, in_features, f"in_features of {name}")
    _check_activations(activations, weights, size == in_features)
    _check_finite(weight, f"{name}.weight")


def quantized(layer: nn.Module, **of_layer) -> QuantizedLinear:
    """The quantised layer of a linear one."""
    made = QuantizedLinear.from_weight(weight_of(layer), layer.bias, **of_layer)
    made.plain_class = type(layer) if _is_conv1d(layer) else nn.Linear
    _carry_attributes(layer, made)
    return made.train(layer.training)


def _plain(layer: QuantizedLinear) -> nn.Module:
    weight = layer.dequantized().to(layer.dtype)
    if layer.plain_class is nn.Linear:
        made = nn.Linear(layer.in_features, layer.out_features, False, device="meta")
    else:
        made = layer.plain_class(layer.out_features, layer.in_features)
        weight = weight.t().contiguous()
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.bias = layer.bias
    _carry_attributes(layer, made)
    vars(made).update({name: of for name, of in vars(layer).items() if "_hook" in name})
    return made.train(layer.training)


def _carry_attributes(layer: nn.Module, made: nn.Module) -> None:
    """Gives a layer the attributes that a user hung on the one before it."""
    known = {*vars(made), *_own_attributes()}
    for name, value in vars(layer).items():
        if name not in known and not name.startswith("_"):
            vars(made)[name] = value


@functools.cache
def _own_attributes() -> frozenset[str]:
    return frozenset(vars(QuantizedLinear(8, 8, device="meta")))


def _places(found: list[Found]) -> _Places:
    """Parents of each module, by its id, and its name in each."""
    places: _Places = collections.defaultdict(list)
    for item in found:
        for name, child in item.module._modules.items():
            if child is not None:
                places[id(child)].append((item.module, name))
    return places


def _put(layer: nn.Module, places: list[tuple[nn.Module, str]]) -> None:
    """Puts a layer in all places, or in none after an interrupt."""
    before = [parent._modules[name] for parent, name in places]
    try:
        for parent, name in places:
            parent._modules[name] = layer
    except BaseException:
        for (parent, name), old in zip(places, before, strict=True):
            parent._modules[name] = old
        raise


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and the training flags as they were."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _output_errors(
    model: nn.Module, batch: object, taken: list[Found], of_layer: dict
) -> dict[str, float]:
    """The error of each layer's output on a batch, as a part of the output's norm."""
    squares: dict[str, list[float]] = {}

    def observe(name: str):
        def hook(layer, args, named, output):
            found = quantized(layer, **of_layer)(*args, *named.values())
            sums = squares.setdefault(name, [0.0, 0.0])
            sums[0] += float((found.double() - output).square().sum())
            sums[1] += float(output.double().square().sum())

        return hook

    with contextlib.ExitStack() as hooks:
        for item in taken:
            handle = item.module.register_forward_hook(observe(item.names[0]), with_kwargs=True)
            hooks.callback(handle.remove)
        with _evaluating(model):
            _batch.call(model, batch)
    return {
        name: (error / square) ** 0.5 if square else 0.0
        for name, (error, square) in squares.items()
    }
