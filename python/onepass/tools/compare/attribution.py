"""Attribution of a training step's time to its parts, forward and backward.

Method: one step runs with a stamp of the clock at every boundary between parts, so that the parts
and the time between them sum to the step by construction.

- Forward: a part is the outermost module or torch function of a known kind. Modules are needed for
  norms that are composed of several operations and for swapped modules; functions (seen through a
  TorchFunctionMode) for everything that models call directly. Functions of no known kind, such as
  residual adds and reshapes, are "other operators"; the time between functions is the model's own
  Python, with about a microsecond a function that the watching takes.
- Backward: every node of the autograd graph has the sequence number of the operation that made it,
  so it belongs to the part that was open then. A hook before and one after each node stamp the
  clock. Work of the engine between nodes, such as summing gradients of the residual stream, is
  unattributed. Recomputation by activation checkpointing counts for the part whose backward
  triggers it.
- On CUDA the stamps are events on the stream: the GPU's own time line, idle gaps included.

nn.MultiheadAttention counts whole as attention, swapped or not: torch does not expose its
projections. Products with a parameter count as linear, products of two activations as attention.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from onepass.nn import QuantizedLinear
from onepass.swapping.classes import Conv1DForward

OTHER, PYTHON, UNATTRIBUTED = "other operators", "Python", "unattributed"
PARTS = (
    "linear", "attention", "norm", "dropout", "activation", "loss", "convolution", "recurrent",
    "embedding", "optimizer", OTHER, PYTHON, UNATTRIBUTED,
)  # fmt: skip
PHASES = ("forward", "backward", "update")
clock = time.perf_counter
PAUSED = "paused"  # time that counts for nothing: the overhead of watching

_PRODUCTS = {
    "linear", "bilinear", "addmm", "mm", "matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm",
    "einsum",
}  # fmt: skip
_KINDS = {
    "convolution": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    "recurrent": "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    "embedding": "embedding embedding_bag",
    "attention": "scaled_dot_product_attention multi_head_attention_forward masked_attention "
    "softmax",
    "norm": "layer_norm rms_norm group_norm batch_norm instance_norm add_layer_norm add_rms_norm "
    "modulated_layer_norm modulated_rms_norm",
    "dropout": "dropout dropout_ dropout1d dropout2d alpha_dropout",
    "loss": "log_softmax cross_entropy cross_entropy_in_float32 linear_cross_entropy",
    "activation": "gated_activation gelu relu relu_ silu mish sigmoid tanh elu selu celu glu "
    "hardswish leaky_relu softplus relu6 logsigmoid hardtanh prelu",
}
_FUNCTIONS = {name: part for part, names in _KINDS.items() for name in names.split()}
_ACTIVATIONS = tuple(
    getattr(nn.modules.activation, name)
    for name in nn.modules.activation.__all__
    if name != "MultiheadAttention"
)


def part_of_module(module: nn.Module) -> str | None:
    """The part that a module's whole forward belongs to, or None to look inside it."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "dropout"
    if isinstance(module, (nn.Softmax, nn.MultiheadAttention)):
        return "attention"
    if isinstance(module, (nn.Linear, Conv1DForward, QuantizedLinear)):
        return "linear"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution"
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return "recurrent"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, _ACTIVATIONS):
        return "activation"
    if isinstance(module, nn.modules.loss._Loss):
        return "loss"
    # By name as well: other people's norms are classes of their own. Those with children (adaptive
    # norms with a projection inside) are looked into.
    if "norm" in type(module).__name__.lower() and not any(module.children()):
        return "norm"
    return None


