"""Muon: momentum whose singular values are brought near one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onepass._imported import is_dtensor
from onepass._policy import products
from onepass.optim.averages import Average, Factor, mix
from onepass.optim.contract import Hyper
from onepass.optim.flat_state import local, placed_like
from onepass.optim.matrices import Matrices, check_matrices, joined, matrices_of
from onepass.optim.newton_schulz import orthogonalized
from onepass.optim.optimizer import number_of
from onepass.optim.options import OPTIONS_DOC, constructor
from onepass.optim.step import Step
from onepass.optim.updates import UpdateOptimizer, laid_as

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
RULES = (None, "original", "match_rms_adamw")
# dtypes of the products, by accepted argument.
NS_DTYPES = {
    None: None,
    torch.float32: torch.float32,
    "float32": torch.float32,
    torch.bfloat16: torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
MAX_STEPS = 100
MAX_BATCH = 1 << 24  # elements that are iterated at a time


class _Muon(torch.optim.Optimizer):
    """Muon's settings: torch's checks, in torch's words."""

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | str | None = None,
        matrices: Matrices = None,
    ) -> None:
        settings = {key: value for key, value in locals().items() if key not in ("self", "params")}
        torch.optim.Optimizer.__init__(self, params, checked(settings))


def checked(settings: dict) -> dict:
    """The defaults of a Muon: `settings`, if torch's constructor would take them.

    Raises:
        ValueError: one out of range, in torch's words.
    """
    lr, momentum, weight_decay = (settings[key] for key in ("lr", "momentum", "weight_decay"))
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
    if not momentum >= 0.0:
        raise ValueError(f"momentum should be >= 0 but is: {momentum}")
    if not weight_decay >= 0.0:
        raise ValueError(f"weight decay should be >= 0 but is: {weight_decay}")
    rule = settings["adjust_lr_fn"]
    if rule not in RULES:
        raise ValueError(f"Adjust learning rate function {rule} is not supported")
    return settings


class _Kind(NamedTuple):
    """The common properties of matrices that are iterated together."""

    shape: tuple[int, int]
    dtype: torch.dtype  # of the momentum
    ns_dtype: torch.dtype
    device: torch.device
    coefficients: tuple[float, ...]
    eps: float
    steps: int
    scale: float  # of the learning rate


class _Source(NamedTuple):
    """A matrix's part of a parameter's momentum and gradient."""

    momentum: Tensor
    gradient: Tensor
    weight: float
    place: tuple[int, int]  # (parameter, matrix in it)


