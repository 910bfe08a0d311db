"""swap, kind "scan": models of transformers."""

import contextlib
import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from transformers.integrations import hub_kernels

import onepass
from onepass import numerics
from tests.integrations import transformers_cases as cases
from tests.swap import scan_models
from tests.swap.reported import names, operators, types
from tests.swap.scan_models import IDS, MODELS, transformers

BATCHES = 4  # judged together: one forward of so small a model says little of its rounding
every_model = pytest.mark.parametrize("name", MODELS)
generating = pytest.mark.parametrize(
    "name", [n for n in MODELS if "TextModel" not in MODELS[n].cls]
)
VERIFIED = ["mamba", "jamba", "mamba2", "falcon_h1", "lfm2", "qwen3_next", "kimi_linear"]


@pytest.fixture(autouse=True)
def probed(probed_once):
    """A function is proven once per file of the model."""


@pytest.fixture
def warned(monkeypatch):
    """The names of functions whose reference runs, as transformers' warning names them."""
    found = []

    def warning_once(text: str, *_) -> None:
        if "falling back to its reference" in text:
            found.append(text.split("`")[1])

    monkeypatch.setattr(hub_kernels.logger, "warning_once", warning_once)
    return found


def swapped(name: str, train: bool = False):
    """(swapped, stock, report)"""
    stock = scan_models.build(name).train(train)
    model = copy.deepcopy(stock)
    return model, stock, onepass.swap(model, kinds="scan", strict=True)


def logits(model, ids=IDS, **named) -> torch.Tensor:
    output = model(input_ids=ids, **named)
    return output.logits if "logits" in output else output.last_hidden_state


def ours(model, ids=IDS) -> list[str]:
    with torch.no_grad():
        found = operators(lambda: logits(model, ids))
    return [op for op in found if any(part in op for part in ("conv", "scan", "delta"))]


def test_these_are_all_types_that_have_such_functions():
    folder = next(iter(transformers.models.__path__))
    having = {
        file.parent.name
        for file in Path(folder).glob("*/modeling_*.py")
        if '_with_fallback("causal_conv1d_fn"' in file.read_text()
    }
    assert having == {*MODELS}


@every_model
def test_swapped_and_back(name, warned):
    model, stock, report = swapped(name, train=True)
    case = MODELS[name]
    assert len(report.swapped) == case.layers and not report.skipped and not report.unknown
    assert all(entry["kind"] == "scan" for entry in report.swapped)
    expected = ["causal_conv1d"] * case.layers + ["selective_scan"] * case.layers * case.scans
    expected += ["mamba_chunk_scan"] * case.layers * case.chunks
    expected += ["delta_rule"] * case.layers * case.rules
    assert sorted(ours(model)) == sorted(expected)
    layers = {type(module) for module in stock.modules()}
    assert not warned  # nothing that is ours warns
    assert not ours(stock) and {type(module) for module in stock.modules()} == layers
    assert "causal_conv1d_fn" in warned

    exact, batches = copy.deepcopy(stock).double(), []
    for k in range(BATCHES):
        ids = (IDS * k + k) % 29 + 2
        with scan_models.InDouble():
            ref = logits(exact, ids)
        batches.append([(model, logits(model, ids)), (exact, ref), (stock, logits(stock, ids))])
    found, ref, base = ([runs[k][1] for runs in batches] for k in range(3))
    assert found[0].dtype is base[0].dtype
    numerics.assert_close(found, ref, base)
    cases.assert_gradients_close(*batches)

    assert set(onepass.unswap(model)) == names(report.swapped)
    assert types(model) == types(stock) and not ours(model)


@generating
def test_generates_the_same(name):
    model, stock, _ = swapped(name)
    options = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
    options |= dict(attention_mask=torch.ones_like(IDS))
    found = []
    steps = operators(lambda: found.append(model.generate(IDS, **options)))
    assert torch.equal(found[0], stock.generate(IDS, **options))
    case = MODELS[name]
    assert steps.count("causal_conv1d_update") == 7 * case.layers
    assert steps.count("selective_state_update") == 7 * case.layers * case.steps
    assert steps.count("delta_rule_update") == 7 * case.layers * case.rules
    assert steps.count("causal_conv1d") == case.layers
    assert steps.count("selective_scan") == case.layers * case.scans
    assert steps.count("mamba_chunk_scan") == case.layers * case.chunks
    assert steps.count("delta_rule") == case.layers * case.rules


@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_several_drafted_tokens(name):
    """They go on with the cache of stock's classes, and leave its states as stock does."""
    model, stock, _ = swapped(name)
    exact, runs = copy.deepcopy(stock).double(), []
    for run in (model, exact, stock):
        double = scan_models.InDouble() if run is exact else contextlib.nullcontext()
        with torch.no_grad(), double:
            cache = transformers.DynamicCache(config=run.config)
            logits(run, IDS, past_key_values=cache, use_cache=True)
            found = logits(run, IDS[:, :3], past_key_values=cache, use_cache=True)
            runs.append((found, cache.get_recurrent_state(0), cache.get_conv_state(0)))
    assert [x.dtype for x in runs[0]] == [x.dtype for x in runs[2]]
    for found in zip(*runs, strict=True):
        numerics.assert_close(*([x] for x in found))


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_copies_compute_the_same(name):
    model, _, _ = swapped(name)
    expected = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert types(other) == types(model) and ours(other) == ours(model)
        assert torch.equal(logits(other), expected)


@every_model
def test_dtypes_in_bfloat16(name):
    """Of the results of all modules, after which the next line goes on."""
    model, stock, _ = swapped(name)

    def dtypes(model) -> list[tuple[str, torch.dtype]]:
        found = []
        for key, module in scan_models.in_dtype(model, torch.bfloat16).named_modules():
            module.register_forward_hook(
                lambda _, inputs, output, key=key: found.extend(
                    (key, x.dtype)
                    for x in (*inputs, *(output if isinstance(output, tuple) else (output,)))
                    if isinstance(x, torch.Tensor)
                )
            )
        with torch.no_grad():
            found.append(("", logits(model).dtype))
        return found

    assert dtypes(model) == dtypes(stock)


@pytest.mark.parametrize("name", VERIFIED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verifies(name, dtype):
    stock = scan_models.in_dtype(scan_models.build(name), dtype).train()
    report = onepass.swap(stock, kinds="scan", strict=True)
    verdict = report.verify(dict(input_ids=IDS, labels=IDS))
    assert verdict.ok, str(verdict)
    assert "causal_conv1d" in str(verdict)


OF_GRAPH = {
    "mamba": "selective_scan", "mamba2": "mamba_chunk_scan", "olmo_hybrid": "delta_rule",
    "bailing_hybrid": "delta_rule",
}  # fmt: skip


@pytest.mark.parametrize("name", OF_GRAPH)
def test_compiled_in_one_graph(name):
    model, _, _ = swapped(name, train=True)
    torch._dynamo.reset()
    backend = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = []
    for run in (model, compiled):
        output = logits(run)
        found.append([output, *torch.autograd.grad(output.square().sum(), [*model.parameters()])])
    for eager, of_graph in zip(*found, strict=True):
        torch.testing.assert_close(of_graph, eager)
    graph = backend.graphs[-1].print_readable(print_output=False)
    assert f"onepass.{OF_GRAPH[name]}" in graph and "onepass.causal_conv1d" in graph
