"""`onepass.estimate`: the memory of a training step, before it is run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onepass.estimating.result import Estimate


def estimate(
    model: torch.nn.Module | Callable[[], tuple[torch.nn.Module, object]],
    batch: object = None,
    *,
    optimizer: Callable = torch.optim.AdamW,
    swap: bool = False,
    kinds: tuple[str, ...] | list[str] | str | None = None,
    dtype: torch.dtype | None = None,
    autocast: bool = False,
    checkpointing: bool = False,
    inplace_loss: bool = False,
    lazy_logits: bool = False,
    real: bool = False,
) -> Estimate:
    """The memory that a training step of a model will take on the CPU, at its peak and in parts.

    A step (forward, loss, backward, the optimizer's step) is run without data: only values that
    depend on the batch alone are computed, and a model of any size needs only the memory of its
    Python objects. Every storage counts from the operator that makes it until nothing refers to it,
    views and tied weights once, so the order of events is that of a real step. The model is not
    changed.

    Not seen are temporary blocks inside an operator, rounding in allocators, and memory that is not
    in tensors: Python, libraries, on a GPU its context.

    Args:
        model: a module, or a function that returns (model, batch), which is called without the
            memory of its parameters. A module may be on "meta".
        batch: a tensor; a tuple or list of arguments; a dict of keywords; or what a forward of one
            argument takes. Where the model is a function, it may return a function of the step
            instead.
        optimizer: a class, or a function of the parameters, that makes it.
        swap, kinds: as `onepass.swap(model, kinds=kinds)` would change the model.
        dtype: parameters and floating-point batches are cast to it; None: unchanged.
        autocast: the forward runs under autocast to bfloat16.
        checkpointing: each layer is recomputed in the backward: by transformers' or diffusers' own
            switch, else the elements of the outermost lists of modules.
        inplace_loss: with swap, onepass's cross entropy writes its gradient over the logits.
        lazy_logits: as `onepass.swap(model, lazy_logits=True)`: models of transformers compute the
            loss without their logits, which nothing else reads.
        real: runs the step with its data, on a copy of the model: for models that read values.

    Returns:
        Estimate: the loss is the output's `.loss`, else the first scalar in it, else a mean square.

    Raises:
        TypeError: model is neither a module nor a function.
        RuntimeError: the model reads values that were not computed (the message names the line),
            or cannot be run; an error of its own is told in it, and is its cause.

    Examples:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> stock = onepass.estimate(model, torch.randn(8, 128, 64))
        >>> swapped = onepass.estimate(model, torch.randn(8, 128, 64), swap=True)
        >>> swapped.activations < stock.activations
        True
    """
    from onepass.tools.errors import BadInput, BadModel
    from onepass.tools.estimate import step, subject

    if not callable(model):
        kind = type(model).__name__
        raise TypeError(f"estimate: model must be a module or a function, got {kind}")
    if kinds is not None and not swap:
        raise ValueError(f"estimate: kinds must come with swap=True, got {kinds!r}")
    if lazy_logits and not swap:
        raise ValueError("estimate: lazy_logits must come with swap=True")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"estimate: dtype must be a torch.dtype or None, got {dtype!r}")
    if not callable(optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"estimate: optimizer must be a class or a function, got {kind}")
    if isinstance(kinds, str):
        kinds = (kinds,)
    options = step.Options(
        kinds=(None if kinds is None else tuple(kinds)) if swap else (),
        dtype=dtype,
        autocast=autocast,
        checkpointing=checkpointing,
        inplace_loss=inplace_loss,
        lazy_logits=lazy_logits,
    )
    try:
        if isinstance(model, torch.nn.Module):
            given = subject.Subject(model, batch, real=real)
        else:
            given = subject.made(model, real)
        found = step.run(given, options, {"": optimizer})
    except BadInput as error:  # its own text may name flags: a traceback shows its cause instead
        told = error.of("model", "real=True") if isinstance(error, BadModel) else error
        raise RuntimeError(f"estimate: {told}") from error.__cause__
    return step.estimate_of(found, "")
