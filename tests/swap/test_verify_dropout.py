"""Report.verify with dropout on: stock has the masks of the swapped model."""

import random
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.swapping import masks
from onepass.swapping.matchers import KINDS
from tests.swap.test_verify import IDS, Model

pytestmark = pytest.mark.usefixtures("probed_once")

X = torch.randn(3, 10, 32, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(10) >= torch.tensor([[10], [7], [5]])


class Attends(nn.Module):
    def __init__(self, need_weights: bool = False, **options):
        super().__init__()
        self.norm, self.need_weights = nn.LayerNorm(32), need_weights
        self.attention = nn.MultiheadAttention(32, 4, dropout=0.2, **options)

    def forward(self, x, **masks):
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=self.need_weights, **masks)[0]


class Eager(nn.Module):
    """As transformers' eager attention: dropout of a matrix of weights."""

    def __init__(self, p: float = 0.2):
        super().__init__()
        self.norm, self.qkv, self.p = nn.LayerNorm(32), nn.Linear(32, 96), p

    def forward(self, x):
        heads = self.qkv(self.norm(x)).view(3, 10, 4, 24).transpose(1, 2).chunk(3, -1)
        return x + self.attended(heads, self.p * self.training).transpose(1, 2).flatten(-2)

    def attended(self, heads, p):
        query, key, value = heads
        return F.dropout(F.softmax(query @ key.mT / 8**0.5, -1), p) @ value


class Fused(Eager):
    """The same where onepass calls its attention by name, as after `attach`."""

    def attended(self, heads, p):
        if type(self.norm) is nn.LayerNorm:
            return super().attended(heads, p)
        return self.fused(heads, p)

    def fused(self, heads, p):
        return onepass.functional.scaled_dot_product_attention(*heads, dropout_p=p)


class Packed(Fused):
    """A packed sequence, whose masks have other shapes."""

    def fused(self, heads, p):
        rows = (x.transpose(1, 2).flatten(0, 1) for x in heads)
        first = torch.arange(0, 31, 10, dtype=torch.int32)
        y = onepass.functional.varlen_attention(*rows, first, first, 10, 10, dropout_p=p)
        return y.view(3, 10, 4, 8).transpose(1, 2)


class Paths(nn.Module):
    """Draws numbers of its own, some in the dtype of its input."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(32), nn.Linear(32, 32), nn.Dropout(0.2)
        self.batch_norm = nn.BatchNorm1d(10)

    def forward(self, x):
        rows = (x.shape[0], 1, 1)
        branch = self.linear(self.norm(x)) * (torch.rand(rows, dtype=x.dtype) + 0.5).floor()
        branch = branch * x.new_empty(rows).bernoulli_(0.7)
        if random.random() < 0.5:
            branch = self.drop(branch)
        return self.batch_norm(self.drop(x + branch + 0.1 * torch.randn_like(x)))


class Checkpointed(nn.ModuleList):
    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(32), nn.Dropout(0.1)
        self.lstm = nn.LSTM(32, 32, 2, dropout=0.3)

    def forward(self, x):
        return self.drop(self.norm(self.lstm(x + torch.randn_like(x))[0]))


def layer(**options):
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, **options)


MODELS = {
    "dropouts": lambda: nn.Sequential(
        nn.LayerNorm(32), nn.RReLU(), nn.Dropout(0.3), nn.Dropout1d(0.3), nn.AlphaDropout(0.2)
    ),
    "layer": lambda: layer(batch_first=True),
    "norm first": lambda: layer(norm_first=True, activation="gelu"),
    "encoder": lambda: nn.TransformerEncoder(layer(batch_first=True), 1),
    "heads": Attends,
    "heads, batch first": lambda: Attends(batch_first=True),
    "weights": lambda: Attends(need_weights=True),
    "eager": Eager,
    "eager, fused": Fused,
    "paths": Paths,
    "checkpointed": lambda: Checkpointed([layer()]),
    "recurrent": Recurrent,
}


def verified(model: nn.Module, *batch, kinds=None):
    """The verdict, which must leave all random states."""
    numpy = sys.modules.get("numpy")
    report = onepass.swap(model, kinds=kinds)
    states = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()[1].copy()
    result = report.verify(*batch)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert numpy is None or (numpy.random.get_state()[1] == states[2]).all()
    return result


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kinds", [KINDS, ("norm",)], ids=["all", "norms"])
def test_same_with_dropout_on(name, kinds):
    result = verified(MODELS[name](), X, kinds=kinds)
    assert result.ok and result.dropout_off == "" and result.judged == "float64", result
    assert max(deviation.stock_error for deviation in result.deviations) < 1e-5


class OtherSeed(TorchDispatchMode):
    """Gives onepass's operators another seed than was drawn."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "onepass" and "seed" in str(func._schema):
            args = [x + 1 if _is_seed(x) else x for x in args]
            kwargs = {key: x + 1 if _is_seed(x) else x for key, x in kwargs.items()}
        return func(*args, **kwargs)


