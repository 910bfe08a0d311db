"""onepass's attention in models of transformers: values, gradients, training, generation."""

import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import onepass.integrations.transformers as integration
from onepass import numerics
from onepass.integrations.transformers import attention, models
from onepass.reference.attention import attention as reference
from tests.integrations import transformers_cases as cases
from tests.integrations.transformers_cases import (
    IDS,
    SEQ,
    build,
    close,
    doubled,
    inputs,
    output,
    run,
    transformers,
)


def formula(module, query, key, value, mask, scaling, softcap=None, s_aux=None, indices=None, **_):
    """In float64, whose eager functions compute the softmax in float32."""
    kept = None
    if indices is not None:
        kept = torch.zeros(len(query), query.shape[2], key.shape[2], dtype=torch.bool)
        kept = kept.scatter(-1, indices.long(), True)[:, None]
    output, _ = reference(
        query, key, value, bias=mask, mask=kept, scale=scaling, softcap=softcap or 0.0, sinks=s_aux
    )
    return output.transpose(1, 2), None


def exact(name: str):
    """The model in float64 with stock attention; the formula's where stock's is eager."""
    model = build(name).double()
    if name in cases.EAGER:
        eager_mask = transformers.masking_utils.eager_mask
        transformers.AttentionInterface.register("formula", formula)
        transformers.AttentionMaskInterface.register("formula", eager_mask)
        model.set_attn_implementation("formula")
    return model


# ---------------------------------------------------------------- values and gradients

# A mask is another for causal, windowed and bidirectional attention, for selected keys, beside a
# bias and in encoders with decoders, not for each model: make test-slow has all of both sides.
PADDED = {
    "llama": "right", "mistral": "left", "deepseek_v32": "right", "bert": "left", "t5": "right",
    "bart": "right", "clip": "left", "gemma2": "right", "gpt_oss": "left", "t5gemma": "right",
    "deepseek_v4": "left", "openai_privacy_filter": "right",
}  # fmt: skip
CASES = [(name, "none") for name in cases.MODELS]
CASES += [
    pytest.param(name, side, marks=[pytest.mark.slow] * (PADDED.get(name) != side))
    for name in cases.MODELS
    for side in ("right", "left")
    if name not in ("vit", "whisper")
]


@pytest.mark.parametrize("name, padding", CASES)
def test_values_and_gradients(name, padding):
    batch = inputs(name, padding)
    model = build(name)
    report = integration.attach(model)
    ours, ops = run(output, name, model, batch)
    assert ops == ["attention"] * len(report.attached) and ops
    others = build(name), exact(name)
    stock, ref = others
    base, truth = output(name, stock, batch), output(name, ref, doubled(batch))
    assert ours.shape == base.shape
    numerics.assert_close(ours, truth, base)

    cases.assert_gradients_close([(model, ours), (ref, truth), (stock, base)])


def test_every_model_known_to_compute_the_same_is_tested():
    types = {build(name).config.model_type for name in cases.EAGER}
    assert types | {"t5_gemma_module"} == set(models._PROVEN)
    for name in cases.EAGER:
        assert build(name).config._attn_implementation == "eager"


