"""Gated activations: the product in the middle of SwiGLU, GeGLU and similar layers, in one pass."""

from __future__ import annotations

from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops import gate as _gate


def gated_activation(
    gate: Tensor, up: Tensor | None = None, *, activation: str = "silu", gate_last: bool = False
) -> Tensor:
    """``activation(gate) * up`` in one pass over memory, and its backward in another.

    The backward recomputes the activation, so only gate and up are kept. Both are read in place if
    the last dimension is dense, such as views of one projection. Computed in float32 (float64 for
    float64) and rounded once.

    Shazeer, GLU variants improve transformer, 2020.

    Args:
        gate: any shape; float32, bfloat16, float16 or float64.
        up: gate's shape; None: gate holds both in its last dimension, of twice the output's size,
            and its gradient is one tensor of that size.
        activation: "silu", "gelu", "gelu_tanh" (gelu's approximation by tanh), "relu", "relu2"
            (relu's square), "quick_gelu" (x sigmoid(1.702 x)) or "sigmoid".
        gate_last: without up, the second half is the gate, as in `torch.nn.functional.glu` and in
            diffusers' GEGLU; else the first is.

    Returns:
        Tensor of one factor's shape, in the dtype that torch promotes both to and in their
            memory order.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: activation is none of these.

    Examples:
        >>> both = torch.randn(4, 2 * 512)  # gate and up, of one projection
        >>> y = onepass.functional.gated_activation(both, activation="gelu_tanh")
        >>> y.shape
        torch.Size([4, 512])
    """
    try:
        kind = _kind_of(activation, "gated_activation")
        if type(gate_last) is not bool:
            raise TypeError  # which check_arguments names
        return _gate.gated_activation(gate, up, kind, gate_last)
    except Exception:
        check_arguments(gated_activation, locals())
        raise


def silu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, as in Llama: `gated_activation`.

    Examples:
        >>> gate, up = torch.randn(4, 512), torch.randn(4, 512)
        >>> onepass.functional.silu_mul(gate, up).shape
        torch.Size([4, 512])
    """
    try:
        return _gate.gated_activation(gate, up, _gate.KINDS["silu"], False)
    except Exception:
        check_arguments(silu_mul, locals())
        raise


def gelu_mul(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up``, as in Gemma: `gated_activation`.

    Args:
        gate, up: as there.
        approximate: "none" or "tanh", as in `torch.nn.functional.gelu`.

    Examples:
        >>> gate, up = torch.randn(4, 512), torch.randn(4, 512)
        >>> y = onepass.functional.gelu_mul(gate, up, approximate="tanh")
        >>> y.shape
        torch.Size([4, 512])
    """
    try:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"gelu_mul: approximate must be 'none' or 'tanh', got {approximate!r}")
        kind = _gate.KINDS["gelu" if approximate == "none" else "gelu_tanh"]
        return _gate.gated_activation(gate, up, kind, False)
    except Exception:
        check_arguments(gelu_mul, locals())
        raise


def _kind_of(activation: str, op: str) -> int:
    """The number of an activation in the operators.

    Raises:
        ValueError: there is no such activation.
    """
    if activation not in _gate.KINDS:
        names = ", ".join(map(repr, _gate.KINDS))
        raise ValueError(f"{op}: activation must be one of {names}, got {activation!r}")
    return _gate.KINDS[activation]
