"""Operators whose backward is an operator of csrc too: the autograd.Function, from their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from onepass._arguments import refuse_gradient
from onepass._ops.derivatives import derivative_of, second_derivative
from onepass._ops.differentiation import is_differentiated_again
from onepass._ops.operator import Operator, Raw, names_of, tuple_of, written


class Partial(NamedTuple):
    """A result that has a gradient and does not depend on all arguments."""

    of: Sequence[str]  # the arguments that it depends on
    needs: str  # the optional one without which it is empty


class Alike(NamedTuple):
    """Two arguments with one gradient, which is computed once, as that of `second`; where they have
    different dtypes, or one of the tensors `unless` is given, each has its own."""

    first: str
    second: str
    unless: Sequence[str]


def differentiable(
    name: str,
    outputs: Callable,
    definition: Callable,
    gradients: Callable,
    *,
    unless: Sequence[str] = (),
    results: Sequence[str] = (),
    derivative: Callable | None = None,
    partial: Mapping[str, Partial] | None = None,
    alike: Alike | None = None,
    passed: str = "",
    derived: Mapping[str, Callable] | None = None,
    finished: Mapping[str, Callable] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Operator:
    """The operator of `onepass::name_forward` and `onepass::name_backward`.

    The names in their schemas tell how they are called:

    - The backward returns the gradient `dx` of each argument `x` that has one. Bits of its
      `grad_mask`, in the same order, tell which are wanted; without a mask an `x_dtype` of None
      tells which are not.
    - Of its arguments `doutput` is the gradient of the result `output`, and `x_dtype` is the dtype
      of the argument `x`. Others are arguments and results of the forward, or `derived`.
    - An argument `save_...` of the forward asks for the results that only the backward reads.

    Args:
        outputs, gradients: the fakes of forward and backward.
        definition, unless: of the forward, as for `Raw`.
        results: names of the backward's results where its schema has none.
        derivative: what the backward computes, as for `second_derivative`; by default the gradients
            of `definition`.
        partial: results that do not depend on all arguments.
        alike: two arguments that may have one gradient.
        passed: the argument whose gradient is the result's.
        derived: arguments of the backward that the forward prepares, from its arguments and results
            and, as `needs_x`, from whether the gradient of x is wanted.
        finished: for arguments whose gradient is not the backward's result as it is: the gradient,
            from what the backward is given and returns.
        refused: arguments that must not require a gradient, with the public function's name.
    """
    forward = Raw(f"{name}_forward", outputs, definition, unless=unless)
    backward = Raw(f"{name}_backward", gradients, results=results)
    writer = _Writer(forward, backward, partial or {}, alike, passed, derived or {}, finished or {})
    if derivative is None:
        derivative = derivative_of(forward, writer.upstream, writer.of)
    source = writer.source(names_of(derivative, name, writer.known), refused or {})
    own = {f"derived_{x}": function for x, function in writer.derived.items()}
    own |= {f"finished_{x}": function for x, function in writer.finished.items()}
    module = written(
        f"{name}_function",
        source,
        backward_op=backward.op,
        apply_backward=second_derivative(
            lambda *arguments: backward(*arguments[len(writer.extra) :]),
            [*writer.extra, *backward.arguments],
            backward.results,
            derivative,
        ),
        is_differentiated_again=is_differentiated_again,
        refuse_gradient=refuse_gradient,
        **own,
    )
    function = type(
        f"_{name.title().replace('_', '')}",
        (torch.autograd.Function,),
        {x: staticmethod(getattr(module, x)) for x in ("setup_context", "backward")},
    )
    differentiated = [*writer.of, *([passed] if passed else ()), *(refused or ())]
    operator = Operator(name, forward, function, differentiated)
    operator.backward, operator.apply_backward = backward, module.apply_backward
    operator.source += source
    return operator


_FUNCTION = """

def setup_context(ctx, inputs, outputs):
    {inputs} = inputs
    {constants} = constants
    {results} = outputs
    needs = ctx.needs_input_grad
    {setup}
    ctx.save_for_backward({to_save})
    ctx.kept = {kept}


def backward(ctx, {dresults}):
    {kept} = ctx.kept
    {saved} = ctx.saved_tensors
    needs = ctx.needs_input_grad
    {wanted}
    if is_differentiated_again():  # create_graph=True
        {gradients} = apply_backward({again})
    else:
        {gradients} = backward_op({arguments})
    return {returned}
