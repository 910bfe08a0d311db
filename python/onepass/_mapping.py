"""`torch.func.vmap` over operators that torch's own loop over samples does not take: those that
write into their arguments are refused by name; those that only check, or return a list, run on
every sample."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils._pytree import tree_map, tree_map_only

_library = torch.library.Library("onepass", "FRAGMENT")


def refuse_mapped(op) -> None:
    """Has an operator (`torch.ops.onepass.x.default`) refuse tensors that vmap maps over."""
    _register(op, functools.partial(_refuse, op))


def run_each(op) -> None:
    """Has an operator run on the samples one by one; results are stacked."""
    _register(op, functools.partial(_run_each, op))


def _register(op, kernel: Callable) -> None:
    name = op._schema.name
    # Imported once more in this process: what the first import registered stays.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "FuncTorchBatched"):
        _library.impl(name.removeprefix("onepass::"), kernel, "FuncTorchBatched")


def _refuse(op, *arguments, **options):
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    for name, value in (*zip(names, arguments, strict=False), *options.items()):
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(t, Tensor) and _functorch.is_batchedtensor(t) for t in tensors):
            raise RuntimeError(
                f"{schema.name.removeprefix('onepass::')}: {name} must not be mapped over by vmap, "
                "got one that is"
            )


def _run_each(op, *arguments, **options):
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter = retrieve_current_functorch_interpreter()

    def sample(tensor: Tensor, number: int) -> Tensor:
        inner, dim = _functorch._unwrap_batched(tensor, interpreter.level())
        return inner if dim is None else inner.select(dim, number)

    outside = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
    )
    with outside:
        results = []
        for number in range(interpreter.batch_size()):
            one = functools.partial(sample, number=number)
            args, kwargs = tree_map_only(Tensor, one, (arguments, options))
            results.append(op(*args, **kwargs))
        if not op._schema.returns:
            return None
        stacked = tree_map(lambda *parts: torch.stack(parts), *results)
    level = interpreter.level()
    return tree_map(lambda tensor: _functorch._add_batch_dim(tensor, 0, level), stacked)
