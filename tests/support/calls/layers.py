"""Norms, dropout, gated activations and linear."""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from onepass.reference.quantized_linear import Format, quantize
from tests.support.calls.call import F32, RAW, Call, flat, public, randn, raw, sixteenths


def _norms():
    def plain():
        return {"input": randn(6, 40), "weight": randn(40), "bias": randn(40, seed=1)}

    def no_bias():
        return {"input": randn(6, 40), "weight": randn(40)}

    def added(bias=True):
        own = plain() if bias else no_bias()
        return own | {"residual": randn(6, 40, seed=2)}

    def layer_norm(input, weight, bias):
        return [F.layer_norm(input, (40,), weight, bias)]

    def rms_norm(input, weight):
        return [F.rms_norm(input, (40,), weight, 1e-5)]

    of = {"optional": ("weight", "bias"), "differentiable": True}
    of["options"] = {"normalized_shape": (40,), "eps": 1e-5}
    yield public("layer_norm", plain, stock=layer_norm, **of)
    yield public("rms_norm", no_bias, stock=rms_norm, **of)
    of["options"] = of["options"] | {"dropout_p": 0.3}
    of["optional"] += ("residual",)
    yield public("add_layer_norm", added, **of)
    yield public("add_rms_norm", lambda: added(False), **of)

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

    def stock(norm):
        def run(input, scale, shift):
            return [norm(input, (40,), eps=1e-5) * (1 + scale[:, None]) + shift[:, None]]

        return run

    of = {"differentiable": True, "options": {"normalized_shape": (40,), "eps": 1e-5}}
    for kind in ("layer_norm", "rms_norm"):
        name, torchs = f"modulated_{kind}", stock(getattr(F, kind))
        yield public(name, plain, stock=torchs, optional=("shift",), **of)
        yield public(name, gated, " of a gated sum", optional=("shift", "gate"), **of)

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

    of = {"differentiable": True, "constant": ("row_scale",)}
    optional, text = ("residual", "column_scale", "row_scale"), " of a scaled branch"
    yield public("add_layer_norm", normed, text, optional=(*optional, "weight", "bias"),
                 options={"normalized_shape": (40,), "dropout_p": 0.3}, **of)  # fmt: skip
    yield public("add_dropout", two, text, options={"p": 0.4}, optional=optional, **of)

    def one():
        return {"input": randn(2, 3, 40)}

    yield public("drop_path_scale", one, options={"drop_prob": 0.4}, composed=True)

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

    def stock(inplace):
        return lambda input: [F.dropout(input, 0.4, inplace=inplace)]

    p, of = {"p": 0.4}, {"differentiable": True}
    yield public("dropout", one, stock=stock(False), options=p, **of)
    inplace = p | {"inplace": True}
    yield public("dropout", one, " inplace", stock(True), inplace, written=("input",))
    yield public("add_dropout", two, options=p, optional=("residual",), **of)

    def seeded():
        return two() | {"seed": torch.tensor([3, 4])}

    yield from raw("dropout_forward", seeded, optional=("residual",), p=0.4)


def _causal_convolutions():
    def plain():
        return {"x": randn(2, 6, 9), "weight": randn(6, 4, seed=1), "bias": randn(6, seed=2)}

    def stock(x, weight, bias):
        return [F.conv1d(F.pad(x, (3, 0)), weight[:, None], bias, groups=6)]

    of = {"optional": ("bias",), "differentiable": True}
    yield public("causal_conv1d", plain, stock=stock, **of)

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


def _causal_updates():
    def tokens():
        own = {"x": randn(2, 6, 3), "conv_state": randn(2, 6, 4, seed=1)}
        return own | {"weight": randn(6, 4), "bias": randn(6)}

    of = {"optional": ("bias",), "written": ("conv_state",), "grows": {}}
    yield public("causal_conv1d_update", tokens, options={"activation": "silu"}, **of)
    del of["grows"]
    yield from raw("causal_conv1d_update", tokens, silu=True, **of)


