"""The CPU tests of what attention promises, on the CUDA kernels under the emulator.

Forwards and backwards are both emulated, and the functions that are imported below run as they
stand: extremes, lengths and pages, dropout, layouts of results, the public functions. Backwards are
deterministic, so that results can be asked for bit by bit.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from onepass import numerics
from tests.attention import dropout_cases as attention_dropout_cases
from tests.attention.cases import (
    BF16,
    F16,
    F32,
    F64,
    Case,
    assert_same,
    check,
    definition,
    ours,
    stock,
)
from tests.attention.cuda_cases import DTYPES, TILED, judge_one_draw_first
from tests.attention.dropout_cases import SEED
from tests.attention.test_dropout import (  # noqa: F401
    test_a_shard_of_queries_computes_what_the_whole_does,
    test_everything_dropped,
    test_forward_and_backward_drop_what_the_reference_drops,
    test_golden_bits,
    test_packed_sequences_count_positions_within_themselves,
    test_shards_of_keys_merge_by_their_lse,
    test_shards_reproduce_the_mask_of_the_whole,
    test_too_small_to_drop_anything_is_no_dropout,
    test_values_are_those_of_the_scaled_mask,
)
from tests.attention.test_extremes import (  # noqa: F401
    test_a_masked_key_may_be_anything,
    test_a_sink_of_minus_infinity_is_no_sink,
    test_a_sink_of_minus_infinity_is_none,
    test_gradients_at_a_low_lse_are_finite,
    test_gradients_of_rows_of_the_smallest_number,
    test_half_a_tile_with_a_mask_and_a_small_lse,
    test_huge_scores,
    test_keys_that_are_all_alike,
    test_keys_that_no_query_sees_are_not_read,
    test_lse_far_from_zero,
    test_not_finite_gradients_stay_in_their_head,
    test_not_finite_inputs_spread_as_in_torch,
    test_nothing,
    test_one_query,
    test_rows_of_the_smallest_number_average_as_in_torch,
    test_rows_without_keys,
    test_scores_beyond_the_exponential,
)
from tests.attention.test_layouts import (  # noqa: F401
    test_broadcast_of_bias_and_mask_by_stride_or_size,
    test_output_follows_the_layout_of_the_query,
    test_packed_layouts,
    test_paged_layouts,
    test_results_are_contiguous_in_the_asked_order,
    test_slopes_and_sinks_of_any_layout,
    test_upstream_gradient_of_one_element,
)
from tests.attention.test_packed import (  # noqa: F401
    test_a_sequence_does_not_depend_on_the_others,
    test_bounds_may_be_larger_than_the_longest,
    test_entries_of_the_block_table_beyond_the_keys_are_not_looked_at,
    test_everything_on_packed_sequences,
    test_keys_that_are_not_used_are_not_read,
    test_pages_and_packed_keys_are_alike,
    test_pages_may_be_shared,
    test_varlen_attention_is_the_op,
)
from tests.attention.test_random import cases

# Tests of others run here with every value of their parameters.
pytestmark = pytest.mark.grid


@pytest.fixture(autouse=True)
def deterministic(cuda, monkeypatch):
    judge_one_draw_first(monkeypatch)
    cuda.keywords["deterministic"] = True


# ---- dropout -------------------------------------------------------------------------------------

# Of buckets of head dims whose tiles hold other numbers of keys.
FATES = [
    attention_dropout_cases.with_threshold(Case(BF16, 64, batch=1, seq_q=150, seq_k=230)),
    Case(F16, 128, batch=1, seq_q=140, seq_k=170, dropout_p=0.4, key_offset=21),
    Case(BF16, 200, batch=1, heads=1, seq_q=70, seq_k=150, dropout_p=0.2, query_offset=3),
]


@pytest.mark.parametrize("case", FATES, ids=lambda case: f"{case.dtype}-{case.head_dim}")
def test_what_wide_heads_drop(case):
    test_forward_and_backward_drop_what_the_reference_drops(case, SEED)


# ---- everything ----------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_any_combination(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_many_combinations(case):
    check(case)


@pytest.mark.parametrize("dtype", TILED, ids=str)
@pytest.mark.parametrize("options", [{}, dict(window_right=0)], ids=str)
def test_16_bit_gradients_are_accumulated_in_float32(options, dtype):
    """torch's unfused function does; its fused one, elsewhere the measure, does not."""
    case = Case(dtype, 64, batch=1, heads=2, kv_heads=1, seq_q=400, seq_k=400, **options)
    t = case.tensors()
    found, ref = ours(case, t), definition(case, t, F64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        unfused = stock(case, t)
    for name, result in unfused.items():
        numerics.assert_close(found[name], ref[name], result, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_keys_but_a_sink(dtype):
    case = Case(dtype, 16, seq_q=200, seq_k=0, sinks=dtype, dlse=True)
    t = case.tensors()
    results = ours(case, t)
    assert not results["output"].any()
    sinks = t["sinks"].to(results["lse"].dtype)[:, None].expand(2, 2, 200)
    assert torch.equal(results["lse"], sinks)
    exact, rounded = (t["dlse"].to(wide).sum((0, 2)) for wide in (F64, dtype))
    numerics.assert_close(results["dsinks"], exact, rounded)


NAN_KEYS = {
    "causal": dict(window_right=0),
    "window": dict(window_left=3, window_right=70),
    "mask": dict(mask="b"),
}


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("name", NAN_KEYS)
def test_masked_keys_never_spread_what_they_hold(name, dtype):
    """In the same tile as keys that are seen: by no query, in output and gradients."""
    case = Case(dtype, 40, batch=1, heads=2, seq_q=21, seq_k=130, **NAN_KEYS[name])
    t = case.tensors()
    unseen = ~case.allowed().any(0)
    if "mask" in t:
        t["mask"][..., 5:20] = False
        unseen = ~t["mask"][0, 0, 0]
    assert unseen.any() and not unseen.all()
    clean = ours(case, t)
    for value in (float("nan"), float("inf")):
        spoilt = {n: t[n].clone() for n in ("key", "value")}
        for tensor in spoilt.values():
            tensor[:, :, unseen] = value
        assert_same(ours(case, t | spoilt), clean)
    assert not clean["dkey"][:, :, unseen].any() and not clean["dvalue"][:, :, unseen].any()
