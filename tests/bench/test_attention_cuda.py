"""`onepass bench attention decode --device cuda`, as far as it goes without a device."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onepass import _library, functional
from onepass.reference.attention import attention as reference
from onepass.tools import ceilings, harness
from onepass.tools.bench import attention_cuda, attention_parts, report
from onepass.tools.bench import case as cases
from onepass.tools.bench.families import attention, decode
from onepass.tools.bench.goals import Goal
from onepass.tools.ceilings import CudaCeilings
from tests.bench.test_cuda import on_cpu
from tests.compare.cases import refusal, run_here

LIMITS = CudaCeilings(1 << 30, 3000.0, 3100.0, 700e3, 50e3)
COMPUTED = {"forward": 2, "backward": 5}  # products of matrices


def all_cases(quick: bool = False) -> dict[str, cases.Case]:
    modules = (attention, decode)
    return {case.name: case for module in modules for case in module.cases(quick, "cuda")}


# ---- the standard shapes -------------------------------------------------------------------------


def standard():
    for dtype in ("bfloat16", "float16"):
        for head_dim, heads in ((64, 32), (128, 16), (256, 8)):
            for seq, batch in ((512, 32), (1024, 16), (2048, 8), (4096, 4), (8192, 2), (16384, 1)):
                for kind in ("causal", "full"):
                    for phase in COMPUTED:
                        sizes = f"{batch}x{heads}x{seq}x{head_dim}"
                        yield kind, dtype, (batch, heads, seq, head_dim), phase, sizes


def test_the_standard_shapes_are_there():
    found = all_cases()
    for kind, dtype, (batch, heads, seq, head_dim), phase, sizes in standard():
        case = found[f"attention/{kind}/{dtype}/{sizes}/{phase}"]
        assert case.device == "cuda" and case.cold and case.unit == "bfloat16"
        assert case.backward == case.backward_alone == (phase == "backward")
        seen = batch * (seq * (seq + 1) // 2 if kind == "causal" else seq * seq)
        assert case.flops == 2 * COMPUTED[phase] * seen * heads * head_dim
        assert {"flash", "efficient", "cudnn"} <= case.operator.optional.keys()
        with_flex = seq == attention_cuda.FLEX_SEQ and dtype == "bfloat16"
        assert ("flex" in case.operator.optional) == with_flex
        assert case.operator.compiled == {"flex"}


def test_what_matters_most_comes_first():
    """A limit of time leaves out the last."""
    names = [name for name in all_cases() if "/1x2x4x8/" not in name]
    assert names[0] == "attention/causal/bfloat16/4x16x4096x128/forward"
    of_head_dim = [name for name in names[:24] if name.split("/")[3].endswith("x128")]
    assert len(of_head_dim) == 24 and all("/bfloat16/" in name for name in of_head_dim)
    halves = [number for number, name in enumerate(names) if "/float16/" in name]
    brains = [number for number, name in enumerate(names) if name.startswith("attention/causal/b")]
    assert max(brains) < min(halves)


@pytest.mark.parametrize("quick", [False, True])
def test_all_is_on_the_device(quick):
    for case in all_cases(quick).values():
        assert case.device == "cuda" and not case.fresh and not case.compiles
        assert case.cold <= (not quick)


def test_long_cases_are_checked_on_less(monkeypatch):
    """The reference keeps the square, in float64."""
    on_cpu(next(iter(all_cases().values())), monkeypatch)
    for name, case in all_cases().items():
        if not name.startswith("attention/") or case.flops is None:
            continue
        shape = [int(size) for size in name.split("/")[3].split("x")]
        if case.make_checked is None:
            assert shape[0] * shape[1] * shape[2] ** 2 <= attention_parts.CHECKED_SCORES
            continue
        query, key, *_ = tensors = case.make_checked()
        assert query.shape[-1] == shape[3] and str(query.dtype)[6:] == name.split("/")[2]
        lengths, heads = [query.shape[-2]] * len(query), query.shape[1]
        if query.dim() == 3:  # packed
            ends, longest = attention_cuda._ends(len(query), query.device)
            lengths = ends.diff().tolist()
            assert max(lengths) == longest and ends[-1] == len(query)
        assert heads * sum(n * n for n in lengths) <= 3 * attention_parts.CHECKED_SCORES
        assert all(tensor.requires_grad == case.backward for tensor in tensors)


# ---- decoding ------------------------------------------------------------------------------------


def test_decoding_counts_the_bytes_of_keys_and_values():
    found = all_cases()
    case = found["decode/grouped/bfloat16/1x32on8x1x32768x128"]
    assert case.moved == 2 * 32768 * 8 * 128 * 2
    assert case.graphs and case.cold and case.reads is None
    ragged = found["decode/ragged/bfloat16/32x32on8x1x8192x128"]
    shares = attention_parts.FILL
    lengths = [int(8192 * shares[b % len(shares)]) for b in range(32)]
    assert ragged.moved == 2 * sum(lengths) * 8 * 128 * 2
    assert all(case.reads for case in decode.cases() if "/1x2x1x16x8" not in case.name)


def test_replays_are_of_every_set_in_turn(monkeypatch):
    """A call is captured once for each set of inputs, after a call that is not captured."""
    done, captures = [], []

    class Graph:
        def replay(self):
            done.append(self.captured)

    @contextlib.contextmanager
    def capture(graph):
        captures.append(graph)
        yield
        graph.captured = done.pop()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = dict(
        Stream=lambda: stream, current_stream=lambda: stream,
        stream=lambda of: contextlib.nullcontext(), CUDAGraph=Graph, graph=capture,
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    case = replace(all_cases(quick=True)["decode/grouped/bfloat16/2x4on2x1x96x16"], cold=True)
    sets = [([torch.tensor(number)], None) for number in range(3)]
    call = cases._call(case, lambda tensor: done.append(int(tensor)), cases._Ring(sets))
    assert done == [0, 1, 2] and len(captures) == 3  # the calls ahead of the captures
    done.clear()
    for _ in range(4):
        call()
    assert done == [0, 1, 2, 0]


# ---- what runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [attention, decode], ids=["attention", "decode"])
def test_quick_cases_run(module, monkeypatch):
    """On the CPU, which has some of the variants; torch has no packed attention there."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", functional.varlen_attention)
    for case in module.cases(True, "cuda"):
        case = on_cpu(case, monkeypatch)
        row = cases.measure(case, seconds=0, compiled=False, places=1, rounds=1, limits=LIMITS)
        assert not row.check, f"{case.name}: {row.check}"
        assert (row.share is None) == (case.flops is None and case.moved is None)
        optional = case.operator.optional
        assert {"cudnn", "efficient"} & optional.keys() == row.unavailable.keys()
        assert ("flash" in row.against_others) == ("flash" in optional)
        assert json.loads(json.dumps(row.to_dict()))["unavailable"] == row.unavailable


