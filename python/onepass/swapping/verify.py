"""`Report.verify`: stock against swapped on the user's own batch.

Both run in the model itself, whose classes are set back and forth; eval mode turns dropout off, and
gradients are taken with `torch.autograd.grad`, so that no `.grad` is touched. What counts is how
far each is from the truth: a copy of the stock model in float64, with norms that compute in float32
whatever they are given replaced by their formula. Where such a copy cannot be had, stock with its
parameters moved by one rounding shows how far rounding alone carries this model.

Every tensor may be off by what `onepass.numerics` allows: twice stock's own error plus one ulp. One
draw says little about a small tensor, so stock's error counts as no smaller than is usual in this
model: the median over its tensors, the largest for tensors of fewer than 64 numbers. Where all
gradients are multiples of one number (a contrastive loss, CTC) one draw says little about any of
them: before tensors are called different, stock's error is drawn again with parameters that are
one rounding away, and the largest counts.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onepass import numerics
from onepass.reference import norm as reference
from onepass.swapping.classes import ForeignNormForward

_SMALL = 64  # numbers in a tensor below which one draw says little
_NEGLIGIBLE = 1e-6  # a gradient this small beside the largest is rounding noise around zero
# Of stock's error. One draw called 14 of 48 CLIPs and wav2vec2s different, whose swap was right.
_MOST_DRAWS = 6


class Deviation(NamedTuple):
    """One tensor: distances are the largest over its elements, relative to the reference's."""

    name: str
    error: float  # swapped from the reference
    stock_error: float  # stock from the reference, in the draw that was furthest off
    allowed: float


class Verification:
    """What :meth:`Report.verify` found; prints as one line.

    Attributes:
        ok: every output and gradient is as close to the reference as the rule asks.
        worst: name of the tensor that comes closest to its bound, or exceeds it by most.
        deviations: per tensor, the worst first.
        loss: (stock, swapped).
        judged: "float64", or "rounding" where stock could not run in float64.
    """

    def __init__(self, deviations: list[Deviation], loss: tuple[float, float], judged: str):
        self.deviations = sorted(deviations, key=_share, reverse=True)
        self.loss = loss
        self.judged = judged

    @property
    def ok(self) -> bool:
        return all(_share(deviation) <= 1.0 for deviation in self.deviations)

    @property
    def worst(self) -> str:
        return self.deviations[0].name

    def to_dict(self) -> dict:
        """Everything as plain JSON-able data."""
        return {
            "ok": self.ok,
            "worst": self.worst,
            "judged": self.judged,
            "loss": {"stock": self.loss[0], "swapped": self.loss[1]},
            "tensors": [deviation._asdict() for deviation in self.deviations],
        }

    def __str__(self) -> str:
        worst = self.deviations[0]
        truth = "float64" if self.judged == "float64" else "stock"
        stock = "stock" if self.judged == "float64" else "stock moved by one rounding"
        return (
            f"{'same' if self.ok else 'DIFFERENT'}: loss {self.loss[1]:.7g} swapped, "
            f"{self.loss[0]:.7g} stock; worst of {len(self.deviations)} tensors is {worst.name}: "
            f"{worst.error:.1e} from {truth}, {stock} {worst.stock_error:.1e}, "
            f"allowed {worst.allowed:.1e}"
        )

    __repr__ = __str__


class _Run(NamedTuple):
    loss: float
    tensors: dict[str, Tensor]  # "output", "output 1", ..., "gradient of NAME"


