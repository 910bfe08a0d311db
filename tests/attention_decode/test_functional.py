"""attention_with_kv_cache: its additions to the ops, and its own errors."""

import inspect
import re
from dataclasses import replace

import pytest
import torch

from onepass import functional
from tests.attention_decode.cases import (
    DTYPES,
    Case,
    assert_bits,
    assert_caches,
    call,
    same_bits,
    with_copied_caches,
)
from tests.support.dtypes import BF16, F16, F32

attend = functional.attention_with_kv_cache

# ---- arguments ----------------------------------------------------------------------------------


def through(case: Case, t: dict, **changes):
    """The public function with the arguments of a raw `call`."""
    options = dict(
        cache_seqlens=t["cache_seqlens"], scale=case.scale, softcap=case.softcap, return_lse=True,
        window_size=(case.window_left, case.window_right),
    )  # fmt: skip
    own = ("query", "k_cache", "v_cache", "key", "value")
    options |= {name: tensor for name, tensor in t.items() if name not in own}
    if case.rotary:
        options["rotary_interleaved"] = case.rotary == "interleaved"
    return attend(*(t.get(name) for name in own), **options | changes)


CASES = {
    "read": Case(F32, 32, seq_q=2),
    "append": Case(BF16, 32, 16, seq_q=2, new_rows=3, window_right=0),
    "paged": Case(F32, 32, page_size=7, new_rows=1, pads=(0, 3), alibi="b", softcap=3.0),
    "scattered": Case(F32, 32, scattered=True, new_rows=1, window_left=30, sinks=F32),
    "interleaved": Case(F32, 32, new_rows=2, rotary="interleaved", rotary_dim=8),
    "halves": Case(F16, 32, new_rows=2, rotary="halves", window_right=0, seq_q=2),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_op(name):
    case = CASES[name]
    t = case.tensors()
    expected_caches, found_caches = with_copied_caches(t), with_copied_caches(t)
    expected, found = call(case, expected_caches), through(case, found_caches)
    assert_bits(found, expected)
    assert_caches(found_caches, expected_caches)
    # Splits are ignored.
    output = through(case, with_copied_caches(t), return_lse=False, num_splits=3)
    assert isinstance(output, torch.Tensor) and same_bits(output, expected[0])


def test_the_signature():
    parameters = inspect.signature(attend).parameters
    names = list(parameters)
    assert names[:5] == ["query", "k_cache", "v_cache", "key", "value"]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in names[5:])
    assert {name: parameters[name].default for name in names[3:]} == dict(
        key=None, value=None, cache_seqlens=None, block_table=None, cache_batch_idx=None,
        cache_leftpad=None, rotary_cos=None, rotary_sin=None, rotary_interleaved=True, scale=None,
        is_causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None,
        k_scale=None, v_scale=None, num_splits=None, return_lse=False,
    )  # fmt: skip


@pytest.mark.parametrize("left", [-1, 3])
def test_is_causal_is_nothing_on_the_right_of_a_window(left):
    case = Case(F32, 32, seq_q=5, lengths=(9, 70))
    t = case.tensors()
    expected = call(replace(case, window_left=left, window_right=0), t)
    for right in (-1, 0, 7):
        assert_bits(through(case, t, is_causal=True, window_size=(left, right)), expected)


def test_is_causal_decides_where_queries_are_rotated():
    """Each at its own row, as with a window; else all at the first new row."""
    case = Case(F32, 32, seq_q=3, new_rows=3, rotary="halves", window_right=0)
    t = case.tensors()
    causal = through(case, with_copied_caches(t), is_causal=True, window_size=(-1, -1))
    assert same_bits(causal[0], call(case, with_copied_caches(t))[0])
    free = replace(case, window_right=-1)
    found = through(free, with_copied_caches(t))
    assert same_bits(found[0], call(free, with_copied_caches(t))[0])
    wide = replace(case, window_right=1000)  # sees what `free` sees, but is a window
    assert not same_bits(through(wide, with_copied_caches(t))[0], found[0])


@pytest.mark.parametrize("new_rows", [-1, 2])
def test_one_length_for_all(new_rows):
    """And the default scale, of the head dim."""
    case = Case(F32, 32, seq_q=2, lengths=(70, 70, 70), new_rows=new_rows, factor=1.0)
    t = case.tensors()
    expected = through(case, with_copied_caches(t))
    found = through(case, with_copied_caches(t), cache_seqlens=70, scale=None)
    assert_bits(found, expected)
    for wrong in (-1, 74):
        with pytest.raises(RuntimeError, match="cache_seqlens must"):
            through(case, t, cache_seqlens=wrong)


