"""Checkpoints that bitsandbytes, torchao and compressed-tensors write, read by onepass."""

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import onepass
from onepass import numerics
from onepass.integrations.transformers import QuantizationConfig
from onepass.nn import QuantizedLinear
from tests.integrations.test_transformers_quantization import IDS, Auto, llama, logits, save

F64 = torch.float64
INSTALLED_BY = "make test-integrations installs it; layouts are tested without it"
TORCHAO = "torchtune needs torchao 0.15, which cannot save such tensors; layouts are tested"


def check(path, weights: dict[str, Tensor], **options) -> nn.Module:
    """Reads a checkpoint and compares each layer with the weight by its library's own formula."""
    model = Auto.from_pretrained(path, quantization_config=QuantizationConfig(), **options)
    layers = {name: of for name, of in model.named_modules() if isinstance(of, QuantizedLinear)}
    assert layers.keys() == weights.keys()
    for name, layer in layers.items():
        weight = weights[name]
        numerics.assert_close(layer.dequantized(), weight, weight.float(), name)
    assert model.hf_quantizer.report.verify(IDS)
    return model


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: of for name, of in model.named_modules() if name.endswith("_proj")}


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_of_bitsandbytes(nested, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason=INSTALLED_BY)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
    )
    stock = Auto.from_pretrained(save(llama(), tmp_path / "plain"), quantization_config=config)
    weights = {
        name: bitsandbytes.functional.dequantize_4bit(of.weight.data, of.weight.quant_state)
        for name, of in linear_layers(stock).items()
    }
    weights = {name: weight.to(F64) for name, weight in weights.items()}
    model = check(save(stock, tmp_path / "theirs"), weights)
    torch.testing.assert_close(logits(model), logits(stock))


def test_int8_of_bitsandbytes(tmp_path):
    pytest.importorskip("bitsandbytes", reason=INSTALLED_BY)
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    stock = Auto.from_pretrained(save(llama(), tmp_path / "plain"), quantization_config=config)
    weights = {
        name: of.weight.data * (of.weight.SCB / 127).to(F64)[:, None]
        for name, of in linear_layers(stock).items()
    }
    check(save(stock, tmp_path / "theirs"), weights)


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_int8_of_torchao(name, tmp_path):
    torchao = pytest.importorskip("torchao", minversion="0.16", reason=TORCHAO)
    config = transformers.TorchAoConfig(getattr(torchao.quantization, name)(version=2))
    stock = Auto.from_pretrained(save(llama(), tmp_path / "plain"), quantization_config=config)
    weights = {
        name: of.weight.qdata * of.weight.scale.to(F64).reshape(-1, 1)
        for name, of in linear_layers(stock).items()
    }
    model = check(save(stock, tmp_path / "theirs"), weights)
    of_input = model.model.layers[0].mlp.up_proj.activations
    assert of_input == ("int8" if "Dynamic" in name else None)


SCHEMES = {
    "W4A16": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
    "W4A16, asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
    "W4A16, channel": {"num_bits": 4, "strategy": "channel", "symmetric": True},
    "W8A16": {"num_bits": 8, "strategy": "channel", "symmetric": True},
    "W8A8": {"num_bits": 8, "strategy": "channel", "symmetric": True},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(name, tmp_path):
    pytest.importorskip("compressed_tensors", reason=INSTALLED_BY)
    from compressed_tensors import quantization
    from compressed_tensors.compressors import naive_quantized, pack_quantized
    from compressed_tensors.quantization.lifecycle import forward
    from compressed_tensors.quantization.utils import calculate_qparams

    args = quantization.QuantizationArgs(type="int", **SCHEMES[name])
    of_input = quantization.QuantizationArgs(
        num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True
    )
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=of_input if name == "W8A8" else None
    )
    packed = pack_quantized.PackedQuantizationCompressor
    whole = naive_quantized.IntQuantizationCompressor
    compressor, format = (whole, "int-quantized") if name == "W8A8" else (packed, "pack-quantized")
    path = tmp_path / "theirs"
    save(llama(), path)
    tensors, weights = load_file(path / "model.safetensors"), {}
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        weight, layer = tensors.pop(key), key.removesuffix(".weight")
        groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        codes = forward.quantize(weight, scale, zero, args, dtype=torch.int8)
        weights[layer] = forward.dequantize(codes, scale.to(F64), zero, args=args).to(F64)
        for of, tensor in compressor.compress(state, scheme).items():
            tensors[f"{layer}.{of}"] = tensor.contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    theirs = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, quantization_status="compressed",
        ignore=["lm_head"],
    )  # fmt: skip
    config["quantization_config"] = json.loads(theirs.model_dump_json())
    (path / "config.json").write_text(json.dumps(config))
    check(path, weights)


# ---- layers that are loaded already --------------------------------------------------------------
def loaded(name: str, tmp_path) -> nn.Module:
    if name == "nf4":
        pytest.importorskip("bitsandbytes", reason=INSTALLED_BY)
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    else:
        torchao = pytest.importorskip("torchao", minversion="0.16", reason=TORCHAO)
        config = transformers.TorchAoConfig(torchao.quantization.Int8WeightOnlyConfig())
    return Auto.from_pretrained(save(llama(), tmp_path / "plain"), quantization_config=config)


@pytest.mark.parametrize("name", ["nf4", "torchao int8"])
def test_swap_takes_loaded_layers_and_gives_them_back(name, tmp_path):
    model = loaded(name, tmp_path)
    layers = linear_layers(model)
    if any(getattr(layer, "support_avx512bf16_for_cpu", False) for layer in layers.values()):
        report = onepass.swap(model, kinds="linear")  # bitsandbytes has a kernel of its own
        assert all("of its own for this CPU" in e["reason"] for e in report.skipped)
        return
    state, before = model.state_dict(), logits(model)
    report = onepass.swap(model, kinds="linear")
    assert layers.keys() <= {entry["name"] for entry in report.swapped}
    assert any("kept a second time" in note for note in report.notes)
    assert report.verify(IDS)
    swapped = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), swapped)
    assert model.state_dict().keys() == state.keys()
    onepass.unswap(model)
    assert torch.equal(logits(model), before)
    assert not any("_onepass_quantized" in vars(layer) for layer in layers.values())


def test_swap_leaves_layers_whose_input_is_quantised_too(tmp_path):
    pytest.importorskip("bitsandbytes", reason=INSTALLED_BY)
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = Auto.from_pretrained(save(llama(), tmp_path / "plain"), quantization_config=config)
    reasons = {entry["name"]: entry["reason"] for entry in onepass.swap(model).skipped}
    for name in linear_layers(model):
        assert reasons[name] == "its products quantise the input too"


def test_swap_leaves_fp4(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason=INSTALLED_BY)
    layer = bitsandbytes.nn.Linear4bit(64, 64, quant_type="fp4", compute_dtype=torch.float32)
    model = nn.Sequential(layer, nn.Linear(64, 8))
    reasons = {entry["name"]: entry["reason"] for entry in onepass.swap(model).skipped}
    assert reasons["0"].startswith("is not quantised yet")
    model = model.to("cpu")
    reasons = {entry["name"]: entry["reason"] for entry in onepass.swap(model).skipped}
    assert reasons["0"] in (
        "is not quantised yet: bitsandbytes does that when it is moved to a device",
        "its weight is fp4 of bitsandbytes, not nf4",
    )
