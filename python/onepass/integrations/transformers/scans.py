"""The functions of transformers' state-space and linear-attention layers on onepass's operators,
for `onepass.swap`.

A model calls a function of its own file, which transformers' decorator lets stand in for one of the
packages causal_conv1d, mamba_ssm and fla. Here are functions with the same arguments. They compute
calls on a CPU, forward and backward; all other calls run the model's own function, on a GPU the
package's where that is installed. Results have the dtype of the model's own function.

`onepass.swapping.scans` finds the functions, and `scans_proof.py` tests them.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import onepass.functional
from onepass._overrides import visibly
from onepass._refusals import or_torchs
from onepass.swapping import scans
from onepass.swapping.inputs import is_autocast, is_plain
from onepass.swapping.specs import ScanSpec

_DELTA_RULE = ("query", "key", "value", "g", "beta")
_OF_STATE = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")

# The parameters of transformers' functions, which those below have too.
PARAMETERS = {
    "causal_conv1d_fn": ("hidden_states", "weight", "bias", "activation"),
    "causal_conv1d_update": ("hidden_states", "conv_state", "weight", "bias", "activation"),
    "selective_scan_fn": (
        "hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus",
        "return_last_state", "use_mambapy", "use_associative_scan",
    ),
    "mamba_chunk_scan_combined": (
        "hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states",
        "dt_softplus", "dt_limit", "return_final_states",
    ),
    "selective_state_update": (
        "state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z",
    ),
    "chunk_gated_delta_rule": (*_DELTA_RULE, "chunk_size", *_OF_STATE),
    "fused_recurrent_gated_delta_rule": (*_DELTA_RULE, *_OF_STATE),
    "chunk_kda": (*_DELTA_RULE, "chunk_size", *_OF_STATE),
    "fused_recurrent_kda": (*_DELTA_RULE, *_OF_STATE),
}  # fmt: skip
_ACTIVATIONS = (None, "silu", "swish")
_PACKING = ("seq_idx", "cu_seqlens")
_DEVICES = ("cpu", "meta")
# The packed sequences of a forward that hands them to its convolution and not to its scan.
_OF_FORWARD: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("seq_idx", default=None)


def computing(function: Callable, spec: ScanSpec) -> Callable:
    """Ours, for a function of a model's file that was proven."""
    ours = _OURS[spec.of_package](function, spec.beside)
    ours.__name__ = ours.__qualname__ = spec.name
    return ours


def forward_of(forward: Callable) -> Callable:
    """A forward whose selective scan keeps apart the packed sequences of its `seq_idx`, which
    transformers hands to the convolution alone."""

    @functools.wraps(forward)
    def run(self, *args, **named):
        seq_idx = named.get("seq_idx")
        if seq_idx is None or not _is_one_row(seq_idx):
            return forward(self, *args, **named)
        token = _OF_FORWARD.set(seq_idx)
        try:
            return forward(self, *args, **named)
        finally:
            _OF_FORWARD.reset(token)

    return run


def _is_one_row(seq_idx: object) -> bool:
    """Whether the places where its sequences begin can be read."""
    return (
        isinstance(seq_idx, Tensor)
        and is_plain(seq_idx)
        and seq_idx.device.type == "cpu"
        and seq_idx.dim() == 2
        and seq_idx.shape[0] == 1
        and not torch.compiler.is_compiling()
    )


def _begins(seq_idx: Tensor) -> Tensor:
    """cu_seqlens of a (1, length) tensor of sequence numbers."""
    changes = torch.nonzero(seq_idx[0, 1:] != seq_idx[0, :-1]).flatten() + 1
    return torch.cat((changes.new_zeros(1), changes, changes.new_tensor([seq_idx.shape[1]])))


def _are_ours(tensors: Iterable[object]) -> bool:
    return all(
        x is None or (is_plain(x) and x.device.type in _DEVICES and x.layout is torch.strided)
        for x in tensors
    )


def _packed(named: dict[str, object]) -> dict[str, object]:
    return {name: named[name] for name in _PACKING if named.get(name) is not None}


# ---- causal convolution --------------------------------------------------------------------------


