"""`onepass.explain`: which kernels a call runs and why, from the plans that the kernels followed.

The call is made, and the printed lines are the record of the very plans that ran, so they cannot
be wrong. For a module, stock modules that onepass could have replaced are named too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from onepass import _C, _dispatch_log
from onepass._batch import arguments, named_in_errors
from onepass._policy.precision import precision_of, sentence

_NOT_SWAPPED = "not swapped: onepass.swap(model)"


@dataclass(frozen=True)
class Explanation:
    """The calls of a forward: those that ran through onepass, and those that did not.

    Attributes:
        calls: one dict per distinct call: op, arguments, kernel, level, threads, rows_per_tile,
            splits, workspace_bytes, reason, and `count`, how often it was made.
        level_reason: why this CPU level and no other.
        not_accelerated: {"name", "type", "reason"} of modules that stayed stock.
        precision: what was asked of float32 products beside torch's default; or empty.

    Examples:
        >>> explanation = onepass.explain(onepass.nn.RMSNorm(512), torch.randn(4, 512))
        >>> explanation.calls[0]["kernel"]
        'norm_forward_kernel'
    """

    calls: list[dict]
    level_reason: str
    not_accelerated: list[dict] = field(default_factory=list)
    precision: str = ""

    def to_dict(self) -> dict:
        return {
            "calls": self.calls,
            "level_reason": self.level_reason,
            "not_accelerated": self.not_accelerated,
            "precision": self.precision,
        }

    def __str__(self) -> str:
        """A line for each call, and for the modules that stayed stock; folded in a terminal.

        Modules whose names differ in numbers alone share a line.
        """
        from onepass.swapping.texts import folded, rows, terminal_width

        lines = [f"{call['count']} x {_dispatch_log.line(call)}" for call in self.calls]
        lines = lines or ["no onepass operator ran"]
        lines += [self.level_reason] + [self.precision] * bool(self.precision)
        stock = rows(self.not_accelerated, ("name", "count", "type", "reason"))
        lines += [f"stock: {name} ({count} x {kind}): {why}" for name, count, kind, why in stock]
        width = terminal_width()
        return "\n".join(folded(line, width) for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from onepass.swapping.texts import preformatted

        return preformatted(str(self))


def explain(fn_or_module: Callable, *args, **kwargs) -> Explanation:
    """Runs ``fn_or_module(*args, **kwargs)`` and lists the onepass kernels that ran, with reasons.

    A backward inside the function is recorded too. The result of the call is dropped; gradients and
    buffers change as the call changes them. A module takes a single argument as a batch, as
    `onepass.swapping.Report.verify` does: a dict is passed as keywords, a tuple or list item by
    item, unless forward requires one argument alone and cannot be called like that.

    Returns:
        An Explanation, which prints as text and as HTML and has `to_dict()`.

    Examples:
        >>> norm = onepass.nn.RMSNorm(512)
        >>> print(onepass.explain(norm, torch.randn(4, 512)))  # doctest: +ELLIPSIS
        1 x rms_norm (4 x 512, ...): norm_forward_kernel, ...
    """
    if not callable(fn_or_module):
        kind = type(fn_or_module).__name__
        raise TypeError(f"explain: fn_or_module must be callable, got {kind}")
    is_module = isinstance(fn_or_module, torch.nn.Module)
    if is_module and len(args) == 1 and not kwargs:
        args, kwargs = arguments(fn_or_module, args[0])
    telling = named_in_errors("explain", fn_or_module, args, kwargs) if is_module else nullcontext()
    with telling, _dispatch_log.record() as records:
        fn_or_module(*args, **kwargs)
    counts = Counter(tuple(record.items()) for record in records)
    calls = [{**dict(items), "count": count} for items, count in counts.items()]
    stock = _stock_modules(fn_or_module) if is_module else []
    own = {precision_of(part) for part in fn_or_module.modules()} if is_module else {None}
    return Explanation(calls, _level_reason(), stock, sentence(own))


def _level_reason() -> str:
    level, supported = _C.cpu_level(), _C.cpu_levels()
    above = supported[supported.index(level) + 1 :]
    if above:
        return f"CPU level {level}: ONEPASS_CPU_ISA asks for it; the machine has {', '.join(above)}"
    built = _C.build_info()["cpu_levels"].split(", ")
    missing = built[built.index(level) + 1 :]
    if missing:
        return f"CPU level {level}: the highest here; this CPU lacks {', '.join(missing)}"
    return f"CPU level {level}: the highest that there is"


def _stock_modules(module: torch.nn.Module) -> list[dict]:
    """The modules that a swap would replace, or would have replaced before torch.compile, and that
    are still stock; and those whose compiled code is."""
    from onepass.swapping import by_hand, matchers
    from onepass.swapping.plan import Plan
    from onepass.swapping.sample import LEFT_OUT
    from onepass.swapping.walk import COMPILERS, Choice, walk

    options = Choice(None, None, None, None)
    plan = Plan(module, matchers.KINDS, options, True, True, False, False, into_compiled=True)
    compiled = {
        item.names[0]
        for item in walk(module)
        if any(reason.kind in COMPILERS for reason in item.wrapped)
    }
    found, would = plan.report.to_dict(), []
    for entry in plan.report.swapped:
        name, kind = entry["name"], entry["kind"]
        part, reason = module.get_submodule(name), None
        if (name, kind) not in plan.report._earlier:
            advice = _NOT_SWAPPED + " before torch.compile" * (name in compiled)
            reason = LEFT_OUT.get(part, {}).get(kind, advice)
        elif kind == "attention" and name in compiled and by_hand.is_lost_in_graphs(part):
            reason = by_hand.IN_COMPILED
        elif kind == "attention":
            reason = by_hand.left_alone(part)
        if reason:
            would.append({"name": name, "type": entry["from"], "reason": reason})
    return [*would, *found["skipped"], *found["unknown"]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from onepass.tools.user_model import MODEL_HELP

    parser.add_argument(
        "--model",
        required=True,
        metavar="PACKAGE.MODULE:FUNCTION",
        help=MODEL_HELP,
    )
    parser.add_argument("--as-it-is", action="store_true", help="do not swap the model first")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(args: argparse.Namespace) -> int:
    from onepass.swapping import swap
    from onepass.tools.errors import BadInput
    from onepass.tools.user_model import batch_of, load_user_model, telling_errors

    try:
        model, batch = load_user_model(args.model)
        batch = batch_of(batch, 0)
        if not args.as_it_is:
            swap(model)
        with telling_errors(model, batch):
            explanation = explain(model, batch)
    except BadInput as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(json.dumps(explanation.to_dict(), indent=1) if args.json else explanation)
    return 0
