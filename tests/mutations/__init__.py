"""Faults that the suite must notice: `python -m tests.mutations`."""
