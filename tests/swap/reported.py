"""What a report lists, the classes of a model, and the operators that a call runs."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from onepass import _dispatch_log


def names(entries: Iterable[dict]) -> set[str]:
    return {entry["name"] for entry in entries}


def types(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def operators(run: Callable, of: str = "") -> list[str]:
    """The operators that `run` calls whose names begin with `of`."""
    with _dispatch_log.record() as calls:
        run()
    return [call["op"] for call in calls if call["op"].startswith(of)]


def attentions(run: Callable) -> int:
    return len(operators(run, "attention"))


def kernels(run: Callable, name: str) -> int:
    """The number of calls of a kernel in `run`."""
    with _dispatch_log.record() as calls:
        run()
    return sum(call["kernel"] == name for call in calls)


def graph_of(function: Callable, *args) -> str:
    """The code of the graph that torch.compile makes."""
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.code))
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    (code,) = graphs
    return code


def losses(run: Callable) -> int:
    """The number of losses that ours computes, of logits or without them."""
    return kernels(run, "loss_forward_kernel")
