"""`QuantizationConfig`: models that are quantised as they are loaded, saved and loaded again, and
checkpoints of other libraries."""

import importlib
import json
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import onepass
from onepass.integrations.transformers import QuantizationConfig
from onepass.nn import QuantizedLinear
from onepass.quantizing import checkpoints
from tests.quantizing import layouts
from tests.support import fresh

F64 = torch.float64
IDS = torch.arange(18).view(2, 9) * 3 % 64
LLAMA = dict(
    vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
    num_attention_heads=2, attention_bias=True,
)  # fmt: skip
Auto = transformers.AutoModelForCausalLM


def llama(**more) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | more))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases too, which begin as zeros
            parameter.data.normal_()
    return model


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


BUILDERS = {"llama": llama, "gpt2": gpt2}


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def same_state(first: nn.Module, second: nn.Module) -> bool:
    states = first.state_dict(), second.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()
    )


def save(model: nn.Module, path) -> str:
    model.save_pretrained(path)
    return str(path)


def load(path, *args, model_class=Auto, **options) -> nn.Module:
    config = QuantizationConfig(*args, **options.pop("config", {}))
    return model_class.from_pretrained(path, quantization_config=config, **options)


# ---- quantised while loading, saved, loaded ------------------------------------------------------
@pytest.mark.parametrize("skip_head", [True, False])
@pytest.mark.parametrize("weights", ["int8", "int4", "nf4", "mxfp4"])
@pytest.mark.parametrize("name", BUILDERS)
def test_loading_is_quantizing_and_saving_keeps_every_bit(name, weights, skip_head, tmp_path):
    stock = BUILDERS[name]()
    path = save(stock, tmp_path / "stock")
    model = load(path, weights, config={"skip_head": skip_head})
    onepass.quantize(stock, weights, skip_head=skip_head)
    assert torch.equal(logits(model), logits(stock.eval()))
    heads = isinstance(model.get_output_embeddings(), QuantizedLinear)
    assert heads is not skip_head
    assert model.hf_quantizer.report.verify(IDS)
    again = Auto.from_pretrained(save(model, tmp_path / "quantised"))
    assert same_state(model, again) and torch.equal(logits(again), logits(model))
    assert again.hf_quantizer.report.verify(IDS)
    for first, second in zip(model.modules(), again.modules(), strict=True):
        assert type(first) is type(second) and first.training is second.training


