"""Modules that a swap leaves as they are: what is left, of which kind, and the reason why.

Those that it takes are in test_kinds.
"""

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.swapping.reasons import Reason
from tests.swap import (
    foreign_attention,
    foreign_linear,
    foreign_norms,
    small_models,
    test_kinds,
    test_loss,
    test_mlp,
    test_norm_constants,
    test_rotary,
)
from tests.swap.reported import names, types

pytestmark = pytest.mark.usefixtures("slow_products", "every_loss_gains", "probed_once")

COLS = 192  # of fewer, a probe draws again


class Kept(NamedTuple):
    """A module, as `it` in a model."""

    make: Callable[[], nn.Module]
    kind: str
    reason: Reason | None  # None: it is no candidate, and is not listed
    words: str = ""  # in the reason
    listed: str = "skipped"
    at: str = "it"  # the name that is listed


# ---- modules -------------------------------------------------------------------------------------


class SpatialDropout(nn.Dropout):
    """A subclass, whose kind of dropout is unknown."""


def own(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass with a forward of its own."""

    def forward(self, *args, **named):
        return cls.forward(self, *args, **named)

    return type(f"Own{cls.__name__}", (cls,), {"forward": forward})


OwnMultihead, OwnNorm, OwnSiLU, OwnLinear, OwnSequential = map(
    own, (nn.MultiheadAttention, nn.GroupNorm, nn.SiLU, nn.Linear, nn.Sequential)
)


class OwnAttention(foreign_attention.Base):
    def forward(self, x):
        q, k, v = self.split(x)
        return self.join((q @ k.mT) @ v)


class OwnBlock(nn.TransformerEncoderLayer):
    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        return x


class FewClasses(test_loss.LanguageModel):
    """Classes of a sentence: the number of logits is not that of the embedding's rows."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(test_loss.WIDTH, 5)


class OfAChild(test_loss.LanguageModel):
    """The name is that of another kind of module."""

    def __init__(self):
        super().__init__()
        self.cross_entropy = nn.NLLLoss()

    def forward(self, x):
        return self.cross_entropy(self.head(x).log_softmax(-1), test_loss.words(x))


class LossInACheckpoint(test_loss.LanguageModel):
    def forward(self, x):
        loss = nn.functional.cross_entropy
        return checkpoint(loss, self.head(x), test_loss.words(x), use_reentrant=False)


class OddMLP(test_mlp.Doubled):
    """A block by its name."""


class ByComplexNumbers(test_rotary.Attention):
    def forward(self, x, cos, sin):
        return apply_rotary_emb(*self.heads(x), torch.complex(cos, sin))


def apply_rotary_emb(q, k, freqs_cis):
    return q, k


class AlsoAnAttribute(test_rotary.Attention):
    """The name of the function is that of an attribute."""

    def forward(self, x, cos, sin):
        q, k = test_rotary.apply_rotary_pos_emb(*self.heads(x), cos, sin)
        return self.apply_rotary_pos_emb(q, k)


def hooked_activation() -> nn.Module:
    block = test_mlp.Llamas()
    block.act_fn.register_forward_hook(lambda *_: None)
    return block


def before_silu(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.GroupNorm(2, 8), *modules, nn.SiLU())


# ---- changes of modules that would be taken ------------------------------------------------------


class Tagged(nn.Parameter):
    """A class of tensors that may compute in a way of its own."""


def forward_on_the_instance(module: nn.Module) -> None:
    module.forward = module.forward


def parametrized(module: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())


def class_of_the_weight(module: nn.Module) -> None:
    module.weight = module.weight.detach().as_subclass(Tagged).requires_grad_()


def own_call(module: nn.Module) -> None:
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"__call__": lambda self, x: self.forward(x)})


ALTERED = {
    forward_on_the_instance: (Reason.INSTANCE_FORWARD, ""),
    parametrized: (Reason.PARAMETRIZED, ""),
    class_of_the_weight: (Reason.PARAMETER_CLASS, "its weight is a Tagged"),
    own_call: (Reason.OWN_CALL, ""),
}


def altered(make: Callable, change: Callable) -> Callable[[], nn.Module]:
    def changed() -> nn.Module:
        change(module := make())
        return module

    return changed


# ---- modules of other packages -------------------------------------------------------------------

