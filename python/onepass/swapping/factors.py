"""Products of matrices in attention written by hand: torch.matmul's, or einsum's by its letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SUMS = {torch.baddbmm, Tensor.baddbmm}
PRODUCTS = {torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
PRODUCTS |= SUMS


class Factors(NamedTuple):
    """A product of matrices: torch.matmul's, or einsum's with its letters."""

    left: Tensor
    right: Tensor
    multiply: Callable[[Tensor, Tensor], Tensor]  # of query and key
    letters: tuple[str, str, str] | None = None

    def query_key(self) -> tuple[Tensor, Tensor]:
        if self.letters is None:
            return self.left, self.right.mT
        of_left, of_right, of_result = self.letters
        (summed,) = set(of_left) & set(of_right) - set(of_result)
        query, key = of_result[-2], of_result[-1]
        lead = of_result[:-2]
        return (
            _ordered(self.left, of_left, lead + query + summed),
            _ordered(self.right, of_right, lead + key + summed),
        )

    def value(self) -> Tensor:
        if self.letters is None:
            return self.right
        of_left, of_right, of_result = self.letters
        (column,) = set(of_right) - set(of_left)
        return _ordered(self.right, of_right, of_left[:-2] + of_left[-1] + column)

    def arranged(self, output: Tensor) -> Tensor:
        """Moves (*lead, seq_q, value_dim) to the product's own order, in torch's memory order: the
        result's letters, but query and column last."""
        if self.letters is None:
            return output.contiguous()
        of_left, of_right, of_result = self.letters
        (column,) = set(of_right) - set(of_left)
        order, last = of_left[:-1] + column, (of_left[-2], column)
        memory = sorted(of_result, key=lambda letter: letter in last)
        output = output.permute([order.index(letter) for letter in memory]).contiguous()
        return output.permute([memory.index(letter) for letter in of_result])


def _ordered(tensor: Tensor, letters: str, wanted: str) -> Tensor:
    """The tensor with its dimensions as wanted, of size 1 where it has none."""
    present = [letter for letter in wanted if letter in letters]
    tensor = tensor.permute([letters.index(letter) for letter in present])
    for place, letter in enumerate(wanted):
        if letter not in letters:
            tensor = tensor.unsqueeze(place)
    return tensor


def factors_of(function: Callable, args: tuple, kwargs: dict, takes_values: bool) -> Factors | None:
    """The factors of a call of one of `PRODUCTS`: query and key, or with `takes_values`
    probabilities and values; None if it is neither."""
    if function is torch.einsum:
        return None if kwargs else _einsum(takes_values, *args)
    if kwargs or len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
        return None
    left, right = args
    if function in (torch.bmm, Tensor.bmm) or (left.dim() > 2 and right.dim() > 2):
        return Factors(left, right, lambda query, key: function(query, key.mT))
    return None


def _einsum(takes_values: bool, equation: object, *operands: object) -> Factors | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or equation.count("->") != 1:
        return None
    if not all(isinstance(x, Tensor) for x in operands):
        return None
    letters = _letters(equation.replace(" ", ""), *(x.dim() for x in operands))
    if letters is None or len(letters[0]) < 2:
        return None
    left, right, result = (set(x) for x in letters)
    summed, rows, columns = left & right - result, left - right, right - left
    if takes_values:  # (..., q, k) by values
        query, key = letters[0][-2:]
        is_product = {key} == summed and query in rows and len(columns) == 1
        is_product = is_product and left | columns == result | summed
        return Factors(*operands, _matmul, letters) if is_product else None
    both = left & right & result
    if len(summed) != 1 or len(letters[2]) < 3:
        return None
    query, key = letters[2][-2], letters[2][-1]
    if query not in rows or key not in columns or {query, key} & both:
        return None
    if not left | right <= result | summed:
        return None
    return Factors(*operands, _matmul, letters)


def _matmul(query: Tensor, key: Tensor) -> Tensor:
    return torch.matmul(query, key.mT)


def _letters(equation: str, *dims: int) -> tuple[str, str, str] | None:
    """The letters of both operands and the result, an ellipsis spelt out; None if a letter occurs
    twice in one of them."""
    operands, result = equation.split("->")
    parts = operands.split(",")
    if len(parts) != 2:
        return None
    counts = [d - len(part.replace("...", "")) for part, d in zip(parts, dims, strict=True)]
    hidden = [count for part, count in zip(parts, counts, strict=True) if "..." in part]
    if hidden and (len(set(hidden)) != 1 or len(hidden) != 2 or hidden[0] < 0):
        return None
    more = "".join(chr(0x3B1 + number) for number in range(hidden[0] if hidden else 0))
    spelt = tuple(part.replace("...", more) for part in (*parts, result))
    if any(len(set(part)) != len(part) for part in spelt):
        return None
    if [len(part) for part in spelt[:2]] != list(dims):
        return None
    return spelt
