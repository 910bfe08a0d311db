"""One training step, run for its memory: forward, backward, and the steps of any optimizers."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
)

import onepass
from onepass._batch import call
from onepass._ops import loss as loss_ops
from onepass.estimating.result import Estimate
from onepass.optim import muon
from onepass.optim.states import StateOptimizer
from onepass.optim.step import Step as OptimizerStep
from onepass.swapping import by_hand
from onepass.tools.errors import BadInput, BadModel
from onepass.tools.estimate import optimizers
from onepass.tools.estimate.fakes import tensors_of, without_logs
from onepass.tools.estimate.subject import Subject
from onepass.tools.estimate.timeline import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    LOSS,
    UPDATE,
    Peak,
    Timeline,
)
from onepass.tools.user_model import check_loss, objective_of, place_of, telling_errors, told_as

AS_WRITTEN = "attention by hand is counted as it is written, not as one call of attention"


@dataclass(frozen=True)
class Options:
    """Changes of the given model."""

    kinds: tuple[str, ...] | None = ()  # of the swap; None: all that pay; (): stock
    dtype: torch.dtype | None = None  # parameters are cast to it; None: unchanged
    autocast: bool = False  # to bfloat16
    checkpointing: bool = False
    inplace_loss: bool = False
    lazy_logits: bool = False  # as of `onepass.swap`
    rows: int | None = None  # of the batch; None: unchanged


@dataclass(frozen=True)
class Kept:
    """Activations that the forward of some modules keeps for the backward."""

    name: str  # with * for numbers
    type: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Update:
    """An optimizer: the bytes of its states, and the most temporary bytes of its step."""

    state_bytes: int
    temporary: int


@dataclass(frozen=True)
class Step:
    """The memory of a step, in bytes. Peaks include all tensors except the optimizer's states."""

    rows: int | None
    parameter_count: int
    parameters: int
    others: int  # buffers and batch
    gradients: int
    kept: list[Kept]  # by modules, the largest first
    activations: int  # their sum
    saved: int  # the part of activations and batch that autograd saved
    forward: Peak
    backward: Peak
    updates: dict[str, Update]
    swapped: Counter[str]  # modules by kind
    note: str = ""  # of what the figures do not show

    @property
    def loss(self) -> int:
        return sum(kept.nbytes for kept in self.kept if kept.name == LOSS)

    def peaks(self, optimizer: str) -> dict[str, int]:
        """The most bytes at once in each phase, with this optimizer."""
        update = self.updates[optimizer]
        there = self.parameters + self.others + self.gradients
        return {
            FORWARD: self.forward.total + update.state_bytes,
            BACKWARD: self.backward.total + update.state_bytes,
            UPDATE: there + update.state_bytes + update.temporary,
        }

    def peak(self, optimizer: str) -> int:
        return max(self.peaks(optimizer).values())


@dataclass
class Trace:
    """Events and kept tensors of a run's forward and backward, beside its result."""

    events: dict[str, list[tuple[str, dict[str, int]]]] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)  # in the order of the forward


def run(
    subject: Subject,
    options: Options,
    makes: Mapping[str, optimizers.Make],
    trace: Trace | None = None,
) -> Step:
    """Runs a step.

    Args:
        makes: the optimizers whose steps are run, by name.
        trace: is filled.

    Raises:
        BadInput: the model cannot be run like that; the message says why.
    """
    model = subject.model(options.dtype)
    swapped: Counter[str] = Counter()
    if options.kinds is None or options.kinds:
        report = onepass.swap(model, kinds=options.kinds, lazy_logits=options.lazy_logits)
        swapped = Counter(entry["kind"] for entry in report.swapped)
    if options.checkpointing:
        checkpoint(model)
    batch = subject.batch_of(options.rows, options.dtype)
    with contextlib.ExitStack() as ending:
        ending.enter_context(torch.random.fork_rng(devices=()))
        ending.enter_context(without_logs())
        ending.enter_context(subject.in_force(model))
        if options.lazy_logits and subject.fake:
            from onepass.integrations.transformers import lazy_logits

            ending.enter_context(lazy_logits.also_of(FakeTensor))
        if options.inplace_loss:
            ending.enter_context(_inplace_losses())
        return _run(subject, model, batch, options, makes, swapped, trace)


