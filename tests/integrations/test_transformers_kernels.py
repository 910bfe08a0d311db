"""`register_kernels`: the layers that transformers uses after `set_use_kernels`.

This transformers refuses version 0.17 of the package kernels. The tests make it believe that it is
newer: it exports the same names.
"""

import copy
import importlib.metadata
import importlib.util
import inspect
import re
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn

import onepass
from onepass import _dispatch_log, numerics
from onepass._policy import small_calls
from tests.integrations.transformers_cases import transformers
from tests.support import fresh
from tests.swap.linear_calls import SLOW, set_facts
from tests.swap.reported import operators as ops

pytest.importorskip("transformers", reason="its layers are replaced")

from transformers import activations
from transformers.integrations import hub_kernels
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import import_utils

from onepass.integrations.transformers import kernels, register_kernels

MODELS = Path(transformers.__file__).parent / "models"
DTYPES = (torch.float32, torch.bfloat16)
LEAST = dict(small_calls.LEAST_ACTIVATION)  # a fixture of all tests removes them
# Names that transformers asks for and onepass has nothing for, or nothing faster:
# docs/integrations/kernels.md.
WITHOUT = {
    "GeLU", "MultiScaleDeformableAttention", "SoftmaxTopKRouter", "MegaBlocksMoeMLP",
    "Qwen3_5GatedDeltaNet", "EsmFold2TriangleMultiplication",
}  # fmt: skip
installed = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="the package kernels is not installed"
)


def norm_of(name: str) -> nn.Module:
    family, cls = name.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made = getattr(module, cls)(24)
    nn.init.normal_(made.weight)
    return made


NORMS = {
    "llama.LlamaRMSNorm": kernels.RMSNorm, "afmoe.AfmoeRMSNorm": kernels.RMSNorm,
    "nemotron_h.NemotronHRMSNorm": kernels.RMSNorm,
    "qwen3_5.Qwen3_5RMSNorm": kernels.RMSNormZeroCentered,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, dtype):
    norm = norm_of(name).to(dtype)
    forward = MethodType(NORMS[name].forward, norm)
    x = torch.randn(50, 24, dtype=dtype)
    assert ops(lambda: forward(x)) == ["rms_norm"]
    assert_same(forward, partial(kernels_reference, norm), norm, (x,))


def assert_own(forward, module, *inputs) -> None:
    """The module's own forward runs."""
    assert not ops(lambda: forward(*inputs)) and torch.equal(forward(*inputs), module(*inputs))


def kernels_reference(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The reference in float64; transformers' own rounds to float32."""
    weight = norm.weight.detach().double() + hasattr(norm, "eps")
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


GATED_NORMS = ("qwen3_next.Qwen3NextRMSNormGated", "kimi_linear.KimiLinearRMSNormGated")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GATED_NORMS)
def test_gated_norms(name, dtype):
    norm = norm_of(name).to(dtype)
    forward = MethodType(kernels.RMSNormGated.forward, norm)
    x, gate = torch.randn(2, 50, 24, dtype=dtype)
    assert ops(lambda: forward(x, gate)) == ["rms_norm", "gated_activation"]

    def exact(x, gate):
        activated = gate.sigmoid() * (gate if norm.activation == "silu" else 1)
        return kernels_reference(norm, x) * activated

    assert_same(forward, exact, norm, (x, gate))
    norm.activation = "tanh"
    assert_own(forward, norm, x, gate)
    norm.activation = "silu"
    assert_own(forward, norm, x, gate.double())


def assert_same(forward, exact, stock, inputs, result: torch.dtype | None = None) -> None:
    """Results, and gradients of the inputs. `result`: the dtype of both, if it is another."""
    dtype = inputs[0].dtype
    runs = []
    for function, wide in ((forward, dtype), (exact, torch.float64), (stock, dtype)):
        leaves = [x.detach().to(wide).requires_grad_() for x in inputs]
        y = function(*leaves)
        assert y.dtype is (wide if result is None or function is exact else result)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        runs.append([y.detach(), *torch.autograd.grad(y, leaves, upstream.to(y.dtype))])
    for found in zip(*runs, strict=True):
        numerics.assert_close(*found)


