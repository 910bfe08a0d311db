"""The result of `onepass.estimate`."""

from __future__ import annotations

from dataclasses import dataclass, field

from onepass.swapping.texts import readable


@dataclass(frozen=True)
class Estimate:
    """The memory of one training step, in bytes.

    Attributes:
        parameter_count: elements of all parameters, a tied one once.
        parameters, gradients, optimizer_state: as in every step after the first.
        others: buffers and the batch.
        activations: tensors that the forward keeps for the backward.
        loss: the loss's own share of them.
        saved: the part of activations and batch that autograd saved; the rest is held otherwise.
        modules: dicts with name (* for numbers), type, count and bytes of the activations, the
            largest first.
        peaks: by phase (forward, backward, update) the most at once, everything included.
        peak, peak_phase: the largest of them.
        peak_operator: the operator in which it is reached.
        at_peak: the parts at that moment: parameters, gradients, "optimizer state", "buffers,
            batch", activations, temporary.
        temporary: the part of the peak that is no parameter, gradient, state or kept activation.
        note: what the figures do not show; empty if they show all.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        >>> found = onepass.estimate(model, torch.randn(8, 64))
        >>> found.parameters, found.optimizer_state  # two moments, and the number of steps
        (17152, 34320)
    """

    parameter_count: int
    parameters: int
    others: int
    gradients: int
    optimizer_state: int
    activations: int
    loss: int
    saved: int
    temporary: int
    peak: int
    peak_phase: str
    peak_operator: str
    peaks: dict[str, int]
    at_peak: dict[str, int]
    modules: list[dict] = field(repr=False)
    note: str = ""

    def to_dict(self) -> dict:
        return dict(self.__dict__)

    def __str__(self) -> str:
        lines = [f"{readable(self.peak):>10}  peak, in the {self.peak_phase}"]
        for name in ("parameters", "gradients", "optimizer_state", "activations", "others"):
            lines.append(f"{readable(getattr(self, name)):>10}  {name.replace('_', ' ')}")
        for entry in self.modules[:10]:
            name = entry["name"] or "(the model itself)"
            lines.append(f"{readable(entry['bytes']):>10}    {name} x {entry['count']}")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)
