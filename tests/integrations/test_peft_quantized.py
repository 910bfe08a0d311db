"""peft's LoRA on models that `onepass.quantize` has quantised: numbers, merging, refusals."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import onepass
from onepass import numerics
from onepass.nn import QuantizedLinear

peft = pytest.importorskip("peft", reason="peft is not installed")
from peft.tuners.lora import Linear as StockLora  # noqa: E402
from peft.tuners.lora import LoraModel  # noqa: E402

from onepass.integrations import peft as ours_of_peft  # noqa: E402
from onepass.integrations._peft_layers import QuantizedLinear as OursLora  # noqa: E402
from onepass.integrations.peft import register, unregister  # noqa: E402
from tests.integrations.transformers_cases import IDS, build  # noqa: E402
from tests.support import fresh  # noqa: E402

WEIGHTS = ("int8", "int4", "nf4", "mxfp4")
ROUNDS = "^peft: merging adapters into quantised layers rounds the sum to their format again"
X = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
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


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    register()  # as it is for the rest of the process, since quantize does


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False), nn.GELU()
    return nn.Sequential(*layers, nn.Linear(64, 16)).to(dtype)


def lora(**options) -> peft.LoraConfig:
    targets = ["0"] if options.get("lora_bias") else ["0", "2"]  # the second has no bias
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options)


def own_quantised(weights: str) -> nn.Module:
    own = model()
    onepass.quantize(own, weights)
    return own


def perturbed(wrapped: nn.Module) -> nn.Module:
    """Adapters start as zero; random ones show whether they are there."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.1)
            elif "magnitude" in name:
                parameter.mul_(1.1)
    return wrapped


def of_codes(wrapped: nn.Module) -> dict[str, QuantizedLinear]:
    return {n: m for n, m in wrapped.named_modules() if isinstance(m, QuantizedLinear)}


def plain(wrapped: nn.Module, config, dtype: torch.dtype, make=model) -> nn.Module:
    """Stock's: the same adapters on plain layers with the weights that the codes stand for."""
    unregister()
    stock = peft.get_peft_model(make(), copy.deepcopy(config)).to(dtype)
    adapters = {n: p for n, p in wrapped.state_dict().items() if "lora_" in n}
    stock.load_state_dict(adapters, strict=False)
    with torch.no_grad():
        for name, layer in of_codes(wrapped).items():
            stock.get_submodule(name).weight.copy_(layer.dequantized(dtype))
    register()
    assert not any(isinstance(layer, OursLora) for layer in stock.modules())
    return stock.train(wrapped.training)


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
    logits = wrapped(IDS).logits
    onepass.dequantize(wrapped)
    assert layer.fan_in_fan_out
    torch.testing.assert_close(wrapped(IDS).logits, logits, rtol=1e-4, atol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-4, atol=1e-4)


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


# ---- what is refused ----------------------------------------------------------------------------

CHANGING = ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "lora_ga")


@pytest.mark.parametrize("init", CHANGING)
def test_first_values_that_change_the_weight_are_refused(init):
    message = (
        "^peft: init_lora_weights must be True, False, 'gaussian', 'orthogonal', 'eva' or 'mica' "
        f"on a quantised layer, whose weight cannot change, got '{init}'$"
    )
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(own_quantised("nf4"), lora(init_lora_weights=init))


def test_loftq_is_refused():
    """Which would quantise by itself; its package may be missing."""
    config = lora()
    config.init_lora_weights = "loftq"
    with pytest.raises(ValueError, match="^peft: init_lora_weights must be .* got 'loftq'$"):
        peft.get_peft_model(own_quantised("nf4"), config)


def test_kasa_is_refused():
    config = lora(kasa_config=peft.tuners.lora.config.KasaConfig())
    message = (
        "^peft: kasa_config must be None on a quantised layer, whose weight cannot change, got "
        "KasaConfig$"
    )
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(own_quantised("nf4"), config)


def test_a_dequantised_layer_takes_all():
    wrapped = peft.get_peft_model(own_quantised("nf4"), lora())
    onepass.dequantize(wrapped)
    wrapped.add_adapter("other", lora(init_lora_weights="olora"))
    assert set(wrapped.base_model.model[0].lora_A) == {"default", "other"}


