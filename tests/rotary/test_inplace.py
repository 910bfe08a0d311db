"""Query and key rotated in place: values, layouts, autograd, compilers, errors."""

import functools

import pytest
import torch

from onepass import functional
from tests.emulator.executors import everywhere
from tests.rotary.cases import BOTH, DTYPES, Case
from tests.support.allocations import allocated
from tests.support.dtypes import BF16, F32, F64
from tests.support.refused import assert_refused
from tests.support.results import assert_equal

RAW = torch.ops.onepass.rotary_forward_inplace


def checked(case: Case, tensors: dict) -> None:
    """The results, to the bit those of the call that makes new tensors, in the same tensors."""
    expected = functional.rotary_embedding(**{"key": None, **tensors}, **case.options)
    rows = {name: tensors[name] for name in BOTH if name in tensors}
    places = {name: x.data_ptr() for name, x in rows.items()}
    versions = {name: x._version for name, x in rows.items()}
    given = {"key": None, **tensors}
    found = functional.rotary_embedding(**given, **case.options, inplace=True)
    assert found[0] is given["query"] and found[1] is given["key"]
    for name, output in zip(BOTH, expected, strict=True):
        if output is not None:
            assert torch.equal(rows[name], output), name
            assert rows[name].data_ptr() == places[name] and rows[name]._version > versions[name]


# ---- values --------------------------------------------------------------------------------------


@everywhere
@pytest.mark.isa
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.grid(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [0, 2, 30, 64, 70])
@pytest.mark.parametrize("norms", [(), ("key",), BOTH], ids=str)
def test_values(dtype, rotary_dim, norms, interleaved):
    """Vectors of every level, with and without a tail; other columns stay, or are normalised."""
    for rest in (0, 3, 24):
        case = Case(
            dtype, tokens=7, head_dim=max(rotary_dim + rest, 2), rotary_dim=rotary_dim,
            interleaved=interleaved, norms=norms, weight_offset=0.5 * bool(norms),
        )  # fmt: skip
        checked(case, case.tensors())


MORE = {
    f"{first}{name}": changes | options
    for first, changes in (("", {}), ("tokens first, ", {"tokens_first": True}))
    for name, options in {
        "heads first": {},
        "normed": {"norms": BOTH},
        "seq_first": {"seq_first": True},
        "seq_first, normed": {"seq_first": True, "norms": BOTH},
        "positions": {"positions": "tokens", "half_width": True},
        "positions of a batch": {"positions": "batch", "table_dtype": F32, "dtype": BF16},
        "no key": {"key_heads": 0, "positions": "batch", "half_width": True},
        **{f"no {name}": {name: 0, "positions": "batch"}
           for name in ("batch", "heads", "tokens", "head_dim")},
    }.items()
}  # fmt: skip


@everywhere
@pytest.mark.isa
@pytest.mark.parametrize("name", MORE)
def test_any_order_and_missing_parts(name):
    case = Case(**MORE[name])
    checked(case, case.tensors())


# ---- layouts -------------------------------------------------------------------------------------


@everywhere
def test_packed_sequences():
    """Three dimensions."""
    cos, sin = torch.randn(2, 7, 16)
    rows = {"query": torch.randn(12, 4, 16), "key": torch.randn(12, 2, 16)}
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    checked(Case(seq_first=True), rows | {"cos": cos, "sin": sin, "positions": positions})


def test_any_strides_are_judged_right():
    """Against a list of all addresses, for tensors that share memory or not."""
    generator = torch.Generator().manual_seed(0)

    def draw(most: int) -> list[int]:
        return torch.randint(0, most, (3,), generator=generator).tolist()

    memory, places = torch.zeros(4096), torch.arange(4096)
    cos, sin, refused = torch.ones(2, 4), torch.zeros(2, 4), [0, 0]
    for _ in range(400):
        (a, b, _), (c, d, _), (begin, *_) = draw(160), draw(160), draw(600)
        layouts = (((2, 3, 2, 4), (a, b, 4 * (a % 5), 1), 0),
                   ((2, 2, 2, 4), (c, d, 4 * (d % 7), 1), begin))  # fmt: skip
        seen = [places.as_strided(*layout).flatten().tolist() for layout in layouts]
        wrong = [len(set(of)) < len(of) for of in seen]
        meet = bool(set(seen[0]) & set(seen[1]))
        message = (
            "query must have a place" if wrong[0] else "key must have a place" if wrong[1]
            else "key must lie apart from query" if meet else ""
        )  # fmt: skip
        query, key = (memory.as_strided(*layout) for layout in layouts)
        refused[bool(message)] += 1
        if not message:
            functional.rotary_embedding(query, key, cos, sin, inplace=True)
            continue
        with pytest.raises(RuntimeError, match=f"^rotary_embedding: {message}"):
            functional.rotary_embedding(query, key, cos, sin, inplace=True)
    assert min(refused) > 20


