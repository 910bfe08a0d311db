"""The result of `Report.verify`, and how distances become verdicts.

Every tensor may be off by what `onepass.numerics` allows: twice stock's own error plus one ulp. One
draw is not enough for a small tensor, so stock's error counts as at least the usual one in this
model: the median over its tensors, the largest for tensors of fewer than 64 numbers.

A tensor without digits (zero, denormal, constant, not finite), or with a bound as large as its
values, passes whatever the kernels do: if there is no other, the verdict is "cannot tell".
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from onepass import _dispatch_log, numerics
from onepass.swapping.texts import grouped, preformatted

_SMALL = 64  # numbers in a tensor below which one draw is not enough
_NEGLIGIBLE = 1e-6  # relative to the largest: a gradient below it is rounding noise
ZERO, DENORMAL, CONSTANT, NOT_FINITE = "zero", "denormal", "constant", "not finite"
NO_BETTER = "no larger than stock's own error"
_MOST_REASONS = 3  # that are printed


class Deviation(NamedTuple):
    """One tensor: distances are the largest over its elements, relative to the reference's."""

    name: str
    error: float  # swapped from the reference
    stock_error: float  # stock from the reference, in the draw that was furthest off
    allowed: float
    decides: bool = True  # False for outputs if there is a loss_fn
    silent: str = ""  # why it shows nothing, whatever its error

    @property
    def share(self) -> float:
        return self.error / self.allowed if math.isfinite(self.allowed) else 0.0


@dataclass(frozen=True)
class CallCounts:
    """Counts of the swapped model's calls that could have been onepass's, and of those that
    were."""

    ours: Counter[str] = field(default_factory=Counter)  # by operator
    left: Counter[str] = field(default_factory=Counter)  # to torch, by operator and reason
    small: int = 0  # of them for their size
    larger: Counter[str] = field(default_factory=Counter)  # ours in the second pass

    @classmethod
    def of(cls, records: list[dict]) -> CallCounts:
        """Counts the records of `_dispatch_log`."""
        left = [record for record in records if record["level"] == _dispatch_log.TORCH]
        ours = [record for record in records if record["level"] != _dispatch_log.TORCH]
        return cls(
            Counter(record["op"] for record in ours),
            Counter(f"{record['op']}, {record['reason']}" for record in left),
            sum(record["reason"].startswith(_dispatch_log.TOO_SMALL) for record in left),
        )

    def and_larger(self, again: CallCounts) -> CallCounts:
        """Adds those that onepass's kernels compute in the second pass alone."""
        return CallCounts(self.ours, self.left, self.small, again.ours - self.ours)


_LEAST_OF_MEDIAN = 1e-3  # a size that distances are at least divided by
_TAKEN = {"medium": "rounded to bfloat16", "int8": "quantised to 8 bits"}


class Rounding(NamedTuple):
    """The effect of products that round or quantise float32 factors, swapped against swapped.

    Distances are those of whole tensors, ``|rounded - exact| / |exact|``; a tensor smaller than a
    thousandth of the median is divided by that.
    """

    loss: float  # with rounded factors
    exact_loss: float
    median: float  # of the tensors' distances
    largest: float
    name: str  # of the tensor that is furthest off
    precisions: list[str]  # of modules or torch's setting

    @classmethod
    def of(cls, rounded, exact, precisions: list[str]) -> Rounding | None:
        """Compares two runs; None if no product rounded."""
        distances = {}
        sizes = {name: ref.double().norm().item() for name, ref in exact.tensors.items()}
        sizes = {name: size for name, size in sizes.items() if size and math.isfinite(size)}
        # A gradient that is zero but for rounding has no direction: it counts beside the others.
        least = _LEAST_OF_MEDIAN * statistics.median(sizes.values()) if sizes else 0.0
        for name, size in sizes.items():
            tensor, ref = rounded.tensors[name].double(), exact.tensors[name].double()
            distances[name] = (tensor - ref).norm().item() / max(size, least)
        if not any(distances.values()):
            return None
        name = max(distances, key=distances.get)
        median = statistics.median(distances.values())
        return cls(rounded.loss, exact.loss, median, distances[name], name, precisions)

    def __str__(self) -> str:
        names = dict.fromkeys(name.partition(":")[0] for name in self.precisions)
        taken = " and ".join(_TAKEN[name] for name in names)
        return (
            f"factors of products {taken}: loss {self.loss:.7g}, {self.exact_loss:.7g} in float32; "
            f"tensors are {self.median:.1e} from float32's in the median, at most "
            f"{self.largest:.1e} ({self.name})"
        )


