"""The values of a tensor in other layouts, inside memory that holds NaN everywhere else."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

# By name: the least number of dimensions, the sizes of the memory, the view of it.
_VIEWS = {
    "every other row": (2, lambda s: (*s[:-2], 2 * s[-2], s[-1]), lambda t, s: t[..., ::2, :]),
    "every other block": (1, lambda s: (2 * s[0], *s[1:]), lambda t, s: t[::2]),
    "wide rows": (1, lambda s: (*s[:-1], s[-1] + 5), lambda t, s: t[..., 3 : 3 + s[-1]]),
    "wide aligned rows": (1, lambda s: (*s[:-1], s[-1] + 16), lambda t, s: t[..., 8 : 8 + s[-1]]),
    "transposed rows": (3, lambda s: (s[1], s[0], *s[2:]), lambda t, s: t.transpose(0, 1)),
    "columns first": (2, lambda s: (s[-1], *s[:-1]), lambda t, s: t.movedim(0, -1)),
    "reversed": (3, lambda s: s[::-1], lambda t, s: t.permute(*reversed(range(t.dim())))),
    "every third column": (1, lambda s: (*s[:-1], 3 * s[-1]), lambda t, s: t[..., ::3]),
    "odd offset": (1, lambda s: (s.numel() + 1,), lambda t, s: t[1:].view(s)),
}
LAYOUTS = list(_VIEWS)
# Of (batch, heads, tokens, dim) alone.
_VIEWS["tokens first"] = (
    4, lambda s: (s[0], s[2], s[1], s[3]), lambda t, s: t.transpose(1, 2),
)  # fmt: skip


def strided(tensor: Tensor, layout: str) -> Tensor:
    """Rows and columns are those of the memory: channels, of images with channels last."""
    least, sizes, view = _VIEWS[layout]
    assert tensor.dim() >= least, f"{layout} has at least {least} dimensions"
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    stored = tensor.permute(order)
    memory = torch.full(sizes(stored.shape), _poison(tensor.dtype), dtype=tensor.dtype)
    laid_out = view(memory, stored.shape).copy_(stored)
    return laid_out.permute([order.index(dim) for dim in range(tensor.dim())])


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def expanded(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Its first elements, of stride 0 in these dimensions; in all, as the gradient of a sum is."""
    first = tensor
    for dim in dims:
        first = first.narrow(dim, 0, 1)
    return first.expand_as(tensor)


def views(tensor: Tensor, *, is_written: bool = False) -> Iterator[tuple[str, Callable]]:
    """(name, function of the tensor) for every layout that it has the dimensions for; tensors that
    are written have an element for each of theirs."""
    for layout in LAYOUTS:
        if tensor.dim() >= _VIEWS[layout][0]:
            yield layout, partial(strided, layout=layout)
    if tensor.is_floating_point() and not is_written:
        every = tuple(range(tensor.dim()))
        for dims in [*((dim,) for dim in every), every]:
            yield f"expanded in {dims}", partial(expanded, dims=dims)
        yield "negative bit", lambda tensor: torch._neg_view(tensor.neg())
