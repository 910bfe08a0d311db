"""Norms, dropout, gated activations and linear."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from onepass import functional
from tests.support.calls.call import F32, RAW, Call, flat, randn, sixteenths

# ---- norms and dropout ---------------------------------------------------------------------------


def _norms():
    def plain():
        return {"input": randn(6, 40), "weight": randn(40), "bias": randn(40, seed=1)}

    def no_bias():
        return {"input": randn(6, 40), "weight": randn(40)}

    def added(bias=True):
        own = plain() if bias else no_bias()
        return own | {"residual": randn(6, 40, seed=2)}

    def public(name, tensors, stock=None):
        def run(input, weight, bias=None, residual=None):
            more = () if residual is None else (residual,)
            keywords = {} if bias is None else {"bias": bias}
            extra = {} if residual is None else {"dropout_p": 0.3}
            norm = getattr(functional, name)
            return flat(norm(input, *more, (40,), weight, eps=1e-5, **keywords, **extra))

        optional = ("weight", "bias")
        return Call(
            f"functional.{name}", tensors, run, stock, optional=optional, differentiable=True
        )

    yield public(
        "layer_norm", plain, lambda input, weight, bias: [F.layer_norm(input, (40,), weight, bias)]
    )
    yield public(
        "rms_norm", no_bias, lambda input, weight: [F.rms_norm(input, (40,), weight, 1e-5)]
    )
    yield public("add_layer_norm", added)
    yield public("add_rms_norm", lambda: added(False))

    def forward(op):
        def run(input, residual, weight, bias, seed):
            rest = ((40,), 0, 1e-5, 0.0, 0.3, torch.bfloat16, torch.bfloat16, True)
            return flat(op(input, residual, weight, bias, seed, *rest))

        return run

    def with_seed():
        return added() | {"seed": torch.tensor([3, 4])}

    optional = ("weight", "bias")
    for op in (RAW.norm_forward, RAW.norm_forward_check):
        yield Call(f"ops.{op.__name__}", with_seed, forward(op), optional=optional)

    def backward_tensors():
        x = randn(6, 40, seed=3)
        own = {"doutput": randn(6, 40), "dresidual_out": randn(6, 40, seed=1), "x": x}
        own |= {"weight": randn(40), "bias": randn(40, seed=1), "seed": torch.tensor([3, 4])}
        return own | {"mean": x.mean(1), "rstd": x.var(1, False).add(1e-5).rsqrt()}

    def backward(op):
        def run(doutput, dresidual_out, x, weight, bias, seed, mean, rstd):
            rest = ((40,), 0, 0.0, 0.3, F32, F32, 15)
            tensors = (doutput, dresidual_out, x, weight, bias, seed, mean, rstd)
            return flat(op(*tensors, *rest))

        return run

    optional = ("doutput", "dresidual_out", "weight", "bias")
    for op in (RAW.norm_backward, RAW.norm_backward_check):
        yield Call(f"ops.{op.__name__}", backward_tensors, backward(op), optional=optional)


def _modulated_norms():
    def plain():
        own = {"input": randn(2, 3, 40), "scale": randn(2, 40), "shift": randn(2, 40, seed=1)}
        return own

    def gated():
        return plain() | {"residual": randn(2, 3, 40, seed=2), "gate": randn(2, 40, seed=3)}

    def public(kind, torchs):
        def run(input, scale, shift=None, residual=None, gate=None):
            norm = getattr(functional, f"modulated_{kind}")
            return flat(norm(input, (40,), scale, shift, 1e-5, residual=residual, gate=gate))

        def stock(input, scale, shift):
            norm = torchs(input, (40,), eps=1e-5)
            return [norm * (1 + scale[:, None]) + shift[:, None]]

        name = f"functional.modulated_{kind}"
        yield Call(name, plain, run, stock, optional=("shift",), differentiable=True)
        rest = {"optional": ("shift", "gate"), "differentiable": True}
        yield Call(f"{name} of a gated sum", gated, run, **rest)

    yield from public("layer_norm", F.layer_norm)
    yield from public("rms_norm", F.rms_norm)

    def raw(op, **options):
        options |= {"normalized_shape": (40,), "kind": 0, "dropout_p": 0.3}
        return lambda **tensors: flat(op(**tensors, **options))

    def seeded():
        return gated() | {"row_scale": torch.tensor([0.0, 1.25]), "seed": torch.tensor([3, 4])}

    optional = ("shift", "gate", "row_scale")
    for op in (RAW.modulated_norm_forward, RAW.modulated_norm_forward_check):
        run = raw(op, eps=1e-5, out_dtype=torch.bfloat16, save_statistics=True)
        yield Call(f"ops.{op.__name__}", seeded, run, optional=optional)

    def backward():
        own, x = seeded(), randn(2, 3, 40, seed=4)
        own |= {"x": x, "branch": own.pop("input"), "dresidual_out": own.pop("residual")}
        own |= {"doutput": randn(2, 3, 40, seed=5), "mean": x.mean(2)}
        return own | {"rstd": x.var(2, False).add(1e-5).rsqrt()}

    optional = ("doutput", "dresidual_out", "shift", "row_scale")
    for op in (RAW.modulated_norm_backward, RAW.modulated_norm_backward_check):
        run = raw(op, input_dtype=F32, residual_dtype=F32, grad_mask=31)
        yield Call(f"ops.{op.__name__}", backward, run, optional=optional)


def _branches():
    def scales():
        return {"column_scale": randn(40), "row_scale": torch.tensor([0.0, 1.25])}

    def two():
        own = {"input": randn(2, 3, 40), "residual": randn(2, 3, 40, seed=1)}
        return own | scales()

    def normed():
        return two() | {"weight": randn(40, seed=2), "bias": randn(40, seed=3)}

    def add_norm(input, residual, column_scale, row_scale, weight, bias):
        scales = {"column_scale": column_scale, "row_scale": row_scale, "dropout_p": 0.3}
        return flat(functional.add_layer_norm(input, residual, (40,), weight, bias, **scales))

    def add_dropout(input, residual, column_scale, row_scale):
        scales = {"column_scale": column_scale, "row_scale": row_scale}
        return [functional.add_dropout(input, residual, 0.4, **scales)]

    rest = {"differentiable": True, "constant": ("row_scale",)}
    optional = ("residual", "column_scale", "row_scale", "weight", "bias")
    name = "of a scaled branch"
    yield Call(f"functional.add_layer_norm {name}", normed, add_norm, optional=optional, **rest)
    optional = ("residual", "column_scale", "row_scale")
    yield Call(f"functional.add_dropout {name}", two, add_dropout, optional=optional, **rest)

    def factors(input):
        return [functional.drop_path_scale(input, 0.4)]

    def one():
        return {"input": randn(2, 3, 40)}

    yield Call("functional.drop_path_scale", one, factors, composed=True)

    def raw(op, **options):
        return lambda **tensors: flat(op(**tensors, p=0.4, **options))

    def seeded():
        return two() | {"seed": torch.tensor([3, 4])}

    for op in (RAW.branch_forward, RAW.branch_forward_check):
        run = raw(op, out_dtype=torch.bfloat16)
        yield Call(f"ops.{op.__name__}", seeded, run, optional=optional)

    def backward():
        own = {"doutput": randn(2, 3, 40), "branch": randn(2, 3, 40, seed=1)}
        return own | scales() | {"seed": torch.tensor([3, 4])}

    for op in (RAW.branch_backward, RAW.branch_backward_check):
        run = raw(op, input_dtype=F32, grad_mask=3)
        yield Call(f"ops.{op.__name__}", backward, run, optional=("row_scale",))


def _dropouts():
    def one():
        return {"input": randn(6, 40)}

    def two():
        return {"input": randn(6, 40), "residual": randn(6, 40, seed=1)}

    def dropout(input):
        return [functional.dropout(input, 0.4)]

    def inplace(input):
        return [functional.dropout(input, 0.4, inplace=True)]

    def add_dropout(input, residual):
        return [functional.add_dropout(input, residual, 0.4)]

    def stock(inplace):
        return lambda input: [F.dropout(input, 0.4, inplace=inplace)]

    yield Call("functional.dropout", one, dropout, stock(False), differentiable=True)
    yield Call("functional.dropout inplace", one, inplace, stock(True), written=("input",))
    yield Call(
        "functional.add_dropout", two, add_dropout, optional=("residual",), differentiable=True
    )

    def raw(op):
        def run(input, residual, seed):
            return flat(op(input, residual, seed, 0.4, None))

        return run

    def seeded():
        return two() | {"seed": torch.tensor([3, 4])}

    for op in (RAW.dropout_forward, RAW.dropout_forward_check):
        yield Call(f"ops.{op.__name__}", seeded, raw(op), optional=("residual",))


# ---- causal convolution --------------------------------------------------------------------------


def _causal_convolutions():
    def plain():
        return {"x": randn(2, 6, 9), "weight": randn(6, 4, seed=1), "bias": randn(6, seed=2)}

    def run(x, weight, bias):
        return [functional.causal_conv1d(x, weight, bias)]

    def stock(x, weight, bias):
        return [F.conv1d(F.pad(x, (3, 0)), weight[:, None], bias, groups=6)]

    of = {"optional": ("bias",), "differentiable": True}
    yield Call("functional.causal_conv1d", plain, run, stock, **of)

    def after_state():
        return plain() | {"initial_state": randn(2, 6, 3, seed=3)}

    def packed():
        numbers = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 3], dtype=torch.int32)
        return plain() | {"seq_idx": numbers.repeat(2, 1)}

    def forward(op):
        def run(x, weight, bias, initial_state=None, seq_idx=None):
            return flat(op(x, weight, bias, initial_state, seq_idx, True, False))

        return run

    def backward(op):
        def run(doutput, x, weight, bias, initial_state=None, seq_idx=None):
            given = (doutput, x, weight, bias, initial_state, seq_idx)
            return flat(op(*given, True, False, 15))

        return run

    for text, make, name in (("", after_state, "initial_state"), (" packed", packed, "seq_idx")):

        def upstream(make=make):
            return {"doutput": randn(2, 6, 9, seed=4)} | make()

        optional = ("bias", name)
        for op in (RAW.causal_conv1d_forward, RAW.causal_conv1d_forward_check):
            yield Call(f"ops.{op.__name__}{text}", make, forward(op), optional=optional)
        for op in (RAW.causal_conv1d_backward, RAW.causal_conv1d_backward_check):
            yield Call(f"ops.{op.__name__}{text}", upstream, backward(op), optional=optional)


# ---- group norm ----------------------------------------------------------------------------------


def _group_norms():
    def plain():
        return {"input": randn(2, 8, 5, 6), "weight": randn(8), "bias": randn(8, seed=1)}

    def run(input, weight, bias):
        return [functional.group_norm(input, 2, weight, bias, activation="silu")]

    def stock(input, weight, bias):
        return [F.silu(F.group_norm(input, 2, weight, bias))]

    of = {"optional": ("weight", "bias"), "differentiable": True}
    yield Call("functional.group_norm", plain, run, stock, **of)

    def forward(op):
        def run(input, weight, bias):
            return flat(op(input, weight, bias, 2, 1e-5, 2, False, torch.bfloat16, True))

        return run

    optional = ("weight", "bias")
    for op in (RAW.group_norm_forward, RAW.group_norm_forward_check):
        yield Call(f"ops.{op.__name__}", plain, forward(op), optional=optional)

    def upstream():
        own = plain()
        grouped = own["input"].reshape(2, 2, -1)
        own |= {"mean": grouped.mean(-1), "rstd": grouped.var(-1, False).add(1e-5).rsqrt()}
        return {"doutput": randn(2, 8, 5, 6, seed=2)} | own

    def backward(op):
        def run(doutput, input, weight, bias, mean, rstd):
            return flat(op(doutput, input, weight, bias, mean, rstd, 2, 2, False, 7))

        return run

    for op in (RAW.group_norm_backward, RAW.group_norm_backward_check):
        yield Call(f"ops.{op.__name__}", upstream, backward(op), optional=optional)


# ---- gated activations ---------------------------------------------------------------------------


def _gates():
    def two():
        return {"gate": randn(2, 3, 40), "up": randn(2, 3, 40, seed=1)}

    def halves():
        return {"gate": randn(2, 3, 40)}

    def public(name, *options, **keywords):
        function = getattr(functional, name)
        return lambda gate, up=None: [function(gate, up, *options, **keywords)]

    def stock(activation):
        def run(gate, up=None):
            gate, up = (gate, up) if up is not None else gate.chunk(2, -1)
            return [activation(gate) * up]

        return run

    of = {"optional": ("up",), "differentiable": True}
    relu, gelu = stock(F.relu), stock(functools.partial(F.gelu, approximate="tanh"))
    gated = public("gated_activation", activation="relu")
    yield Call("functional.gated_activation", two, gated, relu, **of)
    yield Call("functional.gated_activation of halves", halves, gated, relu, differentiable=True)
    yield Call("functional.silu_mul", two, public("silu_mul"), stock(F.silu), **of)
    yield Call("functional.gelu_mul", two, public("gelu_mul", "tanh"), gelu, **of)

    def raw(op, *options):
        return lambda **tensors: flat(op(**tensors, **dict(options)))

    def upstream():
        return {"doutput": randn(2, 3, 40, seed=2)} | two()

    options = ("activation_kind", 3), ("gate_last", False)
    for op in (RAW.gate_forward, RAW.gate_forward_check):
        yield Call(f"ops.{op.__name__}", two, raw(op, *options), optional=("up",))
    for op in (RAW.gate_backward, RAW.gate_backward_check):
        yield Call(f"ops.{op.__name__}", upstream, raw(op, *options, ("grad_mask", 3)))


# ---- linear --------------------------------------------------------------------------------------


def _linear():
    def tensors():  # sums of whole numbers, exact in any order: torch computes those of subclasses
        names = {"input": (6, 40), "weight": (24, 40), "bias": (24,)}
        return {name: sixteenths(*shape) for name, shape in names.items()}

    def everything():
        return tensors() | {"residual": randn(6, 24)}

    def public(input, weight, bias):
        return [functional.linear(input, weight, bias)]

    def stock(input, weight, bias):
        return [F.linear(input, weight, bias)]

    def options(input, weight, bias, residual):
        # torch's gelu aborts the process without memory, and its silu has other bits in a stack.
        more = {"activation": "relu", "dropout_p": 0.3, "residual": residual}
        return [functional.linear(input, weight, bias, **more)]

    of = {"optional": ("bias", "residual"), "differentiable": True}
    yield Call("functional.linear", tensors, public, stock, **of)
    yield Call("functional.linear with options", everything, options, **of)

    def forward(op):
        def run(input, weight, bias):
            return flat(op(input, weight, bias, torch.bfloat16))

        return run

    for op in (RAW.linear_forward, RAW.linear_forward_check):
        yield Call(f"ops.{op.__name__}", tensors, forward(op), optional=("bias",))

    def backward_tensors():
        return {"doutput": randn(6, 24), "input": randn(6, 40), "weight": randn(24, 40)}

    def backward(op):
        def run(doutput, input, weight):
            dtypes = [None if given is None else F32 for given in (weight, input)]
            return flat(op(doutput, input, weight, *dtypes, torch.bfloat16))

        return run

    for op in (RAW.linear_backward, RAW.linear_backward_check):
        optional = ("input", "weight")
        yield Call(f"ops.{op.__name__}", backward_tensors, backward(op), optional=optional)

    def epilogue_tensors():
        return everything() | {"seed": torch.tensor([3, 4])}

    def epilogue(op):
        def run(input, weight, bias, residual, seed):
            return flat(op(input, weight, bias, residual, seed, 0.4, 1, True))

        return run

    for op in (RAW.linear_epilogue_forward, RAW.linear_epilogue_forward_check):
        optional = ("bias", "residual")
        yield Call(f"ops.{op.__name__}", epilogue_tensors, epilogue(op), optional=optional)

    def upstream():
        names = {"doutput": randn(6, 24), "preactivation": randn(6, 24, seed=1)}
        return names | {"seed": torch.tensor([3, 4])}

    def epilogue_backward(op):
        def run(doutput, preactivation, seed):
            return flat(op(doutput, preactivation, seed, 0.4, 3, torch.bfloat16))

        return run

    for op in (RAW.linear_epilogue_backward, RAW.linear_epilogue_backward_check):
        yield Call(f"ops.{op.__name__}", upstream, epilogue_backward(op))


def calls() -> Iterator[Call]:
    yield from _norms()
    yield from _modulated_norms()
    yield from _branches()
    yield from _dropouts()
    yield from _causal_convolutions()
    yield from _group_norms()
    yield from _gates()
    yield from _linear()