def test_what_quantize_takes_the_config_takes(tmp_path):
    path = save(llama(), tmp_path / "stock")
    options = dict(group_size=32, include="*.mlp.*", exclude="*.1.*")
    model = load(path, "int4", config=options)
    names = {name for name, of in model.named_modules() if isinstance(of, QuantizedLinear)}
    assert names == {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert model.model.layers[0].mlp.up_proj.group_size == 32
    assert (
        load(path, "int8", config={"activations": "int8"}).model.layers[0].mlp.up_proj.activations
    )
    with pytest.raises(ValueError, match="weights must be one of"):
        QuantizationConfig("int3")
    with pytest.raises(ValueError, match="activations must be None unless weights are int8"):
        QuantizationConfig("int4", activations="int8")
    with pytest.raises(ValueError, match="group_size must be a multiple of 8"):
        load(path, "int4", config={"group_size": 12})


def test_the_report_counts_bytes(tmp_path):
    model = load(save(llama(), tmp_path / "stock"), "nf4")
    report = model.hf_quantizer.report
    layers = [of for of in model.modules() if isinstance(of, QuantizedLinear)]
    assert sum(entry["bytes_after"] for entry in report.quantized) == sum(
        buffer.nbytes for layer in layers for buffer in layer.buffers()
    )
    assert [entry["name"] for entry in report.skipped] == ["lm_head"]
    assert "could be trained" not in str(report)


@pytest.mark.parametrize("device_map", [None, "cpu", "auto", {"": "cpu"}, "meta"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_device_maps_and_dtypes(device_map, dtype, tmp_path):
    path = save(llama(), tmp_path / "stock")
    model = load(path, "int4", device_map=device_map, dtype=dtype)
    path = save(load(path, "int4", dtype=dtype), tmp_path / "quantised")
    again = Auto.from_pretrained(path, device_map=device_map, dtype=dtype)
    for of in (model, again):
        layer = of.model.layers[0].mlp.up_proj
        assert layer.codes.is_meta is (device_map == "meta")
        assert (layer.dtype, layer.group_size, of.model.norm.weight.dtype) == (dtype, 64, dtype)
    if device_map != "meta":
        assert same_state(model, again) and logits(model).dtype == dtype


def test_shards(tmp_path):
    stock = llama()
    stock.save_pretrained(tmp_path / "stock", max_shard_size="100KB")
    assert len(list((tmp_path / "stock").glob("*.safetensors"))) > 3
    model = load(tmp_path / "stock", "nf4")
    model.save_pretrained(tmp_path / "quantised", max_shard_size="50KB")
    assert len(list((tmp_path / "quantised").glob("*.safetensors"))) > 3
    assert same_state(model, Auto.from_pretrained(tmp_path / "quantised"))


def test_the_model_without_its_head_and_the_other_way(tmp_path):
    path = save(load(save(llama(), tmp_path / "stock"), "int8"), tmp_path / "quantised")
    base = transformers.AutoModel.from_pretrained(path)
    expected = Auto.from_pretrained(path).model
    with torch.no_grad():
        assert torch.equal(base(IDS)[0], expected(IDS)[0])
    again = Auto.from_pretrained(save(base, tmp_path / "base"))
    assert same_state(again.model, base)


def test_biases_that_the_checkpoint_lacks_are_zero(tmp_path):
    path = tmp_path / "stock"
    save(llama(), path)
    tensors = load_file(path / "model.safetensors")
    lost = "model.layers.0.self_attn.q_proj.bias"
    kept = {name: tensor for name, tensor in tensors.items() if name != lost}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    model = load(path, "int8")
    assert not model.get_parameter(lost).any()
    other = "model.layers.1.self_attn.q_proj.bias"
    assert torch.equal(model.get_parameter(other), tensors[other])


def test_dequantize_gives_plain_layers(tmp_path):
    model = load(save(gpt2(), tmp_path / "stock"), "int8")
    expected = {
        name: of.dequantized()
        for name, of in model.named_modules()
        if isinstance(of, QuantizedLinear)
    }
    before = logits(model)
    plain = model.dequantize()
    assert not any(isinstance(of, QuantizedLinear) for of in plain.modules())
    for name, weight in expected.items():
        layer = plain.get_submodule(name)
        assert type(layer) is transformers.pytorch_utils.Conv1D
        assert torch.equal(layer.weight.t(), weight)
    torch.testing.assert_close(logits(plain), before)
    assert not hasattr(plain.config, "quantization_config")
    assert same_state(Auto.from_pretrained(save(plain, tmp_path / "plain")), plain)


def test_adapters_may_be_trained_and_compiled(tmp_path):
    model = load(save(llama(), tmp_path / "stock"), "nf4")
    quantizer = model.hf_quantizer
    assert quantizer.is_trainable and quantizer.is_compileable and quantizer.is_serializable()
    expected = logits(model)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(IDS).logits, expected)


_PEAK = """
import ctypes, sys, threading, time
import torch, transformers
from onepass.integrations.transformers import QuantizationConfig

ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: freed blocks go back at once

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

load = transformers.AutoModelForCausalLM.from_pretrained
options = {"quantization_config": QuantizationConfig(sys.argv[2])} if sys.argv[2] else {}
load(sys.argv[1] + "/small", **options)
before, peak, done = anonymous(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0002)

thread = threading.Thread(target=watch)
thread.start()
model = load(sys.argv[1] + "/large", **options)
done = True
thread.join()
size = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
print((peak - before - size) / 2**20)
"""


@pytest.mark.parametrize("weights", ["int8", "nf4", ""])
def test_the_peak_of_loading_is_the_quantised_model_and_a_layer(weights, tmp_path):
    """Of memory that no file is mapped to."""
    layer = 1024 * 4096 * 4 / 2**20  # the largest, in float32
    large = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=8)
    for name, sizes in (("small", {}), ("large", large)):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | sizes))
        if not weights:  # loaded from codes
            onepass.quantize(model, "nf4")
            model.config.quantization_config = QuantizationConfig("nf4")
        model.save_pretrained(tmp_path / name, max_shard_size="50MB")
        del model
    found = fresh.run(_PEAK, tmp_path, weights, check=True)
    assert float(found.stdout.split()[-1]) < layer + 4


