"""`swap` puts onepass's operators into a model that exists, says what it did, and undoes it.

A module is swapped by setting its `__class__` to a subclass whose forward calls the fused operator:
parameters, hooks, state_dict keys and everything else of the instance stay the very same objects.

    engine.py    walks the model, applies the options, swaps all or nothing
    matchers.py  what a module is, from its structure alone
    callsites.py which modules call F.scaled_dot_product_attention, from their code
    probe.py     the numeric proof that someone else's norm is a norm that onepass computes
    classes.py   the classes that swapped modules get
    report.py    what was done, as a table; verify.py runs stock against swapped
"""

from onepass.swapping.engine import swap, swapped, unswap
from onepass.swapping.report import Report

__all__ = ["Report", "swap", "swapped", "unswap"]
