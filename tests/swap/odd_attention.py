"""Odd arguments of modules of attention, and of calls of attention and of rotary functions."""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.swap.odd_modules import (
    INPUTS,
    NUMBERS,
    TENSORS,
    Case,
    on_part,
    set_number,
    set_tensor,
    turned,
)
from tests.swap.test_rotary import apply_rotary_pos_emb

SEQ, BATCH, EMBED, HEADS = 5, 3, 16, 4
# F.linear decides by a sparse layout, and reads memory that is not there of a tensor on meta.
DENSE = {name: make for name, make in TENSORS.items() if name not in ("sparse", "meta")}
# What differs for its values or its device alone, in the place of one argument and of a mask.
ONE = {name: odd for name, odd in INPUTS.items() if name not in ("infinite", "nan", "large")}
MASK = {
    name: odd
    for name, odd in INPUTS.items()
    if name not in ("bool", "meta", "meta with a gradient", "sparse", "float8_e4m3fn")
}
FLAGS = (True, False, 1, 0, None, "x", torch.tensor(True))
PROBABILITIES = (-0.1, 1.0, 1.5, 0, 1, True, None, "x", float("nan"), torch.tensor(0.0))
NAN, INFINITY = float("nan"), float("inf")
SCALES = (0, 0.0, -1.0, 2, INFINITY, NAN, None, True, "x", torch.tensor(0.5), 1e300, 1j)