def _run(subject, model, batch, options, makes, swapped, trace) -> Step:
    timeline = Timeline(subject.fake, model)
    if trace:
        timeline.events = trace.events
    weights = list(model.parameters())
    trained = [parameter for parameter in weights if parameter.requires_grad]
    if not trained:
        raise BadModel("must have a parameter that requires a gradient")
    timeline.begin_with((*model.buffers(), *tensors_of(batch)), weights)
    there = timeline.total
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p: timeline.is_gradient(p.grad))
        for parameter in trained
    ]
    with torch.enable_grad(), contextlib.ExitStack() as ending:
        ending.enter_context(telling_errors(model, batch))
        ending.enter_context(_saying_what_is_read())
        ending.enter_context(timeline.watching())
        timeline.enter(FORWARD)
        with timeline.saving():
            loss = _loss(model, batch, options.autocast)
        kept, saved = _kept(timeline, loss, model)
        if trace:
            trace.kept = kept
        timeline.enter(BACKWARD)
        loss.backward()
        del loss
        timeline.events = None
        timeline.number_read = 1.0 if subject.fake else None
        for hook in hooks:
            hook.remove()
        gradients = timeline.live[GRADIENTS]
        with _telling_of_the_optimizer():
            updates = {
                name: _update(timeline, make, trained, bool(subject.fake))
                for name, make in makes.items()
            }
    parameters = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in weights}
    for parameter in trained:
        parameter.grad = None
    return Step(
        rows=options.rows or subject.rows,
        parameter_count=sum(p.numel() for p in weights),
        parameters=sum(parameters.values()),
        others=there - sum(parameters.values()),
        gradients=gradients,
        kept=largest_first(kept),
        activations=sum(item.nbytes for item in kept),
        saved=saved,
        forward=timeline.peaks[FORWARD],
        backward=timeline.peaks[BACKWARD],
        updates=updates,
        swapped=swapped,
        note=_note(model),
    )


def _note(model: nn.Module) -> str:
    """Without data there is no proof that attention by hand is one call."""
    is_written = any(by_hand.fate(m).reason == by_hand.NO_DATA for m in model.modules())
    return AS_WRITTEN if is_written else ""


def _loss(model: nn.Module, batch, autocast: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = objective_of(call(model, batch)).loss
    check_loss(loss)
    return loss


def _kept(timeline: Timeline, loss: Tensor, model: nn.Module) -> tuple[list[Kept], int]:
    """Tensors that the forward made and kept, by modules, in the order of the forward; the bytes
    that autograd saved."""
    loss_key = loss.untyped_storage()._cdata
    types = {name: type(module) for name, module in model.named_modules()}
    sizes: Counter[str] = Counter()
    owners: dict[str, set[str]] = {}
    for key, block in timeline.made_in(FORWARD).items():
        if key == loss_key:
            continue
        owner = block.owner
        if owner == "" and block.order > timeline.last_module_end:
            owner = LOSS
        if isinstance(types.get(owner), type) and issubclass(types[owner], nn.modules.loss._Loss):
            owner = LOSS
        name = re.sub(r"\b\d+\b", "*", owner)
        sizes[name] += block.nbytes
        owners.setdefault(name, set()).add(owner)
    kept = []
    for name, nbytes in sizes.items():
        kind = types.get(next(iter(owners[name])))
        kept.append(Kept(name, kind.__name__ if kind else "", len(owners[name]), nbytes))
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved = timeline.saved - weights
    return kept, sum(b.nbytes for key, b in timeline.blocks.items() if key in saved)


def largest_first(kept: list[Kept]) -> list[Kept]:
    return sorted(kept, key=lambda item: -item.nbytes)


def updates(
    subject: Subject, dtype: torch.dtype | None, makes: Mapping[str, optimizers.Make]
) -> dict[str, Update]:
    """The optimizers' parts of :func:`run`, without its forward and backward."""
    model = subject.model(dtype)
    with torch.random.fork_rng(devices=()), subject.in_force(model):
        timeline = Timeline(subject.fake, model)
        weights = list(model.parameters())
        trained = [parameter for parameter in weights if parameter.requires_grad]
        with timeline.watching():
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            timeline.begin_with([parameter.grad for parameter in trained], weights)
            timeline.number_read = 1.0
            found = {name: _update(timeline, make, trained, True) for name, make in makes.items()}
        for parameter in trained:
            parameter.grad = None
    return found


def _update(timeline: Timeline, make: optimizers.Make, trained, is_fake: bool) -> Update:
    """The second step of an optimizer: the first makes its states."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*are known to stall")  # nothing is trained
        optimizer = make(trained)
    if isinstance(optimizer, StateOptimizer) and is_fake:
        # Its states are in its own memory; except updates that replace gradients, a step makes no
        # tensors.
        temporary = 0
        if isinstance(optimizer, onepass.optim.Muon):
            temporary = _updates_of(timeline, optimizer)
        return Update(optimizers.state_bytes(optimizer), temporary)
    before = timeline.total
    timeline.enter(UPDATE)
    optimizer.step()
    state = timeline.total - before
    timeline.enter(UPDATE)
    optimizer.step()
    return Update(state, timeline.peaks[UPDATE].total - timeline.total)


@torch.no_grad()
def _updates_of(timeline: Timeline, optimizer: onepass.optim.Muon) -> int:
    """The most temporary bytes of a step, measured by making its updates."""
    # From the second iteration on, each takes the memory of the one before.
    groups = [
        {**g, "ns_steps": min(g["ns_steps"], 2)}
        for g in optimizer.param_groups
        if g.get("use_muon", True)
    ]
    pairs = [(p, g) for g in groups for p in g["params"] if p.grad is not None]
    if not pairs:
        return 0
    for param, group in pairs:
        dtype = optimizer._moment_dtype(param, group)
        optimizer.state[param]["momentum_buffer"] = torch.empty_like(param, dtype=dtype)
    before = timeline.total
    timeline.enter(UPDATE)
    params, of_each = zip(*pairs, strict=True)
    with _alike_once(timeline):
        optimizer._updates(OptimizerStep(optimizer), params, of_each, [p.grad for p in params])
    return timeline.peaks[UPDATE].total - before


@contextlib.contextmanager
def _alike_once(timeline: Timeline) -> Iterator[None]:
    """Muon iterates matrices of one shape once. For others like them a block of as many bytes as
    were alive at most is made and released, and then the result."""
    original = muon._iterated
    known: dict[tuple, tuple] = {}

    def iterated(kind, sources, factor):
        layouts = tuple((s.momentum.stride(), s.gradient.stride(), s.weight) for s in sources)
        if (kind, layouts) in known:
            most, shape, strides, dtype = known[kind, layouts]
            torch.empty(most, dtype=torch.uint8, device=kind.device)
            return torch.empty_strided(shape, strides, dtype=dtype, device=kind.device)
        so_far, before = timeline.peaks[UPDATE], timeline.total
        timeline.enter(UPDATE)
        result = original(kind, sources, factor)
        most = timeline.peaks[UPDATE].total - before
        if so_far.total > timeline.peaks[UPDATE].total:
            timeline.peaks[UPDATE] = so_far
        known[kind, layouts] = most, result.shape, result.stride(), result.dtype
        return result

    muon._iterated = iterated
    try:
        yield
    finally:
        muon._iterated = original


@contextlib.contextmanager
def _inplace_losses() -> Iterator[None]:
    """Makes onepass's cross entropy write its gradient over the logits, by `inplace_backward`."""
    original = loss_ops.cross_entropy

    @functools.wraps(original)
    def inplace(*args, **named):
        return original(*args[:8], **(named | {"inplace": True}))

    loss_ops.cross_entropy = inplace
    try:
        yield
    finally:
        loss_ops.cross_entropy = original


def checkpoint(model: nn.Module) -> None:
    """Recomputes each layer in the backward: by transformers' and diffusers' own switch, else each
    element of the outermost lists of modules of one class.

    Raises:
        BadInput: there is no such list.
    """
    for module in model.modules():
        if getattr(module, "supports_gradient_checkpointing", False):
            # By its name from version 5.23 on, or the one before.
            enable = getattr(module, "activation_checkpointing_enable", None)
            enable = enable or module.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            return
        if getattr(module, "_supports_gradient_checkpointing", False):
            module.enable_gradient_checkpointing()
            return
    layers = _layers(model)
    if not layers:
        raise BadModel("must hold a list of layers of one class for checkpointing")
    for layer in layers:
        layer.forward = functools.partial(
            torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False
        )


def _layers(module: nn.Module) -> list[nn.Module]:
    children = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1:
        if len({type(child) for child in children}) == 1 and any(children[0].children()):
            return children
    return [layer for child in children for layer in _layers(child)]


@contextlib.contextmanager
def _telling_of_the_optimizer() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        rule = "optimizer must make one of the model's parameters, which can make a step"
        raise BadInput(f"{rule}, got {told_as(error)}") from error


@contextlib.contextmanager
def _saying_what_is_read() -> Iterator[None]:
    """Turns errors into ones that name the line which reads values that were not computed."""
    try:
        yield
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    ) as error:
        raise _reading(error) from error
    except RuntimeError as error:
        if "numpy" in str(error) or "data_ptr" in str(error) or "data pointer" in str(error):
            raise _reading(error) from error
        raise


