"""What scans of Mamba 2 promise beside values: bits, memory, errors."""

import pytest
import torch

from onepass import functional
from tests.mamba_chunk_scan.test_values import F16, F32, F64, drawn, ours
from tests.support.refused import assert_refused
from tests.support.scans import results

OPS = torch.ops.onepass
WHOLE = ours(dt_softplus=True)
OF_SAMPLES = ("x", "dt", "B", "C", "z", "initial_states")
OF_TOKENS = OF_SAMPLES[:5]


def upstream_of(shape, state):
    return torch.randn(shape), torch.randn(shape[0], *shape[2:], state)


def named(tensors, found):
    return dict(zip(("output", "final_states", *tensors), found, strict=True))


@pytest.mark.parametrize("shape", [(2, 300, 9, 40), (1, 500, 1, 150)], ids=str)
def test_the_same_bits_for_any_number_of_threads(shape):
    """By heads; with one head by columns, in the forward."""
    tensors, upstream = drawn(shape, 24, F32), upstream_of(shape, 24)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(WHOLE, tensors, upstream))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


LENGTHS = (5, 1, 150, 74, 0, 64)


def parts_of(tensors, upstream, lengths, given=()):
    """(tensors, upstream) of each of the packed sequences."""
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for i, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        own = {n: t[:, begin:end] if n in OF_TOKENS else t for n, t in tensors.items()}
        if "initial_states" in own:
            own["initial_states"] = own["initial_states"][i : i + 1]
        yield slice(begin, end), own, (upstream[0][:, begin:end], upstream[1][i : i + 1])


def test_a_sequence_does_not_depend_on_what_it_is_packed_with():
    tensors = drawn((1, sum(LENGTHS), 3, 10), 8, F32)
    tensors["initial_states"] = torch.randn(len(LENGTHS), 3, 10, 8)
    upstream = torch.randn(1, sum(LENGTHS), 3, 10), torch.randn(len(LENGTHS), 3, 10, 8)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    packed = ours(dt_softplus=True, cu_seqlens=ends)
    found = named(tensors, results(packed, tensors, upstream))
    for i, (place, own, given) in enumerate(parts_of(tensors, upstream, LENGTHS)):
        alone = named(tensors, results(WHOLE, own, given))
        for name in ("output", *OF_TOKENS):
            assert torch.equal(found[name][:, place], alone[name]), name
        for name in ("final_states", "initial_states"):
            assert torch.equal(found[name][i : i + 1], alone[name]), name


@pytest.mark.parametrize("batch", [1, 2])
def test_numbers_of_sequences(batch):
    """seq_idx cuts each sample; states belong to its first and its last sequence."""
    lengths = (70, 9, 51)
    tensors = drawn((batch, sum(lengths), 3, 10), 8, F32)
    upstream = upstream_of((batch, sum(lengths), 3, 10), 8)
    numbers = torch.repeat_interleave(torch.tensor([4, -1, 7]), torch.tensor(lengths))
    cut = ours(dt_softplus=True, seq_idx=numbers.expand(batch, -1))
    found = named(tensors, results(cut, tensors, upstream))
    zeros = torch.zeros(1, 3, 10, 8)
    for sample in range(batch):
        own = {n: t[sample : sample + 1] if n in OF_SAMPLES else t for n, t in tensors.items()}
        of_sequences = own | {"initial_states": torch.cat([own["initial_states"], zeros, zeros])}
        given = upstream[0][sample : sample + 1], torch.cat([zeros, zeros, upstream[1][[sample]]])
        for i, (place, part, dy) in enumerate(parts_of(of_sequences, given, lengths)):
            alone = named(tensors, results(WHOLE, part, dy))
            for name in ("output", *OF_TOKENS):
                assert torch.equal(found[name][[sample], place], alone[name]), name
            if i == 0:
                first = alone["initial_states"]
        assert torch.equal(found["initial_states"][[sample]], first)
        assert torch.equal(found["final_states"][[sample]], alone["final_states"])


def test_a_sample_does_not_depend_on_its_batch():
    shape = (3, 150, 5, 12)
    tensors, upstream = drawn(shape, 8, F32), upstream_of(shape, 8)
    found = named(tensors, results(WHOLE, tensors, upstream))
    own = {n: t[1:2] if n in OF_SAMPLES else t for n, t in tensors.items()}
    alone = named(tensors, results(WHOLE, own, [d[1:2] for d in upstream]))
    for name in ("output", "final_states", *OF_SAMPLES):
        assert torch.equal(found[name][1:2], alone[name]), name