def mask(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.3


def normal(*shape: int, dtype=torch.float32, grad: bool = True) -> Callable:
    return lambda: torch.randn(shape).to(dtype).requires_grad_(grad)


def given(*makes: Callable, **named) -> Callable:
    """Arguments by position, one object for one function, and by name."""

    def arguments():
        made = {make: make() for make in makes}
        others = {name: value() if callable(value) else value for name, value in named.items()}
        return [made[make] for make in makes], others

    return arguments


def odd_tensors(names: Sequence[str], *makes: Callable, **named) -> dict[str, Callable]:
    """A call with each odd tensor in the place of all arguments, where they have one shape, and of
    each of them."""
    shapes = [tuple(make().shape) for make in makes]
    found = {}
    if len({*shapes}) == 1:
        for text, odd in INPUTS.items():
            alike = functools.partial(odd, shapes[0], torch.float32)
            found[text] = given(*[alike] * len(makes), **named)
    for text, odd in ONE.items() if len(makes) > 1 else ():
        for place, name in enumerate(names[: len(makes)]):
            one = functools.partial(odd, shapes[place], torch.float32)
            changed = (one if i == place else make for i, make in enumerate(makes))
            found[f"{name}: {text}"] = given(*changed, **named)
    return found


def odd_masks(name: str, shapes: dict[str, tuple], *makes, odd=MASK, **named):
    """Calls with masks of odd kinds in the usual shape, and boolean and float ones in others."""
    usual, *_ = shapes.values()
    made = {
        f"{name}: {text}": functools.partial(make, usual, torch.float32)
        for text, make in odd.items()
    }
    for text, shape in shapes.items():
        made[f"{name} {text}"] = functools.partial(mask, *shape)
        made[f"float {name} {text}"] = normal(*shape, grad=False)
    made[f"{name} of all"] = lambda: torch.ones(usual, dtype=torch.bool)
    made[f"{name} of none"] = lambda: torch.zeros(usual, dtype=torch.bool)
    made[f"infinite {name}"] = lambda: torch.full(usual, -INFINITY)
    return {text: given(*makes, **{name: make}, **named) for text, make in made.items()}


PADDINGS = {
    "": (BATCH, SEQ), "turned": (SEQ, BATCH), "of one sample": (1, SEQ),
    "too long": (BATCH, SEQ + 1), "1-D": (SEQ,), "0-d": (), "3-D": (BATCH, 1, SEQ),
}  # fmt: skip
MASKS = {
    "": (SEQ, SEQ), "3-D": (BATCH * HEADS, SEQ, SEQ), "for samples": (BATCH, SEQ, SEQ),
    "for one": (1, SEQ, SEQ), "too long": (SEQ, SEQ + 1), "1-D": (SEQ,), "a row": (1, SEQ),
    "4-D": (BATCH, HEADS, SEQ, SEQ), "0-d": (),
}  # fmt: skip


def nested() -> Tensor:
    return torch.nested.nested_tensor([*torch.randn(2, 3, EMBED)])


def mha_calls(batched: tuple[int, ...], **named) -> dict[str, Callable]:
    x = normal(*batched)
    three = [x] * 3
    found = odd_tensors(("query", "key", "value"), *three, **named)
    found |= odd_masks("key_padding_mask", PADDINGS, *three, **named)
    found |= odd_masks("attn_mask", MASKS, *three, **named)
    causal = odd_masks("attn_mask", MASKS, *three, odd={}, is_causal=True, **named)
    found |= {f"{text}, causal": call for text, call in causal.items()}
    kinds = {"boolean": functools.partial(mask, BATCH, SEQ), "float": normal(BATCH, SEQ)}
    for text, padding in kinds.items():
        others = {"boolean": lambda: mask(SEQ, SEQ), "float": normal(SEQ, SEQ)}
        for other, attn_mask in others.items():
            both = dict(key_padding_mask=padding, attn_mask=attn_mask)
            found[f"both masks, {text} and {other}"] = given(*three, **both, **named)
    longer = normal(*(7 if size == SEQ else size for size in batched))
    found |= {
        "causal without mask": given(*three, is_causal=True, **named),
        "each head": given(*three, average_attn_weights=False, **named),
        "cross": given(x, longer, longer, **named),
        "nested": given(*[nested] * 3),
        "nested, apart": given(*(functools.partial(nested) for _ in range(3))),
        "2-D": given(*[normal(SEQ, EMBED)] * 3, **named),
        "2-D, padding": given(*[normal(SEQ, EMBED)] * 3, key_padding_mask=lambda: mask(SEQ)),
        "2-D, 3-D mask": given(
            *[normal(SEQ, EMBED)] * 3, attn_mask=lambda: mask(HEADS, SEQ, SEQ), **named
        ),
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


def mha_cases(batch_first: bool, weights: bool) -> list[Case]:
    batched = (BATCH, SEQ, EMBED) if batch_first else (SEQ, BATCH, EMBED)
    x = normal(*batched)
    three, named = [x] * 3, dict(need_weights=weights)
    found = [Case(name, make) for name, make in mha_calls(batched, **named).items()]
    flags = ("average_attn_weights", "is_causal", "need_weights")
    for name, value in itertools.product(flags, FLAGS):
        options = {"attn_mask": lambda: mask(SEQ, SEQ), **named, name: value}
        found.append(Case(f"{name}={value!r}", given(*three, **options)))
    for name, change in MHA_CHANGES.items():
        is_random = name.startswith("dropout") and "0" not in name
        found.append(Case(name, given(*three, **named), change, is_random))
    return [
        *found,
        Case("unknown name", given(*three, unknown=1)),
        Case("one argument", given(x)),
        Case("by names", given(query=x, key=x, value=x)),
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
    x = normal(SEQ, BATCH, EMBED)
    makes = [x, normal(SEQ, BATCH, EMBED)] if decoder else [x]
    flags = ("tgt_is_causal", "memory_is_causal") if decoder else ("is_causal",)
    found = odd_tensors(("tgt", "memory") if decoder else ("src",), *makes)
    for of in ("tgt", "memory") if decoder else ("src",):
        shapes = {name: MASKS[name] for name in ("", "3-D", "too long", "1-D")}
        odd = {} if of == "memory" else MASK  # both go on in the same way
        found |= odd_masks(f"{of}_mask", shapes, *makes, odd=odd)
        shapes = {name: PADDINGS[name] for name in ("", "turned", "1-D", "too long")}
        odd = {} if of == "tgt" else MASK
        found |= odd_masks(f"{of}_key_padding_mask", shapes, *makes, odd=odd)
    for name, value in itertools.product(flags, FLAGS):
        of = "src_mask" if name == "is_causal" else name.replace("is_causal", "mask")
        found[f"{name}={value!r}"] = given(*makes, **{name: value})
        both = {name: value, of: lambda: mask(SEQ, SEQ)}
        found[f"{name}={value!r}, mask"] = given(*makes, **both)
    found["unknown name"] = given(*makes, unknown=1)
    found["nothing given"] = given()
    if decoder:
        found["other memory"] = given(x, normal(7, BATCH, EMBED))
    return [Case(name, make) for name, make in found.items()] + [
        Case(name, given(*makes), change, ".p" in name) for name, change in LAYER_CHANGES.items()
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
    "2-D": (SEQ, 8), "3-D": (2, SEQ, 8), "no heads": (2, 0, SEQ, 8), "wide": (1, 1, SEQ, 600),
    "head_dim 1": (1, 2, SEQ, 1),
}  # fmt: skip
DIFFERENT = {  # the shapes of query, key and, if it differs from the key's, value
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
MASKS_OF_CALLS = {
    "": (SEQ, SEQ), "3-D": (HEADS, SEQ, SEQ), "4-D": (2, HEADS, SEQ, SEQ),
    "of samples": (2, 1, 1, SEQ), "of rows": (SEQ, 1), "1-D": (SEQ,), "one": (1,), "0-d": (),
    "too long": (SEQ, SEQ + 1), "too many rows": (SEQ + 1, SEQ),
    "of too many heads": (HEADS + 1, SEQ, SEQ), "5-D": (1, 2, HEADS, SEQ, SEQ),
    "5-D that broadcasts": (3, 2, HEADS, SEQ, SEQ), "of more samples": (6, HEADS, SEQ, SEQ),
    "empty": (0, SEQ),
}  # fmt: skip


def attention_cases() -> list[Case]:
    x = normal(*USUAL)
    found = odd_tensors(("query", "key", "value"), x, x, x)
    for name, shape in ALIKE.items():
        found[name] = given(*[normal(*shape)] * 3)
    for name, (query, key, *value) in DIFFERENT.items():
        named = {"enable_gqa": True} if "gqa" in name else {}
        shapes = (query, key, *(value or [key]))
        found[name] = given(*(normal(*shape) for shape in shapes), **named)
    for name, values in (
        ("scale", SCALES), ("dropout_p", PROBABILITIES), ("is_causal", FLAGS), ("enable_gqa", FLAGS)
    ):  # fmt: skip
        for value in values:
            found[f"{name}={value!r}"] = given(x, x, x, **{name: value})
    for text, shape in {"": USUAL, ", 2-D": (SEQ, 8), ", 3-D": (2, SEQ, 8)}.items():
        odd = {} if text else MASK
        calls = odd_masks("attn_mask", MASKS_OF_CALLS, *[normal(*shape)] * 3, odd=odd)
        found |= {name + text: call for name, call in calls.items()}
    calls = odd_masks("attn_mask", MASKS_OF_CALLS, x, x, x, odd={}, is_causal=True)
    found |= {f"{name}, causal": call for name, call in calls.items()}
    calls = odd_masks("attn_mask", MASKS_OF_CALLS, normal(1, HEADS, SEQ, 8), x, x, odd={})
    found |= {f"{name}, one query": call for name, call in calls.items()}
    found |= {
        "one argument": given(x),
        "unknown name": given(x, x, x, unknown=1),
        "by names": given(query=x, key=x, value=x),
        "scale by position": given(x, x, x, lambda: None, lambda: 0.0, lambda: False, lambda: 0.5),
    }
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
    sine = normal(*TABLE, grad=False)
    found = odd_tensors(("query", "key", "cos", "sin"), q, k, table, sine)
    for name, (query, key, cos, *sin) in ROTARY_SHAPES.items():
        tables = (normal(*shape, grad=False) for shape in (cos, *(sin or [cos])))
        found[name] = given(normal(*query), normal(*key), *tables)
    for dim in (0, 1, 2, 3, -1, -3, 9, None, "x", 1.0):
        found[f"unsqueeze_dim={dim!r}"] = given(q, k, table, sine, unsqueeze_dim=dim)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64):
        float = dtype.is_floating_point or dtype.is_complex
        inputs = [normal(*shape, dtype=dtype, grad=float) for shape in (Q, K)]
        tables = [normal(*TABLE, dtype=dtype, grad=False) for _ in range(2)]
        found[f"{dtype}"] = given(*inputs, *tables)
        found[f"table of {dtype}"] = given(q, k, *tables)
        found[f"inputs of {dtype}"] = given(*inputs, table, sine)
    found |= {
        "by names": given(q, k, cos=table, sin=sine),
        "unsqueeze_dim 2": given(
            normal(2, SEQ, 4, 8), normal(2, SEQ, 4, 8), table, sine, unsqueeze_dim=2
        ),
        "turned": given(*[lambda: turned(torch.randn(8, SEQ, 4, 2))] * 2, table, sine),
    }
    return [Case(name, make) for name, make in found.items()]
