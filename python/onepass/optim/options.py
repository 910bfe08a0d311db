"""The options that torch's optimizers do not have: meaning and rules."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import NamedTuple, get_type_hints

import torch

MASTERS = (None, "fp32", "remainder16", "stochastic")
# Stored values, by accepted argument.
STATE_DTYPES = {
    None: None,
    torch.float32: torch.float32,
    "float32": torch.float32,
    torch.bfloat16: torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "int8": "int8",
}

# The default for moments of 16-bit parameters: with the second moment rounded to the nearest
# bfloat16, even a float32 result would come from a moment that stands still.
DEFAULT_STATE_DTYPES = {
    "fp32": torch.float32,
    "remainder16": torch.float32,
    "stochastic": torch.bfloat16,
}

OPTIONS_DOC = """
        master: what is kept of the float32 result of a step for 16-bit parameters. None: nothing,
            the parameter is rounded to nearest even. "fp32": a float32 copy
            (``state[p]["master"]``); the parameter is the nearest 16-bit number, ties away from
            zero. "remainder16", for bfloat16: the 16 bits that this rounding leaves
            (``state[p]["remainder"]``): bitwise the same run in half the memory. "stochastic":
            nothing, but the parameter is rounded up or down at random, so that its expected value
            is exact. No effect on float32 parameters. If code outside the optimizer changes a
            parameter, the new value becomes its master; writes through ``p.data`` alone are not
            noticed, see ``reseed_masters``.
        state_dtype: dtype of the moments. None: without a master the parameter's, rounded to
            nearest, as in torch; for 16-bit parameters float32 with "fp32" or "remainder16", and
            bfloat16 as below with "stochastic". torch.float32 or "float32". torch.bfloat16 or
            "bfloat16": the second moment is rounded stochastically, because its changes of
            1 - beta2, some 0.1 %, are below half a unit in the last place (0.2-0.4 %), and rounding
            to nearest would lose all of them. "int8": 8-bit codes with one scale per 256 elements;
            the second moment is rounded stochastically too, but never to zero; tensors with fewer
            than 4,096 elements, or a number of elements that 256 does not divide, stay float32;
            ``state_dict`` shows float32.
        max_grad_norm: clips gradients inside the step: they are scaled to a global norm of at most
            this value, and the stored gradients do not change. ``grad_norm`` is the norm before
            clipping. A step whose norm is not finite changes no parameter and no state.
            ``float("inf")`` only checks.
        zero_grads: sets gradients to zero in the same pass, also if the step is skipped.
        ema_decay: keeps an average of each parameter, ``state[p]["ema"]``, updated in the same
            pass: ema = ema_decay ema + (1 - ema_decay) param, where param is the result of the step
            before it is rounded. The first step of a group sets it to the parameter, as
            `torch.optim.swa_utils.AveragedModel` does. A number from 0 to 1, or a function of the
            step's number that returns one; the first average has number 1
            (``param_groups[i]["ema_steps"]`` counts them). On CUDA the host does not wait to learn
            whether a step is skipped, so skipped steps count as well: if the first one is skipped,
            the average begins with the unchanged parameter. An optimizer with a lambda cannot be
            pickled. See ``swap_ema``.
        ema_dtype: dtype of the averages. None, torch.float32 or "float32": float32, and float64 for
            float64 parameters. "param": the parameter's; 16-bit averages are rounded
            stochastically, because most changes of an average are below half a unit in the last
            place.
