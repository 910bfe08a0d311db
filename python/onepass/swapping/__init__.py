"""`swap` puts onepass's operators into a model that exists, reports the changes, and undoes them.

A module is swapped by setting its `__class__` to a subclass whose forward calls the fused operator:
parameters, hooks, state_dict keys and everything else of the instance stay the very same objects.

What is swapped:

    engine.py        the options, all or nothing
    walk.py          the modules of a model and the choice by the options
    matchers.py      the kind of a module, from its structure alone
    callsites.py     modules that call F.scaled_dot_product_attention or F.linear, from their code
    by_name.py       modules that take attention by a name in their config (transformers)
    providers.py     what integrations know of other packages' models
    plan.py          the plan of a swap; sample.py what of it gains on a batch of the user's
    changes.py       the edits of a call, undone unless it returns
    reasons.py       why a module keeps its class

What is proven, and computes:

    specs.py         the results of matchers and proofs
    trials.py        a twin, random numbers and the numerics rule, which all proofs share
    facts.py         what a proof reads of a module, and whether it is still so
    probe.py         the numeric proof that a foreign norm is one that onepass computes; foreign.py
                     computes it
    gated.py         the same for gated feed-forward blocks
    adaptive.py      the same for norms of diffusers with scale and shift
    activated.py     the same for group norms with silu after them
    copies.py        copies of forwards that call ours in place of functions of their file
    rotary.py        functions that rotate, by their arguments; rotary_proof.py
    scans.py         functions of state-space layers, by their decorator
    by_hand.py       softmax(q k^T) v by hand; scores.py without data, recorded.py the calls on
                     them, factors.py the products, by_hand_call.py the call of attention,
                     by_hand_proof.py its proof
    redirection.py   calls of torch's functions in a swapped forward
    inputs.py        the tensors that the operators take
    classes.py       the classes that swapped modules get; restored.py those that they get back
    quantization.py  a warning of swapped linear layers
    quantized.py     the codes of linear layers that another library quantised

What is told:

    report.py        the changes, as a table; notes.py its notes, texts.py lines and tables
    verify.py        stock against swapped: runs.py the runs, masks.py the same dropout in both,
                     kernels.py single calls, verification.py the verdict
    undisturbed.py   the state that running a model may change
"""

from onepass.swapping.engine import swap, swapped, unswap
from onepass.swapping.report import Report

__all__ = ["Report", "swap", "swapped", "unswap"]
