"""The model that --model names, as every command takes it: what cannot be used is one sentence."""

import collections
import copy

import pytest
import torch
from torch import nn

import onepass
from onepass import _batch, cli
from onepass.tools.model import each_tensor
from tests.compare.cases import refusal

COMMANDS = {
    "explain": ["explain"],
    "estimate": ["estimate"],
    "compare": ["compare", "--quick", "--steps", "1", "--pairs", "1"],
    "profile-swap": ["profile-swap", "--quick", "--pairs", "1"],
}
TRAINING = ("estimate", "compare", "profile-swap")
X = torch.randn(2, 4)


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


class Returning(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.norm, self.output = nn.LayerNorm(4), output

    def forward(self, x):
        self.norm(x)
        if isinstance(self.output, Exception):
            raise self.output
        return self.output


def raising(*_):
    raise KeyError("no such weights")


def needs_an_argument(size):
    return net(), X


def none_for_a_step(step):
    return None


not_callable = 3
ONES = torch.ones(2, 3, dtype=torch.int64)
# What the functions of these names return, and what an error says.
EVERYWHERE = {
    "a_model": (net(), "got Sequential"),
    "nothing": (None, "--model must return (model, batch) or (model, batch_function), got None"),
    "three": ((net(), X, 1), "got (Sequential, Tensor, int)"),
    "batch_first": ((X, net()), "got (Tensor, Sequential)"),
    "a_class": ((nn.Linear, X), "got (type, Tensor)"),
    "text": ((net(), "text"), "--model must come with a batch (a tensor, a tuple, a list, a dict)"),
    "no_batch": ((net(), None), "got NoneType"),
    "another_shape": ((net(), torch.randn(2, 5)), "must run on its batch, got RuntimeError: "),
    "another_keyword": ((nn.LayerNorm(4), {"x": X}), "; forward takes (input), the batch is a"),
    "too_many": ((nn.LayerNorm(4), (X, X)), "; forward takes (input), the batch is a tuple of 2"),
    "batches_raise": ((net(), raising), "got one that raised KeyError: 'no such weights' (`raise"),
    "batches_of_nothing": ((net(), none_for_a_step), "--model must come with a batch"),
    "forward_raises": (
        (Returning(ValueError("bad things")), X), "got ValueError: bad things (`raise self.out"
    ),
    # Not made here:
    "not_callable": (None, "--model must name a function, got "),
    "no_such_function": (None, "--model must name a function that can be imported: "),
    "raising": (None, f"--model: {__name__}:raising raised KeyError: 'no such weights' (`rai"),
    "needs_an_argument": (None, "raised TypeError: needs_an_argument() missing 1 required"),
}  # fmt: skip
SCRIPTED, NO_TENSOR = (
    "must not be scripted or traced, got a ScriptModule",
    "a floating-point tensor",
)
IN_TRAINING = {
    "lazy": ((nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4)), X),
             "--model must have been called once, got a lazy module without its 0.weight"),
    "scripted": ((torch.jit.script(net()), X), SCRIPTED),
    "scripted_inside": (
        (nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.LayerNorm(4)), X), f"{SCRIPTED} at 0"
    ),
    "traced": ((torch.jit.trace(net(), X), X), SCRIPTED),
    **{f"sparse_{cls.__name__.lower()}": (
        (nn.Sequential(cls(9, 4, sparse=True), nn.LayerNorm(4)), ONES),
        f"--model must have dense gradients, got {cls.__name__} 0 with sparse=True",
    ) for cls in (nn.Embedding, nn.EmbeddingBag)},
    "frozen": ((net().requires_grad_(False), X), "must have a parameter that requires a gradient"),
    "returns_nothing": ((Returning(None), X), NO_TENSOR),
    "returns_integers": ((Returning(ONES), X), NO_TENSOR),
    "returns_a_constant": ((Returning(torch.ones(3)), X), "something that depends on its param"),
}  # fmt: skip


