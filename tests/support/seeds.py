"""Seeds of torch's generators, and those that the operators draw from them."""

import torch
from torch import Tensor


def set_seed(seed: int) -> None:
    """As torch.manual_seed(), which takes a millisecond to note the stack for devices to come."""
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def drawn_seed(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """The seed tensor that an op draws on a device after set_seed(seed)."""
    set_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)
