"""Odd arguments of modules of attention, and of calls of attention and of rotary functions."""

from __future__ import annotations

import functools
import itertools
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
    torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8,
    torch.complex64,
)  # fmt: skip


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return (torch.rand(shape) < 0.3).to(dtype)


def made(named: dict) -> dict:
    return {name: value() if callable(value) else value for name, value in named.items()}


def same(*shape: int, grad: bool = True, dtype=torch.float32, **named) -> Callable:
    """One tensor as query, key and value."""

    def arguments():
        x = torch.randn(shape).to(dtype).requires_grad_(grad)
        return [x, x, x], made(named)

    return arguments


def cross(*makes: Callable, **named) -> Callable:
    return lambda: ([make() for make in makes], made(named))


def normal(*shape: int, dtype=torch.float32, grad: bool = True, device="cpu") -> Callable:
    return lambda: torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def thrice(make: Callable, **named) -> Callable:
    return cross(make, make, make, **named)


def with_named(arguments: Callable, **named) -> Callable:
    def more():
        args, others = arguments()
        return args, {**others, **named}

    return more


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


PADDINGS = {
    "": (BATCH, SEQ), "turned": (SEQ, BATCH), "of one sample": (1, SEQ),
    "too long": (BATCH, SEQ + 1), "1-D": (SEQ,), "0-d": (), "3-D": (BATCH, 1, SEQ),
}  # fmt: skip
MASKS = {
    "": (SEQ, SEQ), "3-D": (BATCH * HEADS, SEQ, SEQ), "for samples": (BATCH, SEQ, SEQ),
    "for one": (1, SEQ, SEQ), "too long": (SEQ, SEQ + 1), "1-D": (SEQ,), "a row": (1, SEQ),
    "4-D": (BATCH, HEADS, SEQ, SEQ), "0-d": (),
}  # fmt: skip


def mha_calls(batched: tuple[int, ...], batch_first: bool) -> dict[str, Callable]:
    """Calls whose weights are asked for or not."""
    found = {}
    for name, make in masks("key_padding_mask", PADDINGS).items():
        found[name] = same(*batched, key_padding_mask=make)
    for name, make in masks("attn_mask", MASKS).items():
        found[name] = same(*batched, attn_mask=make)
        found[name + ", causal"] = same(*batched, attn_mask=make, is_causal=True)
    for first, second in itertools.product((torch.bool, torch.float32, torch.int64), repeat=2):
        found[f"{first} and {second}"] = same(
            *batched,
            key_padding_mask=functools.partial(mask, BATCH, SEQ, dtype=first),
            attn_mask=functools.partial(mask, SEQ, SEQ, dtype=second),
        )
    of_two = functools.partial(same, SEQ, EMBED)
    found |= {
        "causal without mask": same(*batched, is_causal=True),
        "each head": same(*batched, average_attn_weights=False),
        "2-D": of_two(),
        "2-D, padding": of_two(key_padding_mask=lambda: mask(SEQ)),
        "2-D, 2-D padding": of_two(key_padding_mask=lambda: mask(1, SEQ)),
        "2-D, mask": of_two(attn_mask=lambda: mask(SEQ, SEQ)),
        "2-D, 3-D mask": of_two(attn_mask=lambda: mask(HEADS, SEQ, SEQ)),
        "empty, mask": same(0, 0, EMBED, attn_mask=lambda: mask(0, 0)),
        "wrong width": same(SEQ, BATCH, EMBED + 1),
    }
    for shape in ((EMBED,), (2, SEQ, BATCH, EMBED), (), (0, BATCH, EMBED), (SEQ, 0, EMBED)):
        found[f"shape {shape}"] = same(*shape)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        found[f"{dtype}"] = same(*batched, dtype=dtype, grad=dtype.is_floating_point)

    def sized(batch: int, seq: int) -> Callable:
        return normal(*((batch, seq) if batch_first else (seq, batch)), EMBED)

    query, key, wider, none = (
        sized(*size) for size in ((BATCH, SEQ), (BATCH, 7), (BATCH + 1, SEQ), (BATCH, 0))
    )
    parts = [torch.randn(2, EMBED), torch.randn(3, EMBED)]
    found |= {
        "meta": thrice(normal(*batched, device="meta")),
        "cross": cross(query, key, key),
        "other lengths": cross(query, query, key),
        "other batch": cross(query, wider, wider),
        "other value batch": cross(query, query, wider),
        "2-D query": cross(normal(SEQ, EMBED), query, query),
        "2-D keys": cross(query, normal(SEQ, EMBED), normal(SEQ, EMBED)),
        "4-D key": cross(query, normal(1, *batched), query),
        "key of bfloat16": cross(query, normal(*batched, dtype=torch.bfloat16), query),
        "value of float64": cross(query, query, normal(*batched, dtype=torch.double)),
        "no keys": cross(query, none, none),
        "no queries": cross(none, query, query),
        "key on meta": cross(query, normal(*batched, device="meta"), query),
        "key is None": cross(query, lambda: None, query),
        "key is a list": cross(query, lambda: [1.0], query),
        "sparse": thrice(lambda: torch.randn(batched).to_sparse()),
        "nested": thrice(lambda: torch.nested.nested_tensor(parts)),
        "strided": thrice(lambda: strided(batched, torch.float32)),
        "expanded": thrice(lambda: torch.randn(1, 1, EMBED).expand(batched)),
    }
    return found


