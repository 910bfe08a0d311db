"""peft on quantised models: what is refused, the registration, files, and the rest of onepass."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

import onepass
from onepass.integrations import peft as ours_of_peft
from onepass.nn import QuantizedLinear
from tests.integrations.peft_cases import (  # noqa: F401 (one is a fixture)
    OursLora,
    X,
    assert_as_dequantised,
    lora,
    model,
    of_codes,
    own_quantised,
    peft,
    perturbed,
    plain,
    register,
    registered,
    unregister,
)
from tests.integrations.transformers_cases import IDS, build
from tests.support import fresh

StockLora, LoraModel = peft.tuners.lora.Linear, peft.tuners.lora.LoraModel

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


def test_first_values_by_eva():
    """They come from the inputs of the layers, and leave the weights alone."""
    config = lora(init_lora_weights="eva", eva_config=peft.EvaConfig())
    wrapped, unwrapped = peft.get_peft_model(own_quantised("nf4"), config), own_quantised("nf4")
    peft.initialize_lora_eva_weights(
        wrapped,
        [X] * 4,
        forward_fn=lambda model, inputs: model(inputs),
        prepare_model_inputs_fn=None,
        prepare_layer_inputs_fn=lambda inputs, model, name: inputs[0],
    )
    rows = wrapped.base_model.model[0].lora_A["default"].weight
    torch.testing.assert_close(rows @ rows.T, torch.eye(4))
    assert torch.equal(wrapped(X), unwrapped(X))


METHODS = {
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["0"], total_step=10),
    "ia3": lambda: peft.IA3Config(target_modules=["0"], feedforward_modules=[]),
    "loha": lambda: peft.LoHaConfig(target_modules=["0"]),
    "oft": lambda: peft.OFTConfig(target_modules=["0"]),
    "vera": lambda: peft.VeraConfig(target_modules=["0"]),
}


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_other_methods_are_refused_by_peft(make):
    with pytest.raises((TypeError, ValueError), match="not supported|No layers types compatible"):
        peft.get_peft_model(own_quantised("nf4"), make())


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


def test_a_peft_whose_layers_are_others_is_named(monkeypatch):
    unregister()
    monkeypatch.setattr(peft.tuners.lora.layer.LoraLayer, "update_layer", lambda self, name, r: 0)
    message = "peft must have a config among the arguments of LoraLayer.update_layer, as 0.21 has"
    with pytest.raises(RuntimeError, match=message):
        register()
    monkeypatch.undo()
    monkeypatch.delattr(peft.tuners.lora.dora, "DoraLinearLayer")
    monkeypatch.delitem(sys.modules, "onepass.integrations._peft_layers")
    with pytest.raises(RuntimeError, match="peft must have what its layers are made of, as"):
        register()
    monkeypatch.undo()


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
    assert_as_dequantised(logits, wrapped)
    assert len(of_codes(wrapped)) == 14


def test_attached_and_with_kernels():
    from onepass.integrations.transformers import attach, detach

    own = build("llama")
    onepass.quantize(own, "nf4")
    wrapped = perturbed(
        peft.get_peft_model(own, peft.LoraConfig(r=2, target_modules="all-linear"))
    ).eval()
    stock = copy.deepcopy(wrapped)
    attach(wrapped)
    assert_as_dequantised(wrapped(IDS).logits, stock)
    assert len(of_codes(wrapped)) == 14
    detach(wrapped)


@pytest.mark.parametrize("dora", [True, False])
def test_compiled(dora):
    wrapped = perturbed(peft.get_peft_model(own_quantised("nf4"), lora(use_dora=dora))).eval()
    compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), wrapped(X))
