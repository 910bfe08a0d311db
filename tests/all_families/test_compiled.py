"""Every operator under torch.compile and torch.export: with dynamic shapes, and with gradients."""

import io

import pytest
import torch
import torch._inductor.config
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

from tests.support.calls import CALLS, SAMPLES
from tests.support.results import bits
from tests.support.seeds import set_seed

NAMES = [n for n in SAMPLES if not n.startswith("nn.")]
VARIANTS = [name for name in NAMES if name not in CALLS]


def some(last: bool = False) -> list:
    """The names; `make test` takes the first or the last variant of each function."""
    quick = {name.split(" ")[0]: name for name in (VARIANTS if last else VARIANTS[::-1])}.values()
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]


def grown(call, times: int) -> dict:
    """The tensors, `times` as large in the dimensions that may have any size."""
    found = call.tensors()
    for name, dims in (call.grows or {}).items():
        for dim in dims if name in found else ():
            size = found[name].shape[dim]
            parts = [found[name].roll(number, dim) for number in range(times)]
            found[name] = torch.cat(parts, dim)
            assert found[name].shape[dim] == times * size
    return found


def results(function, call, given) -> list:
    """Outputs and gradients, by the same random numbers."""
    names = call.wanted(given)
    leaves = {name: given[name].detach().requires_grad_() for name in names}
    set_seed(3)
    outputs = [y for y in function(**given | leaves) if y.is_floating_point()]
    upstream = [torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype) for y in outputs]
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    return [*(y.detach() for y in outputs), *found]


def assert_same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and one.stride() == other.stride()
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some())
@torch._inductor.config.patch(fallback_random=True)  # eager's numbers
def test_one_graph_for_all_sizes(name, backend):
    """To the bit what a plain call gives. torch compiles once more to make a number constant."""
    torch._dynamo.reset()
    call, counts = SAMPLES[name], []
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call.run, fullgraph=True, dynamic=True, backend=counter)
    for times in (1, 2, 3) if call.grows else (1,):
        given = grown(call, times)
        found, expected = results(compiled, call, given), results(call.run, call, given)
        if call.composed and backend == "inductor":  # whose code rounds as it likes
            torch.testing.assert_close(found, expected)
        else:
            assert_same(found, expected)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[min(1, len(counts) - 1)] > 0


class Program(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, tensors):
        return self.call.run(**tensors)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", some(last=True))
@pytest.mark.grid
def test_exported_programs_train(name, strict):
    """Loaded from a file, for other sizes, with the gradients of plain calls."""
    call, file = SAMPLES[name], io.BytesIO()
    grows = {n: dims for n, dims in (call.grows or {}).items() if n in call.tensors()}
    shapes = {n: dict.fromkeys(grows.get(n, ()), Dim.DYNAMIC) for n in call.tensors()}
    program = Program(call)
    exported = torch.export.export(
        program, (grown(call, 2),), dynamic_shapes=(shapes,), strict=strict
    )
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    given = grown(call, 3)
    found, expected = (
        results(lambda **tensors: run(tensors), call, given) for run in (loaded, program)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("family", ["add_dropout", "add_rms_norm", "attention", "cross_entropy",
                                    "gated_activation", "group_norm", "linear_cross_entropy",
                                    "modulated_layer_norm", "rotary_embedding"])  # fmt: skip
def test_the_second_derivative_of_a_compiled_call_is_refused_by_torch(family):
    """At the first derivative or at the second, by what was compiled before."""
    torch._dynamo.reset()
    call = SAMPLES[next(name for name in VARIANTS if name.startswith(family))]
    compiled = torch.compile(call.run, fullgraph=True, backend="aot_eager")
    given = call.tensors()
    leaves = {name: given[name].requires_grad_() for name in call.wanted(given)}
    value = sum(y.pow(2).sum() for y in compiled(**given | leaves) if y.is_floating_point())
    message = "double backward|create_graph=False|to not have been used in the graph"
    with pytest.raises(RuntimeError, match=message):
        gradients = torch.autograd.grad(value, list(leaves.values()), create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in gradients), list(leaves.values()))