def numbers(name: str, *values) -> dict[str, Callable]:
    return {f"{name}: {value}": set_number(name, value) for value in values}


def dense(part: str, *names: str) -> dict[str, Callable]:
    """Other tensors in place of those of a part."""
    return {
        f"{part}.{name}: {text}".removeprefix("."): on_part(part, set_tensor(name, make))
        for name in names
        for text, make in DENSE.items()
    }


CASTS = {
    "in eval mode": lambda module: module.eval(),
    "in float64": lambda module: module.double(),
    "in bfloat16": lambda module: module.bfloat16(),
}
MHA_CHANGES = {
    **numbers("num_heads", 2, 3, 0, -1, 4.0, None),
    **numbers("head_dim", 2, 8, None),
    **numbers("embed_dim", 8, 17, None),
    **numbers("kdim", 8, None),
    **numbers("batch_first", True, False, 1, None),
    **numbers("add_zero_attn", True, 1, None),
    **dense("", "in_proj_weight", "in_proj_bias", "bias_k"),
    **dense("out_proj", "weight", "bias"),
    **CASTS,
    **numbers("dropout", *PROBABILITIES),
}


def mha_cases(batch_first: bool) -> list[Case]:
    batched = (BATCH, SEQ, EMBED) if batch_first else (SEQ, BATCH, EMBED)
    found = []
    for weights in (False, True):
        of = f", need_weights={weights}"
        for name, arguments in mha_calls(batched, batch_first).items():
            found.append(Case(name + of, with_named(arguments, need_weights=weights)))
        for name, value in itertools.product(("average_attn_weights", "is_causal"), FLAGS):
            named = {"need_weights": weights, name: value}
            arguments = same(*batched, attn_mask=lambda: mask(SEQ, SEQ), **named)
            found.append(Case(f"{name}={value!r}" + of, arguments))
        for name, change in MHA_CHANGES.items():
            is_random = name.startswith("dropout") and "0" not in name
            found.append(Case(name + of, same(*batched, need_weights=weights), change, is_random))
    for value in FLAGS:
        found.append(Case(f"need_weights={value!r}", same(*batched, need_weights=value)))
    three = {name: normal(*batched, grad=False) for name in ("query", "key", "value")}
    return [
        *found,
        Case("unknown name", same(*batched, unknown=1)),
        Case("one argument", cross(three["query"])),
        Case("by names", cross(**three)),
    ]


MHA = {
    "MHA": {},
    "batch_first": dict(batch_first=True),
    "MHA, without bias": dict(bias=False),
    "bias_k": dict(add_bias_kv=True),
    "add_zero_attn": dict(add_zero_attn=True, batch_first=True),
    "MHA, kdim": dict(kdim=EMBED, vdim=EMBED),
    "other kdim": dict(kdim=6, vdim=7),
}