class Verification:
    """The result of `Report.verify`; prints as one line, and is true if `ok` is True.

    Attributes:
        ok: all deciding tensors are as close to the reference as the rule requires; None if that
            shows nothing.
        reason: why `ok` is None.
        worst: name of the tensor that comes closest to its bound, or exceeds it by most.
        deviations: per tensor, those that decide first, the worst first.
        loss: (stock, swapped).
        projected: `loss` is of a random projection of the output, which has no loss.
        judged: "float64", or "rounding" where stock could not run in float64.
        padding: names of outputs that differ in rows of padding, which neither the loss nor `ok`
            uses; if not ok, the loss uses such rows, and nothing else differs: "loss".
        kernels: calls of onepass's kernels that were verified, by operator.
        larger_kernels: those that this batch is too small for, by operator: verified on it all the
            same, in a second pass.
        not_run: names of swapped modules that were not called, and of dropouts that were off.
        shares: by operator, the largest error of its first calls, divided by its bound: see
            :mod:`onepass.swapping.kernels`. They do not decide: the tensors of the step do.
        dropout_off: why a model in train mode ran in eval mode; empty if it did not.
        rounding: a `Rounding` where torch's setting or the model's precision rounds or quantises
            the factors of float32 products, else None; printed as a second line. All else is of
            float32 products.
    """

    rounding: Rounding | None = None

    def __init__(
        self,
        deviations: list[Deviation],
        loss: tuple[float, float],
        judged: str,
        padding: tuple[str, ...] = (),
        calls: CallCounts = CallCounts(),
        not_run: tuple[str, ...] = (),
        dropout_off: str = "",
        shares: dict[str, float] | None = None,
        projected: bool = False,
    ):
        self.deviations = sorted(deviations, key=_rank, reverse=True)
        self.loss, self.projected = loss, projected
        self.judged = judged
        self.padding = padding
        self.kernels, self.larger_kernels = dict(calls.ours), dict(calls.larger)
        self.not_run, self.dropout_off = not_run, dropout_off
        self.shares = shares or {}
        self.reason = ""
        if all_close(deviations):
            self.reason = _nothing_ran(calls) or _silence(deviations)
        self._ran = bool(calls.ours or calls.larger)

    @property
    def ok(self) -> bool | None:
        return None if self.reason else all_close(self.deviations)

    def __bool__(self) -> bool:
        return self.ok is True

    @property
    def worst(self) -> str:
        return self.deviations[0].name

    def to_dict(self) -> dict:
        """Everything as plain JSON-able data."""
        return {
            "ok": self.ok,
            "reason": self.reason,
            "worst": self.worst,
            "judged": self.judged,
            "padding": list(self.padding),
            "loss": {"stock": self.loss[0], "swapped": self.loss[1]},
            "projected": self.projected,
            "kernels": self.kernels,
            "larger_kernels": self.larger_kernels,
            "shares": self.shares,
            "not_run": list(self.not_run),
            "dropout_off": self.dropout_off,
            "rounding": None if self.rounding is None else self.rounding._asdict(),
            "tensors": [deviation._asdict() for deviation in self.deviations],
        }

    def __str__(self) -> str:
        return self._verdict() + (f"\n{self.rounding}" if self.rounding else "")

    def _verdict(self) -> str:
        name = "a random projection of the output" if self.projected else "loss"
        loss = f"{name} {self.loss[1]:.7g} swapped, {self.loss[0]:.7g} stock"
        if self.ok is None:
            verdict = "cannot tell" if self._ran else "nothing to verify"
            return f"{verdict}: {self.reason}; {loss}{self._of_kernels()}"
        worst = self.deviations[0]
        truth = "float64" if self.judged == "float64" else "stock"
        stock = "stock" if self.judged == "float64" else "stock moved by one rounding"
        has_bound = worst.allowed < 1.0
        allowed = f"allowed {worst.allowed:.1e}" if has_bound else "which is as large as its values"
        text = (
            f"{'same' if self.ok else 'DIFFERENT'}: {loss}; worst of {len(self.deviations)} "
            f"tensors is {worst.name}: {worst.error:.1e} from {truth}, {stock} "
            f"{worst.stock_error:.1e}, {allowed}"
        )
        if self.padding == ("loss",):
            text += (
                "; only rows of padding differ, and the loss sees some of them: the last one "
                "predicts a sequence's first token (label it -100 to leave it out)"
            )
        elif self.padding:
            text += (
                f"; {', '.join(self.padding)} differs in rows of padding, which nothing looks at"
            )
        return text + self._of_kernels()

    def _of_kernels(self) -> str:
        parts = []
        if self.kernels:
            parts.append(f"ran {_counted(self.kernels, self.shares)}")
        if self.larger_kernels:
            parts.append(f"run as in a larger batch {_counted(self.larger_kernels, self.shares)}")
        if self.not_run:
            parts.append(f"swapped and not run {', '.join(grouped(list(self.not_run)))}")
        if self.dropout_off:
            parts.append(f"dropout was off: {self.dropout_off}")
        return "".join(f"; {part}" for part in parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def _counted(calls: dict[str, int], shares: dict[str, float] | None = None) -> str:
    """Without backwards, which every call of a training step has; that of dropout is dropout."""
    forward = {name: count for name, count in calls.items() if "_backward" not in name}
    with_backward = {"dropout": ", backward too"} if len(forward) < len(calls) else {}
    of_bound = {name: f" ({share:.2g} of its bound)" for name, share in (shares or {}).items()}
    return ", ".join(
        f"{count} x {name}{of_bound.get(name, '')}{with_backward.get(name, '')}"
        for name, count in (forward or calls).items()
    )


def _nothing_ran(calls: CallCounts) -> str:
    if calls.ours or calls.larger:
        return ""
    most = calls.left.most_common(_MOST_REASONS)
    return f"no kernel of onepass ran{f' ({_counted(dict(most))})' if most else ''}"


def _silence(deviations: list[Deviation]) -> str:
    """Why nothing that decides shows anything; empty if something does."""
    deciding = [deviation for deviation in deviations if deviation.decides]
    if not all(deviation.silent for deviation in deciding):
        return ""
    reasons = ", ".join(dict.fromkeys(deviation.silent for deviation in deciding))
    what = "loss and gradients" if any(is_gradient(d.name) for d in deciding) else "outputs"
    return f"{what} have no digits to compare ({reasons})"


def all_close(deviations: list[Deviation]) -> bool:
    return all(deviation.share <= 1.0 for deviation in deviations if deviation.decides)


def _rank(deviation: Deviation) -> tuple:
    return deviation.decides, deviation.share > 1.0, not deviation.silent, deviation.share


def deviations_of(
    ours: dict[str, float],
    stock: dict[str, float],
    dtypes: dict[str, torch.dtype],
    exact: dict[str, Tensor],
    of_loss: bool,
) -> list[Deviation]:
    """Deviations from distances by name.

    Args:
        exact: the reference.
        dtypes: of swapped's tensors.
        of_loss: only the loss and its gradients decide.
    """
    gradients = [name for name in exact if is_gradient(name)]
    largest = max((largest_of(exact[name]) for name in gradients), default=0.0)
    silent = {name: _silence_of(ref, dtypes[name]) for name, ref in exact.items()}
    sizes = {}
    for name, ref in exact.items():
        size = largest_of(ref)
        if is_gradient(name) and size <= _NEGLIGIBLE * largest:
            size = largest
        sizes[name] = size if size >= torch.finfo(dtypes[name]).tiny else 1.0
    stock = {name: stock[name] / size for name, size in sizes.items()}
    # A value that is zero by construction does not show the usual size.
    said = [stock[name] for name in exact if stock[name] or silent[name] not in (ZERO, DENORMAL)]
    said = said or [0.0]
    usual, most = statistics.median(said), max(said)
    is_constant = bool(gradients) and all(silent[name] for name in gradients)  # so is a loss then
    deviations = []
    for name, ref in exact.items():
        size = sizes[name]
        typical = usual if ref.numel() >= _SMALL else most
        allowed = 2 * max(stock[name], typical) + numerics.ulp(dtypes[name], size) / size
        decides = not of_loss or name == "loss" or is_gradient(name)
        why = silent[name]
        if not why and allowed >= 1.0:
            why = NO_BETTER
        if not why and ref.dim() == 0:
            # Alone, it is told by having no more digits in float64.
            is_exact = ref.dtype != dtypes[name] and not (gradients or stock[name])
            why = CONSTANT if is_constant or is_exact else ""
        deviations.append(Deviation(name, ours[name] / size, stock[name], allowed, decides, why))
    return deviations


def _silence_of(ref: Tensor, dtype: torch.dtype) -> str:
    """Why a reference of swapped's dtype has no digits to compare; empty if it has."""
    if not ref.numel() or not ref.isfinite().any():
        return NOT_FINITE if ref.numel() else ZERO
    largest = largest_of(ref)
    if largest < torch.finfo(dtype).tiny:
        return DENORMAL if largest else ZERO
    return CONSTANT if ref.numel() > 1 and bool((ref == ref.flatten()[0]).all()) else ""


def is_gradient(name: str) -> bool:
    return name.startswith("gradient of ")


def largest_of(tensor: Tensor) -> float:
    """Largest magnitude of the finite numbers."""
    return tensor.abs().nan_to_num(0.0, 0.0).max().item() if tensor.numel() else 0.0


def distance(tensor: Tensor, ref: Tensor) -> float:
    """Largest difference; infinities and NaNs equal only themselves."""
    if tensor.shape != ref.shape:
        return math.inf
    if not ref.numel():
        return 0.0
    tensor, ref = tensor.double(), ref.double()
    same = (tensor == ref) | (tensor.isnan() & ref.isnan())
    distance = (tensor - ref).abs().masked_fill(same, 0.0).max().item()
    return float("inf") if distance != distance else distance
