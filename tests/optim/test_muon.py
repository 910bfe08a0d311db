"""Muon on the CPU: values, torch's form of it, stacked matrices, options, settings."""

import inspect

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import onepass
from onepass import numerics
from onepass._policy import products
from onepass.optim import newton_schulz
from tests.optim import cases
from tests.optim.cases import (
    ReferenceMuon,
    assert_same,
    everything,
    give_gradients,
    members,
    over_copies,
    same,
    snapshot,
    steps,
    without_gradients,
)
from tests.support.dtypes import BF16, F16, F32, F64

Muon = onepass.optim.Muon
# Wide, tall and square; one with strips; two of a shape; single rows and columns.
SHAPES = ((24, 40), (40, 24), (33, 33), (24, 40), (1, 9), (9, 1), (260, 270))
SETTINGS = {
    "defaults": {},
    "plain momentum": {"nesterov": False, "momentum": 0.8},
    "no momentum": {"momentum": 0.0},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw", "lr": 1e-2},
    "original": {"adjust_lr_fn": "original", "weight_decay": 0.0},
    "other iterations": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "eps": 1e-3},
    "no iterations": {"ns_steps": 0},
    "tensor lr": {"lr": torch.tensor(0.02)},
}


settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def made(shapes=SHAPES, dtype=F32, cls=Muon, **settings):
    """Products are the same on every CPU, unless `ns_dtype` is given."""
    own = {"ns_dtype": None if dtype is F64 else F32}
    return cases.made("Muon", shapes, dtype, cls=cls, **{"lr": 0.02, **own, **settings})


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@settings
def test_values(settings, dtype):
    shapes = SHAPES if dtype is F32 else SHAPES[:-1]
    found, ref, base = (
        without_gradients(steps(made(shapes, kind, cls, **settings), 3))
        for cls, kind in ((Muon, dtype), (ReferenceMuon, F64), (ReferenceMuon, dtype))
    )
    assert found.keys() == ref.keys()
    for key, value in found.items():
        numerics.assert_close(value, ref[key], base[key], case=f"{settings}, {key}")


@settings
def test_bfloat16_products_are_as_exact_as_torchs(settings):
    """Compares updates alone: they are a small part of the parameters."""
    shapes, moved = ((64, 96), (96, 64), (80, 80)), []
    kinds = ((Muon, F32, BF16), (ReferenceMuon, F64, None), (torch.optim.Muon, F32, None))
    for cls, dtype, ns_dtype in (*kinds, (Muon, F32, F32)):
        options = {**settings, "weight_decay": 0.0, "ns_dtype": ns_dtype}
        optimizer = made(shapes, dtype, cls, **options)
        start = [p.detach().clone() for p in members(optimizer)]
        after = members(steps(optimizer, 2))
        moved.append([p.detach() - s for p, s in zip(after, start, strict=True)])
    numerics.assert_close(*moved[:3], case=str(settings))
    assert not any(map(same, moved[0], moved[3]))


@pytest.mark.parametrize("has_instructions", [True, False])
def test_products_are_bfloat16_where_the_cpu_has_them(has_instructions, monkeypatch):
    facts = products.facts()._replace(bfloat16=has_instructions)
    monkeypatch.setattr(products, "facts", lambda: facts)
    found = snapshot(steps(made(ns_dtype=None), 1))
    word = "bfloat16" if has_instructions else "float32"
    assert_same(found, snapshot(steps(made(ns_dtype=word), 1)))


def test_singular_values_come_near_one():
    x = torch.randn(3, 50, 80)
    x /= torch.linalg.matrix_norm(x)[:, None, None]
    found = torch.linalg.svdvals(newton_schulz.orthogonalized(x, (3.4445, -4.775, 2.0315), 5, 1.0))
    assert 0.6 < found.min() and found.max() < 1.3


@pytest.mark.parametrize("rows", [256, 257, 515])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_strips_are_the_whole_product(rows, dtype):
    x = torch.randn(2, rows, rows + 20, dtype=dtype) / rows
    gram = newton_schulz._symmetric(None, x, x.mT, 0.0, 1.0)
    wide = x.double()
    numerics.assert_close(gram, wide @ wide.mT, x @ x.mT)
    polynomial = newton_schulz._symmetric(gram, gram, gram, -4.75, 2.0)
    wide = gram.double()
    numerics.assert_close(
        polynomial,
        -4.75 * wide + 2 * wide @ wide,
        torch.baddbmm(gram, gram, gram, beta=-4.75, alpha=2.0),  # as torch's Muon computes it
    )


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_symmetric_products_are_computed_by_half(dtype):
    """Strips up to the diagonal: 5 of 8 parts. In 16 bits and for few rows, products are whole."""
    for rows, share in ((512, 5 / 8 if dtype is not BF16 else 1), (255, 1)):
        x = torch.randn(2, rows, 32, dtype=F32).to(dtype)
        with FlopCounterMode(display=False) as counter:
            newton_schulz._symmetric(None, x, x.mT, 0.0, 1.0)
        assert counter.get_total_flops() == share * 2 * 2 * rows * rows * 32


