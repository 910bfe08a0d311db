"""flash_attn.bert_padding and flash_attn.layers.rotary, against their meaning in plain torch."""

import importlib
import inspect

import pytest
import torch
from torch import Tensor

from onepass.integrations import flash_attn
from onepass.integrations.flash_attn import bert_padding, flash_attn_varlen_func
from onepass.integrations.flash_attn.layers import rotary
from onepass.reference.rotary import rotary_embedding

F64 = torch.float64
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])

# ---- names that published files import, and arguments that they pass by position -----------------


PROBABILITIES = "window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
PROBABILITIES += "return_attn_probs=False"
SCALED = "dropout_p=0.0, softmax_scale=None, causal=False, " + PROBABILITIES
BOUNDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
ROTATED = "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
ROTATED += "max_seqlen=None"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {SCALED}",
    "flash_attn_kvpacked_func": f"q, kv, {SCALED}",
    "flash_attn_qkvpacked_func": f"qkv, {SCALED}",
    "flash_attn_varlen_func": f"q, k, v, {BOUNDS}{SCALED}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {BOUNDS}{SCALED}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {SCALED}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
    "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    "flash_attn_interface.flash_attn_func": f"q, k, v, {SCALED}",
    "bert_padding.index_first_axis": "input, indices",
    "bert_padding.index_put_first_axis": "values, indices, first_axis_dim",
    "bert_padding.unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "bert_padding.unpad_input_for_concatenated_sequences": "hidden_states, "
    "attention_mask_in_length",
    "bert_padding.pad_input": "hidden_states, indices, batch, seqlen",
    "layers.rotary.apply_rotary_emb": ROTATED,
    "layers.rotary.apply_rotary_emb_func": ROTATED,
    "layers.rotary.apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, "
    "interleaved=False, seqlen_offsets=0, num_heads_q=None",
    "layers.rotary.apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    "layers.rotary.RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, "
    "pos_idx_in_fp32=True, device=None",
    "ops.triton.rotary.apply_rotary": "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, "
    "max_seqlen=None, interleaved=False, inplace=False, conjugate=False",
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path):
    module, _, name = f"onepass.integrations.flash_attn.{path}".rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    written = [str(p.replace(annotation=p.empty)) for p in parameters.values()]
    assert ", ".join(written) == SIGNATURES[path]


def test_all_names():
    assert set(flash_attn.__all__) == {name for name in SIGNATURES if "." not in name}


def test_einops_comes_from_here_too():
    einops = pytest.importorskip("einops", reason="no dependency of onepass")
    assert bert_padding.rearrange is einops.rearrange


# ---- padding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_unpad_and_pad(dtype, shape):
    rows, *_, used = bert_padding.unpad_input(torch.ones(0, 5, *shape), MASK[:0].to(dtype))
    assert rows.shape == (0, *shape) and used.shape == (0,)
    mask = MASK.to(dtype)
    x = torch.randn(4, 5, *shape)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()]) and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 3, 5, 10, 10] and cu_seqlens.dtype == torch.int32
    assert longest == 5 and type(longest) is int
    assert used.tolist() == [3, 2, 5, 0] and used.dtype == torch.int32
    padded = bert_padding.pad_input(rows, indices, 4, 5)
    assert torch.equal(padded, x * mask.reshape(4, 5, *(1,) * len(shape)))


def test_rows_that_are_kept_though_unused():
    unused = torch.zeros_like(MASK)
    unused[0, 3] = unused[3, 0] = 1
    x = torch.randn(4, 5, 2)
    rows, _, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK, unused)
    assert torch.equal(rows, x[(MASK + unused).bool()]) and longest == 5
    assert cu_seqlens.tolist() == [0, 4, 6, 11, 12] and used.tolist() == [3, 2, 5, 0]


def test_rows_of_several_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 2)
    found = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    rows, indices, cu_seqlens, longest = found
    assert torch.equal(rows, torch.cat((x[0, :5], x[1, :5], x[2]))) and longest == 6
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert torch.equal(x.flatten(0, 1)[indices], rows)


def test_gradients_of_padding():
    x = torch.randn(4, 5, 2, dtype=F64, requires_grad=True)
    indices = bert_padding.unpad_input(x, MASK)[1]

    def there_and_back(x):
        rows = bert_padding.unpad_input(x, MASK)[0]
        return bert_padding.pad_input(rows.sin(), indices, 4, 5)

    assert torch.autograd.gradcheck(there_and_back, (x,))
    twice = torch.tensor([1, 1, 3], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_first_axis(x[0], twice), (x,))


