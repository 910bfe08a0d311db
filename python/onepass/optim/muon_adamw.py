"""Muon for the matrices of hidden layers and AdamW for all others, as one optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._ops import optimizer as _ops
from onepass.optim.contract import ALGORITHMS, Hyper
from onepass.optim.flat_state import laid_like
from onepass.optim.matrices import Matrices
from onepass.optim.muon import COEFFICIENTS, Muon, check_iteration, checked
from onepass.optim.optimizer import FlatOptimizer, number_of
from onepass.optim.options import OPTIONS_DOC, constructor
from onepass.optim.step import Step
from onepass.optim.updates import without_gradients

ADAMW_EPS = 1e-8


class _MuonWithAdamW(torch.optim.Optimizer):
    """The settings of both."""

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        ns_dtype: torch.dtype | str | None = None,
        matrices: Matrices = None,
    ) -> None:
        settings = {key: value for key, value in locals().items() if key not in ("self", "params")}
        for i, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
        torch.optim.Optimizer.__init__(self, params, checked(settings))


class MuonWithAdamW(Muon):
    __doc__ = f"""`onepass.optim.Muon` for hidden layers and AdamW for all others, as one optimizer.

    One step, one scheduler, one ``state_dict``, one gradient norm. A parameter group says by
    ``use_muon`` which of both it is for, as in Jordan's own optimizer; `onepass.optim.muon_groups`
    makes the groups of a model by rule. With "match_rms_adamw" both have updates of about one size,
    so one learning rate and one weight decay serve both; groups may have their own. With
    state_dtype of "int8" Muon's momenta are float32.

    Jordan et al.: Muon: an optimizer for hidden layers in neural networks, 2024. Liu et al.: Muon
    is scalable for LLM training, 2025. Loshchilov, Hutter: Decoupled weight decay regularization,
    ICLR 2019.

    Args:
        params: groups, dicts with ``params`` and ``use_muon``, True or False.
        lr, weight_decay: of both.
        momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn, ns_dtype, matrices: Muon's, as
            of `onepass.optim.Muon`, but for the default of adjust_lr_fn.
        eps: Muon's. Groups of AdamW have 1e-8 unless they name their own ``eps``.
        betas: AdamW's.{OPTIONS_DOC}
    Raises:
        ValueError: a setting out of range, a group without ``use_muon``, a parameter for Muon that
            is no matrix.
        RuntimeError: parameters that are not floating point.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(99, 64), torch.nn.Linear(64, 64))
        >>> optimizer = onepass.optim.MuonWithAdamW(onepass.optim.muon_groups(model), lr=1e-3)
        >>> model(torch.randint(99, (8,))).sum().backward()
        >>> optimizer.step()
        >>> [(group["use_muon"], group["param_names"]) for group in optimizer.param_groups]
        [(True, ['1.weight']), (False, ['0.weight', '1.bias'])]
    """

    _has_second_moment = True
    _state_dtypes = FlatOptimizer._state_dtypes

    __init__ = constructor(_MuonWithAdamW)

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict) -> None:
        """Adds a group as torch does; the group says whether it is Muon's."""
        if isinstance(param_group, dict):
            self._check_kind(param_group, f"of parameter group {len(self.param_groups)}")
            if not param_group["use_muon"]:
                param_group.setdefault("eps", ADAMW_EPS)
        super().add_param_group(param_group)

    def _check_kind(self, group: dict, what: str) -> None:
        if not isinstance(group.get("use_muon"), bool):
            raise ValueError(
                f"{type(self).__name__}: use_muon {what} must be True or False, got "
                f"{group.get('use_muon')!r}: onepass.optim.muon_groups(model) says it by rule"
            )

    def _check_param(self, param: Tensor, group: dict) -> None:
        check = super() if group["use_muon"] else super(Muon, self)
        check._check_param(param, group)

    def _check_settings(self, groups: list[dict]) -> None:
        FlatOptimizer._check_settings(self, groups)
        for index, group in enumerate(groups):
            self._check_kind(group, f"of parameter group {index}")
            if group["use_muon"]:
                check_iteration(type(self).__name__, group)

    # ---- the states of a group -------------------------------------------------------------------

    def _moment_keys(self, group: dict) -> tuple[str, ...]:
        return super()._moment_keys(group) if group["use_muon"] else ("exp_avg", "exp_avg_sq")

    def _moment_dtype(self, param: Tensor, group: dict) -> torch.dtype | str:
        dtype = super()._moment_dtype(param, group)
        return torch.float32 if dtype == "int8" and group["use_muon"] else dtype

    def _rounds_second_moment_to_nearest(self, group: dict) -> bool:
        return super()._rounds_second_moment_to_nearest(group) and not group["use_muon"]

    def _counts(self, group: dict) -> bool:
        return not group["use_muon"]

    def _hyper(self, group: dict) -> Hyper:
        if group["use_muon"]:
            return super()._hyper(group)
        beta1, beta2 = group["betas"]
        lr, decay = number_of(group["lr"]), group["weight_decay"]
        return Hyper(lr, float(beta1), float(beta2), group["eps"], decay, decoupled=True)

    # ---- a step ----------------------------------------------------------------------------------

    def _call(self, step: Step) -> bool:
        groups = self._groups_of(step)
        hyper, options = FlatOptimizer._arguments(self, step)
        calls: list[tuple] = []
        for use_muon in (True, False):
            which = [i for i, group in enumerate(groups) if group["use_muon"] is use_muon]
            if not which:
                continue
            own = [step.local_params[i] for i in which]
            given = [step.local_gradients[i] for i in which]
            # Both steps are made or neither: the first one finds out whether all states stayed.
            numbers = tuple([step.numbers[i] for i in which])
            table = step.table(numbers, own, numbers if calls else step.numbers)
            if table is None:
                return False
            if use_muon:
                of_all = [step.params[i] for i in which]
                updates = self._updates_of(step, of_all, [groups[i] for i in which], given)
                call = (ALGORITHMS["SGD"], table, updates, without_gradients(options))
            else:
                # For the same reason no table may turn out stale after the other step.
                laid = [laid_like(p, g) for p, g in zip(own, given, strict=True)]
                if self.zero_grads:
                    copied = [g for g, copy in zip(given, laid, strict=True) if copy is not g]
                    step.zeroed = [*step.zeroed, *copied]
                call = (ALGORITHMS["Adam"], table, laid, options)
            calls.append(call)
        return _ops.optimizer_steps(step.ran, calls, hyper)
