"""Cross entropy of logits: the loss in one read of them, its gradient in one read and one write."""

from __future__ import annotations

from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops import loss as _loss


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` with indices of classes, without a copy of the logits.

    The forward keeps two numbers of each row; the backward computes the exponentials again. 16-bit
    logits are computed in float32 as they are read, and all sums are added up in one order, so that
    results do not depend on the number of threads. Rows that are ignored are not read: what they
    hold, NaN too, reaches neither the loss nor a gradient, and theirs is 0.

    Szegedy et al., Rethinking the Inception architecture, 2015 (label smoothing); Chowdhery et al.,
    PaLM, 2022 (z_loss).

    Args:
        input: logits of shape (rows, classes) or (classes,); float32, bfloat16, float16 or
            float64. Other dimensions are to be flattened.
        target: indices of classes, int64 of shape (rows,) or (). On the CPU one that is neither a
            class nor ignore_index is an error; on CUDA its loss and gradient are NaN.
        weight: of shape (classes,), of each class, or None.
        ignore_index: the target of rows that do not count.
        label_smoothing: from 0 to 1, the part of each target that all classes share.
        softcap: c > 0 turns a logit x into c tanh(x / c) first.
        z_loss: adds z_loss * lse^2, times the target's weight, to each row's loss, lse being its
            log-sum-exp.
        reduction: "mean", over the sum of the weights of rows that are not ignored (NaN where all
            are), "sum" or "none".
        inplace_backward: the backward writes the gradient over the logits, so that it needs no
            memory. They are destroyed: nobody may read them after it. What was saved of them for
            another gradient, a second backward too, raises; second derivatives are refused. Without
            effect under `torch.compile` and the transforms of `torch.func`.

    Returns:
        Tensor of shape (), or of target's with reduction "none"; in input's dtype (under autocast,
        float32 for 16-bit logits, as torch's).

    Raises:
        RuntimeError: a shape, dtype, device or number does not fit, or a target is no class; the
            message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: reduction is none of these.

    Examples:
        >>> logits = torch.randn(4, 1000, requires_grad=True)
        >>> target = torch.tensor([3, 999, -100, 0])  # the third row is ignored
        >>> loss = onepass.functional.cross_entropy(logits, target, z_loss=1e-4)
        >>> loss.backward()
        >>> bool(logits.grad[2].any())
        False
    """
    try:
        if reduction not in _loss.REDUCTIONS:
            names = ", ".join(map(repr, _loss.REDUCTIONS))
            raise ValueError(f"cross_entropy: reduction must be one of {names}, got {reduction!r}")
        if type(inplace_backward) is not bool:
            raise TypeError  # which check_arguments names
        options = (ignore_index, label_smoothing, softcap, z_loss, _loss.REDUCTIONS[reduction])
        return _loss.cross_entropy(input, target, weight, *options, inplace_backward)
    except Exception:
        check_arguments(cross_entropy, locals())
        raise
