"""The operators whose results a checkpointed region should keep."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

import onepass._ops  # noqa: F401, first: it reports a broken installation

# Forwards that are bound by arithmetic. The others (norms, dropout, rotary embedding, gates) are
# bound by memory: computing one again costs little more than reading a result that was kept.
_SAVED = (
    "attention_forward",
    "linear_forward",
    "linear_epilogue_forward",
    "quantized_linear_forward",
    "linear_loss",
)


def sac_ops() -> list[OpOverload]:
    """Operators of onepass whose results are worth keeping when everything else is recomputed.

    For `torch.utils.checkpoint.create_selective_checkpoint_contexts`, alone or together with
    torch's own, and for trainers that take such a list.

    These are attention's forward and the products of linear layers. Kept are the output, for
    attention also one or two numbers per query and head, for a linear layer with an activation the
    activation's input too, and for `linear_cross_entropy` the gradients made with the loss. An
    operator that is not on the list runs twice.

    Returns:
        A new list. Calls that onepass leaves to torch (small ones, linear layers where torch is as
        fast) run operators of `torch.ops.aten`, which it does not hold.

    Examples:
        >>> import functools
        >>> from torch.utils import checkpoint
        >>> contexts = checkpoint.create_selective_checkpoint_contexts
        >>> context_fn = functools.partial(contexts, onepass.sac_ops())
        >>> block, x = onepass.nn.TransformerEncoderLayer(64, 4), torch.randn(10, 2, 64)
        >>> y = checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
    """
    return [getattr(torch.ops.onepass, name).default for name in _SAVED]
