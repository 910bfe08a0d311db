"""`Int8Cache`: what a layer holds, its growth, and generation by it, swapped and stock."""

import copy

import pytest
import torch

import onepass
import onepass.integrations.transformers as integration
from onepass.integrations.transformers import Int8Cache
from onepass.integrations.transformers.attention import attention_forward
from onepass.integrations.transformers.cache import Int8Layer, Int8Rows
from tests.integrations.transformers_cases import IDS, PADDING, build, close, run, transformers

TOKENS = 80  # beyond the room of a new layer


def generate(model, cache, **options):
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), **options}
    return model.generate(
        **batch, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
        past_key_values=cache,
    )  # fmt: skip


def states(rows: int, dim: int = 12, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, rows, dim).to(dtype), torch.randn(2, 3, rows, 7).to(dtype)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_greedy_tokens_are_those_of_stock_attention(name, padding):
    """By the same cache; a step reads the codes in one call after one that writes them."""
    more = {"n_positions": 128} if name == "gpt2" else {}
    model, stock = build(name, **more), build(name, **more)
    integration.attach(model)
    options = {"attention_mask": PADDING[padding].long()} if padding != "none" else {}
    cache = Int8Cache(model.config)
    expected = generate(stock, Int8Cache(stock.config), **options)
    tokens, ops = run(generate, model, cache, **options)
    assert torch.equal(tokens, expected)
    coded = sum(type(layer) is Int8Layer for layer in cache.layers)
    assert coded > 0 and ops.count("attention_decode_append") == coded * TOKENS
    assert ops.count("attention_decode") == len(cache.layers) * (TOKENS - 1)


