"""Operations that torch's flop counter counts for onepass's operators."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import flop_counter

import onepass
from onepass import _flops
from onepass._policy import products
from tests.support import fresh

_flops.register()  # this process may have imported the counter last


def counted(run, backward: bool = True) -> tuple[int, int]:
    """Operations of the forward, and of the backward."""
    counts = []
    with flop_counter.FlopCounterMode(display=False) as counter:
        y = run()
        counts.append(counter.get_total_flops())
        if backward:
            y.sum().backward()
    return counts[0], counter.get_total_flops() - counts[0]


@pytest.mark.parametrize("frozen", [None, "input", "weight"])
@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}], ids=["", "gelu"])
def test_linear_counts_as_torchs(frozen, options):
    given = {
        "input": torch.randn(3, 5, 8, requires_grad=True),
        "weight": torch.randn(6, 8, requires_grad=True),
        "bias": torch.randn(6, requires_grad=True),
    }
    if frozen:
        given[frozen].requires_grad_(False)
    expected = counted(lambda: F.linear(**given))
    assert expected[0] == 2 * 15 * 8 * 6
    assert counted(lambda: onepass.functional.linear(**given, **options)) == expected


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_a_quantised_weight_counts_as_a_plain_one_that_is_frozen(weights, trained):
    x = torch.randn(3, 5, 16, requires_grad=trained)
    layer = nn.Linear(16, 6)
    layer.weight.requires_grad_(False)
    expected = counted(lambda: layer(x))
    assert expected == (2 * 15 * 16 * 6, trained * 2 * 15 * 16 * 6)
    quantised = onepass.nn.QuantizedLinear.from_weight(layer.weight, layer.bias, weights=weights)
    assert counted(lambda: quantised(x)) == expected


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_counts_as_torchs_fused_kernels(kv_heads):
    shapes = (2, 4, 7, 8), (2, kv_heads, 9, 8), (2, kv_heads, 9, 16)
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    attend = onepass.functional.scaled_dot_product_attention
    found = counted(lambda: attend(query, key, value, is_causal=True, enable_gqa=True))
    forward = flop_counter.sdpa_flop_count(*shapes)
    assert found == (forward, flop_counter.sdpa_backward_flop_count((2, 4, 7, 16), *shapes))


@pytest.mark.parametrize("meta", [False, True])
def test_packed_sequences_count_by_their_lengths(meta):
    device = "meta" if meta else "cpu"
    cu_seq = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    qkv = [torch.randn(8, 2, 16, device=device) for _ in range(3)]
    found, _ = counted(
        lambda: onepass.functional.varlen_attention(*qkv, cu_seq, cu_seq, 6, 6), backward=False
    )
    lengths = (6, 6) if meta else (3, 5)
    assert found == sum(2 * 2 * n * n * (16 + 16) for n in lengths)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [0, 2])
def test_decoding_counts_the_keys_that_it_reads(new, paged):
    query, key = torch.randn(2, 4, 2, 8), torch.randn(2, 2, 2, 8)
    value, ints = torch.randn(2, 2, 2, 16), {"dtype": torch.int32}
    options = {"cache_seqlens": torch.tensor([3, 5], **ints)}
    if paged:
        k_cache, v_cache = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 16)
        options["block_table"] = torch.tensor([[1, 4], [0, 2]], **ints)
    else:
        k_cache, v_cache = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 16)
        options["cache_leftpad"] = torch.tensor([1, 0], **ints)
    given = (query, k_cache, v_cache, *((key, value) if new else ()))
    attend = onepass.functional.attention_with_kv_cache
    lengths = [3 + new - (not paged), 5 + new]
    shapes = [((1, 4, 2, 8), (1, 4, n, 8), (1, 4, n, 16)) for n in lengths]
    found, _ = counted(lambda: attend(*given, **options), backward=False)
    assert found == sum(flop_counter.sdpa_flop_count(*s) for s in shapes)
    meta = [t.to("meta") for t in given]
    options = {name: t.to("meta") for name, t in options.items()}
    found, _ = counted(lambda: attend(*meta, **options), backward=False)
    assert found == 2 * (8 if paged else 9) * 2 * 4 * 2 * (8 + 16)


@pytest.mark.parametrize("reduction, chunks", [("mean", 1), ("none", 2)])
def test_a_loss_without_logits_counts_its_products(reduction, chunks):
    """The forward, and two gradients; without a reduction the backward has the logits again."""
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    loss = onepass.functional.linear_cross_entropy
    counts = counted(lambda: loss(x, w, torch.arange(5), reduction=reduction))
    assert sum(counts) == 2 * 5 * 8 * 30 * (2 + chunks)


def test_a_swapped_model_counts_as_stock(monkeypatch):
    slow = products.Facts("AuthenticAMD", mkl=True, bfloat16=False, float16=False)
    monkeypatch.setattr(products, "facts", lambda: slow)
    stock = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    ours, x = copy.deepcopy(stock), torch.randn(4, 16)
    assert len(onepass.swap(ours).swapped) == 3
    assert counted(lambda: ours(x)) == counted(lambda: stock(x))


CODE = """
import sys, torch
{first}
{second}
onepass.swap(torch.nn.LayerNorm(4))
with FlopCounterMode(display=False) as counter:
    onepass.functional.linear(torch.randn(3, 8), torch.randn(6, 8))
assert counter.get_total_flops() == 2 * 3 * 8 * 6
"""
COUNTER = "from torch.utils.flop_counter import FlopCounterMode"


@pytest.mark.parametrize("is_later", [True, False])
def test_in_whatever_order_things_are_imported(is_later):
    ours = f"import onepass; assert ('torch.utils.flop_counter' in sys.modules) != {is_later}"
    first, second = (ours, COUNTER) if is_later else (COUNTER, ours)
    fresh.run(CODE.format(first=first, second=second), check=True)