def test_a_batch_is_cut_where_it_grows(monkeypatch):
    shapes = [(6, 8)] * 7 + [(8, 6)] * 3
    whole = snapshot(steps(made(shapes, adjust_lr_fn="match_rms_adamw"), 2))
    monkeypatch.setattr("onepass.optim.muon.MAX_BATCH", 2 * 48)
    cut = snapshot(steps(made(shapes, adjust_lr_fn="match_rms_adamw"), 2))
    for key, value in whole.items():
        torch.testing.assert_close(cut[key], value)


# ---- as torch's ----------------------------------------------------------------------------------


def test_the_signature_begins_with_torchs():
    theirs = list(inspect.signature(torch.optim.Muon).parameters.values())
    mine = list(inspect.signature(Muon).parameters.values())[: len(theirs)]
    assert [(p.name, p.default, p.kind) for p in mine] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert issubclass(Muon, torch.optim.Muon)


def test_checkpoints_of_torch_load():
    """Its keys suffice: those that only we have come from the constructor."""
    checkpoint = steps(made(cls=torch.optim.Muon, momentum=0.9), 2).state_dict()
    mine = made(ns_dtype="bfloat16")
    mine.load_state_dict(checkpoint)
    (group,) = mine.param_groups
    assert (group["momentum"], group["ns_dtype"], group["matrices"]) == (0.9, "bfloat16", None)
    assert all(list(entry) == ["momentum_buffer"] for entry in mine.state_dict()["state"].values())
    steps(mine, 1)


ERRORS = {
    "Learning rate should be >= 0 but is: -0.5": {"lr": -0.5},
    "Tensor lr must be 1-element": {"lr": torch.tensor([0.1, 0.2])},
    "momentum should be >= 0 but is: -1.0": {"momentum": -1.0},
    "weight decay should be >= 0 but is: -0.5": {"weight_decay": -0.5},
    "Adjust learning rate function arbitrary is not supported": {"adjust_lr_fn": "arbitrary"},
}


@pytest.mark.parametrize("cls", [torch.optim.Muon, Muon])
def test_errors_of_torch(cls):
    for message, settings in ERRORS.items():
        with pytest.raises(ValueError, match=message):
            cls([torch.zeros(3, 4, requires_grad=True)], **settings)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_parameters_that_are_no_matrices(shape):
    for cls in (torch.optim.Muon, Muon):
        with pytest.raises(ValueError, match="Muon only supports 2D parameters whereas we found"):
            cls([torch.zeros(shape, requires_grad=True)])
    optimizer = made()
    with pytest.raises(ValueError, match="only supports 2D"):
        optimizer.add_param_group({"params": [torch.zeros(shape, requires_grad=True)]})
    assert len(optimizer.param_groups) == 1


OWN_ERRORS = [
    ({"ns_steps": 100}, "ns_steps must be a whole number from 0 to 99, got 100"),
    ({"ns_steps": 2.0}, "ns_steps must be a whole number from 0 to 99, got 2.0"),
    ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients must be three numbers, got \(1.0, 2.0\)"),
    ({"ns_coefficients": "abc"}, "ns_coefficients must be three numbers, got 'abc'"),
    ({"ns_dtype": torch.float16}, "ns_dtype must be None, torch.float32 or torch.bfloat16, got"),
    ({"state_dtype": "int8"}, "state_dtype must be None, torch.float32 or torch.bfloat16, got"),
    ({"matrices": 5}, "matrices must divide a parameter's 12 rows, got 5"),
    ({"matrices": (5, 6)}, r"matrices must be sizes that add up to a parameter's 12 rows, got"),
    ({"matrices": True}, r"matrices must be sizes that add up to a parameter's 12 rows, got"),
    ({"matrices": "experts"}, "matrices must be None, a number, sizes, 'stacked' or 'flattened'"),
    ({"matrices": "stacked"}, "params must have 3 dimensions or more with matrices='stacked'"),
]


