"""Tensors with the negative bit (`torch._neg_view`, `z.conj().imag`), where operators write.

Of an operator that only reads, torch makes the negation before the kernel sees the tensor. Of one
that writes, torch's fallback hands the kernel a clone and finds only afterwards that it does not
know what came of it, when the other arguments have been written. So these operators have a kernel
of their own for the negative bit: what is read is resolved, what is to be written is refused. Here
and not in csrc/ops, because the stable ABI does not show the bit.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class _Refused(RuntimeError):
    """A negative view is to be written."""


registered: set[str] = set()  # the operators with such a kernel
_library = torch.library.Library("onepass", "FRAGMENT")  # while it lives the kernels are registered


def _resolved(op: str, argument: torch.Argument, value):
    """The value of an argument, without the bit."""
    if isinstance(value, (list, tuple)):
        return [_resolved(op, argument, item) for item in value]
    if not isinstance(value, Tensor) or not value.is_neg():
        return value
    if argument.alias_info is not None and argument.alias_info.is_write:
        raise _Refused(
            f"{op}: {argument.name} must not be a negative view, it is written in place, got one; "
            "resolve_neg() makes a copy that is none"
        )
    return value.resolve_neg()


def _kernel(op, answer, *arguments, **options):
    schema = op._schema
    name = schema.name.removeprefix("onepass::")
    by_name = {argument.name: argument for argument in schema.arguments}
    try:
        positional = [
            _resolved(name, argument, value)
            for argument, value in zip(schema.arguments, arguments, strict=False)
        ]
        by_keyword = {k: _resolved(name, by_name[k], v) for k, v in options.items()}
    except _Refused:
        if answer is None:
            raise
        return answer
    return op(*positional, **by_keyword)


def refuse_where_written(op, answer: object = None) -> None:
    """Gives an operator (`torch.ops.onepass.x.default`) its kernel for the negative bit.

    Args:
        answer: what it returns in place of an error, if it can say that it did nothing.
    """
    name = op._schema.name
    # Imported once more in this process: the registration of the first import stays.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Negative"):
        short = name.removeprefix("onepass::")
        _library.impl(short, functools.partial(_kernel, op, answer), "Negative")
    registered.add(name.removeprefix("onepass::"))
