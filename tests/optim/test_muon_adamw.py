"""Muon and AdamW as one optimizer: the same steps as two optimizers, and groups of a model."""

import inspect

import pytest
import torch

import onepass
from onepass.optim import MuonWithAdamW, muon_groups
from tests.optim.cases import give_gradients, made, members, same
from tests.support.dtypes import BF16, F32, F64

SHAPES = ((24, 40), (40, 24), (24, 40), (24,), (4352,), (), (5, 4, 3))
OPTIONS = {
    "plain": {},
    "fp32": {"master": "fp32"},
    "remainder16": {"master": "remainder16", "state_dtype": BF16},
    "int8": {"master": "fp32", "state_dtype": "int8"},
    "zeroing": {"zero_grads": True},
}


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_both(name, dtype):
    """Bit for bit, with other parameters without gradients in each step."""
    options = OPTIONS[name]
    whole = made("MuonWithAdamW", SHAPES, dtype, **options)
    more = torch.randn(33, 20).to(dtype).requires_grad_()
    whole.add_param_group({"params": [more], "use_muon": True, "momentum": 0.8})
    copies = [
        {**group, "params": [p.detach().clone().requires_grad_() for p in group["params"]]}
        for group in whole.param_groups
    ]
    of_muon = {**options, "state_dtype": F32} if name == "int8" else options
    muon = onepass.optim.Muon([group for group in copies if group["use_muon"]], **of_muon)
    adamw = onepass.optim.AdamW([group for group in copies if not group["use_muon"]], **options)
    pairs = list(zip(members(whole), [p for g in copies for p in g["params"]], strict=True))
    for number, missing in enumerate(((), (0, 4), (0, 1, 2, 7), (3, 4, 5, 6), range(8), ())):
        give_gradients(whole, number)
        for index, (p, q) in enumerate(pairs):
            p.grad = None if index in missing else p.grad
            q.grad = None if index in missing else p.grad.clone()
        for optimizer in (whole, muon, adamw):
            optimizer.step()
        if "zero_grads" in options:
            assert not any(p.grad.any() for p, _ in pairs if p.grad is not None)
    for p, q in pairs:
        is_muons = q in muon.state
        # Second moments are rounded at random, by the parameter's number.
        if not is_muons and (name == "remainder16" or (name == "int8" and p.numel() > 4096)):
            continue
        assert same(p, q)
        found, expected = whole.state[p], (muon if is_muons else adamw).state[q]
        assert expected.keys() <= found.keys()
        assert all(same(found[key], value) for key, value in expected.items())


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
    optimizer = made("MuonWithAdamW", SHAPES)
    checkpoint = optimizer.state_dict()
    del checkpoint["param_groups"][0]["use_muon"]
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


def test_a_head_that_the_model_names():
    """As models of transformers do."""
    model = torch.nn.ModuleDict({"mlp": Block(8)})
    model.get_output_embeddings = lambda: model["mlp"].up
    muon, adamw = named(muon_groups(model))
    assert "mlp.up.weight" in adamw[1] and "mlp.qkv.weight" in muon[1]


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
