"""Attention that a swapped model leaves to torch on newer GPUs; tensors only claim to be there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass import _dispatch_log
from onepass._policy import device_attention
from onepass.functional import _internal
from onepass.swapping import redirection
from tests.swap.reported import graph_of

TORCHS = "torch.nn.functional.scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(device_attention, "TORCHS_FROM", (9, 0))
    set_capability(monkeypatch, (9, 0))


def set_capability(monkeypatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(device_attention, "capability", lambda device: version)


def heads(head_dim=64, dtype=torch.bfloat16, device="cuda", value_dim=None) -> list[torch.Tensor]:
    with FakeTensorMode():
        q, k = (torch.empty(2, 4, 16, head_dim, dtype=dtype, device=device) for _ in range(2))
        return [q, k, torch.empty(2, 4, 16, value_dim or head_dim, dtype=dtype, device=device)]


@pytest.mark.parametrize(
    ("version", "options", "expected"),
    [
        ((9, 0), {}, True),
        ((10, 0), dict(dtype=torch.float16), True),
        ((12, 0), {}, True),
        ((8, 9), {}, False),
        ((9, 0), dict(dtype=torch.float32), False),
        ((9, 0), dict(device="cpu"), False),
        ((9, 0), dict(head_dim=512), False),
        ((9, 0), dict(head_dim=20), False),
        ((9, 0), dict(value_dim=32), False),
    ],
    ids=str,
)
def test_which_calls_are_torchs(monkeypatch, version, options, expected):
    set_capability(monkeypatch, version)
    assert device_attention.is_torchs(*heads(**options)) is expected


def test_autocast_and_the_switch(monkeypatch):
    for value, expected in (("always", False), ("whatever", True)):
        monkeypatch.setenv("ONEPASS_CUDA_ATTENTION", value)
        assert device_attention.is_torchs(*heads()) is expected
    # torch.autocast turns itself off where there is no GPU.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    assert device_attention.is_torchs(*heads(dtype=torch.float32))


@pytest.fixture
def called(monkeypatch) -> list[str]:
    """Whose attention was called: names in order."""
    found = []

    def stand_in(whose: str):
        def attention(query, *_, **__):
            found.append(whose)
            return [query]

        return attention

    monkeypatch.setattr(F, "scaled_dot_product_attention", stand_in("torch"))
    monkeypatch.setattr(onepass.functional, "scaled_dot_product_attention", stand_in("onepass"))
    monkeypatch.setattr(_internal, "attention", stand_in("onepass"))
    return found


def of_multihead(*tensors, **options):
    nothing = dict(bias=None, mask=None, dropout_p=0.0, is_causal=False)
    _internal.masked_attention(*tensors, **{**nothing, **options})


ONES = torch.ones(1, 1, 16, 16)
SWAPPED, MULTIHEAD = redirection.attend_visibly, of_multihead


@pytest.mark.parametrize(
    ("call", "options", "whose"),
    [
        (SWAPPED, {}, "torch"),
        (SWAPPED, dict(is_causal=True, scale=0.5, enable_gqa=True), "torch"),
        (SWAPPED, dict(softcap=0.0, sinks=None, deterministic=False), "torch"),
        (SWAPPED, dict(dropout_p=0.1), "onepass"),
        (SWAPPED, dict(attn_mask=ONES), "onepass"),
        (SWAPPED, dict(softcap=30.0), "onepass"),
        (SWAPPED, dict(sinks=torch.ones(4)), "onepass"),
        (SWAPPED, dict(deterministic=True), "onepass"),
        (MULTIHEAD, {}, "torch"),
        (MULTIHEAD, dict(is_causal=True), "torch"),
        (MULTIHEAD, dict(dropout_p=0.1), "onepass"),
        (MULTIHEAD, dict(bias=ONES), "onepass"),
        (MULTIHEAD, dict(mask=ONES.bool()), "onepass"),
    ],
)
def test_calls_of_swapped_modules(called, call, options, whose):
    call(*heads(), **options)
    call(*heads(device="cpu"), **options)
    assert called == [whose, "onepass"]


def test_the_log_says_why():
    with _dispatch_log.record() as calls:
        assert device_attention.is_torchs(*heads())
    (call,) = calls
    assert call["kernel"] == TORCHS and call["reason"] == (
        "dense 16-bit attention on this device (ONEPASS_CUDA_ATTENTION=always: ours)"
    )


def test_the_report_says_so(monkeypatch):
    def notes() -> list[str]:
        return onepass.swap(nn.Sequential(nn.MultiheadAttention(16, 2)), dry_run=True).notes

    assert device_attention.NOTE not in notes()  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device_attention.NOTE in notes()
    set_capability(monkeypatch, (8, 0))
    assert device_attention.NOTE not in notes()


def test_compiled_calls_are_torchs_too():
    tensors = heads()
    with tensors[0].fake_mode:
        code = graph_of(SWAPPED, *tensors)
    assert "scaled_dot_product_attention" in code and "onepass" not in code
