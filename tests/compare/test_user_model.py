"""The model that --model names, as every command takes it: what cannot be used is one sentence."""

import collections

import pytest
import torch
from torch import nn

import onepass
from onepass import _batch, cli
from onepass.compare.model import each_tensor

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


def raising():
    raise KeyError("no such weights")


def raising_batch(step):
    raise ValueError("no data")


not_callable = 3


def makes_nothing():
    return None


def makes_a_model():
    return net()


def makes_three():
    return net(), X, 1


def makes_a_batch_first():
    return X, net()


def makes_a_class():
    return nn.Linear, X


def needs_an_argument(size):
    return net(), X


def text():
    return net(), "text"


def no_batch():
    return net(), None


def another_shape():
    return net(), torch.randn(2, 5)


def another_keyword():
    return nn.LayerNorm(4), {"x": X}


def too_many():
    return nn.LayerNorm(4), (X, X)


def batches_raise():
    return net(), raising_batch


def batches_of_nothing():
    return net(), lambda step: None


def forward_raises():
    return Returning(ValueError("bad things")), X


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4)), X


def scripted():
    return torch.jit.script(net()), X


def scripted_inside():
    return nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.LayerNorm(4)), X


def traced():
    return torch.jit.trace(net(), X), X


def sparse_embedding():
    embedding = nn.Embedding(9, 4, sparse=True)
    return nn.Sequential(embedding, nn.LayerNorm(4)), torch.ones(2, 3, dtype=torch.int64)


def sparse_bag():
    bag = nn.EmbeddingBag(9, 4, sparse=True)
    return nn.Sequential(bag, nn.LayerNorm(4)), torch.ones(2, 3, dtype=torch.int64)


def frozen():
    return net().requires_grad_(False), X


def returns_nothing():
    return Returning(None), X


def returns_integers():
    return Returning(torch.ones(3, dtype=torch.int64)), X


def returns_a_constant():
    return Returning(torch.ones(3)), X


EVERYWHERE = {
    "not_callable": "--model must name a function, got ",
    "no_such_function": "--model must name a function that can be imported: ",
    "raising": f"--model: {__name__}:raising raised KeyError: 'no such weights' (`raise KeyError(",
    "makes_nothing": "--model must return (model, batch) or (model, batch_function), got NoneType",
    "makes_a_model": "got Sequential",
    "makes_three": "got (Sequential, Tensor, int)",
    "makes_a_batch_first": "got (Tensor, Sequential)",
    "makes_a_class": "got (type, Tensor)",
    "needs_an_argument": "raised TypeError: needs_an_argument() missing 1 required",
    "text": "--model must come with a batch (a tensor, a tuple, a list, a dict), or a function of",
    "no_batch": "got NoneType",
    "another_shape": "--model must run on its batch, got RuntimeError: ",
    "another_keyword": "; forward takes (input), the batch is a dict of x",
    "too_many": "; forward takes (input), the batch is a tuple of 2",
    "batches_raise": "a function of the step, got one that raised ValueError: no data (`raise Val",
    "batches_of_nothing": "--model must come with a batch",
    "forward_raises": "--model must run on its batch, got ValueError: bad things (`raise self.out",
}
IN_TRAINING = {
    "lazy": "--model must have been called once, got a lazy module without its 0.weight",
    "scripted": "--model must not be scripted or traced, got a ScriptModule",
    "scripted_inside": "--model must not be scripted or traced, got a ScriptModule at 0",
    "traced": "--model must not be scripted or traced, got a ScriptModule",
    "sparse_embedding": "--model must have dense gradients, got Embedding 0 with sparse=True",
    "sparse_bag": "--model must have dense gradients, got EmbeddingBag 0 with sparse=True",
    "frozen": "--model must have a parameter that requires a gradient",
    "returns_nothing": "--model must return a floating-point tensor, a tuple of them or a .loss",
    "returns_integers": "--model must return a floating-point tensor, a tuple of them or a .loss",
    "returns_a_constant": "--model must return something that depends on its parameters",
}


def told(command, function, capfd):
    """Standard error of a command that must refuse."""
    assert cli.main([*COMMANDS[command], "--model", f"{__name__}:{function}"]) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.startswith(f"{command}: --model") and errors.count("\n") == 1, errors
    return errors


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("function", EVERYWHERE)
def test_what_no_command_can_use_is_one_sentence(command, function, capfd):
    assert EVERYWHERE[function] in told(command, function, capfd)


@pytest.mark.parametrize("command", TRAINING)
@pytest.mark.parametrize("function", IN_TRAINING)
def test_what_cannot_be_trained_is_one_sentence(command, function, capfd):
    assert IN_TRAINING[function] in told(command, function, capfd)


@pytest.mark.parametrize("function", ["lazy", "scripted", "traced", "sparse_embedding", "frozen"])
@pytest.mark.parametrize("flags", [[], ["--as-it-is"]])
def test_explain_runs_what_cannot_be_trained(function, flags, capsys):
    assert cli.main(["explain", *flags, "--model", f"{__name__}:{function}"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_module_that_fails_to_be_imported(command, tmp_path, monkeypatch, capfd):
    (tmp_path / "fails_to_import.py").write_text("def make():\n    return )\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main([*COMMANDS[command], "--model", "fails_to_import:make"]) == 2
    errors = capfd.readouterr().err
    assert "must name a function that can be imported: SyntaxError: " in errors
    assert errors.count("\n") == 1


# How a batch is given to forward


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
    (Two, X),
    (Two, (X,)),
    (Two, [X, X]),
    (Two, {"x": X, "y": X}),
    (Two, collections.UserDict(x=X)),
    (Two, Point(X, X)),
    (Any, (X, X)),
    (Any, {"x": X, "y": X}),
    (Whole, {"x": X, "y": X}),
    (Whole, ({"x": X, "y": X},)),
    (Pair, ((X, X),)),
    (Pair, [(X, X), 2.0]),
    (Pair, {"pair": (X, X)}),
]


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


@pytest.mark.parametrize("command", ["explain", "estimate"])
def test_a_batch_function_is_called_for_the_first_step(command, capsys):
    assert cli.main([command, "--model", f"{__name__}:by_step"]) == 0


def by_step():
    return net(), lambda step: {0: X}[step]
