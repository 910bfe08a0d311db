"""`onepass.quantize`: which layers, what is kept, errors that change nothing, and back again."""

import copy
import gc
import pickle
import re
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import onepass
from onepass.nn import QuantizedLinear
from onepass.reference import quantized_linear as reference

WEIGHTS = ("int8", "int4", "nf4", "mxfp4")
formats = pytest.mark.parametrize("weights", WEIGHTS)


class Model(nn.Module):
    """Layers in a list, one of them under two names, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=i > 0) for i in range(3))
        self.again = self.blocks[1]
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x):
        for block in (*self.blocks, self.again):
            x = nn.functional.gelu(block(x)) + x
        return self.head(self.norm(x))


def model(seed=0) -> Model:
    torch.manual_seed(seed)
    return Model().eval()


X = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))


@formats
def test_layers_are_replaced_and_come_back(weights):
    own, plain = model(), model()
    report = onepass.quantize(own, weights, batch=X)
    assert [entry["name"] for entry in report.quantized] == [f"blocks.{i}" for i in range(3)]
    assert own.again is own.blocks[1] and type(own.again) is QuantizedLinear
    assert type(own.head) is nn.Linear and report.verify(X)
    assert report.skipped[0]["name"] == "head" and "skip_head=False" in report.skipped[0]["reason"]
    output, expected = own(X), plain(X)
    # Errors of layers in a chain with residual sums add up to less than twice their sum.
    most = 2 * sum(entry["output_error"] for entry in report.quantized)
    assert 0 < (output - expected).norm() / expected.norm() < most
    for entry in report.quantized:
        weight = plain.get_submodule(entry["name"]).weight.detach()
        error = weight - own.get_submodule(entry["name"]).dequantized()
        assert entry["error"] == pytest.approx(float(error.norm() / weight.norm()), rel=1e-4)
        assert entry["bytes_before"] == 64 * 64 * 4 and entry["bytes_after"] < 64 * 64 * 1.1
    assert onepass.dequantize(own) == [entry["name"] for entry in report.quantized]
    assert type(own.again) is nn.Linear and own.again is own.blocks[1]
    assert not own.again.weight.requires_grad and own.blocks[2].bias.requires_grad
    torch.testing.assert_close(own(X), output)
    assert onepass.dequantize(own) == []


def test_int8_of_inputs():
    own = model()
    report = onepass.quantize(own, "int8", activations="int8")
    assert own.again.activations == "int8" and report.verify(X)
    assert "activations='int8'" in repr(own.again)


def test_choice_of_layers():
    own = model()
    report = onepass.quantize(own, "nf4", include="blocks.*", exclude="*.2", skip_head=False)
    reasons = {entry["name"]: entry["reason"] for entry in report.skipped}
    assert reasons == {"blocks.2": "excluded by '*.2'", "head": "not in include"}
    report = onepass.quantize(model(), "nf4", skip_head=False, include=["head", "tail"])
    assert [entry["name"] for entry in report.quantized] == ["head"]
    assert report.notes[0] == "include pattern 'tail' matches no module"


class Hooked(nn.Linear):
    pass


def _left_as_they_are():
    def hooked(layer):
        layer.register_forward_hook(lambda *_: None)
        return layer

    yield "has hooks, or a forward of its own", hooked(nn.Linear(64, 64))
    yield "its class is Hooked, not torch.nn.Linear", Hooked(64, 64)
    yield "its weight is parametrized", parametrizations.weight_norm(nn.Linear(64, 64))
    yield "its weight is float64", nn.Linear(64, 64, dtype=torch.float64)
    yield "its weight has no elements", nn.Linear(0, 64)
    compiled = nn.Linear(64, 64)
    compiled.compile()
    yield "is compiled; quantize before torch.compile", compiled


LEFT = dict(_left_as_they_are())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("reason", LEFT)
def test_layers_that_are_left_as_they_are(reason):
    layer = LEFT[reason]
    own = nn.Sequential(layer, nn.Linear(64, 64), nn.Linear(64, 8))
    report = onepass.quantize(own, "int4")
    skipped = {entry["name"]: entry["reason"] for entry in report.skipped}
    assert skipped["0"] == reason and own[0] is layer and type(own[1]) is QuantizedLinear


def test_a_model_on_the_meta_device_gets_layers_without_contents():
    with torch.device("meta"):
        own = model()
    report = onepass.quantize(own, "int4")
    layer = own.blocks[0]
    assert type(layer) is QuantizedLinear and layer.codes.is_meta and layer.error is None
    assert "None" not in str(report) and report.quantized[0]["bytes_after"] > 0
    other = model()
    onepass.quantize(other, "int4")
    own.load_state_dict(other.state_dict(), assign=True)
    x = torch.randn(3, 64)
    assert torch.equal(own(x), other(x))


def test_shared_weights_and_readers_of_weights():
    own = model()
    own.blocks[2].weight = own.blocks[0].weight
    reasons = {e["name"]: e["reason"] for e in onepass.quantize(own, "int8").skipped}
    assert reasons["blocks.0"] == "shares its weight with blocks.2"
    layer = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    report = onepass.quantize(encoder, "int8", skip_head=False)
    assert not report.quantized and "TransformerEncoderLayer" in report.skipped[1]["reason"]
    alone = nn.Linear(64, 64)
    reason = onepass.quantize(alone, "int8").skipped[0]["reason"]
    assert reason.startswith("is the model itself")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(weights="int3"), "weights must be one of 'int8', 'int4', 'nf4', 'mxfp4', got 'int3'"),
        (
            dict(weights="int4", group_size=48),
            "group_size must be a multiple of 8 that divides in_features of blocks.0, 64, got 48",
        ),
        (dict(weights="int8", activations="fp8"), "activations must be None or 'int8', got 'fp8'"),
        (
            dict(weights="int4", activations="int8"),
            "activations must be None unless weights are int8 with a scale for each row, got "
            "'int8' beside int4",
        ),
    ],
    ids=str,
)
def test_bad_options_change_nothing(options, message):
    own = model()
    with pytest.raises(ValueError, match=f"^quantize: {re.escape(message)}$"):
        onepass.quantize(own, **options)
    assert not any(isinstance(module, QuantizedLinear) for module in own.modules())


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_weight_that_is_not_finite_changes_nothing(value):
    own = model()
    with torch.no_grad():
        own.blocks[2].weight[3, 5] = value
    message = "^quantize: blocks.2.weight must be finite, got NaN or Inf in it$"
    with pytest.raises(ValueError, match=message):
        onepass.quantize(own, "nf4")
    assert type(own.blocks[0]) is nn.Linear


def test_groups_fit_the_rows():
    found = {}
    for in_features in (256, 96, 80, 1000, 40, 36):
        layer = QuantizedLinear(in_features, 8, weights="nf4")
        found[in_features] = layer.group_size
        assert layer(torch.randn(3, in_features)).shape == (3, 8)
    assert found == {256: 64, 96: 48, 80: 40, 1000: 40, 40: 40, 36: 36}


@formats
def test_state_dicts(weights, tmp_path):
    own, other = model(), model(1)
    for each in (own, other):
        onepass.quantize(each, weights)
    other.load_state_dict(own.state_dict())
    assert torch.equal(own(X), other(X))
    torch.save(own.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"), assign=True)
    assert torch.equal(own(X), other(X))
    for copied in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert torch.equal(own(X), copied(X))
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(own, str(tmp_path / "state.safetensors"))
    third = model(2)
    onepass.quantize(third, weights)
    safetensors.load_model(third, str(tmp_path / "state.safetensors"))
    assert torch.equal(own(X), third(X))


def test_a_state_of_another_format_is_refused():
    """And the layer stays as it was."""
    own, other = model(), model(1)
    onepass.quantize(own, "nf4", group_size=32)
    onepass.quantize(other, "mxfp4")
    output = other.blocks[0](X)
    message = "blocks.0 must be of mxfp4 in groups of 32, got a state of nf4 in groups of 32"
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(own.state_dict(), strict=False)
    assert torch.equal(other.blocks[0](X), output)
    state = other.state_dict()
    state["blocks.0.codes"] = state["blocks.0.codes"].float()
    with pytest.raises(RuntimeError, match="blocks.0 must have codes in int32, got float32"):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match="state must be of mxfp4 in groups of 32, got nf4"):
        other.blocks[0].set_extra_state(own.blocks[0].get_extra_state())


def test_a_model_that_is_converted_keeps_its_scales():
    own = model()
    onepass.quantize(own, "int4")
    scales = own.again.scales.clone()
    own.to(torch.bfloat16)
    assert torch.equal(own.again.scales, scales) and own.again.bias.dtype is torch.bfloat16
    assert own(X.bfloat16()).dtype is torch.bfloat16
    onepass.dequantize(own)
    assert own(X.bfloat16()).dtype is torch.bfloat16  # also of the layer without a bias
    own = model()
    onepass.quantize(own, "int4")
    single = own(X)
    torch.testing.assert_close(own.double()(X.double()).float(), single)
    torch.testing.assert_close(own.float()(X), single)


def test_weights_are_freed_one_after_the_other(monkeypatch):
    own, alive, seen = model(), [], []
    for block in own.blocks:
        alive.append(weakref.ref(block.weight))
    quantize = reference.quantize

    def counted(*args):
        gc.collect()
        seen.append(sum(weight() is not None for weight in alive))
        return quantize(*args)

    monkeypatch.setattr(reference, "quantize", counted)
    onepass.quantize(own, "int8")
    assert seen == [3, 2, 1]


def test_swapped_models_are_quantised_and_quantised_ones_swapped():
    first, second = model(), model()
    onepass.swap(first)
    onepass.quantize(first, "int8")
    onepass.quantize(second, "int8")
    onepass.swap(second)
    assert type(first.again) is type(second.again) is QuantizedLinear
    torch.testing.assert_close(first(X), second(X))
    onepass.unswap(first)
    torch.testing.assert_close(first(X), second(X))
    onepass.dequantize(first)
    assert type(first.again) is nn.Linear


@formats
def test_fine_tuning_what_is_not_frozen(weights):
    """A frozen base, as under LoRA: the rest learns."""
    own = model()
    onepass.quantize(own, weights)
    codes = own.again.codes.clone()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = own(X).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] and torch.equal(own.again.codes, codes)


def test_compiled_and_exported():
    own = model()
    onepass.quantize(own, "nf4")
    expected = own(X)
    torch.testing.assert_close(torch.compile(own, fullgraph=True)(X), expected)
    rows = {"x": {0: torch.export.Dim("rows")}}
    program = torch.export.export(own, (X,), dynamic_shapes=rows)
    torch.testing.assert_close(program.module()(X[:7]), own(X[:7]))


def test_transformers():
    """Conv1D has its weight transposed, and dequantize gives it back."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=32)
    config.bos_token_id = config.eos_token_id = None
    own = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.arange(24).view(2, 12)
    stock = own(ids).logits
    report = onepass.quantize(own, "int8", batch={"input_ids": ids})
    assert len(report.quantized) == 8 and report.verify(input_ids=ids)
    assert report.skipped[0]["name"] == "lm_head"
    quantised = own(ids).logits
    assert (quantised - stock).norm() < 0.02 * stock.norm()
    onepass.dequantize(own)
    assert type(own.transformer.h[0].attn.c_attn).__name__ == "Conv1D"
    torch.testing.assert_close(own(ids).logits, quantised, rtol=1e-4, atol=1e-4)