@pytest.mark.parametrize("make", [peft.LoHaConfig, peft.AdaLoraConfig], ids=["loha", "adalora"])
def test_other_adapters_are_refused_by_peft(make):
    options = {"total_step": 10} if make is peft.AdaLoraConfig else {}
    with pytest.raises((TypeError, ValueError), match="not supported"):
        peft.get_peft_model(own_quantised("nf4"), make(target_modules=["0"], **options))


# ---- the registration ---------------------------------------------------------------------------


def test_registered_once_and_given_back():
    unregister()
    unregister()
    own = model()
    stock = vars(LoraModel)["_create_new_module"], LoraModel._replace_module
    own[0] = QuantizedLinear.from_weight(own[0].weight, own[0].bias, weights="nf4")
    with pytest.raises(ValueError, match="is not supported"):
        peft.get_peft_model(own, lora())
    register()
    ours = vars(LoraModel)["_create_new_module"], LoraModel._replace_module
    register()
    assert (vars(LoraModel)["_create_new_module"], LoraModel._replace_module) == ours
    wrapped = peft.get_peft_model(own, lora())
    assert type(wrapped.base_model.model[2]) is StockLora  # which is plain
    unregister()
    assert (vars(LoraModel)["_create_new_module"], LoraModel._replace_module) == stock
    wrapped(X)  # goes on


def test_a_peft_without_custom_modules(monkeypatch):
    """They are private, and not saved."""
    monkeypatch.delattr(peft.LoraConfig, "_register_custom_module")
    wrapped = peft.get_peft_model(own_quantised("nf4"), lora())
    assert type(wrapped.base_model.model[0]) is OursLora


@pytest.mark.parametrize(
    "where, name",
    [
        ("peft.tuners.lora.LoraModel", "_create_new_module"),
        ("peft.tuners.lora.LoraModel", "_replace_module"),
        ("peft.tuners.tuners_utils", "_maybe_include_all_linear_layers"),
    ],
)
def test_a_peft_without_the_places_is_named(where, name, monkeypatch):
    """And changes nothing; quantize says it in a note."""
    unregister()
    stock = vars(LoraModel).get("_create_new_module")
    monkeypatch.delattr(f"{where}.{name}")
    message = (
        f"onepass.integrations.peft: peft must have {where}.{name}, as 0.21 has, got version "
        f"{peft.__version__}"
    )
    with pytest.raises(RuntimeError) as raised:
        register()
    assert str(raised.value) == message
    assert message in onepass.quantize(model(), "nf4").notes
    monkeypatch.undo()
    assert vars(LoraModel)["_create_new_module"] is stock and not ours_of_peft._stock


def test_quantize_registers_if_peft_is_there():
    code = (
        "import torch, onepass, sys\nmodel = torch.nn.Sequential(torch.nn.Linear(64, 64), "
        "torch.nn.Linear(64, 4))\n{}report = onepass.quantize(model, 'int8')\n"
    )
    fresh.run(code.format("") + "assert 'peft' not in sys.modules", check=True)
    lines = "config = peft.LoraConfig(target_modules=['0'])\npeft.get_peft_model(model, config)"
    fresh.run(code.format("import peft\n") + lines, check=True)


def test_all_linear_names_quantised_layers_as_plain_ones():
    """But for the layer of the logits, quantised or not."""
    for skip_head in (True, False):
        own, stock = build("llama"), build("llama")
        onepass.quantize(own, "nf4", skip_head=skip_head)
        before = of_codes(own)
        models = [
            peft.get_peft_model(of, peft.LoraConfig(r=2, target_modules="all-linear"))
            for of in (own, stock)
        ]
        names = [of.peft_config["default"].target_modules for of in models]
        assert names[0] == names[1] and len(names[0]) == 14
        assert list(of_codes(models[0]).values()) == list(before.values())
        models[0](IDS)


# ---- on disk ------------------------------------------------------------------------------------