class Muon(UpdateOptimizer, torch.optim.Muon):
    __doc__ = f"""`torch.optim.Muon` with batched products, masters and stacked matrices.

        momentum_buffer = momentum momentum_buffer + (1 - momentum) grad
        update = momentum momentum_buffer + (1 - momentum) grad    # nesterov, else momentum_buffer
        param = param (1 - lr weight_decay) - lr scale orthogonalized(update)

    The orthogonalized update has the singular vectors of the update, and singular values near one:
    `ns_steps` Newton-Schulz iterations, all parameters of one shape in the same batched products.
    ``state_dict`` has torch's keys and two more group settings, and each loads the other's.
    Embeddings, heads, biases and norms belong to AdamW: `onepass.optim.MuonWithAdamW` is both.

    The products are nearly all of a step, so the momentum and the decay have no kernel of their
    own: five iterations with 768 rows are about ten thousand multiply-adds for each element. A step
    holds the updates of all parameters at once, 4 bytes per element (2 with bfloat16 products). Of
    a DTensor, which is gathered first, each process computes all products. Momenta in 8 bits are
    not available.

    Jordan et al.: Muon: an optimizer for hidden layers in neural networks, 2024. Liu et al.: Muon
    is scalable for LLM training, 2025 ("match_rms_adamw").

    Args:
        params: matrices, (rows, columns) each, or parameters of the form that `matrices` gives.
        lr, weight_decay, momentum, nesterov: as torch's.
        ns_coefficients: (a, b, c) of an iteration X = a X + (b A + c A^2) X, where A = X X^T.
        eps: the smallest norm that an update is divided by.
        ns_steps: iterations, below 100.
        adjust_lr_fn: scale. "original" or None: sqrt(max(1, rows / columns)). "match_rms_adamw":
            0.2 sqrt(max(rows, columns)), with which AdamW's learning rate and weight decay fit.
        ns_dtype: dtype of the products; "float32", "bfloat16" or torch's names. None: bfloat16, as
            always in torch, on CUDA and on CPUs that have instructions for it; float32 on other
            CPUs, where bfloat16 products are far slower; float64 for float64 parameters. So two
            machines agree to the precision of bfloat16. "float32" is the same on all machines, and
            takes about twice as long on those with bfloat16 instructions. Norms are float32.
        matrices: the matrices in a parameter; each is orthogonalized and scaled by itself.
            None: one matrix. A number n: n matrices of rows / n each, such as 3 for query, key and
            value or the number of heads. A sequence: the rows of each, as of `torch.split`.
            "stacked": (..., rows, columns), such as experts. "flattened": (rows, ...), such as the
            filters of a convolution. A setting of a group, as all those above.{OPTIONS_DOC}
    Raises:
        ValueError: a setting out of range, a parameter that does not consist of such matrices.
        RuntimeError: parameters that are not floating point.

    Examples:
        >>> model = torch.nn.Linear(64, 64, bias=False)
        >>> optimizer = onepass.optim.Muon(model.parameters(), lr=0.02)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> optimizer.step()
        >>> list(optimizer.state[model.weight])
        ['momentum_buffer']
    """

    __init__ = constructor(_Muon)

    def _moment_keys(self, group: dict) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def _hyper(self, group: dict) -> Hyper:
        return Hyper(number_of(group["lr"]), weight_decay=float(group["weight_decay"]))

    def _check_param(self, param: Tensor, group: dict) -> None:
        super()._check_param(param, group)
        name = type(self).__name__
        check_iteration(name, group)
        check_matrices(name, param.shape, group["matrices"])

    def _check_settings(self, groups: list[dict]) -> None:
        super()._check_settings(groups)
        for group in groups:
            check_iteration(type(self).__name__, group)

    # ---- a step ----------------------------------------------------------------------------------

    def _updates(
        self,
        step: Step,
        params: Sequence[Tensor],
        groups: Sequence[dict],
        gradients: Sequence[Tensor],
    ) -> list[Tensor]:
        momenta = [local(self.state[param]["momentum_buffer"]) for param in params]
        factor = self._factor(step)
        updates = _updates(type(self).__name__, params, groups, momenta, gradients, factor)
        step.averages = [
            Average(momentum, momentum._version, gradient, 1.0 - group["momentum"], factor)
            for momentum, gradient, group in zip(momenta, gradients, groups, strict=True)
        ]
        return updates