def test_heads_of_classifiers_and_a_second_call():
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    config = transformers.BertConfig(**sizes, num_attention_heads=4)
    own = transformers.BertForSequenceClassification(config).eval()
    report = onepass.quantize(own, "int4")
    assert [entry["name"] for entry in report.skipped] == ["classifier"]
    assert len(report.quantized) == 7
    again = onepass.quantize(own, "int8")
    reasons = {entry["name"]: entry["reason"] for entry in again.skipped}
    assert not again.quantized and reasons["classifier"].startswith("makes the logits")
    assert reasons["bert.pooler.dense"] == "is quantised already, to int4"


def test_weights_that_a_model_reads_by_itself():
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    own = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    ids = torch.arange(5)[None]
    batch = {"input_ids": ids, "decoder_input_ids": ids}
    report = onepass.quantize(own, "int8", batch=batch)
    reasons = {entry["name"].split(".")[-1]: entry["reason"] for entry in report.skipped}
    assert reasons["wo"] == "its weight is read by T5DenseActDense without a call"
    assert report.verify(batch) and len(report.quantized) > 10


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.first(input=x))


def test_layers_that_are_called_by_keyword_and_scripted_parts():
    own = nn.Sequential(ByKeyword(), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2))
    report = onepass.quantize(own, "int8", batch=X)
    assert report.quantized[0]["output_error"] < 0.02 and report.verify(X)


