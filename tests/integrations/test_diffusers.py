"""Models of diffusers, whose attention goes through `dispatch_attention_fn`."""

import copy
import pickle

import pytest
import torch

import onepass
from tests.swap.reported import operators

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")

HEADS = dict(num_layers=1, attention_head_dim=16, num_attention_heads=2)


def flux():
    model = diffusers.FluxTransformer2DModel(
        **HEADS, patch_size=1, in_channels=4, num_single_layers=1, joint_attention_dim=8,
        pooled_projection_dim=8, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    batch = dict(
        hidden_states=torch.randn(2, 16, 4), encoder_hidden_states=torch.randn(2, 6, 8),
        pooled_projections=torch.randn(2, 8), timestep=torch.tensor([0.3, 0.7]),
        img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(6, 3),
    )  # fmt: skip
    return model, batch


def wan():
    model = diffusers.WanTransformer3DModel(
        **HEADS, patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=8, freq_dim=16,
        ffn_dim=32, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    batch = dict(
        hidden_states=torch.randn(1, 4, 2, 8, 8), timestep=torch.tensor([3]),
        encoder_hidden_states=torch.randn(1, 6, 8),
    )  # fmt: skip
    return model, batch


def qwen_image():
    model = diffusers.QwenImageTransformer2DModel(
        **HEADS, patch_size=2, in_channels=16, out_channels=4, joint_attention_dim=8,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    mask = torch.ones(1, 6, dtype=torch.bool)
    mask[:, 4:] = False
    batch = dict(
        hidden_states=torch.randn(1, 16, 16), encoder_hidden_states=torch.randn(1, 6, 8),
        encoder_hidden_states_mask=mask, timestep=torch.tensor([0.5]), img_shapes=[(1, 4, 4)],
    )  # fmt: skip
    return model, batch


MODELS = {"flux": (flux, 2), "wan": (wan, 2), "qwen_image": (qwen_image, 1)}


def build(name):
    torch.manual_seed(0)
    make, calls = MODELS[name]
    model, batch = make()
    return model.eval(), batch, calls


def attentions(model, batch) -> list[str]:
    with torch.no_grad():
        return operators(lambda: model(**batch), "attention")


@pytest.mark.parametrize("name", MODELS)
def test_attention_runs_on_onepass_and_computes_the_same(name):
    model, batch, calls = build(name)
    stock = copy.deepcopy(model)
    types = [type(module) for module in model.modules()]
    assert not attentions(model, batch)
    report = onepass.swap(model, kinds="attention", strict=True)
    assert {entry["kind"] for entry in report.swapped} == {"attention"}
    assert len(attentions(model, batch)) == calls
    assert any("dispatch_attention_fn" in note for note in report.notes)
    ours, theirs = model(**batch).sample, stock(**batch).sample
    torch.testing.assert_close(ours, theirs)
    gradients = [
        torch.autograd.grad(y.square().sum(), list(m.parameters()), allow_unused=True)
        for m, y in ((model, ours), (stock, theirs))
    ]
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    assert set(onepass.unswap(model)) == {entry["name"] for entry in report.swapped}
    assert [type(module) for module in model.modules()] == types
    assert torch.equal(model(**batch).sample, stock(**batch).sample)


def test_verify_explain_copies_and_options():
    model, batch, calls = build("flux")
    report = onepass.swap(model)
    assert report.verify(batch).ok
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(attentions(twin, batch)) == calls
    onepass.unswap(model)
    onepass.swap(model, exclude="single_transformer_blocks.*")
    assert len(attentions(model, batch)) == calls - 1
    with onepass.swapped(model):
        assert len(attentions(model, batch)) == calls
    assert len(attentions(model, batch)) == calls - 1


def test_backends_that_are_chosen_after_the_swap_run(monkeypatch):
    """By `attention_backend` and by `set_attention_backend`, which takes no name from outside."""
    model, batch, calls = build("flux")
    registry, flex = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName.FLEX
    ran = []

    def another(query, key, value, **_):
        ran.append(query.shape)
        return torch.zeros_like(query)

    monkeypatch.setitem(registry._backends, flex, another)
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)
    onepass.swap(model, kinds="attention")
    with dispatch.attention_backend("flex"):
        assert not attentions(model, batch) and len(ran) == calls
    assert len(attentions(model, batch)) == calls == len(ran)
    model.set_attention_backend("flex")
    assert not attentions(model, batch) and len(ran) == 2 * calls
    onepass.unswap(model)
    reasons = {entry["reason"] for entry in onepass.swap(model, kinds="attention").skipped}
    assert reasons == {
        "its attention backend in diffusers is 'flex', which onepass does not replace"
    }
    with pytest.raises(ValueError, match="must be one of the following"):
        model.set_attention_backend("onepass")
    for processor in model.attn_processors.values():
        processor._attention_backend = None
        processor._parallel_config = object()
    (reason,) = {entry["reason"] for entry in onepass.swap(model, kinds="attention").skipped}
    assert reason.startswith("runs diffusers' context parallelism")


def test_processors_that_call_torchs_attention_themselves():
    """Of models that do not dispatch; a processor that is set after the swap runs as it is."""
    from diffusers.models.attention_processor import AttnProcessor

    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, in_channels=4, out_channels=4,
        sample_size=8, num_embeds_ada_norm=10,
    ).eval()  # fmt: skip
    batch = dict(
        hidden_states=torch.randn(2, 4, 8, 8), timestep=torch.tensor([1, 5]),
        class_labels=torch.tensor([0, 3]),
    )  # fmt: skip
    stock = copy.deepcopy(model)
    report = onepass.swap(model, kinds="attention", strict=True)
    assert len(attentions(model, batch)) == len(report.swapped) == 2
    assert report.verify(batch).ok
    for block in model.transformer_blocks:
        block.attn1.set_processor(AttnProcessor())
    assert not attentions(model, batch)
    for block in stock.transformer_blocks:
        block.attn1.set_processor(AttnProcessor())
    assert torch.equal(model(**batch).sample, stock(**batch).sample)
