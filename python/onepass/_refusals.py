"""Calls that an operator refuses: in a swapped module torch computes them, or raises its own
error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

from onepass import _dispatch_log

Given = ParamSpec("Given")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# By an operator's check or its schema, by the dispatcher for a layout or device without a kernel,
# and by autograd before it saves an input.
_REFUSAL = re.compile(
    r"\w+: \w+ must |onepass::\w+\(\) |Could not run 'onepass::|Inference tensors cannot be saved"
)


def or_torchs(
    ours: Callable[Given, Tensor],
    torchs: Callable[Given, Tensor],
    *args: Given.args,
    **named: Given.kwargs,
) -> Tensor:
    """ours(*args, **named), or torchs of the same if ours refuses them; logged.

    A compiler raises before the handler here could run: under it the dtypes alone are asked for.
    """
    if torch.compiler.is_compiling() and not _have_kernels(args):
        return torchs(*args, **named)
    try:
        return ours(*args, **named)
    except Exception as error:
        text = str(error)
        if not _REFUSAL.match(text):
            raise
    # After the handler, so that an error of torch's is raised alone.
    if _dispatch_log.is_recording():
        op, _, reason = text.partition("\n")[0].partition(": ")
        name = getattr(torchs, "__qualname__", "")
        _dispatch_log.record_fallback(op, "refused", name, torch.get_num_threads(), reason)
    return torchs(*args, **named)


def _have_kernels(args: tuple) -> bool:
    """Whether the first tensor is of a dtype that the operators have, and the others go with it."""
    dtypes = [x.dtype for x in args if isinstance(x, Tensor)]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    wide = [dtype for dtype in floats if dtype is torch.float64]
    known = all(dtype in _DTYPES for dtype in floats)
    return known and dtypes[0] in floats and len(wide) in (0, len(floats))


def is_number(value: object) -> bool:
    """Whether it is a plain number: some tensors that convert to one are refused by torch."""
    return isinstance(value, (float, int))
