"""The options of a call of attention: an operator's keywords, without those that have their
defaults, since each costs dispatch time."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._memory_order import is_bshd
from onepass._ops.attention import Options
from onepass._ops.attention_decode import DEFAULTS
from onepass._ops.differentiation import constant
from onepass._policy.precision import rounds_factors


def score_options(
    query: Tensor, scale: float | None, window: tuple[int, int], **terms: float | Tensor | None
) -> Options:
    """The options of scores, which every operator of the family has.

    `scale` None is 1 / sqrt(head_dim); `window` is (window_left, window_right); `terms` are numbers
    and tensors by the operators' own names.
    """
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5 if query.dim() else 1.0
    compiling = torch.compiler.is_compiling()
    options: Options = {"scale": constant(scale) if compiling else scale}
    left, right = window
    if left != -1:
        options["window_left"] = left
    if right != -1:
        options["window_right"] = right
    for name, term in terms.items():
        default = DEFAULTS[name]
        if default is not None and compiling:
            term = constant(term)
        if term is not default and (default is None or term != default):
            options[name] = term
    if is_bshd(query):
        options["out_bshd"] = True
    return options


def rounds(query: Tensor, precision: str | None = None) -> bool:
    """Whether products take factors rounded to bfloat16: of float32 on a CPU, where `precision`,
    or torch's setting if it is None, says so."""
    return query.dtype is torch.float32 and query.is_cpu and rounds_factors(precision)


def given(**tensors: Tensor | None) -> Options:
    """The options that are given."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
