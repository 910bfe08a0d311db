"""peft's LoRA on models that `onepass.quantize` has quantised: numbers and merging."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import onepass
from onepass import numerics
from onepass.nn import QuantizedLinear
from tests.integrations.peft_cases import (  # noqa: F401 (one is a fixture)
    ROUNDS,
    OursLora,
    X,
    assert_as_dequantised,
    lora,
    model,
    own_quantised,
    peft,
    perturbed,
    plain,
    registered,
    unregister,
)
from tests.integrations.transformers_cases import IDS, build

StockLora, LoraModel = peft.tuners.lora.Linear, peft.tuners.lora.LoraModel

WEIGHTS = ("int8", "int4", "nf4", "mxfp4")
# Both merging and DoRA's norms read the weight, and so do these.
CONFIGS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "velora": {"velora_config": peft.tuners.lora.config.VeloraConfig()},
}
configs = pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
formats = pytest.mark.parametrize("weights", WEIGHTS)


def results(wrapped: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and the gradients of what is trained and of the input."""
    x = x.detach().clone().requires_grad_()
    wrapped.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    output = wrapped(x)
    (
        output * torch.linspace(-1, 1, output.numel()).to(output.dtype).view_as(output)
    ).sum().backward()
    found = {n: p.grad for n, p in wrapped.named_parameters() if p.requires_grad}
    assert len(found) >= 2 and all(grad is not None for grad in found.values())
    return {"output": output, "input": x.grad, **found}


def check(wrapped: nn.Module, config, dtype: torch.dtype = torch.float32) -> None:
    x = X.to(dtype)
    ours = results(wrapped, x)
    ref = results(plain(wrapped, config, torch.float64), x.double())
    base = results(plain(wrapped, config, dtype), x)
    assert ours.keys() == ref.keys() == base.keys()
    for name, of in ours.items():
        numerics.assert_close(of, ref[name], base[name], name)


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@configs
def test_outputs_and_gradients_are_those_of_the_dequantised_model(options, dropout):
    own = model()
    onepass.quantize(own, "nf4")
    config = lora(**options, lora_dropout=dropout)
    wrapped = perturbed(peft.get_peft_model(own, config))
    layer = wrapped.base_model.model[0]
    assert type(layer) is OursLora and repr(layer).startswith("lora.QuantizedLinear(")
    assert type(layer.base_layer) is QuantizedLinear and layer.base_layer.weights == "nf4"
    check(wrapped, config)


@formats
def test_formats(weights):
    for options in ({}, {"use_dora": True}):
        own = model()
        onepass.quantize(own, weights)
        wrapped = perturbed(peft.get_peft_model(own, lora(**options)))
        check(wrapped, lora(**options))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("dora", [True, False])
def test_adapters_of_16_bits(dora, kept):
    """They have the dtype that the layer had, or peft's float32."""
    own = model(dtype=torch.bfloat16)
    onepass.quantize(own, "int4")
    config = lora(use_dora=dora)
    wrapped = peft.get_peft_model(own, config, autocast_adapter_dtype=not kept)
    of_adapters = {p.dtype for n, p in wrapped.named_parameters() if "lora_" in n}
    assert of_adapters == {torch.bfloat16 if kept else torch.float32}
    perturbed(wrapped)
    if kept:
        check(wrapped, config, torch.bfloat16)
    else:
        assert wrapped(X.bfloat16()).dtype is torch.bfloat16


def test_autocast():
    own = model()
    onepass.quantize(own, "int8")
    wrapped = perturbed(peft.get_peft_model(own, lora()))
    ref, base = (plain(wrapped, lora(), dtype) for dtype in (torch.float64, torch.float32))
    draws = [[], [], []]
    for seed in range(4):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        draws[1].append(ref(x.double()))
        with torch.autocast("cpu", torch.bfloat16):
            draws[0].append(wrapped(x))
            draws[2].append(base(x))
    assert draws[0][0].dtype is torch.bfloat16
    numerics.assert_close(*draws)


@pytest.mark.parametrize("weights, dora", [("nf4", False), ("int8", False), ("nf4", True)])
def test_quantised_after_it_was_wrapped(weights, dora):
    """The order that needs no registration; DoRA reads the weight then too."""
    config = lora(use_dora=dora)
    unregister()
    wrapped = peft.get_peft_model(model(), config)
    assert type(wrapped.base_model.model[0]) is StockLora
    report = onepass.quantize(wrapped, weights, skip_head=False)
    assert [e["name"].rpartition(".model.")[2] for e in report.quantized] == [
        "0.base_layer", "2.base_layer", "4",
    ]  # fmt: skip
    assert type(wrapped.base_model.model[0]) is OursLora
    check(perturbed(wrapped), config)


