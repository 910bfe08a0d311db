"""An operator of a family in one declaration.

`Raw` is an operator of csrc with its check, its fake, and its definition in torch's operators.
`Operator` adds an autograd.Function: derivatives, forward mode, vmap, and the operator that traces
and exported programs record. `differentiable` (autograd.py) makes the Function too, where the
backward is an operator of csrc as well:

    def _outputs(input, out_dtype): ...     # the fake: what the results look like
    def _definition(input, weight): ...     # the results in torch's operators
    def _gradients(input, grad_mask): ...   # the fake of the backward

    _scale = differentiable("scale", _outputs, _definition, _gradients)

`_scale.run` then takes the arguments of `onepass::scale_forward`. Names, tensors and defaults are
read from the schemas. Functions of a declaration take the values that they need by the schema's
names, in any order; a name that the schema lacks is refused when the module is imported.

What a call runs must cost no more than if it were written by hand. So it is written out, once, from
templates: `print(_scale.source)`.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from onepass._mapping import refuse_mapped, run_each
from onepass._negative import refuse_where_written
from onepass._ops import decomposition, fake_checks, tracing
from onepass._ops.differentiation import applied, is_differentiated


class Raw:
    """`onepass::name`, an operator of csrc. Its fake runs its check first, which under vmap runs on
    every sample; an operator that writes into an argument is refused there.

    Args:
        fake: what the results look like, of the arguments by name.
        definition: the results in torch's operators, of the arguments by name.
        unless: the arguments with which exporters keep the operator.
        results: the names of results, where the schema has none.
    """

    all: dict[str, Raw] = {}

    def __init__(
        self,
        name: str,
        fake: Callable,
        definition: Callable | None = None,
        *,
        unless: Sequence[str] = (),
        results: Sequence[str] = (),
    ):
        self.name = name
        self.op = getattr(torch.ops.onepass, name).default
        self.check = getattr(torch.ops.onepass, f"{name}_check").default
        run_each(self.check)
        schema = self.op._schema
        self.arguments = [argument.name for argument in schema.arguments]
        self.tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
        self.flags = [name for name in self.arguments if name.startswith("save_")]
        self.constants = [a for a in self.arguments if a not in (*self.tensors, *self.flags)]
        self.defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.results = list(results) or [result.name or "output" for result in schema.returns]
        self.definition = None if definition is None else self.by_name(definition)
        if definition is not None:
            decomposition.register(self.op, self.definition, unless)
        if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
            refuse_where_written(self.op)
            refuse_mapped(self.op)
        torch.library.register_fake(f"onepass::{name}", self._checked(self.by_name(fake)))
        Raw.all[name] = self

    def __call__(self, *arguments):
        return self.op(*arguments)  # looked up here: tests replace it

    def by_name(self, function: Callable) -> Callable:
        """`function`, of some arguments by name, as one of all arguments in the schema's order. One
        with `**kwargs` takes all that are given."""
        taken = names_of(function, self.name, self.arguments)
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds

        @functools.wraps(function)
        def call(*args, **kwargs):
            given = dict(zip(self.arguments, args, strict=False)) | kwargs
            if takes_all:
                return function(**given)
            given = self.defaults | given
            return function(**{name: given[name] for name in taken})

        call.taken = taken
        return call

    def with_default(self, name: str) -> str:
        """An argument as it is written in a definition."""
        return f"{name}={self.defaults[name]!r}" if name in self.defaults else name

    def _checked(self, make: Callable) -> Callable:
        def fake(*args, **kwargs):
            if self.definition is not None:
                decomposition.offer(self.op)
            fake_checks.check(self.check, *args, **kwargs)
            return make(*args, **kwargs)

        return fake


def names_of(function: Callable, op: str, known: Iterable[str]) -> list[str]:
    """The names of a function's parameters, without a `**kwargs`.

    Raises:
        TypeError: one of them is not known.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    for name in names:
        if name not in known:
            raise TypeError(
                f"{op}: {function.__name__} must take some of {', '.join(known)}, got {name}"
            )
    return names


class Operator:
    """`onepass::name`, a forward with its autograd.Function: `run` calls one of them, or a trace
    records it.

    The Function gets the tensors, and the constants in one tuple: autograd inspects every argument.

    Args:
        name: of the operator in traces and exported programs.
        forward: the operator.
        function: an autograd.Function with `setup_context` and `backward`; its `forward` asks for
            all results that are saved.
        differentiated: the arguments that may require gradients.
        saved_if: arguments `save_...` that are constants of the Function instead, each with the
            expression that is its value.
    """

    def __init__(
        self,
        name: str,
        forward: Raw,
        function: type[torch.autograd.Function],
        differentiated: Sequence[str],
        saved_if: Mapping[str, str] | None = None,
    ):
        self.forward, self.function, saved_if = forward, function, saved_if or {}
        constants = [*forward.constants, *saved_if]

        def call(flag: str) -> str:
            flags = set(forward.flags) - set(saved_if)
            return ", ".join(flag if a in flags else a for a in forward.arguments)

        self.source = _CALLS.format(
            arguments=", ".join(forward.arguments),
            with_defaults=", ".join(map(forward.with_default, forward.arguments)),
            differentiated=", ".join(differentiated),
            given=", ".join([*forward.tensors, tuple_of(saved_if.get(c, c) for c in constants)]),
            inputs=", ".join([*forward.tensors, "constants"]),
            constants=tuple_of(constants),
            saving=call("True"),
            not_saving=call("False"),
        )
        calls = written(
            f"{name}_calls",
            self.source,
            forward_op=forward.op,
            definition=forward.definition,
            records=tracing.records,
            is_differentiated=is_differentiated,
        )
        function.generate_vmap_rule = True
        function.forward, function.formula = map(staticmethod, (calls.forward, calls.formula))
        calls.apply = applied(function)
        calls.traced = tracing.operator(name, forward.op, calls.in_trace)
        self.run, self.apply = calls.run, calls.apply


# A program omits trailing arguments that have their defaults.
_CALLS = """\
def run({arguments}):
    if records():
        return traced({arguments})
    if is_differentiated({differentiated}):
        return apply({given})
    return forward_op({arguments})


def in_trace({with_defaults}):
    if is_differentiated({differentiated}):
        return apply({given})
    return forward_op({arguments})


def forward({inputs}):
    {constants} = constants
    return forward_op({saving})


def formula({inputs}):
    {constants} = constants
    return definition({not_saving})
"""


def tuple_of(names: Iterable[str]) -> str:
    """The names as a tuple of Python."""
    return f"({''.join(f'{name}, ' for name in names).strip()})"


def written(name: str, source: str, **values: object) -> types.ModuleType:
    """A module made of a source that may use `values`. It is one so that torch's compiler finds the
    names; tracebacks show the source."""
    module = types.ModuleType(f"{__name__}.{name}")
    sys.modules[module.__name__] = module
    vars(module).update(values)
    file = f"<onepass {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), vars(module))
    return module