def _reading(error: Exception) -> BadModel:
    place = place_of(error) or told_as(error)
    return BadModel(f"must not read data where none is computed, got {place}", runs_with_data=True)


def estimate_of(step: Step, optimizer: str) -> Estimate:
    """The result of a step with one of its optimizers."""
    peaks, state = step.peaks(optimizer), step.updates[optimizer].state_bytes
    phase = max(peaks, key=peaks.__getitem__)
    if phase == UPDATE:
        operator, activations, gradients = "", 0, step.gradients
    else:
        found = step.forward if phase == FORWARD else step.backward
        operator, gradients = found.at, found.parts.get(GRADIENTS, 0)
        activations = min(step.activations, found.parts.get(FORWARD, 0))
    at_peak = {
        "parameters": step.parameters,
        "gradients": gradients,
        "optimizer state": state,
        "buffers, batch": step.others,
        "activations": activations,
    }
    at_peak["temporary"] = peaks[phase] - sum(at_peak.values())
    return Estimate(
        parameter_count=step.parameter_count,
        parameters=step.parameters,
        others=step.others,
        gradients=step.gradients,
        optimizer_state=state,
        activations=step.activations,
        loss=step.loss,
        saved=step.saved,
        temporary=at_peak["temporary"],
        peak=peaks[phase],
        peak_phase=phase,
        peak_operator=operator,
        peaks=peaks,
        at_peak=at_peak,
        modules=[
            {"name": kept.name, "type": kept.type, "count": kept.count, "bytes": kept.nbytes}
            for kept in step.kept
        ],
        note=f"{step.note}: real=True counts the call" if step.note else "",
    )