"""


class Options(NamedTuple):
    """The options, as they were given."""

    master: str | None = None
    state_dtype: torch.dtype | str | None = None
    max_grad_norm: float | None = None
    zero_grads: bool = False
    ema_decay: float | Callable[[int], float] | None = None
    ema_dtype: torch.dtype | str | None = None

    def checked(self, name: str) -> Options:
        """The options as an optimizer stores them.

        Raises:
            TypeError: one of another type.
            ValueError: an unknown value.
        """
        if self.master not in MASTERS:
            raise ValueError(f"{name}: master must be one of {MASTERS}, got {self.master!r}")
        limit = self.max_grad_norm
        if limit is not None and not isinstance(limit, (numbers.Real, torch.Tensor)):
            kind = type(limit).__name__
            raise TypeError(f"{name}: max_grad_norm must be a number or None, got {kind}")
        if limit is not None and not limit > 0:
            raise ValueError(f"{name}: max_grad_norm must be positive, got {limit}")
        if not isinstance(self.zero_grads, bool):
            kind = type(self.zero_grads).__name__
            raise TypeError(f"{name}: zero_grads must be True or False, got {kind}")
        return Options(
            self.master,
            state_dtype_of(name, self.state_dtype),
            None if limit is None else float(limit),
            self.zero_grads,
            self.ema_decay if callable(self.ema_decay) else decay_of(name, self.ema_decay),
            ema_dtype_of(name, self.ema_dtype, self.ema_decay),
        )


def told(optimizer: object) -> list[str]:
    """The options of an optimizer that are not the defaults, for its `repr`."""
    given = {name: getattr(optimizer, name) for name in Options._fields}
    defaults = Options._field_defaults
    return [f"{name}: {value}" for name, value in given.items() if value != defaults[name]]


def with_options(function: Callable, after: Callable) -> Callable:
    """`function`, which takes **options, with the signature of `after` and the options."""
    theirs = [
        p for p in inspect.signature(after).parameters.values() if p.kind is not p.VAR_KEYWORD
    ]
    function.__signature__ = inspect.Signature([*theirs, *_PARAMETERS])
    return function


_TYPES = get_type_hints(Options)
_PARAMETERS = [
    inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=_TYPES[name],
    )
    for name, default in Options._field_defaults.items()
]


def constructor(base: type[torch.optim.Optimizer]) -> Callable[..., None]:
    """`__init__` of an optimizer with the settings of `base`: its arguments, then the options."""

    def __init__(self, *args, **settings) -> None:
        options = {name: settings.pop(name) for name in Options._fields if name in settings}
        self._accept(Options(**options), settings)
        base.__init__(self, *args, **settings)
        self._complete_groups()

    return with_options(__init__, after=base.__init__)


def state_dtype_of(name: str, state_dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    """The stored option: a dtype if a string names one."""
    if not any(state_dtype == accepted for accepted in STATE_DTYPES):
        raise ValueError(
            f"{name}: state_dtype must be None, torch.float32, torch.bfloat16 or 'int8', "
            f"got {state_dtype!r}"
        )
    return STATE_DTYPES[state_dtype]


def decay_of(name: str, decay: object) -> float | None:
    """The decay of averages as a float; None: there are no averages.

    Raises:
        TypeError: not a number.
        ValueError: one out of range.
    """
    if decay is None:
        return None
    if not isinstance(decay, (numbers.Real, torch.Tensor)) or isinstance(decay, bool):
        kind = type(decay).__name__
        raise TypeError(
            f"{name}: ema_decay must be a number, a function of the step or None, got {kind}"
        )
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"{name}: ema_decay must be from 0 to 1, got {decay}")
    return float(decay)


def decay_at(name: str, decay: object, step: int) -> float:
    """The decay of averages in a step.

    Raises:
        TypeError: a function that returns no number.
        ValueError: one out of range.
    """
    value = decay(step) if callable(decay) else decay
    checked = None if callable(value) else decay_of(name, value)
    if checked is None:
        raise TypeError(
            f"{name}: ema_decay must return a number for step {step}, got {type(value).__name__}"
        )
    return checked


def ema_dtype_of(name: str, dtype: torch.dtype | str | None, decay: object) -> str | None:
    """The stored option: "param", or None for float32."""
    if dtype not in (None, torch.float32, "float32", "param"):
        raise ValueError(f"{name}: ema_dtype must be None, torch.float32 or 'param', got {dtype!r}")
    if dtype is not None and decay is None:
        raise ValueError(f"{name}: ema_dtype must be None without ema_decay, got {dtype!r}")
    return "param" if dtype == "param" else None
