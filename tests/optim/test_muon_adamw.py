"""Muon and AdamW as one optimizer: the same steps as two optimizers, and groups of a model."""

from __future__ import annotations

import inspect

import pytest
import torch

import onepass
from onepass.optim import MuonWithAdamW, muon_groups
from tests.optim.cases import assert_same, members
from tests.support.dtypes import BF16, F32, F64

SHAPES = ((24, 40), (40, 24), (24, 40), (24,), (64, 64), (), (5, 4, 3))
BY_MUON = 3  # the number of them
OPTIONS = {
    "plain": {},
    "fp32": {"master": "fp32"},
    "remainder16": {"master": "remainder16", "state_dtype": "bfloat16"},
    "int8": {"master": "fp32", "state_dtype": "int8"},
    "zeroing": {"zero_grads": True},
}


def drawn(dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def groups_of(params):
    return [
        {"params": params[:2], "use_muon": True},
        {"params": params[BY_MUON:], "use_muon": False, "lr": 3e-3},
        {"params": params[2:BY_MUON], "use_muon": True, "momentum": 0.8},
    ]


def made(dtype=F32, **settings):
    params = [p.requires_grad_() for p in drawn(dtype)]
    return MuonWithAdamW(groups_of(params), **{"lr": 1e-2, **settings}), params


def apart(dtype=F32, **settings):
    """Muon's and AdamW's own classes over the same parameters."""
    params = [p.requires_grad_() for p in drawn(dtype)]
    muon, adamw, second = ({**g} for g in groups_of(params))
    for group in (muon, adamw, second):
        del group["use_muon"]
    settings = {"lr": 1e-2, "weight_decay": 0.1, **settings}
    of_muon = {**settings}
    if settings.get("state_dtype") == "int8":
        of_muon["state_dtype"] = F32
    return [
        onepass.optim.Muon([muon, second], adjust_lr_fn="match_rms_adamw", **of_muon),
        onepass.optim.AdamW([adamw], betas=(0.9, 0.95), **settings),
    ], params


def give(params, number, missing=()):
    for i, (p, gradient) in enumerate(zip(params, drawn(F64, seed=100 + number), strict=True)):
        p.grad = None if i in missing else gradient.to(p.dtype)


def values(params, optimizers):
    found = {(i, "param"): p.detach().clone() for i, p in enumerate(params)}
    for optimizer in optimizers:
        entries = optimizer.state_dict()["state"]
        numbers = {id(p): i for i, p in enumerate(params)}
        for k, p in enumerate(members(optimizer)):
            for key, value in entries.get(k, {}).items():
                found[numbers[id(p)], key] = value.clone()
    return found


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_both(name, dtype):
    """Bit for bit, with other parameters without gradients in each step."""
    options = OPTIONS[name]
    whole, params = made(dtype, **options)
    halves, others = apart(dtype, **options)
    for number, missing in enumerate(((), (0, 4), (0, 1, 2), (3, 4, 5, 6), range(7), ())):
        for some in (params, others):
            give(some, number, missing)
        whole.step()
        for half in halves:
            half.step()
        if options.get("zero_grads"):
            assert not any(p.grad.any() for p in params if p.grad is not None)
    found, expected = values(params, [whole]), values(others, halves)

    def compared(key):
        number, what = key
        if name == "remainder16":  # AdamW rounds second moments at random, by the number
            return number < BY_MUON and what != "step"
        if name == "int8":
            return number != 4 and (number >= BY_MUON or what != "step")
        return True

    found, expected = ({k: v for k, v in one.items() if compared(k)} for one in (found, expected))
    assert_same(found, expected, name)


def test_groups_of_jordans_optimizer_are_taken():
    """KellerJordan/Muon: MuonWithAuxAdam."""
    matrix, vector = torch.zeros(4, 4, requires_grad=True), torch.zeros(4, requires_grad=True)
    groups = [
        dict(params=[matrix], use_muon=True, lr=0.02, momentum=0.95, weight_decay=0.01),
        dict(params=[vector], use_muon=False, lr=3e-4, betas=(0.9, 0.95), eps=1e-10),
    ]
    optimizer = MuonWithAdamW(groups)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-7, 1e-10]
    assert isinstance(optimizer, torch.optim.Muon)


def test_the_signature_begins_with_muons():
    names = [list(inspect.signature(cls).parameters) for cls in (torch.optim.Muon, MuonWithAdamW)]
    assert names[1][: len(names[0])] == names[0]


