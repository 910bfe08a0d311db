"""Helpers of the optimizers' tests: ours and torch's under one name, runs, comparisons."""

import contextlib
import io
import pickle

import pytest
import torch

import onepass
from onepass import reference
from tests.support import injection
from tests.support.dtypes import BF16, F32

TORCH_NAMES = ("AdamW", "Adam", "SGD")
NAMES = (*TORCH_NAMES, "Lion")
OF_TENSORS = ("Muon", "MuonWithAdamW", "Adafactor", "LAMB")  # torch's operations update a tensor
ALL = (*NAMES, *OF_TENSORS)
SHAPES = ((5,), (4352,), (4, 5), ())  # the second is large enough for 8-bit states
MATRICES = ((6, 8), (64, 68), (5, 4), (8, 6))
MODES = {
    "float32 state": {"state_dtype": F32},
    "own state": {},
    "fp32": {"master": "fp32", "state_dtype": F32},
    "remainder16": {"master": "remainder16", "state_dtype": F32},
    "remainder16, bfloat16": {"master": "remainder16", "state_dtype": BF16, "ema_decay": 0.9},
    "stochastic": {"master": "stochastic"},
    "bfloat16": {"state_dtype": BF16},
    "int8": {"state_dtype": "int8"},
    "fp32, int8": {"master": "fp32", "state_dtype": "int8"},
    "all": {
        "master": "stochastic",
        "state_dtype": "int8",
        "max_grad_norm": 0.5,
        "zero_grads": True,
        "ema_decay": 0.9,
        "ema_dtype": "param",
    },
}
DETERMINISTIC = ("float32 state", "own state", "fp32", "remainder16")
# Of optimizers that do not take every dtype of states.
SOME_MODES = {
    "Muon": ("float32 state", "fp32", "remainder16, bfloat16", "stochastic"),
    "MuonWithAdamW": ("own state", "remainder16, bfloat16", "stochastic", "int8", "all"),
    "Adafactor": ("own state", "fp32", "remainder16", "all"),
    "LAMB": ("own state", "fp32", "remainder16", "all"),
}
RUNS = [(name, mode) for name in ALL for mode in SOME_MODES.get(name, MODES)]
# More than the defaults of every class.
FLAGS = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True},
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1},
    "Lion": {"lr": 1e-2, "weight_decay": 0.1},
    "Muon": {"lr": 1e-2, "weight_decay": 0.1, "ns_dtype": F32},  # the same products on every CPU
    "MuonWithAdamW": {"lr": 1e-2, "weight_decay": 0.1, "ns_dtype": F32},
    "Adafactor": {"lr": 1e-2, "eps": (2.0**-23, 1e-3)},  # None: that of the dtype
    "LAMB": {"lr": 1e-2},
}

# Settings of one group that the others do not have.
OF_A_GROUP = {
    "AdamW": {"betas": (0.7, 0.9), "eps": 1e-2, "amsgrad": False, "maximize": True},
    "Adam": {"betas": (0.7, 0.9), "eps": 1e-2, "amsgrad": True, "maximize": True},
    "SGD": {"momentum": 0.5, "dampening": 0.3, "maximize": True},
    "Lion": {"betas": (0.7, 0.9), "maximize": True},
    "Muon": {"momentum": 0.5, "ns_steps": 2},
    "Adafactor": {"d": 2.0, "maximize": True},
    "LAMB": {"betas": (0.4, 0.9), "maximize": True},
}
# Options under which states are loaded.
EXTRAS = {
    "AdamW": {"master": "remainder16", "state_dtype": F32, "max_grad_norm": 0.5},
    "Adam": {"state_dtype": "int8", "zero_grads": True},
    "SGD": {"master": "stochastic"},
    "Lion": {"master": "fp32", "max_grad_norm": 1e3},
}
WITH_STEP = ("AdamW", "Adam", "SGD")  # with the extras above

HOOKS = [
    f"_optimizer_{call}_{when}_hooks"
    for call in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]

names = pytest.mark.parametrize("name", NAMES)
all_names = pytest.mark.parametrize("name", ALL)
runs = pytest.mark.parametrize("name, mode", RUNS)
kin_names = pytest.mark.parametrize("name", (*TORCH_NAMES, "Muon", "Adafactor"))  # of torch's
torch_names = pytest.mark.parametrize("name", TORCH_NAMES)
modes = pytest.mark.parametrize("mode", MODES)


class Reference(torch.optim.Optimizer):
    """An optimizer of a formula of the reference, which `stepped` applies to a parameter."""

    def __init__(self, params, lr=1e-3, maximize=False, **settings):
        super().__init__(params, {"lr": lr, "maximize": maximize, **settings})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            other = ("params", "maximize", "initial_lr")
            settings = {k: v for k, v in group.items() if k not in other}
            settings["lr"] = float(group["lr"])
            for p in group["params"]:
                gradient = -p.grad if group["maximize"] else p.grad
                p.copy_(self.stepped(p, gradient, self.state[p], settings))


class ReferenceLion(Reference):
    """Keeps how close an update came to zero, too."""

    def stepped(self, p, gradient, state, settings):
        beta, _ = settings.get("betas", (0.9, 0.99))
        average = state.setdefault("exp_avg", torch.zeros_like(p))
        update = (average * beta + gradient * (1 - beta)).abs()
        state["closest"] = torch.minimum(state.get("closest", update), update)
        after, state["exp_avg"] = reference.optimizer.lion(p, gradient, average, **settings)
        return after


class ReferenceLAMB(Reference):
    def stepped(self, p, gradient, state, settings):
        step, *moments = state.get("all", (0, torch.zeros_like(p), torch.zeros_like(p)))
        after, *moments = reference.optimizer.lamb(p, gradient, *moments, step + 1, **settings)
        state["all"] = step + 1, *moments
        return after