def test_nothing_is_allocated():
    """Except each thread's lines of cos and sin."""
    query, key, *tables = Case(batch=3, tokens=64, heads=8, head_dim=64).tensors().values()
    lines = torch.get_num_threads() * sum(table.nbytes for table in tables)
    assert allocated(RAW, query, key, *tables, None, 64, False) < lines + 1024 < query.nbytes
    tables = [table[:, :0] for table in tables]
    assert allocated(RAW, query, key, *tables, None, 0, False) == 0


# ---- contract ------------------------------------------------------------------------------------


def wrong_calls() -> dict:
    def expanded(*shape):
        return torch.ones(*shape).expand(2, 4, 5, 8)

    rows, both = torch.ones(2, 4, 5, 8), torch.randn(2, 4, 5, 16)
    flat = torch.randn(400)
    key_in_query = {"query": flat[:320].view(2, 4, 5, 8), "key": flat[80:].view(2, 4, 5, 8)}
    weight = {"query_weight": rows[0, 0, 0]}
    return {
        "query must be dense in its last dimension, it is rotated in place, got strides "
        "(320, 80, 16, 2)": {"query": both[..., ::2]},
        "query must have a place for each element, it is rotated in place, got shape (2, 4, 5, 8) "
        "with strides (0, 40, 8, 1)": {"query": expanded(1, 4, 5, 8)},
        "key must have a place for each element, it is rotated in place, got shape (2, 4, 5, 8) "
        "with strides (40, 0, 8, 1)": {"key": expanded(2, 1, 5, 8)},
        "key must lie apart from query, which is rotated in place, got shared memory": (
            key_in_query
        ),
        "cos must lie apart from query, which is rotated in place, got shared memory": (
            {"query": rows, "cos": rows[0, 0]}
        ),
        "query_weight must lie apart from query, which is rotated in place, got shared memory": (
            {"query": rows} | weight
        ),
        "positions must lie between 0 and 8, the last row of cos, got 9": (
            {"cos": torch.ones(9, 8), "sin": torch.ones(9, 8), "positions": torch.full((5,), 9)}
        ),
    }


@pytest.mark.parametrize("trained", [False, True])
def test_messages(trained):
    right = Case(head_dim=8, key_heads=4).tensors()
    wrong = wrong_calls()
    if trained:
        right["query"] = right["query"].requires_grad_().sin()
        # Norms are refused before other things.
        wrong = {text: change for text, change in wrong.items() if "query_weight" not in change}
    rotated = functools.partial(functional.rotary_embedding, inplace=True)
    assert_refused(rotated, "rotary_embedding", right, wrong)
    with pytest.raises(TypeError, match="^rotary_embedding: inplace must be True or False, got st"):
        functional.rotary_embedding(**right, inplace="yes")


def test_negative_views_are_refused_and_lazy_clones_get_memory_of_their_own():
    tensors = Case(key_heads=4).tensors()
    negative = tensors | {"key": torch._neg_view(tensors["key"])}
    with pytest.raises(RuntimeError, match="key must not be a negative view"):
        functional.rotary_embedding(**negative, inplace=True)
    checked(Case(key_heads=4), tensors | {"key": torch._lazy_clone(tensors["query"])})


# ---- autograd ------------------------------------------------------------------------------------


