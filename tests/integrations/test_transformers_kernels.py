"""`register_kernels`: the layers that transformers uses after `set_use_kernels`.

This transformers refuses version 0.17 of the package kernels. The tests make it believe that it is
newer: it exports the same names.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn

from onepass import numerics
from onepass._ops import dispatch_log
from tests.integrations.transformers_cases import transformers
from tests.support import fresh

pytest.importorskip("transformers", reason="its layers are replaced")

from transformers.integrations import hub_kernels
from transformers.utils import import_utils

from onepass.integrations.transformers import kernels, register_kernels

MODELS = Path(transformers.__file__).parent / "models"
DTYPES = (torch.float32, torch.bfloat16)
installed = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="the package kernels is not installed"
)


def ops(run) -> list[str]:
    with dispatch_log.record() as calls:
        run()
    return [call["op"] for call in calls]


def norm_of(name: str) -> nn.Module:
    family, cls = name.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made = getattr(module, cls)(24)
    nn.init.normal_(made.weight)
    return made


NORMS = {
    "llama.LlamaRMSNorm": kernels.RMSNorm,
    "afmoe.AfmoeRMSNorm": kernels.RMSNorm,
    "nemotron_h.NemotronHRMSNorm": kernels.RMSNorm,
    "qwen3_5.Qwen3_5RMSNorm": kernels.RMSNormZeroCentered,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, dtype):
    norm = norm_of(name).to(dtype)
    forward = MethodType(NORMS[name].forward, norm)
    x = torch.randn(50, 24, dtype=dtype, requires_grad=True)
    assert ops(lambda: forward(x)) == ["rms_norm"]
    x64 = x.detach().double().requires_grad_()
    exact = kernels_reference(norm, x64)
    results = forward(x), exact, norm(x)
    numerics.assert_close(*results)
    upstream = torch.randn(50, 24, dtype=torch.float64)
    numerics.assert_close(
        *(
            torch.autograd.grad(y, leaf, upstream.to(y.dtype))[0]
            for y, leaf in zip(results, (x, x64, x), strict=True)
        )
    )


def kernels_reference(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The reference in float64; transformers' own rounds to float32."""
    weight = norm.weight.detach().double() + hasattr(norm, "eps")
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def test_what_no_norm_of_that_name_says_is_the_models_own():
    norm = norm_of("llama.LlamaRMSNorm")
    forward = MethodType(kernels.RMSNorm.forward, norm)
    for x in (torch.randn(3, 24).bfloat16(), torch.randn(3, 24).double()):  # weights are float32
        assert not ops(lambda x=x: forward(x)) and torch.equal(forward(x), norm(x))
    norm.weight = nn.Parameter(torch.randn(1, 24))
    x = torch.randn(3, 24)
    assert not ops(lambda: forward(x)) and torch.equal(forward(x), norm(x))
    norm.weight = nn.Parameter(torch.randn(24))
    norm.variance_epsilon = torch.tensor(1e-6)
    assert not ops(lambda: forward(x)) and torch.equal(forward(x), norm(x))


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


def test_what_the_names_stand_for_in_transformers():
    """One input for norms; query, key, cos and sin for rotations; the same attributes."""
    decorated = r'@use_kernel_forward_from_hub\("{}"\)\n(?:@.*\n)*(class|def) (\w+)(.*?)\n(?=\S)'
    counts = dict.fromkeys((layer.name for layer in kernels.LAYERS), 0)
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
                assert re.search(r"def forward\(self, \w+(: [\w.]+)?\)", body), (path, found)
                eps = "self.eps" if name == "RMSNormZeroCentered" else "self.variance_epsilon"
                assert eps in body and "self.weight" in body, (path, found)
                assert ("1.0 + self.weight" in body) is (name == "RMSNormZeroCentered"), path
    assert counts["RMSNorm"] > 100 and counts["rotary_pos_emb"] > 100, counts


# ---- with the package ----------------------------------------------------------------------------

PROGRAM = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: {"kernels": "0.18.2"}.get(name) or version(name)
import torch, transformers
from onepass import numerics
from onepass._ops import dispatch_log
from onepass.integrations.transformers import register_kernels

assert register_kernels("cpu".split()) == {
    "RMSNorm": ["cpu"], "RMSNormZeroCentered": ["cpu"], "rotary_pos_emb": ["cpu"]
}
sizes = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=24, head_dim=8,
)
ids = torch.randint(64, (3, 11))

def make(name):
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(vocab_size=64, pad_token_id=0, **sizes)
    return getattr(transformers, name + "ForCausalLM")(config)

def results(model):
    loss = model(input_ids=ids, labels=ids).loss
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

for name in ("Llama", "Qwen3"):
    stock, exact, model = make(name), make(name).double(), make(name)
    base, ref = results(stock), results(exact)
    for mode in ("train", "eval"):
        getattr(model, mode)()
        model.set_use_kernels(True)
        with dispatch_log.record() as calls:
            found = results(model)
        ops = [call["op"] for call in calls]
        assert ops.count("rotary_embedding") == 2, ops
        assert ops.count("rms_norm") >= 5, ops
        numerics.assert_close(found, ref, base, name)
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
        register_kernels()


@installed
def test_with_a_version_that_transformers_does_not_take(monkeypatch):
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: False)
    found = importlib.metadata.version("kernels")
    with pytest.raises(ImportError, match=rf"kernels must be of a version .*, got {found}"):
        register_kernels()


def test_without_a_mapping_that_can_be_extended(monkeypatch):
    """As transformers was before 5.23."""
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: True)
    monkeypatch.delattr(hub_kernels, "get_kernel_mapping_transformers", raising=False)
    with pytest.raises(ImportError, match="transformers must have a mapping"):
        register_kernels()


def test_with_kernels_turned_off(monkeypatch):
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_mapping_transformers", dict, raising=False)
    monkeypatch.setattr(hub_kernels, "_kernels_enabled", False)
    with pytest.raises(ImportError, match="USE_HUB_KERNELS must not turn kernels off"):
        register_kernels()


def test_devices_are_of_two():
    with pytest.raises(ValueError, match="devices must be of"):
        register_kernels(("xpu",))