def test_attention_of_a_padded_batch():
    q, k, v = (torch.randn(4, 5, 2, 8) for _ in range(3))
    (q, indices, cu, longest, _), (k, *_), (v, *_) = (
        bert_padding.unpad_input(t, MASK) for t in (q, k, v)
    )
    output = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)
    assert bert_padding.pad_input(output, indices, 4, 5).shape == (4, 5, 2, 8)


# ---- rotation ------------------------------------------------------------------------------------


def turned(x: Tensor, rows: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x (..., tokens, heads, head_dim), by the definition; rows (..., tokens) of the angles."""
    return rotary_embedding(
        x, None, angles.cos(), angles.sin(), interleaved=interleaved, positions=rows,
        rotary_dim=2 * angles.shape[1], seq_first=True,
    )[0]  # fmt: skip


ANGLES = torch.randn(12, 3, dtype=F64)
COS, SIN = ANGLES.cos(), ANGLES.sin()
both_orders = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


CU = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
SEQUENCE = torch.tensor([0] * 5 + [2] * 4)  # of each packed row


@both_orders
@pytest.mark.parametrize(
    "packed, offsets",
    [
        *((False, offsets) for offsets in (0, 4, torch.tensor([3, 0]))),
        *((True, offsets) for offsets in (0, torch.tensor([3, 0, 7]))),
    ],
    ids=str,
)
def test_rotation(interleaved, packed, offsets):
    shape, named = (2, 8, 4, 10), dict(seqlen_offsets=offsets)
    first = torch.as_tensor(offsets)
    if packed:
        shape, named = (9, 4, 10), named | dict(cu_seqlens=CU, max_seqlen=5)
        rows = torch.arange(9) - CU[SEQUENCE] + (first[SEQUENCE] if first.dim() else first)
    else:
        rows = torch.arange(8) + first.reshape(-1, 1)
    x = torch.randn(shape, dtype=F64, requires_grad=True)
    expected = turned(x, rows.expand(shape[:-2]), ANGLES, interleaved)
    found = rotary.apply_rotary_emb(x, COS, SIN, interleaved, **named)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    upstream = torch.randn_like(found)
    (right,) = torch.autograd.grad(expected, x, upstream)
    (ours,) = torch.autograd.grad(found, x, upstream, retain_graph=True)
    torch.testing.assert_close(ours, right, rtol=1e-13, atol=1e-13)
    back = rotary.apply_rotary(found, COS, SIN, interleaved=interleaved, conjugate=True, **named)
    torch.testing.assert_close(back, x)


@both_orders
def test_gradcheck_of_rotation(interleaved):
    x = torch.randn(1, 3, 2, 8, dtype=F64, requires_grad=True)

    def in_place(x):
        return rotary.apply_rotary_emb(x * 1, COS, SIN, interleaved, inplace=True)

    assert torch.autograd.gradcheck(in_place, (x,))
    assert torch.autograd.gradgradcheck(in_place, (x,))


def test_rotation_in_place_and_16_bits():
    x = torch.randn(2, 8, 4, 10).bfloat16()
    found = rotary.apply_rotary_emb(x, COS.bfloat16().float(), SIN.bfloat16().float())
    assert found.dtype == x.dtype
    exact = rotary.apply_rotary_emb(x.float(), COS.bfloat16().float(), SIN.bfloat16().float())
    assert torch.equal(found, exact.bfloat16())  # rounded once
    assert rotary.apply_rotary_emb(x, COS, SIN, inplace=True) is x


@both_orders
def test_query_and_key_of_one_tensor(interleaved):
    qkv = torch.randn(2, 6, 3, 4, 8)
    q, k, v = (t.clone() for t in qkv.unbind(2))
    expected = torch.stack(
        [rotary.apply_rotary_emb(t, COS, SIN, interleaved) for t in (q, k)] + [v], 2
    )
    leaf = qkv.clone().requires_grad_()
    inside = leaf * 1
    found = rotary.apply_rotary_emb_qkv_(inside, COS, SIN, interleaved=interleaved)
    assert found is inside and torch.equal(found, expected)
    upstream = torch.randn_like(found)
    (grad,) = torch.autograd.grad(found, leaf, upstream)
    undone = [
        rotary.apply_rotary(upstream[:, :, i], COS, SIN, interleaved=interleaved, conjugate=True)
        for i in range(2)
    ]
    torch.testing.assert_close(grad, torch.stack([*undone, upstream[:, :, 2]], 2))
    grouped = torch.cat((q, k[:, :, :2], v[:, :, :2]), 2)
    rotary.apply_rotary_emb_qkv_(grouped, COS, SIN, interleaved=interleaved, num_heads_q=4)
    parts = (expected[:, :, 0], expected[:, :, 1, :2], v[:, :, :2])
    assert torch.equal(grouped, torch.cat(parts, 2))
    kv = torch.stack((k, v), 2)
    assert rotary.apply_rotary_emb_kv_(kv, COS, SIN, interleaved) is kv
    assert torch.equal(kv, expected[:, :, 1:])


# ---- the module ----------------------------------------------------------------------------------


@both_orders
def test_module(interleaved):
    module = rotary.RotaryEmbedding(8, base=100.0, interleaved=interleaved)
    assert not list(module.state_dict())
    angles = torch.arange(20.0)[:, None] / 100.0 ** (torch.arange(0, 8, 2) / 8)
    qkv = torch.randn(2, 6, 3, 4, 10)
    expected = qkv.clone()
    positions = torch.arange(3, 9).expand(2, 6)
    for i in range(2):
        expected[:, :, i] = turned(qkv[:, :, i], positions, angles, interleaved)
    found = module(qkv.clone(), seqlen_offset=3)
    torch.testing.assert_close(found, expected)
    q, kv = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=3)
    torch.testing.assert_close(q, expected[:, :, 0])
    torch.testing.assert_close(kv, expected[:, :, 1:])
    offsets = torch.tensor([3, 3])
    torch.testing.assert_close(module(qkv.clone(), seqlen_offset=offsets, max_seqlen=20), expected)
    assert module._cos_cached.shape == (20, 4) and module._seq_len_cached == 20
    with pytest.raises(ValueError, match="max_seqlen must be given"):
        rotary.RotaryEmbedding(8)(qkv.clone(), seqlen_offset=offsets)


def test_tables_are_kept_until_they_do_not_fit():
    module = rotary.RotaryEmbedding(8)
    x = torch.zeros(1, 6, 3, 1, 8)
    module(x)
    held = module._cos_cached
    module(x[:, :4])
    assert module._cos_cached is held
    module(x.bfloat16())
    assert module._cos_cached.dtype == torch.bfloat16
    exact = module.bfloat16()._compute_inv_freq()
    module(torch.zeros(1, 300, 3, 1, 8).bfloat16())
    assert torch.equal(module._cos_cached, (torch.arange(300.0)[:, None] * exact).cos().bfloat16())
    with torch.inference_mode():
        module(torch.zeros(1, 400, 3, 1, 8).bfloat16())
    leaf = torch.ones(1, 6, 3, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    module(leaf * 1).sum().backward()  # not with tables made in inference mode


def test_xpos_makes_scores_depend_on_the_distance_alone():
    module = rotary.RotaryEmbedding(16, scale_base=8).double()
    assert module.scale.dtype == F64
    q, k = torch.randn(2, 16, dtype=F64)
    rows = q.expand(1, 12, 1, 16).clone(), k.expand(1, 12, 1, 16).clone()
    query, kv = module(rows[0], torch.stack((rows[1], rows[1]), 2))
    scores = query[0, :, 0] @ kv[0, :, 0, 0].T
    for distance in (0, 3, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(scores[5, 2], scores[2, 5])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda f, x: f.apply_rotary_emb(x[0], COS, SIN), "x must have 4 dimensions"),
        (lambda f, x: f.apply_rotary_emb(x, COS, SIN[:, :2]), "cos and sin must have shape"),
        (lambda f, x: f.apply_rotary_emb(x[..., :4], COS, SIN), "cos and sin must have shape"),
        (lambda f, x: f.apply_rotary_emb(x, COS[:7], SIN[:7]), "cos must have a row for every"),
        (lambda f, x: f.apply_rotary_emb(x, COS, SIN, seqlen_offsets=5), "cos must have a row"),
        (lambda f, x: f.apply_rotary_emb_qkv_(x[0], COS, SIN), "qkv must have shape"),
        (lambda f, x: f.apply_rotary_emb_qkv_(x, COS, SIN, num_heads_q=3), "qkv must have 3 heads"),
        (lambda f, x: f.apply_rotary_emb_kv_(x, COS, SIN), "kv must have shape"),
        (lambda f, x: f.apply_rotary_emb_qkv_(x, COS, SIN), "num_heads_q must be given"),
    ],
)
def test_shapes_are_checked(call, message):
    with pytest.raises((RuntimeError, ValueError), match=rf"^apply_rotary_emb\w*: {message}"):
        call(rotary, torch.randn(2, 8, 4, 10))
