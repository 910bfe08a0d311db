"""`Report.verify`: stock against swapped on the user's own batch.

Both run in the model itself, whose classes are set back and forth, in the mode that it is in.
:mod:`onepass.swapping.masks` gives stock the dropout of the swapped form; where it cannot, both
run in eval mode. Gradients are taken with `torch.autograd.grad`, so that no `.grad` is touched.
Each is compared with a copy of the stock model in float64, in which norms that always compute in
float32 are replaced by their formula. If there can be no such copy, stock with its parameters moved
by one rounding shows the effect of rounding alone on this model.

Calls that are too small to gain run torch's own kernels. So where there are any, the swapped model
runs a second time, as it would run a larger batch, and both runs decide.

Bounds are those of :mod:`onepass.swapping.verification`. If all gradients are multiples of one
number (a contrastive loss, CTC), one draw is not enough for any of them. So before tensors are
called different, stock's error is drawn again with parameters that are one rounding away, and the
largest counts. For tensors that still exceed it, both are drawn together, and the medians must keep
the rule: a defect shows in every draw.

Products of float32 are compared in float32. Where torch's setting or the model's precision rounds
their factors to bfloat16, or quantises them, one more run tells how far that is from float32.

Rows of padding, by the batch's attention mask, count if the loss depends on them: stock's eager
attention averages over everything there, others give zeros.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import types
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onepass import _dispatch_log
from onepass._batch import arguments, named_in_errors, takes
from onepass._ops.norm import NormKind
from onepass._policy import small_calls
from onepass._policy.precision import ATTRIBUTE, changes_factors, precision_of
from onepass.reference import norm as reference
from onepass.swapping.changes import ABSENT, Change, Edit, in_force
from onepass.swapping.classes import ForeignNormForward
from onepass.swapping.foreign import eps_of as foreign_eps
from onepass.swapping.kernels import Kernels, free_memory
from onepass.swapping.masks import Masks, Unpaired
from onepass.swapping.providers import MODELS, imported
from onepass.swapping.runs import Run, distances, run
from onepass.swapping.undisturbed import State, uncompiled
from onepass.swapping.verification import (
    CallCounts,
    Deviation,
    Rounding,
    Verification,
    all_close,
    deviations_of,
    distance,
    is_gradient,
    largest_of,
)

# Of stock's error. One draw called 14 of 48 CLIPs and wav2vec2s different, whose swap was right.
_MOST_DRAWS = 6
# Draws of both, for tensors that exceed all of those; fewer if the medians are this far off.
_FEWEST_PAIRS, _MOST_PAIRS = 3, 11
_HOPELESS = 4.0


def verify(
    report, batch: tuple, loss_fn: Callable | None, named: dict[str, object]
) -> Verification:
    """See `onepass.swapping.Report.verify`."""
    model = report._model
    if report.dry_run:
        raise RuntimeError("verify: the report must come from a swap, got a dry run")
    if model is None:
        raise RuntimeError("verify: the report must be swap's own, got a copy, which has no model")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise RuntimeError("verify: model must have data, got tensors on the meta device")
    changes = changes_of(report)
    args, kwargs = arguments(model, batch[0]) if len(batch) == 1 and not named else (batch, named)
    if loss_fn is None and isinstance(batch[-1] if batch else None, types.FunctionType):
        if not takes(model, args, kwargs):
            raise RuntimeError(
                "verify: loss_fn must be given by its name, got a function by position"
            )
    state = State(model, (change.module for change in changes))
    pair = _Pair(model, (*args, kwargs), loss_fn, changes, report._named)
    with named_in_errors("verify", model, args, kwargs):
        return state.around(pair.both_verdicts)


@contextlib.contextmanager
def _products_in_float32(model: nn.Module) -> Iterator[None]:
    """Compares float32 models in float32: where torch's global setting allows products in bfloat16,
    torch's and ours round the factors of different calls, as the user said they may."""
    own = [module for module in model.modules() if ATTRIBUTE in vars(module)]
    with in_force([Edit(module, ATTRIBUTE, ABSENT) for module in own]), _torchs_in_float32():
        yield


@contextlib.contextmanager
def _torchs_in_float32() -> Iterator[None]:
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    if before != "bf16":
        yield
        return
    try:
        setting.fp32_precision = "ieee"
        yield
    finally:
        setting.fp32_precision = before


