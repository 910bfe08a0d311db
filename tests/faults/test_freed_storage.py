"""A storage that is freed or shortened under a tensor: every argument of every operator says so.

Nothing is read or written then.

`untyped_storage().resize_(0)` is how FSDP leaves parameters between their uses; torch's own
operators raise RuntimeError then.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onepass
from onepass import functional
from onepass.optim.contract import LAYOUT
from tests.optimizer.cases import hyper
from tests.support.calls import CALLS
from tests.support.injection import bits

OPS = torch.ops.onepass
NO_MEMORY = "must have memory for all its elements, which end at byte"
# Names of the further tensors of a list in the calls.
LISTS = {"other": "gradients", "steps": "states"}
# A step's tensors are also in its table, which refuses them first.
RAW = [
    name
    for name in CALLS
    if name.startswith("ops.")
    and name != "ops.optimizer_step"
    and not name.split()[0].endswith(("_check", "_release"))
]


def table_of() -> dict:
    """Two parameters of 256 elements, with a step, two moments and a master each, in buffers."""
    layout = torch.full((2, LAYOUT["columns"]), -1)
    master = LAYOUT["master"]
    for number, row in enumerate(layout):
        row[0], row[1] = number, 0
        row[2:4] = torch.tensor([0, number])
        row[4:6] = torch.tensor([1, 256 * number])
        row[6:8] = torch.tensor([2, 256 * number])
        row[master : master + 2] = torch.tensor([3, 256 * number])
    return dict(
        params=[torch.randn(256).bfloat16() for _ in range(2)],
        states=[torch.zeros(2), torch.zeros(512), torch.zeros(512), torch.zeros(512)],
        layout=layout,
    )


def optimizer_step() -> tuple[Callable, dict]:
    """The step's own arguments, and those that its table keeps."""
    kept = table_of()
    table = OPS.optimizer_table(**kept)

    def step(params, states, **arguments):
        OPS.optimizer_step(**arguments)

    return step, dict(
        params=kept["params"], states=kept["states"], algorithm=0, table=table,
        gradients=[torch.randn(256), torch.randn(256)], hyper=hyper(dict(lr=0.1)),
        norm=torch.ones((), dtype=torch.float64), grad_scale=torch.ones(()),
        found_inf=torch.zeros(()), max_norm=0.5, zero_gradients=True,
    )  # fmt: skip


def tensors_of(arguments: dict) -> dict[str, Tensor]:
    """Every tensor of a call by its place: name, or name and number in a list."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, list) and value and isinstance(value[0], Tensor):
            found |= {f"{name}[{number}]": tensor for number, tensor in enumerate(value)}
    return found


def refuse(call: Callable, arguments: dict, place: str, bytes_left: Callable[[int], int]) -> None:
    tensors = tensors_of(arguments)
    storage = tensors.pop(place).untyped_storage()
    held, left = storage.nbytes(), bytes_left(storage.nbytes())
    storage.resize_(left)
    before = bits(tensors)
    name = LISTS.get(place, place.split("[")[0])
    told = f": {name} {NO_MEMORY} {held} of its storage, got one of {left} bytes"
    with pytest.raises(RuntimeError, match=told):
        call(**arguments)
    assert bits(tensors) == before


@pytest.mark.parametrize("name", RAW)
def test_each_argument_must_have_memory(name):
    call = CALLS[name]
    for place, tensor in call.tensors().items():
        for bytes_left in (lambda _: 0, lambda held: held - 1):
            if tensor.numel():
                tensors = {n: t.clone() for n, t in call.tensors().items()}
                refuse(call.run, tensors, place, bytes_left)


def test_each_argument_of_a_step_must_have_memory():
    """Its own, and those that its table keeps."""
    for place in tensors_of(optimizer_step()[1]):
        refuse(*optimizer_step(), place, lambda _: 0)
        refuse(*optimizer_step(), place, lambda held: held - 1)


@pytest.mark.parametrize("op", ["attention_forward", "attention_decode paged", "norm_forward"])
def test_a_view_into_a_freed_storage(op):
    """Its address is not null."""
    call = CALLS[f"ops.{op}"]
    (name, tensor), *_ = call.tensors().items()
    whole = torch.cat([tensor, tensor])
    view = whole[len(tensor) :]
    whole.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=NO_MEMORY):
        call.run(**call.tensors() | {name: view})


def unchanged(arguments: dict, message: str) -> None:
    """A step that is refused and writes nothing."""
    before = bits(tensors_of(arguments))
    with pytest.raises(RuntimeError, match=message):
        optimizer_step_of(arguments)
    assert bits(tensors_of(arguments)) == before


def optimizer_step_of(arguments: dict) -> None:
    OPS.optimizer_step(**{n: v for n, v in arguments.items() if n not in ("params", "states")})


def test_states_must_stay_where_they_are():
    _, arguments = optimizer_step()
    arguments["states"][1].data = torch.zeros(512)
    unchanged(arguments, "states must lie where they did in the table, got others in number 1")


@pytest.mark.parametrize("step", [-1.0, float("nan"), float("inf"), 1e30])
def test_steps_must_be_numbers_of_steps(step):
    _, arguments = optimizer_step()
    arguments["states"][0][1] = step
    unchanged(arguments, "states must hold a step that lies between 0 and 2\\^32, got ")


def test_a_failed_step_does_not_forget_that_parameters_moved():
    """The next step notices two parameters that now share memory."""
    _, arguments = optimizer_step()
    kept = table_of()
    kept["states"] = kept["states"][:3]
    kept["layout"][:, 16:] = -1  # with masters they must not move at all
    arguments |= kept | dict(table=OPS.optimizer_table(**kept))
    del arguments["layout"]
    optimizer_step_of(arguments)
    params, gradients = arguments["params"], arguments["gradients"]
    params[0].data = params[1].detach()
    unchanged(arguments | dict(gradients=[gradients[0], gradients[1][:9]]), "gradients must have")
    unchanged(arguments, "params must not share memory with one another, got 0 and 1 that do")


def test_tensors_without_elements_need_none():
    x = torch.randn(0, 8)
    x.untyped_storage().resize_(0)
    assert functional.layer_norm(x, (8,)).shape == (0, 8)
    assert functional.linear(x, torch.ones(3, 8)).shape == (0, 3)
    empty = torch.zeros(0)
    empty.untyped_storage().resize_(0)
    assert OPS.gradient_norm([empty, torch.ones(4)]) == 2


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("freed", ["params", "gradients"])
def test_a_step_of_an_optimizer(freed, limit):
    first, last = parameters = [torch.nn.Parameter(torch.randn(8)) for _ in range(2)]
    optimizer = onepass.optim.AdamW(parameters, max_grad_norm=limit)
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    optimizer.step()
    before = bits([first, optimizer.state[first]])
    (last if freed == "params" else last.grad).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"{freed} must have memory"):
        optimizer.step()
    assert bits([first, optimizer.state[first]]) == before