def verify(report, batch: tuple, loss_fn: Callable | None) -> Verification:
    """See :meth:`onepass.swapping.Report.verify`."""
    model = report._model
    if report.dry_run:
        raise RuntimeError("verify: the report must come from a swap, got a dry run")
    if model is None:
        raise RuntimeError("verify: the report must be swap's own, got a copy, which has no model")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise RuntimeError("verify: model must have data, got tensors on the meta device")
    modules = _modules(report)
    if len(batch) == 1 and isinstance(batch[0], Mapping):  # tokenizers return one that is no dict
        batch = (dict(batch[0]),)
    with _undisturbed(model):
        with _stock(model, modules):
            stock = _run(model, batch, loss_fn)
            exact = _run_in_double(model, batch, loss_fn, modules)
            if exact is not None and not _finite_alike(exact.tensors, stock.tensors):
                exact = None
        with _classes(modules, "swapped"):
            swapped = _run(model, batch, loss_fn)
        truth = stock if exact is None else exact
        stock_errors = dict.fromkeys(truth.tensors, 0.0)
        with _stock(model, modules):
            for draw in range(_MOST_DRAWS):
                if draw == 0 and exact is not None:
                    base, ref = stock, exact
                else:
                    moved = _moved(model, draw)
                    base, ref = _run(model, batch, loss_fn, moved), stock
                    if exact is not None:
                        ref = _run_in_double(model, batch, loss_fn, modules, moved) or base
                for name, tensor in base.tensors.items():
                    error = _distance(tensor, ref.tensors[name])
                    stock_errors[name] = max(stock_errors[name], error)
                deviations = _deviations(swapped.tensors, truth.tensors, stock_errors)
                if all(_share(deviation) <= 1.0 for deviation in deviations):
                    break
    judged = "rounding" if exact is None else "float64"
    return Verification(deviations, (stock.loss, swapped.loss), judged)


def _modules(report) -> list[tuple[nn.Module, type, type]]:
    """(module, original class, swapped class) of every module that the report's swap changed."""
    for change in report._changes:
        if type(change.module) not in (change.original, change.swapped):
            raise RuntimeError(
                "verify: modules must have the classes of the swap, got "
                f"{type(change.module).__name__}, which replaced one of them (sharding does)"
            )
    return [(change.module, change.original, change.swapped) for change in report._changes]


@contextlib.contextmanager
def _stock(model: nn.Module, modules) -> Iterator[None]:
    """The original classes, and in transformers' models the attention from before `attach`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_classes(modules, "original"))
        # Who has not imported it has attached nothing.
        integration = sys.modules.get("onepass.integrations.transformers.models")
        if integration is not None:
            stack.enter_context(integration.stock(model))
        yield


@contextlib.contextmanager
def _classes(modules, which: str) -> Iterator[None]:
    before = [type(module) for module, _, _ in modules]
    try:
        for module, original, swapped in modules:
            module.__class__ = original if which == "original" else swapped
        yield
    finally:
        for (module, _, _), cls in zip(modules, before, strict=True):
            module.__class__ = cls


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards flags and buffers are as before."""
    training = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in training:
            module.training = flag
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