def test_heads_and_columns_do_not_depend_on_others():
    tensors = drawn((2, 150, 6, 24), 8, F32, columns=True)
    whole = WHOLE(**tensors)
    heads = {n: t for n, t in tensors.items() if n in ("B", "C")}
    for name, dimension in (("x", 2), ("dt", 2), ("z", 2), ("initial_states", 1)):
        heads[name] = tensors[name].narrow(dimension, 1, 2)
    heads |= {n: tensors[n][1:3] for n in ("A", "D", "dt_bias")}
    output, states = WHOLE(**heads)
    assert torch.equal(output, whole[0][:, :, 1:3]) and torch.equal(states, whole[1][:, 1:3])
    columns = {n: tensors[n][..., 5:19] for n in ("x", "z", "D")}
    columns["initial_states"] = tensors["initial_states"][:, :, 5:19]
    output, states = WHOLE(**tensors | columns)
    assert torch.equal(output, whole[0][..., 5:19]) and torch.equal(states, whole[1][:, :, 5:19])


@pytest.mark.parametrize("length", [64, 128])
def test_calls_after_each_other_are_one_call(length):
    """Bit for bit, where a call ends with a chunk."""
    tensors = drawn((2, 300, 3, 10), 4, F32)
    whole, end = WHOLE(**tensors)
    states, outputs = tensors["initial_states"], []
    for begin in range(0, 300, length):
        part = {n: tensors[n][:, begin : begin + length] for n in OF_TOKENS}
        output, states = WHOLE(**tensors | part | {"initial_states": states})
        outputs.append(output)
    assert torch.equal(torch.cat(outputs, 1), whole)
    assert torch.equal(states, end)