def _is_seed(x) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is torch.int64 and x.shape == (2,)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("weights", "eager")])
def test_a_wrong_mask_is_found(name):
    """Of those that onepass computes: it leaves a matrix of weights to torch."""
    report = onepass.swap(MODELS[name]())
    with OtherSeed():
        result = report.verify(X)
    assert result.ok is False and result.dropout_off == "", result


@pytest.mark.parametrize("name", ["layer", "heads", "weights", "eager, fused", "dropouts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, "autocast"], ids=str)
def test_in_sixteen_bits(name, dtype):
    autocast = dtype == "autocast"
    model, x = MODELS[name](), X
    if not autocast:
        model, x = model.to(dtype), X.to(dtype)
    report = onepass.swap(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = report.verify(x)
    assert result.ok and result.dropout_off == "", result


@pytest.mark.parametrize("mask", ["padding", "causal", "float", "both"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_masks_of_attention(mask, need_weights):
    causal = torch.ones(10, 10, dtype=torch.bool).triu(1)
    given = {
        "padding": {"key_padding_mask": PADDING},
        "causal": {"attn_mask": causal},
        "float": {"attn_mask": torch.randn(10, 10)},
        "both": {"attn_mask": causal, "key_padding_mask": PADDING},
    }[mask]
    result = verified(Attends(need_weights, batch_first=True), dict(x=X, **given))
    assert result.ok and result.dropout_off == "", result


def test_channels_last():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Dropout(0.3))
    x = torch.randn(2, 3, 8, 8)
    for order in (torch.channels_last, torch.contiguous_format):
        result = verified(model.to(memory_format=order), x.to(memory_format=order))
        assert result.ok and result.dropout_off == "" and result.kernels["dropout"], result


OF_TRANSFORMERS = {  # options of dropout
    "gpt2": {},
    "bert": {},
    "t5": dict(dropout_rate=0.1),
    "llama": dict(attention_dropout=0.1),
}


@pytest.mark.grid
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_models_of_transformers(name, attention):
    from tests.integrations import transformers_cases as cases  # which skips without transformers

    model = cases.build(name, **OF_TRANSFORMERS[name]).train()
    model.set_attn_implementation(attention)
    batch = dict(cases.inputs(name, "right"), labels=cases.IDS)
    batch.pop("decoder_input_ids", None)
    result = verified(model, batch)
    assert result.ok and result.dropout_off == "" and result.kernels["attention"], result


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_compiled_parts_are_compiled_afterwards(training):
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append(1) or graph.forward(*args)

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = nn.Linear(32, 32), nn.Dropout(0.1)

        def forward(self, x):
            return self.drop(torch.relu(self.linear(x)))

    part = torch.compile(Part(), backend=backend)
    model = nn.Sequential(nn.LayerNorm(32), part).train(training)
    result = verified(model, X)
    assert result.ok and result.dropout_off == "" and bool(calls) is not training
    calls.clear()
    model(X)
    assert calls == [1]


# ---- what cannot be compared with dropout on -----------------------------------------------------


class Differs(Model):
    """Runs other code once it is swapped."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def forward(self, ids):
        y = super().forward(ids)
        return y + 0.0 * self.before(self, y, type(self.norm) is nn.LayerNorm)


def _noise(model, y, stock):
    return torch.rand(3).sum() if stock else 0.0


def _transposed(model, y, stock):
    return model.drop(y if stock else y.transpose(0, 1)).sum()


def _numpy(model, y, stock):
    return random.random() if stock else 0.0


def _raises(model, y, stock):
    if torch._C._len_torch_function_stack():
        raise ValueError("no modes")
    return 0.0


SHAPES = "stock drops elements of tensors of other shapes"
NUMBERS = "stock and swapped draw different random numbers"


@pytest.mark.parametrize(
    ("make", "batch", "why"),
    [
        (lambda: Differs(_noise), IDS, NUMBERS),
        (lambda: Differs(_numpy), IDS, NUMBERS),
        (lambda: Differs(_transposed), IDS, SHAPES),
        (lambda: Differs(_raises), IDS, "with it the model raises ValueError"),
        (Packed, X, SHAPES),
    ],
)
def test_dropout_is_off_where_masks_cannot_be_the_same(make, batch, why):
    model = make()
    result = verified(model, batch)
    assert result.ok and result.dropout_off == why
    assert not isinstance(model, Differs) or "drop" in result.not_run
    assert f"; dropout was off: {why}" in str(result)
    assert result.to_dict()["dropout_off"] == why
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.dropout(x, 0.4),
        lambda x: torch.dropout(x, 0.4, train=True),
        nn.Dropout(0.4),
        lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    ],
)
def test_masks_are_those_of_the_definition(call):
    """Of stock's calls, in each form that torch has."""
    x, found, state = torch.randn(6, 8), masks.Masks(), torch.get_rng_state()
    with found.noted():
        swapped = onepass.functional.dropout(x, 0.4)
    torch.set_rng_state(state)
    with found.repeated():
        assert torch.equal(call(x), swapped)
        assert F.dropout(x, 0.0) is x and F.dropout(x, 0.4, training=False) is x
