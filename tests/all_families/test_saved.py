"""What a call keeps for its backward: arguments, results, and few numbers of each row, no mask."""

import pytest
import torch

from tests.support.calls import CALLS

ROWS, SEED, NONE = (6,), (2,), (0,)
NORM, ADDED = ("input", "weight"), ("result 1", "weight")
MODULATED, GATED = ("input", "scale", "shift"), ("result 1", "scale", "shift", "input", "gate")
ATTENTION = ("result 0", "query", "key", "value")
TABLES = ("cos", "sin", "positions")
DELTA = ("q", "k", "v", "g", "beta", (2, 1, 4, 5, 3))
# By function: the arguments and results, and the shapes of the other tensors.
KEPT = {
    "layer_norm": (*NORM, "bias", ROWS, ROWS),
    "rms_norm": (*NORM, NONE, ROWS),
    "add_layer_norm": (*ADDED, "bias", SEED, ROWS, ROWS),
    "add_rms_norm": (*ADDED, SEED, NONE, ROWS),
    "modulated_layer_norm": (*MODULATED, (2, 3), (2, 3)),
    "modulated_layer_norm of a gated sum": (*GATED, (2, 3), (2, 3)),
    "modulated_rms_norm": (*MODULATED, NONE, (2, 3)),
    "modulated_rms_norm of a gated sum": (*GATED, NONE, (2, 3)),
    "add_layer_norm of a scaled branch": (
        *ADDED, "bias", "input", "column_scale", "row_scale", SEED, (2, 3), (2, 3),
    ),
    "add_dropout of a scaled branch": ("input", "column_scale", "row_scale", SEED),
    "dropout": (SEED,),
    "add_dropout": (SEED,),
    "causal_conv1d": ("x", "weight", "bias"),
    "selective_scan": ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", (2, 1, 3, 6)),
    "mamba_chunk_scan": ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", (2, 1, 4, 5, 3)),
    "chunk_gated_delta_rule": DELTA,
    "chunk_kda": DELTA,
    "fused_recurrent_gated_delta_rule": DELTA,
    "fused_recurrent_kda": DELTA,
    "group_norm": (*NORM, "bias", (2, 2), (2, 2)),
    "gated_activation": ("gate", "up"),
    "gated_activation of halves": ("gate",),
    "silu_mul": ("gate", "up"),
    "gelu_mul": ("gate", "up"),
    "cross_entropy": ("input", "target", "weight", (3, 6), ()),
    "linear": NORM,
    "linear by 8 bits": NORM,
    "linear with options": (*NORM, (6, 24), SEED),
    "quantized_linear": ("codes", "scales", "shifts"),
    "scaled_dot_product_attention": (*ATTENTION, "attn_mask", (2, 4, 5), (2, 4, 5)),
    "scaled_dot_product_attention with options": (
        *ATTENTION, "result 1", "attn_mask", "sinks", "alibi_slopes", (2, 4, 5), SEED,
    ),
    "varlen_attention": (
        *ATTENTION, "result 1", "sinks", "alibi_slopes", "cu_seq_q", "cu_seq_k", (4, 5),
    ),
    "rotary_embedding of one table": TABLES,
    "rotary_embedding trained after norms": (
        "query", "key", "query_weight", "key_weight", *TABLES,
    ),
}  # fmt: skip
# A loss with a layer keeps gradients, and a merge is torch's.
ELSEWHERE = ("linear_cross_entropy", "merge_attention_states")


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name):
    call, saved = CALLS[f"functional.{name}"], []
    given = call.tensors()
    given |= {n: given[n].requires_grad_() for n in call.wanted(given)}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = call.results(given)
    places = {y.data_ptr(): f"result {number}" for number, y in enumerate(results)}
    places |= {tensor.data_ptr(): n for n, tensor in given.items()}
    found = [str(places.get(t.data_ptr(), tuple(t.shape))) for t in saved]
    assert sorted(found) == sorted(map(str, KEPT[name]))


@pytest.mark.parametrize("name", [n for n in CALLS if n.startswith("functional.")])
def test_nothing_is_kept_without_a_gradient(name):
    call, saved = CALLS[name], []
    given = call.tensors()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call.results(given)
        with torch.no_grad():
            call.results({n: t.requires_grad_(call.differentiable) if n in call.wanted(given) else t
                          for n, t in given.items()})  # fmt: skip
    assert saved == []
    with torch.inference_mode():
        assert all(y.is_inference() for y in call.results(call.tensors()))


def test_every_function_is_here():
    functions = {n.removeprefix("functional.") for n, c in CALLS.items() if c.differentiable}
    assert {n for n in functions if "." not in n} - {*ELSEWHERE} == KEPT.keys()
