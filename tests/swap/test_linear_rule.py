"""Where swap takes linear layers, by dtype, CPU and torch's own path, and how it is reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass import _dispatch_log, numerics
from onepass._policy import products, small_calls
from onepass.swapping.reasons import Reason
from tests.swap.foreign_linear import Plain
from tests.swap.linear_calls import FAST, SLOW, set_facts, swap
from tests.swap.reported import names

pytestmark = pytest.mark.usefixtures("slow_products")


@pytest.mark.parametrize(
    ("dtype", "facts", "text"),
    [
        (torch.float32, SLOW, None),
        (torch.float32, SLOW._replace(mkl=False), "float32 products, by BLAS on AuthenticAMD"),
        (torch.float32, FAST, "float32 products, by MKL on GenuineIntel"),
        (torch.bfloat16, FAST._replace(bfloat16=False), None),
        (torch.bfloat16, FAST, "bfloat16 products, by oneDNN"),
        (torch.bfloat16, SLOW._replace(bfloat16=True), None),  # small calls gain on AMD
        (torch.float16, SLOW._replace(float16=True), "float16 products, by oneDNN"),
        (torch.float16, FAST._replace(float16=False), None),
        (torch.float16, FAST, "float16 products, by oneDNN"),
        (torch.float64, SLOW, "float64 products"),
    ],
    ids=str,
)
def test_the_rule(dtype, facts, text, monkeypatch):
    set_facts(monkeypatch, facts)
    model = nn.Sequential(nn.Linear(16, 16, dtype=dtype), Plain().to(dtype))
    report = swap(model, strict=True)
    if text is None:
        # In a redirected forward each torch function takes longer than small products gain.
        in_layers_alone = dtype is torch.bfloat16 and facts.bfloat16
        assert names(report.swapped) == ({"0"} if in_layers_alone else {"0", "1"})
    else:
        assert names(report.skipped) == {"0", "1"} and not report.swapped
        for entry in report.skipped:
            assert entry["reason"] == f"torch is as fast here in {text}"
            assert entry["reason"].kind is Reason.AS_FAST


def test_facts_of_this_machine(monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    facts_of = products.facts.__wrapped__
    facts, cpuinfo = facts_of(), Path("/proc/cpuinfo").read_text()
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    has_instructions = re.search(r"\b(avx512_bf16|amx_bf16)\b", cpuinfo) is not None
    if facts.vendor:
        assert facts.bfloat16 == (supported and has_instructions) and facts.vendor in cpuinfo
    for told in ("AVX2", "avx512_core", "AVX512_CORE_VNNI"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", told)
        held = facts_of()
        assert not held.bfloat16 and not held.float16
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert facts_of() == facts._replace(float16=False)


AVX512 = "vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 avx512f avx512bw avx512_vnni{}\n"


@pytest.mark.parametrize(
    "more, bfloat16", [("", False), (" avx512_bf16", True), (" amx_bf16", True)]
)
def test_oneDNN_imitates_bfloat16_where_avx512_has_none(more, bfloat16, monkeypatch):
    """torch reports support there; it takes as long as float32 or longer."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(products.Path, "read_text", lambda *_, **__: AVX512.format(more))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    found = products.facts.__wrapped__()
    assert found.bfloat16 is bfloat16 and found.vendor == "GenuineIntel"


def test_oneDNN_can_be_switched_off(monkeypatch):
    set_facts(monkeypatch, FAST)
    assert products.as_fast(torch.bfloat16) is not None
    with torch.backends.mkldnn.flags(enabled=False):
        assert products.as_fast(torch.bfloat16) is None


def test_explain_says_whose_products_run_on_cuda():
    with FakeTensorMode(), _dispatch_log.record() as calls:
        x, weight = (torch.empty(8, 8, device="cuda") for _ in range(2))
        assert not products.gains(x, weight)
    assert [call["reason"] for call in calls] == ["torch's products on CUDA"]


def test_a_compiled_graph_of_a_single_row_has_torchs_product(monkeypatch):
    """In the same cases as eager: in float32 training."""
    set_facts(monkeypatch, SLOW)
    monkeypatch.setattr(small_calls, "LEAST_LINEAR", {torch.float32: (0, 0)})
    module, graphs = nn.Linear(64, 64), []
    swap(module)

    def keep(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    compiled = torch.compile(module, fullgraph=True, backend=keep)
    for rows, training in ((1, True), (1, False), (40, True), (41, True)):
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(torch.ones(rows, 64)), module(torch.ones(rows, 64)))
    assert ["onepass.linear_forward" in graph for graph in graphs] == [False, True, True]


def test_an_export_keeps_dynamic_rows(monkeypatch):
    """The question whether a graph is for a single row makes no size a constant."""
    amd = products.Facts("AuthenticAMD", mkl=True, bfloat16=True, float16=True)
    monkeypatch.setattr(products, "facts", lambda: amd)
    monkeypatch.setattr(small_calls, "LEAST_LINEAR", {torch.float32: (1 << 22, 1 << 22)})
    layer = torch.nn.Linear(64, 64)
    assert onepass.swap(layer, kinds="linear").swapped
    sizes = torch.export.Dim("batch"), torch.export.Dim("rows")
    with torch.no_grad():
        program = torch.export.export(
            layer, (torch.randn(2, 48, 64),), dynamic_shapes={"input": dict(enumerate(sizes))}
        )
    x = torch.randn(3, 5, 64)
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    # Small calls are torch's in the module alone, and its sums have another order.
    numerics.assert_close(program.module()(x), exact, layer(x))