ACTIVATIONS = {
    "SiLU": (activations.SiLUActivation, nn.functional.silu),
    "GeluTanh": (activations.GELUTanh, partial(nn.functional.gelu, approximate="tanh")),
    "NewGELU": (activations.NewGELUActivation, partial(nn.functional.gelu, approximate="tanh")),
    "FastGELU": (activations.FastGELUActivation, partial(nn.functional.gelu, approximate="tanh")),
    "QuickGELU": (activations.QuickGELUActivation, lambda x: x * torch.sigmoid(1.702 * x)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, dtype):
    cls, exact = ACTIVATIONS[name]
    (layer,) = (layer for layer in kernels.LAYERS if layer.name == name)
    module = cls()
    forward = MethodType(layer.load().forward, module)
    x = torch.randn(4, 9, 37, dtype=dtype) * 3
    assert ops(lambda: forward(x)) == ["gated_activation"]
    assert_same(forward, exact, module, (x,))
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), forward(x))
    assert forward(x[:, ::2]).shape == (4, 5, 37) and ops(lambda: forward(x[:, ::2]))
    for other in (x.transpose(0, 2), x[None].to(memory_format=torch.channels_last)):
        assert forward(other).stride() == module(other).stride()
    assert forward(x.to("meta")).is_meta
    for other in (x.double(), torch.tensor(1.0), torch.randn(0, 3)):
        assert torch.equal(forward(other), module(other))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not ops(lambda: forward(x)) and forward(x).dtype is module(x).dtype


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_small_activations_are_transformers_own(name, training, one_thread, monkeypatch):
    monkeypatch.setattr(small_calls, "LEAST_ACTIVATION", LEAST)
    module = ACTIVATIONS[name][0]()
    (layer,) = (layer for layer in kernels.LAYERS if layer.name == name)
    forward = MethodType(layer.load().forward, module)
    least = LEAST[name][torch.float32][not training] if name in LEAST else 1
    with torch.set_grad_enabled(training):
        for count, ours in ((least, True), (least - 1, name in ("NewGELU", "FastGELU"))):
            if count:
                with _dispatch_log.record() as calls:
                    forward(torch.randn(count))
                assert ("own forward" not in calls[0]["kernel"]) is ours


BLOCKS = {"llama.LlamaMLP": kernels.SwiGLUMLP, "gemma.GemmaMLP": kernels.GeGLUMLP}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_gated_blocks(name, dtype):
    family, cls = name.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, f"{family.capitalize()}Config")
    torch.manual_seed(0)
    config = config(hidden_size=16, intermediate_size=24, num_attention_heads=2)
    block = getattr(module, cls)(config).to(dtype)
    forward = MethodType(BLOCKS[name].forward, block)
    x = torch.randn(200, 16, dtype=dtype)
    assert ops(lambda: forward(x)) == ["gated_activation"]
    assert_same(forward, copy.deepcopy(block).double(), block, (x,))
    block.act_fn = nn.Tanh()
    assert_own(forward, block, x)
    other = MethodType(BLOCKS[name].forward, nn.Linear(16, 4, dtype=dtype))
    assert other(x).shape == (200, 4)  # of another structure: its own forward


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_layers(dtype, monkeypatch):
    set_facts(monkeypatch, SLOW)
    layer = nn.Linear(24, 16, dtype=dtype)
    forward = MethodType(kernels.Linear.forward, layer)
    x = torch.randn(50, 24, dtype=dtype)
    assert ops(lambda: forward(x)) == ["linear"]
    assert_same(forward, copy.deepcopy(layer).double(), layer, (x,))
    layer.weight = nn.Parameter(torch.randn(24, dtype=dtype))
    layer.bias = None
    assert torch.equal(forward(x), layer(x))


def test_linear_layers_keep_the_precision_of_a_swap(monkeypatch):
    """Which was made before the model was switched."""
    set_facts(monkeypatch, SLOW)
    layer, x = nn.Linear(64, 32), torch.randn(200, 64)
    onepass.swap(layer, precision="int8", include="*")
    expected = layer(x)
    assert torch.equal(MethodType(kernels.Linear.forward, layer)(x), expected)
    onepass.unswap(layer)
    assert not torch.equal(MethodType(kernels.Linear.forward, layer)(x), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss(dtype):
    logits, labels = torch.randn(3, 20, 64, dtype=dtype), torch.randint(64, (3, 20))
    labels[:, :4] = -100
    forward = MethodType(kernels.ForCausalLMLoss.forward, nn.Module())
    assert ops(lambda: forward(logits, labels, 64)) == ["cross_entropy"]

    def exact(logits):
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), shifted, reduction="sum") / 9

    def loss_by(function):
        return lambda logits: function(logits, labels, 64, num_items_in_batch=torch.tensor(9))

    assert_same(loss_by(forward), exact, loss_by(ForCausalLMLoss), (logits,), torch.float32)