def layer_masks(decoder: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    found = {}
    for of in ("tgt", "memory") if decoder else ("src",):
        found[f"{of}_mask"] = {name: MASKS[name] for name in ("", "3-D", "too long", "1-D")}
        padding = {name: PADDINGS[name] for name in ("", "turned", "1-D", "too long")}
        found[f"{of}_key_padding_mask"] = padding
    return found


LAYER_CHANGES = {
    **{
        f"activation: {name}": set_number("activation", value)
        for name, value in {
            "relu": F.relu, "gelu": F.gelu, "nn.GELU": nn.GELU("tanh"), "relu_": torch.relu_,
            "silu in place": nn.SiLU(inplace=True), "relu in place": nn.ReLU(inplace=True),
            "tanh": torch.tanh, "a lambda": lambda x: x.double(), "glu": F.glu,
            "none": lambda x: None,
        }.items()
    },
    **numbers("norm_first", True, 1, None, "x"),
    **{
        f"{part}.{name}: {text}": on_part(part, set_number(name, value))
        for part, name in (("norm1", "eps"), ("dropout", "p"), ("dropout1", "p"), ("dropout2", "p"))
        for text, value in NUMBERS.items()
        if text != "True"
    },
    **dense("norm1", "weight", "bias"),
    **dense("linear1", "weight", "bias"),
    **dense("linear2", "weight", "bias"),
    **CASTS,
    "linear1 of bfloat16": lambda layer: layer.linear1.bfloat16(),
    "an identity for dropout": set_number("dropout", nn.Identity()),
    "an identity for norm2": set_number("norm2", nn.Identity()),
    "self_attn is none": set_number("self_attn", None),
}  # fmt: skip


def layer_cases(decoder: bool) -> list[Case]:
    batched, count = (SEQ, BATCH, EMBED), 1 + decoder
    flags = ("tgt_is_causal", "memory_is_causal") if decoder else ("is_causal",)

    def call(*shape, grad=True, dtype=torch.float32, **named):
        return cross(*[normal(*shape, grad=grad, dtype=dtype)] * count, **named)

    found = {}
    for name, shapes in layer_masks(decoder).items():
        for text, make in masks(name, shapes).items():
            found[text] = call(*batched, **{name: make})
            if name in ("src_mask", "tgt_mask"):
                found[text + ", causal"] = call(*batched, **{name: make, flags[0]: True})
    for name, value in itertools.product(flags, FLAGS):
        found[f"{name}={value!r}"] = call(*batched, **{name: value})
    shapes = ((SEQ, EMBED), (EMBED,), (), (0, BATCH, EMBED), (SEQ, 0, EMBED), (1, *batched))
    for shape in (*shapes, (SEQ, BATCH, EMBED + 1), (SEQ, BATCH, 0)):
        found[f"shape {shape}"] = call(*shape)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64):
        found[f"{dtype}"] = call(*batched, dtype=dtype, grad=dtype.is_floating_point)
    found["unknown name"] = call(*batched, unknown=1)
    found["nothing given"] = cross()
    found["a list"] = cross(*[lambda: [[1.0]]] * count)
    found["meta"] = cross(*[normal(*batched, device="meta")] * count)
    if decoder:
        x = normal(*batched)
        found["other memory"] = cross(x, normal(7, BATCH, EMBED))
        found["memory of another batch"] = cross(x, normal(7, BATCH + 1, EMBED))
        found["memory of bfloat16"] = cross(x, normal(*batched, dtype=torch.bfloat16))
    return [Case(name, make) for name, make in found.items()] + [
        Case(name, call(*batched), change, ".p" in name) for name, change in LAYER_CHANGES.items()
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


USUAL = (2, HEADS, SEQ, 8)
ALIKE = {  # the shape of query, key and value
    "usual": USUAL, "2-D": (SEQ, 8), "3-D": (2, SEQ, 8), "5-D": (2, 3, HEADS, SEQ, 8), "1-D": (8,),
    "0-d": (), "no head_dim": (2, HEADS, SEQ, 0), "no batch": (0, HEADS, SEQ, 8),
    "no heads": (2, 0, SEQ, 8), "no tokens": (2, HEADS, 0, 8), "wide": (1, 1, SEQ, 600),
    "head_dim 1": (1, 2, SEQ, 1),
}  # fmt: skip
DIFFERENT = {  # the shapes of query, key and, if it differs from the key's, value
    "no keys": (USUAL, (2, HEADS, 0, 8)), "no queries": ((2, HEADS, 0, 8), USUAL),
    "value wider": (USUAL, USUAL, (2, HEADS, SEQ, 12)),
    "key wider": (USUAL, (2, HEADS, SEQ, 9), USUAL),
    "keys of one sample": (USUAL, (1, HEADS, SEQ, 8)),
    "query of one sample": ((1, HEADS, SEQ, 8), USUAL),
    "keys of one head": (USUAL, (2, 1, SEQ, 8)), "key of one head": (USUAL, (2, 1, SEQ, 8), USUAL),
    "keys of two heads": (USUAL, (2, 2, SEQ, 8)), "keys of 3-D": (USUAL, (HEADS, SEQ, 8)),
    "query of 3-D": ((HEADS, SEQ, 8), USUAL),
    "batch that does not fit": (USUAL, (3, HEADS, SEQ, 8)),
    **{f"enable_gqa, {heads} heads": (USUAL, (2, heads, SEQ, 8)) for heads in (1, 2, 3, 0, 8)},
    "enable_gqa, other heads": (USUAL, (2, 2, SEQ, 8), (2, 1, SEQ, 8)),
    "enable_gqa, 3-D": ((4, SEQ, 8), (2, SEQ, 8)), "enable_gqa, 2-D": ((SEQ, 8), (SEQ, 8)),
    "enable_gqa, 5-D": ((2, 3, 4, SEQ, 8), (2, 3, 2, SEQ, 8)),
}  # fmt: skip
FLOATS = (torch.float64, torch.bfloat16, torch.float16, torch.complex64)
OTHER_DTYPES = (torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn)
NAN, INFINITY = float("nan"), float("inf")
SCALES = (0, 0.0, -1.0, 2, INFINITY, NAN, None, True, "x", torch.tensor(0.5), 1e300, 1j)
MASKS_OF_CALLS = {
    "": (SEQ, SEQ), "3-D": (HEADS, SEQ, SEQ), "4-D": (2, HEADS, SEQ, SEQ),
    "of samples": (2, 1, 1, SEQ), "of rows": (SEQ, 1), "1-D": (SEQ,), "one": (1,), "0-d": (),
    "too long": (SEQ, SEQ + 1), "too many rows": (SEQ + 1, SEQ),
    "of too many heads": (HEADS + 1, SEQ, SEQ), "5-D": (1, 2, HEADS, SEQ, SEQ),
    "5-D that broadcasts": (3, 2, HEADS, SEQ, SEQ), "of more samples": (6, HEADS, SEQ, SEQ),
    "empty": (0, SEQ),
}  # fmt: skip


def attention_cases() -> list[Case]:
    def alike(*shape, dtype=torch.float32, **named):
        return thrice(normal(*shape, dtype=dtype), **named)

    usual = normal(*USUAL)
    found = {name: alike(*shape) for name, shape in ALIKE.items()}
    for name, (query, key, *value) in DIFFERENT.items():
        named = {"enable_gqa": True} if "gqa" in name else {}
        found[name] = cross(normal(*query), normal(*key), normal(*(*value, key)[0]), **named)
    found |= {
        "one argument": cross(usual),
        "unknown name": alike(*USUAL, unknown=1),
        "by names": cross(**dict.fromkeys(("query", "key", "value"), usual)),
        "scale by position": cross(
            usual, usual, usual, lambda: None, lambda: 0.0, lambda: False, lambda: 0.5
        ),
        "key is None": cross(usual, lambda: None, usual),
        "key is a list": cross(usual, lambda: [1.0], usual),
        "meta": thrice(normal(*USUAL, device="meta")),
        "key on meta": cross(usual, normal(*USUAL, device="meta"), usual),
        "sparse": thrice(lambda: torch.randn(USUAL).to_sparse()),
        "conjugate": thrice(lambda: torch.randn(USUAL, dtype=torch.cfloat).conj()),
        "subclass": thrice(lambda: torch.randn(USUAL).as_subclass(Subclass)),
        "strided": thrice(lambda: strided(USUAL, torch.float32)),
        "expanded": thrice(lambda: torch.randn(1, 1, 1, 8).expand(USUAL)),
        "tokens first": thrice(
            lambda: torch.randn(2, SEQ, HEADS, 8).transpose(1, 2).requires_grad_()
        ),
        "turned": thrice(lambda: turned(torch.randn(8, SEQ, HEADS, 2))),
        "infinite": thrice(lambda: torch.full(USUAL, INFINITY)),
        "nan": thrice(lambda: torch.full(USUAL, NAN)),
    }
    for dtype in FLOATS + OTHER_DTYPES:
        other = normal(*USUAL, dtype=dtype, grad=dtype in FLOATS)
        found[f"{dtype}"] = thrice(other)
        found[f"key of {dtype}"] = cross(usual, other, usual)
        found[f"value of {dtype}"] = cross(usual, usual, other)
    for name, values in (
        ("scale", SCALES), ("dropout_p", PROBABILITIES), ("is_causal", FLAGS), ("enable_gqa", FLAGS)
    ):  # fmt: skip
        for value in values:
            found[f"{name}={value!r}"] = alike(*USUAL, **{name: value})
    for name, make in masks("attn_mask", MASKS_OF_CALLS).items():
        found[name] = alike(*USUAL, attn_mask=make)
        found[name + ", causal"] = alike(*USUAL, attn_mask=make, is_causal=True)
        found[name + ", bfloat16"] = alike(*USUAL, attn_mask=make, dtype=torch.bfloat16)
        found[name + ", 2-D"] = alike(SEQ, 8, attn_mask=make)
        found[name + ", 3-D"] = alike(2, SEQ, 8, attn_mask=make)
        found[name + ", one query"] = cross(normal(1, HEADS, SEQ, 8), usual, usual, attn_mask=make)
    return [
        Case(name, make, None, name.startswith("dropout_p") and "0.0" not in name)
        for name, make in found.items()
    ]


Q, K, TABLE = (2, 4, SEQ, 8), (2, 2, SEQ, 8), (2, SEQ, 8)
ROTARY_SHAPES = {  # of query, key, cos, and sin where it differs
    "usual": (Q, K, TABLE), "table of one sample": (Q, K, (1, SEQ, 8)),
    "table of 2-D": (Q, K, (SEQ, 8)), "table of 4-D": (Q, K, (2, 1, SEQ, 8)),
    "table of one token": (Q, K, (2, 1, 8)), "table too long": (Q, K, (2, SEQ + 1, 8)),
    "narrow table": (Q, K, (2, SEQ, 4)), "odd table": (Q, K, (2, SEQ, 7)),
    "table of one column": (Q, K, (2, SEQ, 1)), "sin of another shape": (Q, K, TABLE, (1, SEQ, 8)),
    "odd head_dim": ((2, 4, SEQ, 7), (2, 2, SEQ, 7), (2, SEQ, 7)),
    "query without heads": (TABLE, TABLE, TABLE), "5-D": ((1, *Q), (1, *Q), TABLE),
    "no tokens": ((2, 4, 0, 8), (2, 2, 0, 8), (2, 0, 8)),
    "no samples": ((0, 4, SEQ, 8), (0, 2, SEQ, 8), (0, SEQ, 8)),
    "no heads": ((2, 0, SEQ, 8), K, TABLE), "key of other samples": (Q, (1, 2, SEQ, 8), TABLE),
    "key of other tokens": (Q, (2, 2, SEQ + 1, 8), TABLE),
}  # fmt: skip


def rotary_cases() -> list[Case]:
    q, k, table = normal(*Q), normal(*K), normal(*TABLE, grad=False)

    def call(query, key=None, cos=table, sin=None, **named):
        return cross(query, key or query, cos, sin or cos, **named)

    found = {
        name: call(normal(*query), normal(*key), *(normal(*table, grad=False) for table in tables))
        for name, (query, key, *tables) in ROTARY_SHAPES.items()
    }
    found |= {
        "by names": cross(q, k, cos=table, sin=table),
        "unsqueeze_dim 2": call(normal(2, SEQ, 4, 8), unsqueeze_dim=2),
        "table with gradients": call(q, k, normal(*TABLE)),
        "key is None": call(q, lambda: None),
        "key is a number": call(q, lambda: 1.0),
        "meta": call(normal(*Q, device="meta"), cos=normal(*TABLE, device="meta")),
        "cos on meta": call(q, q, normal(*TABLE, device="meta", grad=False), table),
        "strided": call(lambda: strided(Q, torch.float32)),
        "expanded": call(lambda: torch.randn(1, 1, 1, 8).expand(Q)),
        "tokens first": call(lambda: torch.randn(2, SEQ, 4, 8).transpose(1, 2).requires_grad_()),
        "turned": call(lambda: turned(torch.randn(8, SEQ, 4, 2))),
        "one sample, tokens first": call(
            lambda: torch.randn(1, SEQ, 1, 8).transpose(1, 2), cos=normal(1, SEQ, 8, grad=False)
        ),
    }
    for dim in (0, 1, 2, 3, -1, -3, 9, None, "x", 1.0):
        found[f"unsqueeze_dim={dim!r}"] = call(q, k, unsqueeze_dim=dim)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64):
        inputs = normal(*Q, dtype=dtype, grad=dtype is not torch.int64)
        tables = normal(*TABLE, dtype=dtype, grad=False)
        found[f"{dtype}"] = call(inputs, cos=tables)
        found[f"table of {dtype}"] = call(q, k, tables)
        found[f"query of {dtype}"] = call(inputs, k)
        found[f"inputs of {dtype}"] = call(inputs)
    return [Case(name, make) for name, make in found.items()]