def _causal_conv1d_fn(theirs: Callable, beside: str) -> Callable:
    def ours(hidden_states, weight, bias=None, activation=None, **named):
        given, packed = (hidden_states, weight, bias, activation), _packed(named)
        if packed and beside == scans.SCAN:  # both or none
            is_for_scan = packed.get("seq_idx") is _OF_FORWARD.get() and len(packed) == 1
        else:
            is_for_scan = True
        if not (is_for_scan and activation in _ACTIVATIONS and _are_ours(given[:3])):
            return theirs(*given, **named)
        if not packed and beside == scans.GATED and named.get("cu_seq_lens_q") is not None:
            named["cu_seqlens"] = named["cu_seq_lens_q"]  # as the delta rule gets it
        return or_torchs(_convolved, theirs, *given, **named)

    return ours


def _convolved(hidden_states, weight, bias, activation, **named) -> Tensor:
    packed = _packed(named)
    if len(packed) == 2:
        del packed["cu_seqlens"]  # the package's takes seq_idx alone
    output = visibly(
        onepass.functional.causal_conv1d,
        hidden_states, weight, bias,
        activation=activation and "silu",
        **packed,
    )  # fmt: skip
    return output.to(hidden_states.dtype)


def _causal_conv1d_update(theirs: Callable, beside: str) -> Callable:
    def ours(hidden_states, conv_state, weight, bias=None, activation=None, **named):
        given = (hidden_states, conv_state, weight, bias, activation)
        if _packed(named) or activation not in _ACTIVATIONS or not _are_ours(given[:4]):
            return theirs(*given, **named)
        return or_torchs(_convolved_on, theirs, *given, **named)

    return ours


def _convolved_on(hidden_states, conv_state, weight, bias, activation, **_) -> Tensor:
    output = visibly(
        onepass.functional.causal_conv1d_update,
        hidden_states, conv_state, weight, bias, activation and "silu",
    )  # fmt: skip
    return output.to(hidden_states.dtype)


# ---- selective scan ------------------------------------------------------------------------------


def _selective_scan_fn(theirs: Callable, beside: str) -> Callable:
    def ours(
        hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
        return_last_state=False, use_mambapy=False, use_associative_scan=False, **named,
    ):  # fmt: skip
        given = (hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)
        ways = dict(use_mambapy=use_mambapy, use_associative_scan=use_associative_scan)
        if named.get("seq_idx") is not None or not _are_ours(given[:8]) or _are_mixed(*given[:5]):
            return theirs(*given, **ways, **named)
        return or_torchs(_scanned, theirs, *given, **ways, **named)

    return ours


def _are_mixed(hidden_states, dt, A, B, C) -> bool:
    """Whether theirs raises: its product takes one dtype."""
    return C.dtype is not hidden_states.dtype and not is_autocast(C.device.type)


def _scanned(
    hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, **named
) -> Tensor | tuple[Tensor, Tensor]:
    cu_seqlens = named.get("cu_seqlens")
    if cu_seqlens is None and not torch.compiler.is_compiling():
        seq_idx = _OF_FORWARD.get()
        cu_seqlens = None if seq_idx is None else _begins(seq_idx)
    result = visibly(
        onepass.functional.selective_scan,
        hidden_states, dt, A, B, C, D, z, delta_bias, bool(delta_softplus), None,
        bool(return_last_state), cu_seqlens,
    )  # fmt: skip
    dtype = _dtype_of_scan(hidden_states, D, z)
    if not return_last_state:
        return result.to(dtype)
    output, last_state = result
    return output.to(dtype), last_state[-1:] if cu_seqlens is not None else last_state


def _dtype_of_scan(hidden_states: Tensor, D: Tensor | None, z: Tensor | None) -> torch.dtype:
    """The dtype of theirs: of a product, which autocast may change, plus D times the input."""
    device, dtype = hidden_states.device.type, hidden_states.dtype
    if is_autocast(device):
        dtype = torch.get_autocast_dtype(device)
    for term in (D, hidden_states) if D is not None else ():
        dtype = torch.promote_types(dtype, term.dtype)
    return dtype if z is None else torch.promote_types(dtype, z.dtype)


# ---- scan in chunks ------------------------------------------------------------------------------


def _mamba_chunk_scan_combined(theirs: Callable, beside: str) -> Callable:
    def ours(
        hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None,
        dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, **named,
    ):  # fmt: skip
        given = (hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states)
        options = (dt_softplus, dt_limit, return_final_states)
        cannot_be_read = _packed(named) and torch.compiler.is_compiling()
        if cannot_be_read or not _are_ours((*given[:5], *given[6:])):
            return theirs(*given, *options, **named)
        return or_torchs(_scanned_in_chunks, theirs, *given, *options, **named)

    return ours