def test_what_no_norm_of_that_name_says_is_the_models_own():
    norm = norm_of("llama.LlamaRMSNorm")
    forward = MethodType(kernels.RMSNorm.forward, norm)
    x = torch.randn(3, 24)
    for other in (x.bfloat16(), x.double()):  # weights are float32
        assert_own(forward, norm, other)
    norm.weight = nn.Parameter(torch.randn(1, 24))
    assert_own(forward, norm, x)
    norm.weight = nn.Parameter(torch.randn(24))
    norm.variance_epsilon = torch.tensor(1e-6)
    assert_own(forward, norm, x)


def function_of(family: str) -> nn.Module:
    """A module of the function, as the package kernels makes it."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    function = module.apply_rotary_pos_emb

    class Func(nn.Module):
        def forward(self, *args, **named):
            return function(*args, **named)

    return Func()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("family", ["llama", "flex_olmo", "modernbert", "gpt_oss", "hunyuan_vl"])
def test_rotations(family, unsqueeze_dim, dtype):
    func = function_of(family)
    forward = MethodType(kernels.RotaryPosEmb.forward, func)
    heads_first = unsqueeze_dim == 1
    shapes = [(2, heads, 9, 16) if heads_first else (2, 9, heads, 16) for heads in (4, 2)]
    q, k = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    angles = torch.rand(1, 9, 8) * 6
    if family != "gpt_oss":  # a number for each pair
        angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    call = (cos, sin) if heads_first else (cos, sin, unsqueeze_dim)
    assert ops(lambda: forward(q, k, *call)) == ["rotary_embedding"]
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    plain = function_of("gpt_oss" if family == "gpt_oss" else "llama")
    runs = [
        (forward(q, k, *call), (q, k)),
        (plain(*wide, cos.double(), sin.double(), unsqueeze_dim), wide),
        (func(q, k, *call), (q, k)),
    ]
    for outputs in zip(*(outputs for outputs, _ in runs), strict=True):
        numerics.assert_close(*outputs)
    found = [torch.autograd.grad([y.sin().sum() for y in ys], xs) for ys, xs in runs]
    for gradients in zip(*found, strict=True):
        numerics.assert_close(*gradients)


def test_rotations_of_two_dtypes_and_gradients_of_tables_are_the_models_own():
    func = function_of("llama")
    forward = MethodType(kernels.RotaryPosEmb.forward, func)
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    cos, sin = torch.randn(1, 9, 16), torch.randn(1, 9, 16)
    for given in (
        (q.bfloat16(), k.bfloat16(), cos, sin),
        (q, k, cos.clone().requires_grad_(), sin),
    ):
        assert not ops(lambda given=given: forward(*given))
        for found, expected in zip(forward(*given), func(*given), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("layer", kernels.LAYERS, ids=lambda layer: layer.name)
def test_layers_are_what_the_protocol_asks_for(layer):
    cls = layer.load()
    assert cls.__init__ is nn.Module.__init__ and str(layer)
    members = {name for name, _ in inspect.getmembers(cls)}
    members -= {name for name, _ in inspect.getmembers(nn.Module)}
    assert members == {"can_torch_compile", "has_backward"}


def test_every_name_is_covered_or_told():
    """Of classes and functions; those of state space models and of delta rules have no operator."""
    asked = set()
    for path in (*MODELS.glob("*/modeling_*.py"), MODELS.parent / "activations.py"):
        asked.update(
            re.findall(r'^@use_kernel_forward_from_hub\("(\w+)"\)', path.read_text(), re.M)
        )
    covered = {layer.name for layer in kernels.LAYERS}
    assert asked - covered == WITHOUT
    assert covered - asked == {"SwiGLUMLP", "GeGLUMLP", "Linear", "ForCausalLMLoss"}
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "kernels.md").read_text()
    assert all(f"`{name}`" in page for name in covered | WITHOUT)


def test_what_the_names_stand_for_in_transformers():
    """One input for norms; query, key, cos and sin for rotations; the same attributes."""
    decorated = r'@use_kernel_forward_from_hub\("{}"\)\n(?:@.*\n)*(class|def) (\w+)(.*?)\n(?=\S)'
    of_models = ("RMSNorm", "RMSNormZeroCentered", "RMSNormGated", "rotary_pos_emb")
    counts = dict.fromkeys(of_models, 0)
    for path in MODELS.glob("*/modeling_*.py"):
        source = path.read_text()
        if "use_kernel_forward_from_hub(" not in source:
            continue
        for name in counts:
            for _, found, body in re.findall(decorated.format(name), source, re.DOTALL):
                counts[name] += 1
                if name == "rotary_pos_emb":
                    assert body.startswith("(q, k, cos, sin, unsqueeze_dim=1)"), (path, found)
                    continue
                gate = r"gate(: [\w.]+|=None)" if name == "RMSNormGated" else ""
                arguments = r"\w+(: [\w.]+)?" + f", {gate}" * bool(gate)
                assert re.search(rf"def forward\(self, {arguments}\)", body), (path, found)
                assert ("ACT2FN[self.activation](gate" in body) is bool(gate), (path, found)
                eps = "self.eps" if name == "RMSNormZeroCentered" else "self.variance_epsilon"
                assert eps in body and "self.weight" in body, (path, found)
                assert ("1.0 + self.weight" in body) is (name == "RMSNormZeroCentered"), path
    assert counts["RMSNorm"] > 100 and counts["rotary_pos_emb"] > 100, counts
    assert counts["RMSNormGated"] >= 8, counts


# ---- with the package ----------------------------------------------------------------------------

PROGRAM = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: {"kernels": "0.18.2"}.get(name) or version(name)
import torch, transformers
from onepass import numerics
from onepass import _dispatch_log
from onepass.integrations.transformers import register_kernels

registered = register_kernels(["cpu"])
assert len(registered) == 13 and all(devices == ["cpu"] for devices in registered.values())
sizes = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=24, head_dim=8,
)
ids = torch.randint(64, (3, 11))

def make(name):
    torch.manual_seed(0)
    given = sizes
    if name == "GPT2":
        given = dict(n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    if name == "Qwen3Next":
        given = dict(
            sizes, layer_types=["linear_attention", "full_attention"], moe_intermediate_size=8,
            shared_expert_intermediate_size=8, num_experts=2, num_experts_per_tok=1,
            linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
            linear_num_value_heads=2, use_cache=False,
        )
    config = getattr(transformers, name + "Config")(vocab_size=64, pad_token_id=0, **given)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, name + head)(config)
    if name == "Qwen3Next":
        model.set_experts_implementation("eager")  # the others have no float64
    return model

CALLS = {
    "Llama": dict(rotary_embedding=2, rms_norm=5),
    "Qwen3": dict(rotary_embedding=2, rms_norm=5),
    "GPT2": dict(gated_activation=2),
    "Qwen3Next": dict(rms_norm=1, gated_activation=1),
}

def results(model):
    loss = model(input_ids=ids, labels=ids).loss
    of = [*model.parameters()]
    found = torch.autograd.grad(loss, of, allow_unused=True)
    return [loss.detach(), *(torch.zeros_like(p) if g is None else g for g, p in zip(found, of))]

for name in CALLS:
    stock, exact, model = make(name), make(name).double(), make(name)
    base, ref = results(stock), results(exact)
    for mode in ("train", "eval"):
        getattr(model, mode)()
        model.set_use_kernels(True)
        with _dispatch_log.record() as calls:
            found = results(model)
        ops = [call["op"] for call in calls]
        for op, count in CALLS[name].items():
            assert ops.count(op) >= count, (name, op, ops)
        numerics.assert_close(found, ref, base, name)
    if name not in ("Llama", "Qwen3"):  # stock's do not compile in one graph
        continue
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    numerics.assert_close([compiled(input_ids=ids, labels=ids).loss], ref[:1], base[:1], name)
print("fine")
"""


