"""Calls of layer norms that are too small to gain: torch's own kernel computes them, as before.

In training a call of ours takes some 50 us more than one of torch's, whose autograd is in C++; in
inference 10 us. The kernel makes up for it from a number of elements on. RMS norms gain at every
size: torch has no kernel for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._ops import dispatch_log

# The least elements per thread of a call that gains, (in training, in inference). Measured by
# benchmarks/small_norms.py (Zen 3, AVX2).
LEAST_ELEMENTS = {
    torch.float32: (1 << 18, 1 << 16),
    torch.float64: (1 << 18, 1 << 16),
    torch.bfloat16: (1 << 16, 1 << 16),
    torch.float16: (1 << 16, 1 << 16),
}
# More do not raise the bound: memory's bandwidth is shared by then.
MOST_THREADS = 8
NOTE = (
    "layer norms on the CPU run torch's own kernel in calls of fewer elements than "
    f"{1 << 18} per thread (16-bit, or inference: {1 << 16}), where it takes less time"
)


def is_small(input: Tensor) -> bool:
    """Whether torch's own layer norm takes less time on this input; the log says so."""
    if not input.is_cpu or torch.compiler.is_compiling():
        return False
    least = LEAST_ELEMENTS.get(input.dtype)
    if least is None:
        return False
    bound = least[not torch.is_grad_enabled()]
    elements = input.numel()
    if elements >= bound and elements >= bound * min(torch.get_num_threads(), MOST_THREADS):
        return False
    if dispatch_log.is_recording():
        _tell(input, bound)
    return True


def _tell(input: Tensor, bound: int) -> None:
    cols = input.shape[-1] if input.dim() else 1
    dispatch_log.leave(
        op="layer_norm",
        arguments=f"{input.numel() // max(cols, 1)} x {cols}, {str(input.dtype)[6:]}",
        kernel="torch.nn.functional.layer_norm",
        threads=torch.get_num_threads(),
        reason=f"too small to gain: fewer elements than {bound} per thread",
    )