class ReferenceMuon(Reference):
    def stepped(self, p, gradient, state, settings):
        buffer = state.get("momentum_buffer", torch.zeros_like(p))
        after, state["momentum_buffer"] = reference.optimizer.muon(p, gradient, buffer, **settings)
        return after


REFERENCES = {"Lion": ReferenceLion, "LAMB": ReferenceLAMB}


def ours(name):
    return getattr(onepass.optim, name)


def stock(name):
    return REFERENCES.get(name) or getattr(torch.optim, name)


def shapes_of(name):
    return MATRICES if name == "Muon" else SHAPES


def options_of(name, mode):
    """The mode's, without a dtype of states that the optimizer does not take."""
    options = dict(MODES[mode])
    if name in ("Adafactor", "LAMB"):
        options.pop("state_dtype", None)
    return options


def given(name, params):
    """Parameters as the class takes them: of MuonWithAdamW in two groups, matrices being Muon's."""
    if name != "MuonWithAdamW":
        return params
    kinds = [[p for p in params if (p.dim() == 2) is is_matrix] for is_matrix in (True, False)]
    return [{"params": of, "use_muon": of is kinds[0]} for of in kinds]


def built(name, params, cls=None, **options):
    """An optimizer over these parameters, with settings that are not the defaults."""
    flags = {**FLAGS[name], **options}
    if cls is not None and cls is not ours(name):
        flags.pop("ns_dtype", None)
    return (cls or ours(name))(given(name, params), **flags)


def bits(tensor):
    """The same memory as integers, so that NaNs and zeros of either sign compare."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])


def same(one, two):
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(bits(one), bits(two))


def members(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def snapshot(optimizer):
    """Copies of all parameters, gradients and entries of the state dict."""
    found = {}
    for index, p in enumerate(members(optimizer)):
        found[index, "param"] = p.detach().clone()
        if p.grad is not None and p.grad.layout is torch.strided:
            found[index, "grad"] = p.grad.detach().clone()
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                found[index, key] = value.detach().clone()
    return found


def everything(optimizer, identities=True):
    """An optimizer's state and its parameters, to be compared with == before and after a fault.

    With identities: for the same optimizer; without them: for another one made alike.
    """
    params = members(optimizer)
    hidden = getattr(optimizer, "_hidden_steps", {})
    found = {
        "params": params,
        "grads": [p.grad for p in params],
        "states": [optimizer.state.get(p) for p in params],
        "entries": len(optimizer.state),
        "steps": [hidden.get(p) for p in params],
        "groups": [{**group, "params": len(group["params"])} for group in optimizer.param_groups],
        "defaults": dict(optimizer.defaults),
        "norm": getattr(optimizer, "grad_norm", None),
        "hooks": [len(getattr(optimizer, hooks)) for hooks in HOOKS],
        "attributes": sorted(optimizer.__dict__),
    }
    if identities:
        groups = optimizer.param_groups
        found["versions"] = [(p._version, p.data_ptr()) for p in params]
        found["objects"] = [(id(group), *map(id, group["params"])) for group in groups]
        found["keys"] = [(id(key), id(entry)) for key, entry in optimizer.state.items()]
        found["tensors"] = [
            [(key, id(value)) for key, value in optimizer.state.get(p, {}).items()] for p in params
        ]
    return injection.bits(found)


def assert_same(one, two, case=""):
    assert one.keys() == two.keys(), case
    different = [key for key in one if not same(one[key], two[key])]
    assert not different, f"{case}: {different} differ"


@contextlib.contextmanager
def unchanged(optimizer):
    """After the block the optimizer is what it was before."""
    before = snapshot(optimizer)
    yield
    assert_same(snapshot(optimizer), before)


def made(name, sizes, dtype=F32, seed=0, cls=None, **extras):
    """One of ours, or `cls`, over random parameters; the same seed, the same parameters."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(size, generator=generator, device="cpu") for size in sizes]
    params = [p.to(dtype).requires_grad_() for p in drawn]
    return built(name, params, cls, **extras)


def like(name, mode="own state", dtype=BF16, **extras):
    """One of ours in this mode, over parameters of every kind that it takes."""
    return made(name, shapes_of(name), dtype, **{**options_of(name, mode), **extras})


def give_gradients(optimizer, number, scale=1.0):
    """Gradients that depend on `number` and the parameter's index alone."""
    for index, p in enumerate(members(optimizer)):
        generator = torch.Generator().manual_seed(1000 * number + index)
        drawn = torch.randn(p.shape, generator=generator, device="cpu")
        p.grad = (drawn * scale).to(p.dtype)


def steps(optimizer, count, first=0):
    for number in range(first, first + count):
        give_gradients(optimizer, number)
        optimizer.step()
    return optimizer


def through_a_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def first_moment(name):
    return "momentum_buffer" if name in ("SGD", "Muon") else "exp_avg"


def without_gradients(optimizer):
    return {key: value for key, value in snapshot(optimizer).items() if key[1] != "grad"}


def over_copies(name, optimizer, cls=None, dtype=None, **extras):
    """Another optimizer over copies of the parameters, without their state."""
    params = [p.detach().clone().to(dtype or p.dtype) for p in members(optimizer)]
    params = [p.requires_grad_() for p in params]
    return built(name, params, cls, **extras)


def resumed(name, optimizer, checkpoint=None, **how):
    """The optimizer as in a new process: copies of the parameters, the checkpoint from a file."""
    new = over_copies(name, optimizer, **how)
    new.load_state_dict(checkpoint or through_a_file(optimizer.state_dict()))
    return new
