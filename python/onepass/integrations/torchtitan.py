"""onepass inside torchtitan, by its overrides: `--override.imports onepass.integrations.torchtitan.
rms_norm,...`.

torchtitan imports this module for the names after the last dot. Each replaces the configurations of
one of torchtitan's components by those of a subclass of it, so that parameters, their names in
checkpoints, initialisation and sharding stay torchtitan's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override
from torchtitan.models.common import nn_modules

import onepass.optim
from onepass import functional


class RMSNorm(nn_modules.RMSNorm):
    """torchtitan's, computed by `onepass.functional.rms_norm`; of DTensors each process computes
    its part."""

    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.RMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


@override(target=nn_modules.RMSNorm.Config, description="onepass's RMS norm", exact=True)
def rms_norm(config: nn_modules.RMSNorm.Config) -> RMSNorm.Config:
    """Every RMS norm, or those that `fqns` of your own override select.

    Args:
        config: torchtitan's.

    Returns:
        The same of `RMSNorm`.
    """
    return derive(config, RMSNorm.Config)


class Optimizers(OptimizersContainer):
    """torchtitan's container, whose Adam and AdamW are onepass's."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        ours = {"Adam": onepass.optim.Adam, "AdamW": onepass.optim.AdamW}
        return ours.get(name) or OptimizersContainer._resolve_optimizer_factory(name)


@override(target=OptimizersContainer.Config, description="onepass's optimizers", exact=True)
def optimizer(config: OptimizersContainer.Config, **settings: Any) -> Optimizers.Config:
    """Adam and AdamW of all parameter groups.

    Args:
        config: torchtitan's. An `implementation` of states in bfloat16 is torch's alone: say
            `state_dtype` instead.
        settings: options of `onepass.optim.AdamW` for all of them, as in `'...torchtitan.optimizer=
            {"master": "fp32"}'`.

    Returns:
        The same of `Optimizers`.
    """
    by_name = dict(config.optimizer_factory_kwargs_by_name)
    for name in ("Adam", "AdamW"):
        by_name[name] = {**by_name.get(name, {}), **settings}
    return derive(config, Optimizers.Config, optimizer_factory_kwargs_by_name=by_name)
