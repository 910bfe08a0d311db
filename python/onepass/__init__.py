"""onepass makes existing PyTorch models faster by moving every byte across memory once.

    report = onepass.swap(model)  # in place; prints what changed and what did not, and why
    report.verify(batch)          # stock against swapped: loss and every gradient

The operators are in `onepass.functional`, `onepass.nn` and `onepass.optim`. `python -m onepass
doctor` checks the installation, `python -m onepass compare` measures a model, stock against
swapped.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from onepass import _library

try:
    __version__ = _version("onepass")
except _PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "unknown"

__all__ = [
    "Estimate",
    "Explanation",
    "QuantizationReport",
    "Report",
    "dequantize",
    "estimate",
    "explain",
    "functional",
    "keep_freed_memory",
    "nn",
    "optim",
    "quantize",
    "sac_ops",
    "swap",
    "swapped",
    "unswap",
]

# A broken installation can be imported, so that `onepass doctor` can examine it; every other use
# raises the error that `load` found, here or in `onepass._ops`.
_library.load()
if _library.failure is None:
    from onepass import _dtensor, _flops, functional, nn, optim
    from onepass.checkpointing import sac_ops
    from onepass.estimating import Estimate, estimate
    from onepass.explain import Explanation, explain
    from onepass.memory import keep_freed_memory
    from onepass.quantizing import QuantizationReport, dequantize, quantize
    from onepass.swapping import Report, swap, swapped, unswap

    _dtensor.register()
    _flops.register()


def __getattr__(name: str):
    if name in __all__:
        _library.require()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
