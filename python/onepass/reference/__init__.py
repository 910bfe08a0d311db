"""Every operator in plain PyTorch, a few lines each: the definition that tests, probe, verify,
benchmarks and notebooks share.

They compute in the dtype they are given, so float64 inputs give float64 references, and are
differentiable. Random operators take the seed that the fused ones draw.
"""

import importlib
import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__)]

for _name in __all__:
    importlib.import_module(f"{__name__}.{_name}")