def _leaves(case: Case) -> tuple[dict, dict]:
    tensors = case.tensors()
    leaves = {n: tensors.pop(n).requires_grad_() for n in BOTH if n in tensors}
    return leaves, tensors


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("as_views", [False, True])
def test_gradients(as_views, dtype):
    """The same as of the call that returns new tensors, for operator results and their views."""
    case = Case(dtype, interleaved=True, rotary_dim=20)

    def gradients(inplace: bool) -> list[torch.Tensor]:
        leaves, tables = _leaves(case)
        rows = {name: leaf.sin() for name, leaf in leaves.items()}
        if as_views:
            packed = torch.cat(list(rows.values()), 1)
            rows = {"query": packed[:, :4], "key": packed.narrow(1, 4, 2)}
        outputs = functional.rotary_embedding(**rows, **tables, **case.options, inplace=inplace)
        if inplace:
            outputs = list(rows.values())
        loss = sum(x.sin().sum() for x in outputs)
        return [*(x.detach().clone() for x in outputs),
                *torch.autograd.grad(loss, list(leaves.values()))]  # fmt: skip

    assert_equal(gradients(True), gradients(False))


def test_nothing_of_the_rows_is_saved():
    leaves, tables = _leaves(Case(positions="tokens"))
    rows, saved = {name: leaf * 2 for name, leaf in leaves.items()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.rotary_embedding(**rows, **tables, inplace=True)
    kept = [tables[name].data_ptr() for name in ("cos", "sin", "positions")]
    assert [t.data_ptr() for t in saved] == kept * 2


@pytest.mark.parametrize("wanted", ["query", "key_weight"])
def test_norms_need_the_rows_for_their_backward(wanted):
    tensors = Case(norms=BOTH).tensors()
    tensors[wanted].requires_grad_()
    before = tensors["query"].detach().clone()
    message = "inplace must be False with a weight where a gradient is required"
    with pytest.raises(RuntimeError, match=f"^rotary_embedding: {message}"):
        functional.rotary_embedding(**tensors, inplace=True)
    assert torch.equal(tensors["query"], before)
    with torch.no_grad():
        functional.rotary_embedding(**tensors, inplace=True)
    assert not torch.equal(tensors["query"], before)


# ---- compilers and transforms --------------------------------------------------------------------


class Rotated(torch.nn.Module):
    def forward(self, query, key, cos, sin):
        return functional.rotary_embedding(query, key, cos, sin, inplace=True)[0].sin()


def exported(given: tuple, strict: bool):
    return torch.export.export(Rotated(), given, strict=strict).module()


PROGRAMS = {
    "compiled": lambda given: torch.compile(Rotated(), fullgraph=True, backend="aot_eager"),
    "exported": lambda given: exported(given, False),
    "exported strictly": lambda given: exported(given, True),
    "traced": lambda given: torch.jit.trace(Rotated(), given, check_trace=False),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_write_into_their_inputs(name):
    torch._dynamo.reset()
    tensors = Case().tensors()
    program = PROGRAMS[name](tuple(Case().tensors().values()))
    expected = functional.rotary_embedding(**tensors)
    assert torch.equal(program(*tensors.values()), expected[0].sin())
    assert_equal((tensors["query"], tensors["key"]), expected)
    if name == "compiled":
        tensors["query"] = tensors["query"][:1].expand(2, -1, -1, -1)
        with pytest.raises(RuntimeError, match="query must have a place for each element"):
            program(*tensors.values())


def test_transforms_are_refused_before_anything_is_written():
    tensors = Case().tensors()
    query, key = (torch.stack([tensors[name]] * 2) for name in BOTH)
    cos, sin = tensors["cos"], tensors["sin"]
    before = query.clone()

    def of(query, key):
        return functional.rotary_embedding(query, key, cos, sin, inplace=True)

    message = "^rotary_embedding: inplace must be False inside a transform of torch.func, got True"
    with pytest.raises(RuntimeError, match=message):
        torch.vmap(of)(query, key)
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(lambda q: of(q * 2, key[0])[0].sum())(query[0])
    with torch.no_grad(), pytest.raises(RuntimeError, match="must not be mapped over by vmap"):
        torch.vmap(of)(query, key)
    assert torch.equal(query, before)
