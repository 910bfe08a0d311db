"""One token of a selective scan, its state in place: values, bits, errors."""

import pytest
import torch

from onepass import functional, numerics
from onepass.reference.selective_scan import selective_state_update as formula
from tests.support.refused import assert_refused
from tests.support.scans import even

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
WIDE = ("A", "D", "dt_bias")  # float32 beside 16 bits in models
update = functional.selective_state_update

pytestmark = pytest.mark.isa

dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)


def drawn(batch, channels, state, dtype, heads=0, groups=1, wide=False, shared=False, without=()):
    """Tensors of a call; `shared`: a number for each head, as in Mamba 2."""
    own = (heads, channels) if heads else (channels,)
    factor = (batch, groups, state) if heads else (batch, state)
    tensors = {
        "state": even(batch, *own, state),
        "x": even(batch, *own),
        "dt": even(batch, *own) - 2,
        "A": -torch.arange(1.0, state + 1) * (1 + torch.rand(*own, 1)) / 2,
        "B": even(*factor),
        "C": even(*factor),
        "D": even(*own),
        "z": even(batch, *own),
        "dt_bias": even(*own),
    }
    tensors = {
        name: tensor.to(F32 if wide and name in WIDE else dtype)
        for name, tensor in tensors.items()
        if name not in without
    }
    if shared:
        for name, of in (("A", own), ("dt", (batch, *own)), ("D", own), ("dt_bias", own)):
            tensors[name] = tensors[name][..., :1].expand(*of, *([state] if name == "A" else []))
            if name != "A":
                tensors[name] = tensors[name][..., :1].expand(of)
        tensors["A"] = tensors["A"][:, :1, :1].expand(*own, state)
    return tensors


def results(compute, tensors, dtype=None):
    """(output, the state after it)."""
    given = {name: t.to(dtype or t.dtype) for name, t in tensors.items()}
    if compute is update:
        given["state"] = given["state"].clone()
        return update(**given, dt_softplus=True), given["state"]
    wide = {n: t.to(torch.promote_types(t.dtype, F32)) for n, t in given.items()}
    output, state = formula(**wide, dt_softplus=True)
    return output.to(given["x"].dtype), state.to(given["state"].dtype)


