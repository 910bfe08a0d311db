"""LoRA of peft on models that `onepass.quantize` has quantised.

    onepass.integrations.peft.register()
    model = get_peft_model(model, LoraConfig(target_modules="all-linear"))

`onepass.quantize` registers by itself if peft has been imported. peft is imported by `register`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

from torch import nn

from onepass.nn import QuantizedLinear
from onepass.quantizing.engine import _places, _put
from onepass.swapping.walk import walk

__all__ = ["register", "unregister"]

# What is wrapped: its module, its class if it has one, its name, and what wraps it, which is below.
_HOOKS = (
    ("peft.tuners.lora", "LoraModel", "_create_new_module", "_creating"),
    ("peft.tuners.lora", "LoraModel", "_replace_module", "_replacing"),
    ("peft.tuners.tuners_utils", None, "_maybe_include_all_linear_layers", "_choosing"),
)
_stock: dict[str, object] = {}  # peft's own, by name, while ours are in their place


def register() -> None:
    """Makes peft take `onepass.nn.QuantizedLinear` as a target of LoRA: `get_peft_model`,
    `PeftModel.from_pretrained`, `add_adapter` and `load_adapter` of transformers, and
    `target_modules="all-linear"`. Calling it again changes nothing.

    Each target becomes a `peft.tuners.lora.Linear` around the quantised layer, with adapters in the
    dtype of the layer before it was quantised. `onepass.quantize` calls this if peft has been
    imported.

    Raises:
        ImportError: peft is not installed.
        RuntimeError: peft has no places for other layers where this function looks for them.

    Examples:
        >>> from onepass.integrations.peft import register
        >>> register()
        >>> from peft import LoraConfig, get_peft_model
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10))
        >>> report = onepass.quantize(model, "nf4")
        >>> type(get_peft_model(model, LoraConfig(target_modules=["0"])).base_model.model[0])
        <class 'onepass.integrations._peft_layers.QuantizedLinear'>
    """
    if _stock:
        return
    places = {name: (_owner(module, cls, name), wrap) for module, cls, name, wrap in _HOOKS}
    update = _owner("peft.tuners.lora.layer", "LoraLayer", "update_layer").update_layer
    if "config" not in inspect.signature(update).parameters:
        raise _unknown("a config among the arguments of LoraLayer.update_layer")
    try:
        _layers()
    except ImportError as error:
        raise _unknown("what its layers are made of") from error
    for name, (owner, wrap) in places.items():
        _stock[name] = vars(owner)[name]
        setattr(owner, name, globals()[wrap](_stock[name]))


def unregister() -> None:
    """Gives peft its own functions back; without `register` before it changes nothing. Models that
    were wrapped keep working.

    Examples:
        >>> from onepass.integrations.peft import register, unregister
        >>> register()
        >>> unregister()
    """
    for module, cls, name, _ in _HOOKS:
        if name in _stock:
            setattr(_owner(module, cls, name), name, _stock.pop(name))


def prepared(model: nn.Module) -> str | None:
    """Registers, and gives layers of peft whose base was quantised after it the class for that; for
    `onepass.quantize`.

    Returns:
        Why it cannot; None if it has.
    """
    try:
        register()
    except (ImportError, RuntimeError) as error:
        return str(error)
    _layers().adopt(model)
    return None


def _owner(module: str, cls: str | None, name: str) -> object:
    """The module or class that has a function of peft's.

    Raises:
        ImportError: peft is not installed.
        RuntimeError: it has no such function.
    """
    try:
        importlib.import_module("peft")
    except ImportError as error:
        raise ImportError(
            "onepass.integrations.peft: peft must be installed, with what it imports itself: "
            f"pip install peft (got {error})"
        ) from error
    owner: object = None
    with contextlib.suppress(ImportError, AttributeError):
        owner = importlib.import_module(module)
        owner = getattr(owner, cls) if cls else owner
    if owner is None or name not in vars(owner):
        raise _unknown(f"{module}.{cls}.{name}" if cls else f"{module}.{name}")
    return owner


def _unknown(missing: str) -> RuntimeError:
    version = getattr(importlib.import_module("peft"), "__version__", "unknown")
    return RuntimeError(
        f"onepass.integrations.peft: peft must have {missing}, as 0.21 has, got version {version}"
    )


def _layers() -> ModuleType:
    return importlib.import_module("onepass.integrations._peft_layers")


def _base_of(target: nn.Module) -> nn.Module:
    """The innermost layer: adapters may be around it already."""
    is_wrapped = callable(getattr(target, "get_base_layer", None))
    return target.get_base_layer() if is_wrapped else target


def _creating(stock: staticmethod) -> staticmethod:
    create = stock.__func__

    @functools.wraps(create)
    def create_new_module(lora_config, adapter_name, target, **named):
        is_ours = isinstance(_base_of(target), QuantizedLinear)
        if not is_ours or named.get("parameter_name") is not None:
            return create(lora_config, adapter_name, target, **named)
        named.pop("parameter_name", None)
        return _layers().QuantizedLinear(target, adapter_name, config=lora_config, **named)

    return staticmethod(create_new_module)


def _replacing(stock):
    @functools.wraps(stock)
    def replace_module(self, parent, child_name, new_module, child):
        if isinstance(new_module, _layers().QuantizedLinear):
            setattr(parent, child_name, new_module)  # which is where its base is
        else:
            stock(self, parent, child_name, new_module, child)

    return replace_module


def _choosing(stock):
    @functools.wraps(stock)
    def choose(peft_config, model):
        with _seen_as_plain(model):
            return stock(peft_config, model)

    return choose


@contextlib.contextmanager
def _seen_as_plain(model: nn.Module) -> Iterator[None]:
    """Inside, plain layers without data stand where quantised ones do."""
    found = walk(model)
    places = _places(found)
    layers = [item.module for item in found if isinstance(item.module, QuantizedLinear)]
    layers = [layer for layer in layers if id(layer) in places]
    try:
        for layer in layers:
            sizes = layer.in_features, layer.out_features
            _put(nn.Linear(*sizes, False, device="meta"), places[id(layer)])
        yield
    finally:
        for layer in layers:
            _put(layer, places[id(layer)])
