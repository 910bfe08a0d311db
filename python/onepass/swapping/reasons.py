"""Why a module keeps its class: the texts of `Report.skipped` and `Report.unknown`."""

from __future__ import annotations

import enum

from torch import nn

from onepass import _stock


class SkipReason(str):
    """The text of a reason, with its details; code compares its `kind`."""

    kind: Reason

    def __new__(cls, kind: Reason, text: str) -> SkipReason:
        made = super().__new__(cls, text)
        made.kind = kind
        return made

    def __getnewargs__(self) -> tuple[Reason, str]:
        return self.kind, str(self)

    def __add__(self, more: str) -> SkipReason:
        return SkipReason(self.kind, str(self) + more)


class Reason(enum.Enum):
    """Texts, with places for their details."""

    # Options, and wrappers of a model.
    SHARDED = "is sharded (FSDP); swap before sharding"
    IN_COMPILED = "is inside a compiled module; swap before torch.compile"
    COMPILED = "is compiled by module.compile(); swap before that"
    NOT_INCLUDED = "not in include"
    EXCLUDED = "excluded by {!r}"
    FILTERED = "filter_fn returned False"

    # Its class and structure.
    NO_HEAD = "its logits are made at once: it is a {}, not a torch.nn.Linear"
    HOOKS_OF_HEAD = "its logits are made at once: it has hooks"
    NOT_A_CHILD = "its logits are made at once: the layer that makes them is no child of the model"
    LOGITS_BEFORE = "its logits are made at once since an earlier swap or attach; undo that first"
    CHANGED = "its class was changed after a swap"
    BATCH_NORM = "normalises over the batch or positions, with statistics"
    GROUP_NORM = (
        "no silu was found after it in a Sequential; alone torch is as fast at group norm in {}"
    )
    RESPONSE_NORM = "normalises over neighbouring channels"
    CHECKPOINTS = (
        "checkpoints inside its forward, whose recomputation would run torch's {}; checkpoint "
        "around the module"
    )
    EXPERTS = (
        "its experts are computed by transformers' {!r}, which does not call F.linear; "
        "model.set_experts_implementation('eager') before the swap"
    )
    REDIRECTED = (
        "its forward is redirected for other calls since an earlier swap or attach; undo that first"
    )
    NO_NORM = "makes scale and shift for norms elsewhere, and normalises nothing itself"
    NORM_HAS_WEIGHT = "its norm has a weight of its own in front of scale and shift"
    ONE_MODULATION = "its scale and shift are one for all of a batch (chunk_dim 0)"
    OTHER_NORM = "its norm is a {}, and onepass has no rule for that"
    HOLDS_MODULES = "holds other modules; these are looked at alone"
    DROPOUT_SUBCLASS = "a subclass of torch.nn.Dropout; only the class itself is"
    OTHER_DROPOUT = "no rule for this kind of dropout"
    HEAD_DIM = "its head_dim, {}, is above {}"
    OWN_SA_BLOCK = "its class overrides _sa_block, which gets masks in torch's form"
    OWN_FORWARD = "a subclass with a forward of its own"
    NO_CALLS = "calls no F.scaled_dot_product_attention itself; modules in it are looked at alone"
    BY_HAND = "computes attention by hand, and runs as it was written: {}"
    BY_HAND_ELSEWHERE = (
        "softmax(q k^T) v by hand, which is left as it is on {}; calls of "
        "F.scaled_dot_product_attention are taken there"
    )
    SCAN_ELSEWHERE = "its {} run as before on {}, where the packages {} are faster than onepass"
    AS_FAST = "torch is as fast here in {}"
    BUFFERS = "keeps buffers: {}"
    KEEPS_TENSOR = "keeps a tensor in its attribute {!r}"
    NO_WEIGHT = "has no weight"
    NO_SHAPE = "its {} has no shape yet"
    DIMENSIONS = "its {} must have 1 dimension, got shape {}"
    PARAMETERS = "has {} parameters ({})"
    SHAPES_DIFFER = "its {} differs from its {} in shape"
    NO_EPS = "has no eps"
    ARGUMENTS = "its forward takes ({}), not exactly one tensor"
    INSTANCE_FORWARD = "its forward is replaced on the instance"
    CLASS_FORWARD = "the forward of the class {} is replaced"
    PART_FORWARD = "the forward of its {} is replaced"
    HOOKS = "its {} has hooks"
    DECORATED = "its forward is decorated, and what it calls cannot be redirected"
    NO_TABLES = "calls {} without cos and sin, and onepass has no rule for that"
    OWN_CALL = "its class overrides __call__"
    PARAMETRIZED = "is parametrized"
    PARAMETER_CLASS = "its {} is a {}"
    NO_KERNELS = "onepass has no kernels for its device, {}, in this build"

    # Found while the swap is planned.
    PROBE_OFF = "not proven: probe is off"
    REFUSES = "it refuses another class: {}"
    NO_SUBCLASS = "its class cannot be subclassed: {}"
    NOT_CALLED = "not called on the sample"
    NO_GAIN = "no gain on the sample: {} times as fast"
    NO_GAIN_IN_ALL = "no gain on the sample: all that gains alone is {} times as fast together"
    TOO_NOISY = "too noisy to tell: {} times as fast"
    TOO_NOISY_IN_ALL = "too noisy to tell: all that gains alone is {} times as fast together"
    NOT_CHOSEN = "not in the choice"
    HOLDS_KEPT = "holds {!r}, which keeps its {} as it is"

    # Texts of the probe and of the integrations, which name figures and versions.
    OLD_DEVICE = "its device is too old"
    PROBE = "the probe refuses it"
    BLOCK = "the proof of its block fails"
    ROTARY = "the proof of a function that it calls fails"
    SCAN = "the proof of a function of its layer fails"
    QUANTIZED = "its quantised weight is left to the library that made it"
    BY_NAME = "attention by name is refused"
    DIFFUSERS = "the way that diffusers calls attention is refused"

    def format(self, *values: object) -> SkipReason:
        """The text with these values in its places."""
        return SkipReason(self, self.value.format(*values))

    def with_text(self, text: object) -> SkipReason:
        """This reason, with a text of the code that found it."""
        return SkipReason(self, str(text))


def replaced_forward(module: nn.Module) -> SkipReason | None:
    """The reason to skip a module: its forward, or that of its class of torch, was replaced; or
    None."""
    if "forward" in vars(module):
        return Reason.INSTANCE_FORWARD.format()
    cls = _stock.replaced(_stock.original(module))
    return cls and Reason.CLASS_FORWARD.format(cls.__name__)
