"""The states of each parameter, their dtypes, and their construction."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from onepass._dispatch_log import say
from onepass.optim import codes, masters
from onepass.optim.atomic import settled
from onepass.optim.checks import check_dtype, check_shape
from onepass.optim.contract import Hyper, Settings
from onepass.optim.distributed import broadcast_int, state_like
from onepass.optim.flat_state import (
    EMA,
    EMA_STEPS,
    SCALE,
    Places,
    Request,
    Table,
    is_signed,
    local,
    strides_of,
)
from onepass.optim.options import DEFAULT_STATE_DTYPES, Options
from onepass.optim.settings import check_settings


class StateOptimizer(torch.optim.Optimizer):
    """The description of an optimizer: its options, and its states and settings by group."""

    _algorithm: int  # of onepass.optim.contract.ALGORITHMS
    _is_linear = False  # in parameters and gradients, so that parts of a sum can be stepped
    _counts_steps = False  # steps depend on their number, so a checkpoint must have it
    _lr_is_in_updates = False  # and so no setting of the operator
    _has_second_moment = False  # which has no sign, and is rounded stochastically
    _state_dtypes: tuple = (None, torch.float32, torch.bfloat16, "int8")  # of the moments

    master: str | None
    state_dtype: torch.dtype | str | None
    max_grad_norm: float | None
    zero_grads: bool
    ema_decay: float | Callable[[int], float] | None
    ema_dtype: str | None

    _accumulation: object | None = None  # a FusedAccumulate, which takes the gradients
    _led: weakref.ref | None = None  # the optimizer that this one was fused from
    _is_swapped = False  # within swap_ema
    _kept: Mapping[Tensor, Tensor] = MappingProxyType({})  # parts of parameters, as outside of it

    grad_norm: Tensor | None
    """0-dim tensor, the gradients' global norm in the last step, unscaled and before clipping;
    None without max_grad_norm."""

    # ---- overridden by subclasses ----------------------------------------------------------------

    def _moment_keys(self, group: dict) -> tuple[str, ...]:
        """The states that a parameter of `group` has, in the order of csrc/ops/optimizer.h."""
        raise NotImplementedError

    def _shapes(self, param: Tensor) -> dict[str, tuple[int, ...]]:
        """Further states of a parameter, which the operator does not know."""
        return {}

    def _required(self, param: Tensor, group: dict) -> tuple[str, ...]:
        """The states that a checkpoint of a parameter must have, if it has others."""
        return (*self._moment_keys(group), *self._shapes(param))

    def _hyper(self, group: dict) -> Hyper:
        """The settings of `group`."""
        raise NotImplementedError

    def _counts(self, group: dict) -> bool:
        """Whether steps of the parameters of `group` count."""
        return self._counts_steps

    def _shows_step(self, param: Tensor, group: dict) -> bool:
        """Whether state[param] has a "step"; the noise needs it in checkpoints, too."""
        return self._counts(group) or (self._needs_noise() and param.dtype.itemsize == 2)

    def _needs_noise(self) -> bool:
        """Whether anything is rounded stochastically."""
        moments = self._has_second_moment and self.state_dtype in (torch.bfloat16, "int8")
        averages = self.ema_decay is not None and self.ema_dtype == "param"
        return self.master == "stochastic" or moments or averages

    def _rounds_moments(self) -> bool:
        """Whether second moments in bfloat16 are rounded stochastically."""
        dtype = self.state_dtype or DEFAULT_STATE_DTYPES.get(self.master)
        return dtype is torch.bfloat16

    # ---- construction ----------------------------------------------------------------------------

    def _accept(self, options: Options, settings: dict) -> None:
        """Stores the options that torch does not have; called before torch's constructor.

        Raises:
            ValueError, RuntimeError: an option out of range, a setting that is not there.
        """
        name = type(self).__name__
        self.__dict__.update(options.checked(name)._asdict())
        if settings.get("differentiable"):
            raise RuntimeError(
                f"{name}: differentiable must be False, got True: like torch's, this kernel's "
                "`fused` does not support `differentiable`"
            )
        if self.state_dtype not in self._state_dtypes:
            *most, last = map(str, self._state_dtypes)
            raise ValueError(
                f"{name}: state_dtype must be {', '.join(most)} or {last}, got {self.state_dtype!r}"
            )
        for key in ("foreach", "fused"):
            if settings.get(key):
                say(f"{name}: {key}=True chooses between torch's implementations, not between ours")
        self._reset()

    def _reset(self) -> None:
        """Drops everything derived from the state."""
        self._places = Places()
        self._table: Table | None = None
        self._hidden_steps: dict[Tensor, Tensor] = {}
        self._settings = Settings()
        self.grad_norm = None

    def _complete_groups(self) -> None:
        """Puts the count of averages, and the key of the noise of stochastic rounding, into the
        group dicts, if needed.

        The key is derived from `torch.initial_seed()`, so it follows `manual_seed` and draws
        nothing from the random stream of the user's model.
        """
        if self.ema_decay is not None:
            self.defaults[EMA_STEPS] = 0
            for group in self.param_groups:
                group.setdefault(EMA_STEPS, 0)
        if not self._needs_noise():
            return
        generator = torch.Generator().manual_seed(torch.initial_seed())
        seed = int(torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device="cpu"))
        seed = broadcast_int(seed)
        self.defaults["seed"] = seed
        for group in self.param_groups:
            group.setdefault("seed", seed)

    def _warn_of_stalls(self, params: Sequence[Tensor], group: dict) -> None:
        """Warns that states rounded to nearest are known to stall; once, by Python's rule."""
        narrow = {p.dtype for p in params if p.is_floating_point() and p.dtype.itemsize == 2}
        if self.master is not None or not narrow:
            return
        kept = "'fp32'" + (", 'remainder16'" if narrow == {torch.bfloat16} else "")
        dtype = str(narrow.pop()).removeprefix("torch.")
        what, settings = "parameters", "master=None"
        if self._rounds_second_moment_to_nearest(group):
            what, settings = "parameters and second moments", "master=None and state_dtype=None"
        warnings.warn(
            f"{type(self).__name__}: {dtype} parameters with {settings} are known to stall, as "
            f"torch's do: {what} are rounded to nearest, and changes below half a unit in the last "
            f"place are lost. master={kept} or 'stochastic' keeps them",
            stacklevel=2,
        )

    def _rounds_second_moment_to_nearest(self, group: dict) -> bool:
        """Whether second moments of 16-bit parameters without a master are rounded to nearest."""
        return self._has_second_moment and self.state_dtype is None

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict) -> None:
        """Adds a group as torch does, with the options' checks of parameters."""
        if not isinstance(param_group, dict):
            return super().add_param_group(param_group)  # which raises
        add, before, count = super().add_param_group, dict(param_group), len(self.param_groups)

        def work() -> None:
            params = param_group["params"]
            if isinstance(params, Tensor):
                params = [params]
            elif not isinstance(params, set):  # which torch refuses
                params = param_group["params"] = list(params)
            group = {**self.defaults, **param_group}
            items = [item[1] if isinstance(item, tuple) else item for item in params]
            tensors = [item for item in items if isinstance(item, Tensor)]
            for param in tensors:
                self._check_param(param, group)
            self._warn_of_stalls(tensors, group)
            add(param_group)

        def settle() -> None:
            if len(self.param_groups) == count:
                param_group.clear()
                param_group.update(before)

        settled(work, settle)

    def _check_param(self, param: Tensor, group: dict) -> None:
        name = type(self).__name__
        if not param.is_floating_point():
            raise RuntimeError(f"{name}: params must be floating point tensors, got {param.dtype}")
        if group.get("capturable") and param.device.type == "cpu":
            raise RuntimeError(
                f"{name}: capturable must be False for parameters on the CPU, got True"
            )
        if self.master == "remainder16" and param.dtype not in (
            torch.bfloat16,
            torch.float32,
            torch.float64,
        ):
            raise ValueError(
                f"{name}: params must be bfloat16 (or float32) with master='remainder16', got "
                f"{param.dtype}"
            )

    def _check_settings(self, groups: list[dict]) -> None:
        """Raises for loaded settings that a step cannot use."""
        check_settings(type(self).__name__, groups)

    # ---- states ----------------------------------------------------------------------------------

    def _moment_dtype(self, param: Tensor, group: dict) -> torch.dtype | str:
        """The dtype of a new moment."""
        if param.dtype is torch.float64:
            return param.dtype
        if self.state_dtype is None:
            default = DEFAULT_STATE_DTYPES.get(self.master)
            return default if default and param.dtype.itemsize == 2 else param.dtype
        if self.state_dtype == "int8":
            return "int8" if codes.fits(local(param)) else torch.float32
        return self.state_dtype

    def _expected(self, param: Tensor, group: dict) -> dict[str, torch.dtype]:
        """Keys and dtypes of a new state."""
        expected: dict[str, torch.dtype] = {}
        if self._shows_step(param, group):
            expected["step"] = torch.float32
        dtype = self._moment_dtype(param, group)
        for key in self._moment_keys(group):
            if dtype == "int8":
                expected[key] = torch.uint8
                expected[key + SCALE] = torch.float32
            else:
                expected[key] = dtype
        if param.dtype.itemsize == 2 and self.master in masters.KEYS:
            key, dtype = masters.KEYS[self.master]
            expected[key] = dtype
        if self.ema_decay is not None:
            expected[EMA] = self._ema_dtype(param)
        return expected

    def _ema_dtype(self, param: Tensor) -> torch.dtype:
        """The dtype of a new average."""
        narrow = param.dtype.itemsize == 2 and self.ema_dtype != "param"
        return torch.float32 if narrow else param.dtype

    def _kinds(self) -> list[tuple[str, ...]]:
        """The states of each group per element, without masters."""
        averages = () if self.ema_decay is None else (EMA,)
        return [(*self._moment_keys(group), *averages) for group in self.param_groups]


