"""onepass's optimizers by name in timm's registry, and a swapped model of timm."""

import builtins
from collections import OrderedDict

import pytest
import torch
from torch import nn

import onepass
from onepass import numerics
from onepass.integrations.timm import register

factory = pytest.importorskip(
    "timm.optim", reason="timm is not installed, or its torchvision", exc_type=ImportError
)
timm = pytest.importorskip("timm", reason="timm is not installed")

CLASSES = {
    "onepassadafactor": onepass.optim.Adafactor, "onepassadam": onepass.optim.Adam,
    "onepassadamw": onepass.optim.AdamW, "onepasslamb": onepass.optim.LAMB,
    "onepasslion": onepass.optim.Lion, "onepasssgd": onepass.optim.SGD,
}  # fmt: skip
# timm's own with these settings. Its Adafactor and its LAMB have others.
ALIKE = [name for name in CLASSES if name not in ("onepassadafactor", "onepasslamb")]


@pytest.fixture(autouse=True)
def registered():
    assert register() == register() == [*CLASSES, "onepassmuon"]


def vit(seed: int = 0):
    torch.manual_seed(seed)
    return timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5
    )


def named_groups(model, optimizer) -> list[tuple[float, float, set[str]]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (group["weight_decay"], group.get("lr_scale", 1.0), {names[id(p)] for p in group["params"]})
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("layer_decay", [None, 0.5])
@pytest.mark.parametrize("name", CLASSES)
def test_groups_and_settings_are_those_of_timms_own(name, layer_decay):
    """Biases and norms without decay, layer decay, momentum: also of a model that is swapped."""
    settings = dict(lr=1e-2, weight_decay=0.1, layer_decay=layer_decay)
    stock, model = vit(), vit()
    onepass.swap(model)
    theirs = factory.create_optimizer_v2(stock, opt=name.removeprefix("onepass"), **settings)
    ours = factory.create_optimizer_v2(model, opt=name, **settings)
    assert type(ours) is CLASSES[name]
    assert named_groups(model, ours) == named_groups(stock, theirs)
    for key in ("lr", "betas", "eps", "momentum", "nesterov", "dampening"):
        if name in ALIKE:
            assert ours.param_groups[0].get(key) == theirs.param_groups[0].get(key), key


@pytest.mark.parametrize("fallback", [(), ("head.*",)])
def test_muon_has_what_timms_has(fallback):
    """The same parameters by timm's rule, in timm's groups; a step works."""
    from timm.optim.muon import _is_suitable_for_muon

    layers = dict(
        conv=nn.Conv2d(3, 8, 3), depthwise=nn.Conv2d(8, 8, 3, groups=8), pool=nn.Flatten(),
        wide=nn.Linear(8 * 4 * 4, 2), hidden=nn.Linear(2, 9), mixer=nn.Linear(9, 9),
        head=nn.Linear(9, 5),
    )  # fmt: skip
    model = nn.Sequential(OrderedDict(layers))
    settings = dict(lr=1e-2, weight_decay=0.1, fallback_list=fallback, eps=1e-5)
    optimizer = factory.create_optimizer_v2(model, opt="onepassmuon", ema_decay=0.9, **settings)
    assert type(optimizer) is onepass.optim.MuonWithAdamW
    which = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        wanted = _is_suitable_for_muon(p) and not (fallback and name.startswith("head."))
        assert which[p]["use_muon"] == wanted, name
        assert which[p]["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)
        assert wanted or which[p]["eps"] == 1e-5
        assert which[p]["momentum"] == 0.9
    assert sum(group["use_muon"] for group in optimizer.param_groups) == 2  # filters, matrices
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    loose = [nn.Parameter(torch.randn(8, 8))]
    assert factory.create_optimizer_v2(loose, opt="onepassmuon").param_groups[0]["use_muon"]


def test_options_are_keywords():
    model = vit().bfloat16()
    options = dict(master="fp32", max_grad_norm=1.0)
    optimizer = factory.create_optimizer_v2(model, opt="onepassadamw", lr=1e-3, **options)
    assert (optimizer.master, optimizer.max_grad_norm) == ("fp32", 1.0)
    ahead = factory.create_optimizer_v2(model, opt="lookahead_onepassadamw", lr=1e-3)
    assert type(ahead._base_optimizer) is onepass.optim.AdamW
    other = factory.create_optimizer_v2(vit(), opt="onepass_adamw", lr=1e-3)
    assert type(other) is torch.optim.AdamW  # an underscore is lost, hence names without


@pytest.mark.parametrize("name", ["onepassadamw", "onepasssgd"])
def test_a_swapped_model_trains_as_stock(name):
    def curve(ours: bool, seed: int, dtype=torch.float32):
        model = vit(seed).to(dtype)
        if ours:
            onepass.swap(model)
        opt = name if ours else name.removeprefix("onepass")
        optimizer = factory.create_optimizer_v2(model, opt=opt, lr=1e-2, weight_decay=0.1, eps=1e-3)
        images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        losses = []
        for _ in range(4):
            losses.append(model(images.to(dtype)).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).detach()

    seeds = range(6)
    ours, base = ([curve(which, seed) for seed in seeds] for which in (True, False))
    numerics.assert_close(ours, [curve(False, seed, torch.float64) for seed in seeds], base)


def test_what_is_missing_is_said(monkeypatch):
    found = builtins.__import__

    def missing(name, *arguments):
        if name.startswith("timm"):
            raise ModuleNotFoundError("No module named 'torchvision'")
        return found(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install --upgrade timm .got No module named 'torch"):
        register()
