"""The compared optimizers: how to make each, and the bytes of its states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import onepass
from onepass.optim.flat_state import Request, padded
from onepass.optim.states import StateOptimizer

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def _muon_and_adamw(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Muon for all parameters of two dimensions. `muon_groups`, which looks at modules, would give
    embeddings and heads to AdamW, with one moment more."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if (p.ndim == 2) is use_muon], "use_muon": use_muon}
        for use_muon in (True, False)
    ]
    return onepass.optim.MuonWithAdamW([group for group in groups if group["params"]])


ADAMW = "torch AdamW"
ADAMW_FUSED = "torch AdamW, fused"
_PLAIN: dict[str, Make] = {
    ADAMW: torch.optim.AdamW,
    ADAMW_FUSED: functools.partial(torch.optim.AdamW, fused=True),
    "torch SGD": torch.optim.SGD,
    "torch SGD, momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "AdamW": onepass.optim.AdamW,
    "AdamW, bfloat16 moments": functools.partial(onepass.optim.AdamW, state_dtype="bfloat16"),
    "AdamW, int8 moments": functools.partial(onepass.optim.AdamW, state_dtype="int8"),
    "SGD, momentum": functools.partial(onepass.optim.SGD, momentum=0.9),
    "Lion": onepass.optim.Lion,
    "Muon and AdamW": _muon_and_adamw,
}
# Without effect on float32 parameters.
_WITH_MASTER: dict[str, Make] = {
    f"AdamW, {master}{moments}": functools.partial(
        onepass.optim.AdamW, master=master, state_dtype=dtype
    )
    for master in ("fp32", "remainder16", "stochastic")
    for moments, dtype in (("", None), (", int8 moments", "int8"))
}


ALL = _PLAIN | _WITH_MASTER


def names(model: nn.Module) -> dict[str, Make]:
    """The optimizers that are worth a line for a model, by name."""
    trained = [p for p in model.parameters() if p.requires_grad]
    has_16_bit = any(p.dtype is torch.bfloat16 for p in trained)
    return dict(ALL if has_16_bit else _PLAIN)


def state_bytes(optimizer: StateOptimizer) -> int:
    """Bytes of the states that one of onepass's optimizers makes in its first step, padded as in
    its buffers.
    """
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            expected = optimizer._expected(parameter, group)
            if "step" not in expected:  # stored separately
                expected["step"] = torch.float32
            for key, dtype in expected.items():
                total += padded(Request(parameter, key, dtype).numel()) * dtype.itemsize
    return total
