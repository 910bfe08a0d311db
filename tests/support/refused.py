"""Calls with one wrong argument each, and the messages that they raise."""

from collections.abc import Callable

import pytest
from torch import Tensor


def assert_refused(call: Callable, name: str, right: dict, wrong: dict[str, dict]) -> None:
    """`call(**right)` returns; with the changes of each message of `wrong` it raises a
    RuntimeError of "name: message", and no tensor is written."""
    call(**right)
    for message, changes in wrong.items():
        given = right | changes
        before = {n: t.clone() for n, t in given.items() if isinstance(t, Tensor) and not t.is_meta}
        with pytest.raises(RuntimeError) as error:
            call(**given)
        first = str(error.value).splitlines()[0]
        assert first == f"{name}: {message}", first
        assert all(given[n].equal(tensor) for n, tensor in before.items()), message
