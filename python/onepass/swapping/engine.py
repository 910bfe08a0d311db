"""`swap`, `unswap`, `swapped`: the options, and all or nothing."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from torch import nn

from onepass import _flops
from onepass._policy.precision import ATTRIBUTE, check_precision
from onepass.swapping import by_name, classes, matchers, notes
from onepass.swapping.changes import ABSENT, Change, Edit, Journal
from onepass.swapping.classes import is_swapped
from onepass.swapping.plan import NO_GAIN_HERE, Plan
from onepass.swapping.reasons import Reason
from onepass.swapping.report import Report, Restored
from onepass.swapping.restored import ATTACHED, keeps_its_class, unswapped
from onepass.swapping.sample import LEFT_OUT, Decision, keep_gains
from onepass.swapping.walk import Choice, Found, globs, strings, walk

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _all_or_nothing(work: Callable[Concatenate[Journal, Given], Result]) -> Callable[Given, Result]:
    """`work` with its own journal, which is undone if anything raises."""

    @functools.wraps(work)
    def call(*args: Given.args, **options: Given.kwargs) -> Result:
        journal = Journal()
        try:
            return work(journal, *args, **options)
        except BaseException:
            journal.undo()
            raise

    signature = inspect.signature(work)
    call.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return call


@_all_or_nothing
def swap(
    journal: Journal,
    model: nn.Module,
    *,
    kinds: Sequence[str] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    force: str | Sequence[str] | None = None,
    dry_run: bool = False,
    strict: bool = False,
    probe: bool = True,
    lazy_logits: bool = False,
    sample: object = None,
    choice: dict[str, object] | None = None,
    precision: str | None = None,
) -> Report:
    """Makes a model run on onepass's operators, in place.

    Modules change their class, and configs of transformers their attention's name; nothing else
    changes: parameters, hooks, state_dict keys, tied and shared modules, training flags stay the
    same objects. Swap before `torch.compile`, before `fully_shard`, before or after
    `DistributedDataParallel`. A whole model saved by `torch.save` needs onepass to load; a
    state_dict does not. Another call changes nothing that is already swapped.

    - Attention: torch's own modules; modules whose forward calls `F.scaled_dot_product_attention`
      (redirected while that forward runs, in its thread alone) or diffusers'
      `dispatch_attention_fn`; on a CPU modules that compute softmax(q k^T) v by hand, after a proof
      at their first call; modules of transformers that take attention by the name in their
      config, which becomes "onepass" for all modules that share the config
      (`onepass.integrations.transformers.attach` does that alone).
    - Linear layers, also as calls of `F.linear` in modules that hold the weight; losses, as calls
      of `F.cross_entropy` in language models and as the `loss_function` of transformers' models.
    - Group norms with silu after them (in an nn.Sequential, and in diffusers' ResnetBlock2D, which
      is tested numerically first), and group norms alone in 16 bits.
    - Norms of other libraries, gated feed-forward blocks, and functions with arguments cos and sin
      that rotate query and key: found by their parts, tested numerically. A forward that calls such
      a function is replaced by a copy that calls onepass's.
    - Causal convolutions, Mamba's selective scans and their steps of decoding in models of
      transformers, on a CPU: functions that stand in for those of the packages causal-conv1d and
      mamba-ssm, tested numerically, and replaced in the same way.

    Args:
        model: any module; it may itself be a norm.
        kinds: which families to swap, of "norm", "attention", "dropout", "mlp", "rotary", "scan",
            "linear" and "loss"; None: all.
            Linear layers (transformers' Conv1D, and modules that call F.linear) are swapped where
            torch is slow at their products: on a CPU in bfloat16 without AVX-512, in float16, and
            in float32 if it is AMD's. The others keep their class, which a note says, or, if kinds
            holds "linear", the list of skipped modules. The projections of nn.MultiheadAttention
            belong to attention.
        include, exclude: globs on fully qualified names (`*.mlp.*`); exclude wins. A module shared
            under several names is included by any and excluded by any of them.
        filter_fn: called last, `filter_fn(module, name)`; False keeps the module unchanged.
        force: globs on names of modules that you vouch for: norms that the probe refuses are
            computed by the nearest formula; subclasses of torch's dropout and attention by the
            forward of torch's class; models for which transformers supports only eager attention by
            ours. The report names them; let its `verify` compare.
        dry_run: report the planned changes, change nothing.
        strict: raise if a candidate is refused, or if an explicitly passed kind matches no module.
            Linear layers, group norms and scans that gain nothing count as matched.
        probe: test norms, feed-forward blocks, rotating functions and scans of other libraries
            numerically and swap those that pass. False skips all that are not forced.
        lazy_logits: models of transformers compute the loss of a training step without their
            logits, by `onepass.functional.linear_cross_entropy`. `output.logits` is then a tensor
            that is computed when it is read; once the weights have changed (after
            `optimizer.step()`), reading it raises. With kind "loss".
        sample: a batch for the model, as `Report.verify` takes one. What would be swapped is
            measured on it, for the time of about 20 steps, a second at least, as the model is now:
            in eval mode its forward, in train mode forward and backward too. Only modules that gain
            by more than the 95 % interval are
            swapped, those of one class and shape together; the others are listed as skipped with
            their figure. What a busy machine leaves open is measured again, then listed as too
            noisy to tell. `Report.choice` keeps the outcome. Forward hooks run; the model's state
            and torch's random state are restored. Needs numpy (`onepass[tools]`).
        choice: `Report.choice` of an earlier swap, of this model or of a copy, in this process or
            another, also read back from JSON. What that swap took is swapped, by the names of
            modules and kinds, and nothing else, at the precision that each had; nothing is
            measured.
        precision: of the products of float32 in the swapped attention and linear layers of this
            model, as of `onepass.functional.linear`: "medium" rounds their factors to bfloat16 on a
            CPU with dot products of it, forward and backward, and swaps all linear layers there;
            "highest" and "high" keep float32 whatever torch's setting. "int8" quantises them to 8
            bits in linear layers, for the output and for the input's gradient (SwitchBack), but
            not in the first and the last of the model and in those that share an embedding's
            weight, unless `include` names them; those stay in float32, and so do calls too small to
            gain, which depends on rows and threads. Sums, weights, gradients and all else stay in
            float32. None: that of choice; without one what an earlier call gave, at first torch's
            setting. Kept by copies and `torch.save`, taken back by `unswap`; a call for a model
            that is swapped already changes it, and a sample is measured at it.
            `Report.verify` says how far the results are from float32's.

    Returns:
        Report: not the model.

    Raises:
        TypeError: model is not a module, a glob no string, or choice none of a report.
        ValueError: kinds holds an unknown name, or not "loss" with lazy_logits; sample and choice
            are both given; precision is none of these, or another than that of choice.
        RuntimeError: under strict; the message names each refused module. If anything raises, the
            model is as it was.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        >>> report = onepass.swap(model, kinds="norm")
        >>> report.swapped[0]["to"]
        'onepass.nn.LayerNorm'
        >>> report.verify(torch.randn(8, 64)).ok
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap: model must be a torch.nn.Module, got {type(model).__name__}")
    flags = {"dry_run": dry_run, "strict": strict, "probe": probe, "lazy_logits": lazy_logits}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"swap: {name} must be True or False, got {type(flag).__name__}")
    check_precision("swap", precision)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"swap: filter_fn must be callable, got {type(filter_fn).__name__}")
    asked = () if kinds is None else strings("kinds", "names", kinds)
    for kind in asked:
        if kind not in matchers.KINDS:
            raise ValueError(f"swap: kinds must be of {matchers.KINDS}, got {kind!r}")
    if lazy_logits and asked and "loss" not in asked:
        raise ValueError(f"swap: kinds must hold 'loss' for lazy_logits, got {asked!r}")
    if sample is not None and choice is not None:
        raise ValueError("swap: choice must be None beside sample, got both")
    decision = precisions = None
    if choice is not None:
        decision = Decision.from_dict(choice)
        precision, precisions = decision.precision_beside(precision), decision.precisions
    options = Choice(
        globs("include", include), globs("exclude", exclude), globs("force", force), filter_fn
    )
    _flops.register()
    kinds = matchers.KINDS if kinds is None else asked
    plan = Plan(
        model, kinds, options, probe, dry_run, "linear" in asked, lazy_logits,
        precision=precision, precisions=precisions,
    )  # fmt: skip
    report = plan.report
    if strict:
        _check_strict(asked, plan)
    measured = [] if sample is None else keep_gains(plan, model, sample)
    if decision is not None:
        measured = decision.repeat(plan)
    report._decision = Decision.of(plan, measured)
    report.notes = measured + options.without_a_match(plan.found) + notes.notes(model, plan)
    report._changes += [
        Change(change.module, type(change.module), change.cls) for change in plan.classes
    ]
    if not dry_run:
        journal.make(plan.edits())
        for module, kind, reason in plan.kinds_left_out:
            LEFT_OUT.setdefault(module, {})[kind] = reason
    return report