@pytest.mark.parametrize(("settings", "message"), OWN_ERRORS, ids=lambda v: str(v)[:20])
def test_errors(settings, message):
    with pytest.raises(ValueError, match=f"^Muon: {message}"):
        Muon([torch.zeros(12, 4, requires_grad=True)], **settings)
    group = {key: value for key, value in settings.items() if key != "state_dtype"}
    if group:  # as set by a user between two steps, or loaded
        optimizer = made(((12, 4),))
        optimizer.param_groups[0].update(group)
        before = everything(optimizer)
        with pytest.raises(ValueError, match=f"^Muon: {message}"):
            steps(optimizer, 1)
        after = everything(optimizer)
        assert {**before, "grads": 0, "versions": 0} == {**after, "grads": 0, "versions": 0}
        if "matrices" not in group:
            with pytest.raises(ValueError, match=f"^Muon: {message}"):
                made(((12, 4),)).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="params must have 2 dimensions with matrices=2, got"):
        Muon([torch.zeros(12, requires_grad=True)], matrices=2)
    with pytest.raises(ValueError, match="params must have 2 dimensions or more with matrices='fl"):
        Muon([torch.zeros(12, requires_grad=True)], matrices="flattened")


# ---- steps ---------------------------------------------------------------------------------------


def test_parameters_without_a_gradient_are_still():
    p = torch.full((3, 4), 2.0, requires_grad=True)
    p.grad = torch.zeros(3, 4)
    Muon([p], weight_decay=0.0).step()
    assert (p == 2.0).all()


def test_autocast_has_no_part_in_a_step():
    plain = snapshot(steps(made(), 1))
    with torch.autocast("cpu", dtype=BF16):
        assert_same(snapshot(steps(made(), 1)), plain)


# ---- masters, states, clipping -------------------------------------------------------------------


def test_stochastic_rounding_is_right_on_average():
    p = torch.nn.Parameter(torch.full((400, 400), 1.0, dtype=BF16))
    optimizer = Muon([p], lr=1e-4, weight_decay=1.0, master="stochastic")
    for _ in range(20):  # rounded to nearest it would stay
        p.grad = torch.zeros(400, 400, dtype=BF16)
        optimizer.step()
    assert abs(float(p.detach().double().mean()) - (1 - 1e-4) ** 20) < 1e-4


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_sixteen_bits(dtype):
    """As exact as torch's, which rounds more often."""
    mine, theirs = (made(((64, 96), (96, 64)), dtype, cls) for cls in (Muon, torch.optim.Muon))
    exact = over_copies("Muon", mine, ReferenceMuon, F64, lr=0.02)
    for number in range(2):
        for optimizer in (mine, theirs):
            give_gradients(optimizer, number)
        for p, q in zip(members(exact), members(mine), strict=True):
            p.grad = q.grad.double()
        mine.step(), theirs.step(), exact.step()
    numerics.assert_close(*([p.detach() for p in members(o)] for o in (mine, exact, theirs)))


# ---- stacked matrices ----------------------------------------------------------------------------


STACKS = {
    "heads": ((24, 10), 4, lambda t: t.chunk(4), torch.cat),
    "query, key, value": ((20, 12), [12, 4, 4], lambda t: t.split([12, 4, 4]), torch.cat),
    "experts": ((5, 6, 8), "stacked", lambda t: t.unbind(), torch.stack),
    "two dimensions": ((2, 3, 6, 4), "stacked", lambda t: t.flatten(0, 1).unbind(), torch.stack),
    "filters": ((6, 4, 3, 2), "flattened", lambda t: [t.flatten(1)], torch.cat),
}


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("name", STACKS)
def test_stacked_matrices_are_matrices_by_themselves(name, adjust_lr_fn):
    """A parameter of several matrices, and parameters of one each."""
    shape, matrices, split, join = STACKS[name]
    start, gradient = torch.randn(2, *shape, dtype=F64)
    p = start.clone().requires_grad_()
    whole = Muon([p], lr=0.02, matrices=matrices, adjust_lr_fn=adjust_lr_fn)
    parts = [part.contiguous().requires_grad_() for part in split(start.clone())]
    many = Muon(parts, lr=0.02, adjust_lr_fn=adjust_lr_fn)
    for number in range(3):
        p.grad = gradient * (number + 1) - start
        for q, part in zip(parts, split(p.grad), strict=True):
            q.grad = part.contiguous()
        whole.step(), many.step()
    expected = join([q.detach() for q in parts]).view(shape)
    numerics.assert_close(p.detach(), expected, expected, case=name)


def test_stacked_matrices_may_be_none():
    empty = Muon([torch.zeros(0, 3, 4, requires_grad=True)], matrices="stacked")
    assert steps(empty, 2).param_groups[0]["params"][0].shape == (0, 3, 4)


def test_filters_in_channels_last():
    start = torch.randn(6, 4, 3, 2)
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = start.clone(memory_format=layout).requires_grad_()
        optimizer = steps(Muon([p], lr=0.02, matrices="flattened"), 2)
        found.append(p.detach().contiguous())
        assert optimizer.state[p]["momentum_buffer"].stride() == p.stride()
    assert same(*found)
