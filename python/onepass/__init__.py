"""onepass makes existing PyTorch models faster by moving every byte across memory once.

    report = onepass.swap(model)  # in place; prints what changed and what did not, and why
    report.verify(batch)          # stock against swapped: loss and every gradient

The operators are in `onepass.functional`, `onepass.nn` and `onepass.optim`. `python -m onepass
doctor` checks the installation, `python -m onepass compare` measures a model, stock against
swapped.
"""

import sys as _sys
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from onepass import _library

try:
    __version__ = _version("onepass")
except _PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "unknown"

__all__ = [
    "Explanation",
    "Report",
    "explain",
    "functional",
    "nn",
    "optim",
    "swap",
    "swapped",
    "unswap",
]

# Why the op libraries could not be loaded. The command line alone goes on with it, so that
# `onepass doctor` can look at a broken installation; everybody else gets the ImportError.
load_error: ImportError | None = None
try:
    _library.load()
except ImportError as _error:
    if not _library.is_command_line(_sys.argv, _sys.orig_argv):
        raise
    load_error = _error
else:
    from onepass import functional, nn, optim
    from onepass.explain import Explanation, explain
    from onepass.swapping import Report, swap, swapped, unswap