def check(batch, channels, *shape, **of):
    """Draws are pooled: of few channels there are few numbers."""
    draws = [drawn(batch, channels, *shape, **of) for _ in range(max(4, 150 // channels))]
    found = [[results(update, t), results(formula, t, F64), results(formula, t)] for t in draws]
    for i, name in enumerate(("output", "state")):
        numerics.assert_close(*([draw[j][i] for draw in found] for j in range(3)), name)


@dtypes
@pytest.mark.parametrize("state", [1, 3, 8, 16, 21])
@pytest.mark.parametrize("channels", [1, 7, 150])
@pytest.mark.grid(2)
def test_values(channels, state, dtype):
    check(2, channels, state, dtype)


@dtypes
@pytest.mark.parametrize(
    "options",
    [dict(heads=4), dict(heads=6, groups=3), dict(heads=4, shared=True), dict(wide=True),
     dict(heads=2, groups=2, shared=True, wide=True)],
    ids=str,
)  # fmt: skip
def test_heads_and_dtypes(options, dtype):
    if options.get("wide") and dtype is F64:
        options = options | {"wide": False}
    check(2, 20, 16, dtype, **options)


@pytest.mark.parametrize("without", [("D",), ("z",), ("dt_bias",), ("D", "z", "dt_bias")], ids=str)
def test_what_is_not_given(without):
    check(2, 20, 16, F32, without=without)


def test_a_state_of_other_dtype_is_rounded_once():
    """The output comes from the state in float32."""
    tensors = drawn(2, 40, 16, F32)
    narrow = tensors | {"state": tensors["state"].to(BF16)}
    wide = tensors | {"state": narrow["state"].float()}
    (output, state), (expected, after) = results(update, narrow), results(update, wide)
    assert torch.equal(output, expected) and torch.equal(state, after.to(BF16))


def test_tokens_one_by_one_are_a_scan():
    tensors = drawn(2, 20, 16, F32)
    drawn_tokens = [drawn(2, 20, 16, F32) for _ in range(9)]
    state, outputs = tensors["state"].clone(), []
    of_tokens = ("x", "dt", "B", "C", "z")
    for token in drawn_tokens:
        own = tensors | {n: token[n] for n in of_tokens} | {"state": state}
        outputs.append(update(**own, dt_softplus=True))
    u, delta, B, C, z = (torch.stack([t[n] for t in drawn_tokens], -1) for n in of_tokens)
    own = {n: tensors[n] for n in ("A", "D")} | {"delta_bias": tensors["dt_bias"]}
    own |= {"u": u, "delta": delta, "B": B, "C": C, "z": z, "initial_state": tensors["state"]}
    scan, options = functional.selective_scan, {"delta_softplus": True, "return_last_state": True}
    found = torch.stack(outputs, -1), state
    exact = scan(**{n: t.double() for n, t in own.items()}, **options)
    for ours, of_scan, reference in zip(found, scan(**own, **options), exact, strict=True):
        numerics.assert_close([ours], [reference], [of_scan], "token by token")


def test_the_same_bits_for_any_number_of_threads():
    tensors = drawn(3, 500, 16, F32, heads=2)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(update, tensors))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


def test_a_sample_does_not_depend_on_its_batch():
    tensors = drawn(3, 21, 16, F32)
    output, state = results(update, tensors)
    one = {n: t if n in WIDE else t[1:2] for n, t in tensors.items()}
    alone = results(update, one)
    assert torch.equal(alone[0], output[1:2]) and torch.equal(alone[1], state[1:2])


def test_any_strides_are_read_in_place():
    tensors = drawn(2, 20, 16, F32, heads=4, groups=2)
    expected = results(update, tensors)
    for name, tensor in tensors.items():
        wide = torch.full((*tensor.shape[:-1], 3, tensor.shape[-1]), float("nan"))
        wide[..., 1, :] = tensor
        given = tensors | {name: wide[..., 1, :]}
        if name != "state":
            spread = torch.full((*tensor.shape, 2), float("nan"))
            spread[..., 1] = tensor
            for found, wanted in zip(
                results(update, tensors | {name: spread[..., 1]}), expected, strict=True
            ):
                assert torch.equal(found, wanted), name
        state = given["state"].clone() if name != "state" else given["state"]
        output = update(**given | {"state": state}, dt_softplus=True)
        assert torch.equal(output, expected[0]) and torch.equal(state, expected[1]), name
        outside = wide[..., ::2, :]
        assert outside.isnan().all(), name  # nothing beside the state was written


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)], ids=str)
def test_empty(shape):
    tensors = drawn(*shape, F32)
    output, state = results(update, tensors)
    assert output.shape == shape[:2] and state.shape == shape


def test_where_a_gradient_is_wanted():
    """torch's operators: gradients of everything but the state before, which is written."""
    tensors = drawn(2, 6, 4, F64)
    leaves = {n: t.clone().requires_grad_(n != "state") for n, t in tensors.items()}
    output, state = update(**leaves, dt_softplus=True), leaves["state"]
    expected, after = formula(**tensors, dt_softplus=True)
    numerics.assert_close([output], [expected], [expected], "output")
    numerics.assert_close([state], [after], [after], "state")
    names = [n for n in tensors if n != "state"]
    found = torch.autograd.grad((output * 3).sum() + state.sum(), [leaves[n] for n in names])
    again = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    y, h = formula(**again, dt_softplus=True)
    wanted = torch.autograd.grad((y * 3).sum() + h.sum(), [again[n] for n in names])
    for name, one, other in zip(names, found, wanted, strict=True):
        numerics.assert_close([one], [other], [other], name)


