"""torch.ao.quantization, which chooses layers by their exact class, and swapped ones.

quantize_dynamic and prepare give every module of a model an attribute `qconfig` before they convert
those whose class they know. So a swapped layer learns in time that it will be passed over.
"""

from __future__ import annotations

import warnings

from torch import nn

_PASSED_OVER = (
    "onepass.swap: torch.ao.quantization passes over swapped linear layers, since it looks for the "
    "class nn.Linear itself: quantize before the swap, or after onepass.unswap(model)"
)


class Qconfig:
    """The attribute `qconfig` of a swapped layer, in its `__dict__`; setting it warns."""

    def __get__(self, module: nn.Module | None, cls: type | None = None) -> object:
        if module is None:
            return self
        if "qconfig" not in vars(module):
            raise AttributeError("qconfig")
        return vars(module)["qconfig"]

    def __set__(self, module: nn.Module, value: object) -> None:
        warnings.warn(_PASSED_OVER, stacklevel=2)
        vars(module)["qconfig"] = value

    def __delete__(self, module: nn.Module) -> None:
        self.__get__(module)  # raises if there is none
        del vars(module)["qconfig"]