@_all_or_nothing
def unswap(journal: Journal, model: nn.Module) -> list[str]:
    """Gives every swapped module of a model its original class back, and configs of transformers
    their former attention's name. What `onepass.integrations.transformers.attach` did stays.

    Returns:
        A list of the fully qualified names of the modules that changed; prints as one line.

    Raises:
        TypeError: model is not a module.
        RuntimeError: the model was sharded or parametrized after the swap: its modules now have
            other classes. If anything raises, the model is as it was.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        >>> report = onepass.swap(model, kinds="norm")
        >>> print(onepass.unswap(model))
        onepass.unswap: restored 1 module: 1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unswap: model must be a torch.nn.Module, got {type(model).__name__}")
    found = walk(model)
    swapped = [item for item in found if isinstance(item.module, classes.Swapped)]
    check_restorable([item for item in swapped if not keeps_its_class(item.module)])
    edits, named = by_name.plan_unswap(model, found)
    of_classes = [
        Edit(item.module, "__class__", unswapped(item.module))
        for item in swapped
        if not keeps_its_class(item.module)
    ]
    of_classes += [
        Edit(item.module, classes.QUANTIZED_LAYER, ABSENT)
        for item in swapped
        if classes.QUANTIZED_LAYER in vars(item.module)
    ]
    of_precision = [
        Edit(item.module, ATTRIBUTE, ABSENT) for item in found if ATTRIBUTE in vars(item.module)
    ]
    both = [m for item in swapped if vars(m := item.module).get(ATTACHED) == "both"]
    edits += of_classes + [Edit(module, ATTACHED, "attach") for module in both] + of_precision
    changed = {id(edit.owner) for edit in of_classes} | {id(item.module) for item in named}
    names = Restored(item.names[0] for item in found if id(item.module) in changed)
    journal.make(edits)
    for item in found:
        LEFT_OUT.pop(item.module, None)
    return names


@contextlib.contextmanager
def swapped(model: nn.Module, **options) -> Iterator[Report]:
    """`with swapped(model) as report:` swaps for the block, and restores the model at its end.

    Takes `swap`'s options. Modules that were swapped before stay swapped.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        >>> with onepass.swapped(model, kinds="norm") as report:
        ...     y = model(torch.randn(8, 64))
        >>> type(model[1]) is torch.nn.LayerNorm
        True
    """
    journal = Journal()
    try:
        try:
            yield swap.__wrapped__(journal, model, **options)
        finally:
            _check_end(journal, model)
            journal.undo()
    finally:
        journal.undo()  # an interrupt may have prevented the first call


def begin(model: nn.Module, **options) -> tuple[Report, Callable[[], None]]:
    """`swapped` without a block: returns the report, and a function that restores.

    Raises:
        RuntimeError: from the function, as `unswap`: the modules now have other classes, and keep
            them.
    """
    journal = Journal()
    try:
        report = swap.__wrapped__(journal, model, **options)
    except BaseException:
        journal.undo()
        raise

    def end() -> None:
        _check_end(journal, model)
        journal.undo()

    return report, end


def _check_end(journal: Journal, model: nn.Module) -> None:
    """Raises, and keeps the edits, if their modules now have other classes."""
    modules = journal.owners("__class__")
    found = {id(item.module): item for item in walk(model)} if modules else {}
    try:
        check_restorable(
            [
                found.get(id(module)) or Found(module, ["(removed)"], [])
                for module in modules
                if isinstance(module, classes.Swapped)
            ]
        )
    except RuntimeError:
        journal.forget()
        raise


def check_restorable(found: list[Found], op: str = "unswap") -> None:
    """Raises if one of these swapped modules was sharded or parametrized since."""
    for module, names, wrapped in found:
        if any(reason.kind is Reason.SHARDED for reason in wrapped):
            got = "which is sharded"
        elif not is_swapped(type(module)):
            got = f"whose class became {type(module).__name__} after the swap"
        else:
            continue
        raise RuntimeError(
            f"{op}: model must have the classes that {_GIVEN[op]} gave it, got {names[0]!r}, {got}"
        )


_GIVEN = {"unswap": "swap", "detach": "attach"}


def _check_strict(kinds: tuple[str, ...], plan: Plan) -> None:
    if plan.refused:
        got = "; ".join(
            f"{entry['name']!r} ({entry['type'].rpartition('.')[2]}): {entry['reason']}"
            for entry in plan.refused
        )
        raise RuntimeError(f"swap: model must hold no refused candidate under strict, got {got}")
    matched = {entry["kind"] for entry in plan.report.swapped}
    if plan.as_fast:
        matched.add("linear")
    reasons = {entry["reason"].kind for entry in plan.report.skipped}
    matched |= {kind for reason, kind in NO_GAIN_HERE.items() if reason in reasons}
    for kind in kinds:
        if kind not in matched:
            raise RuntimeError(
                f"swap: kinds must each match a module under strict, got no match for {kind!r}"
            )
