"""States from elsewhere: other optimizers' checkpoints, other forms of master, copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onepass.optim import codes, masters
from onepass.optim.flat_state import SCALE, Places, Request, local

if TYPE_CHECKING:
    from onepass.optim.optimizer import FlatOptimizer


class Wrapped:
    """A tensor that torch's load_state_dict hands on as it is."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def wrap_tensors(_, state_dict: dict) -> dict:
    def wrap(value):
        return Wrapped(value) if isinstance(value, Tensor) else value

    state = {
        key: {k: wrap(v) for k, v in entry.items()} if isinstance(entry, dict) else entry
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


class Adoption:
    """States from elsewhere, in flat buffers and in the dtypes this optimizer keeps.

    Everything is checked and converted before the first of the optimizer's own states changes.
    """

    def __init__(self, optimizer: FlatOptimizer, places: Places, groups: list[dict]):
        self._optimizer = optimizer
        self._places = places
        self._groups = {p: group for group in groups for p in group["params"]}
        self._requests: list[Request] = []
        self._fills: list[Callable[[Tensor], None]] = []
        self._targets: list[tuple[dict, str]] = []

    def adopt(self, state: dict) -> dict:
        """The new optimizer.state."""
        adopted: dict = defaultdict(dict)
        for number, (key, entry) in enumerate(state.items()):
            if key in self._groups and isinstance(entry, dict):
                plain = {k: v.tensor if isinstance(v, Wrapped) else v for k, v in entry.items()}
                adopted[key] = self._entry(number, key, plain)
            else:
                adopted[key] = entry
        made = self._places.make(self._requests)
        for tensor, fill, (entry, key) in zip(made, self._fills, self._targets, strict=True):
            fill(local(tensor))
            entry[key] = tensor
        return adopted

    def _entry(self, number: int, param: Tensor, entry: dict) -> dict:
        optimizer, group = self._optimizer, self._groups[param]
        result: dict = {}
        keys = [k for k in optimizer._moment_keys(group) if entry.get(k) is not None]
        for key, value in entry.items():
            if key in keys or key in ("master", "remainder"):
                self._check_shape(number, param, key, value)
        dtype = self._moment_dtype(param, [entry[k].dtype for k in keys if k + SCALE not in entry])
        for key, value in entry.items():
            if key == "step" and optimizer._shows_step(param):
                steps = float(value)
                self._request(result, param, key, torch.float32, lambda t, s=steps: t.fill_(s))
            elif key in keys:
                self._moment(result, param, key, value, entry.get(key + SCALE), dtype)
            elif key in ("master", "remainder") or (
                isinstance(key, str) and key.endswith(SCALE) and key[: -len(SCALE)] in keys
            ):
                continue
            else:
                result[key] = value
        self._master(result, param, entry)
        return result

    def _check_shape(self, number: int, param: Tensor, key: str, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.shape != param.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(
                f"{type(self._optimizer).__name__}: {key} of parameter {number} must have shape "
                f"{tuple(param.shape)}, got {shape}"
            )

    def _moment_dtype(self, param: Tensor, loaded: list[torch.dtype]) -> torch.dtype | str:
        """What is asked for; where nothing is, what is loaded if that is wider."""
        dtype = self._optimizer._moment_dtype(param)
        if self._optimizer.state_dtype is None and param.dtype is not torch.float64:
            if torch.float32 in loaded or torch.float64 in loaded or len(set(loaded)) > 1:
                return torch.float32
        return dtype

    def _request(self, entry: dict, param: Tensor, key: str, dtype, fill) -> None:
        self._requests.append(Request(param, key, dtype))
        self._fills.append(fill)
        self._targets.append((entry, key))
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


def is_signed(moment: str) -> bool:
    return moment in ("exp_avg", "momentum_buffer")


def like(entry: Tensor, decoded: Tensor) -> Tensor:
    """A local part as a DTensor where `entry` is one."""
    if local(entry) is entry:
        return decoded
    return type(entry).from_local(
        decoded,
        entry.device_mesh,
        entry.placements,
        run_check=False,
        shape=entry.shape,
        stride=entry.stride(),
    )
