"""Attention over sequences of different lengths: packed, partly used, in pages."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from onepass import functional, numerics
from tests.attention.cases import (
    DTYPES,
    GRADIENTS,
    Case,
    assert_same,
    base,
    check,
    cumulated,
    definition,
    forward,
    int32,
    ours,
)
from tests.emulator.executors import everywhere
from tests.support.dtypes import BF16, F32, F64

pytestmark = [pytest.mark.isa, pytest.mark.emulator_grid]

CAUSAL = dict(window_right=0, bottom_right=True)

# Sequences of no row, of one row, of a tile and one more; more keys than queries and fewer.
LENGTHS = {
    "mixed": ((1, 1), (129, 64), (0, 7), (64, 200), (7, 0), (0, 0), (33, 33)),
    "one": ((70, 90),),
    "alike": ((64, 64),) * 3,
    "nothing": ((0, 0), (0, 0)),
    "no keys": ((3, 0), (5, 0)),
    "no queries": ((0, 4), (0, 9)),
    "many": tuple((n % 5, n % 7) for n in range(9)),
}
lengths = pytest.mark.parametrize("name", LENGTHS)


@lengths
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.grid
def test_lengths(name, dtype):
    for storage in ("packed", "packed used", "used"):
        case = Case(dtype, 32, heads=2, kv_heads=1, storage=storage, lengths=LENGTHS[name])
        for options in ({}, CAUSAL, dict(window_left=20, window_right=3, bottom_right=True)):
            check(replace(case, **options))


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
@pytest.mark.grid
def test_page_sizes(page_size, dtype):
    sequences = ((1, 130), (9, 16), (4, 0), (0, 20), (64, 257))
    case = Case(dtype, 40, 24, heads=4, kv_heads=2, storage="paged", lengths=sequences,
                page_size=page_size)  # fmt: skip
    for options in ({}, CAUSAL, CAUSAL | dict(window_left=30, alibi="", sinks=dtype)):
        check(replace(case, **options))


@everywhere
def test_pages_may_be_shared():
    """A prefix that several sequences share."""
    case = Case(F32, 32, storage="paged", lengths=((5, 40), (9, 24)), page_size=8)
    t = case.tensors()
    t["block_table"][1, :2] = t["block_table"][0, :2]
    found, ref, stock = forward(case, t), definition(case, t, F64), base(case, t)
    for name in ref:
        numerics.assert_close(found[name], ref[name], stock[name], name)


@everywhere
def test_entries_of_the_block_table_beyond_the_keys_are_not_looked_at():
    case = Case(F32, 32, storage="paged", lengths=((5, 40), (9, 24)), page_size=8)
    t = case.tensors()
    other = t | dict(block_table=t["block_table"].clone())
    other["block_table"][0, 5:], other["block_table"][1, 3:] = -1, 2**30
    assert_same(ours(case, other), ours(case, t))


@everywhere
def test_bounds_may_be_larger_than_the_longest():
    case = Case(F32, 32, storage="packed", lengths=((40, 70), (33, 12)), **CAUSAL)
    t = case.tensors()
    assert_same(ours(case, t, max_q=1000, max_k=200), ours(case, t))


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("storage", ["packed", "packed used", "used", "paged"])
def test_a_sequence_does_not_depend_on_the_others(storage, dtype):
    """Bit for bit, wherever the sequence begins in memory."""
    sequences = ((1, 200), (130, 64), (64, 130), (70, 70))
    case = Case(dtype, 40, heads=4, kv_heads=2, storage=storage, lengths=sequences, alibi="",
                **CAUSAL)  # fmt: skip
    t = case.tensors()
    whole = forward(case, t)
    for b in range(len(sequences)):
        part = dict(t)
        if case.packed:
            rows = slice(*t["cu_seq_q"][b : b + 2].tolist())
            part["query"] = t["query"][rows]
            part["cu_seq_q"] = cumulated([rows.stop - rows.start])
            expected = {name: result[:, rows] for name, result in whole.items() if "lse" in name}
            expected["output"] = whole["output"][rows]
        else:
            part["query"] = t["query"][b : b + 1]
            expected = {name: result[b : b + 1] for name, result in whole.items()}
        if "cu_seq_k" in t:
            keys = slice(*t["cu_seq_k"][b : b + 2].tolist())
            part["key"], part["value"] = t["key"][keys], t["value"][keys]
            part["cu_seq_k"] = cumulated([keys.stop - keys.start])
        elif storage == "used":
            part["key"], part["value"] = t["key"][b : b + 1], t["value"][b : b + 1]
        for name in ("seqused_k", "block_table"):
            if name in t:
                part[name] = t[name][b : b + 1]
        assert_same(forward(case, part), expected, f"sequence {b}")


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_and_packed_keys_are_alike(dtype):
    """Bit for bit."""
    case = Case(dtype, 40, heads=4, kv_heads=2, storage="packed", page_size=16, alibi="",
                lengths=((3, 130), (70, 70), (9, 200)), **CAUSAL)  # fmt: skip
    paged, t = replace(case, storage="paged"), case.tensors()
    slopes = dict(alibi_slopes=t["alibi_slopes"])
    found, expected = forward(paged, paged.tensors() | slopes), forward(case, t)
    for name in ("output", "lse"):
        assert torch.equal(found[name], expected[name]), name


# ---- the function -------------------------------------------------------------------------------


def varlen(case: Case, t, **changes):
    arguments = dict(
        scale=case.scale, window_size=(case.window_left, case.window_right), softcap=case.softcap,
        enable_gqa=case.heads != (case.kv_heads or case.heads), return_lse=True,
    )  # fmt: skip
    arguments |= {n: t[n] for n in ("seqused_k", "block_table", "alibi_slopes", "sinks") if n in t}
    arguments["attn_mask"] = t.get("bias", t.get("mask"))
    return functional.varlen_attention(
        t["query"], t["key"], t["value"], t["cu_seq_q"], t.get("cu_seq_k"),
        case.options()["max_q"], case.options()["max_k"], **arguments | changes,
    )  # fmt: skip


FUNCTION = Case(F32, 32, heads=4, kv_heads=2, storage="packed", dlse=True,
                lengths=((40, 70), (33, 12), (5, 9)), **CAUSAL)  # fmt: skip


@everywhere
@pytest.mark.parametrize(
    "options",
    [{}, dict(bias="hq"), dict(mask="b"), dict(alibi="b", sinks=F32, softcap=2.0),
     dict(window_left=9), dict(window_right=-1), dict(dtype=BF16), dict(kv_heads=4)],
    ids=str,
)  # fmt: skip
def test_varlen_attention_is_the_op(options):
    case = replace(FUNCTION, **options)
    t = case.tensors()
    expected = ours(case, t)
    inputs = {n: t[n].detach().requires_grad_() for n in GRADIENTS if n in t}
    output, lse = varlen(case, t | inputs)
    gradients = torch.autograd.grad((output, lse), inputs.values(), (t["doutput"], t["dlse"]))
    found = dict(output=output, lse=lse)
    found |= {f"d{n}": g for n, g in zip(inputs, gradients, strict=True)}
    assert_same(found, expected)
    with torch.no_grad():
        assert torch.equal(varlen(case, t, return_lse=False), expected["output"])


@pytest.mark.parametrize("left", [-1, 9])
def test_is_causal_is_bottom_right_and_limits_a_window(left):
    case = replace(FUNCTION, dlse=False)
    t = case.tensors()
    expected = forward(replace(case, window_left=left), t)["output"]
    for right in (-1, 0, 5):
        found = varlen(case, t, is_causal=True, window_size=(left, right), return_lse=False)
        assert torch.equal(found, expected)


def test_dropout_of_varlen_attention():
    case = replace(FUNCTION, dropout_p=0.3)
    t = case.tensors()
    torch.manual_seed(5)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64)
    torch.manual_seed(5)
    output, _ = varlen(case, t, dropout_p=0.3)
    assert torch.equal(output, forward(case, t | dict(seed=seed))["output"])


def test_torchs_arguments_come_first_and_mean_the_same():
    torchs = inspect.signature(varlen_attn).parameters
    mine = inspect.signature(functional.varlen_attention).parameters
    positional = [n for n, p in torchs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [n for n, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert {n: p.default for n, p in mine.items() if n in torchs} == {
        n: p.default for n, p in torchs.items()
    }
    case = replace(FUNCTION, dlse=False)
    t = case.tensors()
    output, lse = varlen(case, t)
    aux = varlen(case, t, return_lse=False, return_aux=AuxRequest(lse=True))
    assert torch.equal(aux[0], output) and torch.equal(aux[1], lse)
    assert torch.equal(varlen(case, t, return_lse=False, return_aux=AuxRequest()), output)
    assert torch.equal(varlen(case, t, num_splits=-7)[0], output)


@pytest.mark.parametrize("trained", [(), ("query",), ("key", "value"), ("query", "key", "value")])
def test_pages_in_training(trained):
    """Pages are gathered first, and gradients are scattered back to the rows' places."""
    case = Case(F64, 16, heads=4, kv_heads=2, storage="paged", page_size=8,
                lengths=((5, 40), (9, 24), (3, 3)), **CAUSAL)  # fmt: skip
    t = case.tensors()
    t["key"], t["value"] = t["key"].nan_to_num(9.0), t["value"].nan_to_num(9.0)
    t["block_table"][1, 0] = t["block_table"][0, 0]  # shared
    t["block_table"][:, -1] = int32([-1, 2**30, -5])  # of no keys
    leaves = {n: t[n].clone().requires_grad_() for n in trained}
    output, lse = varlen(case, t | leaves)
    numerics.assert_close(output, forward(case, t)["output"], output)
    numerics.assert_close(lse, forward(case, t)["lse"], lse)
    if not trained:
        return
    copies = {n: t[n].clone().requires_grad_() for n in trained}
    every = t | copies
    dense = dict(every)
    for name in ("key", "value"):
        rows = [
            every[name][t["block_table"][b, : -(-keys // 8)].long()].flatten(0, 1)[:keys]
            for b, (_, keys) in enumerate(case.sequences)
        ]
        dense[name] = torch.cat(rows)
    dense["cu_seq_k"] = cumulated([keys for _, keys in case.sequences])
    del dense["block_table"], dense["seqused_k"]
    expected, _ = varlen(case, dense)
    pairs = [
        torch.autograd.grad(o.square().sum(), list(of.values()))
        for o, of in ((output, leaves), (expected, copies))
    ]
    for found, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(found, wanted)
