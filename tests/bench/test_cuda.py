"""`onepass bench --device cuda`, as far as it goes without a device."""

import gc
import os
import weakref
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import onepass
from onepass.tools import harness, machine
from onepass.tools.bench import case as cases
from onepass.tools.bench import report
from onepass.tools.bench.families import dropout, gate, group_norm, loss, norm, optimizer
from onepass.tools.bench.goals import Goal
from onepass.tools.ceilings import CudaCeilings
from tests.bench.machines import program
from tests.compare.cases import refusal


def test_the_cuda_clock_reads_events_around_the_calls(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def synchronize(self):
            done.append("synchronize")

        def elapsed_time(self, end):
            assert self is not end
            return 6.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = harness.clock_of("cuda")
    assert clock.seconds(lambda: done.append("call"), 3) == pytest.approx(6e-3)
    # The first call is not timed: it keeps the device busy until the others arrive.
    assert done == ["call", "event", "call", "call", "call", "event", "synchronize"]
    assert clock.page_faults() == 0
    assert isinstance(harness.clock_of("cpu"), harness.HostClock)


def test_facts_of_a_device(monkeypatch, tmp_path):
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132,
        L2_cache_size=50 << 20, total_memory=80 << 30,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    query = tmp_path / "nvidia-smi"
    program(query, "printf '580.159.04\\n580.159.04\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    expected = {
        "gpu": "NVIDIA H100 80GB HBM3", "gpu_capability": "9.0", "gpu_multiprocessors": 132,
        "gpu_l2": "50 MiB", "gpu_memory": "80 GiB", "cuda": "13.0", "driver": "580.159.04",
    }  # fmt: skip
    assert machine.machine_facts().items() >= expected.items()
    program(query, "exit 9")
    assert machine.machine_facts()["driver"] == "unknown"


def cuda_cases(quick: bool = False) -> list[cases.Case]:
    modules = (norm, dropout, gate, group_norm, loss)
    return [case for module in modules for case in module.cases(quick, "cuda")]


def test_cuda_cases():
    found = {case.name: case for case in cuda_cases()}
    phases = ("forward", "backward", "forward+backward")
    for cols, operator, phase in product((1024, 2048, 4096, 8192, 16384), norm.OPERATORS, phases):
        name = f"norm/{operator}/{{}}/{2**26 // cols}x{cols}/{phase}".format
        case = found[name("bfloat16")]
        assert case.cold and case.make_checked is not None
        assert case.backward == (phase != "forward")
        assert case.backward_alone == (phase == "backward")
        assert (name("float32") in found) == (operator in norm.CUDA_FLOAT32)
    for case in [*found.values(), *cuda_cases(quick=True)]:
        assert case.device == "cuda" and not case.fresh
        are_cold = case.name.startswith(("norm/", "gate/", "group_norm/", "loss/"))
        assert case.cold <= (are_cold or "x1024" in case.name)
    for name, forward, backward in [
        ("norm/layer_norm/float32", 2, 3), ("norm/add_rms_norm/bfloat16", 4, 4),
        ("dropout/dropout/bfloat16", 2, 2), ("dropout/add_dropout/float32", 3, 2),
    ]:  # fmt: skip
        for phase, moved in zip(phases, (forward, backward, forward + backward), strict=True):
            assert found[f"{name}/65536x1024/{phase}"].tensors == moved


def on_cpu(case: cases.Case, monkeypatch) -> cases.Case:
    """A CUDA case whose tensors are made on the CPU, so that it runs here."""
    drawn, filled = torch.randn, torch.full
    monkeypatch.setattr(torch, "randn", lambda *size, device=None: drawn(*size))
    monkeypatch.setattr(torch, "full", lambda *a, device=None, **rest: filled(*a, **rest))
    return replace(case, device="cpu")


@pytest.mark.parametrize("family", ["norm/add_layer_norm/bfloat16", "dropout/add_dropout/float32"])
def test_cuda_cases_run(family, monkeypatch):
    for case in cuda_cases(quick=True):
        if case.name.startswith(family):
            row = cases.measure(on_cpu(case, monkeypatch), seconds=0, compiled=False, places=1)
            assert not row.check and row.share > 0, f"{case.name}: {row.check}"
            rate = pytest.approx(row.moved_bytes / row.timing.median("ours") / 1e9)
            assert row.gbps == rate == row.to_dict()["gbps"]


def test_what_is_checked_of_a_large_case_has_its_columns(monkeypatch):
    for case in cuda_cases():
        if case.make_checked is not None:
            on_cpu(case, monkeypatch)
            tensors = case.make_checked()
            assert tensors[0].numel() <= 2**19
            halves = 2 if gate.HALVES in case.name else 1
            assert f"x{tensors[0].shape[-1] // halves}/" in case.name
            assert tensors[0].requires_grad == case.backward


def test_optimizer_cases(monkeypatch):
    found = {case.name.removeprefix("optimizer/"): case for case in optimizer.cases(device="cuda")}
    assert all(case.device == "cuda" for case in found.values())
    # 28 bytes of a billion parameters, against torch's fused step.
    assert found["adamw/float32/64x16777216"].moved == 28 * 2**30
    assert found["adamw/float32/300x768"].moved is None  # the host's time
    for case in optimizer.cases(quick=True, device="cuda"):
        row = cases.measure(on_cpu(case, monkeypatch), seconds=0, compiled=False, places=1)
        assert not row.check, f"{case.name}: {row.check}"


@pytest.mark.parametrize("cls", [torch.optim.AdamW, onepass.optim.AdamW])
def test_an_optimizer_goes_with_the_tensors_it_was_made_for(cls):
    """The tensors of all cases together would not fit on a device."""
    step = optimizer._optimizer(cls)
    tensors = optimizer._make([(64,), (5,)], torch.float32)
    params = [weakref.ref(param) for param in step(*tensors)]
    again = step(*tensors)
    assert all(param() is same for param, same in zip(params, again, strict=True))
    del again
    tensors.clear()
    gc.collect()
    assert [param() for param in params] == [None, None]


def test_a_backward_alone_is_the_same_gradient_each_time(monkeypatch):
    """Forwards run before the timing; also in compiled graphs."""
    forwards = []
    good = norm.OPERATORS["layer_norm"]

    def counted(*tensors):
        forwards.append(len(forwards))
        return good.stock(*tensors)

    make = partial(norm._tensors, "layer_norm", (16, 64), torch.float32, True)
    operator = cases.Operator(good.ours, counted, good.formula, good.base)
    case = cases.Case("x", operator, make, True, 3, cold=True, backward_alone=True)
    monkeypatch.setattr(cases, "COLD_BYTES", 32 * 1024)
    inputs = cases._inputs(case)
    assert len(inputs.sets) > 2
    function = torch.compile(counted, backend="aot_eager")
    with cases._graphs_kept(True):
        call = cases._call(case, function, inputs)
    made = len(forwards)
    rounds = [[call() for _ in inputs.sets] for _ in range(3)]
    assert len(forwards) == made
    for number, (tensors, upstream) in enumerate(inputs.sets):
        expected = torch.autograd.grad(good.stock(*tensors), tensors, upstream)
        for gradients in (found[number] for found in rounds):
            for one, other in zip(gradients, expected, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
def test_cuda_without_a_device_is_one_line():
    message = "bench: --device must be one that onepass runs on, got cuda: torch sees no CUDA"
    assert refusal("bench", "--device", "cuda").startswith(message)


def test_cuda_tables_show_gigabytes_per_second(capsys):
    case = next(case for case in cuda_cases() if case.name.endswith("/backward"))
    times = {"ours": [1e-3] * 5, "eager": [2e-3] * 5, "copy": [1e-3] * 5}
    timing = harness.Timing(times, dict.fromkeys(times, 1), dict.fromkeys(times, 0.0))
    row = cases.Row(case, timing, "", 0.5, "", moved_bytes=3 * 10**9, goal=Goal(1.0, 1.0, 0.85))
    report.print_tables([row])
    result = {"device": "cuda", "other_load": None, "machine": {"gpu": "NVIDIA Something"}}
    result |= {"recycled_memory": None, "failed": {}, "left_out": ["norm/x"], "command": "bench"}
    report.print_doubts(result, [row])
    report.print_footer(result, CudaCeilings(1 << 30, 3100.0, 3000.0))
    printed = capsys.readouterr().out
    figures = ("GB/s", "3000", "150%", "1.0x+ 1.0x? 85%+", "3100 GB/s", "NVIDIA Something")
    assert all(figure in printed for figure in (*figures, "norm/x")) and "AVX2" not in printed


def of_rows(ours, rows: int = 40) -> cases.Case:
    """A case whose small check sees eight rows, and whose `ours` may be wrong in others."""
    stock = norm.OPERATORS["layer_norm"]
    make = partial(norm._tensors, "layer_norm", dtype=torch.bfloat16, grad=True, device="cpu")
    return cases.Case(
        "norm/rows", replace(stock, ours=ours), lambda: make(shape=(rows, 64)), True, 4,
        device="cuda", make_checked=lambda: make(shape=(8, 64)),
    )  # fmt: skip


def right(*tensors):
    return norm.OPERATORS["layer_norm"].ours(*tensors)


def wrong_in_late_rows(*tensors):
    (output,) = right(*tensors)
    return (torch.cat([output[:30], 1.1 * output[30:]]),)


def test_results_of_the_timed_tensors_are_checked():
    assert cases._check(of_rows(right))[0] == cases._check(of_rows(wrong_in_late_rows))[0] == ""
    assert cases._check_timed(of_rows(right)) == ("", "")
    text, unchecked = cases._check_timed(of_rows(wrong_in_late_rows))
    assert text.startswith("at the timed shape, result 0: error ") and not unchecked


def test_timed_tensors_that_cannot_be_checked():
    for error, reason in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory"),
        (RuntimeError("no kernel for Float\nat"), "no kernel for Float"),
    ):
        case, base = of_rows(right), Mock(side_effect=error)
        case = replace(case, operator=replace(case.operator, base=base))
        assert cases._check_timed(case) == ("", reason)
