"""scaled_dot_product_attention agrees with torch's function, and has a few more arguments."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass import functional, numerics
from tests.attention.cases import DTYPES, GRADIENTS, Case, assert_same, ours
from tests.support.dtypes import BF16, F16, F32, F64

attend = functional.scaled_dot_product_attention


def random(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


# ---- torch's arguments --------------------------------------------------------------------------


def test_torchs_arguments_come_first():
    mine = inspect.signature(attend).parameters
    assert [str(p).split(":")[0] for p in mine.values()][:3] == ["query", "key", "value"]
    torchs = dict(attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)
    assert list(mine)[3:8] == list(torchs)
    assert {name: mine[name].default for name in torchs} == torchs
    assert all(p.kind is p.KEYWORD_ONLY for p in list(mine.values())[8:])


SHAPES = {
    "two dimensions": ((5, 4), (6, 4), (6, 3)),
    "three": ((2, 5, 4), (2, 6, 4), (2, 6, 4)),
    "five": ((2, 3, 2, 5, 4), (2, 3, 2, 6, 4), (2, 3, 2, 6, 7)),
    "six": ((2, 1, 3, 2, 5, 4), (2, 1, 3, 2, 6, 4), (2, 1, 3, 2, 6, 4)),
    "broadcast of batch": ((2, 3, 5, 4), (1, 3, 6, 4), (2, 3, 6, 4)),
    "broadcast of heads": ((2, 3, 5, 4), (2, 1, 6, 4), (2, 1, 6, 4)),
    "broadcast of the query": ((1, 1, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4)),
    "broadcast of all": ((2, 3, 5, 4), (3, 6, 4), (6, 4)),
    "value of other heads": ((2, 3, 5, 4), (2, 3, 6, 4), (2, 1, 6, 4)),
}


GROUPS = {
    "groups": ((2, 4, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4)),
    "one head": ((2, 4, 5, 4), (2, 1, 6, 4), (2, 1, 6, 4)),
    "key and value differ": ((2, 4, 5, 4), (2, 2, 6, 4), (2, 4, 6, 4)),
    "groups in three dimensions": ((4, 5, 4), (2, 6, 4), (2, 6, 4)),
    "groups in five": ((3, 2, 4, 5, 4), (3, 2, 2, 6, 4), (3, 2, 2, 6, 4)),
}


@pytest.mark.parametrize("name", SHAPES | GROUPS)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(name, causal):
    leaves = [random(*shape).requires_grad_() for shape in (SHAPES | GROUPS)[name]]
    options = {"is_causal": causal, "enable_gqa": name in GROUPS}
    found, lse = attend(*leaves, **options, return_lse=True)
    expected = F.scaled_dot_product_attention(*leaves, **options)
    assert lse.shape == expected.shape[:-1]
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(-1)) for y in
                 (found, expected))  # fmt: skip
    torch.testing.assert_close(*gradients)


# As torch takes them, for query (2, 3, 5, 4) and 6 keys.
MASKS = [(5, 6), (1, 6), (5, 1), (1, 1), (3, 5, 6), (1, 5, 6), (3, 1, 1), (2, 1, 1, 6)]
MASKS += [(1, 3, 5, 6), (2, 3, 5, 6), (2, 3, 1, 1), (2, 1, 5, 6), (1, 1, 1, 1)]


@pytest.mark.parametrize("size", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "trained"])
def test_masks(size, kind):
    tensors = [random(*shape) for shape in ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4))]
    mask = random(*size)
    if kind == "bool":
        mask = mask > -0.5
    for causal in (False, True):
        mine, theirs = (mask.clone().requires_grad_(kind == "trained") for _ in range(2))
        both = theirs
        if causal:  # torch takes both at once, and its backends differ in the result
            allowed = torch.ones(5, 6, dtype=torch.bool).tril()
            both = allowed & theirs if kind == "bool" else theirs.masked_fill(~allowed, -math.inf)
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(*tensors, both)
        found = attend(*tensors, mine, is_causal=causal)
        torch.testing.assert_close(found, expected)
        if kind == "trained":
            upstream = torch.randn_like(expected)
            found, expected = (
                torch.autograd.grad(o, m, upstream) for o, m in ((found, mine), (expected, theirs))
            )
            torch.testing.assert_close(found, expected)


def test_an_alignment_that_there_is_not():
    x, op = random(2, 4, 5, 4), "scaled_dot_product_attention"
    with pytest.raises(ValueError, match=f"^{op}: causal_alignment must .*, got 'left'"):
        attend(x, x, x, causal_alignment="left")


# ---- the function and the op --------------------------------------------------------------------

OPTIONS = [
    {},
    dict(window_right=0),
    dict(window_right=0, bottom_right=True),
    dict(window_left=20, window_right=0, bottom_right=True, kv_heads=2),
    dict(window_left=9, window_right=30, bias="hq"),
    dict(mask="b", softcap=2.0),
    dict(bias="bhq", alibi="b", sinks=F32, kv_heads=1),
    dict(bias="", alibi="", softcap=3.0, value_dim=24, window_right=0),
    dict(dtype=BF16, sinks=F32, bias="q", bias_dtype=F32),
    dict(dtype=F16, alibi="", window_right=0),
    dict(alibi="", window_right=0, query_offset=17, key_offset=6),
    dict(window_right=0, bottom_right=True, query_offset=17, key_offset=6),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_function_is_the_op(options):
    case = Case(**dict(heads=4, head_dim=40, seq_q=50, seq_k=70, dlse=True) | options)
    t = case.tensors()
    expected = ours(case, t)
    inputs = {n: t[n].detach().requires_grad_() for n in GRADIENTS if n in t}
    every = t | inputs
    left, right = case.window_left, case.window_right
    keywords = dict(
        attn_mask=every.get("bias", every.get("mask")), scale=case.scale, softcap=case.softcap,
        enable_gqa=case.kv_heads > 0, alibi_slopes=every.get("alibi_slopes"), return_lse=True,
        sinks=every.get("sinks"), window_size=(left, right),
        causal_alignment="bottom_right" if case.bottom_right else "top_left",
        query_offset=case.query_offset, key_offset=case.key_offset,
    )  # fmt: skip
    output, lse = attend(*list(every.values())[:3], **keywords)
    gradients = torch.autograd.grad((output, lse), inputs.values(), (t["doutput"], t["dlse"]))
    found = dict(output=output, lse=lse)
    found |= {f"d{n}": g for n, g in zip(inputs, gradients, strict=True)}
    assert_same(found, expected)
    if right == 0:
        keywords |= dict(is_causal=True, window_size=(left, -1))
        assert torch.equal(attend(*list(t.values())[:3], **keywords)[0], expected["output"])
    only = attend(*list(t.values())[:3], **keywords | dict(return_lse=False, deterministic=True))
    assert torch.equal(only, expected["output"])


# ---- autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast_dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_as_torch_does_it(dtype, autocast_dtype):
    """Dtypes of gradients are in all_families/test_autocast.py."""
    tensors = [random(2, 3, 9, 8, dtype=dtype) for _ in range(3)]
    mask = random(9, 9, dtype=F64 if dtype is F64 else F32)
    # torch also rounds the mask to autocast's dtype; ours and the reference do not.
    cast = [t if dtype is F64 else t.to(autocast_dtype) for t in tensors]
    ref = F.scaled_dot_product_attention(*(t.double() for t in cast), mask.double())
    base = F.scaled_dot_product_attention(*cast, mask)
    with torch.autocast("cpu", dtype=autocast_dtype):
        found, expected = attend(*tensors, mask), F.scaled_dot_product_attention(*tensors, mask)
        mixed = attend(tensors[0].bfloat16(), tensors[1].float(), tensors[2].half())
    assert found.dtype == expected.dtype and mixed.dtype == autocast_dtype
    numerics.assert_close(found, ref, base)
    assert torch.equal(found, attend(*cast, mask))
