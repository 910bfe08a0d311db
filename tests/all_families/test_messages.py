"""Errors of wrong shapes and dtypes: the same sentence with data, without, and compiled."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.calls import CALLS

# drop_path_scale looks at a size alone.
NAMES = [n for n in CALLS if n.startswith("functional.") and "drop_path_scale" not in n]
RAW = [n for n, call in CALLS.items() if n.startswith("ops.") and not call.lists]
RAW = [n for n in RAW if "_check" not in n and "optimizer" not in n]
OURS = re.compile(r"\w+: \w+ must .*, got ", re.DOTALL)
OF_VALUES = re.compile("must lie between|must end with the (number of rows|length)")


def broken(call):
    """(the argument, the tensors with it wrong)"""
    given = call.tensors()
    for name, tensor in given.items():
        if tensor.dim():
            fewer = tensor[..., :-1], tensor[:0], tensor.flatten()[:1].view(())
            for wrong in (*fewer, tensor[None, None], tensor.to(torch.complex64)):
                yield name, given | {name: wrong}


def message(run, given) -> str | None:
    try:
        run(**given)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return None


def messages(call) -> list[tuple[str, dict]]:
    """Those of ours; values are not looked at without data."""
    found = [(message(call.run, given), given) for _, given in broken(call)]
    found = [(text, given) for text, given in found if text and OURS.match(text)]
    return [(text, given) for text, given in found if not OF_VALUES.search(text)]


@pytest.mark.parametrize("name", NAMES + RAW)
def test_without_data(name):
    call = CALLS[name]
    for text, given in messages(call):
        with FakeTensorMode() as mode:
            fakes = {n: mode.from_tensor(t) for n, t in given.items()}
            told = [message(call.run, fakes)]
        told.append(message(call.run, {n: t.to("meta") for n, t in given.items()}))
        assert [str(each).replace(" on meta", " on cpu") for each in told] == [text] * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.grid
def test_compiled(name, dynamic):
    torch._dynamo.reset()
    call = CALLS[name]
    for text, given in messages(call)[:1]:
        compiled = torch.compile(call.run, fullgraph=True, dynamic=dynamic, backend="eager")
        with pytest.raises(Exception, match=re.escape(text)):
            compiled(**given)


def test_most_arguments_are_refused():
    for name in NAMES:
        tensors = CALLS[name].tensors()
        assert len(messages(CALLS[name])) >= len(tensors), name