def complete(optimizer: StateOptimizer, params: Sequence[Tensor], groups: Sequence[dict]) -> None:
    """Makes missing states of these parameters, in as few buffers as possible."""
    requests: list[Request] = []
    fresh: set[Tensor] = set()  # without a step of momentum
    hiding: set[Tensor] = set()  # their steps
    to_encode: list[tuple[dict, str, Tensor]] = []  # put there from outside in another dtype
    for param, group in zip(params, groups, strict=True):
        expected = optimizer._expected(param, group)
        entry = optimizer.state[param] if expected else optimizer.state.get(param, {})
        if param.dtype.itemsize != 2:  # it may have had 16 bits before
            entry.pop("master", None)
            entry.pop("remainder", None)
        has_momentum = entry.get("momentum_buffer") is not None
        for key, dtype in expected.items():
            value = entry.get(key)
            if dtype is torch.uint8 and value is not None and entry.get(key + SCALE) is None:
                check_shape(type(optimizer).__name__, param, key, value)
                to_encode.append((entry, key, entry.pop(key)))
        missing = [key for key in expected if entry.get(key) is None]
        requests += [Request(param, key, expected[key]) for key in missing]
        if not has_momentum:
            fresh.add(param)
        if "step" not in expected:
            hiding.add(param)
            begins = "momentum_buffer" in expected and not has_momentum
            if begins or param not in optimizer._hidden_steps:
                requests.append(Request(param, "step", torch.float32))
    made = optimizer._places.make(requests)
    for request, tensor in zip(requests, made, strict=True):
        if request.key == "step":
            if request.param not in fresh:
                tensor.fill_(1.0)  # a loaded buffer: its first step has been made
            if request.param in hiding:
                optimizer._hidden_steps[request.param] = tensor
                continue
        optimizer.state[request.param][request.key] = tensor
        if request.key == "master":
            masters.begin(request.param, optimizer.state[request.param])
    for request in requests:
        if request.key == EMA:  # averages begin with the parameter
            entry = optimizer.state[request.param]
            local(entry[EMA]).copy_(masters.value(request.param, entry))
    for entry, key, value in to_encode:
        codes.encode(local(value), local(entry[key]), entry[key + SCALE], is_signed(key))
    for param in params:
        _complete_shapes(optimizer, param)


