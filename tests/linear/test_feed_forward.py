"""The feed-forward blocks of the transformer layers: two calls have the results of the parts."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import _dispatch_log, numerics
from onepass._policy import products, small_calls

SLOW = products.Facts("AuthenticAMD", mkl=True, bfloat16=False, float16=False)
FAST = SLOW._replace(vendor="GenuineIntel")
WIDTH, HIDDEN = 32, 96
SHAPE = (3, 14, WIDTH)


@pytest.fixture(autouse=True)
def slow_products(monkeypatch):
    """Makes torch's products slow, as on a CPU where layers take ours, in calls of any size."""
    monkeypatch.setattr(products, "facts", lambda: SLOW)
    monkeypatch.setattr(small_calls, "LEAST_LINEAR", {})


def layer(decoder: bool = False, **options) -> nn.Module:
    torch.manual_seed(1)
    made = onepass.nn.TransformerDecoderLayer if decoder else onepass.nn.TransformerEncoderLayer
    return made(WIDTH, 4, HIDDEN, batch_first=True, **{"dropout": 0.2, **options})


def calls_of(module, *inputs) -> list[str]:
    """The arguments of the linear operators that ran, or "torch"."""
    with _dispatch_log.record() as calls:
        module(*inputs)
    return [
        "torch" if call["level"] == "torch's own" else call["arguments"]
        for call in calls
        if call["op"] == "linear"
    ]


def observed(module: nn.Module) -> nn.Module:
    """A copy whose parts are called one by one, because each is observed."""
    module = copy.deepcopy(module)
    for part in (module.linear1, module.linear2):
        part.register_forward_hook(lambda *_: None)
    return module


def step(module: nn.Module, *inputs) -> list[torch.Tensor]:
    torch.manual_seed(5)
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = module(*leaves)
    # Not the square of the output: that of a norm is constant, and its gradients are rounding.
    upstream = torch.linspace(-1.0, 1.0, output.numel()).sin().view(output.shape).to(output)
    return [output, *torch.autograd.grad(output, [*leaves, *module.parameters()], upstream)]


def assert_as_the_parts(fused: nn.Module, inputs: int = 1) -> None:
    """Within rounding of the parts one by one, over several draws."""
    parts = observed(fused)
    exact = observed(fused).double()
    draws = []
    for _ in range(4):
        xs = [torch.randn(SHAPE) for _ in range(inputs)]
        draws.append((step(fused, *xs), step(exact, *(x.double() for x in xs)), step(parts, *xs)))
    for results in zip(*(zip(*draw, strict=True) for draw in draws), strict=True):
        numerics.assert_close(*map(list, zip(*results, strict=True)))


OPTIONS = [
    {},
    {"activation": "gelu"},
    {"activation": F.silu, "norm_first": True},
    {"norm_first": True, "bias": False},
    {"activation": nn.GELU()},
    {"activation": nn.SiLU()},
    {"activation": nn.GELU("tanh")},
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options", OPTIONS, ids=["relu", "gelu", "silu", "relu-no-bias", "GELU", "SiLU", "tanh"]
)
@pytest.mark.parametrize("decoder", [False, True])
def test_two_calls_compute_what_the_parts_do(decoder, options, training):
    """With the same elements dropped: within rounding of the parts one by one."""
    if decoder and isinstance(options.get("activation"), nn.Module):
        pytest.skip("torch: a copy of such a decoder layer has ReLU")
    fused = layer(decoder, **options).train(training)
    assert_as_the_parts(fused, 1 + decoder)
    inputs = [torch.randn(SHAPE) for _ in range(1 + decoder)]
    activation = options.get("activation", "relu")
    names, text = ("relu", "gelu", "silu"), repr(activation).lower()
    name = "gelu_tanh" if "tanh" in text else next(name for name in names if name in text)
    first, second = calls_of(fused, *inputs)[-2:]
    assert name in first and ("dropout" in first) is training
    assert ("residual" in second) is not decoder and ("dropout" in second) is training
    assert not any(name in call for call in calls_of(observed(fused), *inputs))


@pytest.mark.parametrize("how", ["fast", "small"])
def test_where_torch_is_as_fast_its_products_run(monkeypatch, how):
    if how == "fast":
        monkeypatch.setattr(products, "facts", lambda: FAST)
    else:
        monkeypatch.setattr(small_calls, "LEAST_LINEAR", {torch.float32: (1 << 22, 1 << 22)})
    fused, x = layer(activation="gelu"), torch.randn(SHAPE)
    assert set(calls_of(fused, x)) == {"torch"}
    for ours, base in zip(step(fused, x), step(observed(fused), x), strict=True):
        torch.testing.assert_close(ours, base)


