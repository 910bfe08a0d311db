"""Results of a call by name, against others."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from onepass import numerics

Results = dict[str, Tensor]


def assert_close(draws: Sequence[tuple[Results, Results, Results]], text: str) -> None:
    """Each result of the draws, pooled, by the numerics rule.

    Args:
        draws: (ours, in float64, torch's); ours must have torch's dtypes and shapes.
    """
    for name, found in draws[0][0].items():
        torchs = draws[0][2][name]
        assert found.dtype == torchs.dtype, f"{text}: {name} is {found.dtype}"
        assert found.shape == torchs.shape, f"{text}: {name} has shape {tuple(found.shape)}"
        three = ([draw[index][name] for draw in draws] for index in range(3))
        numerics.assert_close(*three, f"{text}: {name}")


def check_cases(results: Callable, cases: Sequence, exact: str = "torchs", **options) -> None:
    """`results` of a function of each case and the case, pooled, by the numerics rule; those of
    the function `exact` are right in float64."""
    draws = []
    for case in cases:
        of_exact = results(getattr(case, exact), case, double=True, **options)
        ours, torchs = (results(of, case, **options) for of in (case.ours, case.torchs))
        draws.append((ours, of_exact, torchs))
    assert_close(draws, cases[0].text)


def assert_equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def assert_same_bits(found: Results, expected: Results, text: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        tensor = found[name]
        assert tensor.shape == value.shape and tensor.dtype == value.dtype, f"{text}: {name}"
        assert torch.equal(bits(tensor), bits(value)), f"{text}: {name}"


def same_bits(found: Results, expected: Results) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].shape == value.shape and torch.equal(bits(found[name]), bits(value))
        for name, value in expected.items()
    )


def bits(tensor: Tensor) -> Tensor:
    """The bits of each element, as an integer."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().resolve_neg().contiguous().view(integers[tensor.dtype.itemsize])


def kinds(tensor: Tensor) -> Tensor:
    """0: finite, 1: NaN, 2 and 3: the infinities."""
    return tensor.isnan() * 1 + tensor.isposinf() * 2 + tensor.isneginf() * 3