def _complete_shapes(optimizer: StateOptimizer, param: Tensor) -> None:
    """Makes missing states that the operator does not know, in the dtype of the arithmetic."""
    name, dtype = type(optimizer).__name__, torch.promote_types(torch.float32, param.dtype)
    for key, shape in optimizer._shapes(param).items():
        entry = optimizer.state[param]
        value = entry.get(key)
        if value is None:
            entry[key] = torch.zeros(shape, dtype=dtype, device=param.device)
        elif value.shape != torch.Size(shape):
            raise RuntimeError(
                f"{name}: {key} of a parameter must have shape {shape}, got {tuple(value.shape)}"
            )
        elif not value.is_floating_point():
            raise RuntimeError(
                f"{name}: {key} of a parameter must have a floating-point dtype, got {value.dtype}"
            )
        elif value.dtype is not dtype:
            entry[key] = value.to(dtype)


def check_entry(
    optimizer: StateOptimizer, number: int, param: Tensor, entry: dict, keys: Sequence[str]
) -> None:
    """Checks that every state has its parameter's memory order: a replaced one may not."""
    name, here = type(optimizer).__name__, local(param)
    for key in (*keys, "master", "remainder"):
        value = entry.get(key)
        if value is None:
            continue
        value = entry[key] = state_like(param, value)
        tensor = local(value)
        check_shape(name, param, key, value, number)
        check_dtype(name, number, param, key, tensor.dtype, key + SCALE in entry)
        if tensor.stride() != strides_of(here) and tensor.numel() > 1:
            (made,) = optimizer._places.make([Request(param, key, tensor.dtype)])
            local(made).copy_(tensor)
            entry[key] = made