def test_softcap_sinks_and_windows_make_a_difference():
    """Otherwise the comparisons above could not fail."""
    changes = {
        "gemma2": dict(attn_logit_softcapping=None),
        "mistral": dict(sliding_window=None),
        "deepseek_v32": dict(index_topk=SEQ),
        "deepseek_v4": dict(compress_rates=dict.fromkeys(cases._COMPRESSED, SEQ)),
    }
    for name, change in changes.items():
        batch = inputs(name)
        y, other = (output(name, build(name, **more), batch) for more in ({}, change))
        assert (y - other).abs().max() > 1e-3
    model = build("gpt_oss")
    y = output("gpt_oss", model, inputs("gpt_oss"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
    assert (output("gpt_oss", model, inputs("gpt_oss")) - y).abs().max() > 1e-3


def test_bfloat16():
    batch = inputs("llama", "right")
    model, stock, ref = (build("llama").bfloat16() for _ in range(3))
    integration.attach(model)
    ours, base, truth = (output("llama", m, batch) for m in (model, stock, ref.double()))
    numerics.assert_close(ours, truth, base)


# ---------------------------------------------------------------- the function beside "sdpa"


class Caller(nn.Module):
    def __init__(self, groups=1, is_causal=True):
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, is_causal


def qkv(batch=2, heads=4, kv_heads=4, seq_q=5, seq_k=5, dim=8, value_dim=8, dtype=torch.float32):
    sizes = (heads, seq_q, dim), (kv_heads, seq_k, dim), (kv_heads, seq_k, value_dim)
    return [torch.randn(batch, *size, dtype=dtype) for size in sizes]


def both(module, tensors, mask=None, *, leaves=(), **named):
    """Ours against transformers' "sdpa" by the rule, with gradients if there are leaves."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    def double(value):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().double().requires_grad_(value.requires_grad) if is_float else value

    results = []
    for function, convert in ((attention.attention_forward, None), (sdpa, double), (sdpa, None)):
        q, k, v = tensors if convert is None else map(convert, tensors)
        options = named if convert is None else {n: convert(o) for n, o in named.items()}
        y, weights = function(
            module, q, k, v, mask if convert is None else convert(mask), **options
        )
        assert weights is None and y.is_contiguous()
        wanted = [x for x in (q, k, v, *options.values()) if getattr(x, "requires_grad", False)]
        random = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
        results.append([y, *(torch.autograd.grad((y * random).sum(), wanted) if wanted else ())])
    for ours, ref, base in zip(*results, strict=True):
        numerics.assert_close(ours, ref, base)


def band(seq_q, seq_k):
    mask = torch.ones(2, 1, seq_q, seq_k, dtype=torch.bool).tril(seq_k - seq_q)
    mask[1, ..., 0] = False
    mask[1, :, 0] = True
    return mask


CALLS = {
    "causal": (Caller(), {}, None, {}),
    "said not to be": (Caller(), {}, None, {"is_causal": False}),
    "not causal": (Caller(is_causal=False), {}, None, {}),
    "said to be": (Caller(is_causal=False), {}, None, {"is_causal": True}),
    "says nothing": (nn.Module(), {}, None, {}),
    "mask beats causal": (Caller(), {}, band(5, 5), {}),
    "float mask": (Caller(), {}, torch.randn(2, 4, 5, 5), {}),
    "one query": (Caller(), dict(seq_q=1), None, {}),
    "one query, said to be causal": (Caller(), dict(seq_q=1), None, {"is_causal": True}),
    "an empty static cache": (Caller(), dict(seq_k=9), None, {}),
    "more queries than keys": (Caller(is_causal=False), dict(seq_q=7, seq_k=3), None, {}),
    "grouped": (Caller(2), dict(kv_heads=2), None, {}),
    "grouped, a mask": (Caller(2), dict(kv_heads=2), band(5, 5), {}),
    "grouped, one query": (Caller(4), dict(kv_heads=1, seq_q=1), None, {}),
    "grouped, one query, a mask": (Caller(2), dict(kv_heads=2, seq_q=1), band(1, 5), {}),
    "one head of keys": (Caller(), dict(kv_heads=1), None, {}),
    "value dims": (Caller(), dict(value_dim=12), None, {}),
    "value dims, one query": (Caller(2), dict(kv_heads=2, seq_q=1, value_dim=4), None, {}),
    "scaling": (Caller(), {}, None, {"scaling": 1}),
    "few queries of all keys": (Caller(is_causal=False), dict(seq_q=3, seq_k=9), None, {}),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("case", CALLS)
def test_as_sdpa(case, recorded):
    module, shapes, mask, options = CALLS[case]
    both(module, [tensor.requires_grad_(recorded) for tensor in qkv(**shapes)], mask, **options)


@pytest.mark.parametrize("seq_q, seq_k", [(5, 5), (5, 9), (1, 5)])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("groups, is_causal", [(1, True), (1, False), (2, False)])
def test_position_bias(mask, seq_q, seq_k, groups, is_causal):
    mask = {"none": None, "bool": band(seq_q, seq_k), "float": torch.randn(2, 1, seq_q, seq_k)}[
        mask
    ]
    tensors = qkv(kv_heads=4 // groups, seq_q=seq_q, seq_k=seq_k)
    bias = torch.randn(1, 4, seq_q, seq_k, requires_grad=True)
    both(Caller(groups, is_causal), [t.requires_grad_() for t in tensors], mask, position_bias=bias)


def test_a_batch_that_broadcasts():
    query, key, value = qkv()
    both(Caller(is_causal=False), [query[:1], key, value])
    both(Caller(is_causal=False), [query[:1, :, :1], key, value])


def test_dropout_applies_and_follows_manual_seed():
    tensors, results = qkv(seq_q=64, seq_k=64), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        y, _ = attention.attention_forward(Caller(), *tensors, None, dropout=0.5)
        results.append(y)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    plain, _ = attention.attention_forward(Caller(), *tensors, None)
    assert not torch.equal(results[0], plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinks_of_another_dtype(dtype):
    tensors = qkv(kv_heads=2, dtype=torch.bfloat16)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=dtype)
    y, _ = attention.attention_forward(Caller(2), *tensors, None, scaling=0.5, s_aux=sinks)
    doubles = [tensor.double() for tensor in tensors]
    causal = torch.ones(5, 5).tril().log()
    ref, _ = formula(None, *doubles, causal.double(), 0.5, s_aux=sinks.double())
    base, _ = formula(None, *tensors, causal.bfloat16(), 0.5, s_aux=sinks.bfloat16())
    numerics.assert_close(y, ref, base)


def test_packed_sequences_without_a_mask():
    """Inputs of a flattening collator, made for flash attention: "sdpa" would mix the sequences."""
    tensors = [tensor.requires_grad_() for tensor in qkv(1, kv_heads=2, seq_q=9, seq_k=9)]
    lengths = torch.tensor([0, 4, 9])
    mask = torch.zeros(9, 9, dtype=torch.bool)
    mask[:4, :4] = mask[4:, 4:] = True
    named = dict(cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=5, max_length_k=5)
    for is_causal in (True, False):
        y, _ = attention.attention_forward(Caller(2, is_causal), *tensors, None, **named)
        whole = mask.tril() if is_causal else mask
        expected, _ = attention.attention_forward(Caller(2), *tensors, whole[None, None])
        assert y.is_contiguous()
        torch.testing.assert_close(y, expected)
        y, _ = attention.attention_forward(Caller(2), *tensors, whole[None, None], **named)
        assert torch.equal(y, expected)  # the mask has the effect
    few = [tensor.detach()[:, :, :6] for tensor in tensors]
    named = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 4, 6]))
    y, _ = attention.attention_forward(Caller(2, False), *few, None, **named)
    expected, _ = attention.attention_forward(Caller(2), *few, mask[None, None, :6, :6])
    torch.testing.assert_close(y, expected)


def test_packed_sequences_that_are_none():
    named = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 2, 5]))
    rule = "cu_seq_lens_q must come with cu_seq_lens_k and a batch of one, without position_bias, "
    with pytest.raises(ValueError, match=f"{rule}got a batch of 2"):
        attention.attention_forward(Caller(), *qkv(), None, **named)
    named["cu_seq_lens_k"] = None
    with pytest.raises(ValueError, match=f"{rule}.* no cu_seq_lens_k, a position_bias"):
        bias = torch.zeros(1, 4, 5, 5)
        attention.attention_forward(Caller(), *qkv(1), None, position_bias=bias, **named)


def test_a_mask_for_other_keys_is_refused():
    for seq_q in (1, 5):
        with pytest.raises(RuntimeError, match="mask"):
            attention.attention_forward(
                Caller(), *qkv(seq_q=seq_q), torch.ones(2, 1, seq_q, 4, dtype=torch.bool)
            )


def test_export():
    model = build("llama")
    integration.attach(model)
    with torch.no_grad():
        exported = torch.export.export(model, (IDS,), {"use_cache": False})
        targets = [str(node.target) for node in exported.graph.nodes]
        assert targets.count("onepass.attention.default") == 2
        close(exported.module()(IDS, use_cache=False).logits, model(IDS).logits)


@pytest.mark.parametrize("mask", [None, band(5, 5), torch.zeros(2, 1, 5, 5)])
def test_selected_keys(mask):
    tensors = qkv()
    indices = torch.tensor([[0, 1], [0, 1], [2, 1], [0, 3], [4, 1]]).expand(2, 5, 2)
    y, _ = attention.attention_forward(Caller(), *tensors, mask, indices=indices)
    kept = torch.zeros(2, 1, 5, 5, dtype=torch.bool).scatter(-1, indices[:, None], True)
    if mask is None:
        kept = kept.tril()
    elif mask.dtype is torch.bool:
        kept = kept & mask
    expected, _ = attention.attention_forward(Caller(), *tensors, kept)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("name", ["cache", "block_indices", "sinks"])
def test_what_only_others_compute_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be None, as .*, got int"):
        attention.attention_forward(Caller(), *qkv(), None, **{name: 1})


def test_attention_weights_are_none_and_a_warning_says_so(caplog):
    model = build("bert")
    integration.attach(model)
    attention.logger.warning_once.cache_clear()
    result = model(**inputs("bert"), output_attentions=True)
    assert set(result.attentions or [None]) == {None}
    assert "output_attentions=True gives None" in caplog.text


# Keywords that transformers' models pass to the function and that its parameters do not have: the
# mask has their effect, others give it, or a warning says that there is none.
WITHOUT_A_PARAMETER = {
    "sliding_window", "position_ids", "max_length_q", "max_length_k", "output_attentions"
}  # fmt: skip
# Where models compare the name with other names than ours: their default must fit.
NAME_BRANCHES = {
    'if self.config._attn_implementation in ("eager", "sdpa"):': "else passes indices: used",
    'if self.config._attn_implementation == "sdpa":': "else a float mask (glm5_next)",
    'self.config._attn_implementation == "sdpa"  # trf-ignore: TRF051': "attention_mask()",
    'elif self.config._attn_implementation == "flex_attention":  # trf-ignore: TRF051': "as sdpa",
    'if self.config._attn_implementation == "sdpa" and not output_attentions:': "falcon: refused",
    'using_eager = self.config._attn_implementation == "eager"': "as sdpa",
    'if self.config._attn_implementation == "eager":': "a warning",
    'elif config._attn_implementation == "eager":': "as sdpa",
}


@functools.cache
def sources() -> dict[str, str]:
    """By model."""
    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    return {str(file.relative_to(file.parents[1])): file.read_text() for file in sorted(files)}


def test_every_keyword_of_transformers_models_is_known():
    call = re.compile(r"\battention_interface\((.*?)^ *\)", re.DOTALL | re.MULTILINE)
    found = {
        keyword
        for text in sources().values()
        for arguments in call.findall(text)
        for keyword in re.findall(r"^ *(\w+)=(?!=)", arguments, re.MULTILINE)
    }
    taken = {*inspect.signature(attention.attention_forward).parameters, *attention._REFUSED}
    assert len(found) > 15 and found - taken == WITHOUT_A_PARAMETER


def test_every_model_that_passes_what_is_refused_is_refused():
    passing = {
        name: {path.partition("/")[0] for path, text in sources().items() if f" {name}=" in text}
        for name in ("block_indices", "sinks")
    }
    # inkling2 runs on eager attention alone, and attach does not support it.
    assert passing == {"block_indices": {"minimax_m3_vl"}, "sinks": {"inkling2"}}
    assert {name.removesuffix("_text") for name in models._SPARSE} == passing["block_indices"]
    assert "inkling2" not in "".join(models._PROVEN)


def test_every_place_that_asks_for_the_name_is_known():
    asked = re.compile(r"^ *(.*_attn_implementation (?:==|!=|in) ?[(\[\"'].*)$", re.MULTILINE)
    texts = sources().values()
    assert {line for text in texts for line in asked.findall(text)} == set(NAME_BRANCHES)
    assert not [text for text in texts if 'ALL_ATTENTION_FUNCTIONS["sdpa"] =' in text]