def test_errors():
    matrix, vector = torch.zeros(4, 4, requires_grad=True), torch.zeros(4, requires_grad=True)
    for params in ([matrix], [{"params": [matrix]}], [{"params": [matrix], "use_muon": 1}]):
        with pytest.raises(
            ValueError, match="^MuonWithAdamW: use_muon of parameter group 0 must be True or False"
        ):
            MuonWithAdamW(params)
    with pytest.raises(ValueError, match="^MuonWithAdamW only supports 2D parameters"):
        MuonWithAdamW([{"params": [vector], "use_muon": True}])
    with pytest.raises(ValueError, match="^Invalid beta parameter at index 1: 1.0"):
        MuonWithAdamW([{"params": [vector], "use_muon": False}], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="^MuonWithAdamW: ns_steps must be a whole number"):
        MuonWithAdamW([{"params": [matrix], "use_muon": True}], ns_steps=-1)
    optimizer, params = made()
    plain = onepass.optim.Muon([{"params": [p]} for p in params[:3]])
    checkpoint = plain.state_dict()
    for group, other in zip(checkpoint["param_groups"], optimizer.param_groups, strict=True):
        group["params"] = list(range(len(other["params"])))
    with pytest.raises(ValueError, match="use_muon of parameter group 0 must be True or False"):
        optimizer.load_state_dict(checkpoint)


# ---- the groups of a model -----------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.norm = torch.nn.LayerNorm(width)


class Model(torch.nn.Module):
    def __init__(self, tied=False, head="lm_head"):
        super().__init__()
        self.tokens = torch.nn.Embedding(50, 8)
        self.positions = torch.nn.Embedding(32, 8)  # of the shape of `up`
        self.pos_embed = torch.nn.Parameter(torch.zeros(7, 8))
        self.experts = torch.nn.Parameter(torch.zeros(3, 8, 8))
        self.blocks = torch.nn.ModuleList([Block(8), Block(8)])
        setattr(self, head, torch.nn.Linear(8, 50, bias=False))
        if tied:
            getattr(self, head).weight = self.tokens.weight


def named(groups):
    return [(group["use_muon"], {name for name, _ in group["params"]}) for group in groups]


MATRICES = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("qkv", "up", "down")}


@pytest.mark.parametrize("head", ["lm_head", "classifier", "fc", "words"])  # the last by its shape
@pytest.mark.parametrize("tied", [False, True])
def test_hidden_matrices_are_muons(tied, head):
    model = Model(tied, head)
    all_names = {name for name, _ in model.named_parameters()}
    assert named(muon_groups(model)) == [(True, MATRICES), (False, all_names - MATRICES)]


def test_a_small_head_by_its_place_in_the_model():
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(8, 3), "mlp": Block(8)})
    muon, adamw = named(muon_groups(model))
    assert muon[1] == {"mlp.qkv.weight", "mlp.up.weight", "mlp.down.weight"}
    assert "fc.weight" in adamw[1]


def test_patterns_outweigh_the_rule():
    model = Model()
    model.blocks[1].up.weight.requires_grad_(False)
    groups = muon_groups(
        model, others=["*.down.*"], matrices={"*.qkv.weight": 3, "experts": "stacked"}
    )
    muon, qkv, experts, adamw = named(groups)
    assert muon == (True, {"blocks.0.up.weight"})
    assert qkv == (True, {"blocks.0.qkv.weight", "blocks.1.qkv.weight"})
    assert experts == (True, {"experts"}) and groups[2]["matrices"] == "stacked"
    assert "blocks.0.down.weight" in adamw[1] and "blocks.1.up.weight" not in adamw[1]
    optimizer = MuonWithAdamW(groups)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(ValueError, match=r"^muon_groups: others and matrices must name .*\['x\.\*"):
        muon_groups(model, others=["x.*"])


def test_nothing_for_one_of_both():
    assert named(muon_groups(torch.nn.LayerNorm(4))) == [(False, {"weight", "bias"})]
    assert named(muon_groups(torch.nn.Linear(4, 4, bias=False))) == [(True, {"weight"})]


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64)
    config = transformers.LlamaConfig(num_attention_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config)
    muon, adamw = named(muon_groups(model))
    assert len(muon[1]) == 7 and all(name.endswith("_proj.weight") for name in muon[1])
    assert "lm_head.weight" in adamw[1] and "model.embed_tokens.weight" in adamw[1]
