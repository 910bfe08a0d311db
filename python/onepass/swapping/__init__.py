"""`swap` puts onepass's operators into a model that exists, reports the changes, and undoes them.

A module is swapped by setting its `__class__` to a subclass whose forward calls the fused operator:
parameters, hooks, state_dict keys and everything else of the instance stay the very same objects.

    engine.py    the options, all or nothing
    walk.py      the modules of a model and the choice by the options
    matchers.py  the kind of a module, from its structure alone
    callsites.py modules that call F.scaled_dot_product_attention or F.linear, from their code
    by_name.py   modules that take attention by a name in their config (transformers)
    probe.py     the numeric proof that a foreign norm is a norm that onepass computes
    gated.py     the same for gated feed-forward blocks
    rotary.py    functions that rotate, and the forwards that call ours; rotary_proof.py their proof
    inputs.py    the tensors that the operators take
    specs.py     the results of matchers and proofs
    classes.py   the classes that swapped modules get
    plan.py      the plan of a swap
    sample.py    what of a plan gains on a batch of the user's
    changes.py   the edits of a call, undone unless it returns
    report.py    the changes, as a table; notes.py its notes; verify.py runs stock against swapped
"""

from onepass.swapping.engine import swap, swapped, unswap
from onepass.swapping.report import Report

__all__ = ["Report", "swap", "swapped", "unswap"]