"""


class _Writer:
    """Fills in `_FUNCTION` for one operator."""

    def __init__(self, forward: Raw, backward: Raw, partial, alike, passed, derived, finished):
        self.forward, self.backward = forward, backward
        self.partial, self.alike, self.passed = partial, alike, passed
        self.derived, self.finished = derived, finished
        self.of = [gradient.removeprefix("d") for gradient in backward.results]
        self.upstream = [d for d in map("d{}".format, forward.results) if d in backward.arguments]
        self.known = [*backward.arguments, *forward.constants]
        self.has_mask = "grad_mask" in backward.arguments
        self.extra: list[str] = []  # what the derivative takes and the backward does not

    def source(self, of_derivative: list[str], refused: Mapping[str, str]) -> str:
        forward, backward = self.forward, self.backward
        self.extra = [name for name in of_derivative if name not in backward.arguments]
        setup, saved, kept = self.setup(refused)
        gradients = {x: self.gradient(number) for number, x in enumerate(self.of)}
        arguments = ["mask" if a == "grad_mask" else a for a in backward.arguments]
        return _FUNCTION.format(
            inputs=", ".join([*forward.tensors, "constants"]),
            constants=tuple_of(forward.constants),
            results=", ".join(forward.results),
            setup=_lines(setup),
            to_save=", ".join(saved),
            saved=tuple_of(saved),
            kept=tuple_of(kept),
            dresults=", ".join(f"d{result}" for result in forward.results),
            wanted=_lines(self.wanted()),
            gradients=", ".join(backward.results),
            again=", ".join([*self.extra, *arguments]),
            arguments=", ".join(arguments),
            returned=self.returned(gradients),
        )

    def needs(self, argument: str) -> str:
        return f"needs[{self.forward.tensors.index(argument)}]"

    def setup(self, refused: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
        """(lines, the tensors to save, other values to keep)."""
        forward, dtypes, lines, saved, kept = self.forward, [], [], [], []
        for argument, function in refused.items():
            lines.append(f"if {self.needs(argument)}:")
            lines.append(f"    refuse_gradient({function!r}, {argument!r})")
        lines += self.marks()
        for name in (*self.extra, *self.backward.arguments):
            tensor = name.removesuffix("_dtype")
            if name == "grad_mask" or name in self.upstream:
                continue
            (saved if name in self.backward.tensors else kept).append(name)
            if name in self.derived:
                lines.append(f"{name} = {self.derive(name)}")
            elif tensor != name and tensor in forward.tensors:
                absent = f"{tensor} is None" if self.has_mask else f"not {self.needs(tensor)}"
                dtypes.append(f"{name} = None if {absent} else {tensor}.dtype")
            elif name not in (*forward.arguments, *forward.results):
                raise TypeError(f"{self.backward.name}: {name} must be derived, got no function")
        for result, (_, optional) in self.partial.items():
            kept.append(f"has_{result}")
            lines.append(f"has_{result} = {optional} is not None")
        if self.alike:
            first, second, unless = self.alike
            same = [self.needs(first), self.needs(second), f"{first}.dtype == {second}.dtype"]
            kept.append("is_one")
            lines.append(f"is_one = {' and '.join([*same, *(f'{t} is None' for t in unless)])}")
        return dtypes + lines, saved, kept

    def marks(self) -> list[str]:
        """Tells autograd which results have no gradient. A partial one has none either if none of
        its arguments has: it depends on nothing that is trained."""
        if len(self.forward.results) == 1:
            return []
        without = [r for r in self.forward.results if f"d{r}" not in self.upstream]
        lines = ["ctx.set_materialize_grads(False)"]
        if without:
            lines.append(f"ctx.mark_non_differentiable({', '.join(without)})")
        for result, (of, _) in self.partial.items():
            lines.append(f"if not ({' or '.join(map(self.needs, of))}):")
            lines.append(f"    ctx.mark_non_differentiable({', '.join([result, *without])})")
        return lines

    def derive(self, name: str) -> str:
        forward = self.forward
        known = {value: value for value in (*forward.arguments, *forward.results)}
        known |= {f"needs_{tensor}": self.needs(tensor) for tensor in forward.tensors}
        taken = names_of(self.derived[name], self.backward.name, known)
        return f"derived_{name}({', '.join(known[value] for value in taken)})"

    def wanted(self) -> list[str]:
        """Lines that compute which gradients are wanted: the mask, or none."""
        lines = []
        for result in self.partial:  # compiled graphs hand over a gradient of an empty result
            lines += [f"if not has_{result}:", f"    d{result} = None"]
        if len(self.forward.results) > 1:
            lines.append(f"if {' and '.join(f'{d} is None' for d in self.upstream)}:")
            lines.append(f"    return {self.returned({})}")
        if not self.has_mask:
            return lines
        whole = [d for d in self.upstream if d.removeprefix("d") not in self.partial]
        of_partial = {x for of, _ in self.partial.values() for x in of}
        bits = []
        for number, x in enumerate(self.of):
            is_wanted = self.needs(x)
            if self.alike and x == self.alike.first:
                is_wanted += " and not is_one"
            if self.partial and x not in of_partial:
                is_wanted += "".join(f" and {d} is not None" for d in whole)
            bits.append(f"({1 << number} if {is_wanted} else 0)")
        lines.append(f"mask = {' | '.join(bits)}")
        if self.passed:
            lines += ["if not mask:", f"    return {self.returned({})}"]
        return lines

    def gradient(self, number: int) -> str:
        x = self.of[number]
        value = f"d{x}"
        if x in self.finished:
            known = (*self.backward.arguments, *self.backward.results)
            taken = names_of(self.finished[x], self.backward.name, known)
            value = f"finished_{x}({', '.join(taken)})"
        if self.alike and x == self.alike.first:
            return f"(d{self.alike.second} if is_one else {value}) if {self.needs(x)} else None"
        return f"{value} if {f'mask & {1 << number}' if self.has_mask else self.needs(x)} else None"

    def returned(self, gradients: Mapping[str, str]) -> str:
        """One value for each of the inputs."""
        if self.passed:
            passed = f"{self.upstream[0]} if {self.needs(self.passed)} else None"
            gradients = {**gradients, self.passed: passed}
        return ", ".join(gradients.get(x, "None") for x in (*self.forward.tensors, "constants"))


def _lines(lines: Iterable[str]) -> str:
    return "\n    ".join(lines)
