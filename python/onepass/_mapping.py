"""`torch.func.vmap` over operators that torch's own loop over samples refuses, or that need none.
Operators that write into their arguments are refused by name; those that only check, or return a
list, run on every sample; a product takes the samples' rows as more rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils._pytree import tree_map, tree_map_only

_OLDER = "Batched"  # the dispatch key of the mapping by torch._vmap_internals
_NO_SIZE = -2  # refused by expand, where -1 keeps a size
_library = torch.library.Library("onepass", "FRAGMENT")


def refuse_mapped(op) -> None:
    """Makes an operator (`torch.ops.onepass.x.default`) refuse tensors that vmap maps over."""
    _register(op, functools.partial(_refuse, op))


def run_each(op) -> None:
    """Makes an operator run on the samples one by one; results are stacked.

    Also under the older mapping that `torch.autograd.grad(is_grads_batched=True)` and
    `jacobian(vectorize=True)` use, whose own loop over samples knows no lists.
    """
    _register(op, functools.partial(_run_each, op))
    _register(op, functools.partial(_run_each_gradient, op), _OLDER)


def run_as_rows(op, *rows: int, unless: tuple[int, ...] = ()) -> None:
    """Makes an operator run once on all samples if only the arguments at `rows`, which consist of
    rows, are mapped and those at `unless` are None; otherwise on the samples one by one."""
    name = op._schema.name
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "FuncTorchBatched"):
        torch.library.register_vmap(name, functools.partial(_run_as_rows, op, rows, unless))


def _run_as_rows(op, rows, unless, info, in_dims, *arguments):
    mapped = [place for place, dim in enumerate(in_dims) if dim is not None]
    if not set(mapped) <= set(rows) or any(arguments[place] is not None for place in unless):
        return _one_by_one(op, info, in_dims, arguments)
    together = list(arguments)
    for place in rows:
        tensor = arguments[place]
        if place in mapped:
            together[place] = tensor.movedim(in_dims[place], 0)
        elif tensor is not None:
            together[place] = tensor.expand(info.batch_size, *tensor.shape)
    results = op(*together)
    return results, tree_map(lambda tensor: None if _is_absent(tensor) else 0, results)


def _is_absent(result: Tensor) -> bool:
    """Whether an output was not requested: such outputs have size 0."""
    return result.shape == (0,)


def _one_by_one(op, info, in_dims, arguments):
    # As _run_each, under torch's rule, which nests, but takes no keywords.
    results = []
    for number in range(info.batch_size):
        one = [
            value if dim is None else value.select(dim, number)
            for value, dim in zip(arguments, in_dims, strict=True)
        ]
        results.append(op(*one))
    return tree_map(lambda *parts: torch.stack(parts), *results), tree_map(lambda _: 0, results[0])


def _register(op, kernel: Callable, key: str = "FuncTorchBatched") -> None:
    name = op._schema.name
    # If imported again in this process: the registration of the first import stays.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
        _library.impl(name.removeprefix("onepass::"), kernel, key)


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


def _run_each_gradient(op, *arguments, **options):
    innermost = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    for level in range(innermost, 0, -1):
        moved: dict[int, Tensor] = {}  # by id, the samples of a mapped argument
        tree_map_only(Tensor, functools.partial(_take_samples, moved, level), (arguments, options))
        if moved:
            break

    def sample(tensor: Tensor, number: int) -> Tensor:
        return moved[id(tensor)][number] if id(tensor) in moved else tensor

    results = []
    for number in range(len(next(iter(moved.values())))):
        args, kwargs = tree_map_only(
            Tensor, functools.partial(sample, number=number), (arguments, options)
        )
        results.append(op(*args, **kwargs))
    if not op._schema.returns:
        return None
    return tree_map(lambda *parts: torch._add_batch_dim(torch.stack(parts), 0, level), *results)


def _take_samples(moved: dict[int, Tensor], level: int, tensor: Tensor) -> None:
    try:
        moved[id(tensor)] = torch._remove_batch_dim(tensor, level, _NO_SIZE, 0)
    except RuntimeError:  # it is not mapped at this level, and would be expanded to that size
        pass