def _updates(
    name: str,
    params: Sequence[Tensor],
    groups: Sequence[dict],
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor],
    factor: Factor,
) -> list[Tensor]:
    """The orthogonalized momenta after a step, scaled."""
    kinds: dict[_Kind, list[_Source]] = {}
    for number, (param, group) in enumerate(zip(params, groups, strict=True)):
        check_iteration(name, group)
        check_matrices(name, param.shape, group["matrices"])
        weight = 1.0 - group["momentum"] ** (2 if group["nesterov"] else 1)
        momentum, gradient = momenta[number], gradients[number]
        dtype = torch.float64 if momentum.dtype is torch.float64 else torch.float32
        if is_dtensor(param):
            part = mix(momentum, gradient, weight, factor, dtype)
            whole = placed_like(param, part).full_tensor()
            momentum, gradient, weight = whole, whole, 0.0
        pairs = (matrices_of(tensor, group["matrices"]) for tensor in (momentum, gradient))
        for place, (part, of_gradient) in enumerate(zip(*pairs, strict=True)):
            kind = _kind(part.shape, dtype, part.device, group)
            source = _Source(part, of_gradient, weight, (number, place))
            kinds.setdefault(kind, []).append(source)
    parts: list[dict[int, Tensor]] = [{} for _ in params]
    for kind, sources in kinds.items():
        size = max(1, MAX_BATCH // max(1, math.prod(kind.shape)))
        for begin in range(0, len(sources), size):
            batch = sources[begin : begin + size]
            for source, update in zip(batch, _iterated(kind, batch, factor), strict=True):
                number, place = source.place
                parts[number][place] = update
    updates = []
    for number, (param, group) in enumerate(zip(params, groups, strict=True)):
        found = [parts[number][place] for place in range(len(parts[number]))]
        if found:
            update = joined(found, param.shape, group["matrices"])
        else:  # a stack of none
            update = momenta[number].new_zeros(param.shape)
        updates.append(_laid(param, update))
    return updates


def _kind(shape: torch.Size, dtype: torch.dtype, device: torch.device, group: dict) -> _Kind:
    rows, columns = shape
    ns_dtype = NS_DTYPES[group["ns_dtype"]]
    if ns_dtype is None:
        is_quick = device.type != "cpu" or products.facts().bfloat16
        ns_dtype = torch.bfloat16 if is_quick and dtype is torch.float32 else dtype
    return _Kind(
        shape=(rows, columns),
        dtype=dtype,
        ns_dtype=ns_dtype,
        device=device,
        coefficients=tuple(map(float, group["ns_coefficients"])),
        eps=group["eps"],
        steps=group["ns_steps"],
        scale=scale_of(group["adjust_lr_fn"], rows, columns),
    )


def scale_of(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The factor of a matrix's learning rate."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if columns else 1.0


def _iterated(kind: _Kind, sources: Sequence[_Source], factor: Factor) -> Tensor:
    """The updates of these matrices, (count, rows, columns)."""
    x = torch.empty((len(sources), *kind.shape), dtype=kind.dtype, device=kind.device)
    for source, place in zip(sources, x, strict=True):
        # Gathered momenta are clipped already.
        scaled = None if source.momentum is source.gradient else factor
        mix(source.momentum, source.gradient, source.weight, scaled, kind.dtype, out=place)
    if x.numel():
        norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=kind.eps)
        normed = x if kind.ns_dtype is kind.dtype else torch.empty_like(x, dtype=kind.ns_dtype)
        torch.div(x, norms, out=normed)
        x = orthogonalized(normed, kind.coefficients, kind.steps, kind.scale)
        if kind.dtype is torch.float64:
            x = x.to(kind.dtype)
    return x


def _laid(param: Tensor, update: Tensor) -> Tensor:
    """This rank's part of an update in its parameter's memory order, or contiguous if that has
    gaps: itself, or a copy."""
    if is_dtensor(param):
        update = torch.distributed.tensor.distribute_tensor(
            update, param.device_mesh, param.placements, src_data_rank=None
        )
    return laid_as(local(param), local(update))


def check_iteration(name: str, group: dict) -> None:
    """Raises for settings of the products that a step cannot use.

    Raises:
        TypeError, ValueError: a setting of another type, or out of range.
    """
    coefficients, steps = group["ns_coefficients"], group["ns_steps"]
    if (
        not isinstance(coefficients, tuple | list)
        or len(coefficients) != 3
        or not all(isinstance(c, numbers.Real) for c in coefficients)
    ):
        raise ValueError(f"{name}: ns_coefficients must be three numbers, got {coefficients!r}")
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < MAX_STEPS:
        raise ValueError(
            f"{name}: ns_steps must be a whole number from 0 to {MAX_STEPS - 1}, got {steps!r}"
        )
    if group["adjust_lr_fn"] not in RULES:
        raise ValueError(
            f"{name}: adjust_lr_fn must be one of {RULES}, got {group['adjust_lr_fn']!r}"
        )
    if not any(group["ns_dtype"] == accepted for accepted in NS_DTYPES):
        raise ValueError(
            f"{name}: ns_dtype must be None, torch.float32 or torch.bfloat16, got "
            f"{group['ns_dtype']!r}"
        )