def test_adapters_are_saved_and_loaded_beside_stock(tmp_path):
    """The files have stock's keys, and each loads the other's."""
    own, config = build("llama"), peft.LoraConfig(r=2, target_modules="all-linear", use_dora=True)
    onepass.quantize(own, "nf4")
    wrapped = perturbed(peft.get_peft_model(own, config)).eval()
    wrapped.save_pretrained(tmp_path / "ours")
    safetensors = pytest.importorskip("safetensors.torch", reason="peft saves with it")
    stock = peft.PeftModel.from_pretrained(build("llama"), tmp_path / "ours").eval()
    stock.save_pretrained(tmp_path / "stock")
    files = [
        safetensors.load_file(tmp_path / n / "adapter_model.safetensors") for n in ("ours", "stock")
    ]
    assert files[0].keys() == files[1].keys() and len(files[0]) == 14 * 3
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    for low_memory in (False, True):
        again = build("llama")
        onepass.quantize(again, "nf4")
        again = peft.PeftModel.from_pretrained(
            again, tmp_path / "stock", low_cpu_mem_usage=low_memory
        ).eval()
        assert torch.equal(again(IDS).logits, wrapped(IDS).logits)
    onepass.dequantize(again)  # then it is stock's model on the dequantised base, and merges
    assert type(again.merge_and_unload().model.layers[0].mlp.up_proj) is nn.Linear


def test_adapters_by_transformers_own_functions(tmp_path):
    own = build("llama")
    onepass.quantize(own, "int4")
    own.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    assert type(own.model.layers[1].mlp.down_proj) is OursLora
    perturbed(own)
    logits = own(IDS).logits
    own.save_pretrained(tmp_path)
    again = build("llama")
    onepass.quantize(again, "int4")
    again.load_adapter(tmp_path)
    assert torch.equal(again(IDS).logits, logits)


@pytest.mark.parametrize("dora", [True, False])
def test_copies_pickles_and_whole_states(dora):
    wrapped = perturbed(peft.get_peft_model(own_quantised("nf4"), lora(use_dora=dora))).eval()
    output = wrapped(X)
    for copied in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert torch.equal(copied(X), output)
    other = own_quantised("nf4")
    other = peft.get_peft_model(other, lora(use_dora=dora)).eval()
    other.load_state_dict(wrapped.state_dict())
    assert torch.equal(other(X), output)


# ---- beside the rest of onepass and torch -------------------------------------------------------


@pytest.mark.parametrize("dora", [True, False])
@pytest.mark.parametrize("first", ["swap", "adapters"])
def test_swapped_in_either_order(first, dora):
    own = build("llama")
    onepass.quantize(own, "nf4")
    config = peft.LoraConfig(r=2, target_modules="all-linear", use_dora=dora)
    if first == "swap":
        onepass.swap(own)
    wrapped = peft.get_peft_model(own, config)
    report = onepass.swap(wrapped)
    perturbed(wrapped)
    if first == "adapters":
        assert report.verify(IDS).ok
    wrapped(IDS, labels=IDS).loss.backward()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)
    logits = wrapped(IDS).logits
    onepass.unswap(wrapped)
    torch.testing.assert_close(wrapped(IDS).logits, logits, rtol=1e-4, atol=1e-5)
    assert len(of_codes(wrapped)) == 14


def test_attached_and_with_kernels():
    from onepass.integrations.transformers import attach, detach

    own = build("llama")
    onepass.quantize(own, "nf4")
    wrapped = perturbed(
        peft.get_peft_model(own, peft.LoraConfig(r=2, target_modules="all-linear"))
    ).eval()
    logits = wrapped(IDS).logits
    attach(wrapped)
    torch.testing.assert_close(wrapped(IDS).logits, logits, rtol=1e-4, atol=1e-5)
    assert len(of_codes(wrapped)) == 14
    detach(wrapped)


@pytest.mark.parametrize("dora", [True, False])
def test_compiled(dora):
    wrapped = perturbed(peft.get_peft_model(own_quantised("nf4"), lora(use_dora=dora))).eval()
    compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), wrapped(X))
