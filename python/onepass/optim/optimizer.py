"""What all optimizers here share: states in flat buffers, one operator call per step, masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from onepass._ops import objects
from onepass._ops import optimizer as _ops
from onepass._ops.dispatch_log import say
from onepass.optim import codes, masters
from onepass.optim.adoption import Adoption, is_signed, like, wrap_tensors
from onepass.optim.checks import (
    check_device,
    check_dtype,
    check_shape,
    refuse_shared_memory,
    refuse_sparse,
)
from onepass.optim.distributed import broadcast_int, total_norm
from onepass.optim.flat_state import (
    SCALE,
    Numbers,
    Places,
    Request,
    Table,
    TableWriter,
    are_same,
    is_dense,
    laid_like,
    layouts_of,
    local,
    noise_number,
    on_device,
    strides_of,
)
from onepass.optim.options import check_options


class FlatOptimizer(torch.optim.Optimizer):
    """Base of the optimizers: see :class:`onepass.optim.AdamW` for what they have in common."""

    _algorithm: int  # of onepass._ops.optimizer
    _step_supports_amp_scaling = True

    grad_norm: Tensor | None
    """0-dim tensor, the gradients' global norm in the last step, unscaled and before clipping;
    None without max_grad_norm."""

    # ---- what a subclass says --------------------------------------------------------------------

    def _moment_keys(self, group: dict) -> tuple[str, ...]:
        """The states that a parameter of `group` has, in the order of csrc/ops/optimizer.h."""
        raise NotImplementedError

    def _hyper(self, group: dict) -> _ops.Hyper:
        """The settings of `group`."""
        raise NotImplementedError

    def _shows_step(self, param: Tensor) -> bool:
        """Whether state[param] has a "step"."""
        return True

    def _needs_noise(self) -> bool:
        """Whether anything is rounded stochastically."""
        return self.master == "stochastic" or self.state_dtype in (torch.bfloat16, "int8")

    # ---- construction ----------------------------------------------------------------------------

    def _accept(
        self,
        master: str | None,
        state_dtype: torch.dtype | str | None,
        max_grad_norm: float | None,
        zero_grads: bool,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        """Checks and keeps the options that torch does not have; before torch's constructor."""
        name = type(self).__name__
        check_options(name, master, state_dtype, max_grad_norm, differentiable)
        if foreach or fused:
            say(
                f"{name}: {'foreach' if foreach else 'fused'}=True chooses between torch's "
                "implementations and changes nothing here"
            )
        self.master = master
        self.state_dtype = state_dtype
        self.max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.zero_grads = bool(zero_grads)
        self._reset()

    def _reset(self) -> None:
        """Forgets what is derived from the state."""
        self._places = Places()
        self._table: Table | None = None
        self._hidden_steps: dict[Tensor, Tensor] = {}
        self._hyper_rows: tuple[_ops.Hyper, ...] = ()
        self._hyper_table: tuple[Tensor, Tensor | None] | None = None
        self.grad_norm = None
        self._norm: Tensor | None = None  # as measured, of scaled gradients

    def _draw_seed(self) -> None:
        """Keys the noise of stochastic rounding, where there is any, in the group dicts.

        Derived from `torch.initial_seed()`, so that it follows `manual_seed` and takes nothing from
        the random stream of the user's model.
        """
        if not self._needs_noise():
            return
        generator = torch.Generator().manual_seed(torch.initial_seed())
        seed = int(torch.randint(-(2**63), 2**63 - 1, (), generator=generator))
        seed = broadcast_int(seed)
        self.defaults["seed"] = seed
        for group in self.param_groups:
            group.setdefault("seed", seed)

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict) -> None:
        """As torch's, with what the options ask of parameters."""
        params = param_group["params"] if isinstance(param_group, dict) else ()
        if isinstance(params, Tensor):
            params = [params]
        elif not isinstance(params, set):  # which torch refuses
            params = param_group["params"] = list(params) if params != () else params
        if isinstance(param_group, dict):
            group = {**self.defaults, **param_group}
            for item in params:
                param = item[1] if isinstance(item, tuple) else item
                if isinstance(param, Tensor):
                    self._check_param(param, group)
        super().add_param_group(param_group)

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

    # ---- states ----------------------------------------------------------------------------------

    def _moment_dtype(self, param: Tensor) -> torch.dtype | str:
        """Of a new moment."""
        if param.dtype is torch.float64 or self.state_dtype is None:
            return param.dtype
        if self.state_dtype == "int8":
            return "int8" if codes.fits(local(param)) else torch.float32
        return self.state_dtype

    def _expected(self, param: Tensor, group: dict) -> dict[str, torch.dtype]:
        """Keys and dtypes of a new state."""
        expected: dict[str, torch.dtype] = {}
        if self._shows_step(param):
            expected["step"] = torch.float32
        dtype = self._moment_dtype(param)
        for key in self._moment_keys(group):
            if dtype == "int8":
                expected[key] = torch.uint8
                expected[key + SCALE] = torch.float32
            else:
                expected[key] = dtype
        if param.dtype.itemsize == 2 and self.master in masters.KEYS:
            key, dtype = masters.KEYS[self.master]
            expected[key] = dtype
        return expected

    def _complete_states(self, params: Sequence[Tensor], groups: Sequence[dict]) -> None:
        """Makes what the states of these parameters lack, in as few buffers as possible."""
        requests: list[Request] = []
        fresh: set[Tensor] = set()  # without a step of momentum
        to_encode: list[tuple[dict, str, Tensor]] = []  # put there by someone in another dtype
        for param, group in zip(params, groups, strict=True):
            expected = self._expected(param, group)
            entry = self.state[param] if expected else self.state.get(param, {})
            if param.dtype.itemsize != 2:  # it may have had 16 bits before
                entry.pop("master", None)
                entry.pop("remainder", None)
            has_momentum = entry.get("momentum_buffer") is not None
            for key, dtype in expected.items():
                value = entry.get(key)
                if dtype is torch.uint8 and value is not None and entry.get(key + SCALE) is None:
                    check_shape(type(self).__name__, param, key, value)
                    to_encode.append((entry, key, entry.pop(key)))
            missing = [key for key in expected if entry.get(key) is None]
            requests += [Request(param, key, expected[key]) for key in missing]
            if not self._shows_step(param) and (
                param not in self._hidden_steps
                or ("momentum_buffer" in expected and not has_momentum)
            ):
                requests.append(Request(param, "step", torch.float32))
                if not has_momentum:
                    fresh.add(param)
        made = self._places.make(requests)
        for request, tensor in zip(requests, made, strict=True):
            if request.key == "step" and not self._shows_step(request.param):
                self._hidden_steps[request.param] = tensor
                if request.param not in fresh:
                    tensor.fill_(1.0)  # a loaded buffer: its first step has been made
                continue
            self.state[request.param][request.key] = tensor
            if request.key == "master":
                masters.begin(request.param, self.state[request.param])
        for entry, key, value in to_encode:
            codes.encode(local(value), local(entry[key]), entry[key + SCALE], is_signed(key))

    # ---- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step with the gradients of all parameters that have one.

        Args:
            closure: evaluates the model again and returns the loss, as in torch.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: sparse gradients, tensors that do not fit together; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch._disable_dynamo
    def _step(self) -> None:
        lists = [group["params"] for group in self.param_groups]
        table = self._table
        is_known = table is not None and objects.hold_same(lists, table.grouped)
        if not is_known:
            for params in lists:
                if isinstance(params, Iterator):
                    raise TypeError(
                        f"{type(self).__name__}: params must be a list, got {type(params).__name__}"
                    )
        all_params = table.params if is_known else [p for params in lists for p in params]
        params = all_params
        gradients, missing = objects.attributes(params, "grad")
        numbers: Numbers = range(len(params))
        if missing:
            numbers = tuple([i for i, g in enumerate(gradients) if g is not None])
            params = [params[i] for i in numbers]
            gradients = [gradients[i] for i in numbers]
        if not gradients:
            self.grad_norm = None if self.max_grad_norm is None else torch.zeros(())
            return
        are_sharded = table.are_sharded if is_known else any(local(p) is not p for p in all_params)
        local_params, local_gradients = params, gradients
        if are_sharded:
            local_params = [local(p) for p in params]
            local_gradients = [local(g) for g in gradients]
        if not self._measure_norm(gradients if are_sharded else local_gradients, are_sharded):
            if self.zero_grads:
                for gradient in local_gradients:
                    gradient.zero_()
            return
        if not is_known or not self._is_current(table, numbers):
            table = self._table = self._make_table(all_params, numbers, gradients)
        if table.masters:
            masters.reseed_changed(table)
        if are_sharded and not are_same(local_params, table.local_params):
            table.step_tables.clear()
            table.local_params = local_params
        if numbers not in table.step_tables:  # a new one takes the parameters as they are
            if table.layouts != layouts_of(all_params):
                table = self._table = self._make_table(all_params, numbers, gradients)
            masters.reseed_moved(table)
        try:
            self._call(table.step_table(numbers, local_params), local_gradients)
        except RuntimeError:
            self._recover(all_params, numbers, gradients, local_params, local_gradients)
            table = self._table
        # Who saved a parameter for a backward must be told that it changed.
        torch.autograd.graph.increment_version(params)
        if table.masters:
            table.versions = [p._version for p in table.master_params]

    def _measure_norm(self, gradients: list[Tensor], are_sharded: bool) -> bool:
        """Sets grad_norm where that is asked for. False: the step must not be made."""
        self._norm = None
        grad_scale = getattr(self, "grad_scale", None)
        if self.max_grad_norm is not None:
            if are_sharded:
                self._norm = total_norm(gradients)
            else:
                try:
                    self._norm = _ops.gradient_norm(gradients)
                except RuntimeError:  # gaps between the elements, or no dense tensors at all
                    refuse_sparse(type(self).__name__, gradients)
                    self._norm = _ops.gradient_norm([g.contiguous() for g in gradients])
            norm = self._norm if grad_scale is None else self._norm / grad_scale
            self.grad_norm = norm.float()
        if gradients[0].device.type != "cpu":
            return True  # the kernel decides: the host does not wait for it
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0.0:
            return False
        return self._norm is None or bool(norm.isfinite())

    def _call(self, table: _ops.StepTable, gradients: list[Tensor]) -> None:
        hyper, device_hyper = self._hyper_tables(gradients[0].device)
        _ops.optimizer_step(
            self._algorithm,
            table,
            gradients,
            hyper,
            seed=self.param_groups[0].get("seed", 0),
            stochastic_params=self.master == "stochastic",
            stochastic_moments=self.state_dtype is torch.bfloat16,
            zero_gradients=self.zero_grads,
            max_norm=self.max_grad_norm,
            norm=self._norm,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            device_hyper=device_hyper,
        )

    def _recover(
        self,
        all_params: list[Tensor],
        numbers: Numbers,
        gradients: list[Tensor],
        local_params: list[Tensor],
        local_gradients: list[Tensor],
    ) -> None:
        """Goes on where the operator refused a step.

        Parameters that changed their shape, dtype or memory need another table, and states that lie
        like them; for parameters or gradients that lie in another order, or with gaps, it works on
        copies.
        """
        name, table = type(self).__name__, self._table
        refuse_sparse(name, local_gradients)
        if self.zero_grads:
            refuse_shared_memory(name, "gradients set to zeros", local_gradients)
        if table.layouts != layouts_of(all_params):
            table = self._table = self._make_table(all_params, numbers, gradients)
        else:
            refuse_shared_memory(name, "params", local_params)
            if masters.reseed_moved(table):
                table.step_tables.clear()
        params = [p if is_dense(p) else p.contiguous() for p in local_params]
        copied = [(p, c) for p, c in zip(local_params, params, strict=True) if c is not p]
        laid = [laid_like(p, g) for p, g in zip(params, local_gradients, strict=True)]
        if copied:
            step_table = _ops.StepTable(params, table.buffers, table.layout[list(numbers)])
        else:
            step_table = table.step_table(numbers, params)
        self._call(step_table, laid)
        for param, copy in copied:
            param.copy_(copy)
        if self.zero_grads:
            for gradient, copy in zip(local_gradients, laid, strict=True):
                if copy is not gradient:
                    gradient.zero_()

    def _hyper_tables(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """(settings of all groups, the same on `device` if that is not the CPU)."""
        rows = tuple([self._hyper(group) for group in self.param_groups])
        held = self._hyper_table
        if held is None or rows != self._hyper_rows or (held[1] is None) != (device.type == "cpu"):
            table = torch.tensor(rows, dtype=torch.float64)
            held = table, on_device(table, device, held and held[1])
            self._hyper_rows, self._hyper_table = rows, held
        if held[1] is not None:
            for number, group in enumerate(self.param_groups):
                if isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu":
                    held[1][number, 0].copy_(group["lr"].squeeze())  # without a word to the host
        return held

    # ---- the table -------------------------------------------------------------------------------

    def _is_current(self, table: Table, numbers: Numbers) -> bool:
        """Whether these are the settings and states that the table was made for."""
        return (
            table.contents is not None
            and isinstance(self.state, dict)
            and objects.holds(self.state, table.contents)
            and (table.all_have_state or all(map(table.has_state.__getitem__, numbers)))
            and table.kinds == [self._moment_keys(group) for group in self.param_groups]
        )

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Makes every parameter its own master again.

        Needed only after writes through ``p.data``, which torch does not count; other changes are
        noticed.
        """
        for param, entry in self.state.items():
            if isinstance(entry, dict) and ("master" in entry or "remainder" in entry):
                masters.reseed(param, entry)

    def _make_table(self, params: list[Tensor], numbers: Numbers, gradients: list[Tensor]) -> Table:
        name = type(self).__name__
        groups = [group for group in self.param_groups for _ in group["params"]]
        refuse_sparse(name, gradients)  # before any state is made
        check_device(name, [params[i] for i in numbers])
        refuse_shared_memory(name, "params", [params[i] for i in numbers])
        self._complete_states([params[i] for i in numbers], [groups[i] for i in numbers])
        writer = TableWriter(self._places)
        group_numbers = [n for n, g in enumerate(self.param_groups) for _ in g["params"]]
        with_grad = set(numbers)
        has_state: list[bool] = []
        with_master: list[tuple[Tensor, dict]] = []
        for number, (param, group) in enumerate(zip(params, groups, strict=True)):
            entry = self.state.get(param) or {}
            step = entry.get("step") if self._shows_step(param) else self._hidden_steps.get(param)
            keys = self._moment_keys(group)
            has_state.append(step is not None and all(entry.get(k) is not None for k in keys))
            master = entry.get("master", entry.get("remainder"))
            if param.dtype.itemsize != 2:
                master = None
            if number in with_grad or has_state[-1]:
                self._check_entry(number, param, entry, keys)
            writer.add(
                noise_number(number, param),
                group_numbers[number],
                step,
                [entry.get(k) for k in keys],
                [entry.get(k + SCALE) for k in keys],
                master,
            )
            if master is not None:
                with_master.append((param, entry))
        known = set(params)
        self._hidden_steps = {p: step for p, step in self._hidden_steps.items() if p in known}
        entries = list(self.state.values())
        are_dicts = all(isinstance(holder, dict) for holder in (self.state, *entries))
        in_use = [*self._hidden_steps.values(), *(v for entry in entries for v in entry.values())]
        self._places.keep_only([v for v in in_use if isinstance(v, Tensor)])
        table = Table(
            params=params,
            grouped=[list(group["params"]) for group in self.param_groups],
            contents=objects.contents(self.state) if are_dicts else None,
            has_state=has_state,
            all_have_state=all(has_state),
            kinds=[self._moment_keys(group) for group in self.param_groups],
            layout=writer.layout(),
            buffers=writer.buffers,
            layouts=layouts_of(params),
            masters=with_master,
            master_params=[p for p, _ in with_master],
            are_sharded=any(local(p) is not p for p in params),
        )
        masters.follow(table, self._table)
        return table

    def _check_entry(self, number: int, param: Tensor, entry: dict, keys: Sequence[str]) -> None:
        """Every state must lie like its parameter; one that someone replaced may not."""
        name, here = type(self).__name__, local(param)
        for key in (*keys, "master", "remainder"):
            value = entry.get(key)
            if value is None:
                continue
            tensor = local(value)
            check_shape(name, param, key, value, number)
            check_dtype(name, number, param, key, tensor.dtype, key + SCALE in entry)
            if tensor.stride() != strides_of(here) and tensor.numel() > 1:
                (made,) = self._places.make([Request(param, key, tensor.dtype)])
                local(made).copy_(tensor)
                entry[key] = made

    # ---- checkpoints -----------------------------------------------------------------------------

    @torch._disable_dynamo
    def state_dict(self) -> dict:
        """As torch's, with its keys; moments in 8 bits are shown in float32."""
        result = super().state_dict()
        groups = [group for group in self.param_groups for _ in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, entry in result["state"].items():
            if isinstance(entry, dict) and isinstance(key, int):  # as torch numbers parameters
                entry = self._decoded(entry)
                entry = self._with_master(params[key], entry)
                result["state"][key] = _with_host_step(groups[key], entry)
        return result

    def _decoded(self, entry: dict) -> dict:
        scales = [key for key in entry if isinstance(key, str) and key.endswith(SCALE)]
        if not scales:
            return entry
        shown = dict(entry)
        for key in scales:
            moment = key[: -len(SCALE)]
            decoded = codes.decode(local(entry[moment]), entry[key], is_signed(moment))
            shown[moment] = like(entry[moment], decoded)
            del shown[key]
        return shown

    def _with_master(self, param: Tensor, entry: dict) -> dict:
        """Remainders are shown as masters where one is wanted, and where they are sharded, since
        collectives know no 16-bit integers."""
        remainder = entry.get("remainder")
        if remainder is None or (local(remainder) is remainder and self.master != "fp32"):
            return entry
        shown = dict(entry)
        shown["master"] = like(param, masters.join(local(param).detach(), local(remainder)))
        del shown["remainder"]
        return shown

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, from torch's optimizer or this one, with other rules for dtypes.

        States keep float32 where they have it, also those of 16-bit parameters, unless state_dtype
        names another; masters stay exact, are converted to the form this optimizer keeps, or made
        from the parameters where there are none. Group settings that the checkpoint lacks are
        taken from the constructor.

        Raises:
            ValueError: other parameter groups, or a state of another shape; nothing has changed.
        """
        # Behind an opaque wrapper torch's own cast to the parameter's dtype passes tensors by.
        handle = self.register_load_state_dict_pre_hook(wrap_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict:
        options = {key: self.__dict__[key] for key in _OPTIONS}
        return {**super().__getstate__(), **options}

    @torch.no_grad()
    def __setstate__(self, state: dict) -> None:
        if "state" not in state or "param_groups" not in state:
            super().__setstate__(state)
            return
        fresh = "_places" not in self.__dict__  # unpickled or copied, not loaded
        if fresh:
            for key in _OPTIONS:
                self.__dict__[key] = state[key]
            self.__dict__["defaults"] = state["defaults"]
        groups = state["param_groups"]
        for group in groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        places = Places()
        converted = Adoption(self, places, groups).adopt(state["state"])
        self._reset()
        self._places = places
        super().__setstate__({**state, "state": converted})

    def _take_over(self, other: torch.optim.Optimizer) -> None:
        """Becomes `other`, on the same group dicts, with its states."""
        places = Places()
        state = Adoption(self, places, other.param_groups).adopt(
            other.state
        )  # or other is as it was
        self.param_groups = other.param_groups
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._reset()
        self._places = places
        self.state = state


def _with_host_step(group: dict, entry: dict) -> dict:
    """Steps lie on the device; torch expects them there if it is fused or capturable."""
    step = entry.get("step")
    if not isinstance(step, Tensor) or step.device.type == "cpu":
        return entry
    if group.get("capturable") or group.get("fused"):
        return entry
    return {**entry, "step": step.cpu()}


def number_of(setting: float | Tensor) -> float:
    """A setting for the host; 0 for a tensor on a device, which the kernel reads there."""
    if isinstance(setting, Tensor) and setting.device.type != "cpu":
        return 0.0
    return float(setting)


_OPTIONS = ("master", "state_dtype", "max_grad_norm", "zero_grads")