@configs
def test_a_model_that_was_dequantised_is_pefts(options):
    own = model()
    onepass.quantize(own, "nf4")
    config = lora(**options)
    wrapped = perturbed(peft.get_peft_model(own, config)).eval()
    stock = plain(wrapped, config, torch.float32)
    exact = plain(wrapped, config, torch.float64)(X.double())
    onepass.dequantize(wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(wrapped(X), stock(X))
        merged = wrapped.merge_and_unload()
    assert type(merged[0]) is nn.Linear
    numerics.assert_close(merged(X), exact, stock.merge_and_unload()(X))


def test_several_adapters_and_mixed_batches():
    own = model()
    onepass.quantize(own, "nf4")
    unwrapped = copy.deepcopy(own)
    wrapped = peft.get_peft_model(own, lora())
    wrapped.add_adapter("other", lora(use_rslora=True, init_lora_weights=False))
    perturbed(wrapped).eval()
    names = ["default", "other", "__base__", "other", "default"] * 4
    mixed = wrapped(X, adapter_names=names)
    for name in ("default", "other"):
        wrapped.set_adapter(name)
        rows = torch.tensor([other == name for other in names])
        torch.testing.assert_close(mixed[rows], wrapped(X)[rows])
    rows = torch.tensor([name == "__base__" for name in names])
    torch.testing.assert_close(mixed[rows], unwrapped(X)[rows])
    with wrapped.disable_adapter():
        assert torch.equal(wrapped(X), unwrapped(X))
    wrapped.delete_adapter("other")
    assert set(wrapped.base_model.model[0].lora_A) == {"default"}
    assert torch.equal(wrapped.unload()(X), unwrapped(X))


def test_modules_to_save_stay_plain_and_train():
    own = model()
    onepass.quantize(own, "nf4")
    config = lora(modules_to_save=["4"])
    wrapped = perturbed(peft.get_peft_model(own, config))
    assert type(wrapped.base_model.model[4].modules_to_save["default"]) is nn.Linear
    check(wrapped, config)


def test_codes_of_other_orders_and_outliers():
    """Their merged weight has them too."""
    own = model()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    columns = {"input_order": order, "outlier_columns": torch.tensor([3, 40])}
    own[0] = QuantizedLinear.from_weight(
        own[0].weight, own[0].bias, weights="int4", group_size=32, **columns
    )
    wrapped = perturbed(peft.get_peft_model(own, lora()))
    own[2] = wrapped.base_model.model[2]
    check(wrapped, lora())
    with pytest.warns(UserWarning, match=ROUNDS):
        wrapped.merge_adapter()
    made = wrapped.base_model.model[0].base_layer
    assert torch.equal(made.input_order, order.int()) and made.group_size == 32
    assert made.outlier_columns.tolist() == [3, 40] and made.outliers.dtype is torch.float16


def test_conv1d_of_transformers():
    """Codes do not lie transposed, whatever the config says; the dequantised weight does again."""
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_dora=True
    )
    own = build("gpt2")
    onepass.quantize(own, "int8")
    wrapped = perturbed(peft.get_peft_model(own, config)).eval()
    layer = wrapped.base_model.model.transformer.h[0].attn.c_attn
    assert type(layer) is OursLora and not layer.fan_in_fan_out
    assert_as_dequantised(wrapped(IDS).logits, wrapped)
    onepass.dequantize(wrapped)
    assert layer.fan_in_fan_out
    plain = copy.deepcopy(wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        merged = wrapped.merge_and_unload()
    assert_as_dequantised(merged(IDS).logits, plain)


# ---- merging ------------------------------------------------------------------------------------


@formats
@configs
def test_a_merged_weight_is_the_sum_in_the_same_format(weights, options):
    config = lora(**options)
    wrapped = perturbed(peft.get_peft_model(own_quantised(weights), config)).eval()
    stock = plain(wrapped, config, torch.float32)
    before, output = wrapped.state_dict(), wrapped(X)
    with pytest.warns(UserWarning, match=ROUNDS):
        wrapped.merge_adapter()
    stock.merge_adapter()
    for name in config.target_modules:
        made = wrapped.base_model.model[int(name)].base_layer
        like = stock.base_model.model[int(name)].base_layer
        expected = QuantizedLinear.from_weight(like.weight, weights=weights)
        assert made.weights == weights and not made.training
        assert torch.equal(made.codes, expected.codes)
        assert torch.equal(made.scales, expected.scales)
        assert like.bias is None or torch.equal(made.bias, like.bias)
    assert before.keys() == wrapped.state_dict().keys()
    assert not torch.equal(wrapped(X), output)
    wrapped.unmerge_adapter()
    after = wrapped.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert torch.equal(wrapped(X), output)
    with pytest.warns(UserWarning, match=ROUNDS):
        merged = wrapped.merge_and_unload()
    assert type(merged[0]) is QuantizedLinear and merged[0].weights == weights


@pytest.mark.parametrize("dora", [True, False])
def test_adapters_merged_one_by_one_are_rounded_once(dora):
    outputs = []
    for names in (["default", "other"],), (["default"], ["other"]):
        wrapped = peft.get_peft_model(own_quantised("nf4"), lora(use_dora=dora))
        wrapped.add_adapter("other", lora(use_dora=dora))
        perturbed(wrapped).eval()
        before = wrapped.base_model.model[0].base_layer
        for some in names:
            with pytest.warns(UserWarning, match=ROUNDS):
                wrapped.merge_adapter(some)
        assert wrapped.base_model.model[0].merged_adapters == ["default", "other"]
        outputs.append(wrapped(X))
        wrapped.unmerge_adapter()
        assert wrapped.base_model.model[0].base_layer is before
    assert torch.equal(*outputs)


def test_an_adapter_that_is_broken_changes_nothing():
    wrapped = perturbed(peft.get_peft_model(own_quantised("int4"), lora())).eval()
    layer = wrapped.base_model.model[0]
    with torch.no_grad():
        layer.lora_A["default"].weight[0, 0] = float("nan")
    for safe, message in ((True, "NaNs detected"), (False, "weight must be finite, got NaN")):
        before = layer.base_layer
        with pytest.raises(ValueError, match=message), pytest.warns(UserWarning, match=ROUNDS):
            layer.merge(safe_merge=safe)
        assert not layer.merged and layer.base_layer is before and not layer._unmerged


def test_merged_layers_are_moved_copied_and_dequantised():
    wrapped = perturbed(peft.get_peft_model(own_quantised("nf4"), lora())).eval()
    output = wrapped(X)
    with pytest.warns(UserWarning, match=ROUNDS):
        wrapped.merge_adapter()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(wrapped)))
    copied.unmerge_adapter()
    assert torch.equal(copied(X), output)
    wrapped.to(torch.bfloat16).unmerge_adapter()
    assert {p.dtype for p in wrapped.parameters()} == {torch.bfloat16}
    assert wrapped(X.bfloat16()).dtype is torch.bfloat16
    with pytest.warns(UserWarning, match=ROUNDS):
        wrapped.merge_adapter()
    onepass.dequantize(wrapped)
    wrapped.unmerge_adapter()
    assert type(wrapped.base_model.model[0].base_layer) is nn.Linear
    with pytest.warns(UserWarning, match="Already unmerged"):
        wrapped.base_model.model[0].unmerge()


