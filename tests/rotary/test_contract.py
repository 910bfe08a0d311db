"""Rotary embedding's errors, each message."""

from __future__ import annotations

import re

import pytest
import torch

from onepass import functional
from tests.rotary.cases import Case

OP = torch.ops.onepass.rotary_forward
BACKWARD = torch.ops.onepass.rotary_backward


def wrong_calls(device: str) -> dict:
    """Calls with one wrong argument each, and their messages."""
    other = "meta" if device == "cpu" else "cpu"

    def ones(*shape, dtype=torch.float32, device=device):
        return torch.ones(shape, dtype=dtype, device=device)

    def ints(*shape, dtype=torch.int64, device=device):
        return torch.zeros(shape, dtype=dtype, device=device)

    table, rows = {"cos": ones(9, 8), "sin": ones(9, 8)}, ints(5)
    of_table = {**table, "positions": rows}
    return {
        "query must have 4 dimensions, or 3 without a batch, got shape (5, 8)": (
            dict(query=ones(5, 8))
        ),
        "query must have dtype float32, bfloat16, float16 or float64, got int64": (
            dict(query=ones(2, 4, 5, 8).long())
        ),
        "key must have shape (2, 3, 5, 8), got (2, 3, 5, 6)": dict(key=ones(2, 3, 5, 6)),
        "key must have shape (2, 4, 5, 8), got (5, 8)": dict(key=ones(5, 8)),
        "key must have dtype float32 like query, got bfloat16": (
            dict(key=ones(2, 3, 5, 8, dtype=torch.bfloat16))
        ),
        f"key must be on the device of query, {device}, got {other}": (
            dict(key=ones(2, 3, 5, 8, device=other))
        ),
        "rotary_dim must be even and at most head_dim, 8, got 7": dict(rotary_dim=7),
        "rotary_dim must be even and at most head_dim, 8, got 10": (
            dict(cos=ones(5, 10), sin=ones(5, 10))
        ),
        "rotary_dim must be even and at most head_dim, 8, got -2": dict(rotary_dim=-2),
        "cos must have a column for each of 6 that are rotated, or for each pair, got shape (5, 8)":
            dict(rotary_dim=6),
        "cos must have 2 dimensions with positions, got shape (1, 5, 8)": (
            dict(cos=ones(1, 5, 8), positions=rows)
        ),
        "cos must have shape (5, columns) or (2, 5, columns), got (4, 8)": dict(cos=ones(4, 8)),
        "cos must have shape (5, columns) or (2, 5, columns), got (3, 5, 8)": (
            dict(cos=ones(3, 5, 8))
        ),
        "cos must have shape (5, columns) or (2, 5, columns), got (8,)": dict(cos=ones(8)),
        "cos must have dtype float32, bfloat16 or float16 beside query, got float64": (
            dict(cos=ones(5, 8).double())
        ),
        "cos must have dtype float64 like query, got float32": (
            dict(query=ones(2, 4, 5, 8).double(), key=None)
        ),
        f"cos must be on the device of query, {device}, got {other}": (
            dict(cos=ones(5, 8, device=other))
        ),
        "sin must have shape (5, 8), got (5, 4)": dict(sin=ones(5, 4)),
        "sin must have dtype float32 like cos, got bfloat16": dict(sin=ones(5, 8).bfloat16()),
        "positions must have dtype int64 or int32, got float32": (
            of_table | dict(positions=ones(5))
        ),
        "positions must have shape (5,) or (2, 5), got (4,)": of_table | dict(positions=ints(4)),
        "positions must have shape (5,) or (2, 5), got (3, 5)": (
            of_table | dict(positions=ints(3, 5))
        ),
        f"positions must be on the device of query, {device}, got {other}": (
            of_table | dict(positions=ints(5, device=other))
        ),
        "query_weight must have shape (8,), got (4, 8)": dict(query_weight=ones(4, 8)),
        "key_weight must have shape (8,), got (6,)": dict(key_weight=ones(6)),
        "key_weight must have dtype float32, bfloat16 or float16 beside query, got float64": (
            dict(key_weight=ones(8).double())
        ),
        f"query_weight must be on the device of query, {device}, got {other}": (
            dict(query_weight=ones(8, device=other))
        ),
        "key_weight must be given with key only, got one without": (
            dict(key=None, key_weight=ones(8))
        ),
        "eps must be given with a weight only, got 0.001 without": dict(eps=1e-3),
        "weight_offset must be 0 without a weight, got 1": dict(weight_offset=1.0),
    }  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("message", wrong_calls("cpu"))
