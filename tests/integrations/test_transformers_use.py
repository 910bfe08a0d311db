"""Models of transformers on onepass's attention in use: generation and training."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import onepass.integrations.transformers as integration
from onepass import numerics
from onepass.integrations.transformers import attention
from tests.integrations.transformers_cases import (
    IDS,
    PADDING,
    build,
    close,
    inputs,
    run,
    transformers,
)
from tests.support.pairs import halved

TOKENS = 6


# ---------------------------------------------------------------- generation


def generate(model, **options):
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), **options}
    return model.generate(
        **batch, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0
    )


@pytest.mark.parametrize(
    ("name", "padding", "cache"),
    halved(
        ["llama", "gpt2", "mistral", "gemma2", "gpt_oss"], ["none", "left"], ["dynamic", "static"]
    ),
)
def test_greedy_tokens_are_stocks(name, padding, cache):
    model, stock = build(name), build(name)
    integration.attach(model)
    options = dict(cache_implementation=cache, disable_compile=True)
    if padding == "left":
        options.update(attention_mask=PADDING["left"].long())
    expected = generate(stock, **options)
    tokens, ops = run(generate, model, **options)
    assert torch.equal(tokens, expected)
    # Steps read the cache once, whatever padding, a static cache and a window mask in it.
    assert ops == ["attention"] * 2 + ["attention_decode"] * 2 * (TOKENS - 1)


def test_a_mask_is_looked_at_once_for_all_layers_and_none_without_padding(monkeypatch):
    model, looks = build("llama"), []
    integration.attach(model)
    interval = attention._interval
    monkeypatch.setattr(attention, "_interval", lambda mask: looks.append(0) or interval(mask))
    assert run(generate, model)[1].count("attention_decode") == 2 * (TOKENS - 1) and not looks
    tokens, ops = run(generate, model, attention_mask=PADDING["left"].long())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert generate(model, attention_mask=PADDING["left"].long()).shape == tokens.shape
    assert len(looks) == TOKENS - 1 and ops.count("attention_decode") == 2 * len(looks)


def test_masks_without_numbers_are_not_looked_at():
    module, mask = nn.Module(), torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :4] = False
    tensors = [torch.randn(2, 4, 1, 8), *torch.randn(2, 2, 4, 9, 8).unbind()]
    expected = attention.attention_forward(module, *tensors, mask)[0]

    def one(*arguments):
        return attention.attention_forward(module, *(x.unsqueeze(0) for x in arguments))[0][0]

    close(torch.vmap(one)(*tensors, mask), expected)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (*tensors, mask)]
        assert attention.attention_forward(module, *fakes)[0].shape == expected.shape


def test_beams_and_drafts_are_stocks():
    model, stock, draft = build("llama"), build("llama"), build("llama", num_hidden_layers=1)
    integration.attach(model)
    options = dict(num_beams=3, attention_mask=PADDING["left"].long())
    assert torch.equal(generate(model, **options), generate(stock, **options))
    options = dict(input_ids=IDS[:1], attention_mask=None, assistant_model=draft)
    expected = generate(stock, **options)
    tokens, ops = run(generate, model, **options)
    assert torch.equal(tokens, expected) and ops
    integration.attach(draft)
    assert torch.equal(generate(model, **options), expected)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_decoders_generate_stocks_tokens(name):
    """Whisper reads its encoder once a step."""
    model, stock = build(name), build(name)
    integration.attach(model)
    if name == "whisper":
        options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False)
        options["input_features"] = inputs("whisper")["input_features"]
        expected = stock.generate(**options)
        tokens, ops = run(model.generate, **options)
    else:
        mask = PADDING["right"].long()
        expected = generate(stock, attention_mask=mask)
        tokens, ops = run(generate, model, attention_mask=mask)
    assert torch.equal(tokens, expected)
    assert ("attention_decode" if name == "whisper" else "attention") in ops


def test_inference_mode_decodes():
    model = build("llama")
    integration.attach(model)
    mask = PADDING["left"].long()
    expected = generate(model, attention_mask=mask)
    with torch.inference_mode():
        assert torch.equal(generate(model, attention_mask=mask), expected)


def masks():
    """(mask of one query, whether the visible rows of each cache are contiguous)."""
    mask = torch.zeros(3, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., 2:] = mask[1, ..., :4] = mask[2, ..., 3:7] = True
    yield mask, True
    yield mask & (torch.arange(3)[:, None, None, None] > 0), True  # one has no key at all
    gap = mask.clone()
    gap[0, ..., 5] = False
    yield gap, False
    yield mask.expand(3, 4, 1, 9), False
    yield mask[:1], False
    yield torch.zeros(3, 1, 1, 9), False


@pytest.mark.parametrize("mask, in_one_piece", list(masks()))
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_masked_steps(mask, in_one_piece, kv_heads):
    module = nn.Module()
    module.num_key_value_groups = 4 // kv_heads
    query = torch.randn(3, 4, 1, 8)
    key, value = torch.randn(2, 3, kv_heads, 9, 8).unbind()
    (y, _), ops = run(attention.attention_forward, module, query, key, value, mask)
    assert ops == ["attention_decode" if in_one_piece else "attention"]
    repeated = [tensor.repeat_interleave(4 // kv_heads, 1) for tensor in (key, value)]
    additive = mask if mask.dtype.is_floating_point else mask.float().log()
    ref, base = (
        ((q @ k.mT * 8**-0.5 + additive).softmax(-1).nan_to_num() @ v).transpose(1, 2)
        for q, k, v in ((query.double(), *map(torch.Tensor.double, repeated)), (query, *repeated))
    )
    numerics.assert_close(y, ref, base)


@pytest.mark.parametrize("whose", ["made here", "another's", "numpy's"])
def test_a_mask_that_changes_in_place_is_looked_at_again(whose):
    module, query = nn.Module(), torch.randn(1, 2, 1, 8)
    key, value = torch.randn(2, 1, 2, 5, 8).unbind()
    mask = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    if whose == "made here":
        setattr(mask, attention._FILLED, (None, None))
    for filled in range(1, 6):
        if whose == "numpy's":  # which does not raise the version
            mask.numpy()[..., filled - 1] = True
        else:
            mask[..., filled - 1] = True
        y, _ = attention.attention_forward(module, query, key, value, mask)
        expected, _ = attention.attention_forward(
            module, query, key[:, :, :filled], value[:, :, :filled], None
        )
        close(y, expected)


# ---------------------------------------------------------------- names that models compare with


def gemma4():
    config = transformers.Gemma4TextConfig(
        vocab_size=32, vocab_size_per_layer_input=32, hidden_size=32, intermediate_size=48,
        hidden_size_per_layer_input=8, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=8, num_kv_shared_layers=2,
        max_position_embeddings=64, sliding_window=64, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma4ForCausalLM(config).eval()


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_gemma4_keeps_its_masks_where_it_drops_queries(kept):
    model, stock = gemma4(), gemma4()
    integration.attach(model)
    close(model(IDS, logits_to_keep=kept).logits, stock(IDS, logits_to_keep=kept).logits)
    for cache in ("dynamic", "static"):
        options = dict(cache_implementation=cache, disable_compile=True)
        assert torch.equal(generate(model, **options), generate(stock, **options))


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    model = build("llama", attention_dropout=0.3).train()
    integration.attach(model)

    def gradients():
        model.zero_grad()
        torch.manual_seed(5)
        _, ops = run(lambda: model(IDS, labels=IDS).loss.backward())
        return [p.grad.clone() for p in model.parameters()], ops.count("attention")

    expected, calls = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    got, with_recomputation = gradients()
    assert (calls, with_recomputation) == (2, 4)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name, layer", [("llama", "LlamaDecoderLayer"), ("gpt2", "GPT2Block")])
def test_checkpoint_wrappers_around_layers_that_fill_a_cache(name, layer):
    """The layer appends to the cache a second time as it is recomputed; "sdpa" crops the keys."""
    gradients = []
    for attached in (False, True):
        model = build(name).eval()  # no dropout
        model.train(name == "llama")
        apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ == layer)
        if attached:
            integration.attach(model)
        output, ops = run(model, IDS, labels=IDS, use_cache=True)
        assert len(ops) == 2 * attached and output.past_key_values is not None
        gradients.append(torch.autograd.grad(output.loss, list(model.parameters())))
    for ours, stock in zip(gradients[1], gradients[0], strict=True):
        close(ours, stock)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["none", "right"])
def test_compile_fullgraph(padding):
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    integration.attach(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (12, 9):
        batch = {k: v[:, :length] for k, v in inputs("llama", padding).items()}
        results = []
        for m in (model, compiled):
            y, ops = run(m, **batch, use_cache=False)
            assert len(ops) == 1
            gradients = torch.autograd.grad(y.logits.square().sum(), list(model.parameters()))
            results.append((y.logits, *gradients))
        for eager, graph in zip(*results, strict=True):
            close(graph, eager)


def test_a_compiled_model_that_is_attached_compiles_again():
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    compiled = torch.compile(model.model.layers[0].self_attn, backend="eager")
    x = torch.randn(2, 5, 32)
    tables = model.model.rotary_emb(x, torch.arange(5)[None])
    with torch.no_grad():
        (expected, _), ops = run(compiled, x, tables, None)
        assert not ops
        integration.attach(model)
        (got, _), ops = run(compiled, x, tables, None)
    assert len(ops) == 1
    close(got, expected)


def test_autocast_gives_the_dtypes_of_stock():
    results = []
    for attached in (True, False):
        model = build("llama")
        if attached:
            integration.attach(model)
        seen = []
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, x: seen.append(x[0].dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(IDS, labels=IDS).loss
            step = model(IDS, attention_mask=PADDING["left"]).logits
        loss.backward()
        results.append((seen, loss.dtype, step.dtype, model.model.embed_tokens.weight.grad.dtype))
    assert results[0] == results[1] and results[0][0] == [torch.bfloat16] * 4
