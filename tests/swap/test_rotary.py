"""swap, kind "rotary": functions with cos and sin that a forward calls, by a numeric test."""

import pickle
import types

import torch
from torch import nn

import onepass
from onepass import _dispatch_log, numerics
from onepass._policy import small_calls
from tests.swap.reported import kernels

HEADS, KEY_HEADS, HEAD_DIM, TOKENS = 4, 2, 16, 65
LEAST = dict(small_calls.LEAST_ROTARY)


def swap(model: nn.Module, **options) -> onepass.Report:
    return onepass.swap(model, kinds="rotary", **options)


def ours(model: nn.Module, *args) -> int:
    """The number of rotations that ours computes in a call."""
    return kernels(lambda: model(*args), "rotary_forward_kernel")


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


# ---- functions of models -------------------------------------------------------------------------


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def neighbours(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    dtype = q.dtype
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q, k = q.float(), k.float()
    found = q * cos + rotate_pairs(q) * sin, k * cos + rotate_pairs(k) * sin
    return tuple(x.to(dtype) for x in found)


def half_of_the_table(q, k, cos, sin):
    cos, sin = (x[:, None, :, : x.shape[-1] // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
    return q * cos + rotate_pairs(q) * sin, k * cos + rotate_pairs(k) * sin


def set_apart(q, k, cos, sin, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    cos, sin = (x[..., :half].unsqueeze(unsqueeze_dim) for x in (cos, sin))

    def rotated(x):
        first, second = x[..., ::2], x[..., 1::2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return rotated(q), rotated(k)


def tokens_first(q, k, cos, sin):
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    found = (x.float() * cos + rotate_half(x.float()) * sin for x in (q, k))
    return tuple(x.to(q.dtype) for x in found)


def one_at_a_time(x, sin, cos, unsqueeze_dim=1):
    return x * cos.unsqueeze(unsqueeze_dim) + rotate_half(x) * sin.unsqueeze(unsqueeze_dim)


def scores(q, k, heads: int = -3):
    q, k = q.movedim(heads, -3), k.movedim(heads, -3)
    return q @ k.repeat_interleave(HEADS // KEY_HEADS, -3).mT


class Attention(nn.Module):
    """A layer's scores."""

    def __init__(self, head_dim: int = HEAD_DIM):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(32, HEADS * head_dim)
        self.k_proj = nn.Linear(32, KEY_HEADS * head_dim)

    def heads(self, x):
        shape = (*x.shape[:-1], -1, self.head_dim)
        return (p(x).view(shape).transpose(-2, -3) for p in (self.q_proj, self.k_proj))

    def forward(self, x, cos, sin):
        return scores(*apply_rotary_pos_emb(*self.heads(x), cos, sin))


class Neighbours(Attention):
    def forward(self, x, cos, sin):
        return scores(*neighbours(*self.heads(x), sin=sin, cos=cos))


class HalfOfTheTable(Attention):
    @torch.enable_grad()
    def forward(self, x, cos, sin):
        return scores(*half_of_the_table(*self.heads(x), cos, sin))


class SetApart(Attention):
    """The closure has the class."""

    def forward(self, x, cos, sin):
        return scores(*set_apart(*super().heads(x), cos, sin))


class TokensFirst(Attention):
    def forward(self, x, cos, sin):
        q, k = (heads.transpose(1, 2)[0] for heads in self.heads(x))
        return scores(*tokens_first(q, k, cos[0], sin[0]), heads=1)


class OtherDimension(Attention):
    def forward(self, x, cos, sin):
        q, k = (heads.transpose(1, 2) for heads in self.heads(x))
        return scores(*apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), heads=2)


class InOneClosure(Attention):
    """The global is read where a function is defined in the forward."""

    def forward(self, x, cos, sin):
        return scores(*(one_at_a_time(heads, sin, cos) for heads in self.heads(x)))


# Rotations of a part of the columns, and by a number for each pair, are in models of transformers.
FOUND = (
    Attention, Neighbours, HalfOfTheTable, SetApart, TokensFirst, OtherDimension, InOneClosure,
)  # fmt: skip


def inputs(rows: int = 2, table_rows: int | None = None, dtype=torch.float32):
    """x, cos, sin; every column has its own angle, the most general case."""
    rows_of = rows if table_rows is None else table_rows
    angle = torch.randn(rows_of, TOKENS, HEAD_DIM)
    x = torch.randn(rows, TOKENS, 32)
    return x.to(dtype), angle.cos().to(dtype), angle.sin().to(dtype)


# ---- functions that are no rotation --------------------------------------------------------------


def other_sign(q, k, cos, sin):
    return tuple(x * cos[:, None] - rotate_half(x) * sin[:, None] for x in (q, k))


def key_alone(q, k, cos, sin):
    return q, k * cos[:, None] + rotate_half(k) * sin[:, None]


def scaled(q, k, cos, sin):
    return tuple(1.1 * x for x in apply_rotary_pos_emb(q, k, cos, sin))


def dropping(q, k, cos, sin):
    return tuple(nn.functional.dropout(x, 1e-9, True) for x in apply_rotary_pos_emb(q, k, cos, sin))


def in_place(q, k, cos, sin):
    found = apply_rotary_pos_emb(q, k, cos, sin)
    k.data.zero_()
    return found


def without_gradient(q, k, cos, sin):
    return apply_rotary_pos_emb(q.detach() + 0 * q, k, cos, sin)


def of_small_heads(q, k, cos, sin):
    return apply_rotary_pos_emb(q, k, cos, sin if q.shape[-1] < HEAD_DIM else cos)


def counting(q, k, cos, sin, calls=[0]):  # noqa: B006
    calls[0] += 1e-13
    return apply_rotary_pos_emb(q + calls[0], k, cos, sin)


def in_bfloat16(q, k, cos, sin):
    """Rotates float32 in bfloat16, and float64 exactly."""
    if q.dtype is torch.float32:
        return tuple(x.bfloat16().float() for x in apply_rotary_pos_emb(q, k, cos, sin))
    return apply_rotary_pos_emb(q, k, cos, sin)


def failing(q, k, cos, sin):
    raise ValueError("not like this")


def of_three(q, k, v, cos, sin):
    return (*apply_rotary_pos_emb(q, k, cos, sin), v)


def with_sections(q, k, cos, sin, sections):
    return apply_rotary_pos_emb(q, k, cos, sin)


def one_of_two(q, k, cos, sin):
    return apply_rotary_pos_emb(q, k, cos, sin)[0]


REFUSED = {
    other_sign: "is no rotation",
    key_alone: "is no rotation",
    scaled: "is no rotation",
    dropping: "draws random numbers",
    in_place: "changes its arguments",
    without_gradient: "is no rotation",
    of_small_heads: "rotates heads of 16 columns",
    counting: "keeps state",
    in_bfloat16: "is another formula in float32",
    failing: "is no rotation of columns that onepass computes: fails: not like this",
    of_three: "takes (q, k, v, cos, sin)",
    with_sections: "takes an argument 'sections' too",
    one_of_two: "is no rotation of columns that onepass computes: does not return 2 tensors",
}


class Caller(Attention):
    def forward(self, x, cos, sin):
        return scores(*function(*self.heads(x), cos, sin))  # noqa: F821


def caller(function) -> Attention:
    """A layer that calls the function, by a global name."""
    names = {**globals(), "function": function}
    forward = types.FunctionType(Caller.forward.__code__, names, "forward")
    return type("Caller", (Caller,), {"forward": forward})()


def test_the_name_decides_nothing(monkeypatch):
    assert swap(caller(apply_rotary_pos_emb)).swapped
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", other_sign)
    assert not swap(Attention()).swapped


def test_a_function_that_stays_is_named_in_the_notes():
    class Both(Attention):
        def forward(self, x, cos, sin):
            q, k = apply_rotary_pos_emb(*self.heads(x), cos, sin)
            return scaled(q, k, cos, sin)

    model = Both()
    report = swap(model, strict=True)
    assert any("scaled is no rotation" in note for note in report.notes)
    assert ours(model, *inputs()) == 1


def test_modules_of_the_package_kernels_are_functions_too():
    class Func(nn.Module):
        kernel_layer_name = "rotary_pos_emb"

        def forward(self, q, k, cos, sin, unsqueeze_dim=1):
            return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    model, tensors = caller(Func()), inputs()
    forward = type(model).forward
    swap(model, strict=True)
    assert ours(model, *tensors) == 1
    found, expected = model(*tensors), forward(model, *tensors)
    exact = forward(model.double(), *(x.double() for x in tensors))
    numerics.assert_close(found, exact, expected)


# ---- calls ---------------------------------------------------------------------------------------


class Passing(nn.Module):
    def forward(self, *args, **named):
        return apply_rotary_pos_emb(*args, **named)


class PassingWithPositions(nn.Module):
    def forward(self, *args, **named):
        return neighbours(*args, **named)


def heads(dtype=torch.float32, table_dtype=None, tokens=TOKENS):
    q, k = (torch.randn(2, n, tokens, HEAD_DIM, dtype=dtype) for n in (HEADS, KEY_HEADS))
    cos, sin = (torch.randn(2, tokens, HEAD_DIM, dtype=table_dtype or dtype) for _ in range(2))
    return q, k, cos, sin


def test_which_calls_are_ours():
    """Those that were proven; their values, and those of others, are in odd_attention."""
    model, other = Passing(), PassingWithPositions()
    swap(model), swap(other)
    for dtypes in (
        (torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32),
        (torch.float16, None), (torch.float16, torch.float32), (torch.float64, None),
    ):  # fmt: skip
        assert ours(model, *heads(*dtypes)) == 1
    q, k, cos, sin = heads()
    for args in (
        (q, k, cos.clone().requires_grad_(), sin),  # needs the table's gradient
        (q, k[:, :, :1], cos, sin),  # other tokens, which torch expands
        (q, k, cos[:, :1], sin[:, :1]),
        (q, k, cos, sin[:1]),
        (q, k.double(), cos, sin),
        (q[0], k[0], cos[0], sin[0], -3),
        (q.to(torch.complex64), k.to(torch.complex64), cos, sin),
    ):
        assert not ours(model, *args)
    assert ours(other, q, k, cos, sin, None) == 1
    assert not ours(other, q, k, cos, sin, torch.arange(TOKENS))


def by_a_product(q, k, cos, sin):
    """The sum over both terms is a product of matrices, which autocast computes in 16 bits."""
    cos, sin = cos[:, None], sin[:, None]

    def rotated(x):
        terms = torch.stack((x * cos, rotate_half(x) * sin), -1)
        return torch.matmul(terms, terms.new_ones(2, 1)).squeeze(-1)

    return rotated(q), rotated(k)


def test_functions_that_autocast_changes_are_theirs_under_it():
    model, tensors = caller(by_a_product), inputs()
    swap(model, strict=True)
    assert ours(model, *tensors) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert not ours(model, *tensors)


class PassingApart(nn.Module):
    def forward(self, *args):
        return set_apart(*args)


def test_small_calls_that_set_columns_apart_are_theirs(one_thread, monkeypatch):
    monkeypatch.setattr(small_calls, "LEAST_ROTARY", LEAST)
    model, other = PassingApart(), Passing()
    note = small_calls.ROTARY_NOTE
    assert note in swap(model).notes and note not in swap(other).notes
    columns = 2 * (HEADS + KEY_HEADS) * HEAD_DIM
    for training in (True, False):
        with torch.set_grad_enabled(training):
            least = -(-LEAST[torch.float32][not training] // columns)
            for tokens in (least, least - 1):
                assert ours(model, *heads(tokens=tokens)) == (tokens == least)
    tensors = heads(tokens=1)
    assert ours(other, *tensors) == 1
    with _dispatch_log.record() as calls:
        model(*tensors)
    (call,) = calls
    assert call["op"] == "rotary" and "too small to gain" in call["reason"]


def test_traced_graphs_call_theirs():
    class OneCall(nn.Module):
        def forward(self, q, k, cos, sin):
            return apply_rotary_pos_emb(q, k, cos, sin)[0]

    model, tensors = OneCall(), heads()
    expected = model(*tensors)
    swap(model, strict=True)
    assert torch.equal(torch.fx.symbolic_trace(model)(*tensors), expected)


def test_a_pickle_of_a_function_that_is_gone(monkeypatch):
    model = Attention()
    swap(model)
    data, tensors = pickle.dumps(model), inputs()
    monkeypatch.delitem(globals(), "apply_rotary_pos_emb")
    loaded = pickle.loads(data)
    monkeypatch.undo()
    assert loaded(*tensors).shape == Attention()(*tensors).shape
