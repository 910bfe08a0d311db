"""The optimizer family's operators: a step and its table, on the CPU.

The optimizers' own calls never break these rules; tests/optim checks their results.
"""

import pytest
import torch

from onepass import _dispatch_log
from onepass.optim.contract import ALGORITHMS, LAYOUT, Hyper
from tests.optimizer.cases import PIECE
from tests.support.dtypes import BF16, F32, F64

INF = float("inf")

step_op = torch.ops.onepass.optimizer_step.default
make_table = torch.ops.onepass.optimizer_table.default
release_table = torch.ops.onepass.optimizer_table_release.default
STEP, MOMENTS, MASTER, AVERAGE = (LAYOUT[name] for name in ("step", "moments", "master", "average"))
HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, decoupled=True)


def adam_table(param, *, moment=None, **changes):
    """(arguments of optimizer_table for one parameter under Adam, its states)."""
    moment = torch.zeros_like(param) if moment is None else moment
    states = [torch.zeros(1), moment, moment.clone()]
    row = [0, 0, *[-1] * (LAYOUT["columns"] - 2)]
    row[STEP : STEP + 2] = [0, 0]
    row[MOMENTS : MOMENTS + 4] = [1, 0, 2, 0]
    for column, value in changes.get("row", {}).items():
        row[column] = value
    states += changes.get("more", [])
    return [param], states, torch.tensor([row])


def adam_step(table, gradient, hyper=(HYPER,), algorithm=0, **options):
    hyper = hyper if torch.is_tensor(hyper) else torch.tensor(hyper, dtype=F64)
    return step_op(algorithm, table, gradient, hyper, **options)


def test_a_step_by_hand():
    param, gradient = torch.ones(5), torch.full((5,), 2.0)
    params, states, layout = adam_table(param)
    table = make_table(params, states, layout)
    adam_step(table, [gradient])
    assert torch.allclose(param, torch.full((5,), 0.99))
    assert states[0] == 1 and torch.allclose(states[1], torch.full((5,), 0.2))
    adam_step(table, [gradient], found_inf=torch.ones(1))
    adam_step(table, [gradient], norm=torch.tensor(INF))
    adam_step(table, [gradient], norm=torch.tensor(1.0), grad_scale=torch.zeros(1))
    assert states[0] == 1
    assert torch.equal(gradient, torch.full((5,), 2.0))
    adam_step(table, [gradient], zero_gradients=True)
    assert states[0] == 2 and not gradient.any()
    release_table(states[0], table)
    release_table(states[0], table)  # once more is no error
    with pytest.raises(RuntimeError, match="table must be one that was made and not released"):
        adam_step(table, [gradient])


def test_the_plan_of_a_step():
    table = make_table(*adam_table(torch.ones(2 * PIECE + 1)))
    with _dispatch_log.record() as calls:
        adam_step(table, [torch.ones(2 * PIECE + 1)])
    assert [(call["kernel"], call["splits"]) for call in calls] == [("optimizer_step_kernel", 3)]


def test_opcheck_of_the_step():
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = adam_table(torch.ones(5))
    torch.library.opcheck(torch.ops.onepass.optimizer_table, arguments, test_utils=utils)
    table = make_table(*adam_table(torch.ones(5)))
    arguments = (0, table, [torch.ones(5)], torch.tensor([HYPER], dtype=F64))
    options = {"zero_gradients": True}
    # Not "test_aot_dispatch_dynamic": AOT takes no operator that writes and returns a number.
    torch.library.opcheck(torch.ops.onepass.optimizer_step, arguments, options, test_utils=utils)


def kept(column, tensor):
    """A further state, in this column of the layout."""
    return {"more": [tensor], "row": {column: 3, column + 1: 0}}


