"""Odd arguments of modules of attention, and of calls of attention and of rotary functions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.swap.odd_modules import (
    NUMBERS,
    TENSORS,
    Case,
    Subclass,
    on_part,
    set_number,
    set_tensor,
    strided,
    turned,
)
from tests.swap.test_rotary import apply_rotary_pos_emb

SEQ, BATCH, EMBED, HEADS = 5, 3, 16, 4
# F.linear decides by a sparse layout, and reads memory that is not there of a tensor on meta.
DENSE = {name: make for name, make in TENSORS.items() if name not in ("sparse", "meta")}
MASK_DTYPES = (
    torch.bool,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.complex64,
)


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return (torch.rand(shape) < 0.3).to(dtype)


def self_attention(*shape: int, grad: bool = True, dtype=torch.float32, **named) -> Callable:
    def arguments():
        x = torch.randn(shape).to(dtype)
        x.requires_grad_(grad)
        return [x, x, x], {k: v() if callable(v) else v for k, v in named.items()}

    return arguments


def cross(*makes: Callable, **named) -> Callable:
    return lambda: (
        [make() for make in makes],
        {k: v() if callable(v) else v for k, v in named.items()},
    )


def normal(*shape: int, dtype=torch.float32, grad: bool = True, device="cpu") -> Callable:
    return lambda: torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def masks(name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Callable]:
    """Masks of an argument: of every dtype in the usual shape, boolean and float in others."""
    usual, *_ = shapes.values()
    made = {
        f"{name} of {dtype}": lambda dtype=dtype: mask(*usual, dtype=dtype) for dtype in MASK_DTYPES
    }
    for text, shape in shapes.items():
        made[f"{name} {text}"] = lambda shape=shape: mask(*shape)
        made[f"float {name} {text}"] = normal(*shape, grad=False)
    made[f"{name} with a gradient"] = normal(*usual)
    made[f"{name} of all"] = lambda: torch.ones(usual, dtype=torch.bool)
    made[f"{name} of none"] = lambda: torch.zeros(usual, dtype=torch.bool)
    made[f"infinite {name}"] = lambda: torch.full(usual, float("-inf"))
    made[f"{name}: a list"] = lambda: mask(*usual).tolist()
    made[f"{name}: a number"] = lambda: 1.0
    made[f"{name}: transposed"] = lambda: turned(torch.randn(usual[::-1]))
    return made


FLAGS = (True, False, 1, 0, None, "x", torch.tensor(True))
PROBABILITIES = (-0.1, 1.0, 1.5, 0, 1, True, None, "x", float("nan"), torch.tensor(0.0))


def mha_cases(batch_first: bool) -> list[Case]:
    batched = (BATCH, SEQ, EMBED) if batch_first else (SEQ, BATCH, EMBED)
    of_padding = masks(
        "key_padding_mask",
        {
            "": (BATCH, SEQ),
            "turned": (SEQ, BATCH),
            "of one sample": (1, SEQ),
            "too long": (BATCH, SEQ + 1),
            "1-D": (SEQ,),
            "0-d": (),
            "3-D": (BATCH, 1, SEQ),
        },
    )
    of_attention = masks(
        "attn_mask",
        {
            "": (SEQ, SEQ),
            "3-D": (BATCH * HEADS, SEQ, SEQ),
            "for samples": (BATCH, SEQ, SEQ),
            "for one": (1, SEQ, SEQ),
            "too long": (SEQ, SEQ + 1),
            "1-D": (SEQ,),
            "a row": (1, SEQ),
            "4-D": (BATCH, HEADS, SEQ, SEQ),
            "0-d": (),
        },
    )
    found = {}
    for weights in (False, True):
        of = f", need_weights={weights}"
        call = functools.partial(self_attention, need_weights=weights)
        for name, make in of_padding.items():
            found[name + of] = call(*batched, key_padding_mask=make)
        for name, make in of_attention.items():
            found[name + of] = call(*batched, attn_mask=make)
            found[name + ", causal" + of] = call(*batched, attn_mask=make, is_causal=True)
        for first in (torch.bool, torch.float32, torch.int64):
            for second in (torch.bool, torch.float32, torch.int64):
                found[f"{first} and {second}" + of] = call(
                    *batched,
                    key_padding_mask=lambda first=first: mask(BATCH, SEQ, dtype=first),
                    attn_mask=lambda second=second: mask(SEQ, SEQ, dtype=second),
                )
        found["causal without mask" + of] = call(*batched, is_causal=True)
        found["each head" + of] = call(*batched, average_attn_weights=False)
        found["2-D" + of] = call(SEQ, EMBED)
        found["2-D, padding" + of] = call(SEQ, EMBED, key_padding_mask=lambda: mask(SEQ))
        found["2-D, 2-D padding" + of] = call(SEQ, EMBED, key_padding_mask=lambda: mask(1, SEQ))
        found["2-D, mask" + of] = call(SEQ, EMBED, attn_mask=lambda: mask(SEQ, SEQ))
        found["2-D, 3-D mask" + of] = call(SEQ, EMBED, attn_mask=lambda: mask(HEADS, SEQ, SEQ))
        for shape in ((EMBED,), (2, SEQ, BATCH, EMBED), (), (0, BATCH, EMBED), (SEQ, 0, EMBED)):
            found[f"shape {shape}" + of] = call(*shape)
        found["empty, mask" + of] = call(0, 0, EMBED, attn_mask=lambda: mask(0, 0))
        found["wrong width" + of] = call(SEQ, BATCH, EMBED + 1)
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            found[f"{dtype}" + of] = call(*batched, dtype=dtype)
        for dtype in (torch.int64, torch.bool):
            found[f"{dtype}" + of] = call(*batched, dtype=dtype, grad=False)
        found["meta" + of] = cross(*[normal(*batched, device="meta")] * 3, need_weights=weights)
        a, b = (0, 1) if batch_first else (1, 0)
        longer, wider = list(batched), list(batched)
        longer[b] += 2
        wider[a] += 1
        crossed = functools.partial(cross, need_weights=weights)
        query, key = normal(*batched), normal(*longer)
        found["cross" + of] = crossed(query, key, key)
        found["other lengths" + of] = crossed(query, query, key)
        found["other batch" + of] = crossed(query, normal(*wider), normal(*wider))
        found["other value batch" + of] = crossed(query, query, normal(*wider))
        found["2-D query" + of] = crossed(normal(SEQ, EMBED), query, query)
        found["2-D keys" + of] = crossed(query, normal(SEQ, EMBED), normal(SEQ, EMBED))
        found["4-D key" + of] = crossed(query, normal(1, *batched), query)
        half = normal(*batched, dtype=torch.bfloat16)
        found["key of bfloat16" + of] = crossed(query, half, query)
        found["value of float64" + of] = crossed(query, query, normal(*batched, dtype=torch.double))
        none = list(batched)
        none[b] = 0
        found["no keys" + of] = crossed(query, normal(*none), normal(*none))
        found["no queries" + of] = crossed(normal(*none), query, query)
        found["key on meta" + of] = crossed(query, normal(*batched, device="meta"), query)
        found["key is None" + of] = crossed(query, lambda: None, query)
        found["key is a list" + of] = crossed(query, lambda: [1.0], query)
        found["sparse" + of] = crossed(*[lambda: torch.randn(batched).to_sparse()] * 3)
        found["nested" + of] = crossed(
            *[lambda: torch.nested.nested_tensor([torch.randn(2, EMBED), torch.randn(3, EMBED)])]
            * 3
        )
        found["strided" + of] = crossed(*[lambda: strided(batched, torch.float32)] * 3)
        found["expanded" + of] = crossed(*[lambda: torch.randn(1, 1, EMBED).expand(batched)] * 3)
    for value in FLAGS:
        found[f"need_weights={value!r}"] = self_attention(*batched, need_weights=value)
        for name in ("average_attn_weights", "is_causal"):
            for weights in (True, False):
                text = f"{name}={value!r}, need_weights={weights}"
                found[text] = self_attention(
                    *batched,
                    need_weights=weights,
                    attn_mask=lambda: mask(SEQ, SEQ),
                    **{name: value},
                )
    found["unknown name"] = self_attention(*batched, unknown=1)
    found["one argument"] = lambda: ([torch.randn(batched)], {})
    found["by names"] = lambda: (
        [],
        {name: torch.randn(batched) for name in ("query", "key", "value")},
    )
    found = [Case(name, make) for name, make in found.items()]
    changes = {
        **{f"num_heads: {x}": set_number("num_heads", x) for x in (2, 3, 0, -1, 4.0, None)},
        **{f"head_dim: {x}": set_number("head_dim", x) for x in (2, 8, None)},
        **{f"embed_dim: {x}": set_number("embed_dim", x) for x in (8, 17, None)},
        **{f"kdim: {x}": set_number("kdim", x) for x in (8, None)},
        **{f"batch_first: {x}": set_number("batch_first", x) for x in (True, False, 1, None)},
        **{f"add_zero_attn: {x}": set_number("add_zero_attn", x) for x in (True, 1, None)},
        **{
            f"{name}: {text}": set_tensor(name, make)
            for name in ("in_proj_weight", "in_proj_bias", "bias_k")
            for text, make in DENSE.items()
        },
        **{
            f"out_proj.{name}: {text}": on_part("out_proj", set_tensor(name, make))
            for name in ("weight", "bias")
            for text, make in DENSE.items()
        },
        "in eval mode": lambda module: module.eval(),
        "in float64": lambda module: module.double(),
        "in bfloat16": lambda module: module.bfloat16(),
    }
    dropouts = {f"dropout: {x}": set_number("dropout", x) for x in PROBABILITIES}
    for weights in (False, True):
        arguments = self_attention(*batched, need_weights=weights)
        for name, change in changes.items():
            found.append(Case(f"{name}, need_weights={weights}", arguments, change))
        for name, change in dropouts.items():
            found.append(
                Case(f"{name}, need_weights={weights}", arguments, change, "0" not in name)
            )
    return found


MHA = {
    "MHA": {},
    "batch_first": dict(batch_first=True),
    "MHA, without bias": dict(bias=False),
    "bias_k": dict(add_bias_kv=True),
    "add_zero_attn": dict(add_zero_attn=True, batch_first=True),
    "MHA, kdim": dict(kdim=EMBED, vdim=EMBED),
    "other kdim": dict(kdim=6, vdim=7),
}


def layer_cases(decoder: bool) -> list[Case]:
    batched = (SEQ, BATCH, EMBED)
    names = {
        "src_mask": {
            "": (SEQ, SEQ),
            "3-D": (BATCH * HEADS, SEQ, SEQ),
            "too long": (SEQ, SEQ + 1),
            "1-D": (SEQ,),
        },
        "src_key_padding_mask": {
            "": (BATCH, SEQ),
            "turned": (SEQ, BATCH),
            "1-D": (SEQ,),
            "too long": (BATCH, SEQ + 1),
        },
    }
    if decoder:
        names = {name.replace("src", "tgt"): shapes for name, shapes in names.items()} | {
            name.replace("src", "memory"): shapes for name, shapes in names.items()
        }

    def call(*shape, grad=True, dtype=torch.float32, **named):
        count = 2 if decoder else 1
        return cross(*[normal(*shape, grad=grad, dtype=dtype)] * count, **named)

    found = {}
    for name, shapes in names.items():
        for text, make in masks(name, shapes).items():
            found[text] = call(*batched, **{name: make})
            if name in ("src_mask", "tgt_mask"):
                causal = "tgt_is_causal" if decoder else "is_causal"
                found[text + ", causal"] = call(*batched, **{name: make, causal: True})
    for name in ("tgt_is_causal", "memory_is_causal") if decoder else ("is_causal",):
        for value in FLAGS:
            found[f"{name}={value!r}"] = call(*batched, **{name: value})
    shapes = ((SEQ, EMBED), (EMBED,), (), (0, BATCH, EMBED), (SEQ, 0, EMBED), (1, *batched))
    for shape in (*shapes, (SEQ, BATCH, EMBED + 1), (SEQ, BATCH, 0)):
        found[f"shape {shape}"] = call(*shape)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        found[f"{dtype}"] = call(*batched, dtype=dtype)
    found["integers"] = call(*batched, dtype=torch.int64, grad=False)
    found["unknown name"] = call(*batched, unknown=1)
    found["nothing given"] = cross()
    found["a list"] = cross(*[lambda: [[1.0]]] * (1 + decoder))
    found["meta"] = cross(*[normal(*batched, device="meta")] * (1 + decoder))
    if decoder:
        found["other memory"] = cross(normal(*batched), normal(7, BATCH, EMBED))
        found["memory of another batch"] = cross(normal(*batched), normal(7, BATCH + 1, EMBED))
        found["memory of bfloat16"] = cross(
            normal(*batched), normal(*batched, dtype=torch.bfloat16)
        )
    found = [Case(name, make) for name, make in found.items()]

    def activation(value):
        return set_number("activation", value)

    changes = {
        "activation: relu": activation(F.relu),
        "activation: gelu": activation(F.gelu),
        "activation: nn.GELU": activation(nn.GELU("tanh")),
        "activation: silu in place": activation(nn.SiLU(inplace=True)),
        "activation: relu in place": activation(nn.ReLU(inplace=True)),
        "activation: relu_": activation(torch.relu_),
        "activation: tanh": activation(torch.tanh),
        "activation: a lambda": activation(lambda x: x.double()),
        "activation: glu": activation(F.glu),
        "activation: none": activation(lambda x: None),
        **{f"norm_first: {x}": set_number("norm_first", x) for x in (True, 1, None, "x")},
        **{
            f"{part}.{name}: {text}": on_part(part, set_number(name, value))
            for part, name in (
                ("norm1", "eps"),
                ("dropout", "p"),
                ("dropout1", "p"),
                ("dropout2", "p"),
            )
            for text, value in NUMBERS.items()
            if text != "True"
        },
        **{
            f"{part}.{name}: {text}": on_part(part, set_tensor(name, make))
            for part in ("norm1", "linear1", "linear2")
            for name in ("weight", "bias")
            for text, make in DENSE.items()
        },
        "in eval mode": lambda layer: layer.eval(),
        "in float64": lambda layer: layer.double(),
        "in bfloat16": lambda layer: layer.bfloat16(),
        "linear1 of bfloat16": lambda layer: layer.linear1.bfloat16(),
        "an identity for dropout": set_number("dropout", nn.Identity()),
        "an identity for norm2": set_number("norm2", nn.Identity()),
        "self_attn is none": set_number("self_attn", None),
    }
    return found + [
        Case(name, call(*batched), change, ".p" in name) for name, change in changes.items()
    ]


LAYERS = {
    "encoder": (nn.TransformerEncoderLayer, {}),
    "encoder, norm first": (nn.TransformerEncoderLayer, dict(norm_first=True, activation="gelu")),
    "decoder": (nn.TransformerDecoderLayer, {}),
}


class Attends(nn.Module):
    def forward(self, *args, **named):
        return F.scaled_dot_product_attention(*args, **named)


class Rotates(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = 8

    def forward(self, *args, **named):
        return apply_rotary_pos_emb(*args, **named)


def attention_cases() -> list[Case]:
    usual = (2, HEADS, SEQ, 8)

    def alike(*shape, count=3, dtype=torch.float32, grad=True, **named):
        return cross(*[normal(*shape, dtype=dtype, grad=grad)] * count, **named)

    found = {
        "usual": alike(*usual),
        "2-D": alike(SEQ, 8),
        "3-D": alike(2, SEQ, 8),
        "5-D": alike(2, 3, HEADS, SEQ, 8),
        "1-D": alike(8),
        "0-d": alike(),
        "no head_dim": alike(2, HEADS, SEQ, 0),
        "no batch": alike(0, HEADS, SEQ, 8),
        "no heads": alike(2, 0, SEQ, 8),
        "no tokens": alike(2, HEADS, 0, 8),
        "wide": alike(1, 1, SEQ, 600),
        "head_dim 1": alike(1, 2, SEQ, 1),
        "one argument": alike(*usual, count=1),
        "unknown name": alike(*usual, unknown=1),
        "by names": lambda: ([], {n: torch.randn(usual) for n in ("query", "key", "value")}),
        "scale by position": lambda: ([*[torch.randn(usual)] * 3, None, 0.0, False, 0.5], {}),
        "no keys": cross(normal(*usual), normal(2, HEADS, 0, 8), normal(2, HEADS, 0, 8)),
        "no queries": cross(normal(2, HEADS, 0, 8), normal(*usual), normal(*usual)),
        "value wider": cross(normal(*usual), normal(*usual), normal(2, HEADS, SEQ, 12)),
        "key wider": cross(normal(*usual), normal(2, HEADS, SEQ, 9), normal(*usual)),
        "keys of one sample": cross(normal(*usual), *[normal(1, HEADS, SEQ, 8)] * 2),
        "query of one sample": cross(normal(1, HEADS, SEQ, 8), *[normal(*usual)] * 2),
        "keys of one head": cross(normal(*usual), *[normal(2, 1, SEQ, 8)] * 2),
        "key of one head": cross(normal(*usual), normal(2, 1, SEQ, 8), normal(*usual)),
        "keys of two heads": cross(normal(*usual), *[normal(2, 2, SEQ, 8)] * 2),
        "keys of 3-D": cross(normal(*usual), *[normal(HEADS, SEQ, 8)] * 2),
        "query of 3-D": cross(normal(HEADS, SEQ, 8), *[normal(*usual)] * 2),
        "batch that does not fit": cross(normal(*usual), *[normal(3, HEADS, SEQ, 8)] * 2),
        "key is None": cross(normal(*usual), lambda: None, normal(*usual)),
        "key is a list": cross(normal(*usual), lambda: [1.0], normal(*usual)),
        "meta": cross(*[normal(*usual, device="meta")] * 3),
        "key on meta": cross(normal(*usual), normal(*usual, device="meta"), normal(*usual)),
        "sparse": cross(*[lambda: torch.randn(usual).to_sparse()] * 3),
        "conjugate": cross(*[lambda: torch.randn(usual, dtype=torch.cfloat).conj()] * 3),
        "subclass": cross(*[lambda: torch.randn(usual).as_subclass(Subclass)] * 3),
        "strided": cross(*[lambda: strided(usual, torch.float32)] * 3),
        "expanded": cross(*[lambda: torch.randn(1, 1, 1, 8).expand(usual)] * 3),
        "tokens first": cross(
            *[lambda: torch.randn(2, SEQ, HEADS, 8).transpose(1, 2).requires_grad_()] * 3
        ),
        "turned": cross(*[lambda: turned(torch.randn(8, SEQ, HEADS, 2))] * 3),
        "infinite": cross(*[lambda: torch.full(usual, float("inf"))] * 3),
        "nan": cross(*[lambda: torch.full(usual, float("nan"))] * 3),
    }
    for heads in (1, 2, 3, 0, 8):
        keys = [normal(2, heads, SEQ, 8)] * 2
        found[f"enable_gqa, {heads} heads"] = cross(normal(*usual), *keys, enable_gqa=True)
    found["enable_gqa, other heads"] = cross(
        normal(*usual), normal(2, 2, SEQ, 8), normal(2, 1, SEQ, 8), enable_gqa=True
    )
    found["enable_gqa, 3-D"] = cross(normal(4, SEQ, 8), *[normal(2, SEQ, 8)] * 2, enable_gqa=True)
    found["enable_gqa, 2-D"] = cross(*[normal(SEQ, 8)] * 3, enable_gqa=True)
    found["enable_gqa, 5-D"] = cross(
        normal(2, 3, 4, SEQ, 8), *[normal(2, 3, 2, SEQ, 8)] * 2, enable_gqa=True
    )
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        found[f"{dtype}"] = alike(*usual, dtype=dtype)
        found[f"key of {dtype}"] = cross(
            normal(*usual), normal(*usual, dtype=dtype), normal(*usual)
        )
        found[f"value of {dtype}"] = cross(
            normal(*usual), normal(*usual), normal(*usual, dtype=dtype)
        )
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn):
        found[f"{dtype}"] = cross(*[lambda dtype=dtype: torch.randn(usual).to(dtype)] * 3)
        found[f"key of {dtype}"] = cross(
            normal(*usual), lambda dtype=dtype: torch.randn(usual).to(dtype), normal(*usual)
        )
    for value in (
        0,
        0.0,
        -1.0,
        2,
        float("inf"),
        float("nan"),
        None,
        True,
        "x",
        torch.tensor(0.5),
        1e300,
        1j,
    ):
        found[f"scale={value!r}"] = alike(*usual, scale=value)
    for value in PROBABILITIES:
        found[f"dropout_p={value!r}"] = alike(*usual, dropout_p=value)
    for value in FLAGS:
        found[f"is_causal={value!r}"] = alike(*usual, is_causal=value)
        found[f"enable_gqa={value!r}"] = alike(*usual, enable_gqa=value)
    shapes = {
        "": (SEQ, SEQ),
        "3-D": (HEADS, SEQ, SEQ),
        "4-D": (2, HEADS, SEQ, SEQ),
        "of samples": (2, 1, 1, SEQ),
        "of rows": (SEQ, 1),
        "1-D": (SEQ,),
        "one": (1,),
        "0-d": (),
        "too long": (SEQ, SEQ + 1),
        "too many rows": (SEQ + 1, SEQ),
        "of too many heads": (HEADS + 1, SEQ, SEQ),
        "5-D": (1, 2, HEADS, SEQ, SEQ),
        "5-D that broadcasts": (3, 2, HEADS, SEQ, SEQ),
        "of more samples": (6, HEADS, SEQ, SEQ),
        "empty": (0, SEQ),
    }
    for name, make in masks("attn_mask", shapes).items():
        found[name] = alike(*usual, attn_mask=make)
        found[name + ", causal"] = alike(*usual, attn_mask=make, is_causal=True)
        found[name + ", bfloat16"] = alike(*usual, attn_mask=make, dtype=torch.bfloat16)
        found[name + ", 2-D"] = alike(SEQ, 8, attn_mask=make)
        found[name + ", 3-D"] = alike(2, SEQ, 8, attn_mask=make)
        found[name + ", one query"] = cross(
            normal(1, HEADS, SEQ, 8), *[normal(*usual)] * 2, attn_mask=make
        )
    return [
        Case(name, make, None, name.startswith("dropout_p") and "0.0" not in name)
        for name, make in found.items()
    ]


def rotary_cases() -> list[Case]:
    q, k, table = (2, 4, SEQ, 8), (2, 2, SEQ, 8), (2, SEQ, 8)

    def tables(*shape, dtype=torch.float32, grad=False):
        return [normal(*shape, dtype=dtype, grad=grad)] * 2

    found = {
        "usual": cross(normal(*q), normal(*k), *tables(*table)),
        "by names": lambda: (
            [torch.randn(q), torch.randn(k)],
            dict(cos=torch.randn(table), sin=torch.randn(table)),
        ),
        "unsqueeze_dim 2": cross(*[normal(2, SEQ, 4, 8)] * 2, *tables(*table), unsqueeze_dim=2),
        "table of one sample": cross(normal(*q), normal(*k), *tables(1, SEQ, 8)),
        "table of 2-D": cross(normal(*q), normal(*k), *tables(SEQ, 8)),
        "table of 4-D": cross(normal(*q), normal(*k), *tables(2, 1, SEQ, 8)),
        "table of one token": cross(normal(*q), normal(*k), *tables(2, 1, 8)),
        "table too long": cross(normal(*q), normal(*k), *tables(2, SEQ + 1, 8)),
        "narrow table": cross(normal(*q), normal(*k), *tables(2, SEQ, 4)),
        "odd table": cross(normal(*q), normal(*k), *tables(2, SEQ, 7)),
        "table of one column": cross(normal(*q), normal(*k), *tables(2, SEQ, 1)),
        "table with gradients": cross(normal(*q), normal(*k), *tables(*table, grad=True)),
        "sin of another shape": cross(
            normal(*q), normal(*k), normal(*table, grad=False), normal(1, SEQ, 8, grad=False)
        ),
        "odd head_dim": cross(normal(2, 4, SEQ, 7), normal(2, 2, SEQ, 7), *tables(2, SEQ, 7)),
        "query without heads": cross(normal(2, SEQ, 8), normal(2, SEQ, 8), *tables(*table)),
        "5-D": cross(*[normal(1, *q)] * 2, *tables(*table)),
        "no tokens": cross(normal(2, 4, 0, 8), normal(2, 2, 0, 8), *tables(2, 0, 8)),
        "no samples": cross(normal(0, 4, SEQ, 8), normal(0, 2, SEQ, 8), *tables(0, SEQ, 8)),
        "no heads": cross(normal(2, 0, SEQ, 8), normal(2, 2, SEQ, 8), *tables(*table)),
        "key of other samples": cross(normal(*q), normal(1, 2, SEQ, 8), *tables(*table)),
        "key of other tokens": cross(normal(*q), normal(2, 2, SEQ + 1, 8), *tables(*table)),
        "key is None": cross(normal(*q), lambda: None, *tables(*table)),
        "key is a number": cross(normal(*q), lambda: 1.0, *tables(*table)),
        "meta": cross(*[normal(*q, device="meta")] * 2, *[normal(*table, device="meta")] * 2),
        "cos on meta": cross(
            *[normal(*q)] * 2, normal(*table, device="meta", grad=False), normal(*table, grad=False)
        ),
        "strided": cross(*[lambda: strided(q, torch.float32)] * 2, *tables(*table)),
        "expanded": cross(*[lambda: torch.randn(1, 1, 1, 8).expand(q)] * 2, *tables(*table)),
        "tokens first": cross(
            *[lambda: torch.randn(2, SEQ, 4, 8).transpose(1, 2).requires_grad_()] * 2,
            *tables(*table),
        ),
        "turned": cross(*[lambda: turned(torch.randn(8, SEQ, 4, 2))] * 2, *tables(*table)),
        "one sample, tokens first": cross(
            *[lambda: torch.randn(1, SEQ, 1, 8).transpose(1, 2)] * 2, *tables(1, SEQ, 8)
        ),
    }
    for dim in (0, 1, 2, 3, -1, -3, 9, None, "x", 1.0):
        found[f"unsqueeze_dim={dim!r}"] = cross(
            normal(*q), normal(*k), *tables(*table), unsqueeze_dim=dim
        )
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64)
    for dtype in dtypes:
        grad = dtype is not torch.int64
        found[f"{dtype}"] = cross(
            *[normal(*q, dtype=dtype, grad=grad)] * 2, *tables(*table, dtype=dtype)
        )
        found[f"table of {dtype}"] = cross(normal(*q), normal(*k), *tables(*table, dtype=dtype))
        found[f"query of {dtype}"] = cross(
            normal(*q, dtype=dtype, grad=grad), normal(*k), *tables(*table)
        )
        found[f"inputs of {dtype}"] = cross(
            *[normal(*q, dtype=dtype, grad=grad)] * 2, *tables(*table)
        )
    return [Case(name, make) for name, make in found.items()]
