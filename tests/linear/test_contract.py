"""Promises for any numbers: equal bits, memory, tensors kept for the backward, and errors."""

import ctypes
import faulthandler
import itertools

import pytest
import torch

from onepass import _C, functional
from tests.linear.cases import (
    FLOATS,
    RAW,
    backward,
    dtypes,
    layer_gradients,
    make,
    results,
    subsets,
)
from tests.support import isolated
from tests.support.dtypes import F32, F64
from tests.support.guarded import guarded
from tests.support.refused import assert_refused
from tests.support.results import assert_same_bits, bits

# ---- bits ----------------------------------------------------------------------------------------

# Rows, in and out features: many rows, few, one; sums over many rows; one column.
SIZES = [(1000, 200, 150), (24, 700, 1100), (1, 1500, 2000), (5003, 60, 50), (4000, 200, 1)]


@pytest.mark.isa
@dtypes
@pytest.mark.parametrize("rows, in_features, out_features", SIZES, ids=str)
def test_bitwise_equal_for_any_number_of_threads(rows, in_features, out_features, dtype):
    case = make(rows, in_features, out_features, dtype)
    expected = results(functional.linear, case)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        before = _C.parallel_regions()
        assert_same_bits(results(functional.linear, case), expected, f"{threads} threads:")
        assert _C.parallel_regions() > before


@pytest.mark.isa
@dtypes
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("in_features, out_features", [(70, 45), (500, 300)])
def test_a_row_does_not_depend_on_its_batch(in_features, out_features, threads, dtype):
    """Neither in the output nor in the input's gradient."""
    torch.set_num_threads(threads)
    case = make(2000, in_features, out_features, dtype)

    def of(rows):
        output = functional.linear(case.input[rows], case.weight, case.bias)
        dinput, _, _ = backward(case.doutput[rows], weight=case.weight, input_dtype=dtype)
        return {"output": output, "dinput": dinput}

    every = of(slice(None))
    for begin, count in (
        (0, 1), (1999, 1), (17, 2), (31, 11), (3, 12), (990, 13), (1, 24), (975, 25), (60, 100),
        (7, 960), (1, 961), (0, 1999),
    ):  # fmt: skip
        rows = slice(begin, begin + count)
        assert_same_bits(of(rows), {k: v[rows] for k, v in every.items()}, f"{rows}:")


# In and out features: around squares, chains and blocks of every level, and none of either.
FEW_ROWS_FEATURES = [
    (1, 1), (3, 5), (17, 33), (64, 16), (65, 31), (131, 47), (771, 70), (4097, 19), (4500, 35),
    (70, 300),
]  # fmt: skip


