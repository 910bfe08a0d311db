"""Rotary embedding's errors, each message."""

import re

import pytest
import torch

from onepass import functional
from tests.rotary.cases import Case
from tests.support.refused import assert_refused

OP = torch.ops.onepass.rotary_forward
BACKWARD = torch.ops.onepass.rotary_backward


ONES = torch.ones(2, 4, 5, 8)  # the query's shape
TABLE, ROWS = {"cos": torch.ones(9, 8), "sin": torch.ones(9, 8)}, torch.zeros(5, dtype=torch.int64)
ROTARY_DIM = "rotary_dim must be even and at most head_dim, 8, got"
COS = "cos must have shape (5, columns) or (2, 5, columns), got"
POSITIONS = "positions must have shape (5,) or (2, 5), got"
META = "on the device of query, cpu, got meta"
WRONG = {
    "query must have 4 dimensions, or 3 without a batch, got shape (5, 8)": dict(query=ONES[0, 0]),
    "query must have dtype float32, bfloat16, float16 or float64, got int64": (
        dict(query=ONES.long())
    ),
    "key must have shape (2, 4, 5, 8), got (2, 4, 5, 6)": dict(key=ONES[..., :6]),
    "key must have dtype float32 like query, got bfloat16": dict(key=ONES.bfloat16()),
    f"key must be {META}": dict(key=ONES.to("meta")),
    f"{ROTARY_DIM} 7": dict(rotary_dim=7),
    f"{ROTARY_DIM} 10": dict(cos=torch.ones(5, 10), sin=torch.ones(5, 10)),
    "cos must have a column for each of 6 that are rotated, or for each pair, got shape (5, 8)": (
        dict(rotary_dim=6)
    ),
    "cos must have 2 dimensions with positions, got shape (1, 5, 8)": (
        dict(cos=ONES[:1, 0], positions=ROWS)
    ),
    f"{COS} (4, 8)": dict(cos=torch.ones(4, 8)),
    f"{COS} (3, 5, 8)": dict(cos=torch.ones(3, 5, 8)),
    "cos must have dtype float32, bfloat16 or float16 beside query, got float64": (
        dict(cos=ONES[0, 0].double())
    ),
    "cos must have dtype float64 like query, got float32": dict(query=ONES.double(), key=None),
    f"cos must be {META}": dict(cos=ONES[0, 0].to("meta")),
    "sin must have shape (5, 8), got (5, 4)": dict(sin=torch.ones(5, 4)),
    "sin must have dtype float32 like cos, got bfloat16": dict(sin=ONES[0, 0].bfloat16()),
    "positions must have dtype int64 or int32, got float32": TABLE | dict(positions=torch.ones(5)),
    f"{POSITIONS} (4,)": TABLE | dict(positions=ROWS[:4]),
    f"{POSITIONS} (3, 5)": TABLE | dict(positions=ROWS.expand(3, 5)),
    f"positions must be {META}": TABLE | dict(positions=ROWS.to("meta")),
    "key_weight must have shape (8,), got (6,)": dict(key_weight=torch.ones(6)),
    "key_weight must have dtype float32, bfloat16 or float16 beside query, got float64": (
        dict(key_weight=torch.ones(8).double())
    ),
    f"query_weight must be {META}": dict(query_weight=torch.ones(8, device="meta")),
    "key_weight must be given with key only, got one without": (
        dict(key=None, key_weight=torch.ones(8))
    ),
    "eps must be given with a weight only, got 0.001 without": dict(eps=1e-3),
    "weight_offset must be 0 without a weight, got 1": dict(weight_offset=1.0),
}


@pytest.mark.parametrize("trained", [False, True])
def test_messages(trained):
    """Autograd takes another path."""
    right = Case(head_dim=8, key_heads=4).tensors()
    right["query"].requires_grad_(trained)
    assert_refused(functional.rotary_embedding, "rotary_embedding", right, WRONG)


@pytest.mark.parametrize("position", [-1, 11, 2**31 - 1, 2**32])
def test_positions_without_a_row(position):
    tensors = Case(positions="batch").tensors()
    for kind in (torch.int64, torch.int32)[: 1 if position == 2**32 else 2]:
        tensors["positions"] = tensors["positions"].to(kind)
        tensors["positions"][1, 3] = position
        message = rf"positions must lie between 0 and 10, the last row of cos, got {position}$"
        with pytest.raises(RuntimeError, match="^rotary_embedding: " + message):
            functional.rotary_embedding(**tensors)


@pytest.mark.parametrize("shape", [(), (8,), (5, 2, 8), (2, 5, 2, 2, 8)], ids=str)
def test_dimensions_of_key_with_tokens_first(shape):
    tensors = Case(head_dim=8, seq_first=True).tensors() | {"key": torch.ones(shape)}
    message = rf"key must have shape \(2, \d, 5, 8\), got {re.escape(str(shape))}$"
    with pytest.raises(RuntimeError, match=f"^rotary_embedding: {message}"):
        functional.rotary_embedding(**tensors, seq_first=True)


def test_operators_of_a_raw_call():
    q, cos, weight = torch.ones(2, 4, 5, 8), torch.ones(5, 8), torch.ones(8)
    rest, options = (None, 8, False), (False, False, weight, None)
    query, key = OP(q, None, cos, cos, *rest, False, False, False)
    assert query.shape == q.shape and key.shape == (0,)
    for op in (OP, torch.ops.onepass.rotary_forward_check):
        with pytest.raises(RuntimeError, match="rotary_embedding: query must have 4 dimensions"):
            op(q[0], None, cos, cos, *rest, False, False, False)
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
    before, message = tensors["query"].clone(), f"^rotary_embedding: {name} must not require a grad"
    for inplace in (False, True)[: 1 if norms else 2]:
        with pytest.raises(RuntimeError, match=message):
            functional.rotary_embedding(**tensors, inplace=inplace)
    assert torch.equal(tensors["query"], before)
    with torch.no_grad():
        functional.rotary_embedding(**tensors)

    def of(table):
        return functional.rotary_embedding(**tensors | {name: table})[0].sum()

    stack = tensors[name].detach().expand(3, -1, -1)
    with pytest.raises(RuntimeError, match=f"{name} must not require a gradient, got one that"):
        torch.func.grad(lambda tables: torch.vmap(of)(tables).sum())(stack)