def test_merged_by_peft_and_quantised_afterwards():
    """Nothing was kept to go back to: the adapter is subtracted, and the rest is rounded."""
    wrapped = perturbed(peft.get_peft_model(model(), lora())).eval()
    output = wrapped(X)
    wrapped.merge_adapter()
    report = onepass.quantize(wrapped, "int8")
    wrapped.unmerge_adapter()
    assert not wrapped.base_model.model[0].merged
    most = 4 * sum(entry["error"] for entry in report.quantized)
    assert (wrapped(X) - output).norm() < most * output.norm()
    with pytest.warns(UserWarning, match=ROUNDS):
        wrapped.merge_adapter()


def test_beneath_another_tuner_layer():
    wrapped = perturbed(peft.get_peft_model(own_quantised("nf4"), lora())).eval()
    inner = wrapped.base_model.model[0]
    named = dict(r=2, lora_alpha=2, device_map=None, parameter_name=None)
    outer = LoraModel._create_new_module(lora(init_lora_weights=False), "outer", inner, **named)
    assert type(outer) is OursLora and outer.base_layer is inner
    outer.eval()
    base = inner.base_layer
    output = outer(X)
    with pytest.warns(UserWarning, match=ROUNDS):
        outer.merge()
    assert outer.base_layer is inner and inner.base_layer is not base
    assert (outer(X) - output).norm() < 0.5 * output.norm()
    outer.unmerge()
    assert inner.base_layer is base and torch.equal(outer(X), output)
