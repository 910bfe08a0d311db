"""The largest tensor that the operators of a step return."""

from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Holds the elements of the largest tensor for which `counts` is true."""

    def __init__(self, counts: Callable[[Tensor], bool]):
        super().__init__()
        self.elements, self._counts = 0, counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and self._counts(x):
                self.elements = max(self.elements, x.numel())
        return result