def _selective_scans():
    def plain():
        shape, factor = (2, 6, 9), (2, 3, 9)
        own = {"u": randn(*shape), "delta": randn(*shape, seed=1), "A": -randn(6, 3).exp()}
        own |= {"B": randn(*factor), "C": randn(*factor, seed=1), "D": randn(6, seed=1)}
        return own | {"z": randn(*shape, seed=2), "delta_bias": randn(6, seed=2)}

    given = ("D", "z", "delta_bias")
    of = {"optional": given, "differentiable": True, "grows": {}}
    yield public("selective_scan", plain, options={"delta_softplus": True}, **of)

    def after_state():
        return plain() | {"initial_state": randn(2, 6, 3, seed=3)}

    def packed():
        own = {name: t[:1] if t.dim() == 3 else t for name, t in plain().items()}
        return own | {"cu_seqlens": torch.tensor([0, 2, 2, 9], dtype=torch.int32)}

    options = {"delta_softplus": True, "channels_last": False}
    for text, make, name, chunks in (
        ("", after_state, "initial_state", 1), (" packed", packed, None, 4)
    ):  # fmt: skip

        def upstream(make=make, chunks=chunks):
            own = make()
            batch = own["u"].shape[0]
            last = randn(2 if chunks == 1 else 3, 6, 3, seed=5)
            states = randn(batch, chunks, 3, 6, seed=6)
            own |= {"dlast_state": last, "states": states}
            return {"doutput": randn(2, 6, 9, seed=4)[:batch]} | own

        options |= {"optional": (*given, *([name] if name else []))}
        yield from raw("selective_scan_forward", make, text, save_states=True, **options)
        options |= {"optional": (*options["optional"], "doutput", "dlast_state")}
        yield from raw("selective_scan_backward", upstream, text, grad_mask=511, **options)


def _chunk_scans():
    def plain():
        own = {"x": randn(2, 9, 4, 3), "dt": randn(2, 9, 4, seed=1), "A": -randn(4).exp()}
        own |= {"B": randn(2, 9, 1, 5), "C": randn(2, 9, 1, 5, seed=1), "D": randn(4, seed=1)}
        return own | {"z": randn(2, 9, 4, 3, seed=2), "dt_bias": randn(4, seed=2)}

    given = ("D", "z", "dt_bias")
    of = {"optional": given, "differentiable": True, "grows": {}}
    options = {"chunk_size": 64, "dt_softplus": True}
    yield public("mamba_chunk_scan", plain, options=options, **of)

    def after_state():
        return plain() | {"initial_states": randn(2, 4, 3, 5, seed=3)}

    def packed():
        own = {name: t[:1] if t.dim() > 2 else t for name, t in plain().items()}
        return own | {"cu_seqlens": torch.tensor([0, 2, 2, 9], dtype=torch.int32)}

    options = {"dt_softplus": True, "dt_min": 0.0, "dt_max": 4.0}
    for text, make, name, chunks in (
        ("", after_state, "initial_states", 1), (" packed", packed, None, 4)
    ):  # fmt: skip

        def upstream(make=make, chunks=chunks):
            own = make()
            batch = own["x"].shape[0]
            last = randn(2 if chunks == 1 else 3, 4, 3, 5, seed=5)
            states = randn(batch, chunks, 4, 5, 3, seed=6)
            own |= {"dfinal_states": last, "states": states}
            return {"doutput": randn(2, 9, 4, 3, seed=4)[:batch]} | own

        options |= {"optional": (*given, *([name] if name else []))}
        yield from raw("mamba_chunk_scan_forward", make, text, save_states=True, **options)
        options |= {"optional": (*options["optional"], "doutput", "dfinal_states")}
        yield from raw("mamba_chunk_scan_backward", upstream, text, grad_mask=511, **options)