IN_TRANSFORMERS = {  # constructor arguments, and the reason, by module and class
    "mamba2.MambaRMSNormGated": ((COLS, 16), Reason.ARGUMENTS, "(hidden_states, gate=None)"),
    "olmo.OlmoLayerNorm": ((COLS,), Reason.NO_WEIGHT),
    "mobilebert.NoNorm": ((COLS,), Reason.NO_EPS),
    "cohere.CohereLayerNorm": (((2, COLS),), Reason.DIMENSIONS, "its weight"),
    "detr.DetrFrozenBatchNorm2d": ((COLS,), Reason.BUFFERS, "weight, bias, running_mean"),
    "poolformer.PoolFormerGroupNorm": ((COLS,), Reason.GROUP_NORM),
    "squeezebert.SqueezeBertLayerNorm": ((COLS,), Reason.PROBE, "fails on a 2-D float32 input"),
    "vitdet.VitDetLayerNorm": ((COLS,), Reason.PROBE, f"returns ({COLS}, 5, {COLS}) for an input"),
}


def of_transformers(path: str, *arguments) -> nn.Module:
    pytest.importorskip("transformers", reason="its norms are looked at")
    family, _, name = path.partition(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, name)(*arguments)


def of_diffusers(path: str, *arguments, **options) -> Callable[[], nn.Module]:
    module, _, name = path.partition(".")
    return lambda: getattr(small_models.diffusers_part(module), name)(*arguments, **options)


def identity_for_norm(module: nn.Module) -> None:
    module.norm = nn.Identity()


def hooked_norm(module: nn.Module) -> None:
    module.norm.register_forward_hook(lambda *_: None)


def own_silu(module: nn.Module) -> None:
    module.nonlinearity = OwnSiLU()


def own_forward(module: nn.Module) -> None:
    module.__class__ = own(type(module))


NORMALIZATION = "normalization."
ZERO = of_diffusers(NORMALIZATION + "AdaLayerNormZero", 16)
RESNET = {"in_channels": 8, "groups": 4, "temb_channels": 12}

# ---- the table -----------------------------------------------------------------------------------