def test_output_follows_the_layout_of_the_query():
    """A transposed (batch, seq, heads, dim) gives back one that transposes without a copy."""
    caches = [torch.randn(2, 3, 10, 8) for _ in range(2)]
    bshd = torch.randn(2, 5, 3, 8).transpose(1, 2)
    found = attend(bshd, *caches, cache_seqlens=4)
    assert found.transpose(1, 2).is_contiguous()
    expected = attend(bshd.contiguous(), *caches, cache_seqlens=4)
    assert expected.is_contiguous() and same_bits(found, expected)
    meta = attend(*(t.to("meta") for t in (bshd, *caches)), cache_seqlens=4)
    assert (meta.shape, meta.stride()) == (found.shape, found.stride())
    one = torch.randn(2, 1, 3, 8).transpose(1, 2)  # its strides mean nothing
    assert attend(one, *caches, cache_seqlens=4).is_contiguous()


# ---- autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_casts_to_the_caches_dtype(dtype, cache_dtype):
    """A cache keeps its dtype, so a step in float32 and one under autocast write the same."""
    case = Case(cache_dtype, 32, new_rows=2, seq_q=2, window_right=0, rotary="halves",
                rotary_dtype=F32)  # fmt: skip
    t = case.tensors()
    expected_caches = with_copied_caches(t)
    other = {name: torch.randn_like(t[name], dtype=F32).to(dtype) for name in
             ("query", "key", "value")}  # fmt: skip
    cast = {name: x.to(cache_dtype) for name, x in other.items()}
    expected = call(case, expected_caches | cast)
    for autocast_dtype in (BF16, F16):
        caches = with_copied_caches(t)
        with torch.autocast("cpu", dtype=autocast_dtype):
            found = through(case, caches | other)
        assert found[0].dtype is cache_dtype
        assert_bits(found, expected)
        assert_caches(caches, expected_caches)
    if dtype is not cache_dtype:
        with pytest.raises(RuntimeError, match="k_cache must have dtype .* like query"):
            through(case, with_copied_caches(t) | other)


# ---- errors -------------------------------------------------------------------------------------

Q, C, NEW = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 1, 8)
COS = torch.ones(10, 4)
WRONG = [
    (dict(key=NEW), ValueError, "key must be given together with value, got key alone"),
    (dict(value=NEW), ValueError, "value must be given together with key, got value alone"),
    (dict(rotary_cos=COS, rotary_sin=COS), ValueError,
     "rotary_cos must not be given without key, got one"),
    (dict(rotary_sin=COS), ValueError, "rotary_sin must not be given without key, got one"),
    (dict(cache_seqlens=3.7), TypeError,
     "cache_seqlens must be a tensor or a whole number, got 3.7"),
    (dict(window_size=(1,)), ValueError, "window_size must be (left, right), got (1,)"),
]  # fmt: skip


def test_messages():
    before = C.clone()
    for changes, error, message in WRONG:
        with pytest.raises(error, match=f"^attention_with_kv_cache: {re.escape(message)}$"):
            attend(Q, C, C, **{"cache_seqlens": 3, **changes})
    assert torch.equal(C, before)


GRADIENTS = ["query", "key", "value", "k_cache", "v_cache", "alibi_slopes", "sinks"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_no_gradient_is_recorded(name):
    """It would be missing, silently: decoding is inference."""
    t = dict(query=Q, k_cache=C.clone(), v_cache=C.clone(), key=NEW, value=NEW,
             alibi_slopes=torch.ones(4), sinks=torch.ones(4))  # fmt: skip
    t[name] = t[name].clone().requires_grad_()
    before = {n: x.detach().clone() for n, x in t.items()}
    message = f"{name} must not require gradients, use torch.no_grad(), got one that does"
    with pytest.raises(RuntimeError, match=f"^attention_with_kv_cache: {re.escape(message)}$"):
        attend(**t, cache_seqlens=3)
    for n, x in t.items():
        assert torch.equal(x, before[n]), n
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            output = attend(**t, cache_seqlens=3)
            assert not output.requires_grad
