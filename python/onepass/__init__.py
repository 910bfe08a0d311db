"""onepass makes existing PyTorch models faster by moving every byte across memory once.

    report = onepass.swap(model)  # in place; prints what changed and what did not, and why
    report.verify(batch)          # stock against swapped: loss and every gradient

The operators are in `onepass.functional` and `onepass.nn`; `python -m onepass doctor` checks the
installation, `python -m onepass compare` measures a model, stock against swapped.
"""

import os as _os

if _os.environ.get("ONEPASS_DOCTOR") != "1":  # `doctor` looks at installations that do not load
    from onepass import _library

    _library.load()

    from onepass import functional, nn
    from onepass.explain import Explanation, explain
    from onepass.swapping import Report, swap, swapped, unswap

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

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
    "swap",
    "swapped",
    "unswap",
]
