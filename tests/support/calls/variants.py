"""Calls with the options that change a derivative, a saved tensor or a shape: for the tests of
`all_families` that every family passes. The tests of faults run the calls without them."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from onepass import functional, reference
from onepass.reference.quantized_linear import Format, quantize
from tests.support.calls.call import Call, flat, ints, randn

KINDS = ("layer_norm", "rms_norm")


def variant(
    name: str, run: Callable, constant: tuple[str, ...] = (), grows=None, composed=False, **tensors
) -> Call:
    """A call of these tensors, which run(**tensors) takes."""

    def own() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def listed(**tensors):
        return flat(run(**tensors))

    of = {"constant": constant, "grows": grows, "composed": composed}
    return Call(name, own, listed, differentiable=True, **of)


def _some(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names if name in tensors}


def norms() -> Iterator[Call]:
    given = {"weight": randn(3, 8), "bias": randn(3, 8, seed=1)}
    x, residual = randn(2, 2, 3, 8), randn(2, 2, 3, 8, seed=2)
    for kind in KINDS:
        for names in ((), ("weight",), ("bias",)):
            if kind == "rms_norm" and names == ("bias",):
                continue
            text = f"{kind} of rows of two dimensions, {names}"
            run = _norm(kind, (3, 8), weight_offset=0.5 if "weight" in names else 0.0)
            yield variant(text, run, input=x, **_some(given, *names))
            add = _norm(f"add_{kind}", (3, 8), dropout_p=0.0)
            yield variant(f"add_{text}", add, input=x, residual=residual, **_some(given, *names))
        run, own = _norm(f"add_{kind}", (3, 8), dropout_p=0.4), _some(given, "weight")
        name = f"add_{kind} with dropout"
        yield variant(name, run, input=x, residual=residual, **own)
        yield variant(f"{name}, without a residual", run, input=x, **own)


def _norm(name: str, shape: tuple[int, ...], **options) -> Callable:
    if name.endswith("layer_norm"):
        options.pop("weight_offset", None)
    function = getattr(functional, name)
    options |= {"normalized_shape": shape, "eps": 1e-5}

    def run(input, **tensors):
        if name.startswith("add_"):
            return function(input, tensors.pop("residual", None), **tensors, **options)
        return function(input, **tensors, **options)

    return run


def modulated_norms() -> Iterator[Call]:
    rows = (2, 3, 8)
    some = (("shift", "gate", "residual"), ("gate",), ("shift", "gate"), ())
    for number, (kind, per) in enumerate(itertools.product(KINDS, ((2, 8), (2, 1, 8), rows))):
        given = {"input": randn(*rows), "residual": randn(*rows, seed=1)}
        given |= {n: randn(*per, seed=i) for i, n in enumerate(("scale", "shift", "gate"), 2)}

        run = partial(getattr(functional, f"modulated_{kind}"), normalized_shape=8)
        for left_out in some[number % 2 :: 2]:
            names = [name for name in given if name not in left_out]
            grows = {n: (0,) if len(given[n].shape) == 2 else (0, 1) for n in names}
            if len(per) == 3 and per[1] == 1:
                grows |= {n: (0,) for n in names if given[n].shape == per}
            text = f"modulated_{kind} by {per} of {', '.join(names)}"
            yield variant(text, run, grows=grows, **_some(given, *names))


def branches() -> Iterator[Call]:
    rows, constant = (3, 2, 8), ("row_scale",)
    scales = {"column_scale": randn(8), "row_scale": torch.tensor([1.25, 0.0, 1.25])}
    given = {"input": randn(*rows, seed=1), "residual": randn(*rows, seed=2)}
    weights = {"weight": randn(8, seed=3), "bias": randn(8, seed=4)}
    yield variant("add_dropout of nothing", partial(functional.add_dropout, p=0.0), **given)
    for names, p in itertools.product(
        (("column_scale",), ("row_scale",), tuple(scales)), (0.0, 0.4)
    ):
        some, text = _some(scales, *names), f"by {', '.join(names)}, {p}"

        add = partial(functional.add_dropout, p=p)
        yield variant(f"add_dropout {text}", add, constant, **given, **some)
        alone = partial(add, residual=None)
        yield variant(f"a branch alone {text}", alone, constant, input=given["input"], **some)
        for kind in KINDS:
            own = {} if p else _some(weights, *(("weight",) if kind == "rms_norm" else weights))
            run, of_weights = _norm(f"add_{kind}", (8,), dropout_p=p), ", no weight" * bool(p)
            yield variant(f"add_{kind} {text}{of_weights}", run, constant, **given, **some, **own)


def gates() -> Iterator[Call]:
    grows = {"gate": (0, 1), "up": (0, 1)}
    for activation in reference.gate.ACTIVATIONS:
        for form, sizes in (("two", {"gate": 8, "up": 8}), ("halves", {"gate": 16}),
                            ("halves, gate last", {"gate": 16})):  # fmt: skip
            options = {"activation": activation, "gate_last": form.endswith("last")}

            run = partial(functional.gated_activation, **options)
            given = {name: randn(3, cols, seed=cols) for name, cols in sizes.items()}
            yield variant(f"gated_activation {activation} of {form}", run, grows=grows, **given)


def group_norms() -> Iterator[Call]:
    weights = {"weight": randn(4), "bias": randn(4, seed=1)}
    grows = {"input": (0, 1, 2, 3), "weight": (0,), "bias": (0,)}
    for last, activation in itertools.product((False, True), (None, "silu")):
        x = randn(2, 3, 5, 4).movedim(-1, 1) if last else randn(2, 4, 3, 5)

        run = partial(functional.group_norm, num_groups=2, activation=activation)
        for names in ((), ("weight",), ("bias",), tuple(weights)):
            text = f"group_norm {activation}, channels last {last}, {names}"
            yield variant(text, run, grows=grows, input=x, **_some(weights, *names))


def causal_convolutions() -> Iterator[Call]:
    grows = {"x": (0, 1, 2), "weight": (0,), "bias": (0,), "initial_state": (0, 1)}
    numbers = torch.tensor([[0, 0, 0, 1, 2], [4, 4, 4, 4, 4]])
    for number, (last, width) in enumerate(itertools.product((False, True), (2, 4, 5))):
        activation = (None, "silu")[number % 2]
        x = randn(2, 5, 3).mT if last else randn(2, 3, 5)
        own = {"bias": randn(3, seed=1), "initial_state": randn(2, 3, width - 1, seed=2)}

        run = partial(functional.causal_conv1d, activation=activation)
        given = {"x": x, "weight": randn(3, width, seed=3)}
        text = f"causal_conv1d {activation}, channels last {last}, width {width}"
        for names in ((), ("bias",), tuple(own)):
            yield variant(f"{text}, {names}", run, grows=grows, **given, **_some(own, *names))
        yield variant(f"{text}, packed", run, grows={}, **given, bias=own["bias"], seq_idx=numbers)


def selective_scans() -> Iterator[Call]:
    optional = {"D": randn(4, seed=1), "delta_bias": randn(4, seed=2), "z": randn(2, 4, 5, seed=3)}
    optional |= {"initial_state": randn(2, 4, 3, seed=4)}
    for last, grouped in itertools.product((False, True), repeat=2):
        u = randn(2, 5, 4).mT if last else randn(2, 4, 5)
        own = {"u": u, "delta": randn(2, 4, 5, seed=5).abs(), "A": -randn(4, 3).exp()}
        shape = (2, 2, 3, 5) if grouped else (2, 3, 5)
        own |= {"B": randn(*shape, seed=6), "C": randn(*shape, seed=7)}
        text = f"selective_scan, channels last {last}, groups {grouped}"
        for names in ((), ("D", "z"), tuple(optional)):
            options = {"delta_softplus": "delta_bias" in names, "return_last_state": True}
            run = partial(functional.selective_scan, **options)
            yield variant(f"{text}, {names}", run, grows={}, **own, **_some(optional, *names))


def chunk_scans() -> Iterator[Call]:
    optional = {"D": randn(4, seed=1), "dt_bias": randn(4, seed=2), "z": randn(2, 5, 4, 3, seed=3)}
    optional |= {"initial_states": randn(2, 4, 3, 2, seed=4)}
    for groups, columns in ((1, False), (2, True)):
        own = {"x": randn(2, 5, 4, 3), "dt": randn(2, 5, 4, seed=5).abs(), "A": -randn(4).exp()}
        own |= {"B": randn(2, 5, groups, 2, seed=6), "C": randn(2, 5, groups, 2, seed=7)}
        given = optional | ({"D": randn(4, 3, seed=1)} if columns else {})
        for names in ((), ("D", "z"), tuple(optional)):
            options = {"dt_softplus": "dt_bias" in names, "return_final_states": True}
            run = partial(functional.mamba_chunk_scan, chunk_size=64, **options)
            text = f"mamba_chunk_scan, groups {groups}, {names}"
            yield variant(text, run, grows={}, **own, **_some(given, *names))


def delta_rules() -> Iterator[Call]:
    state = {"initial_state": randn(2, 4, 3, 2, seed=4)}
    for channels, key_heads in ((False, 2), (True, 4)):
        own = {"q": randn(2, 5, key_heads, 3), "k": randn(2, 5, key_heads, 3, seed=5) / 2}
        of_g = (2, 5, 4, 3) if channels else (2, 5, 4)
        own |= {"v": randn(2, 5, 4, 2, seed=6), "g": -randn(*of_g, seed=7).abs()}
        own |= {"beta": randn(2, 5, 4, seed=8).sigmoid()}
        function = functional.chunk_kda if channels else functional.chunk_gated_delta_rule
        for names, normed in (((), True), (tuple(state), False)):
            options = {"output_final_state": True, "use_qk_l2norm_in_kernel": normed}
            run = partial(function, scale=0.5, **options)
            text = f"{function.__name__}, heads of keys {key_heads}, {names}"
            yield variant(text, run, grows={}, **own, **_some(state, *names))


def linears() -> Iterator[Call]:
    layer = {"weight": randn(5, 8), "bias": randn(5, seed=1)}
    for rows, names in itertools.product(((), (3,), (2, 13)), (("weight",), tuple(layer))):
        given = {"input": randn(*rows, 8, seed=2)} | _some(layer, *names)
        yield variant(f"linear of {rows} rows, {names}", functional.linear,
                      grows={"input": tuple(range(len(rows)))}, **given)  # fmt: skip
    for precision in ("int8", "int8:output+dinput+dweight+stochastic"):
        run = partial(functional.linear, precision=precision)
        given = {"input": randn(13, 8, seed=2)} | layer
        yield variant(f"linear, {precision}", run, grows={"input": (0,)}, **given)
    grows = {"input": (0,), "residual": (0,)}
    for activation, p in itertools.product((None, *reference.linear.ACTIVATIONS), (0.0, 0.3)):
        for residual in (False, True):
            if not (activation or p or residual):
                continue

            run = partial(functional.linear, activation=activation, dropout_p=p)
            given = {"input": randn(3, 8, seed=2)} | layer
            given |= {"residual": randn(3, 5, seed=3)} if residual else {}
            text = f"linear {activation}, dropout {p}, residual {residual}"
            # With create_graph=True the derivative of the activation is torch's.
            yield variant(text, run, grows=grows, composed=activation is not None, **given)


def losses() -> Iterator[Call]:
    from tests.loss.cases import OPTIONS

    target = torch.tensor([3, 0, -100, 4])
    layer = {"linear_weight": randn(5, 8), "linear_bias": randn(5, seed=1)}
    for number, (name, options) in enumerate(OPTIONS.items()):
        options = dict(options)
        weight = {"weight": randn(5).abs()} if options.pop("weighted", False) else {}

        loss = partial(functional.cross_entropy, **options)
        linear = partial(functional.linear_cross_entropy, **options)
        of = {"constant": ("weight",), "grows": {"input": (0,), "target": (0,)}, "target": target}
        yield variant(f"cross_entropy {name}", loss, input=randn(4, 5), **weight, **of)
        some = ("linear_weight",) if number % 2 else tuple(layer)
        given = {"input": randn(4, 8)} | _some(layer, *some) | weight
        yield variant(f"linear_cross_entropy {name}, {some}", linear, **given, **of)


def rotaries() -> Iterator[Call]:
    tables = {"cos": randn(3, 6), "sin": randn(3, 6, seed=1)}
    weights = {"query_weight": randn(8, seed=2), "key_weight": randn(8, seed=3)}
    heads = {
        "heads": lambda n: randn(2, n, 3, 8),
        "tokens": lambda n: randn(2, 3, n, 8).transpose(1, 2),
        "seq_first": lambda n: randn(2, 3, n, 8),
    }
    of = {"constant": tuple(tables), "grows": {"query": (0,), "key": (0,)}}
    some = ((), ("query_weight",), ("key_weight",), tuple(weights))
    for number, (order, interleaved) in enumerate(itertools.product(heads, (False, True))):
        for names in some[(number + number // 2) % 2 :: 2]:
            given = {"query": heads[order](4), "key": heads[order](2)} | _some(weights, *names)
            options = {"interleaved": interleaved, "seq_first": order == "seq_first"}
            options |= {"eps": 1e-3, "weight_offset": 0.5} if names else {}
            run = partial(functional.rotary_embedding, **options)
            text = f"rotary_embedding {order}, interleaved {interleaved}, {names}"
            yield variant(text, run, **of, **given, **tables)

    def half(query, cos, sin):
        tables = {"cos": cos[:, :3], "sin": sin[:, :3], "rotary_dim": 6}
        return functional.rotary_embedding(query, None, **tables)[0]

    yield variant("rotary_embedding of half tables, no key", half, constant=tuple(tables),
                  query=randn(2, 4, 3, 8), **tables)  # fmt: skip

    def inplace(query, key, **tables):
        return functional.rotary_embedding(query * 2, key * 3, **tables, inplace=True)

    given = {name: heads["heads"](2) for name in ("query", "key")} | tables
    yield variant("rotary_embedding in place", inplace, **of, **given)


def attentions() -> Iterator[Call]:
    heads, kv_heads, rows, keys = 4, 2, 4, 5
    given = {
        "query": randn(2, heads, rows, 8),
        "key": randn(2, kv_heads, keys, 8),
        "value": randn(2, kv_heads, keys, 3, seed=1),
    }
    mask = randn(2, 1, rows, keys, seed=2) > -1
    terms = {"alibi_slopes": randn(heads).abs(), "sinks": randn(heads, seed=1)}
    windows = {
        "plain": {},
        "causal": {"is_causal": True},
        "bottom right": {"causal_alignment": "bottom_right", "window_size": (2, 0)},
        "softcap": {"softcap": 2.0},
        "dropout": {"dropout_p": 0.4},
        "everything": {
            "causal_alignment": "bottom_right", "window_size": (3, 0), "softcap": 2.0,
            "dropout_p": 0.3,
        },
    }  # fmt: skip
    masks = {
        "plain": {},
        "causal": {"sinks": terms["sinks"]},
        "bottom right": {"attn_mask": mask} | terms,
        "softcap": {"attn_mask": randn(1, heads, rows, keys)},
        "dropout": {"attn_mask": randn(2, 1, rows, keys)},
        "everything": {"attn_mask": randn(heads, 1, keys)} | terms,
    }
    for name, options in windows.items():
        sdpa = functional.scaled_dot_product_attention
        run = partial(sdpa, **options, enable_gqa=True, return_lse=True)
        own, grows = given | masks[name], {"query": (0, 2), "key": (0, 2), "value": (0, 2)}
        grows = {n: (0,) for n in grows} | ({"attn_mask": (0,)} if name == "dropout" else {})
        grows |= {"attn_mask": (0,)} if name == "bottom right" else {}
        yield variant(f"attention {name}", run, grows=grows, **own)

    def shorter(query, key, value, keys=2):  # the first two rows have none
        options = {"causal_alignment": "bottom_right", "window_size": (-1, 0)}
        own = {"query": query, "key": key[:, :, :keys], "value": value[:, :, :keys]}
        attend = functional.scaled_dot_product_attention
        return attend(**own, **options, enable_gqa=True)

    yield variant("attention of rows without keys", shorter, **given)
    yield variant("attention of no keys", partial(shorter, keys=0), **given)

    ends = {"cu_seq_q": ints(0, 3, 3, 5), "cu_seq_k": ints(0, 4, 6, 8)}
    packed = {"query": randn(5, heads, 8), "key": randn(8, kv_heads, 8)}
    packed |= {"value": randn(8, kv_heads, 3, seed=1)} | ends

    lengths = {"max_q": 3, "max_k": 4, "is_causal": True}
    varlen = partial(functional.varlen_attention, **lengths, enable_gqa=True, return_lse=True)
    yield variant("varlen_attention causal", varlen, grows={}, **packed)

    for parts in (1, 2, 5):

        def merge(parts=parts, **tensors):
            tensors = list(tensors.values())
            return functional.merge_attention_states(tensors[:parts], tensors[parts:])

        given = {f"output_{i}": randn(2, 3, 4, seed=i) for i in range(parts)}
        given |= {f"lse_{i}": randn(2, 3, seed=i) for i in range(parts)}
        yield variant(f"merge_attention_states of {parts}", merge, composed=True, **given)


def quantized_linears() -> Iterator[Call]:
    for format, rows in itertools.product(Format, ((3,), (2, 13))):
        own, _ = quantize(randn(5, 16), format, 16, torch.float32)
        run = partial(functional.quantized_linear, weights=format.name.lower())
        given = {"input": randn(*rows, 16, seed=2)} | own._asdict()
        more = {"bias": randn(5, seed=1), "residual": randn(*rows, 5, seed=3)}
        if own.shifts is None:
            del given["shifts"]
        grows = {name: tuple(range(len(rows))) for name in ("input", "residual")}
        for names in ((), ("bias",), tuple(more)):
            text = f"quantized_linear of {format.name}, {rows} rows, {names}"
            own = given | _some(more, *names)
            yield variant(text, run, grows=grows, constant=("scales", "shifts"), **own)


def variants() -> Iterator[Call]:
    families = (norms, modulated_norms, branches, gates, group_norms, linears, losses, rotaries)
    for family in (
        *families,
        causal_convolutions,
        selective_scans,
        chunk_scans,
        delta_rules,
        quantized_linears,
        attentions,
    ):
        yield from family()