@pytest.mark.parametrize("rows", [1, 3, 40], ids=str)
def test_attention_to_codes_is_that_to_their_numbers(rows):
    torch.manual_seed(0)
    layer, module = Int8Layer(), torch.nn.Module()
    layer.update(*states(30))
    keys, values = layer.update(*states(rows))
    query = torch.randn(2, 3, rows, 12)
    found, _ = attention_forward(module, query, keys, values, None, is_causal=False)
    plain = keys.numbers(), values.numbers()
    expected, _ = attention_forward(module, query, *plain, None, is_causal=False)
    torch.testing.assert_close(found, expected)
    stock = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    torch.testing.assert_close(found, stock.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_layer_holds_the_rows_it_was_given(dtype):
    """Within half a scale, and a rounding to the dtype; rows keep their codes as it grows."""
    torch.manual_seed(0)
    layer, given, held = Int8Layer(), [], []
    for count in (5, 1, 58, 1, 1, 200, 1):
        given.append(states(count, dtype=dtype))
        found = layer.update(*given[-1])
        if len(given) == 1:
            assert all(one is other for one, other in zip(found, given[0], strict=True))
        held.append((layer.keys.clone(), layer.values.clone()))
        for kept, before in zip((layer.keys, layer.values), held[-2:][0], strict=True):
            assert torch.equal(kept[:, :, : before.shape[2]], before)
    assert layer.get_seq_length() == 267 and layer.get_mask_sizes(2) == (269, 0)
    for of, rows in enumerate(found):
        assert type(rows) is Int8Rows and rows.dtype is dtype
        right = torch.cat([states[of] for states in given], 2)
        bound = rows.scale[..., None] * 0.501 + right.abs() * torch.finfo(dtype).eps
        assert ((rows + 0 - right).abs() <= bound).all()
    assert layer.keys.dtype is torch.int8 and layer.keys.shape[-1] == 16  # 12 codes, and a scale
    assert layer.values.shape[-1] == 12  # 7 codes, one byte of padding, and a scale


def test_a_row_is_written_in_place_while_there_is_room():
    layer = Int8Layer()
    layer.update(*states(5))
    place = layer.keys.data_ptr()
    for _ in range(59):
        layer.update(*states(1))
        assert layer.keys.data_ptr() == place
    layer.update(*states(1))
    assert layer.keys.data_ptr() != place and layer.get_seq_length() == 65


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.crop(-3),
        lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([1])),
        lambda layer: layer.batch_select_indices(slice(1, 2)),
        lambda layer: None,
    ],
    ids=["crop", "reorder", "repeat", "select", "a view", "nothing"],
)
def test_rows_after_a_change_are_those_of_a_cache_of_numbers(change):
    torch.manual_seed(0)
    layer, plain = Int8Layer(), transformers.cache_utils.DynamicLayer()
    first = states(9)
    layer.update(*first)
    before = layer.keys.clone(), layer.values.clone()
    numbers = [Int8Rows(rows, states) for rows, states in zip(before, first, strict=True)]
    plain.update(*(rows.numbers() for rows in numbers))
    copied = copy.deepcopy(layer)
    change(layer)
    change(plain)
    new = [torch.randn(plain.keys.shape[0], 3, 2, dim) for dim in (12, 7)]
    found = layer.update(*new)
    for rows, right in zip(found, (plain.keys, plain.values), strict=True):
        used = right.shape[2]
        assert torch.equal(rows.numbers()[:, :, :used], right)
        assert rows.shape[2] == used + 2
    assert torch.equal(copied.keys, before[0]) and torch.equal(copied.values, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layers_that_were_copied_do_not_share_rows(dtype):
    torch.manual_seed(0)
    layer = Int8Layer()
    layer.update(*states(9, dtype=dtype))
    for made in (copy.copy(layer), copy.deepcopy(layer)):
        made.update(*states(1, dtype=dtype))
        before = made.keys.clone()
        layer.update(*states(1, dtype=dtype))
        assert torch.equal(made.keys, before)
        layer.crop(-1)


def test_wide_heads():
    layer, first = Int8Layer(), torch.randn(1, 1, 3, 520)
    layer.update(first, first)
    keys, _ = layer.update(first, first)
    bound = keys.scale[..., None] * 0.501
    assert ((keys + 0 - torch.cat([first, first], 2)).abs() <= bound).all()


def test_gradients_that_would_be_lost_are_refused():
    model = build("llama").train()
    cache = Int8Cache(model.config)
    model(IDS, past_key_values=cache).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.any()
    message = "Int8Cache: key_states must not require gradients after the first rows"
    with pytest.raises(RuntimeError, match=message):
        model(IDS[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == IDS.shape[1]
    with torch.no_grad():
        model(IDS[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == IDS.shape[1] + 1


def test_another_batch_is_refused():
    layer = Int8Layer()
    one, two = torch.randn(1, 2, 3, 8), torch.randn(2, 2, 3, 8)
    layer.update(one, one)
    message = r"must have the batch and heads of the rows before, \(1, 2\), got \(2, 2\)"
    with pytest.raises(RuntimeError, match=message):
        layer.update(two, two)
    assert layer.get_seq_length() == 3


def test_a_call_that_fails_changes_nothing():
    layer = Int8Layer()
    keys, values = states(3)
    for used in (0, 3):
        with pytest.raises(RuntimeError, match="value must have dtype float32 like query"):
            layer.update(keys, values.bfloat16())
        assert layer.get_seq_length() == used and layer.is_initialized == (used > 0)
        layer.update(keys, values)


def test_a_compiled_forward():
    model, stock = build("llama"), build("llama")
    integration.attach(model)
    compiled = torch.compile(model.forward, backend="aot_eager")
    caches = [Int8Cache(of.config) for of in (model, stock)]
    with torch.no_grad():
        for first, last in ((0, 6), (6, 7), (7, 8), (8, 11)):
            ids = IDS[:, first:last]
            found, expected = (
                of(input_ids=ids, past_key_values=cache).logits
                for of, cache in zip((compiled, stock), caches, strict=True)
            )
            close(found, expected)


def test_reset():
    layer = Int8Layer()
    layer.update(*states(9))
    layer.reset()
    assert layer.get_seq_length() == 0
    given = states(4)
    assert layer.update(*given)[0] is given[0] and layer.get_seq_length() == 4


def test_beams_and_prompts_that_are_continued():
    model = build("llama")
    onepass.swap(model)
    cache = Int8Cache(model.config)
    first = generate(model, cache, num_beams=3)
    assert first.shape == (len(IDS), IDS.shape[1] + TOKENS)
    stock = build("llama")
    assert torch.equal(generate(stock, Int8Cache(stock.config), num_beams=3), first)


def test_sliding_layers_stay_those_of_stock():
    config = build("gemma2").config
    cache = Int8Cache(config)
    stock = transformers.DynamicCache(config=config)
    plain = transformers.cache_utils.DynamicLayer
    expected = [Int8Layer if type(of) is plain else type(of) for of in stock.layers]
    assert [type(layer) for layer in cache.layers] == expected and len(set(expected)) == 2


def test_bytes_are_a_quarter_of_float32s_and_scales():
    layer = Int8Layer()
    layer.update(torch.randn(1, 2, 64, 128), torch.randn(1, 2, 64, 128))
    assert layer.keys.untyped_storage().nbytes() == 2 * 64 * (128 + 4)
