"""Trials of foreign code: a twin of a module, random numbers, results and gradients of a call.

Every proof of `swap` runs the code in question beside our formula, with numbers that it draws, and
compares results and gradients by the rule of `onepass.numerics`. Foreign code may raise anything,
keep state or draw random numbers: each is a reason to leave it alone.
"""

from __future__ import annotations

import contextlib
import copy
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from onepass import numerics
from onepass._threads import on_threads
from onepass.swapping.facts import MODULE_ATTRIBUTES, is_value

# A wrong formula is off by 1e-3 or more, and float32's own rounding by less than a thousandth.
_MOST_ERROR = 1e-5


class Refused(Exception):
    """Carries the reason for the report."""


@contextlib.contextmanager
def foreign_code(doing: str) -> Iterator[None]:
    """Makes any error of the block a refusal, which says what failed."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        text = textwrap.shorten(str(error) or type(error).__name__, 120, placeholder=" ...")
        raise Refused(f"{doing}: {text}") from None


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Isolates the trial from the caller's modes, and the caller from the trial's random draws."""
    with (
        on_threads(1),  # the inputs are small, and on a busy machine parallel regions wait
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        yield


def twin(module: nn.Module) -> nn.Module:
    """A deep copy without tensors and hooks (hooks could copy a whole model)."""
    try:
        twin = type(module).__new__(type(module))
        nn.Module.__init__(twin)
        for name, value in vars(module).items():
            if name not in MODULE_ATTRIBUTES:
                vars(twin)[name] = copy.deepcopy(value)
    except Exception as error:  # foreign __new__ and __deepcopy__
        raise Refused(f"cannot be copied: {error}") from None
    twin._parameters.update(dict.fromkeys(module._parameters))
    return twin


def call_without_hooks(twin: nn.Module) -> None:
    """Makes a call of each module in a twin a call of its forward: hooks on all modules are the
    user's."""
    for part in twin.modules():
        vars(part)["_compiled_call_impl"] = part.forward


def attributes(module: nn.Module) -> dict[str, tuple]:
    """Fields of an instance other than tensors and torch's own; by value if they have one."""
    return {
        name: (type(value).__name__, repr(value) if is_value(value) else str(id(value)))
        for name, value in vars(module).items()
        if name not in MODULE_ATTRIBUTES
    }


def normals(seed: int, drawn: torch.dtype = torch.float64) -> Callable[..., Tensor]:
    """normal(*shape, dtype=None): random numbers on the CPU, drawn in one dtype and rounded to
    another."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=random, device="cpu", dtype=drawn).to(dtype or drawn)

    return normal


def outcome(
    call: Callable, leaves: Sequence[Tensor], upstream: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """The results of call(), and the gradients of leaves: upstream(y) is that of a result y."""
    outputs = call()
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    given = [upstream(y).to(y.dtype) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, given)]


def judge(form: str, dtype: torch.dtype, forwards: Sequence, results: Callable, draws: int) -> None:
    """Compares results(dtype, seed, forward) of three forwards: stock's, ours, and the form in
    float64.

    Raises:
        Refused: the first is not the form, or the second is less accurate.
    """
    where = f"in {str(dtype).removeprefix('torch.')}"
    columns = []
    for seed in range(draws):
        stock, ours, ref = (results(dtype, seed, forward) for forward in forwards)
        if [x.dtype for x in ours] != [x.dtype for x in stock] or len(ours) != len(ref):
            raise Refused(f"returns other tensors than {form} does {where}")
        columns.append(list(zip(ours, ref, stock, strict=True)))
    for number, found in enumerate(zip(*columns, strict=True)):
        ours, ref, stock = (list(tensors) for tensors in zip(*found, strict=True))
        if dtype is torch.float32:
            error = max(map(distance, stock, ref))
            if not error < _MOST_ERROR:
                raise Refused(f"is not {form}: result {number} is off by {error:.2g}")
        verdict = numerics.compare(ours, ref, stock)
        if not verdict.ok:
            raise Refused(f"onepass would be less accurate {where}: {verdict.text}")


def in_double(argument: object) -> object:
    """An argument in float64: a floating tensor, or a dtype; others as they are."""
    if isinstance(argument, torch.dtype):
        return torch.float64
    is_floating = isinstance(argument, Tensor) and argument.is_floating_point()
    return argument.double() if is_floating else argument


def distance(output: Tensor, ref: Tensor) -> float:
    """Largest difference, relative to ref's largest value; infinite if there is a NaN."""
    distance = ((output.double() - ref).abs().max() / ref.abs().max()).item()
    return distance if math.isfinite(distance) else math.inf
