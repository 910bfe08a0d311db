"""Facts about another library's module, from its code and its proof: plain values only, which are
part of the pickles of swapped modules."""

from __future__ import annotations

from typing import NamedTuple

import torch

from onepass._ops.norm import NormKind


class Structure(NamedTuple):
    """A module with the structure of a norm: the names that the probe needs."""

    weight: str
    bias: str | None
    eps: str | tuple[float, ...]  # a name, or numbers in its forward of which one may be it
    argument: str


class Held(NamedTuple):
    """A module that a proof has run and that a fused forward does not call: the module that is
    swapped, or a child of it."""

    name: str  # of the child; empty: the module itself
    cls: type | None  # of the child
    # The attributes that its forward reads, by `facts.fingerprint`: equal in copies and pickles.
    attributes: tuple[tuple[str, object], ...]


class NormSpec(NamedTuple):
    """A class of norms as the probe proved it."""

    kind: int  # onepass._ops.norm.NormKind
    weight_offset: float
    weight: str  # attribute names
    bias: str | None
    eps: str | float  # a number of its forward
    argument: str  # name of forward's argument
    # (input dtype, weight dtype, output dtype) of each combination that was proven.
    dtypes: tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]
    forced: bool = False  # the user vouches for it: nothing was proven
    held: tuple[Held, ...] = ()  # the norm, without its eps

    def __str__(self) -> str:
        text = "rms_norm" if self.kind == NormKind.RMS else "layer_norm"
        text += f", weight_offset {self.weight_offset:g}" if self.weight_offset else ""
        text += f", eps {self.eps:g} in its forward" if isinstance(self.eps, float) else ""
        return f"{text}, forced" if self.forced else text


class GatedSpec(NamedTuple):
    """A class of gated feed-forward blocks as it was proven."""

    gate: str  # names of submodules
    up: str | None  # None: gate gives both halves
    down: str
    gate_last: bool
    activation: str
    argument: str  # name of forward's argument
    held: tuple[Held, ...]  # the block, and the module of the activation if there is one

    def __str__(self) -> str:
        return f"gated_activation, {self.activation}"


class AdaptiveSpec(NamedTuple):
    """A norm whose scale and shift come from a conditioning, as it was proven."""

    form: str  # of onepass.swapping.adaptive.FORMS
    kind: int  # onepass._ops.norm.NormKind

    def __str__(self) -> str:
        return "modulated_rms_norm" if self.kind == NormKind.RMS else "modulated_layer_norm"


class ActivatedSpec(NamedTuple):
    """A module that computes group norms and the silu after each in one pass."""

    form: str  # of onepass.swapping.activated.FORWARDS
    norms: tuple[str, ...]  # names of its children

    def __str__(self) -> str:
        return "group_norm, silu"


class Form(NamedTuple):
    """How a function rotates."""

    interleaved: bool = False
    # The contents of cos and sin: a number for each of the "columns", or each of the "pairs", or
    # numbers for the columns of which the first "half" is read, as those of the pairs.
    table: str = "columns"
    apart: bool = False  # neighbouring pairs end half the width apart: DeepSeek's


class RotarySpec(NamedTuple):
    """A function that rotates query and key, as it was proven."""

    name: str  # by which a forward calls it
    parameters: tuple[str, ...]
    tensors: int  # how many of the parameters are rotated: the first
    unsqueeze_dim: int | None  # the default of that argument
    form: Form
    partial: bool  # columns beyond the width of cos and sin stay
    # (dimensions of the query, of cos, unsqueeze_dim) of each layout, and whether tokens are first.
    layouts: tuple[tuple[tuple[int, int, int | None], bool], ...]
    # (input dtype, dtype of cos and sin, output dtype) of each combination that was proven.
    dtypes: tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]
    autocast: bool  # calls no function that autocast changes


class ScanSpec(NamedTuple):
    """A function of a state-space or linear-attention layer, as it was proven."""

    name: str  # by which a forward calls it
    of_package: str  # of onepass.swapping.scans.FUNCTIONS
    beside: str  # of the same forward, what decides how it is told of packed sequences; or ""


class HeadSpec(NamedTuple):
    """The head of a language model whose logits are computed when they are read."""

    name: str  # of the model's child


# Of redirected calls: by kind, functions of the forward's file, and heads.
Call = str | RotarySpec | ScanSpec | HeadSpec
Spec = NormSpec | GatedSpec | AdaptiveSpec | ActivatedSpec | tuple[Call, ...]