def _scanned_in_chunks(
    hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus, dt_limit,
    return_final_states, **named,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    result = visibly(
        onepass.functional.mamba_chunk_scan,
        hidden_states.float(),  # as theirs, whose output is float32
        dt, A, B, C, chunk_size, D, None, dt_bias, bool(dt_softplus), initial_states,
        return_final_states=bool(return_final_states), dt_limit=tuple(dt_limit), **_packed(named),
    )  # fmt: skip
    if not return_final_states or not is_autocast(hidden_states.device.type):
        return result
    output, final_states = result
    return output, final_states.to(torch.get_autocast_dtype(hidden_states.device.type))


def _selective_state_update(theirs: Callable, beside: str) -> Callable:
    def ours(
        state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **named
    ):
        given = (state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)
        if _packed(named) or not _are_ours((*given[:8], z)):
            return theirs(*given, **named)
        return or_torchs(_updated, theirs, *given, **named)

    return ours


def _updated(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **_) -> Tensor:
    output = visibly(
        onepass.functional.selective_state_update,
        state, hidden_states, dt, A, B, C, D, z, dt_bias, bool(dt_softplus),
    )  # fmt: skip
    return output.to(hidden_states.dtype)


# ---- delta rule ----------------------------------------------------------------------------------


def _by_chunks(operator: Callable, theirs: Callable, beside: str) -> Callable:
    compute = functools.partial(_attended, operator)

    def ours(
        query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **named,
    ):  # fmt: skip
        given = (query, key, value, g, beta, chunk_size, initial_state)
        options = (output_final_state, use_qk_l2norm_in_kernel)
        if not _are_ours((*given[:5], initial_state)) or _cannot_be_read(named):
            return theirs(*given, *options, **named)
        return or_torchs(compute, theirs, *given, *options, **named)

    return ours


def _token_by_token(operator: Callable, theirs: Callable, beside: str) -> Callable:
    def compute(query, key, value, g, beta, *of_state, **named):
        return _attended(operator, query, key, value, g, beta, 1, *of_state, **named)

    def ours(
        query, key, value, g, beta, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **named,
    ):  # fmt: skip
        given = (query, key, value, g, beta, initial_state)
        options = (output_final_state, use_qk_l2norm_in_kernel)
        if not _are_ours(given) or _cannot_be_read(named):
            return theirs(*given, *options, **named)
        return or_torchs(compute, theirs, *given, *options, **named)

    return ours


def _cannot_be_read(named: dict[str, object]) -> bool:
    """Whether it is unknown where packed sequences begin."""
    packed = _packed(named)
    return "cu_seqlens" not in packed and "seq_idx" in packed and not _is_one_row(packed["seq_idx"])


def _attended(
    operator, query, key, value, g, beta, chunk_size, initial_state, output_final_state, qk_l2norm,
    **named,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    packed = _packed(named)
    cu_seqlens = packed.get("cu_seqlens")
    if cu_seqlens is None and packed:
        cu_seqlens = _begins(packed["seq_idx"])
    output, final_state = visibly(
        operator,
        query, key, value.to(torch.promote_types(value.dtype, query.dtype)), g, beta,
        initial_state=initial_state,
        output_final_state=bool(output_final_state),
        use_qk_l2norm_in_kernel=bool(qk_l2norm),
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if final_state is not None:  # theirs is in float32
        final_state = (final_state if cu_seqlens is None else final_state[-1:]).float()
    return output.to(query.dtype), final_state


def _fused(theirs: Callable, beside: str) -> Callable:
    """A whole layer in one function: None asks the model to call the others, without a warning."""

    def ours(projected, *args, **named):
        return None if _are_ours((projected,)) else theirs(projected, *args, **named)

    return ours


_OURS = {
    "causal_conv1d_fn": _causal_conv1d_fn,
    "causal_conv1d_update": _causal_conv1d_update,
    "selective_scan_fn": _selective_scan_fn,
    "selective_state_update": _selective_state_update,
    "mamba_chunk_scan_combined": _mamba_chunk_scan_combined,
    "chunk_gated_delta_rule": functools.partial(
        _by_chunks, onepass.functional.chunk_gated_delta_rule
    ),
    "fused_recurrent_gated_delta_rule": functools.partial(
        _token_by_token, onepass.functional.fused_recurrent_gated_delta_rule
    ),
    "chunk_kda": functools.partial(_by_chunks, onepass.functional.chunk_kda),
    "fused_recurrent_kda": functools.partial(
        _token_by_token, onepass.functional.fused_recurrent_kda
    ),
    "mamba_inner_fn": _fused,
    "mamba_split_conv1d_scan_combined": _fused,
}
