"""Everything that a call computes, by name, for comparisons to the bit."""

import torch
from torch import Tensor

from tests.support.calls.call import Call
from tests.support.results import Results
from tests.support.seeds import set_seed


def everything(call: Call, given: Results) -> Results:
    """Results, what is written in place, and gradients, whose upstream ones are among `given`."""
    arguments = {n: t for n, t in given.items() if not n.startswith("upstream")}
    names = call.wanted(arguments) if call.differentiable else []
    leaves = {n: arguments[n].detach().requires_grad_() for n in names}
    set_seed(3)
    outputs = call.run(**arguments | leaves)
    found = {f"result {i}": y.detach() for i, y in enumerate(outputs)}
    found |= {f"written {n}": arguments[n].clone() for n in call.written}
    if names:
        pairs = [(y, given[f"upstream {i}"]) for i, y in enumerate(outputs) if y.requires_grad]
        differentiated, upstream = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(differentiated, list(leaves.values()), upstream)
        found |= {f"gradient of {n}": g for n, g in zip(names, gradients, strict=True)}
    return found


def with_upstream(call: Call, given: Results) -> Results:
    """The arguments, and an upstream gradient for each result."""
    if not call.differentiable:
        return given
    outputs = call.results(given)
    return given | {f"upstream {i}": _drawn(y, seed=i) for i, y in enumerate(outputs)}


def _drawn(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def clones(given: Results) -> Results:
    return {name: tensor.clone() for name, tensor in given.items()}


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of its storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def of_samples(given: Results) -> set[str]:
    """The names of those that have as many samples as the first."""
    count = len(next(iter(given.values())))
    return {name for name, tensor in given.items() if tensor.dim() and len(tensor) == count}


def samples(given: Results, rows: slice | Tensor) -> Results:
    """These samples of the batch."""
    own = of_samples(given)
    return {name: tensor[rows] if name in own else tensor for name, tensor in given.items()}
