"""What the delta rule promises beside values: bits, memory, errors."""

import pytest
import torch

from onepass import functional
from tests.delta_rule.test_values import F16, F32, F64, decays, drawn, function_of, ours
from tests.support.refused import assert_refused
from tests.support.scans import results

OPS = torch.ops.onepass
OF_TOKENS = ("q", "k", "v", "g", "beta")
NORMED = {"use_qk_l2norm_in_kernel": True}


def upstream_of(shape, value_dim):
    batch, length, heads, size = shape
    return torch.randn(batch, length, heads, value_dim), torch.randn(batch, heads, size, value_dim)


def named(tensors, found):
    return dict(zip(("output", "final_state", *tensors), found, strict=True))


@decays
def test_the_same_bits_for_any_number_of_threads(channels):
    shape = (2, 150, 6, 20)
    tensors, upstream = drawn(shape, 24, F32, channels, key_heads=3), upstream_of(shape, 24)
    others = {name: t for name, t in tensors.items() if name != "initial_state"}
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            state = tensors["initial_state"].clone()
            updated = functional.delta_rule_update(state, **others)
            found.append([*results(ours(channels, **NORMED), tensors, upstream), updated, state])
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


LENGTHS = (5, 1, 150, 74, 0, 64)


@decays
def test_a_sequence_does_not_depend_on_what_it_is_packed_with(channels):
    length, whole = sum(LENGTHS), ours(channels)
    tensors = drawn((1, length, 4, 10), 8, F32, channels, key_heads=2)
    tensors["initial_state"] = torch.randn(len(LENGTHS), 4, 10, 8)
    upstream = torch.randn(1, length, 4, 8), torch.randn(len(LENGTHS), 4, 10, 8)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    found = named(tensors, results(ours(channels, cu_seqlens=ends), tensors, upstream))
    for i, (begin, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
        own = {n: t[:, begin:end] for n, t in tensors.items() if n in OF_TOKENS}
        own["initial_state"] = tensors["initial_state"][i : i + 1]
        given = upstream[0][:, begin:end], upstream[1][i : i + 1]
        alone = named(own, results(whole, own, given))
        for name in ("output", *OF_TOKENS):
            assert torch.equal(found[name][:, begin:end], alone[name]), name
        for name in ("final_state", "initial_state"):
            assert torch.equal(found[name][i : i + 1], alone[name]), name


@decays
def test_few_packed_tokens(channels):
    """Each as alone; int32 or int64."""
    tensors = drawn((1, 7, 3, 10), 8, F32, channels, state=False)
    state = torch.randn(4, 3, 10, 8)
    ends = torch.tensor([0, 1, 1, 4, 7])
    function = function_of(channels, True)
    of = {"output_final_state": True}
    output, last = function(**tensors, initial_state=state, cu_seqlens=ends, **of)
    again = function(**tensors, initial_state=state, cu_seqlens=ends.int(), **of)
    assert torch.equal(again[0], output) and torch.equal(again[1], last)
    for i, (begin, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
        own = {n: t[:, begin:end] for n, t in tensors.items()}
        alone = function(**own, initial_state=state[i : i + 1], **of)
        assert torch.equal(output[:, begin:end], alone[0])
        assert torch.equal(last[i : i + 1], alone[1])


@decays
def test_a_sample_and_a_head_do_not_depend_on_others(channels):
    shape = (3, 150, 4, 12)
    tensors, upstream = drawn(shape, 8, F32, channels), upstream_of(shape, 8)
    found = named(tensors, results(ours(channels), tensors, upstream))
    own = {n: t[1:2] for n, t in tensors.items()}
    alone = named(own, results(ours(channels), own, [d[1:2] for d in upstream]))
    for name, tensor in alone.items():
        assert torch.equal(found[name][1:2], tensor), name
    own = {n: t[:, :, 2:3] if n in OF_TOKENS else t[:, 2:3] for n, t in tensors.items()}
    alone = named(own, results(ours(channels), own, (upstream[0][:, :, 2:3], upstream[1][:, 2:3])))
    for name, tensor in alone.items():
        whole = found[name]
        part = whole[:, 2:3] if name.endswith("_state") else whole[:, :, 2:3]
        assert torch.equal(part, tensor), name


@decays
@pytest.mark.parametrize("length", [64, 128])
def test_calls_after_each_other_are_one_call(length, channels):
    """Bit for bit, where a call ends with a chunk."""
    tensors = drawn((2, 300, 3, 10), 4, F32, channels)
    whole, end = ours(channels)(**tensors)
    state, outputs = tensors["initial_state"], []
    for begin in range(0, 300, length):
        part = {n: tensors[n][:, begin : begin + length] for n in OF_TOKENS}
        output, state = ours(channels)(**part, initial_state=state)
        outputs.append(output)
    assert torch.equal(torch.cat(outputs, 1), whole)
    assert torch.equal(state, end)


@decays
def test_tokens_after_each_other_are_one_update(channels):
    tensors = drawn((2, 5, 3, 10), 4, F32, channels)
    state = tensors.pop("initial_state")
    after = state.clone()
    whole = functional.delta_rule_update(after, **tensors)
    outputs = [
        functional.delta_rule_update(state, **{n: t[:, i : i + 1] for n, t in tensors.items()})
        for i in range(5)
    ]
    assert torch.equal(torch.cat(outputs, 1), whole) and torch.equal(state, after)


@decays
def test_the_hint_of_a_chunk_size_changes_nothing(channels):
    tensors = drawn((1, 100, 2, 5), 4, F32, channels)
    found = [function_of(channels)(**tensors, chunk_size=size)[0] for size in (1, 64, 256)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@decays
def test_any_strides(channels):
    """Of tensors and of gradients."""
    shape, whole = (2, 70, 4, 9), ours(channels)
    tensors, upstream = drawn(shape, 6, F32, channels, key_heads=2), upstream_of(shape, 6)
    expected = results(whole, tensors, upstream)
    for name, tensor in tensors.items():
        wide = torch.full((*tensor.shape, 3), float("nan"))
        wide[..., 1] = tensor
        found = results(whole, tensors | {name: wide[..., 1]}, upstream)
        assert all(map(torch.equal, found, expected)), name
        turned = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        found = results(whole, tensors | {name: turned}, upstream)
        assert all(map(torch.equal, found, expected)), name
    turned = [d.transpose(1, -1).contiguous().transpose(1, -1) for d in upstream]
    assert all(map(torch.equal, results(whole, tensors, turned), expected))


@decays
def test_a_state_between_others_is_written_alone(channels):
    """Rows of an update's state may be apart; what lies between them stays."""
    tensors = drawn((2, 2, 3, 10), 13, F32, channels)
    state = tensors.pop("initial_state")
    room = torch.full((3, 4, 11, 20), 7.0)
    inside = room[1:, 1:, 1:, 3:16]
    inside.copy_(state)
    expected = functional.delta_rule_update(state, **tensors)
    assert torch.equal(functional.delta_rule_update(inside, **tensors), expected)
    assert torch.equal(inside, state)
    inside.fill_(7.0)
    assert (room == 7.0).all()


@decays
def test_memory_grows_with_the_length_alone(channels):
    """A state of 64 tokens is saved, not that of each, and no products of pairs."""
    tensors = drawn((1, 1024, 2, 8), 16, F32, channels)
    tensors = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    given, saved = {t.data_ptr() for t in tensors.values()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(channels)(**tensors)
    own = [t for t in saved if t.data_ptr() not in given]
    assert [t.shape for t in own] == [(1, 1024 // 64, 2, 8, 16)]


@decays
@pytest.mark.parametrize("shape", [(0, 3, 2, 5), (2, 0, 2, 5), (2, 3, 0, 5)], ids=str)
def test_empty(shape, channels):
    tensors, upstream = drawn(shape, 4, F32, channels, key_heads=shape[2]), upstream_of(shape, 4)
    output, last, *gradients = results(ours(channels), tensors, upstream)
    assert output.shape == (*shape[:3], 4) and torch.equal(last, tensors["initial_state"])
    for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True):
        assert gradient.shape == tensor.shape
        is_last = name == "initial_state"
        assert torch.equal(gradient, upstream[1]) if is_last else not gradient.any()
    state = tensors.pop("initial_state")
    before = state.clone()
    assert functional.delta_rule_update(state, **tensors).shape == (*shape[:3], 4)
    assert torch.equal(state, before)


@decays
def test_a_gradient_goes_through_the_chunks(channels):
    """Of few tokens and of an update in place."""
    tensors, upstream = drawn((2, 3, 2, 8), 6, F32, channels), upstream_of((2, 3, 2, 8), 6)
    expected = results(ours(channels), tensors, upstream)

    def recurrent(**given):
        return function_of(channels, True)(**given, output_final_state=True)

    def update(initial_state, **given):
        state = initial_state.clone()
        return functional.delta_rule_update(state, **given), state

    for function in (recurrent, update):
        assert all(map(torch.equal, results(function, tensors, upstream), expected))


SHAPE = (2, 5, 4, 6)
RIGHT = {n: torch.ones_like(t) for n, t in drawn(SHAPE, 3, F32, False, key_heads=2).items()}
ENDS = torch.tensor([0, 5], dtype=torch.int32)
OTHER = "have dtype float32, bfloat16 or float16 beside q, got float64"
WRONG = {
    "q must have shape (batch, length, heads, head_dim), got (5, 2, 6)": dict(q=RIGHT["q"][0]),
    "k must have shape (2, 5, 2, 6), got (2, 4, 2, 6)": dict(k=RIGHT["k"][:, 1:]),
    "v must have shape (batch, length, heads, head_dim), got (5, 4, 3)": dict(v=RIGHT["v"][0]),
    "v must have shape (2, 5, 4, 3), got (2, 4, 4, 3)": dict(v=RIGHT["v"][:, 1:]),
    "v must have a multiple of q's heads, 2, got 3": dict(v=RIGHT["v"][:, :, 1:]),
    "g must have shape (2, 5, 4), got (2, 5, 4, 6)": dict(g=torch.ones(2, 5, 4, 6)),
    "beta must have shape (2, 5, 4), got (2, 5, 2)": dict(beta=RIGHT["beta"][..., 2:]),
    **{f"{name} must {OTHER}": {name: RIGHT[name].to(F64)} for name in RIGHT if name != "q"},
    "q must have a batch of 1 beside cu_seqlens, got 2": dict(cu_seqlens=ENDS),
    "cu_seqlens must be an int32 tensor of shape (sequences + 1,), got (1, 2) of int32": (
        dict(cu_seqlens=ENDS[None])
    ),
    "cu_seqlens must hold integers, got torch.float32": dict(cu_seqlens=ENDS.float()),
}
OF_STATE = {
    "initial_state must have shape (2, 4, 6, 3), got (1, 4, 6, 3)": (
        dict(initial_state=RIGHT["initial_state"][1:])
    ),
}


def test_messages():
    for function in (
        functional.chunk_gated_delta_rule,
        functional.fused_recurrent_gated_delta_rule,
    ):
        assert_refused(function, "delta_rule", RIGHT, WRONG | OF_STATE)
    sized = {"chunk_size must be at least 1, got 0": dict(chunk_size=0)}
    assert_refused(functional.chunk_gated_delta_rule, "delta_rule", RIGHT, sized)
    of_channels = RIGHT | {"g": torch.ones(2, 5, 4, 6)}
    wrong = {"g must have shape (2, 5, 4, 6), got (2, 5, 4)": dict(g=RIGHT["g"])}
    for function in (functional.chunk_kda, functional.fused_recurrent_kda):
        assert_refused(function, "delta_rule", of_channels, wrong)
    one = {n: t[:1] for n, t in RIGHT.items()}
    wrong = {
        "cu_seqlens must begin with 0, got 1": dict(cu_seqlens=ENDS.clamp(1)),
        "cu_seqlens must end with the length of q, 5, got 4": dict(cu_seqlens=ENDS.clamp(0, 4)),
        "cu_seqlens must not decrease, got 2 after 3": (
            dict(cu_seqlens=torch.tensor([0, 3, 2, 5]), initial_state=None)
        ),
    }
    assert_refused(functional.chunk_gated_delta_rule, "delta_rule", one, wrong)


def test_messages_of_the_update():
    right = dict(RIGHT)
    state = right["state"] = right.pop("initial_state")
    wrong = {m: c for m, c in WRONG.items() if "initial_state" not in c}
    wrong["g must have shape (2, 5, 4), got (2, 4, 4)"] = dict(g=RIGHT["g"][:, 1:])
    del wrong["g must have shape (2, 5, 4), got (2, 5, 4, 6)"]  # which has channels here
    strides = "got strides (72, 18, 1, 6)"
    wrong |= {
        "state must have shape (2, 4, 6, 3), got (1, 4, 6, 3)": dict(state=state[1:]),
        f"state must {OTHER}": dict(state=state.to(F64)),
        f"state must be dense in its last dimension, it is updated in place, {strides}": (
            dict(state=torch.ones(2, 4, 3, 6).mT)
        ),
        "state must have a place for each element, it is updated in place, got shape "
        "(2, 4, 6, 3) with strides (0, 18, 3, 1)": dict(state=state[:1].expand(2, -1, -1, -1)),
        "v must lie apart from state, which is updated in place, got shared memory": (
            dict(v=state.view(-1)[:120].view(2, 5, 4, 3))
        ),
    }
    wrong |= {
        f"{name} must lie apart from state, which is updated in place, got shared memory": (
            {name: state.view(-1)[: RIGHT[name].numel()].view(RIGHT[name].shape)}
        )
        for name in ("q", "k", "g", "beta")
    }
    assert_refused(functional.delta_rule_update, "delta_rule_update", right, wrong)
    room = torch.zeros(72)
    offsets = room.view(torch.int32)[:2]
    offsets[1] = 5
    packed = {name: tensor[:1] for name, tensor in right.items()} | {"cu_seqlens": offsets}
    message = "cu_seqlens must lie apart from state, which is updated in place, got shared memory"
    with pytest.raises(RuntimeError, match=message):
        functional.delta_rule_update(**packed | {"state": room.view(1, 4, 6, 3)})


@pytest.mark.parametrize("beyond", [3 - 2**32, 3 + 2**32], ids=["below", "above"])
def test_offsets_beyond_32_bits_are_refused(beyond):
    q = torch.randn(1, 5, 2, 6)
    g = torch.zeros(1, 5, 2)
    offsets = torch.tensor([0, beyond, 5])
    for given in (offsets, offsets.to(torch.uint64)):
        with pytest.raises(RuntimeError, match="cu_seqlens must"):
            functional.chunk_gated_delta_rule(q, q, q, g, g, cu_seqlens=given)


def test_messages_of_the_backward():
    state = RIGHT["initial_state"]
    backward = RIGHT | dict(doutput=RIGHT["v"], dfinal_state=state, cu_seqlens=None, scale=1.0)
    backward |= dict(states=torch.ones(2, 1, 4, 6, 3), qk_l2norm=False, g_has_channels=False)
    backward |= dict(grad_mask=63)
    wrong = {
        "doutput must have dtype float32 like v, got float16": dict(doutput=RIGHT["v"].to(F16)),
        "doutput must have shape (2, 5, 4, 3), got (2, 4, 4, 3)": dict(doutput=RIGHT["v"][:, 1:]),
        "dfinal_state must have shape (2, 4, 6, 3), got (1, 4, 6, 3)": (
            dict(dfinal_state=state[1:])
        ),
        "dfinal_state must have dtype float32, got float16": dict(dfinal_state=state.to(F16)),
        "states must have shape (2, 1, 4, 6, 3), got (2, 2, 4, 6, 3)": dict(
            states=torch.ones(2, 2, 4, 6, 3)
        ),
        "states must have dtype float32, got float16": dict(
            states=torch.ones(2, 1, 4, 6, 3).half()
        ),
    }
    assert_refused(OPS.delta_rule_backward, "delta_rule_backward", backward, wrong)
