"""The options of a call of attention on their way to a raw operator: its keywords, in a dict.

Only those that are not the default: each costs dispatch time. `onepass.functional` makes them, the
operators' own schemas say which there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._ops.attention_layout import is_bshd
from onepass._ops.differentiation import constant

Options = dict[str, object]


def score_options(
    query: Tensor,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Options:
    """Those that every operator of the family has.

    `scale` None is 1 / sqrt(head_dim); `window` is (window_left, window_right).
    """
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5 if query.dim() else 1.0
    if torch.compiler.is_compiling():
        scale, softcap = constant(scale), constant(softcap)
    options: Options = {"scale": scale}
    left, right = window
    if left != -1:
        options["window_left"] = left
    if right != -1:
        options["window_right"] = right
    if softcap != 0.0:
        options["softcap"] = softcap
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if sinks is not None:
        options["sinks"] = sinks
    if is_bshd(query):
        options["out_bshd"] = True
    return options


def given(**tensors: Tensor | None) -> Options:
    """Those of them that there are."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
