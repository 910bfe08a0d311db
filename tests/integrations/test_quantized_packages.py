"""Checkpoints that bitsandbytes, torchao and compressed-tensors write, read by onepass."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onepass import numerics
from onepass.integrations.transformers import QuantizationConfig
from onepass.nn import QuantizedLinear
from tests.integrations.test_transformers_quantization import IDS, Auto, llama, logits, save

F64 = torch.float64


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
    bitsandbytes = pytest.importorskip("bitsandbytes")
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
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    stock = Auto.from_pretrained(save(llama(), tmp_path / "plain"), quantization_config=config)
    weights = {
        name: of.weight.data * (of.weight.SCB / 127).to(F64)[:, None]
        for name, of in linear_layers(stock).items()
    }
    check(save(stock, tmp_path / "theirs"), weights)


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_int8_of_torchao(name, tmp_path):
    # torchtune needs 0.15, which cannot save such tensors.
    torchao = pytest.importorskip("torchao", minversion="0.16")
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
    pytest.importorskip("compressed_tensors")
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
