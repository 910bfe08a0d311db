"""`torch.func.vmap`, and the older vmap of `torch.autograd.grad(..., is_grads_batched=True)`, over
operators that torch's own loop over samples refuses, or that need none. Operators that write into
their arguments are refused by name; those that only check, or return a list, run on every sample; a
product takes the samples' rows as more rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

_library = torch.library.Library("onepass", "FRAGMENT")
_OLDER = torch._C._dispatch_key_parse("Batched")  # which torch._C.DispatchKey lacks


def refuse_mapped(op) -> None:
    """Makes an operator (`torch.ops.onepass.x.default`) refuse tensors that vmap maps over."""
    _register(op, functools.partial(_refuse, op), functools.partial(_refuse, op))


def run_each(op) -> None:
    """Makes an operator run on the samples one by one; results are stacked."""
    each = functools.partial(_run_each, op)
    _register(op, functools.partial(each, _samples), functools.partial(each, _older_samples))


def run_as_rows(op, *rows: int, unless: tuple[int, ...] = ()) -> None:
    """Makes an operator run once on all samples if only the arguments at `rows`, which consist of
    rows, are mapped and those at `unless` are None or left out; otherwise on the samples one by
    one."""
    name = op._schema.name
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "FuncTorchBatched"):
        torch.library.register_vmap(name, functools.partial(_run_as_rows, op, rows, unless))


def _run_as_rows(op, rows, unless, info, in_dims, *arguments):
    mapped = [place for place, dim in enumerate(in_dims) if dim is not None]
    given = {place for place, argument in enumerate(arguments) if argument is not None}
    if not set(mapped) <= set(rows) or not given.isdisjoint(unless):
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


def is_mapped(tensor: Tensor) -> bool:
    """Whether one of both vmaps maps over a tensor."""
    return _functorch.is_batchedtensor(tensor) or _is_mapped_by_older(tensor)


def _is_mapped_by_older(tensor: Tensor) -> bool:
    return torch._C._dispatch_keys(tensor).has(_OLDER)


def _register(op, kernel: Callable, older_kernel: Callable) -> None:
    name = op._schema.name
    for key, implementation in (("FuncTorchBatched", kernel), ("Batched", older_kernel)):
        # If imported again in this process: the registration of the first import stays.
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            _library.impl(name.removeprefix("onepass::"), implementation, key)


def _refuse(op, *arguments, **options):
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    for name, value in (*zip(names, arguments, strict=False), *options.items()):
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(t, Tensor) and is_mapped(t) for t in tensors):
            raise RuntimeError(
                f"{schema.name.removeprefix('onepass::')}: {name} must not be mapped over by vmap, "
                "got one that is"
            )


def _run_each(op, samples, *arguments, **options):
    with samples((arguments, options)) as (number_of_samples, sample, wrap):
        results = []
        for number in range(number_of_samples):
            one = functools.partial(sample, number=number)
            args, kwargs = tree_map_only(Tensor, one, (arguments, options))
            results.append(op(*args, **kwargs))
        if not op._schema.returns:
            return None
        stacked = tree_map(lambda *parts: torch.stack(parts), *results)
    return tree_map(wrap, stacked)


@contextlib.contextmanager
def _samples(arguments):
    """(the number of samples, a tensor's sample by number, a stack of results as a mapped
    tensor)."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()

    def sample(tensor: Tensor, number: int) -> Tensor:
        inner, dim = _functorch._unwrap_batched(tensor, level)
        return inner if dim is None else inner.select(dim, number)

    outside = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
    )
    with outside:
        yield (
            interpreter.batch_size(),
            sample,
            lambda tensor: _functorch._add_batch_dim(tensor, 0, level),
        )


@contextlib.contextmanager
def _older_samples(arguments):
    """The same for the innermost of the older vmaps that maps over an argument."""
    mapped = [t for t in tree_leaves(arguments) if isinstance(t, Tensor) and _is_mapped_by_older(t)]
    level, stacks = _innermost(mapped)
    number_of_samples = next(iter(stacks.values())).shape[0]

    def sample(tensor: Tensor, number: int) -> Tensor:
        return stacks[id(tensor)][number] if id(tensor) in stacks else tensor

    yield number_of_samples, sample, lambda tensor: torch._add_batch_dim(tensor, 0, level)


def _innermost(mapped: list[Tensor]) -> tuple[int, dict[int, Tensor]]:
    """(the level of the innermost vmap over some of the tensors, these tensors' samples by id)."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    while True:
        stacks = {}
        for tensor in mapped:
            # A tensor that is not mapped at this level is expanded to the given size.
            stack, other = (torch._remove_batch_dim(tensor, level, size, 0) for size in (1, 2))
            if stack.shape == other.shape:
                stacks[id(tensor)] = stack
        if stacks:
            return level, stacks
        level -= 1
