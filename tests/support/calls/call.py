"""A call, and the tensors that calls are made of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass import functional  # which registers the operators
from tests.support.seeds import set_seed

F32 = torch.float32
RAW = torch.ops.onepass
FLOAT32 = ("alibi_slopes", "k_scale", "v_scale")  # arguments that are always


@dataclass(frozen=True)
class Call:
    name: str
    tensors: Callable[[], dict[str, Tensor]]
    run: Callable[..., list[Tensor]]
    stock: Callable[..., list[Tensor]] | None = None
    written: tuple[str, ...] = ()  # in place
    optional: tuple[str, ...] = ()  # may be None
    differentiable: bool = False
    constant: tuple[str, ...] = ()  # of these, the arguments that get no gradient
    composed: bool = False  # of torch's operators beside ours: their errors and rounding count
    lists: tuple[str, ...] = ()  # arguments that are lists of tensors, given by their first
    grows: dict[str, tuple[int, ...]] | None = None  # dimensions of any size; None: of rows, 0

    def typed(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors in another dtype, but those that are float32 always, and constants unless all
        are float64."""
        found = self.tensors()
        for name, tensor in found.items():
            narrow = name in self.constant and dtype != torch.float64
            if tensor.is_floating_point() and name not in FLOAT32 and not narrow:
                found[name] = tensor.to(dtype)
        return found

    def wanted(self, tensors: dict[str, Tensor]) -> list[str]:
        """The names of those that get a gradient."""
        return [n for n, t in tensors.items() if t.is_floating_point() and n not in self.constant]

    def results(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Those that can have a gradient; what is dropped is the same in each call."""
        set_seed(3)
        return [result for result in self.run(**tensors) if result.is_floating_point()]


def public(name: str, tensors: Callable, text: str = "", stock=None, options=(), **of) -> Call:
    """A call of a function by keywords; `of`: fields of the call."""
    function, options = getattr(functional, name), dict(options)

    def run(**given):
        return flat(function(**options | given))

    return Call(f"functional.{name}{text}", tensors, run, stock, **of)


def raw(
    name: str,
    tensors: Callable[[], dict[str, Tensor]],
    text: str = "",
    *,
    optional: tuple[str, ...] = (),
    written: tuple[str, ...] = (),
    **options,
) -> Iterator[Call]:
    """Calls of a raw operator by keywords, and of the check beside it, which writes nothing."""
    for of in (name, f"{name}_check"):
        op = getattr(RAW, of)
        required = [a.name for a in op.default._schema.arguments if not a.has_default_value()]

        def run(op=op, required=required, **given):
            return flat(op(**dict.fromkeys(required) | options | given))

        own = written if of == name else ()
        yield Call(f"ops.{of}{text}", tensors, run, optional=optional, written=own)


def flat(results) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    if isinstance(results, tuple | list):
        return [tensor for result in results for tensor in flat(result)]
    return []


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def sixteenths(*shape: int) -> Tensor:
    return torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(sum(shape))) / 16


def ints(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