# ---- checkpoints of other libraries --------------------------------------------------------------
def write(path, layout, tied=False) -> dict[str, torch.Tensor]:
    """A checkpoint whose linear layers a layout holds; their weights by name."""
    model = llama(tie_word_embeddings=tied)
    save(model, path)
    tensors, weights, facts = load_file(path / "model.safetensors"), {}, {}
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        name = key.removesuffix(".weight")
        written = layout(tuple(tensors.pop(key).shape))
        # Random codes have large weights; smaller scales keep the model's numbers ordinary.
        tensors |= {f"{name}.{of}": tensor.contiguous() for of, tensor in written.tensors.items()}
        weights[name], facts[f"{name}.weight"] = written.weight, written.config.get("facts")
    metadata = {"format": "pt"}
    if written.method == "torchao":
        metadata |= {name: json.dumps(of) for name, of in facts.items()}
    save_file(tensors, path / "model.safetensors", metadata)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {k: v for k, v in written.config.items() if k != "facts"}
    (path / "config.json").write_text(json.dumps(config))
    return weights


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_a_checkpoint_of_another_library(name, tmp_path):
    """Every layer is the checkpoint's, everything else too; saved, it is one of onepass."""
    torch.manual_seed(1)
    weights = write(tmp_path / "theirs", layouts.LAYOUTS[name])
    model = load(tmp_path / "theirs")
    for layer, weight in weights.items():
        assert torch.equal(model.get_submodule(layer).dequantized(F64), weight)
    stock = llama(tie_word_embeddings=False)
    for parameter, own in stock.named_parameters():
        if not parameter.endswith("_proj.weight"):
            assert torch.equal(model.get_parameter(parameter), own), parameter
    report = model.hf_quantizer.report
    assert len(report.quantized) == len(weights) and report.verify(IDS)
    assert report.skipped == [
        {"name": "lm_head", "type": "Linear", "reason": "is not quantised in the checkpoint"}
    ]
    again = Auto.from_pretrained(save(model, tmp_path / "ours"))
    assert same_state(again, model) and torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_gpt_oss(dtype, tmp_path):
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_local_experts=4,
        num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    path = tmp_path / "theirs"
    stock = transformers.GptOssForCausalLM(config)
    for name, parameter in stock.named_parameters():
        if "bias" in name:
            parameter.data.normal_()
    save(stock, path)
    tensors, weights = load_file(path / "model.safetensors"), {}
    for key in [key for key in tensors if key.endswith("_proj") and "experts" in key]:
        experts, in_features, out_features = tensors.pop(key).shape
        written = layouts.mxfp4_experts(experts, (out_features, in_features))
        tensors |= {f"{key}_{name}": tensor for name, tensor in written.tensors.items()}
        weights[key] = written.weight
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    found = json.loads((path / "config.json").read_text())
    found["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(found))

    model = load(path, dtype=dtype)
    for name, weight in weights.items():
        stacked = torch.stack([of.dequantized(F64) for of in model.get_submodule(name)])
        assert torch.equal(stacked, weight)
    assert len(model.hf_quantizer.report.quantized) == 2 * 4 * 2
    stock = Auto.from_pretrained(
        path, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=dtype
    )
    if dtype == torch.float32:
        torch.testing.assert_close(logits(model), logits(stock))
    again = Auto.from_pretrained(save(model, tmp_path / "ours"), dtype=dtype)
    assert same_state(again, model) and torch.equal(logits(again), logits(model))
    plain = again.dequantize()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, stock.get_parameter(name)), name


