"""Questions about hundreds of Python objects, each in one call instead of a loop in Python.

Objects are compared by identity; only `attributes` reads from them (csrc/bindings.cpp).
"""

from onepass._C import attributes, contents, hold_same, holds

__all__ = ["attributes", "contents", "hold_same", "holds"]
