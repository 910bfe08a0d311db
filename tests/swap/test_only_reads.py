"""A dry run, an exclusion, and a swap that takes nothing run no code of the user's: no
parametrization, no property, no hook."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

import onepass
from tests.swap import test_kinds
from tests.swap.foreign_linear import OwnAttention, Plain, TiedHead
from tests.swap.small_models import CONFIG, adaptive, resnet
from tests.swap.test_mlp import Llamas

transformers = pytest.importorskip("transformers", reason="its modules are swapped")


pytestmark = pytest.mark.usefixtures("slow_products")


class Ran(Exception):
    pass


class TiedHeadWithLoss(TiedHead):
    def forward(self, ids):
        return F.cross_entropy(super().forward(ids).flatten(0, 1), ids.flatten())


MODELS = {
    **{name: test_kinds.CASES[name].make for name in test_kinds.KINDS},
    "RMS norm": lambda: nn.RMSNorm(8),
    "resnet": resnet,
    "adaptive": adaptive,
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2),
    "decoder layer": lambda: nn.TransformerDecoderLayer(8, 2),
    "calls of attention": OwnAttention,
    "calls of the loss": TiedHeadWithLoss,
    "loss": lambda: nn.CrossEntropyLoss(torch.ones(4)),
    "model": lambda: transformers.LlamaForCausalLM(CONFIG),
    "others": lambda: nn.ModuleList([nn.Conv2d(3, 3, 1), nn.Embedding(5, 5), nn.BatchNorm1d(8)]),
}
OPTIONS = [
    {"dry_run": True},
    {"dry_run": True, "kinds": "linear"},
    {"dry_run": True, "force": "*"},
    {"dry_run": True, "lazy_logits": True},
    {"exclude": "*"},
    {"include": "nothing"},
    {"probe": False, "filter_fn": lambda module, name: False},
]
on_models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


def state_of(model):
    return copy.deepcopy(model.state_dict()), torch.get_rng_state()


def same(left, right):
    left, right = ([*tensors.values(), state] for tensors, state in (left, right))
    return all(map(torch.equal, left, right))


class Noise(nn.Module):
    ran = 0

    def forward(self, x):
        type(self).ran += 1
        return x + torch.randn_like(x)


@on_models
def test_parametrizations_do_not_run(make):
    model = make().train()
    for module in list(model.modules()):
        for name in list(module._parameters):
            if module._parameters[name] is not None:
                parametrize.register_parametrization(module, name, Noise(), unsafe=True)
    Noise.ran, before = 0, state_of(model)
    for options in OPTIONS:
        onepass.swap(model, **options)
        assert not Noise.ran and same(before, state_of(model)), options
    onepass.swap(model)  # takes no module of these
    assert not Noise.ran


class WithProperties:
    """Properties of names that are looked for in modules of any class."""

    def run(self):
        raise Ran("a property")

    in_features = out_features = config = eps = normalized_shape = head_dim = dropout = scale = (
        property(run)
    )


class WithGetattr:
    def __getattr__(self, name):
        if name in ("parametrizations", "config", "in_features", "chunk_dim", "head_dim"):
            raise Ran(name)
        return super().__getattr__(name)


@pytest.mark.parametrize("mixin", [WithProperties, WithGetattr])
def test_attributes_are_not_computed(mixin):
    class Own(mixin, nn.Module):
        def forward(self, x):
            return x

    class OwnCalls(mixin, Plain):
        pass

    class OwnLinear(mixin, nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.inner(x)

    class Block(mixin, Llamas):
        def __init__(self):
            super().__init__()
            self.gate_proj = OwnLinear()

    model = nn.ModuleList([Own(), OwnCalls(), OwnLinear(), Block(), OwnAttention()])
    for options in OPTIONS:
        onepass.swap(model, **options)


def test_a_weight_that_is_a_property_is_read_in_calls_alone():
    class OwnWeight(nn.Linear):
        reads = 0

        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.given = nn.Parameter(self._parameters.pop("weight").detach())

        @property
        def weight(self):
            type(self).reads += 1
            return 2 * self.given

    OwnWeight.reads, model, x = 0, OwnWeight(8, 8), torch.randn(3, 8)
    assert onepass.swap(model).swapped and not OwnWeight.reads
    torch.testing.assert_close(model(x), F.linear(x, 2 * model.given, model.bias))


@on_models
def test_hooks_do_not_run(make):
    def hook(*_):
        raise Ran("a hook")

    model = make()
    handles = [register_module_forward_hook(hook), register_module_forward_pre_hook(hook)]
    handles += [module.register_forward_hook(hook) for module in model.modules()]
    handles += [module.register_full_backward_hook(hook) for module in model.modules()]
    handles += [p.register_hook(hook) for p in model.parameters() if p.requires_grad]
    try:
        onepass.swap(model, dry_run=True)
        for handle in handles[2:]:
            handle.remove()
        report = onepass.swap(model, dry_run=True)
    finally:
        for handle in handles:
            handle.remove()
    assert report.to_dict() == onepass.swap(model, dry_run=True).to_dict()