def test_other_methods_and_configs_go_to_transformers(tmp_path):
    """Its own errors, not onepass's, where nobody asked for onepass."""
    write(tmp_path / "theirs", layouts.awq)
    with pytest.raises(ImportError, match="gptqmodel"):
        Auto.from_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quant_method must be onepass or one of .* got 'aqlm'"):
        load(tmp_path / "theirs")


def test_nothing_is_drawn_in_place_of_layers_that_do_not_fit(tmp_path):
    """Layers of another model, and of another shape."""
    write(tmp_path / "theirs", layouts.gptq)
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    renamed = {name.replace("mlp.up_proj", "mlp.upper"): of for name, of in tensors.items()}
    save_file(renamed, path, {"format": "pt"})
    with pytest.raises(RuntimeError, match="2 quantised layers of the checkpoint must be linear"):
        load(tmp_path / "theirs")
    wide = layouts.gptq((192, 160)).tensors
    save_file(
        tensors | {f"model.layers.0.mlp.up_proj.{name}": of for name, of in wide.items()},
        path, {"format": "pt"},
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        load(tmp_path / "theirs")


def test_schemes_of_compressed_tensors(tmp_path):
    """Patterns and names choose a scheme; a layer without one is an error."""
    write(tmp_path / "theirs", layouts.compressed_tensors)
    file = tmp_path / "theirs/config.json"
    config = json.loads(file.read_text())
    scheme = config["quantization_config"]["config_groups"]["group_0"]
    scheme["targets"] = ["re:.*self_attn.*", "re:.*mlp.*"]
    file.write_text(json.dumps(config))
    assert len(load(tmp_path / "theirs").hf_quantizer.report.quantized) == 14
    scheme["targets"] = ["re:.*self_attn.*"]
    file.write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        load(tmp_path / "theirs")


def test_readers_and_the_config_name_the_same_methods():
    assert set(checkpoints.READERS) == {
        layout((16, 64)).method for layout in layouts.LAYOUTS.values()
    }
    assert "onepass.integrations.transformers.quantization" in sys.modules


def test_a_quantised_head_that_the_model_does_not_have(tmp_path):
    """A classifier, and the model without a head, read the body of a language model."""
    config = {"skip_head": False}
    path = save(load(save(llama(), tmp_path / "stock"), "int8", config=config), tmp_path / "ours")
    expected = Auto.from_pretrained(path).model
    for kind in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
        model = kind.from_pretrained(path)
        assert same_state(model.base_model, expected)


def test_transformers_that_cannot_convert_weights(monkeypatch):
    module = "onepass.integrations.transformers.quantization"
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    with pytest.raises(ImportError, match="must convert weights as it reads them, got version"):
        importlib.import_module(module)


def test_blocks_and_attention_by_transformers_switches(tmp_path):
    """Layers of `register_kernels` and attention of `attach` on a quantised model."""
    from onepass.integrations.transformers import attach, detach, kernels

    model = load(save(llama(), tmp_path / "stock"), "int8")
    expected = logits(model)
    mlp = model.model.layers[0].mlp
    x = torch.randn(1, 5, 128)
    for layer in (kernels.SwiGLUMLP, kernels.Linear):
        own = mlp if layer is kernels.SwiGLUMLP else mlp.up_proj
        torch.testing.assert_close(layer.forward(own, x), own(x))
    assert "attention" in str(attach(model))
    torch.testing.assert_close(logits(model), expected)
    detach(model)
    assert torch.equal(logits(model), expected)