def test_messages(message, device):
    number = list(wrong_calls("cpu")).index(message)
    message, wrong = list(wrong_calls(device).items())[number]
    made = Case(head_dim=8, key_heads=3).tensors()
    right = {name: tensor.to(device) for name, tensor in made.items()}
    functional.rotary_embedding(**right)
    trained = right | {"query": right["query"].clone().requires_grad_()}
    for given in (right, trained):  # autograd takes another path
        with pytest.raises(RuntimeError) as error:
            functional.rotary_embedding(**given | wrong)
        assert str(error.value) == f"rotary_embedding: {message}"


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("position", [-1, 11, 2**31 - 1])
def test_positions_without_a_row(position, kind):
    case = Case(positions="batch")
    tensors = case.tensors()
    tensors["positions"] = tensors["positions"].to(kind)
    tensors["positions"][1, 3] = position
    message = rf"positions must lie between 0 and 10, the last row of cos, got {position}$"
    with pytest.raises(RuntimeError, match="^rotary_embedding: " + message):
        functional.rotary_embedding(**tensors)


def test_positions_beyond_32_bits():
    tensors = Case(positions="tokens").tensors()
    tensors["positions"][2] = 2**32
    with pytest.raises(RuntimeError, match="got 4294967296$"):
        functional.rotary_embedding(**tensors)


@pytest.mark.parametrize("shape", [(), (8,), (5, 2, 8), (2, 5, 2, 2, 8)], ids=str)
def test_dimensions_of_key_with_tokens_first(shape):
    tensors = Case(head_dim=8, seq_first=True).tensors() | {"key": torch.ones(shape)}
    message = rf"key must have shape \(2, \d, 5, 8\), got {re.escape(str(shape))}$"
    with pytest.raises(RuntimeError, match=f"^rotary_embedding: {message}"):
        functional.rotary_embedding(**tensors, seq_first=True)


def test_operators_of_a_raw_call():
    q, cos = torch.ones(2, 4, 5, 8), torch.ones(5, 8)
    rest = (None, 8, False, False, False, False)
    query, key = OP(q, None, cos, cos, *rest)
    assert query.shape == q.shape and key.shape == (0,)
    for op in (OP, torch.ops.onepass.rotary_forward_check):
        with pytest.raises(RuntimeError, match="rotary_embedding: query must have 4 dimensions"):
            op(q[0], None, cos, cos, *rest)


def test_operators_of_a_raw_call_with_weights():
    q, cos, weight = torch.ones(2, 4, 5, 8), torch.ones(5, 8), torch.ones(8)
    rest = (None, 8, False)
    options = (False, False, weight, None)
    with pytest.raises(RuntimeError, match="eps must be given with a weight, got none"):
        OP(q, None, cos, cos, *rest, False, *options)
    with pytest.raises(RuntimeError, match="transposed must be False with a weight, got True"):
        OP(q, None, cos, cos, *rest, True, *options, 1e-6)
    found = BACKWARD(q, None, q, None, cos, cos, *rest, *options, 1e-6, 0.0, 4)
    assert [x.shape for x in found] == [(0,), (0,), (8,), (0,)]
    wrong = {
        "query must be given with its weight, got none": (q, None),
        r"query must have shape \(2, 4, 5, 8\), got \(2, 4, 5, 6\)": (q, torch.ones(2, 4, 5, 6)),
        "query must have dtype float32 like dquery_out, got bfloat16": (q, q.bfloat16()),
        r"dquery_out must have 4 dimensions, or 3 .*, got shape \(4, 5, 8\)": (q[0], q),
    }
    for op in (BACKWARD, torch.ops.onepass.rotary_backward_check):
        for message, (gradient, query) in wrong.items():
            with pytest.raises(RuntimeError, match=f"^rotary_embedding_backward: {message}$"):
                op(gradient, None, query, None, cos, cos, *rest, *options, 1e-6, 0.0, 5)


@pytest.mark.parametrize("norms", [(), ("query", "key")])
@pytest.mark.parametrize("name", ["cos", "sin"])
def test_tables_get_no_gradient(name, norms):
    tensors = Case(norms=norms).tensors()
    tensors[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f"^rotary_embedding: {name} must not require a gradie"):
        functional.rotary_embedding(**tensors)
    with torch.no_grad():
        functional.rotary_embedding(**tensors)

    def through_vmap(table):
        def of(table):
            return functional.rotary_embedding(**tensors | {name: table})[0]

        return torch.vmap(of)(table.expand(3, -1, -1)).sum()

    with pytest.raises(RuntimeError, match=f"{name} must not require a gradient, got one that"):
        torch.func.grad(through_vmap)(tensors[name].detach())


@pytest.mark.parametrize(
    "name",
    [
        "interleaved",
        "seq_first",
        "rotary_dim",
        "query",
        "cos",
        "key_weight",
        "eps",
        "weight_offset",
    ],
)
def test_types(name):
    with pytest.raises(TypeError, match=f"^rotary_embedding: {name} must be "):
        functional.rotary_embedding(**Case().tensors() | {name: "yes"})
