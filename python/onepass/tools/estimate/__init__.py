"""`onepass estimate`: what memory a training step will take, before it is run.

The step is run on tensors without data, and every storage is tracked from the operator that makes
it until nothing refers to it any more: :mod:`onepass.tools.estimate.timeline`.
"""