class Loud(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Own(onepass.nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return torch.zeros_like(x)


class Equal:
    """An activation that has no hash."""

    def __eq__(self, other):
        return True

    def __call__(self, x):
        return x.relu()


def replaced(name: str, part) -> nn.Module:
    module = layer()
    setattr(module, name, part)
    return module


def hooked(name: str, register: str) -> nn.Module:
    module = layer(activation=nn.ReLU())
    getattr(module.get_submodule(name), register)(lambda *_: None)
    return module


def with_own_forward() -> nn.Module:
    module = layer()
    module.linear1.forward = lambda input: 2 * nn.Linear.forward(module.linear1, input)
    return module


CHANGED = {
    "own block": lambda: Own(WIDTH, 4, HIDDEN, batch_first=True, norm_first=True),
    "own linear": lambda: replaced("linear1", Loud(WIDTH, HIDDEN)),
    "own dropout": lambda: replaced("dropout", nn.Dropout(0.2)),
    "own activation": lambda: replaced("activation", type("LoudGELU", (nn.GELU,), {})()),
    "activation without a hash": lambda: layer(activation=Equal()),
    "own forward": with_own_forward,
    "pre-hook": lambda: hooked("linear2", "register_forward_pre_hook"),
    "backward hook": lambda: hooked("linear1", "register_full_backward_hook"),
    "hooked activation": lambda: hooked("activation", "register_forward_hook"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_somebody_changed_is_called(change):
    assert not any("relu" in call for call in calls_of(CHANGED[change](), torch.randn(SHAPE)))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_block_that_is_set_on_the_layer_is_called(swapped):
    made = nn.TransformerEncoderLayer if swapped else onepass.nn.TransformerEncoderLayer
    torch.manual_seed(1)
    module, x = made(WIDTH, 4, HIDDEN, batch_first=True, dropout=0.0), torch.randn(SHAPE)
    exact, expected = step(copy.deepcopy(module).double(), x.double()), step(module, x)
    module._ff_block = functools.partial(checkpoint, module._ff_block, use_reentrant=False)
    if swapped:
        onepass.swap(module)
    for ours, ref, base in zip(step(module, x), exact, expected, strict=True):
        numerics.assert_close(ours, ref, base)
    module._ff_block = torch.zeros_like
    assert not any("relu" in call for call in calls_of(module, x))


@pytest.mark.parametrize("name", ["_ff_block", "linear1.forward"])
def test_what_is_set_after_compiling_is_called(name):
    module, x, graphs = layer(dropout=0.0), torch.randn(SHAPE), []

    def keep(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    compiled = torch.compile(module, fullgraph=True, backend=keep)
    torch.testing.assert_close(compiled(x), module(x))
    assert graphs[-1].count("onepass.linear_epilogue_forward") == 2
    *path, attribute = name.split(".")
    own = {"_ff_block": torch.zeros_like, "forward": lambda x: x.new_ones((*x.shape[:-1], HIDDEN))}
    setattr(module.get_submodule(".".join(path)), attribute, own[attribute])
    torch.testing.assert_close(compiled(x), module(x))
    assert "onepass.linear_epilogue_forward" not in graphs[-1]


@pytest.mark.parametrize("activation", [nn.Hardswish(), torch.tanh, lambda x: F.gelu(x) + 1])
def test_the_products_beside_another_activation_are_ours(activation):
    fused, x = layer(activation=activation), torch.randn(SHAPE)
    assert "torch" not in calls_of(fused, x)
    assert_as_the_parts(fused)


class Wide(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input.float())


def test_a_stream_of_another_dtype_is_added_as_torch_adds():
    fused = layer(norm_first=True, dropout=0.0).bfloat16()
    for name in ("linear1", "linear2"):
        getattr(fused, name).float()
    fused.norm2 = Wide(WIDTH)
    x = torch.randn(SHAPE).bfloat16()
    found, expected = fused(x), observed(fused)(x)
    assert any("relu" in call for call in calls_of(fused, x))
    assert found.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(found, expected)


def test_a_global_hook_sees_every_part():
    module, seen = layer(), []
    handle = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(part))
    try:
        module(torch.randn(SHAPE))
    finally:
        handle.remove()
    assert {module.linear1, module.linear2, module.dropout, module.dropout2} <= set(seen)


@pytest.mark.parametrize("kinds, fused", [(None, True), (("attention", "norm", "dropout"), False)])
def test_swapped_layers(kinds, fused):
    """Two calls if swap took all the parts; torch's linear layers if it left them."""
    torch.manual_seed(1)
    stock = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, batch_first=True, dropout=0.2)
    onepass.swap(stock) if kinds is None else onepass.swap(stock, kinds=kinds)
    calls = calls_of(stock, torch.randn(SHAPE))
    assert any("relu" in call for call in calls) is fused
    onepass.unswap(stock)
    assert calls_of(stock, torch.randn(SHAPE)) == []


def test_autocast():
    fused, x = layer(activation="gelu").eval(), torch.randn(SHAPE)
    exact = fused(x).detach()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, expected = fused(x), observed(fused)(x)
    assert found.dtype is expected.dtype
    error = (found - exact).abs().max() / (expected - exact).abs().max()
    assert math.isfinite(error) and error < 2