def test_an_interrupt_leaves_a_model_that_works(monkeypatch):
    own, quantize = model(), reference.quantize
    expected, calls = own(X), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return quantize(*args)

    monkeypatch.setattr(reference, "quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        onepass.quantize(own, "int8")
    assert [type(block) for block in own.blocks] == [QuantizedLinear, nn.Linear, nn.Linear]
    torch.testing.assert_close(own(X), expected, rtol=0.05, atol=0.05)


def test_an_interrupt_between_two_names_of_a_layer():
    """It is quantised under both or under none."""

    class Interrupted(dict):
        def __setitem__(self, name, layer):
            if type(layer) is QuantizedLinear:
                raise KeyboardInterrupt
            super().__setitem__(name, layer)

    own = model()
    shared = own.again
    own._modules = Interrupted(own._modules)  # which has the second name
    with pytest.raises(KeyboardInterrupt):
        onepass.quantize(own, "int8", include="blocks.1")
    assert own.blocks[1] is own.again is shared


def test_attributes_and_hooks_are_kept():
    own, calls = model(), []
    own.again.role = "shared"
    onepass.quantize(own, "int4")
    assert own.again.role == "shared"
    handle = own.again.register_forward_hook(lambda *_: calls.append(1))
    onepass.dequantize(own)
    assert own.again.role == "shared" and not hasattr(own.again, "group_size")
    own(X)
    assert len(calls) == 2
    handle.remove()
    own(X)
    assert len(calls) == 2


def test_what_else_is_refused():
    with pytest.raises(TypeError, match="^quantize: include must hold globs, got int$"):
        onepass.quantize(model(), "int8", include=3)
    with pytest.raises(TypeError, match="^quantize: group_size must be a whole number or None"):
        onepass.quantize(model(), "int8", group_size=16.0)
    with pytest.raises(TypeError, match="^quantize: model must be "):
        onepass.quantize("model", "int8")
    with pytest.raises(ValueError, match="^dequantize: model must be a module around the layers"):
        onepass.dequantize(QuantizedLinear(64, 8))
    with pytest.raises(RuntimeError, match="last dimension of 64, in_features, got shape"):
        QuantizedLinear(64, 8)(torch.randn(3, 61))


def test_notes():
    own = model()
    own.head = nn.Linear(64, 100)
    own.table = nn.Embedding(100, 64)
    own.head.weight = own.table.weight
    notes = onepass.quantize(own, "int8", skip_head=False).notes
    assert notes[0].startswith("4 weights that could be trained are frozen now")
    assert notes[1].startswith("head shared its weight with table")


def test_adapters_beside_a_base_layer():
    peft = pytest.importorskip("peft")
    own = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["blocks.0", "blocks.2"]))
    report = onepass.quantize(own, "nf4")
    names = [entry["name"].removeprefix("base_model.model.") for entry in report.quantized]
    assert names == ["blocks.0.base_layer", "blocks.1", "blocks.2.base_layer"]
    assert sum("adapter" in entry["reason"] for entry in report.skipped) == 4
    own(X).sum().backward()
    assert own.base_model.model.blocks[0].lora_A["default"].weight.grad is not None
    config = peft.LoraConfig(target_modules=["blocks.0"], modules_to_save=["head"])
    own = peft.get_peft_model(model(), config)
    onepass.quantize(own, "nf4", skip_head=False)
    head = own.base_model.model.head
    assert type(head.modules_to_save["default"]) is nn.Linear
    assert type(head.original_module) is QuantizedLinear


def test_reports(capsys):
    own = model()
    report = onepass.quantize(own, "int4", batch=X)
    text = str(report)
    assert "blocks.*" in text and "output error" in text and "3 to int4" in report.summary()
    assert "<table>" in report._repr_html_()
    assert report.to_dict()["quantized"][0]["group_size"] == 64
    copied = pickle.loads(pickle.dumps(report))
    assert str(copied) == text
    with pytest.raises(RuntimeError, match="^verify: the report must be the original, got a copy$"):
        copied.verify(X)
    own.again.scales.mul_(1.5)
    check = report.verify(X)
    assert check.ok  # of the weight that the layer has now
    assert bool(check) and check.to_dict()["ok"] and "right" in str(check)
    report = onepass.quantize(nn.Sequential(nn.ReLU()), "int4")
    assert report.verify(X).ok is None and not report.verify(X)


def test_verify_finds_a_wrong_kernel(monkeypatch):
    own = model()
    report = onepass.quantize(own, "int4")
    forward = QuantizedLinear.forward
    monkeypatch.setattr(QuantizedLinear, "forward", lambda self, x: forward(self, x) * 1.001)
    check = report.verify(X)
    assert not check and "3 of 3 layers differ: blocks.0: error" in str(check)