class _Pair:
    """One model in both forms, and stock's copy in float64 if possible."""

    def __init__(
        self,
        model: nn.Module,
        batch: tuple,
        loss_fn: Callable | None,
        changes: list[Change],
        named: list[Edit],
    ):
        self.model, self.batch, self.loss_fn, self.changes = model, batch, loss_fn, changes
        self.swapping = [Edit(change.module, "__class__", change.swapped) for change in changes]
        self.swapping += named  # modules that take onepass's attention by name
        flags = [module.training for module in model.modules()]
        self.flags = flags if any(flags) else None  # None: eval mode
        self.masks: Masks | None = None  # of dropout; None in eval mode
        self.dropout_off = ""  # why it is off in a model that is in train mode
        self.double: nn.Module | None = None
        self.known: tuple | None = None  # runs of stock, and the calls of dropout that they had

    def both_verdicts(self) -> Verification:
        """The verdict on the swap, with all products in float32, and the effect of rounding factors
        if the model's precision, or torch's, does that."""
        with _products_in_float32(self.model):
            verification = self.verdict()
        found = {precision_of(change.module) for change in self.changes}
        if precisions := sorted({p or "medium" for p in found if changes_factors(p)}):
            with _products_in_float32(self.model):
                exact = self._swapped()
            verification.rounding = Rounding.of(self._swapped(), exact, precisions)
        return verification

    def verdict(self) -> Verification:
        found, calls = self._judged()
        if not calls.small or found.ok is False:
            return found
        with small_calls.all_gain():
            again, _ = self._judged(calls)
        return found if again is None else again

    def _judged(self, before: CallCounts | None = None) -> tuple[Verification | None, CallCounts]:
        """The verdict in the model's own mode, or in eval mode if stock cannot have swapped's
        masks; None if only kernels ran that ran `before`."""
        if self.flags is not None:
            self.masks = Masks()
            try:
                return self._judged_as_set(before)
            except Unpaired as error:
                self.dropout_off = str(error)
            except Exception as error:  # of foreign code, which may not run in modes of torch
                self.dropout_off = f"with it the model raises {type(error).__name__}"
            self.flags = self.masks = None
        return self._judged_as_set(before)

    def _judged_as_set(self, before: CallCounts | None) -> tuple[Verification | None, CallCounts]:
        swapped, calls = self._recorded()
        if before is not None:
            calls = before.and_larger(calls)
            if not calls.larger:
                return None, calls
        stock, exact, not_run = self._of_stock()
        self._check_pairing(swapped, stock)
        truth, unseen = stock if exact is None else exact, stock.unseen
        judged = "rounding" if exact is None else "float64"
        deviations = self._against_stock(stock, truth, swapped, unseen)
        if not all_close(deviations):
            deviations = self._against_medians(deviations, stock, truth, swapped, unseen)
        padding = self._in_padding(deviations, truth, swapped, unseen)
        if not all_close(deviations) and self._differs_in_padding_alone(unseen):
            padding = ("loss",)
        self._check_pairing(swapped, stock)  # of the runs since
        losses = (stock.loss, swapped.loss)
        found = Verification(
            deviations, losses, judged, padding, calls, not_run, self.dropout_off, self._shares(),
            swapped.projected,
        )  # fmt: skip
        return found, calls

    def _recorded(self) -> tuple[Run, CallCounts]:
        with _dispatch_log.record() as records:
            run = self._swapped()
        return run, CallCounts.of(records)

    def _shares(self) -> dict[str, float]:
        """How close kernels come to their bounds; empty if foreign code does not run like that."""
        kernels = Kernels()
        try:
            with uncompiled(), kernels:
                self._swapped()
        except Exception:
            return {}
        return kernels.shares()

    def _of_stock(self) -> tuple[Run, Run | None, tuple[str, ...]]:
        """(stock, in float64 if that is a reference for it, modules that did not run)."""
        drops = None if self.masks is None else self.masks.calls
        if self.known is not None and self.known[0] == drops:
            return self.known[1:]
        stock = self._stock()
        with as_stock(self.model, self.changes):
            self.double = _in_double(self.model, self.changes)
        exact = self._exact()
        if exact is not None and not _finite_alike(exact.tensors, stock.tensors):
            exact = self.double = None
        self.known = drops, stock, exact, self._not_run()
        return self.known[1:]

    def _check_pairing(self, swapped: Run, stock: Run) -> None:
        if self.masks is not None:
            self.masks.check(swapped.random, stock.random)

    def _not_run(self) -> tuple[str, ...]:
        """Names of swapped modules that the model does not call, and of dropouts that are off.

        Of the stock model, in a run of its own: a global hook may keep modules from a fast path.
        """
        left = {id(change.module) for change in self.changes}
        hook = nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: left.discard(id(module))
        )
        changed = set(left)
        try:
            self._stock()
        finally:
            hook.remove()
        modules = list(self.model.modules())
        flags = self.flags or [False] * len(modules)
        left.update(
            id(module)
            for module, flag in zip(modules, flags, strict=True)
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p and not flag
        )
        left &= changed
        return tuple(name for name, module in self.model.named_modules() if id(module) in left)

    def _run(self, model: nn.Module, inside: Callable, moved, hide: bool, call=None) -> Run:
        """`inside` is the method of the masks that is entered."""
        batch, loss_fn, moved = call or (self.batch, self.loss_fn, moved)
        context = contextlib.nullcontext() if self.masks is None else inside(self.masks)
        return run(model, batch, loss_fn, self.flags, context, moved, hide)

    def _stock(self, moved=None, hide: bool = False) -> Run:
        with as_stock(self.model, self.changes):
            return self._run(self.model, Masks.repeated, moved, hide)

    def _swapped(self, moved=None, hide: bool = False) -> Run:
        with in_force(self.swapping):
            return self._run(self.model, Masks.noted, moved, hide)

    def _exact(self, moved=None, hide: bool = False) -> Run | None:
        """Stock in float64; None if it does not run."""
        if self.double is None:
            return None
        try:
            call = pytree.tree_map(_to_double, (self.batch, self.loss_fn, moved))
            run = self._run(self.double, Masks.repeated_exactly, moved, hide, call)
        except Exception:  # foreign code may not support the dtype
            self.double = None
            return None
        computed = (value for name, value in run.tensors.items() if not is_gradient(name))
        if any(value.dtype == torch.float64 for value in computed):
            return run
        self.double = None
        return None

    def _drawn(self, draw: int, stock: Run) -> tuple[Run, Run, dict[str, Tensor]]:
        """(stock with moved parameters, the reference of its error, those parameters)."""
        # A float64 copy has the same parameters. Without one, the effect of moving them is the
        # bound, which moves of autocast's dtype would make too wide.
        moved = _moved(self.model, draw, as_cast=self.double is not None)
        base = self._stock(moved)
        if self.double is None:
            return base, stock, moved
        return base, self._exact(moved) or base, moved

    def _against_stock(self, stock, truth, swapped, unseen) -> list[Deviation]:
        """Swapped's one error against the largest of several of stock's."""
        errors = dict.fromkeys(truth.tensors, 0.0)
        ours = distances(swapped, truth, unseen)
        for draw in range(_MOST_DRAWS):
            base, ref = stock, truth
            if draw > 0 or truth is stock:
                base, ref, _ = self._drawn(draw, stock)
            for name, error in distances(base, ref, unseen).items():
                errors[name] = max(errors[name], error)
            deviations = self._deviations(ours, errors, swapped, truth.visible(unseen))
            if all_close(deviations):
                break
        return deviations

    def _against_medians(self, deviations, stock, truth, swapped, unseen) -> list[Deviation]:
        """Tensors that exceed it again, by the medians of draws of both."""
        names = {deviation.name for deviation in deviations if deviation.share > 1.0}
        ours = {name: [error] for name, error in distances(swapped, truth, unseen).items()}
        errors = {name: [] for name in ours}
        if truth is not stock:
            errors = {name: [error] for name, error in distances(stock, truth, unseen).items()}
        for pair in range(1, _MOST_PAIRS + 1):
            base, ref, moved = self._drawn(_MOST_DRAWS + pair, stock)
            both = self._swapped(moved)
            for name, error in distances(base, ref, unseen).items():
                errors[name].append(error)
            of_swapped = distances(both, base if self.double is None else ref, unseen)
            for name, error in of_swapped.items():
                ours[name].append(error)
            if pair < _FEWEST_PAIRS:
                continue
            medians = self._deviations(
                {name: statistics.median(found) for name, found in ours.items()},
                {name: statistics.median(found) for name, found in errors.items()},
                swapped,
                truth.visible(unseen),
            )
            judged = [m if m.name in names else d for m, d in zip(medians, deviations, strict=True)]
            shares = [deviation.share for deviation in judged if deviation.decides]
            if max(shares) <= 1.0 or max(shares) > _HOPELESS:
                break
        return judged

    def _in_padding(self, deviations, truth, swapped, unseen) -> tuple[str, ...]:
        """Outputs whose rows of padding exceed the bound of other rows."""
        allowed = {deviation.name: deviation.allowed for deviation in deviations}
        return tuple(
            name
            for name in unseen
            if distance(swapped.tensors[name], truth.tensors[name])
            > allowed[name] * (largest_of(truth.visible(unseen)[name]) or 1.0)
        )

    def _differs_in_padding_alone(self, unseen) -> bool:
        """Whether nothing would differ if the loss ignored rows of padding."""
        if not unseen:
            return False
        stock, swapped = self._stock(hide=True), self._swapped(hide=True)
        exact = self._exact(hide=True) or stock
        hidden = stock.unseen
        if exact is stock:
            base, ref, _ = self._drawn(0, stock)
        else:
            base, ref = stock, exact
        again = self._deviations(
            distances(swapped, exact, hidden),
            distances(base, ref, hidden),
            swapped,
            exact.visible(hidden),
        )
        scalar = {name for name, tensor in stock.tensors.items() if tensor.dim() == 0}
        return all_close([d for d in again if is_gradient(d.name) or d.name not in scalar])

    def _deviations(self, ours, errors, swapped: Run, truth) -> list[Deviation]:
        of_loss = self.loss_fn is not None and any(map(is_gradient, truth))
        dtypes = {name: swapped.tensors.get(name, ref).dtype for name, ref in truth.items()}
        return deviations_of(ours, errors, dtypes, truth, of_loss)


