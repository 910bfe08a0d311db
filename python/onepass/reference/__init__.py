"""Every operator in plain PyTorch, a few lines each: the definition that tests, probe, verify,
benchmarks and notebooks share.

They compute in the dtype they are given, so float64 inputs give float64 references, and are
differentiable. Random operators take the seed that the fused ones draw.
"""

from onepass.reference import (
    attention,
    attention_decode,
    dropout,
    gate,
    linear,
    norm,
    optimizer,
    rotary,
)

__all__ = [
    "attention",
    "attention_decode",
    "dropout",
    "gate",
    "linear",
    "norm",
    "optimizer",
    "rotary",
]
