"""The questions that a step asks of hundreds of objects: `onepass._C`."""

import functools
import gc
import sys
import weakref
from collections import OrderedDict, UserDict, defaultdict

import pytest
from onepass._C import attributes, contents, holds


class Holder:
    def __init__(self, grad):
        self.grad = grad


class Same:
    """Equal to everything: comparisons must not call it."""

    def __eq__(self, other):
        raise AssertionError("compared by value")

    __hash__ = object.__hash__


# ---- attributes ----------------------------------------------------------------------------------


def test_attributes():
    values = [object(), None, Same(), None]
    assert attributes([], "grad") == ([], 0)
    found, missing = attributes([Holder(value) for value in values], "grad")
    assert missing == 2
    assert all(one is other for one, other in zip(found, values, strict=True))


def test_attributes_hold_one_reference_to_each():
    value = object()
    holders = [Holder(value)] * 5
    before = sys.getrefcount(value)
    found = attributes(holders, "grad")
    assert sys.getrefcount(value) == before + 5
    del found
    assert sys.getrefcount(value) == before


def test_attributes_that_are_not_there():
    value = object()
    before = sys.getrefcount(value)
    with pytest.raises(AttributeError, match="'int' object has no attribute 'grad'"):
        attributes([Holder(value), 3], "grad")
    gc.collect()
    assert sys.getrefcount(value) == before


def test_attributes_of_a_list_that_changes_meanwhile():
    class Changing:
        @property
        def grad(self):
            change()
            for result in gc.get_objects():  # among them the half-filled one
                if type(result) is list:
                    list(result)
            return 1

    holders = [Changing(), Holder(2)]
    change = holders.clear
    with pytest.raises(IndexError):
        attributes(holders, "grad")
    holders = [Changing(), Holder(2)]
    change = functools.partial(holders.append, Holder(3))
    assert attributes(holders, "grad") == ([1, 2], 0)


# ---- groups of parameters, and their state ------------------------------------------------------


def groups():
    return [[Same(), Same()], [], [Same()]]


def entries():
    return defaultdict(
        dict, {1: {"x": Same(), "y": Same()}, 2: {}, 3: OrderedDict(x=Same()), "other": {}}
    )


def test_contents():
    lists, of = groups(), entries()
    (a, b), _, (c,) = lists
    found = contents(lists, of)
    first = [1, of[1], "x", of[1]["x"], "y", of[1]["y"]]
    last = [2, of[2], 3, of[3], "x", of[3]["x"], "other", of["other"]]
    expected = [a, b, None, None, c, None, *first, *last]
    assert all(one is other for one, other in zip(found, expected, strict=True))
    assert contents([], {}) == []


def test_other_parameters_are_seen():
    lists, of = groups(), entries()
    (a, b), _, (c,) = lists
    found = contents(lists, of)
    assert holds(lists, of, found)
    assert holds([(a, b), (), (c,)], of, found)
    different = (
        [[a, b], []], [[a, b], [], [c], []], [[a], [b], [c]],  # the same in another division
        [[a, b], [c], []], [[a], [], [c]], [[a, b, c], [], [c]], [[b, a], [], [c]],
        [[a, Same()], [], [c]],
    )  # fmt: skip
    for others in different:
        assert not holds(others, of, found)


def test_what_cannot_be_compared_is_never_the_same():
    a = object()
    iterator = iter([a])
    found = contents([[a]], {})
    assert not holds([iterator], {}, found) and not holds([iterator], {}, contents([iterator], {}))
    assert list(iterator) == [a]
    for other in ({a: 1}, {a}, 3, None):
        assert not holds([other], {}, found) and not holds([other], {}, contents([other], {}))
    for state in (UserDict(), None, {1: UserDict()}, {1: Same()}):
        assert not holds([[a]], state, contents([[a]], state))


def swap(of, one, other):
    of[one], of[other] = of[other], of[one]


def swap_keys(of):
    """The entries stay in their order."""
    one, empty, other, last = of.pop(1), of.pop(2), of.pop(3), of.pop("other")
    of.update({3: one, 2: empty, 1: other, "other": last})


# What is done to `entries()`.
CHANGES = {
    "a value": lambda of: of[1].update(y=Same()),
    "the last value": lambda of: of[3].update(x=Same()),
    "an entry": lambda of: of.update({1: dict(of[1])}),
    "entries are swapped": lambda of: swap(of, 1, 3),
    "keys are swapped": swap_keys,
    "values are swapped": lambda of: swap(of[1], "x", "y"),
    "the same objects in other entries": lambda of: of[2].update(y=of[1].pop("y")),
    "a name": lambda of: of[1].update(z=of[1].pop("y")),
    "a value less": lambda of: of[1].pop("y"),
    "a value more": lambda of: of[1].update(z=None),
    "a last value more": lambda of: of["other"].update(z=None),
    "an entry less": lambda of: of.pop(2),
    "the last entry less": lambda of: of.pop("other"),
    "an entry more": lambda of: of.update({4: {}}),
    "nothing left": dict.clear,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_state_is_seen(change):
    lists, of = groups(), entries()
    found = contents(lists, of)
    assert holds(lists, of, found)
    CHANGES[change](of)
    assert not holds(lists, of, found)
    assert holds(lists, of, contents(lists, of))


def test_what_was_found_is_kept():
    """So that no other object can get the address of one of them."""
    of = entries()
    found, value = contents([], of), weakref.ref(of[1]["x"])
    of.clear()
    gc.collect()
    assert value() is not None
    del found
    gc.collect()
    assert value() is None
