"""Gated feed-forward blocks of other libraries: found by their parts, proven with numbers.

A block is `down(activation(gate(x)) * up(x))`, or `down` of the two halves of one projection. The
proof runs the module's own forward, on the CPU in float64, with small linear layers in place of its
own, and compares it with every activation that onepass has: a forward that computes, casts or drops
anything else differs by far more than float64's rounding.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import onepass.functional
from onepass import _stock
from onepass._overrides import visibly
from onepass._policy import small_calls
from onepass._refusals import or_torchs
from onepass.reference import gate as reference
from onepass.swapping import facts, trials
from onepass.swapping.classes import ProvenForward, run_original
from onepass.swapping.inputs import is_plain
from onepass.swapping.specs import GatedSpec

_IN, _HIDDEN, _OUT = 5, 7, 6  # of the small layers: all different, to tell them apart
_MOST_ERROR = 1e-12  # relative to the largest number; float64 rounds at 1e-16


# ---- the forward ---------------------------------------------------------------------------------


_gated_activation = functools.partial(visibly, onepass.functional.gated_activation)


class GatedForward(ProvenForward):
    """Forward of a gated feed-forward block that was proven to be one.

    Its linear layers are called as modules, with their hooks and adapters; the module of the
    activation is not called.
    """

    def _onepass_compute(self, input):
        spec = self._onepass_spec
        project = getattr(self, spec.gate)
        if not input.dim() or small_calls.gate_is_small(input, project):
            return run_original(self, self._onepass_original.forward, input)
        gate = project(input)
        up = None if spec.up is None else getattr(self, spec.up)(input)
        options = {"activation": spec.activation, "gate_last": spec.gate_last}
        alike = up is None or (is_plain(up) and up.shape == gate.shape)
        if alike and is_plain(gate):
            hidden = or_torchs(_gated_activation, reference.gated_activation, gate, up, **options)
        else:  # of sharded layers, or of one that was replaced
            hidden = reference.gated_activation(gate, up, **options)
        return getattr(self, spec.down)(hidden)


# ---- parts and proof -----------------------------------------------------------------------------


class Parts(NamedTuple):
    """The submodules of a module that may be a gated block."""

    linears: tuple[str, ...]
    activation: str | None  # None: forward calls a function
    argument: str


def parts(module: nn.Module, argument: str | None) -> Parts | None:
    """The parts of a module with the structure of a gated block; None for others.

    Two linear layers, or three, of sizes that fit, and at most one module beside them, without
    parameters. Adapters around linear layers are linear layers.
    """
    if argument is None or any(x is not None for x in module._parameters.values()):
        return None
    linears, others = [], []
    for name, part in module._modules.items():
        (linears if _is_linear(part) else others).append(name)
    if len(linears) not in (2, 3) or len(others) > 1 or module._buffers:
        return None
    for name in others:
        part = module._modules[name]
        if part is None or any(True for _ in itertools.chain(part.parameters(), part.buffers())):
            return None
    found = Parts(tuple(linears), others[0] if others else None, argument)
    return found if any(_roles(module, found)) else None


def _is_linear(part: nn.Module | None) -> bool:
    return part is not None and all(
        type(_stock.peek(part, name)) is int for name in ("in_features", "out_features")
    )


def _roles(module: nn.Module, found: Parts) -> Iterator[tuple[str, str | None, str]]:
    """(gate, up, down) with fitting sizes; up is None for one projection of both halves."""
    sizes = {
        name: (module._modules[name].in_features, module._modules[name].out_features)
        for name in found.linears
    }
    if len(sizes) == 2:
        for gate, down in itertools.permutations(sizes):
            if sizes[gate][1] == 2 * sizes[down][0]:
                yield gate, None, down
    else:
        for gate, up, down in itertools.permutations(sizes):
            if sizes[gate] == sizes[up] and sizes[gate][1] == sizes[down][0]:
                yield gate, up, down


def prove(module: nn.Module, found: Parts) -> GatedSpec | str:
    """The block that `module` computes, or the reason why it is not swapped.

    The module is only read, as by `probe.probe`.
    """
    reason = "is no gated feed-forward block with an activation that onepass has"
    with trials.isolated():
        for gate, up, down in _roles(module, found):
            try:
                for spec in _Trial(module, found, gate, up, down).specs():
                    return spec
            except trials.Refused as refusal:
                reason = str(refusal)
    return reason


def configuration(module: nn.Module, found: Parts) -> tuple:
    """Two modules with the same configuration get the same verdict. Valid while both are alive."""
    cls = type(module)
    activation = module._modules[found.activation] if found.activation else None
    of_activation = tuple(sorted(trials.attributes(activation).items())) if activation else ()
    sizes = tuple(_roles(module, found))
    of_module = tuple(sorted(trials.attributes(module).items()))
    return cls, cls.forward, found, sizes, type(activation), of_activation, of_module


class _Trial:
    """A run of the forward with small layers in certain roles."""

    def __init__(self, module: nn.Module, found: Parts, gate: str, up: str | None, down: str):
        self.names = {"gate": gate, "up": up, "down": down}
        self.argument = found.argument
        self.held = facts.held(module, *filter(None, (found.activation,)))
        normal = trials.normals(21)
        twin = trials.twin(module)
        sizes = {
            gate: (_IN, _HIDDEN if up else 2 * _HIDDEN),
            up: (_IN, _HIDDEN),
            down: (_HIDDEN, _OUT),
        }
        for name in found.linears:
            twin._modules[name] = nn.Linear(*sizes[name], dtype=torch.float64, device="cpu")
            for parameter in twin._modules[name].parameters():
                parameter.data = normal(*parameter.shape)
        if found.activation is not None:
            twin._modules[found.activation] = copy.deepcopy(module._modules[found.activation])
        trials.call_without_hooks(twin)
        x = 2.0 * normal(2, 3, _IN)
        self.gate = twin._modules[gate](x)
        self.up = twin._modules[up](x) if up else None
        self.down = twin._modules[down]
        state = torch.get_rng_state()
        with trials.foreign_code("fails on small layers"):
            self.outputs = [type(module).forward(twin.train(on), x) for on in (True, False)]
        if not torch.equal(torch.get_rng_state(), state):
            raise trials.Refused("draws random numbers")

    def specs(self) -> Iterator[GatedSpec]:
        """The specs of blocks that give these outputs."""
        orders = (False, True) if self.up is None else (False,)
        for activation, gate_last in itertools.product(reference.ACTIVATIONS, orders):
            hidden = reference.gated_activation(self.gate, self.up, activation, gate_last)
            expected = self.down(hidden)
            if all(
                isinstance(output, Tensor)
                and output.shape == expected.shape
                and trials.distance(output, expected) < _MOST_ERROR
                for output in self.outputs
            ):
                yield GatedSpec(
                    **self.names,
                    gate_last=gate_last,
                    activation=activation,
                    argument=self.argument,
                    held=self.held,
                )
