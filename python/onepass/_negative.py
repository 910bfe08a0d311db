"""Tensors with the negative bit (`torch._neg_view`, `z.conj().imag`), where operators write.

For an operator that only reads, torch resolves the negation before the kernel gets the tensor. For
one that writes, torch's fallback passes a clone to the kernel and fails only afterwards, when other
arguments have already been written. So these operators have a separate kernel for the negative bit:
tensors that are read are resolved, tensors that would be written are refused. This is here and not
in csrc/ops, because the stable ABI does not show the bit.
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
        answer: the result in place of an error, if the operator can report that it did nothing.
    """
    name = op._schema.name
    # If imported again in this process: the registration of the first import stays.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Negative"):
        short = name.removeprefix("onepass::")
        _library.impl(short, functools.partial(_kernel, op, answer), "Negative")
    registered.add(name.removeprefix("onepass::"))
