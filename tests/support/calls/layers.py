"""Norms, dropout, gated activations and linear."""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from onepass import functional
from tests.support.calls.call import F32, RAW, Call, flat, randn, raw, sixteenths


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

    def with_seed():
        return added() | {"seed": torch.tensor([3, 4])}

    options = {"normalized_shape": (40,), "kind": 0, "weight_offset": 0.0, "dropout_p": 0.3}
    narrow = {"out_dtype": torch.bfloat16, "residual_dtype": torch.bfloat16}
    yield from raw("norm_forward", with_seed, optional=("weight", "bias"), eps=1e-5,
                   save_statistics=True, **options, **narrow)  # fmt: skip

    def upstream():
        x = randn(6, 40, seed=3)
        own = {"doutput": randn(6, 40), "dresidual_out": randn(6, 40, seed=1), "x": x}
        own |= {"weight": randn(40), "bias": randn(40, seed=1), "seed": torch.tensor([3, 4])}
        return own | {"mean": x.mean(1), "rstd": x.var(1, False).add(1e-5).rsqrt()}

    optional = ("doutput", "dresidual_out", "weight", "bias")
    yield from raw("norm_backward", upstream, optional=optional, input_dtype=F32,
                   residual_dtype=F32, grad_mask=15, **options)  # fmt: skip


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

    options = {"normalized_shape": (40,), "kind": 0, "dropout_p": 0.3}

    def seeded():
        return gated() | {"row_scale": torch.tensor([0.0, 1.25]), "seed": torch.tensor([3, 4])}

    yield from raw("modulated_norm_forward", seeded, optional=("shift", "gate", "row_scale"),
                   eps=1e-5, out_dtype=torch.bfloat16, save_statistics=True, **options)  # fmt: skip

    def backward():
        own, x = seeded(), randn(2, 3, 40, seed=4)
        own |= {"x": x, "branch": own.pop("input"), "dresidual_out": own.pop("residual")}
        own |= {"doutput": randn(2, 3, 40, seed=5), "mean": x.mean(2)}
        return own | {"rstd": x.var(2, False).add(1e-5).rsqrt()}

    optional = ("doutput", "dresidual_out", "shift", "row_scale")
    yield from raw("modulated_norm_backward", backward, optional=optional, input_dtype=F32,
                   residual_dtype=F32, grad_mask=31, **options)  # fmt: skip


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

    def seeded():
        return two() | {"seed": torch.tensor([3, 4])}

    yield from raw("branch_forward", seeded, optional=optional, p=0.4, out_dtype=torch.bfloat16)

    def backward():
        own = {"doutput": randn(2, 3, 40), "branch": randn(2, 3, 40, seed=1)}
        return own | scales() | {"seed": torch.tensor([3, 4])}

    yield from raw("branch_backward", backward, optional=("row_scale",), p=0.4, input_dtype=F32,
                   grad_mask=3)  # fmt: skip


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

    def seeded():
        return two() | {"seed": torch.tensor([3, 4])}

    yield from raw("dropout_forward", seeded, optional=("residual",), p=0.4)


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

    options = {"silu": True, "channels_last": False}
    for text, make, name in (("", after_state, "initial_state"), (" packed", packed, "seq_idx")):

        def upstream(make=make):
            return {"doutput": randn(2, 6, 9, seed=4)} | make()

        options |= {"optional": ("bias", name)}
        yield from raw("causal_conv1d_forward", make, text, **options)
        yield from raw("causal_conv1d_backward", upstream, text, grad_mask=15, **options)


def _group_norms():
    def plain():
        return {"input": randn(2, 8, 5, 6), "weight": randn(8), "bias": randn(8, seed=1)}

    def run(input, weight, bias):
        return [functional.group_norm(input, 2, weight, bias, activation="silu")]

    def stock(input, weight, bias):
        return [F.silu(F.group_norm(input, 2, weight, bias))]

    of = {"optional": ("weight", "bias"), "differentiable": True}
    yield Call("functional.group_norm", plain, run, stock, **of)

    options = {"num_groups": 2, "activation_kind": 2, "channels_last": False}
    options |= {"optional": ("weight", "bias")}
    yield from raw("group_norm_forward", plain, eps=1e-5, out_dtype=torch.bfloat16,
                   save_statistics=True, **options)  # fmt: skip

    def upstream():
        own = plain()
        grouped = own["input"].reshape(2, 2, -1)
        own |= {"mean": grouped.mean(-1), "rstd": grouped.var(-1, False).add(1e-5).rsqrt()}
        return {"doutput": randn(2, 8, 5, 6, seed=2)} | own

    yield from raw("group_norm_backward", upstream, grad_mask=7, **options)


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

    def upstream():
        return {"doutput": randn(2, 3, 40, seed=2)} | two()

    options = {"activation_kind": 3, "gate_last": False}
    yield from raw("gate_forward", two, optional=("up",), **options)
    yield from raw("gate_backward", upstream, grad_mask=3, **options)


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

    yield from raw("linear_forward", tensors, optional=("bias",), out_dtype=torch.bfloat16)

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

    def epilogue():
        return everything() | {"seed": torch.tensor([3, 4])}

    yield from raw("linear_epilogue_forward", epilogue, optional=("bias", "residual"),
                   dropout_p=0.4, activation_kind=1, save_preactivation=True)  # fmt: skip

    def upstream():
        names = {"doutput": randn(6, 24), "preactivation": randn(6, 24, seed=1)}
        return names | {"seed": torch.tensor([3, 4])}

    yield from raw("linear_epilogue_backward", upstream, dropout_p=0.4, activation_kind=3,
                   out_dtype=torch.bfloat16)  # fmt: skip


def calls() -> Iterator[Call]:
    parts = (_norms, _modulated_norms, _branches, _dropouts, _causal_convolutions, _group_norms)
    for part in (*parts, _gates, _linear):
        yield from part()