def changes_of(report) -> list[Change]:
    """Every module that the report's swap changed, with both classes."""
    for change in report._changes:
        if type(change.module) not in (change.original, change.swapped):
            raise RuntimeError(
                "verify: modules must have the classes of the swap, got "
                f"{type(change.module).__name__}, which replaced one of them (sharding does)"
            )
    return report._changes


@contextlib.contextmanager
def as_stock(model: nn.Module, changes: list[Change]) -> Iterator[None]:
    """The original classes, and in transformers' models the attention from before `attach`."""
    # Who has not imported it has attached nothing.
    integration = imported(MODELS)
    attached = contextlib.nullcontext() if integration is None else integration.stock(model)
    with in_force([Edit(c.module, "__class__", c.original) for c in changes]), attached:
        yield


def _in_double(model: nn.Module, changes: list[Change]) -> nn.Module | None:
    """A copy of the model, now stock, in float64; None if there is no memory or no copy."""
    if not _room_for_double(model):
        return None
    swapped = {id(change.module): change.swapped for change in changes}
    model.train()  # empties caches that cannot be copied
    try:
        double = copy.deepcopy(model).double()
        for module, twin in zip(model.modules(), double.modules(), strict=True):
            cls = swapped.get(id(module))
            # A forced norm is judged by the original's forward: its formula is in question.
            foreign = cls is not None and issubclass(cls, ForeignNormForward)
            spec = cls._onepass_spec if foreign else None
            if foreign and not spec.forced and foreign_eps(twin, spec) is not None:
                twin.forward = _formula(twin, spec)
    except Exception:  # of foreign classes
        return None
    return double