def _delta_rules():
    def plain(channels=False):
        own = {"q": randn(2, 9, 4, 5), "k": randn(2, 9, 4, 5, seed=1) / 2, "v": randn(2, 9, 4, 3)}
        of_g = (2, 9, 4, 5) if channels else (2, 9, 4)
        return own | {"g": -randn(*of_g, seed=2).abs(), "beta": randn(2, 9, 4, seed=3).sigmoid()}

    def of_channels():
        return plain(True)

    of = {"differentiable": True, "grows": {}}
    options = {"use_qk_l2norm_in_kernel": True}
    for form in ("chunk", "fused_recurrent"):
        yield public(f"{form}_gated_delta_rule", plain, options=options, **of)
        yield public(f"{form}_kda", of_channels, options=options, **of)

    def after_state():
        return plain(True) | {"initial_state": randn(2, 4, 5, 3, seed=3)}

    def packed():
        own = {name: t[:1] for name, t in plain().items()}
        return own | {"cu_seqlens": torch.tensor([0, 2, 2, 9], dtype=torch.int32)}

    options = {"scale": 0.5, "qk_l2norm": True}
    for text, make, name, chunks in (
        ("", after_state, "initial_state", 1), (" packed", packed, None, 4)
    ):  # fmt: skip

        def upstream(make=make, chunks=chunks):
            own = make()
            batch = own["q"].shape[0]
            last = randn(2 if chunks == 1 else 3, 4, 5, 3, seed=5)
            states = randn(batch, chunks, 4, 5, 3, seed=6)
            own |= {"dfinal_state": last, "states": states}
            return {"doutput": randn(2, 9, 4, 3, seed=4)[:batch]} | own

        options |= {"optional": (name,) if name else (), "g_has_channels": chunks == 1}
        yield from raw("delta_rule_forward", make, text, save_states=True, **options)
        options |= {"optional": (*options["optional"], "doutput", "dfinal_state")}
        yield from raw("delta_rule_backward", upstream, text, grad_mask=63, **options)


def _delta_rule_updates():
    def of_heads():
        own = {"state": randn(2, 4, 5, 3), "q": randn(2, 2, 2, 5), "k": randn(2, 2, 2, 5, seed=1)}
        own |= {"v": randn(2, 2, 4, 3), "g": -randn(2, 2, 4, seed=2).abs()}
        return own | {"beta": randn(2, 2, 4, seed=3).sigmoid()}

    def of_channels():
        return of_heads() | {"g": -randn(2, 2, 4, 5, seed=2).abs()}

    def packed():
        own = {name: tensor[:1] for name, tensor in of_heads().items()}
        own["state"] = randn(3, 4, 5, 3)
        return own | {"cu_seqlens": torch.tensor([0, 1, 1, 2], dtype=torch.int32)}

    makers = (("", of_heads), (" of channels", of_channels), (" packed", packed))
    for text, make in makers:
        if make is not packed:  # whose state has a row for each sequence, not for each sample
            options = {"use_qk_l2norm_in_kernel": True}
            yield public(
                "delta_rule_update", make, text, options=options, grows={}, written=("state",)
            )
        options = {"scale": 0.5, "qk_l2norm": True, "g_has_channels": make is of_channels}
        yield from raw("delta_rule_update", make, text, written=("state",), **options)


def _state_updates():
    def one():
        own = {"state": randn(2, 6, 4), "x": randn(2, 6), "dt": randn(2, 6, seed=1)}
        own |= {"A": -randn(6, 4).exp(), "B": randn(2, 4), "C": randn(2, 4, seed=1)}
        return own | {"D": randn(6), "z": randn(2, 6, seed=2), "dt_bias": randn(6, seed=3)}

    def of_heads():
        own = {"state": randn(2, 4, 3, 5), "x": randn(2, 4, 3), "dt": randn(2, 4, 3, seed=1)}
        own |= {"A": -randn(4, 3, 5).exp(), "B": randn(2, 2, 5), "C": randn(2, 2, 5, seed=1)}
        own |= {"D": randn(4, 3), "z": randn(2, 4, 3, seed=2), "dt_bias": randn(4, 3, seed=3)}
        return own

    of = {"optional": ("D", "z", "dt_bias"), "written": ("state",)}
    for text, make in (("", one), (" of heads", of_heads)):
        options = {"dt_softplus": True}
        yield public("selective_state_update", make, text, options=options, grows={}, **of)
        yield from raw("selective_state_update", make, text, **options, **of)