BY_MESSAGE = {
    "params must have dtype float32": (torch.ones(5).int(), {}),
    "params must have no gaps between their elements": (torch.ones(10)[::2], {}),
    "states must have no gaps": (torch.ones(5), {"more": [torch.ones(9)[::3]]}),
    "layout must name a row of hyper, got -1": (torch.ones(5), {"row": {1: -1}}),
    "layout must name one of the states, got 3": (torch.ones(5), {"row": {STEP: 3}}),
    "layout must lie within the states, got": (torch.ones(5), {"row": {MOMENTS + 1: 1}}),
    "states must hold a float32 step per parameter, got none or another dtype": (
        torch.ones(5), {"row": {STEP: -1}}
    ),
    "states must hold moments of one dtype, float32, bfloat16, float16 or codes": (
        torch.ones(5), {"moment": torch.zeros(5).int()}
    ),
    r"codes \(float64 for float64 parameters\), got float64": (
        torch.ones(5), {"moment": torch.zeros(5).double()}
    ),
    "params with codes must have a multiple of 256 elements, got 5": (
        torch.ones(5), {"moment": torch.zeros(5).byte()}
    ),
    "states must hold float32 scales beside codes, got none or another dtype": (
        torch.ones(256), {"moment": torch.zeros(256).byte()}
    ),
    "states must hold masters in float32 for 16-bit parameters, or int16 .* float32 for float32": (
        torch.ones(5), kept(MASTER, torch.zeros(5))
    ),
    "or int16 remainders for bfloat16 ones, got int16 for float16": (
        torch.ones(5).half(), kept(MASTER, torch.zeros(5).short())
    ),
    "states must hold averages in the parameter's dtype, or in float32 unless .* float16 for": (
        torch.ones(5), kept(AVERAGE, torch.zeros(5).half())
    ),
    "or in float32 unless that is float64, got float32 for float64": (
        torch.ones(5).double(), kept(AVERAGE, torch.zeros(5))
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BY_MESSAGE)
def test_messages_of_the_table(message):
    param, changes = BY_MESSAGE[message]
    with pytest.raises(RuntimeError, match=message):
        make_table(*adam_table(param, **changes))


def test_messages_of_the_layout():
    params, states, layout = adam_table(torch.ones(5))
    message = r"layout must be a contiguous int64 tensor of shape \(1, 20\), got"
    for wrong in (layout.int(), layout[:, 1:], layout.repeat(2, 1), layout.t()):
        with pytest.raises(RuntimeError, match=message):
            make_table(params, states, wrong)


def test_messages_of_a_step():
    """Each before anything is written."""
    param = torch.ones(4, 5)
    params, states, layout = adam_table(param)
    table = make_table(params, states, layout)
    good = torch.ones(4, 5)
    tables = r"hyper must be a contiguous float64 tensor of shape \(1, 12\), got"
    amsgrad = HYPER._replace(amsgrad=True)
    turned = good.view(5, 4).t().contiguous().t()
    count = len(ALGORITHMS)
    for message, gradients, options in (
        (f"algorithm must be from 0 to {count - 1}, got {count}", [good], {"algorithm": count}),
        ("gradients must be as many as the table's parameters, 1, got 2", [good, good], {}),
        ("gradients must have their parameter's 20 elements, got 3", [torch.ones(3)], {}),
        (r"gradients must have their parameter's shape, \(4, 5\), got \(5, 4\)", [turned], {}),
        ("gradients must have dtype float32, bfloat16, float16 or float64", [good.int()], {}),
        ("float32, bfloat16 or float16 beside their parameter, got float64", [good.double()], {}),
        ("states must hold 3 moments for these settings, got fewer", [good], {"hyper": [amsgrad]}),
        (tables, [good], {"hyper": torch.ones(1, 12)}),
        (tables, [good], {"hyper": torch.ones(1, 9).double()}),
        ("found_inf must have one element, got 2", [good], {"found_inf": torch.ones(2)}),
        ("grad_scale must have dtype float32", [good], {"grad_scale": torch.ones(1).int()}),
        ("norm must have one element, got 0", [good], {"norm": torch.ones(0)}),
    ):
        with pytest.raises(RuntimeError, match=message):
            adam_step(table, gradients, **options)
    assert (param == 1).all() and not any(state.any() for state in states)
    wide = make_table(*adam_table(torch.ones(5).double()))
    with pytest.raises(RuntimeError, match="float64 like their parameter, got float32"):
        adam_step(wide, [torch.ones(5)])
    shared = torch.ones(9)
    two = [torch.ones(5), torch.ones(5)]
    params, states, layout = adam_table(two[0], row={STEP: 0, STEP + 1: 0})
    pair = make_table(two, states, layout.repeat(2, 1))
    message = "gradients set to zeros must not share memory with one another, got"
    with pytest.raises(RuntimeError, match=message):
        adam_step(pair, [shared[:5], shared[4:]], zero_gradients=True)
    two[1].data = two[0].data
    message = "params must not share memory with one another, got 0 and 1 that do"
    with pytest.raises(RuntimeError, match=message):
        adam_step(pair, [shared[:5], shared[4:]])


def test_a_stale_table_is_told():
    """A problem that the caller can solve is no error: the result is False, and nothing changes."""
    param = torch.ones(4, 5)
    params, states, layout = adam_table(param)
    table = make_table(params, states, layout)
    good = torch.ones(4, 5)
    assert not adam_step(table, [good.t().contiguous().t()])  # another order
    assert not adam_step(table, [torch.ones(4, 10)[:, ::2]])  # gaps
    assert not adam_step(table, [torch._neg_view(-good)])
    param.data = torch.ones(5, 4).t()
    assert not adam_step(table, [torch.ones(5, 4).t()])  # both in another order than the states
    param.data = torch.ones(7)
    assert not adam_step(table, [torch.ones(7)])
    param.data = torch.ones(4, 5, dtype=F64)
    assert not adam_step(table, [good])
    assert not any(state.any() for state in states) and (param == 1).all() and (good == 1).all()
    param.data = torch.ones(4, 5)
    assert adam_step(table, [good]) and states[0] == 1
    assert adam_step(table, [good], found_inf=torch.ones(1))  # not made, but not stale either
    half = torch.ones(5).half()
    master = kept(MASTER, torch.zeros(5))
    table = make_table(*adam_table(half, moment=torch.zeros(5), **master))
    assert adam_step(table, [torch.ones(5)])
    half.data = half.data.clone()
    assert not adam_step(table, [torch.ones(5)])


@pytest.mark.parametrize(
    "before",
    [dict(dtype=F32), dict(stochastic_params=True), dict(stochastic_moments=True)],
    ids=str,
)
def test_a_step_does_not_depend_on_how_the_last_one_was_asked_for(before):
    def stepped(options=None):
        torch.manual_seed(0)
        param, gradient, moment = (torch.rand(300).to(BF16) for _ in range(3))
        params, states, layout = adam_table(param, moment=moment)
        table = make_table(params, states, layout)
        if options is not None:  # a step that is not made
            dtype = options.get("dtype", BF16)
            options = {name: value for name, value in options.items() if name != "dtype"}
            assert adam_step(table, [gradient.to(dtype)], found_inf=torch.ones(1), **options)
        assert adam_step(table, [gradient])
        return param, *states

    for one, other in zip(stepped(before), stepped(), strict=True):
        assert torch.equal(one, other)