def _formula(twin: nn.Module, spec) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        weight, eps = getattr(twin, spec.weight), foreign_eps(twin, spec)
        shape = (weight.shape[0],)
        if spec.kind != NormKind.RMS:
            bias = None if spec.bias is None else getattr(twin, spec.bias)
            return reference.layer_norm(input, shape, weight + spec.weight_offset, bias, eps)
        return reference.rms_norm(input, shape, weight, eps, weight_offset=spec.weight_offset)

    return forward


def _room_for_double(model: nn.Module) -> bool:
    """Whether a copy, its gradients and activations fit: estimated as four times its float64
    size."""
    needed = dict.fromkeys(("cpu", "cuda"), 0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type not in needed:
            return False
        needed[tensor.device.type] += 4 * 8 * tensor.numel()
    return all(
        not count or count < free_memory(torch.device(device)) for device, count in needed.items()
    )


def _to_double(leaf):
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().double().requires_grad_(leaf.requires_grad)
    return leaf


def _moved(model, draw: int, as_cast: bool) -> dict[str, Tensor]:
    """The model's parameters, each number one rounding away; with `as_cast` of autocast's dtype."""
    random = torch.Generator().manual_seed(draw)
    moved = {}
    for name, value in model.named_parameters():
        if value.is_floating_point():
            sign = 2 * torch.randint(0, 2, value.shape, generator=random, device="cpu") - 1
            eps = torch.finfo(value.dtype).eps
            device = value.device.type
            if as_cast and torch.is_autocast_enabled(device):
                eps = max(eps, torch.finfo(torch.get_autocast_dtype(device)).eps)
            near = value.detach() * (1 + eps * sign.to(value))
            moved[name] = near.requires_grad_(value.requires_grad)
    return moved


def _finite_alike(exact: dict[str, Tensor], stock: dict[str, Tensor]) -> bool:
    """False if float64 is no reference for a model: a mask of float64's minimum is infinite in a
    softmax that computes in float32."""
    return all(torch.equal(exact[name].isfinite(), stock[name].isfinite()) for name in stock)