def _run(model, batch, loss_fn, moved: dict[str, Tensor] | None = None) -> _Run:
    """One forward and backward, which draws from the random state that holds, and leaves it so.

    With `moved` in the place of the model's parameters, if given.
    """
    devices = {tensor.device.index for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
        return _forward_backward(model, batch, loss_fn, moved)


def _forward_backward(model, batch, loss_fn, moved) -> _Run:
    parameters = dict(model.named_parameters()) if moved is None else moved
    named = {name: value for name, value in parameters.items() if value.requires_grad}
    inputs = {
        f"input {index}": leaf
        for index, leaf in enumerate(pytree.tree_leaves(batch))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    kwargs = batch[0] if len(batch) == 1 and isinstance(batch[0], dict) else {}
    args = () if kwargs else batch
    if moved is None:
        output = model(*args, **kwargs)
    else:
        output = torch.func.functional_call(model, moved, args, kwargs)
    leaves = [
        leaf
        for leaf in pytree.tree_leaves(_plain(output))
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    if not leaves:
        raise RuntimeError(
            f"verify: model must return floating-point tensors, got {type(output).__name__}"
        )
    loss = loss_fn(output) if loss_fn is not None else _loss(output, leaves)
    tensors = {
        f"output {index}" if index else "output": leaf.detach() for index, leaf in enumerate(leaves)
    }
    wanted = {**named, **inputs}
    if wanted and loss.requires_grad:
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        for name, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                tensors[f"gradient of {name}"] = gradient
    return _Run(float(loss.detach()), tensors)


def _plain(output):
    """Outputs of transformers are ordered dicts that torch's pytree may not know."""
    return dict(output) if isinstance(output, dict) else output


def _loss(output, leaves: list[Tensor]) -> Tensor:
    """The output's own loss, or a fixed random projection of everything floating in it."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    for leaf in leaves:
        if leaf.dim() == 0:
            return leaf
    random = torch.Generator().manual_seed(20)
    return sum(
        (torch.randn(leaf.shape, generator=random, dtype=torch.float64).to(leaf) * leaf).sum()
        / max(leaf.numel(), 1) ** 0.5
        for leaf in leaves
    )


def _run_in_double(model, batch, loss_fn, modules, moved=None) -> _Run | None:
    """Stock in float64 on a copy, None where there is no room for one, or it does not run."""
    if not _room_for_double(model):
        return None
    swapped = {id(module): cls for module, _, cls in modules}
    try:
        double = copy.deepcopy(model).double()
        for module, twin in zip(model.modules(), double.modules(), strict=True):
            cls = swapped.get(id(module))
            if cls is not None and issubclass(cls, ForeignNormForward):
                twin.forward = _formula(twin, cls._onepass_spec)
        run = _run(double, *pytree.tree_map(_to_double, (batch, loss_fn, moved)))
    except Exception:  # foreign code in a dtype that it was not written for
        return None
    computed = (value for name, value in run.tensors.items() if not _is_gradient(name))
    return run if any(value.dtype == torch.float64 for value in computed) else None


def _formula(twin: nn.Module, spec) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        weight, eps = getattr(twin, spec.weight), getattr(twin, spec.eps)
        shape = (weight.shape[0],)
        if not spec.rms:
            bias = None if spec.bias is None else getattr(twin, spec.bias)
            return reference.layer_norm(input, shape, weight + spec.weight_offset, bias, eps)
        return reference.rms_norm(input, shape, weight, eps, weight_offset=spec.weight_offset)

    return forward


def _room_for_double(model: nn.Module) -> bool:
    """Whether a copy, its gradients and activations fit: guessed as four times its float64 size."""
    needed = dict.fromkeys(("cpu", "cuda"), 0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type not in needed:
            return False
        needed[tensor.device.type] += 4 * 8 * tensor.numel()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed["cpu"] > free:
        return False
    return not needed["cuda"] or needed["cuda"] < torch.cuda.mem_get_info()[0]


def _to_double(leaf):
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().double().requires_grad_(leaf.requires_grad)
    return leaf


def _moved(model, draw: int) -> dict[str, Tensor]:
    """The model's parameters, each number one rounding away."""
    random = torch.Generator().manual_seed(draw)
    moved = {}
    for name, value in model.named_parameters():
        if value.is_floating_point():
            sign = torch.randint(0, 2, value.shape, generator=random).mul_(2).sub_(1).to(value)
            near = value.detach() * (1 + torch.finfo(value.dtype).eps * sign)
            moved[name] = near.requires_grad_(value.requires_grad)
    return moved


def _finite_alike(exact: dict[str, Tensor], stock: dict[str, Tensor]) -> bool:
    """False where a model cannot be asked in float64: a mask of that dtype's minimum is infinite in
    a softmax that computes in float32."""
    return all(torch.equal(exact[name].isfinite(), stock[name].isfinite()) for name in stock)


def _deviations(swapped, exact, stock_errors) -> list[Deviation]:
    largest = max((_largest(ref) for name, ref in exact.items() if _is_gradient(name)), default=0.0)
    sizes = {}
    for name, ref in exact.items():
        size = _largest(ref)
        if _is_gradient(name) and size <= _NEGLIGIBLE * largest:
            size = largest
        sizes[name] = size or 1.0
    stock = {name: stock_errors[name] / size for name, size in sizes.items()}
    usual, most = statistics.median(stock.values()), max(stock.values())
    deviations = []
    for name, ref in exact.items():
        ours, size = swapped[name], sizes[name]
        typical = usual if ref.numel() >= _SMALL else most
        allowed = 2 * max(stock[name], typical) + numerics.ulp(ours.dtype, size) / size
        deviations.append(Deviation(name, _distance(ours, ref) / size, stock[name], allowed))
    return deviations


def _is_gradient(name: str) -> bool:
    return name.startswith("gradient of ")


def _largest(tensor: Tensor) -> float:
    """Of the finite numbers."""
    return tensor.abs().nan_to_num(0.0, 0.0).max().item() if tensor.numel() else 0.0


def _distance(tensor: Tensor, ref: Tensor) -> float:
    """Largest difference; infinities and NaNs differ from all but themselves."""
    if not ref.numel():
        return 0.0
    tensor, ref = tensor.double(), ref.double()
    same = (tensor == ref) | (tensor.isnan() & ref.isnan())
    distance = (tensor - ref).abs().masked_fill(same, 0.0).max().item()
    return float("inf") if distance != distance else distance


def _share(deviation: Deviation) -> float:
    return deviation.error / deviation.allowed