def test_the_hint_of_a_chunk_size_changes_nothing():
    tensors = drawn((1, 100, 2, 5), 4, F32)
    found = [functional.mamba_chunk_scan(**tensors, chunk_size=size) for size in (1, 64, 256)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_any_strides():
    """Of tensors and of gradients."""
    shape = (2, 70, 4, 9)
    tensors, upstream = drawn(shape, 4, F32), upstream_of(shape, 4)
    expected = results(WHOLE, tensors, upstream)
    for name, tensor in tensors.items():
        wide = torch.full((*tensor.shape, 3), float("nan"))
        wide[..., 1] = tensor
        found = results(WHOLE, tensors | {name: wide[..., 1]}, upstream)
        assert all(map(torch.equal, found, expected)), name
        turned = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        found = results(WHOLE, tensors | {name: turned}, upstream)
        assert all(map(torch.equal, found, expected)), name
    turned = [d.transpose(1, -1).contiguous().transpose(1, -1) for d in upstream]
    assert all(map(torch.equal, results(WHOLE, tensors, turned), expected))


def test_memory_grows_with_the_length_alone():
    """A state of 64 tokens is saved, not that of each, and no products of pairs."""
    tensors = {n: t.requires_grad_() for n, t in drawn((1, 1024, 2, 8), 16, F32).items()}
    tensors = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    given, saved = {t.data_ptr() for t in tensors.values()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.mamba_chunk_scan(**tensors, chunk_size=256)
    own = [t for t in saved if t.data_ptr() not in given]
    assert [t.shape for t in own] == [(1, 1024 // 64, 2, 16, 8)]


@pytest.mark.parametrize("shape", [(0, 3, 2, 5), (2, 0, 2, 5), (2, 3, 0, 5)], ids=str)
def test_empty(shape):
    tensors, upstream = drawn(shape, 4, F32), upstream_of(shape, 4)
    output, last, *gradients = results(WHOLE, tensors, upstream)
    assert output.shape == shape and torch.equal(last, tensors["initial_states"])
    for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True):
        assert gradient.shape == tensor.shape
        is_last = name == "initial_states"
        assert torch.equal(gradient, upstream[1]) if is_last else not gradient.any()
    numbers = torch.zeros(shape[:2], dtype=torch.int64)
    found = functional.mamba_chunk_scan(**tensors, chunk_size=64, seq_idx=numbers)
    assert found.shape == shape


SHAPE = (2, 5, 4, 6)
RIGHT = {n: torch.ones_like(t) for n, t in drawn(SHAPE, 3, F32).items()} | {"chunk_size": 64}
ENDS = torch.tensor([0, 5], dtype=torch.int32)
OTHER = "have dtype float32, bfloat16 or float16 beside x, got float64"
TENSORS = [n for n in RIGHT if n != "chunk_size"]
WRONG = {
    "x must have shape (batch, length, heads, head_dim), got (5, 4, 6)": dict(x=RIGHT["x"][0]),
    "dt must have shape (2, 5, 4), got (2, 4, 4)": dict(dt=RIGHT["dt"][:, 1:]),
    "A must have shape (4,), got (3,)": dict(A=RIGHT["A"][1:]),
    "B must have shape (batch, length, groups, state), got (2, 5, 3)": dict(B=RIGHT["B"][:, :, 0]),
    "B must have shape (batch, length, groups, state), got (2, 5, 1, 0)": (
        dict(B=RIGHT["B"][..., :0])
    ),
    "B must have shape (2, 5, 1, 3), got (2, 4, 1, 3)": dict(B=RIGHT["B"][:, 1:]),
    "B must have a number of groups that divides 4 heads, got 3": (
        dict(B=torch.ones(2, 5, 3, 3), C=torch.ones(2, 5, 3, 3))
    ),
    "C must have shape (2, 5, 1, 3), got (2, 5, 2, 3)": dict(C=torch.ones(2, 5, 2, 3)),
    "D must have shape (4,), got (3,)": dict(D=RIGHT["D"][1:]),
    "D must have shape (4, 6), got (4, 5)": dict(D=torch.ones(4, 5)),
    "z must have shape (2, 5, 4, 6), got (2, 4, 4, 6)": dict(z=RIGHT["z"][:, 1:]),
    "dt_bias must have shape (4,), got (3,)": dict(dt_bias=RIGHT["D"][1:]),
    "initial_states must have shape (2, 4, 6, 3), got (1, 4, 6, 3)": (
        dict(initial_states=RIGHT["initial_states"][1:])
    ),
    **{f"{name} must {OTHER}": {name: RIGHT[name].to(F64)} for name in TENSORS if name != "x"},
    "x must have a batch of 1 beside cu_seqlens, got 2": dict(cu_seqlens=ENDS),
    "cu_seqlens must hold integers, got torch.float32": dict(cu_seqlens=ENDS.float()),
    "cu_seqlens must be an int32 tensor of shape (sequences + 1,), got (1, 2) of int32": (
        dict(cu_seqlens=ENDS[None])
    ),
    "seq_idx must hold integers, got torch.float32": dict(seq_idx=torch.ones(2, 5)),
    "seq_idx must have shape (2, 5), got (2, 4)": (
        dict(seq_idx=torch.ones(2, 4, dtype=torch.int64))
    ),
    "seq_idx must be given without cu_seqlens, got both of them": (
        dict(seq_idx=torch.ones(2, 5, dtype=torch.int64), cu_seqlens=ENDS)
    ),
    "chunk_size must be at least 1, got 0": dict(chunk_size=0),
    "dt_min must be at most dt_max, 1, got 2": dict(dt_limit=(2.0, 1.0)),
}


def test_messages():
    assert_refused(functional.mamba_chunk_scan, "mamba_chunk_scan", RIGHT, WRONG)
    one = {n: RIGHT[n][:1] if n in OF_SAMPLES else RIGHT[n] for n in RIGHT}
    wrong = {
        "cu_seqlens must begin with 0, got 1": dict(cu_seqlens=ENDS.clamp(1)),
        "cu_seqlens must end with the length of x, 5, got 4": dict(cu_seqlens=ENDS.clamp(0, 4)),
        "cu_seqlens must not decrease, got 2 after 3": (
            dict(cu_seqlens=torch.tensor([0, 3, 2, 5]), initial_states=None)
        ),
    }
    assert_refused(functional.mamba_chunk_scan, "mamba_chunk_scan", one, wrong)
    backward = {n: RIGHT[n] for n in TENSORS}
    backward |= dict(doutput=RIGHT["x"], dfinal_states=RIGHT["initial_states"])
    backward |= dict(states=torch.ones(2, 1, 4, 3, 6), cu_seqlens=None, dt_softplus=True)
    backward |= dict(dt_min=0.0, dt_max=1.0, grad_mask=511)
    wrong = {
        "doutput must have dtype float32 like x, got float16": dict(doutput=RIGHT["x"].to(F16)),
        "doutput must have shape (2, 5, 4, 6), got (2, 4, 4, 6)": dict(doutput=RIGHT["x"][:, 1:]),
        "dfinal_states must have shape (2, 4, 6, 3), got (1, 4, 6, 3)": (
            dict(dfinal_states=RIGHT["initial_states"][1:])
        ),
        "states must have shape (2, 1, 4, 3, 6), got (2, 2, 4, 3, 6)": dict(
            states=torch.ones(2, 2, 4, 3, 6)
        ),
        "states must have dtype float32, got float16": dict(
            states=torch.ones(2, 1, 4, 3, 6).half()
        ),
    }
    assert_refused(OPS.mamba_chunk_scan_backward, "mamba_chunk_scan_backward", backward, wrong)
