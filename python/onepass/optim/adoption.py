"""Foreign states: other optimizers' checkpoints, other forms of master, copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from onepass._dispatch_log import say
from onepass.optim import codes, masters, settings
from onepass.optim.distributed import state_like
from onepass.optim.flat_state import EMA, SCALE, Places, Request, is_signed, local
from onepass.optim.states import StateOptimizer

MAX_STEPS = 2**32  # the kernels count in 32 bits


class Wrapped:
    """Hides a value from torch's load_state_dict, which casts tensors and iterates over text."""

    def __init__(self, value: Tensor | str | bytes):
        self.value = value


def wrap(_, state_dict: dict) -> dict:
    """A load_state_dict pre-hook."""

    def wrapped(value):
        return Wrapped(value) if isinstance(value, Tensor | str | bytes) else value

    state = {
        key: {k: wrapped(v) for k, v in entry.items()}
        if isinstance(entry, dict)
        else wrapped(entry)
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _unwrapped(value):
    return value.value if isinstance(value, Wrapped) else value


class Adoption:
    """Foreign states, moved to flat buffers and to the dtypes of this optimizer.

    Everything is checked and converted before the first of the optimizer's own states changes.
    """

    def __init__(
        self, optimizer: StateOptimizer, places: Places, groups: list[dict], is_copy: bool = False
    ):
        self._optimizer = optimizer
        self._is_copy = is_copy  # of an optimizer of ours, which makes states that it misses
        self._places = places
        self._groups = {p: group for group in groups for p in group["params"]}
        self._numbers = {p: number for number, p in enumerate(self._groups)}
        # (an entry to make, the new state that it belongs to, what fills it)
        self._requests: list[tuple[Request, dict, Callable[[Tensor], None]]] = []

    def adopt(self, state: dict) -> dict:
        """The new optimizer.state."""
        adopted: dict = defaultdict(dict)
        for key, entry in state.items():
            entry = _unwrapped(entry)
            if isinstance(entry, dict):
                entry = {k: _unwrapped(v) for k, v in entry.items()}
            if key in self._groups:
                adopted[key] = self._entry(self._numbers[key], key, entry)
            else:
                adopted[key] = entry
        made = self._places.make([request for request, _, _ in self._requests])
        for tensor, (request, entry, fill) in zip(made, self._requests, strict=True):
            fill(local(tensor))
            entry[request.key] = tensor
        return adopted

    def _entry(self, number: int, param: Tensor, entry: dict) -> dict:
        optimizer, group = self._optimizer, self._groups[param]
        self._check_entry(number, param, entry)
        if not entry:
            return {}
        result: dict = {}
        shapes = optimizer._shapes(param)
        keys = [k for k in optimizer._moment_keys(group) if entry.get(k) is not None]
        for key, value in entry.items():
            if key in keys or key in ("master", "remainder", EMA):
                self._check_tensor(number, param, key, value)
                scales = entry.get(f"{key}{SCALE}")
                if scales is not None:
                    self._check_scales(number, param, key, scales)
                entry[key] = state_like(param, value)
        if not self._is_copy:
            self._check_complete(number, param, entry)
        loaded = [entry[k].dtype for k in keys if k + SCALE not in entry]
        dtype = self._moment_dtype(param, group, loaded)
        for key, value in entry.items():
            if key == "step" and optimizer._shows_step(param, group):
                steps = float(value)
                self._request(result, param, key, torch.float32, lambda t, s=steps: t.fill_(s))
            elif key in keys:
                self._moment(result, param, key, value, entry.get(key + SCALE), dtype)
            elif key in shapes:
                self._check_tensor(number, param, key, value, shapes[key])
                dtype_here = torch.promote_types(torch.float32, param.dtype)
                result[key] = value.detach().to(local(param).device, dtype_here, copy=True)
            elif key == EMA:
                if optimizer.ema_decay is None:
                    say(f"{type(optimizer).__name__}: averages are dropped, for want of ema_decay")
                    continue
                average = local(entry[key])
                self._request(
                    result, param, EMA, optimizer._ema_dtype(param), lambda t, a=average: t.copy_(a)
                )
            elif key in ("master", "remainder") or (
                isinstance(key, str) and key.endswith(SCALE) and key[: -len(SCALE)] in keys
            ):
                continue
            else:
                result[key] = value
        self._master(result, param, entry)
        return result

    def _check_entry(self, number: int, param: Tensor, entry: dict) -> None:
        """The states of one parameter as a whole, and its step."""
        name = type(self._optimizer).__name__
        if not isinstance(entry, dict):
            raise TypeError(f"{name}: state of parameter {number} must be a dict, got {entry!r}")
        step = entry.get("step")
        if step is None:
            # torch's name for it is "step".
            if entry and self._optimizer._counts(self._groups[param]):
                raise KeyError(
                    f"{name}: state of parameter {number} must have a step, got {list(entry)}"
                )
            return
        steps = settings.number(step)
        if steps is None:
            raise TypeError(f"{name}: step of parameter {number} must be a number, got {step!r}")
        if not (0 <= steps < MAX_STEPS and steps.is_integer()):
            raise ValueError(
                f"{name}: step of parameter {number} must be a whole number from 0 to "
                f"{MAX_STEPS - 1}, got {steps}"
            )

    def _check_complete(self, number: int, param: Tensor, entry: dict) -> None:
        """Whether all states are there: steps would go on from zeros."""
        optimizer = self._optimizer
        required = optimizer._required(param, self._groups[param])
        has_steps = entry.get("step") is not None and settings.number(entry["step"]) > 0
        if not has_steps and not entry.keys() & {"master", "remainder", EMA, *required}:
            return  # zeros are right, or nothing of the optimizer's is there
        for key in required:
            if entry.get(key) is None:
                raise KeyError(
                    f"{type(optimizer).__name__}: state of parameter {number} must have {key}, "
                    f"got {list(entry)}"
                )

    def _check_tensor(
        self,
        number: int,
        param: Tensor,
        key: str,
        value: Tensor,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        shape = tuple(param.shape) if shape is None else shape
        name, dtype = type(self._optimizer).__name__, None
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: {key} of parameter {number} must be a tensor, got {value!r}")
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{name}: {key} of parameter {number} must have shape {shape}, got "
                f"{tuple(value.shape)}"
            )
        if key == "remainder" and value.dtype is not torch.int16:
            dtype = "int16"
        elif key in ("master", EMA) and not value.is_floating_point():
            dtype = "float32"
        elif value.is_complex():
            dtype = "float32, bfloat16 or float16"
        if dtype:
            raise ValueError(
                f"{name}: {key} of parameter {number} must have dtype {dtype}, got {value.dtype}"
            )

    def _check_scales(self, number: int, param: Tensor, key: str, scales: Tensor) -> None:
        wanted = local(param).numel() // codes.BLOCK
        found = local(scales).numel() if isinstance(scales, Tensor) else scales
        if not isinstance(scales, Tensor) or found != wanted:
            raise ValueError(
                f"{type(self._optimizer).__name__}: {key}{SCALE} of parameter {number} must have "
                f"{wanted} elements, got {found!r}"
            )

    def _moment_dtype(
        self, param: Tensor, group: dict, loaded: list[torch.dtype]
    ) -> torch.dtype | str:
        """The requested dtype; without one, the loaded state's if it is wider."""
        dtype = self._optimizer._moment_dtype(param, group)
        if self._optimizer.state_dtype is None and param.dtype is not torch.float64:
            if torch.float32 in loaded or torch.float64 in loaded or len(set(loaded)) > 1:
                return torch.float32
        return dtype

    def _request(self, entry: dict, param: Tensor, key: str, dtype, fill) -> None:
        self._requests.append((Request(param, key, dtype), entry, fill))
        entry[key] = None  # keeps its place among the keys

    def _moment(self, entry, param, key, value, scales, dtype) -> None:
        value = local(value)
        signed = is_signed(key)
        if value.dtype is torch.uint8 and scales is not None:
            if dtype == "int8":  # as it is
                self._request(entry, param, key, torch.uint8, lambda t: t.copy_(value))
                self._request(
                    entry, param, key + SCALE, torch.float32, lambda t: t.copy_(local(scales))
                )
                return
            value = codes.decode(value, local(scales), signed)
        if dtype != "int8":
            self._request(entry, param, key, dtype, lambda t: t.copy_(value))
            return
        made: list[Tensor] = []
        self._request(entry, param, key, torch.uint8, made.append)
        self._request(
            entry,
            param,
            key + SCALE,
            torch.float32,
            lambda t: codes.encode(value.to(t.device), made[0], t, signed),
        )

    def _master(self, result: dict, param: Tensor, entry: dict) -> None:
        wanted = self._optimizer.master
        if param.dtype.itemsize != 2 or wanted not in masters.KEYS:
            return
        here = local(param).detach()
        remainder = entry.get("remainder")
        if remainder is not None and entry.get("master") is None:
            # Kept until the first step even where a master is wanted: the model's own weights may
            # be loaded after this.
            low = local(remainder)
            self._request(result, param, "remainder", torch.int16, lambda t: t.copy_(low))
            return
        master = here.float() if entry.get("master") is None else local(entry["master"])
        if wanted == "fp32":
            self._request(result, param, "master", torch.float32, lambda t: t.copy_(master))
        else:
            self._request(
                result, param, "remainder", torch.int16, lambda t: t.copy_(masters.low(master))
            )
