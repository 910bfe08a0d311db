"""Second derivatives and higher, from a first derivative written in torch's operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onepass._ops.decomposition import wide
from onepass._ops.differentiation import applied


def second_derivative(
    compute: Callable, names: Sequence[str], results: Sequence[str], derivative: Callable
) -> Callable:
    """A backward as a function that can be differentiated.

    Args:
        compute: the backward; it returns the gradients `results`.
        names: of its arguments. `grad_mask`, or an `x_dtype` of None, tells which are not wanted.
        derivative: computes the results in torch's operators. Its positional parameters are tensors
            with gradients, those by keyword are constant; both have the names of arguments.
    """
    parameters = inspect.signature(derivative).parameters.values()
    leaves = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    constants = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments):
            return compute(*arguments)

        @staticmethod
        def setup_context(ctx, inputs, outputs):
            given = dict(zip(names, inputs, strict=True))
            ctx.set_materialize_grads(False)
            ctx.tensors = [name for name in constants if isinstance(given[name], Tensor)]
            ctx.save_for_backward(*(given[name] for name in (*leaves, *ctx.tensors)))
            ctx.others = {name: given[name] for name in constants if name not in ctx.tensors}
            ctx.wanted = _wanted(results, given)

        @staticmethod
        def backward(ctx, *second):
            saved = ctx.saved_tensors
            given = dict(zip(ctx.tensors, saved[len(leaves) :], strict=True)) | ctx.others
            gradients = vjp(
                lambda *of: derivative(*of, **given),
                saved[: len(leaves)],
                [d if want else None for d, want in zip(second, ctx.wanted, strict=True)],
            )
            found = dict(zip(leaves, gradients, strict=True))
            return tuple(found.get(name) for name in names)

    return applied(Backward)


def _wanted(results: Sequence[str], given: dict[str, object]) -> list[bool]:
    """Results that the arguments of a backward ask for."""
    if "grad_mask" in given:
        return [bool(given["grad_mask"] >> bit & 1) for bit in range(len(results))]
    return [given.get(f"{result[1:]}_dtype", True) is not None for result in results]


def derivative_of(forward, upstream: Sequence[str], of: Sequence[str]) -> Callable:
    """The gradients of a definition (of `forward`, a `Raw`) in torch's operators, for
    `second_derivative`; results are not rounded to a dtype.

    Args:
        upstream: the names of the results' gradients.
        of: the arguments whose gradients it returns.
    """
    left_out = {name: None for name in forward.arguments if name.endswith("_dtype")}
    left_out |= dict.fromkeys(forward.flags, False)

    def derivative(*tensors, **constants):
        given, leaves = tensors[: len(upstream)], tensors[len(upstream) :]
        arguments = dict(zip(of, leaves, strict=True)) | constants | left_out
        results = forward.definition(**arguments)
        results = results[: len(given)] if isinstance(results, tuple) else [results]
        return gradients_of(results, leaves, given)

    taken = [name for name in forward.definition.taken if name not in (*of, *left_out)]
    parameters = [
        *(inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in (*upstream, *of)),
        *(inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in taken),
    ]
    derivative.__signature__ = inspect.Signature(parameters)
    return derivative


def gradients_of(
    results: Sequence[Tensor], leaves: Sequence[Tensor | None], upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of `results` for `leaves`, which can be differentiated in turn; a gradient in
    `upstream` may be None."""
    pairs = [pair for pair in zip(results, upstream, strict=True) if pair[1] is not None]
    of_given = iter(
        torch.autograd.grad(
            [result for result, _ in pairs],
            [leaf for leaf in leaves if leaf is not None],
            [gradient for _, gradient in pairs],
            create_graph=True,
            materialize_grads=True,
        )
    )
    return [None if leaf is None else next(of_given) for leaf in leaves]


def vjp(
    formula: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of `formula(*inputs)` for `inputs`, weighted by `cotangents`.

    16-bit inputs are computed in float32, and their gradients rounded once. The result can itself
    be differentiated when the caller runs under create_graph.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of tensors that have a history, to continue it; otherwise leaves, so that each
        # formula can take gradients with respect to them.
        continued = [create_graph and t is not None and t.requires_grad for t in inputs]
        leaves = wide(
            *(
                t if t is None else t.view_as(t) if of else t.detach()
                for t, of in zip(inputs, continued, strict=True)
            )
        )
        for leaf in leaves:
            if leaf is not None and not leaf.requires_grad:
                leaf.requires_grad_()
        pairs = [
            (output, cotangent.to(output.dtype))
            for output, cotangent in zip(formula(*leaves), cotangents, strict=True)
            if output is not None and cotangent is not None and output.requires_grad
        ]
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        if not pairs or not wanted:
            return [None] * len(inputs)
        gradients = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [cotangent for _, cotangent in pairs],
                allow_unused=True,
                create_graph=create_graph,
            )
        )
    result = []
    for source, leaf in zip(inputs, leaves, strict=True):
        gradient = next(gradients) if leaf is not None and leaf.requires_grad else None
        result.append(None if gradient is None else gradient.to(source.dtype))
    return result
