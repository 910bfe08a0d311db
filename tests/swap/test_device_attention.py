"""Attention that a swapped model leaves to torch on newer GPUs; tensors only claim to be there."""

from __future__ import annotations

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


@pytest.mark.parametrize("version", [(9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_newer_devices_run_torchs(monkeypatch, version, dtype):
    set_capability(monkeypatch, version)
    assert device_attention.is_torchs(*heads(dtype=dtype))


@pytest.mark.parametrize(
    ("version", "tensors"),
    [
        ((8, 9), heads()),
        ((9, 0), heads(dtype=torch.float32)),
        ((9, 0), heads(device="cpu")),
        ((9, 0), heads(head_dim=512)),
        ((9, 0), heads(head_dim=20)),
        ((9, 0), heads(head_dim=64, value_dim=32)),
    ],
    ids=["older", "float32", "cpu", "head_dim 512", "head_dim 20", "value_dim"],
)
def test_what_runs_onepass(monkeypatch, version, tensors):
    set_capability(monkeypatch, version)
    assert not device_attention.is_torchs(*tensors)


def test_autocast_decides_the_dtype(monkeypatch):
    tensors = heads(dtype=torch.float32)
    # torch.autocast turns itself off where there is no GPU.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    assert device_attention.is_torchs(*tensors)


def test_the_switch(monkeypatch):
    monkeypatch.setenv("ONEPASS_CUDA_ATTENTION", "always")
    assert not device_attention.is_torchs(*heads())
    monkeypatch.setenv("ONEPASS_CUDA_ATTENTION", "whatever")
    assert device_attention.is_torchs(*heads())


@pytest.fixture
def called(monkeypatch) -> list[str]:
    """Whose attention was called: names in order."""
    found = []

    def stand_in(whose: str):
        def attention(query, *_, **__):
            found.append(whose)
            return query

        return attention

    monkeypatch.setattr(F, "scaled_dot_product_attention", stand_in("torch"))
    monkeypatch.setattr(onepass.functional, "scaled_dot_product_attention", stand_in("onepass"))
    monkeypatch.setattr(
        _internal, "attention", lambda *arguments: [stand_in("onepass")(arguments[0])]
    )
    return found


@pytest.mark.parametrize(
    ("options", "whose"),
    [
        ({}, "torch"),
        (dict(is_causal=True, scale=0.5, enable_gqa=True), "torch"),
        (dict(softcap=0.0, sinks=None, deterministic=False), "torch"),
        (dict(dropout_p=0.1), "onepass"),
        (dict(attn_mask=torch.ones(16, 16)), "onepass"),
        (dict(softcap=30.0), "onepass"),
        (dict(sinks=torch.ones(4)), "onepass"),
        (dict(deterministic=True), "onepass"),
    ],
    ids=str,
)
def test_calls_of_swapped_and_attached_modules(called, options, whose):
    redirection.attend_visibly(*heads(), **options)
    assert called == [whose]
    redirection.attend_visibly(*heads(device="cpu"), **options)
    assert called == [whose, "onepass"]


@pytest.mark.parametrize(
    ("options", "whose"),
    [
        ({}, "torch"),
        (dict(is_causal=True), "torch"),
        (dict(dropout_p=0.1), "onepass"),
        (dict(bias=torch.ones(1, 1, 1, 16)), "onepass"),
        (dict(mask=torch.ones(1, 1, 16, 16, dtype=torch.bool)), "onepass"),
    ],
    ids=str,
)
def test_calls_of_multihead_attention(called, options, whose):
    defaults = dict(bias=None, mask=None, dropout_p=0.0, is_causal=False)
    _internal.masked_attention(*heads(), **{**defaults, **options})
    assert called == [whose]


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
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.code))
        return graph

    torch._dynamo.reset()
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
        torch.compile(redirection.attend_visibly, backend=backend, fullgraph=True)(q, k, v)
    (code,) = graphs
    assert "scaled_dot_product_attention" in code and "onepass" not in code
