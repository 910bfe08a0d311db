"""The model that a user names: --model, the same for every command that has it.

What cannot be used is told in one sentence, by :class:`onepass.tools.errors.BadModel`.
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import onepass
from onepass._batch import described
from onepass._output import floating, loss_in
from onepass.tools.errors import BadInput, BadModel

MODEL_HELP = (
    "the function returns (model, batch) or (model, batch_function of the step); a batch is a "
    "tensor, a tuple or list of arguments, or a dict of keywords"
)
OWN_LOSS = "the model's loss"
MEAN_SQUARE = "mean square of the output: it has no loss"
_NO_BATCHES = (type(None), bool, int, float, complex, str, bytes, type, nn.Module)


def load_user_model(spec: str, seed: int = 0) -> tuple[nn.Module, object]:
    """(model, batch) of the function that ``package.module:function`` names, as `checked_pair`.

    The function takes no argument. The current directory is searched as well.

    Raises:
        BadInput: there is no such function.
        BadModel: what it returns cannot be used.
    """
    path, separator, name = spec.partition(":")
    if not (path and separator and name):
        raise BadInput(f"--model must be package.module:function, got {spec!r}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(path), name)
    except Exception as error:  # importing runs the user's code
        told = told_as(error) if not isinstance(error, (ImportError, AttributeError)) else error
        raise BadInput(f"--model must name a function that can be imported: {told}") from error
    if not callable(function):
        raise BadInput(f"--model must name a function, got {spec}, of {type(function).__name__}")
    torch.manual_seed(seed)
    try:
        made = function()
    except Exception as error:
        raise BadInput(f"--model: {spec} raised {told_as(error)}") from error
    return checked_pair(made)


def checked_pair(made: object) -> tuple[nn.Module, object]:
    """(model, batch) or (model, batch_function), as a user's function returned it.

    batch_function gets the step's number and returns that step's batch: the same one at each call,
    since every variant gets it.
    """
    is_pair = isinstance(made, (tuple, list)) and len(made) == 2
    if not (is_pair and isinstance(made[0], nn.Module)):
        raise BadModel(f"must return (model, batch) or (model, batch_function), got {_types(made)}")
    model, batch = made
    if not is_batch_function(batch):
        check_batch(batch)
    return model, batch


def is_batch_function(batch: object) -> bool:
    return callable(batch) and not isinstance(batch, (Tensor, Mapping, *_NO_BATCHES))


def batch_of(batch: object, step: int) -> object:
    """The batch of a step, where there is a function of the step."""
    if not is_batch_function(batch):
        return batch
    try:
        found = batch(step)
    except Exception as error:
        rule = f"must come with a function of the step, got one that raised {told_as(error)}"
        raise BadModel(rule) from error
    check_batch(found)
    return found


def check_batch(batch: object) -> None:
    if isinstance(batch, _NO_BATCHES):
        raise BadModel(
            "must come with a batch (a tensor, a tuple, a list, a dict), or a function of the step "
            f"that returns it, got {_types(batch)}"
        )


def check_trainable(model: nn.Module, needs_data: bool = True) -> None:
    """Raises BadModel for models whose parameters cannot be copied and trained as they are."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f" at {name}" if name else ""
            raise BadModel(f"must not be scripted or traced, got a ScriptModule{where}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise BadModel(f"must have been called once, got a lazy module without its {name}")
        if tensor.layout != torch.strided:
            raise BadModel(f"must have dense tensors, got {name} of {tensor.layout}")
        if needs_data and tensor.is_meta:
            raise BadModel(f"must have data, got {name} on the meta device")
    check_dense_gradients(model)


def check_dense_gradients(model: nn.Module) -> None:
    """Also before the first backward: an embedding says that its gradient will be sparse."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) is True and isinstance(weight, nn.Parameter):
            if weight.requires_grad:
                kind = type(module).__name__
                raise BadModel(f"must have dense gradients, got {kind} {name} with sparse=True")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise BadModel(f"must have dense gradients, got that of {name} in sparse form")


def check_loss(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise BadModel("must return something that depends on its parameters")


class Objective(NamedTuple):
    """The scalar to differentiate, and what it is."""

    loss: Tensor
    name: str


def objective_of(output: object) -> Objective:
    """The loss in an output, else the mean square of its first floating-point tensor.

    The mean square is no training goal, but every parameter that the output depends on gets a
    gradient.
    """
    loss = loss_in(output)
    if loss is not None:
        return Objective(loss, OWN_LOSS)
    leaves = floating(output)
    if not leaves:
        raise BadModel("must return a floating-point tensor, a tuple of them or a .loss")
    return Objective(leaves[0].float().square().mean(), MEAN_SQUARE)


def tokens_in(batch) -> int:
    """Items of a batch: elements of its first integer tensor, else rows of its first tensor."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    values = [values] if isinstance(values, Tensor) else values
    tensors = [value for value in values if isinstance(value, Tensor)]
    whole = [value for value in tensors if not value.is_floating_point() and value.dim() > 1]
    if whole:
        return whole[0].numel()
    return tensors[0].shape[0] if tensors and tensors[0].dim() else 1


# Errors of foreign code

_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (torch, onepass))


@contextlib.contextmanager
def telling_errors(model: nn.Module, batch: object = None) -> Iterator[None]:
    """Turns errors of a model's code into BadModel, which says where they were raised.

    With a batch it also says how that was given to forward, if the error is one of types.
    """
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        told = told_as(error)
        if isinstance(error, TypeError) and batch is not None:
            told += f"; {described(model, batch)}"
        raise BadModel(f"must run on its batch, got {told}") from error


def told_as(error: Exception) -> str:
    """The error's class, the first line of its text, and the line of the model that raised it."""
    text = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = place_of(error)
    return f"{told} ({place})" if place else told


def place_of(error: Exception) -> str | None:
    """The last line outside torch and onepass that an error came through: `line` in function."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [f for f in frames if not f.filename.startswith((*_LIBRARIES, "<frozen"))]
    if not foreign:
        return None
    frame = foreign[-1]
    line = frame.line or linecache.getline(frame.filename, frame.lineno).strip()
    return f"`{line}` in {frame.name}, {frame.filename}:{frame.lineno}"


def _types(value: object) -> str:
    if isinstance(value, (tuple, list)) and 0 < len(value) < 10:
        inner = ", ".join(type(item).__name__ for item in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return type(value).__name__
