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
from torch.distributed.tensor import DTensor
from torchtitan.components import loss
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import CompileConfig, derive, override
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common import attention, nn_modules

import onepass.optim
from onepass import functional
from onepass.functional._internal import cross_entropy_in_float32

__all__ = ["cross_entropy", "optimizer", "rms_norm", "varlen_attention"]


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

    Examples:
        >>> from torchtitan.models.common.nn_modules import RMSNorm
        >>> from onepass.integrations.torchtitan import rms_norm
        >>> norm = rms_norm(RMSNorm.Config(normalized_shape=16)).build()
        >>> norm(torch.randn(2, 16)).shape
        torch.Size([2, 16])
    """
    return derive(config, RMSNorm.Config)


class VarlenAttention(attention.VarlenAttention):
    """torchtitan's, computed by `onepass.functional.varlen_attention`: on a CPU too, and in
    float32 where query is."""

    @dataclass(kw_only=True, slots=True)
    class Config(attention.VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: attention.VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        of = attention_masks
        packed = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        with attention.spmd.no_typecheck():  # spmd_types, whose rules are of torch's operators
            found = functional.varlen_attention(
                *packed, of.cu_seq_q, of.cu_seq_k, of.max_q, of.max_k, scale=scale,
                window_size=self.window_size, enable_gqa=options.get("enable_gqa", False),
                return_lse=True,
            )  # fmt: skip
        output, lse = (x.unflatten(d, q_BLNH.shape[:2]) for x, d in zip(found, (0, 1), strict=True))
        return output if out_transform is None else out_transform(output, lse.permute(1, 2, 0))


@override(target=attention.VarlenAttention.Config, description="onepass's attention", exact=True)
def varlen_attention(config: attention.VarlenAttention.Config) -> VarlenAttention.Config:
    """Attention of packed documents, torchtitan's "varlen".

    Args:
        config: torchtitan's.

    Returns:
        The same of `VarlenAttention`.

    Examples:
        >>> from torchtitan.models.common.attention import VarlenAttention
        >>> from onepass.integrations.torchtitan import varlen_attention
        >>> type(varlen_attention(VarlenAttention.Config()).build()).__module__
        'onepass.integrations.torchtitan'
    """
    return derive(config, VarlenAttention.Config)


class CrossEntropyLoss(loss.CrossEntropyLoss):
    """torchtitan's, computed by `onepass.functional.cross_entropy`: 16-bit logits are not copied
    to float32. Logits that are divided among processes are torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(loss.CrossEntropyLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config)
        self.fn = _cross_entropy
        self._maybe_compile(compile_config)


def _cross_entropy(pred: Tensor, labels: Tensor, *, global_vocab_size: int | None = None) -> Tensor:
    by_classes = get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1
    if by_classes or isinstance(pred, DTensor) or pred.dtype is torch.float64:
        return loss.cross_entropy_loss(pred, labels, global_vocab_size=global_vocab_size)
    rows = pred.flatten(0, 1)
    return cross_entropy_in_float32(rows, labels.flatten(0, 1), loss.IGNORE_INDEX, "sum")


@override(target=loss.CrossEntropyLoss.Config, description="onepass's loss", exact=True)
def cross_entropy(config: loss.CrossEntropyLoss.Config) -> CrossEntropyLoss.Config:
    """The loss, alone or in torchtitan's chunks.

    Args:
        config: torchtitan's.

    Returns:
        The same of `CrossEntropyLoss`.

    Examples:
        >>> from torchtitan.components.loss import CrossEntropyLoss
        >>> from onepass.integrations.torchtitan import cross_entropy
        >>> type(cross_entropy(CrossEntropyLoss.Config()).build()).__module__
        'onepass.integrations.torchtitan'
    """
    return derive(config, CrossEntropyLoss.Config)


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

    Examples:
        >>> from torchtitan.components.optimizer import OptimizersContainer
        >>> from onepass.integrations.torchtitan import optimizer
        >>> made = optimizer(OptimizersContainer.Config(), master="fp32")
        >>> made.optimizer_factory_kwargs_by_name["AdamW"]["master"]
        'fp32'
    """
    by_name = dict(config.optimizer_factory_kwargs_by_name)
    for name in ("Adam", "AdamW"):
        by_name[name] = {**by_name.get(name, {}), **settings}
    return derive(config, Optimizers.Config, optimizer_factory_kwargs_by_name=by_name)