def _group_norms():
    def plain():
        return {"input": randn(2, 8, 5, 6), "weight": randn(8), "bias": randn(8, seed=1)}

    def stock(input, weight, bias):
        return [F.silu(F.group_norm(input, 2, weight, bias))]

    of = {"optional": ("weight", "bias"), "differentiable": True}
    options = {"num_groups": 2, "activation": "silu"}
    yield public("group_norm", plain, stock=stock, options=options, **of)

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

    def stock(activation):
        def run(gate, up=None):
            gate, up = (gate, up) if up is not None else gate.chunk(2, -1)
            return [activation(gate) * up]

        return run

    of = {"optional": ("up",), "differentiable": True}
    relu, gelu = stock(F.relu), stock(functools.partial(F.gelu, approximate="tanh"))
    options = {"activation": "relu"}
    yield public("gated_activation", two, "", relu, options, **of)
    yield public("gated_activation", halves, " of halves", relu, options, differentiable=True)
    yield public("silu_mul", two, stock=stock(F.silu), **of)
    yield public("gelu_mul", two, "", gelu, {"approximate": "tanh"}, **of)

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

    def stock(input, weight, bias):
        return [F.linear(input, weight, bias)]

    of = {"optional": ("bias", "residual"), "differentiable": True}
    yield public("linear", tensors, stock=stock, **of)
    # torch's gelu aborts the process without memory, and its silu has other bits in a stack.
    options = {"activation": "relu", "dropout_p": 0.3}
    yield public("linear", everything, " with options", options=options, **of)

    int8 = {"precision": "int8:output+dinput+dweight"}
    yield public("linear", tensors, " by 8 bits", options=int8, optional=("bias",),
                 differentiable=True)  # fmt: skip

    yield from raw("linear_forward", tensors, optional=("bias",), out_dtype=torch.bfloat16)
    yield from raw("linear_forward", tensors, optional=("bias",), factor_mask=2)

    def backward_tensors():
        names = {"doutput": randn(6, 24), "input": randn(6, 40), "weight": randn(24, 40)}
        return names | {"rounding_seed": torch.tensor([3, 4])}

    def backward(op):
        def run(doutput, input, weight, rounding_seed):
            dtypes = [None if given is None else F32 for given in (weight, input)]
            mask = 15 if rounding_seed is not None else 0
            return flat(op(doutput, input, weight, *dtypes, torch.bfloat16, mask, rounding_seed))

        return run

    for op in (RAW.linear_backward, RAW.linear_backward_check):
        optional = ("input", "weight", "rounding_seed")
        yield Call(f"ops.{op.__name__}", backward_tensors, backward(op), optional=optional)

    def epilogue():
        seeds = ("seed", "rounding_seed")
        return everything() | {name: torch.tensor([3, 4]) for name in seeds}

    optional = ("bias", "residual", "rounding_seed")
    yield from raw("linear_epilogue_forward", epilogue, optional=optional,
                   dropout_p=0.4, activation_kind=1, save_preactivation=True)  # fmt: skip

    def upstream():
        names = {"doutput": randn(6, 24), "preactivation": randn(6, 24, seed=1)}
        return names | {"seed": torch.tensor([3, 4])}

    yield from raw("linear_epilogue_backward", upstream, dropout_p=0.4, activation_kind=3,
                   out_dtype=torch.bfloat16)  # fmt: skip


def _quantized_linear():
    def tensors():
        own, _ = quantize(sixteenths(24, 40), Format.INT4, 8, F32)
        return {"input": randn(6, 40)} | own._asdict() | {"bias": randn(24)}

    def everything():
        return tensors() | {"residual": randn(6, 24)}

    of = {"differentiable": True, "constant": ("scales", "shifts")}
    of["optional"] = ("shifts", "bias", "residual")
    yield public("quantized_linear", everything, options={"weights": "int4"}, **of)

    options = {"format_kind": 1, "activation_kind": 1, "quantize_input": False}
    yield from raw("quantized_linear_forward", everything, optional=of["optional"], **options)

    of_weight = ("codes", "scales", "shifts")

    def upstream():
        own = {name: tensor for name, tensor in tensors().items() if name in of_weight}
        return {"doutput": randn(6, 24)} | own

    yield from raw("quantized_linear_backward", upstream, optional=("shifts",), in_features=40,
                   format_kind=1, input_dtype=F32, bias_dtype=torch.bfloat16)  # fmt: skip


def calls() -> Iterator[Call]:
    parts = (_norms, _modulated_norms, _branches, _dropouts, _causal_convolutions, _group_norms)
    parts = (*parts, _gates, _linear, _quantized_linear)
    parts = (*parts, _causal_updates, _selective_scans, _chunk_scans, _state_updates)
    for part in (*parts, _delta_rules, _delta_rule_updates):
        yield from part()