def __getattr__(name: str):
    """The function of a name in the tables: `--model` imports it from here."""
    returned = (EVERYWHERE | IN_TRAINING).get(name, (None,))[0]
    if returned is None and name != "nothing":
        raise AttributeError(name)
    return lambda: copy.deepcopy(returned)


# Every message by one command, and every command with some: what it calls is the same.
SOME, SOME_IN_TRAINING = ("raising", "text", "another_shape"), ("frozen", "lazy", "returns_nothing")
PAIRS = [(command, name) for command in COMMANDS for name in SOME]
PAIRS += [("explain", name) for name in EVERYWHERE if name not in SOME]
PAIRS += [(command, name) for command in TRAINING for name in SOME_IN_TRAINING]
PAIRS += [("compare", name) for name in IN_TRAINING if name not in SOME_IN_TRAINING]


def told(command, function):
    return refusal(*COMMANDS[command], "--model", function)


@pytest.mark.parametrize(("command", "function"), PAIRS)
def test_what_a_command_cannot_use_is_one_sentence(command, function):
    said = told(command, f"{__name__}:{function}")
    assert said.startswith(f"{command}: --model")
    assert (EVERYWHERE | IN_TRAINING)[function][1] in said


@pytest.mark.parametrize("function", ["lazy", "scripted", "traced", "sparse_embedding", "frozen"])
@pytest.mark.parametrize("flags", [[], ["--as-it-is"]])
def test_explain_runs_what_cannot_be_trained(function, flags, capsys):
    assert cli.main(["explain", *flags, "--model", f"{__name__}:{function}"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_module_that_fails_to_be_imported(command, tmp_path, monkeypatch):
    (tmp_path / "fails_to_import.py").write_text("def make():\n    return )\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = told(command, "fails_to_import:make")
    assert "must name a function that can be imported: SyntaxError: " in said


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)


class Pair(Normed):
    def forward(self, pair, scale=1.0):
        x, y = pair
        return self.norm(scale * (x + y))


class Whole(Normed):
    def forward(self, batch):
        return self.norm(batch["x"] + batch["y"])


class Two(Normed):
    def forward(self, x, y=None):
        return self.norm(x if y is None else x + y)


class Any(Two):
    def forward(self, *args, **named):
        return super().forward(*args, **named)


Point = collections.namedtuple("Point", ["x", "y"])
BATCHES = [
    (Two, X), (Two, (X,)), (Two, [X, X]), (Two, {"x": X, "y": X}), (Two, collections.UserDict(x=X)),
    (Two, Point(X, X)), (Any, (X, X)), (Any, {"x": X, "y": X}), (Whole, {"x": X, "y": X}),
    (Whole, ({"x": X, "y": X},)), (Pair, ((X, X),)), (Pair, [(X, X), 2.0]),
    (Pair, {"pair": (X, X)}),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "batch"), BATCHES)
def test_everything_takes_a_batch_alike(cls, batch):
    torch.manual_seed(0)
    model = cls()
    expected = _batch.call(model, batch)
    assert expected.shape == X.shape
    assert torch.equal(expected, _batch.call(model, each_tensor(batch, torch.clone)))
    assert onepass.estimate(model, batch).parameter_count == 8
    report = onepass.swap(model)
    (call,) = onepass.explain(model, batch).calls
    assert call["op"] == "layer_norm"
    assert report.verify(batch).ok


def test_one_required_argument_takes_what_cannot_be_its_items():
    class One(nn.Module):
        def forward(self, items):
            return items

    three = [X, X, X]
    assert _batch.arguments(One(), three) == ((three,), {})
    assert _batch.arguments(One(), {"x": X}) == (({"x": X},), {})
    assert _batch.arguments(One(), [X]) == ((X,), {})
    assert _batch.arguments(One(), {"items": X}) == ((), {"items": X})