@installed
def test_models_take_them():
    done = fresh.run(PROGRAM)
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr[-3000:]


@pytest.mark.skipif(
    importlib.util.find_spec("kernels") is not None, reason="the package kernels is installed"
)
def test_without_the_package():
    with pytest.raises(ImportError, match=r"kernels must be of a version .* takes.*, got none"):
        register_kernels("cpu")  # one name


@installed
def test_with_a_version_that_transformers_does_not_take(monkeypatch):
    monkeypatch.setattr(import_utils, "is_kernels_available", bool)
    found = importlib.metadata.version("kernels")
    with pytest.raises(ImportError, match=rf"kernels must be of a version .*, got {found}"):
        register_kernels()


def test_what_cannot_be_registered(monkeypatch):
    """As transformers was before 5.23; where kernels are turned off; other devices."""
    with pytest.raises(ValueError, match="devices must be of"):
        register_kernels(("xpu",))
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_mapping_transformers", dict, raising=False)
    monkeypatch.setattr(hub_kernels, "_kernels_enabled", False)
    with pytest.raises(ImportError, match="USE_HUB_KERNELS must not turn kernels off"):
        register_kernels()
    monkeypatch.delattr(hub_kernels, "get_kernel_mapping_transformers")
    with pytest.raises(ImportError, match="transformers must have a mapping"):
        register_kernels()