def test_where_a_gradient_is_wanted_in_compiled_code():
    tensors = drawn(2, 6, 4, F32)
    exact, base = results(formula, tensors, F64), results(formula, tensors)
    state, x = tensors.pop("state"), tensors.pop("x").requires_grad_()
    compiled = torch.compile(update, backend="eager", fullgraph=True)
    output = compiled(state, x, **tensors, dt_softplus=True)
    assert output.requires_grad
    for found, *others in zip((output.detach(), state.detach()), exact, base, strict=True):
        numerics.assert_close([found], *([other] for other in others), "compiled")


def test_autograd_knows_that_the_state_has_changed():
    tensors = drawn(2, 6, 4, F32)
    version = tensors["state"]._version
    update(**tensors)
    assert tensors["state"]._version > version


def test_a_number_that_is_not_finite_reaches_its_channel_alone():
    tensors = drawn(2, 9, 16, F32)
    clean = results(update, tensors)
    tensors["x"][1, 4] = float("nan")
    output, state = results(update, tensors)
    reached = torch.zeros(2, 9, dtype=torch.bool)
    reached[1, 4] = True
    assert output[reached].isnan().all() and state[reached].isnan().all()
    assert torch.equal(output[~reached], clean[0][~reached])
    assert torch.equal(state[~reached], clean[1][~reached])


RIGHT = {n: torch.ones_like(t) for n, t in drawn(2, 3, 5, F32, heads=4, groups=2).items()}
PLAIN = {n: torch.ones_like(t) for n, t in drawn(2, 4, 5, F32).items()}
STATE = RIGHT["state"]
OTHER = "have dtype float32, bfloat16 or float16 beside x, got float64"
WRONG = {
    "state must have shape (batch, channels, state) or (batch, heads, channels, state), got (2, 3)":
        dict(state=STATE[:, 0, :, 0]),
    "state must have a last dimension of at least 1, got (2, 4, 3, 0)": dict(state=STATE[..., :0]),
    "x must have shape (2, 4, 3), got (2, 3)": dict(x=RIGHT["x"][:, 0]),
    "dt must have shape (2, 4, 3), got (2, 4, 2)": dict(dt=RIGHT["x"][..., 1:]),
    "A must have shape (4, 3, 5), got (3, 5)": dict(A=RIGHT["A"][0]),
    "B must have shape (2, 1, 5), got (2, 5)": dict(B=RIGHT["B"][:, 0]),
    "B must have a number of groups that divides 4 heads, got 3": dict(B=torch.ones(2, 3, 5)),
    "C must have shape (2, 2, 5), got (2, 1, 5)": dict(C=RIGHT["C"][:, 1:]),
    "D must have shape (4, 3), got (3,)": dict(D=RIGHT["D"][0]),
    "z must have shape (2, 4, 3), got (1, 4, 3)": dict(z=RIGHT["z"][1:]),
    "dt_bias must have shape (4, 3), got (4, 2)": dict(dt_bias=RIGHT["D"][:, 1:]),
    **{f"{name} must {OTHER}": {name: t.to(F64)} for name, t in RIGHT.items() if name != "x"},
    "state must be dense in its last dimension, it is updated in place, got strides (60, 15, 1, 3)":
        dict(state=torch.ones(2, 4, 5, 3).mT),
    "state must have a place for each element, it is updated in place, got shape (2, 4, 3, 5) with "
    "strides (0, 15, 5, 1)": dict(state=STATE[:1].expand(2, -1, -1, -1)),
    "z must lie apart from state, which is updated in place, got shared memory":
        dict(z=STATE[..., 0]),
}  # fmt: skip


def test_messages():
    assert_refused(update, "selective_state_update", RIGHT, WRONG)
    wrong = {"B must have shape (2, 5), got (2, 1, 5)": dict(B=PLAIN["B"][:, None])}
    assert_refused(update, "selective_state_update", PLAIN, wrong)