KEPT = {
    "batch norm": Kept(lambda: nn.BatchNorm1d(8), "norm", Reason.BATCH_NORM),
    "instance norm": Kept(lambda: nn.InstanceNorm1d(8), "norm", Reason.BATCH_NORM),
    "response norm": Kept(lambda: nn.LocalResponseNorm(2), "norm", Reason.RESPONSE_NORM),
    "subclass of dropout": Kept(lambda: SpatialDropout(0.1), "dropout", Reason.DROPOUT_SUBCLASS),
    "group norm": Kept(
        lambda: nn.GroupNorm(4, 8), "norm", Reason.GROUP_NORM, "as fast at group norm in float32"
    ),
    "group norm in float64": Kept(
        lambda: nn.GroupNorm(4, 8).double(), "norm", Reason.GROUP_NORM, "group norm in float64"
    ),
    "own group norm": Kept(lambda: OwnNorm(2, 8), "norm", Reason.OWN_FORWARD),
    **{
        f"group norm, {between}": Kept(
            before_silu(between), "norm", Reason.GROUP_NORM, at="it.0"
        )
        for between in (
            nn.ReLU(), nn.Identity(), nn.Dropout(0.1), nn.GELU(), nn.Hardswish(), OwnSiLU(),
        )
    },
    "own group norm, silu": Kept(
        lambda: nn.Sequential(OwnNorm(2, 8), nn.SiLU()), "norm", Reason.OWN_FORWARD, at="it.0"
    ),
    "own Sequential": Kept(
        lambda: OwnSequential(nn.GroupNorm(2, 8), nn.SiLU()), "norm", Reason.GROUP_NORM, at="it.0"
    ),
    **{
        cls.__name__: Kept(lambda cls=cls: cls(COLS), "norm", *reason)
        for cls, reason in foreign_norms.REFUSED.items()
    },
    **{
        cls.__name__: Kept(lambda cls=cls: cls(bias=False), "norm", *reason)
        for cls, reason in test_norm_constants.REFUSED.items()
    },
    **{
        path: Kept(functools.partial(of_transformers, path, *arguments), "norm", *reason)
        for path, (arguments, *reason) in IN_TRANSFORMERS.items()
    },
    **{
        f"{name}, {alter.__name__}": Kept(
            altered(test_kinds.CASES[name].make, alter), test_kinds.CASES[name].kind, *reason
        )
        for name in ("LayerNorm", "GroupNorm", "Linear", "Conv1D", "F.linear: Plain")
        for alter, reason in ALTERED.items()
    },
    "linear: own": Kept(lambda: OwnLinear(8, 8), "linear", Reason.OWN_FORWARD, listed="unknown"),
    "linear: lazy": Kept(lambda: nn.LazyLinear(8), "linear", Reason.PARAMETER_CLASS),
    "linear: ours": Kept(lambda: onepass.nn.Linear(8, 8), "linear", None),
    "linear: checkpoint": Kept(
        foreign_linear.CheckpointsInside, "linear", Reason.CHECKPOINTS, "torch's products"
    ),
    **{f"linear: {cls.__name__}": Kept(cls, "linear", None) for cls in foreign_linear.NOT_FOUND},
    **{f"mlp: {name}": Kept(make, "mlp", None) for name, make in test_mlp.NOT_FOUND.items()},
    "mlp: by its name": Kept(OddMLP, "mlp", Reason.BLOCK, listed="unknown"),
    "mlp: hooked": Kept(hooked_activation, "mlp", Reason.HOOKS),
    **{
        f"rotary: {function.__name__}": Kept(
            functools.partial(test_rotary.caller, function), "rotary", Reason.ROTARY,
            f"function {words}",
        )
        for function, words in test_rotary.REFUSED.items()
    },
    "rotary: complex": Kept(
        ByComplexNumbers, "rotary", Reason.NO_TABLES, "apply_rotary_emb", "unknown"
    ),
    "rotary: an attribute": Kept(AlsoAnAttribute, "rotary", None),
    "attention: own": Kept(OwnAttention, "attention", Reason.NO_CALLS, listed="unknown"),
    "attention: own MHA": Kept(
        lambda: OwnMultihead(8, 2), "attention", Reason.OWN_FORWARD, listed="unknown"
    ),
    "attention: wide": Kept(
        lambda: nn.MultiheadAttention(520, 1), "attention", Reason.HEAD_DIM, "520, is above 512"
    ),
    "attention: own block": Kept(lambda: OwnBlock(8, 2), "attention", Reason.OWN_SA_BLOCK),
    **{
        f"attention: {cls.__name__}": Kept(
            cls, "attention", Reason.CHECKPOINTS, "checkpoints inside its forward"
        )
        for cls in foreign_attention.CHECKPOINTING
    },
    "loss: few classes": Kept(FewClasses, "loss", None),
    "loss: of a child": Kept(OfAChild, "loss", None),
    "loss: checkpoint": Kept(LossInACheckpoint, "loss", Reason.CHECKPOINTS),
    "diffusers: no norm": Kept(
        of_diffusers(NORMALIZATION + "AdaLayerNormSingle", 24), "norm", Reason.NO_NORM,
        listed="unknown",
    ),
    "diffusers: one for the batch": Kept(
        of_diffusers(NORMALIZATION + "AdaLayerNorm", 16, 4), "norm", Reason.ONE_MODULATION
    ),
    "diffusers: two weights": Kept(
        of_diffusers(NORMALIZATION + "AdaLayerNormContinuous", 16, 8), "norm",
        Reason.NORM_HAS_WEIGHT,
    ),
    "diffusers: no rule": Kept(
        altered(ZERO, identity_for_norm), "norm", Reason.OTHER_NORM, "is a Identity"
    ),
    "diffusers: hooks": Kept(altered(ZERO, hooked_norm), "norm", Reason.HOOKS, "its norm has"),
    "diffusers: own": Kept(altered(ZERO, own_forward), "norm", Reason.OWN_FORWARD),
    "diffusers: own resnet": Kept(
        altered(of_diffusers("resnet.ResnetBlock2D", **RESNET), own_forward), "norm",
        Reason.OWN_FORWARD,
    ),
    "diffusers: own silu": Kept(
        altered(of_diffusers("resnet.ResnetBlock2D", **RESNET), own_silu), "norm",
        Reason.GROUP_NORM, at="it.norm1",
    ),
    "diffusers: relu": Kept(
        of_diffusers("resnet.ResnetBlock2D", **RESNET, non_linearity="relu"), "norm",
        Reason.GROUP_NORM, at="it.norm1",
    ),
}  # fmt: skip
AS_FAST = (Reason.GROUP_NORM,)  # nothing is lost, which is no error under strict


@pytest.mark.parametrize("name", KEPT)
def test_kept_with_a_reason(name):
    case = KEPT[name]
    model = nn.ModuleDict({"it": case.make()})
    before, state = types(model), torch.get_rng_state()
    report = onepass.swap(model, kinds=case.kind)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model["it"]) is before[1] and not {"it", case.at} & names(report.swapped)
    if case.reason is None:
        assert not report.skipped and not report.unknown
        return
    (reason,) = (e["reason"] for e in getattr(report, case.listed) if e["name"] == case.at)
    assert reason.kind is case.reason and case.words in reason
    if case.listed == "skipped" and case.reason not in AS_FAST:
        with pytest.raises(RuntimeError, match="under strict"):
            onepass.swap(model, kinds=case.kind, strict=True)
