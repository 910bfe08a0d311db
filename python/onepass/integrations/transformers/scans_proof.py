"""The numeric proof that a function of a model's file computes what `scans.py` computes for it.

The function that runs without the package is called on the CPU with random numbers, in float32 and
bfloat16. By the rule of `onepass.numerics` its results, its gradients and the states that it
writes are those of the definition in float64, and ours are not less exact. Dtypes must be the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.integrations.transformers import scans as ours
from onepass.reference import delta_rule
from onepass.reference.causal_conv import causal_conv1d, causal_conv1d_update
from onepass.reference.mamba_chunk_scan import mamba_chunk_scan
from onepass.reference.selective_scan import selective_scan, selective_state_update
from onepass.swapping import scans, trials
from onepass.swapping.scans import Called
from onepass.swapping.specs import ScanSpec
from onepass.swapping.trials import Refused

_DRAWS = 4  # judged together
_BATCH, _CHANNELS, _TOKENS, _WIDTH, _STATE = 2, 6, 11, 4, 5  # all different, to tell them apart
_HEADS, _GROUPS = 4, 2

Draw = Callable[..., Tensor]
Arguments = dict[str, object]


class _Form(NamedTuple):
    """A way to call a function."""

    text: str  # of the definition
    draw: Callable[[Draw], Iterator[Arguments]]  # arguments of its calls
    exact: Callable[..., object]  # the definition, which returns states that theirs writes
    state: str = ""  # the argument that theirs writes


def prove(called: Called, beside: str) -> ScanSpec | str:
    """The spec of a function that computes what its name says, or why it is not replaced."""
    spec = ScanSpec(called.name, called.of_package, beside)
    theirs = scans.reference(called.function)
    with trials.isolated():
        try:
            if called.of_package in scans.FUSED:
                _check_returns_none(theirs)
            else:
                _check_parameters(theirs, ours.PARAMETERS[called.of_package])
                _check_values(theirs, spec)
        except Refused as refusal:
            return f"{called.name} {refusal}"
    return spec


def _check_returns_none(theirs: Callable) -> None:
    given = [p for p in inspect.signature(theirs).parameters.values() if p.default is p.empty]
    given = [p for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    with trials.foreign_code("fails"):
        if theirs(*(None for _ in given)) is not None:
            raise Refused("computes a layer itself")


def _check_parameters(theirs: Callable, parameters: tuple[str, ...]) -> None:
    found = inspect.signature(theirs).parameters.values()
    names = [parameter.name for parameter in found if parameter.kind is not parameter.VAR_KEYWORD]
    if names != [*parameters]:
        raise Refused(f"takes ({', '.join(names)}), not ({', '.join(parameters)})")


def _check_values(theirs: Callable, spec: ScanSpec) -> None:
    """Compares theirs and ours to one of the forms."""
    refusals = []
    for form in _FORMS[spec.of_package]:
        forwards = (
            functools.partial(_run, form, theirs),
            functools.partial(_run, form, ours.computing(_not_taken, spec)),
            functools.partial(_run_exactly, form),
        )
        results = functools.partial(_results, form)
        try:
            for dtype in (torch.float32, torch.bfloat16):
                trials.judge(form.text, dtype, forwards, results, _DRAWS)
            return
        except Refused as refusal:
            refusals.append(str(refusal))
    raise Refused("; ".join(refusals))


def _not_taken(*_, **__):
    raise Refused("is nothing that onepass computes")


def _run(form: _Form, function: Callable, given: Arguments) -> list[Tensor]:
    if not form.state:
        return _listed(function(**given))
    given = given | {form.state: given[form.state].clone()}
    return [*_listed(function(**given)), given[form.state]]


def _run_exactly(form: _Form, given: Arguments) -> list[Tensor]:
    return _listed(form.exact(**{name: trials.in_double(x) for name, x in given.items()}))


def _listed(result: Tensor | tuple) -> list[Tensor]:
    results = [result] if isinstance(result, Tensor) else list(result)
    return [x for x in results if x is not None]


def _results(form: _Form, dtype: torch.dtype, seed: int, run: Callable) -> list[Tensor]:
    """Results of all calls; without a state that is written, gradients of their arguments too."""
    normal = trials.normals(22 + seed, torch.float32)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return normal(*shape, dtype=dtype)

    found = []
    for given in form.draw(draw):
        leaves = [x for x in given.values() if isinstance(x, Tensor) and not form.state]
        for leaf in leaves:
            leaf.requires_grad_()
        with trials.foreign_code("fails"), torch.set_grad_enabled(bool(leaves)):
            if leaves:
                call = functools.partial(run, given)
                found += trials.outcome(call, leaves, lambda y: draw(*y.shape, dtype=y.dtype))
            else:
                found += run(given)
    return found


# ---- the forms -----------------------------------------------------------------------------------


def _convolutions(draw: Draw) -> Iterator[Arguments]:
    for options in ({"bias": draw(_CHANNELS), "activation": "silu"}, {}):
        x, weight = draw(_BATCH, _CHANNELS, _TOKENS), draw(_CHANNELS, _WIDTH)
        yield dict(hidden_states=x, weight=weight, **options)


def _convolved(hidden_states, weight, bias=None, activation=None):
    return causal_conv1d(hidden_states, weight, bias, activation)


def _convolution_steps(draw: Draw) -> Iterator[Arguments]:
    for more in (0, 1):  # columns of the state that the convolution does not read
        for given in _convolutions(draw):
            given["hidden_states"] = given["hidden_states"][..., :1]
            yield given | {"conv_state": draw(_BATCH, _CHANNELS, _WIDTH - 1 + more)}


def _convolved_on(hidden_states, conv_state, weight, bias=None, activation=None):
    return causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


def _scans(draw: Draw) -> Iterator[Arguments]:
    of_token, of_state = (_BATCH, _CHANNELS, _TOKENS), (_BATCH, _STATE, _TOKENS)

    def given(**options) -> Arguments:
        A = -draw(_CHANNELS, _STATE, dtype=torch.float32).exp()
        names = dict(hidden_states=of_token, dt=of_token, B=of_state, C=of_state)
        return {name: draw(*shape) for name, shape in names.items()} | {"A": A} | options

    D, delta_bias = (draw(_CHANNELS, dtype=torch.float32) for _ in range(2))
    yield given(
        D=D, z=draw(*of_token), delta_bias=delta_bias, delta_softplus=True, return_last_state=True
    )
    yield given(delta_softplus=True)


def _scanned(
    hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
    return_last_state=False,
):  # fmt: skip
    scan = selective_scan(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus)
    return scan if return_last_state else scan[0]


def _scans_in_chunks(draw: Draw) -> Iterator[Arguments]:
    of_step, of_factor = (_BATCH, _TOKENS, _HEADS), (_BATCH, _TOKENS, _GROUPS, _STATE)
    of_states = (_BATCH, _HEADS, _CHANNELS, _STATE)

    def given(**options) -> Arguments:
        A = -draw(_HEADS, dtype=torch.float32).exp()
        names = dict(hidden_states=(*of_step, _CHANNELS), dt=of_step, B=of_factor, C=of_factor)
        drawn = {name: draw(*shape) for name, shape in names.items()}
        return drawn | dict(A=A, chunk_size=_TOKENS // 2, dt_softplus=True) | options

    D, dt_bias = (draw(_HEADS, dtype=torch.float32) for _ in range(2))
    states = draw(*of_states, dtype=torch.float32)
    yield given(D=D, dt_bias=dt_bias, initial_states=states, return_final_states=True)
    yield given(dt_limit=(0.1, 2.0))


def _scanned_in_chunks(
    hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
):  # fmt: skip
    tensors = (hidden_states, dt, A, B, C, D, None, dt_bias)
    scan = mamba_chunk_scan(*tensors, dt_softplus, initial_states, None, dt_limit)
    return scan if return_final_states else scan[0]


def _steps(
    draw: Draw, of_token: tuple[int, ...], of_factor: tuple[int, ...]
) -> Iterator[Arguments]:
    """Arguments of a step of decoding, with a state of each channel; channels may be in heads."""

    def given(**options) -> Arguments:
        state = draw(_BATCH, *of_token, _STATE, dtype=torch.float32)
        A = -draw(*of_token, _STATE, dtype=torch.float32).exp()
        x, dt = draw(_BATCH, *of_token), draw(_BATCH, *of_token)
        B, C = (draw(_BATCH, *of_factor, _STATE) for _ in range(2))
        return dict(state=state, hidden_states=x, dt=dt, A=A, B=B, C=C, **options)

    D, dt_bias = draw(*of_token), draw(*of_token, dtype=torch.float32)
    yield given(D=D, dt_bias=dt_bias, dt_softplus=True, z=draw(_BATCH, *of_token))
    yield given(dt_softplus=True)


def _stepped(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None):
    return selective_state_update(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)


def _delta_rules(
    draw: Draw, key_heads: int, of_decay: tuple[int, ...], **size: int
) -> Iterator[Arguments]:
    of_token, of_keys = (_BATCH, _TOKENS, _HEADS), (_BATCH, _TOKENS, key_heads, _STATE)
    state = draw(_BATCH, _HEADS, _STATE, _CHANNELS, dtype=torch.float32)
    options = dict(initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    without = dict(initial_state=None, output_final_state=False)
    # The second draws keys of norms near 1: states grow with longer ones.
    for factor, more in ((1, options | size), (_STATE**-0.5, without)):
        query, key, value = draw(*of_keys), factor * draw(*of_keys), draw(*of_token, _CHANNELS)
        g = -draw(*of_token, *of_decay, dtype=torch.float32).exp()
        beta = draw(*of_token).sigmoid()
        yield dict(query=query, key=key, value=value, g=g, beta=beta, **more)


def _attended(
    query, key, value, g, beta, chunk_size=0, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False,
):  # fmt: skip
    scale, l2norm = query.shape[-1] ** -0.5, use_qk_l2norm_in_kernel
    found = delta_rule.recurrent(query, key, value, g, beta, scale, initial_state, None, l2norm)
    return found if output_final_state else found[0]


_GATED = functools.partial(_delta_rules, key_heads=_GROUPS, of_decay=())
_KIMI = functools.partial(_delta_rules, key_heads=_HEADS, of_decay=(_STATE,))
_FORMS = {
    "causal_conv1d_fn": (_Form("a causal convolution", _convolutions, _convolved),),
    "causal_conv1d_update": (
        _Form("a step of a causal convolution", _convolution_steps, _convolved_on, "conv_state"),
    ),
    "selective_scan_fn": (_Form("a selective scan", _scans, _scanned),),
    "mamba_chunk_scan_combined": (_Form("a scan in chunks", _scans_in_chunks, _scanned_in_chunks),),
    "selective_state_update": tuple(
        _Form(
            f"a step of a selective scan {text}",
            functools.partial(_steps, of_token=of_token, of_factor=of_factor),
            _stepped,
            "state",
        )
        for text, of_token, of_factor in (
            ("of channels", (_CHANNELS,), ()),
            ("of heads", (_HEADS, _CHANNELS), (_GROUPS,)),
        )
    ),
    **{
        name: (_Form(text, functools.partial(draw, **size), _attended),)
        for name, text, draw, size in (
            ("chunk_gated_delta_rule", "a gated delta rule", _GATED, {"chunk_size": _TOKENS // 2}),
            ("fused_recurrent_gated_delta_rule", "a gated delta rule", _GATED, {}),
            ("chunk_kda", "Kimi delta attention", _KIMI, {"chunk_size": _TOKENS // 2}),
            ("fused_recurrent_kda", "Kimi delta attention", _KIMI, {}),
        )
    },
}