def test_a_variant_that_raises_is_left_out_and_named(monkeypatch, capsys):
    case = next(case for name, case in all_cases(True).items() if name.endswith("32/forward"))
    calls = []

    def broken(*tensors):
        raise RuntimeError("not on this device\nand more")

    def slow(*tensors):
        calls.append(len(calls))
        return case.operator.stock(*tensors)

    operator = replace(case.operator, optional={"flash": broken, "flex": slow})
    case = replace(on_cpu(case, monkeypatch), operator=operator)
    for compiled in (False, True):
        row = cases.measure(case, seconds=0, compiled=compiled, places=1, rounds=1, limits=LIMITS)
        assert row.unavailable == {"flash": "not on this device"}
        assert list(row.against_others) == ["flex"] * compiled and bool(calls) == compiled
    report.print_tables([replace(row, case=replace(case, device="cuda"))])
    printed = capsys.readouterr().out
    assert "flash left out of attention/causal/bfloat16/1x2x64x32/forward: not on" in printed


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_computes_the_same(causal):
    q, k, v = (torch.randn(1, 2, 256, 64) for _ in range(3))
    with torch.no_grad():
        (found,) = attention_cuda.flex_of(causal)(q, k, v)
    expected, _ = reference(q, k, v, window_right=0 if causal else -1)
    torch.testing.assert_close(found, expected)


# ---- ceilings and tables -------------------------------------------------------------------------


def test_ceilings_of_products_of_matrices():
    before = torch.get_float32_matmul_precision()
    limits = ceilings.cuda_ceilings(1 << 16, 64, "cpu")
    assert torch.get_float32_matmul_precision() == before
    assert limits.matmul_16_gflops > 0 and limits.matmul_32_gflops > 0
    assert limits.arithmetic_gflops("bfloat16") == limits.matmul_16_gflops
    assert limits.arithmetic_gflops("float32") == limits.matmul_32_gflops
    assert "TFLOP/s in bfloat16" in str(limits) and "matmul" not in str(CudaCeilings(1, 2.0, 3.0))
    assert limits.to_dict()["matmul_16_gflops"] == limits.matmul_16_gflops


def test_tables_show_teraflops_beside_gigabytes(capsys):
    rows = []
    for name, more in (
        ("attention/full/bfloat16/4x16x4096x128/forward", {}),
        ("decode/grouped/bfloat16/1x32on8x1x32768x128", {"update": [1e-3] * 3}),
    ):
        times = {"ours": [1e-3] * 3, "eager": [2e-3] * 3, "flash": [1.5e-3] * 3} | more
        timing = harness.Timing(times, dict.fromkeys(times, 1), dict.fromkeys(times, 0.0))
        case = all_cases()[name]
        limit, goal = LIMITS.arithmetic_gflops(case.unit), Goal(share=0.8)
        rows.append(cases.Row(case, timing, "", 0.5, "", case.moved or 0, limit, goal=goal))
    report.print_tables(rows)
    printed = capsys.readouterr().out
    for figure in ("TFLOP/s", "549.8", "79%", "1.50 flash", " 134 ", "80%-"):  # 79 % of 700
        assert figure in printed, figure
    assert "cudnn" not in printed


# ---- the command ---------------------------------------------------------------------------------


def test_families_on_the_command_line(monkeypatch):
    seen, result = [], {"failed": {}}
    monkeypatch.setattr(_library, "no_cuda", lambda: "")
    monkeypatch.setattr(
        "onepass.tools.bench._run", lambda of, *rest: (seen.extend(of) or result, [], None, False)
    )
    for name in ("print_doubts", "print_footer"):
        monkeypatch.setattr(f"onepass.tools.bench.report.{name}", lambda *_: None)
    run_here("bench", "attention", "decode", "--device", "cuda")
    assert {case.name.partition("/")[0] for case in seen} == {"attention", "decode"}
    told = refusal("bench", "attention", "norms")
    assert told.startswith(
        "bench: FAMILY must be one of attention, causal_conv, decode, delta_rule"
    )
