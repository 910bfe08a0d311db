"""Layers that other libraries quantised, read from their tensors."""

import pytest
import torch

from onepass import numerics
from onepass.quantizing import checkpoints
from tests.quantizing import layouts

F64 = torch.float64


def read(written: layouts.Written, dtype=torch.float32):
    config = dict(written.config)
    if written.method == "compressed-tensors":
        config["scheme"] = config["config_groups"]["group_0"]
    if written.method == "torchao":
        facts = config["facts"]
        config["tensor"] = facts["_type"]
        config["quantizes_input"] = facts["_data"].get("act_quant_kwargs") is not None
    stored = checkpoints.READERS[written.method].read(written.tensors, config)
    return checkpoints.layer_of(stored, None, dtype)


def exactly(layer, weight) -> bool:
    """Whether the layer's weight is the checkpoint's: one product of a code and a scale, and one
    sum with a shift, in float64, of a scale and a shift that float32 holds."""
    return torch.equal(layer.dequantized(F64), weight)


@pytest.mark.parametrize("shape", [(48, 128), (16, 192), (40, 64)], ids=str)
@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_the_weight_is_the_checkpoints(name, shape):
    torch.manual_seed(0)
    written = layouts.LAYOUTS[name](shape)
    layer = read(written)
    assert exactly(layer, written.weight)
    x = torch.randn(5, shape[1])
    weight = layer.dequantized(F64)
    if layer.activations is None:
        base = torch.nn.functional.linear(x, weight.float())
        numerics.assert_close(layer(x), x.double() @ weight.t(), base, "output")
    assert (layer.activations == "int8") == (name in ("W8A8", "torchao int8 by int8"))


@pytest.mark.parametrize("in_features", [72, 80, 96, 100, 128])
def test_blocks_of_bitsandbytes_that_go_on_in_the_next_row(in_features):
    """Blocks of 64 elements are cut where a row ends."""
    written = layouts.bitsandbytes_4bit((32, in_features))
    if in_features == 100:
        with pytest.raises(ValueError, match="group_size must be a multiple of 8 that divides"):
            read(written)
        return
    layer = read(written)
    assert exactly(layer, written.weight)
    assert layer.group_size == {72: 8, 80: 16, 96: 32, 128: 64}[in_features]


def test_experts():
    written = layouts.mxfp4_experts(3, (24, 96))
    for stored, weight in zip(
        checkpoints.read_mxfp4(written.tensors, {}), written.weight, strict=True
    ):
        assert exactly(checkpoints.layer_of(stored, None, torch.bfloat16), weight)


def test_codes_of_minus_128():
    """Checkpoints have them, `quantize` makes none."""
    torch.manual_seed(0)
    written = layouts.bitsandbytes_8bit((32, 64))
    written.tensors["weight"][::3] = -128
    largest = written.tensors["SCB"]
    for activations in (None, "int8"):
        stored = checkpoints.read_bitsandbytes_8bit(written.tensors, {})
        stored = stored._replace(activations=activations)
        layer = checkpoints.layer_of(stored, None, torch.float32)
        weight = written.tensors["weight"] * (largest / 127).to(F64)[:, None]
        assert torch.equal(layer.dequantized(F64), weight)
        for rows in (1, 40):
            x = torch.randint(-127, 128, (rows, 64)).float()
            x[:, 0] = 127  # so that a quantised row is the row
            base = torch.nn.functional.linear(x, weight.float())
            numerics.assert_close(layer(x), x.double() @ weight.t(), base, "output")


def _wrong():
    gptq = layouts.gptq((16, 64))
    gptq.tensors["g_idx"][0] = 1
    yield "g_idx must have 2 groups of one size, got [31, 33]", gptq
    yield (
        "weights of 8 bits must be symmetric, got zero points",
        layouts.gptq((16, 64), bits=8)._replace(
            tensors={**layouts.gptq((16, 64), bits=8).tensors, "qzeros": torch.zeros(2, 4).int()}
        ),
    )
    nf4 = layouts.bitsandbytes_4bit((16, 64))
    nf4.tensors["weight.quant_map"] = nf4.tensors["weight.quant_map"].flip(0)
    yield "weight.quant_map must be nf4's, got another one", nf4
    ao = layouts.torchao((16, 64))
    ao.tensors["_weight_act_pre_scale"] = torch.ones(64)
    yield "act_pre_scale must be None, got a tensor", ao
    ao = layouts.torchao((16, 64))
    ao.tensors["_weight_zero_point"] = torch.ones(16, 1)
    yield "int8 weights must be symmetric, got zeros", ao
    ao = layouts.torchao((16, 64))
    ao.config["facts"]["_type"] = "Float8Tensor"
    yield "tensors must be Int8Tensor or Int4Tensor, got Float8Tensor", ao
    ct = layouts.compressed_tensors((16, 64), bits=8)
    ct.tensors["weight_zero_point"] = torch.ones(16, 2, dtype=torch.int8)
    yield "weights of 8 bits must be symmetric, got zero points", ct


@pytest.mark.parametrize("sentence, written", list(_wrong()), ids=lambda of: str(of)[:30])
def test_tensors_that_are_none_of_a_layer(sentence, written):
    with pytest.raises(ValueError) as error:
        read(written)
    assert str(error.value) == f"quantize: {sentence}"


@pytest.mark.parametrize(
    "method, config, sentence",
    [
        ("gptq", {"bits": 3}, "bits of gptq must be 4 or 8, got 3"),
        ("gptq", {"format": "marlin"}, "format of gptq must be 'gptq' or 'gptq_v2', got 'marlin'"),
        ("awq", {"bits": 4, "version": "GEMV"}, "version of awq must be 'gemm', got 'gemv'"),
        (
            "bitsandbytes_4bit",
            {"bnb_4bit_quant_type": "fp4"},
            "bnb_4bit_quant_type of bitsandbytes_4bit must be 'nf4', got 'fp4'",
        ),
        (
            "compressed-tensors",
            {"config_groups": {"g": {"weights": {"type": "float", "num_bits": 8}}}},
            "weights of compressed-tensors must be int of 4 or 8 bits, got float of 8",
        ),
        (
            "compressed-tensors",
            layouts.compressed_tensors((16, 64), of_input=layouts.OF_TOKENS).config,
            "input_activations of compressed-tensors must be dynamic int8 of each token beside "
            f"int8 weights of strategy 'channel', got {layouts.OF_TOKENS} beside 4 bits of 'group'",
        ),
    ],
)
def test_configs_of_checkpoints_that_cannot_be_read(method, config, sentence):
    with pytest.raises(ValueError) as error:
        checkpoints.check_config(method, config)
    assert str(error.value) == f"quantize: {sentence}"