@pytest.mark.isa
@pytest.mark.parametrize("dtypes", [*itertools.product(FLOATS, FLOATS), (F64, F64)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("in_features, out_features", FEW_ROWS_FEATURES)
def test_few_rows_are_those_of_many(in_features, out_features, threads, dtypes):
    """The same bits, although other kernels compute them."""
    of_input, of_weight = dtypes
    torch.set_num_threads(threads)
    case = make(64, in_features, out_features, of_input, weight_dtype=of_weight)
    lying = {"as torch's": case.weight, "transposed": case.weight.t().contiguous().t()}
    for out_dtype in dict.fromkeys((torch.float32 if of_input is not F64 else F64, of_input)):

        def of(rows, weight, out_dtype=out_dtype):
            output = RAW.linear_forward(case.input[rows], weight, case.bias, out_dtype)
            dinput, _, _ = backward(case.doutput[rows], weight=weight, input_dtype=out_dtype)
            return {"output": output, "dinput": dinput}

        every = of(slice(None), case.weight)
        for count, (how, weight) in itertools.product(range(1, 17), lying.items()):
            rows = slice(count, 2 * count)
            found = of(rows, weight)
            assert_same_bits(found, {k: v[rows] for k, v in every.items()}, f"{count}, {how}:")


# ---- memory --------------------------------------------------------------------------------------

# Around vectors, panels and strips of every level.
SHAPES = [(1, 1, 1), (1, 3, 2), (3, 5, 7), (11, 31, 33), (13, 64, 32), (25, 193, 65), (100, 7, 1)]


def every_result(case) -> dict[str, torch.Tensor]:
    output = RAW.linear_forward(case.input, case.weight, case.bias, None)
    return {"output": output} | layer_gradients(case)


@pytest.mark.isa
@dtypes
def test_nothing_beyond_a_tensor_is_touched(dtype):
    """Each tensor ends, or begins, at a page that must not be accessed."""

    def run(name):
        shape, end = SHAPES[int(name.split()[0])], name.endswith("end")
        case = make(*shape, dtype)
        expected = every_result(case)
        for field in ("input", "weight", "bias", "doutput"):
            setattr(case, field, guarded(getattr(case, field), end=end))
        assert_same_bits(every_result(case), expected)

    names = [f"{number} {where}" for number in range(len(SHAPES)) for where in ("begin", "end")]
    found = isolated.each(run, names)
    assert not any(found.values()), found


def test_a_guard_ends_the_process():
    """So the test above can fail."""

    def run(name):
        inside = guarded(torch.ones(5), end=name == "end")
        beyond = inside.data_ptr() + (20 if name == "end" else -4)
        ctypes.string_at(beyond, 1)

    found = isolated.each(run, ["begin", "end"], prepare=faulthandler.disable)
    assert found == dict.fromkeys(("begin", "end"), "killed by SIGSEGV")


@pytest.mark.isa
@dtypes
@pytest.mark.parametrize("shape", [*SHAPES, (0, 4, 5), (7, 0, 5), (7, 5, 0), (300, 200, 100)])
def test_every_element_is_written(shape, dtype):
    """And no scratch memory is read before it is written: malloc fills new memory with 0x7f
    (glibc's M_PERTURB)."""
    case = make(*shape, dtype)
    expected, mallopt, perturb = every_result(case), ctypes.CDLL(None).mallopt, -6
    mallopt(perturb, 0x80)
    try:
        assert (bits(torch.empty(1000)) == 0x7F7F7F7F).all()
        found = every_result(case)
    finally:
        mallopt(perturb, 0)
    assert_same_bits(found, expected)


# ---- tensors kept for the backward ---------------------------------------------------------------


@pytest.mark.parametrize("activation, p", [(None, 0.0), (None, 0.5), ("gelu", 0.0), ("gelu", 0.5)])
@subsets
def test_only_what_the_backward_needs_is_kept(wrt, activation, p):
    """input's gradient takes the weight, weight's the input, and bias's neither; an activation its
    argument, dropout the seed. Nothing for a residual alone."""
    case, saved = make(6, 4, 5, residual=F32), []
    case.residual.requires_grad_()
    for name in wrt:
        getattr(case, name).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.linear(**case.tensors(), activation=activation, dropout_p=p)
    wanted = [(5, 4)] * ("input" in wrt) + [(6, 4)] * ("weight" in wrt)
    if wrt:
        wanted += [(6, 5)] * (activation is not None) + [(2,)] * (p > 0)
    assert sorted(tuple(t.shape) for t in saved) == sorted(wanted)


# ---- errors --------------------------------------------------------------------------------------


X, W, B, G = torch.ones(4, 6), torch.ones(5, 6), torch.ones(5), torch.ones(4, 5)
FLOAT = "have dtype float32, bfloat16, float16 or float64, got"
BESIDE = "have dtype float32, bfloat16 or float16 beside"
SHAPE = "weight must have shape (out_features, in_features), got"
ENDS = "input must have a last dimension of 6, weight's in_features, got shape"
META = "on the device of input, cpu, got meta"

FORWARD = dict(input=X, weight=W, bias=B, out_dtype=None)
WRONG = {
    f"{SHAPE} (6,)": dict(weight=W[0]),
    f"{SHAPE} (1, 5, 6)": dict(weight=W[None]),
    f"{ENDS} (5, 4)": dict(input=torch.ones(5, 4)),
    f"{ENDS} ()": dict(input=X[0, 0]),
    f"input must {FLOAT} int64": dict(input=X.long()),
    f"weight must {FLOAT} int32": dict(weight=W.int()),
    f"weight must {BESIDE} input, got float64": dict(weight=W.double()),
    "weight must have dtype float64 like input, got float32": dict(input=X.double()),
    f"weight must be {META}": dict(weight=W.to("meta")),
    "bias must have shape (5,), got (4,)": dict(bias=B[:4]),
    "bias must have shape (5,), got ()": dict(bias=B[0]),
    f"bias must {FLOAT} bool": dict(bias=B.bool()),
    f"bias must {BESIDE} input, got float64": dict(bias=B.double()),
    f"bias must be {META}": dict(bias=B.to("meta")),
    f"out_dtype must {FLOAT} int8": dict(out_dtype=torch.int8),
    f"out_dtype must {BESIDE} input, got float64": dict(out_dtype=F64),
}

DTYPES_OF_GRADIENTS = dict.fromkeys(("input_dtype", "weight_dtype", "bias_dtype"), F32)
BACKWARD = dict(doutput=G, input=X, weight=W) | DTYPES_OF_GRADIENTS
WRONG_BACKWARD = {
    "doutput must have at least one dimension, got ()": dict(doutput=G[0, 0]),
    f"doutput must {FLOAT} int64": dict(doutput=G.long()),
    "weight must be given for the gradient of input, got none": dict(weight=None),
    "input must be given for the gradient of weight, got none": dict(input=None),
    "weight must have shape (5, in_features), got (6, 5)": dict(weight=W.t()),
    "weight must have shape (5, in_features), got (6,)": dict(weight=W[0]),
    f"weight must {FLOAT} int64": dict(weight=W.long()),
    f"weight must {BESIDE} doutput, got float64": dict(weight=W.double()),
    "weight must be on the device of doutput, cpu, got meta": dict(weight=W.to("meta")),
    "input must have shape (4, 6), got (3, 6)": dict(input=X[:3]),
    "input must have shape (4, 6), got (1, 4, 6)": dict(input=X[None]),
    "input must have shape (4, 0), got ()": dict(input=X[0, 0], weight=None, input_dtype=None),
    f"input must {FLOAT} uint8": dict(input=X.byte()),
    "input must have dtype float64 like doutput, got float32": (
        dict(doutput=G.double(), weight=W.double())
    ),
    "input must be on the device of doutput, cpu, got meta": dict(input=X.to("meta")),
    f"input_dtype must {FLOAT} int64": dict(input_dtype=torch.int64),
    f"weight_dtype must {BESIDE} doutput, got float64": dict(weight_dtype=F64),
    f"bias_dtype must {FLOAT} bool": dict(bias_dtype=torch.bool),
}

EPILOGUE = dict(input=X, weight=W, bias=B, residual=G, seed=torch.tensor([1, 2]), dropout_p=0.5,
                activation_kind=1, save_preactivation=False)  # fmt: skip
WRONG_EPILOGUE = {
    "residual must have shape (4, 5), got (5,)": dict(residual=B),
    f"residual must {FLOAT} int64": dict(residual=G.long()),
    f"residual must {BESIDE} input, got float64": dict(residual=G.double()),
    "dropout_p must lie between 0 and 1, got 1.5": dict(dropout_p=1.5),
    "seed must be given with dropout_p > 0 only, got none": dict(seed=None),
    "activation_kind must be one of 0 to 4, got 5": dict(activation_kind=5),
    "activation_kind must be one of 0 to 4, got -1": dict(activation_kind=-1),
}

EPILOGUE_BACKWARD = dict(doutput=G, preactivation=G, seed=torch.tensor([1, 2]), dropout_p=0.5,
                         activation_kind=1, out_dtype=None)  # fmt: skip
GIVEN = "preactivation must be given with an activation and only then, got"
WRONG_EPILOGUE_BACKWARD = {
    f"{GIVEN} none": dict(preactivation=None),
    f"{GIVEN} one": dict(activation_kind=0),
    "preactivation must have shape (4, 5), got (5,)": dict(preactivation=B),
    "dropout_p must lie between 0 and 1, got -0.5": dict(dropout_p=-0.5),
    "seed must be given with dropout_p > 0 only, got none": dict(seed=None),
    f"out_dtype must {BESIDE} doutput, got float64": dict(out_dtype=F64),
    "activation_kind must be one of 0 to 4, got 9": dict(activation_kind=9),
}


@pytest.mark.parametrize(
    "op, name, right, wrong",
    [
        ("linear_forward", "linear", FORWARD, WRONG),
        ("linear_backward", "linear_backward", BACKWARD, WRONG_BACKWARD),
        ("linear_epilogue_forward", "linear", EPILOGUE, WRONG_EPILOGUE),
        ("linear_epilogue_backward", "linear_epilogue_backward", EPILOGUE_BACKWARD,
         WRONG_EPILOGUE_BACKWARD),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_messages(op, name, right, wrong):
    for suffix in ("", "_check"):
        assert_refused(getattr(RAW, op + suffix), name, right, wrong)


@pytest.mark.parametrize("options", [{}, {"activation": "relu"}, {"training": False}], ids=str)
def test_messages_of_the_function(options):
    """The same where the call goes through autograd."""
    right = dict(input=X.clone().requires_grad_(), weight=W, bias=B, dropout_p=0.5) | options
    wrong = {
        "bias must have shape (5,), got (4,)": dict(bias=B[:4]),
        "residual must have shape (4, 5), got (5,)": dict(residual=B),
        f"residual must {FLOAT} int64": dict(residual=G.long()),
    }
    assert_refused(functional.linear, "linear", right, wrong)


def test_activations_that_there_are_not():
    text = "linear: activation must be None or one of 'relu', 'silu', 'gelu', 'gelu_tanh', got "
    for activation in ("elu", "", "GELU", 3):
        with pytest.raises(ValueError) as raised:
            functional.linear(X, W, activation=activation)
        assert str(raised.value) == text + repr(activation)
    with pytest.raises(TypeError, match="^linear: activation must be a string or None, got list$"):
        functional.linear(X, W, activation=["relu"])


@pytest.mark.parametrize("training", [False, True])
def test_dropout_p_out_of_range(training):
    for p in (-0.1, 1.1, float("nan")):
        for more in ({}, {"residual": G}):
            with pytest.raises(ValueError, match="^linear: dropout_p must lie between 0 and 1, g"):
                functional.linear(X, W, dropout_p=p, training=training, **more)


def test_scratch_does_not_grow_with_the_rows():
    """The gradient of a weight of few rows sums over all tokens: no copy of all of them is made."""
    from onepass import _dispatch_log

    torch.set_num_threads(1)
    for out_features in (2, 24, 300):
        doutput, input = torch.ones(50_000, out_features), torch.ones(50_000, 3)
        with _dispatch_log.record() as calls:
            torch.ops.onepass.linear_backward(doutput, input, None, None, F32, F32)
        (call,) = calls
        assert call["workspace_bytes"] < 2 << 20, call