def part_of_function(function: Callable, args: tuple, kwargs: dict) -> str | None:
    """The part that a call of a torch function belongs to; None if it only reads an attribute."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return None
    if name in _PRODUCTS:
        operands = (*args, *kwargs.values())
        return "linear" if any(_from_parameter(item) for item in operands) else "attention"
    if name.endswith("_loss"):
        return "loss"
    return _FUNCTIONS.get(name, OTHER)


def _from_parameter(item) -> bool:
    if not isinstance(item, Tensor):
        return False
    return isinstance(item, nn.Parameter) or isinstance(item._base, nn.Parameter)


class Timeline(TorchFunctionMode):
    """The clock stamps of one step, and the sequence numbers that belong to each part."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[object, str, str]] = []  # (stamp, phase and part from here on)
        self._phase = PHASES[0]
        self._depth = 0
        self._listening = True
        self._starts: list[int] = []  # sequence numbers at which the owner changes, ascending
        self._owners: list[str] = []

    def _mark(self, part: str) -> None:
        if self._cuda:
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        else:
            stamp = clock()
        if part == UNATTRIBUTED and self._phase == PHASES[0]:
            part = PYTHON
        self._marks.append((stamp, self._phase, part))

    def enter_phase(self, phase: str, part: str = UNATTRIBUTED) -> None:
        self._phase = phase
        self._mark(part)

    def push(self, part: str) -> None:
        self._depth += 1
        if self._depth == 1:
            self._own(part)
            self._mark(part)

    def pop(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._own(UNATTRIBUTED)
            self._mark(UNATTRIBUTED)

    def _own(self, part: str) -> None:
        self._starts.append(torch.autograd._get_sequence_nr())
        self._owners.append(part)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        part = part_of_function(func, args, kwargs) if self._depth == 0 else None
        if part is None or (part == OTHER and self._phase != PHASES[0]):  # an optimizer's, say
            return func(*args, **kwargs)
        self.push(part)
        try:
            return func(*args, **kwargs)
        finally:
            self.pop()

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Stamps the forward of model's modules of a known kind, and of torch's functions."""
        handles = []
        for module in model.modules():
            part = part_of_module(module)
            if part is not None:
                enter = lambda _module, _args, part=part: self._enter_module(part)  # noqa: E731
                leave = lambda _module, _args, _output: self._leave_module()  # noqa: E731
                handles.append(module.register_forward_pre_hook(enter, prepend=True))
                # A checkpoint ends its second forward by an exception as soon as it has all
                # tensors.
                handles.append(module.register_forward_hook(leave, always_call=True))
        self.__enter__()
        try:
            yield
        finally:
            if self._listening:
                self.__exit__(None, None, None)
            for handle in handles:
                handle.remove()

    def _enter_module(self, part: str) -> None:
        self.push(part)
        # Inside a known module there is nothing more to find, and a mode costs a microsecond at
        # every property of a tensor that Python reads. Some modules read more of them than others,
        # so the watching would bias the outcome. Not active where autograd's own threads recompute
        # a checkpointed forward: modes belong to a thread.
        if self._depth == 1 and _get_current_function_mode() is self:
            self.__exit__(None, None, None)
            self._listening = False

    def _leave_module(self) -> None:
        if self._depth == 1 and not self._listening:
            self.__enter__()
            self._listening = True
        self.pop()

    def watch_backward(self, loss: Tensor) -> None:
        """Hooks the graph under loss: each node's time goes to the part that made the node."""
        pending, seen = [loss.grad_fn], {loss.grad_fn}
        while pending:
            node = pending.pop()
            part = self._owner(node._sequence_nr())
            if part != UNATTRIBUTED:
                node.register_prehook(lambda _grads, part=part: self.push(part))
                node.register_hook(lambda _inputs, _grads: self.pop())
            for child, _ in node.next_functions:
                # Leaves (AccumulateGrad) keep no sequence number, and a hook on one would make it
                # copy the gradient that it otherwise takes over.
                if child is not None and child not in seen and child.next_functions:
                    seen.add(child)
                    pending.append(child)

    def _owner(self, sequence: int) -> str:
        index = bisect.bisect_right(self._starts, sequence) - 1
        return self._owners[index] if index >= 0 else UNATTRIBUTED

    def milliseconds(self) -> dict[str, dict[str, float]]:
        """Time per phase and part; the last mark closes the step."""
        if self._cuda:
            self._marks[-1][0].synchronize()
        spent = {phase: dict.fromkeys(PARTS, 0.0) for phase in PHASES}
        for (start, phase, part), (end, _, _) in zip(self._marks, self._marks[1:], strict=False):
            if phase != PAUSED:
                spent[phase][part] += start.elapsed_time(end) if self._cuda else (end - start) * 1e3
        return spent


def median(steps: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Part by part, the median of several watched steps."""
    return {
        phase: {part: statistics.median(step[phase][part] for step in steps) for part in PARTS}
        for phase in PHASES
    }


def scaled(spent: dict[str, dict[str, float]], step_ms: float) -> dict[str, dict[str, float]]:
    """The same shares, scaled to step_ms, the measured time of an unwatched step."""
    total = sum(sum(parts.values()) for parts in spent.values())
    factor = step_ms / total
    return {
        phase: {part: ms * factor for part, ms in parts.items()} for phase, parts in spent.items()
    }


def by_part(spent: dict[str, dict[str, float]]) -> dict[str, float]:
    """Forward, backward and update together, per part."""
    return {part: sum(spent[phase][part] for phase in PHASES) for part in PARTS}
