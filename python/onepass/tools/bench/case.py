"""One benchmark case: an operator on one input, ours and torch's, checked and then timed.

The tensors of a case are made only when it is measured, so that cases do not share the cache with
each other's inputs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from onepass import _malloc, numerics
from onepass.tools.bench.goals import Goal
from onepass.tools.ceilings import Ceilings, CudaCeilings
from onepass.tools.harness import (
    BATCH_SECONDS,
    Interval,
    Timing,
    clock_of,
    measure_pairs,
    pool,
)
from onepass.tools.machine import fill_holes
from onepass.tools.sensors import Load

SEED = 0
PLACES = 5
MIN_ROUNDS = 4  # at each place
SPACER_BYTES = 3 << 20
COLD_BYTES = 256 << 20  # beyond the last cache of the machines and devices this is meant for
# Calls in a batch of a cold case on the CPU: as many as a model has layers. The first call after
# another variant finds no code of Python and torch in the caches and takes up to 0.1 ms longer; in
# batches of five calls that would be a tenth of the time.
COLD_BATCH_SECONDS = 6e-3
UPDATE_BYTES = 192 << 20  # of the update that is the ceiling where `moved` is given
READ_BYTES = 192 << 20  # of the sum that is the ceiling where `reads` is given
PHASES = ("forward", "backward", "forward+backward")
Function = Callable[..., tuple[Tensor, ...]]
Inputs = tuple[list[Tensor], list[Tensor] | None]  # an operator's tensors, upstream gradients


@dataclass(frozen=True)
class Operator:
    """The same function four times; each takes the same tensors and returns a tuple of tensors.

    Attributes:
        ours: by onepass.
        stock: by torch in its fastest eager way; torch.compile compiles this one.
        formula: the reference, which is also called with float64 tensors.
        base: the variant whose error bounds ours (`onepass.numerics`): torch's own function, or the
            formula if torch draws other random numbers.
        others: further variants by name, timed beside these; their results are not checked.
        optional: likewise, but not every torch and device has them: those that raise are left out.
        compiled: names of optional ones that torch.compile makes.
    """

    ours: Function
    stock: Function
    formula: Function
    base: Function
    others: Mapping[str, Function] = field(default_factory=dict)
    optional: Mapping[str, Function] = field(default_factory=dict)
    compiled: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Case:
    """One operation to measure.

    Attributes:
        name: family/operator/dtype/shape/phase, which --case matches.
        operator: the variants.
        make: returns the operator's tensors; those that require grad get gradients.
        backward: whether a call includes torch.autograd.grad with respect to those.
        tensors: tensors of the first input's size that must cross memory, each read or written
            once; None for the overhead of a call, where memory is no limit.
        fresh: outputs are in fresh memory, by glibc's defaults, not in recycled memory.
        cold: every call takes other tensors, COLD_BYTES of them in turn, so that none is in the
            cache: as in a model, where other operators run in between.
        backward_alone: a call is torch.autograd.grad alone, on graphs that are made beforehand and
            kept; needs `backward`.
        device: "cpu" or "cuda", where `make` puts the tensors.
        moved: bytes that must cross memory, if a number of tensors of the first input's size does
            not fit; the ceiling is then an update in place instead of a copy.
        reads: bytes that must be read and little else; the ceiling is then torch's sum of a tensor
            that is in no cache.
        compiles: whether torch.compile is to be tried on the stock variant.
        make_checked: returns smaller tensors of the same kind for the check of results, if a check
            of the whole ones would take longer than the measurement.
        flops: useful operations of a call, a multiply-add being two, where arithmetic is the limit;
            the ceiling is then that of multiply-adds on all threads.
        unit: "float32"; or "bfloat16", "int8": that ceiling is of their dot products, if the CPU
            has an instruction for them, or of 16-bit matrix products on tensor cores.
        make_stock: returns torch's tensors if it takes the same data in another form, such as
            padded; ours and the check use those of `make`.
        graphs: on CUDA a call is the replay of a CUDA graph, as in serving: the host's work for a
            call is left out.
    """

    name: str
    operator: Operator
    make: Callable[[], list[Tensor]]
    backward: bool
    tensors: float | None
    fresh: bool = False
    cold: bool = False
    backward_alone: bool = False
    device: str = "cpu"
    moved: int | None = None
    reads: int | None = None
    compiles: bool = True
    make_checked: Callable[[], list[Tensor]] | None = None
    flops: int | None = None
    unit: str = "float32"
    make_stock: Callable[[], list[Tensor]] | None = None
    graphs: bool = False


@dataclass(frozen=True)
class Row:
    """The measured case."""

    case: Case
    timing: Timing
    check: str  # empty if all results are right, else the error
    margin: float  # the worst error as a share of the numerics rule's bound
    compile_error: str
    moved_bytes: int = 0  # that must cross memory in a call; 0 where memory is no limit
    arithmetic_gflops: float | None = None  # the ceiling of a case with flops
    unavailable: Mapping[str, str] = field(default_factory=dict)  # optional variants: the reasons
    goal: Goal = Goal()
    load: Load = Load()  # of a CUDA device meanwhile
    unchecked: str = ""  # why the results of the timed tensors themselves were not checked

    @property
    def against_eager(self) -> Interval:
        return self.timing.ratio("ours", "eager")

    @property
    def against_compile(self) -> Interval | None:
        return self.timing.ratio("ours", "compile") if "compile" in self.timing.times else None

    @property
    def against_others(self) -> dict[str, Interval]:
        operator = self.case.operator
        names = [
            name for name in (*operator.others, *operator.optional) if name in self.timing.times
        ]
        return {name: self.timing.ratio("ours", name) for name in names}

    @property
    def share(self) -> float | None:
        """The share of the speed of a copy of the first input, by bytes, which moves it twice; or
        of an update in place, or a plain read; or of multiply-adds, by useful operations."""
        if self.case.flops is not None:
            return self.gflops / self.arithmetic_gflops if self.arithmetic_gflops else None
        if self.case.moved is not None:
            updates = self.moved_bytes / (2 * UPDATE_BYTES)
            return self.timing.ratio("ours", "update").median * updates
        if self.case.reads is not None:
            return self.timing.ratio("ours", "read").median * self.moved_bytes / READ_BYTES
        if self.case.tensors is None:
            return None
        return self.timing.ratio("ours", "copy").median * self.case.tensors / 2

    @property
    def gbps(self) -> float | None:
        """Bytes that must cross memory, per second of ours, in GB/s."""
        return self.moved_bytes / self.timing.median("ours") / 1e9 if self.moved_bytes else None

    @property
    def gflops(self) -> float | None:
        """Useful operations per second, in GFLOP/s: of the fastest round, as the ceiling is of
        its fastest moment."""
        if self.case.flops is None:
            return None
        return self.case.flops / self.timing.fastest("ours") / 1e9

    def to_dict(self) -> dict:
        compiled = self.against_compile
        ceiling = "copy" if self.case.moved is None else "update"
        if self.case.reads is not None:
            ceiling = "read"
        if self.case.flops is not None:
            ceiling = "arithmetic"
        return {
            "name": self.case.name,
            "memory": "fresh" if self.case.fresh else "recycled",
            "times": self.timing.to_dict(),
            "rounds_at_each_place": self.timing.groups,
            "against_eager": self.against_eager.to_dict(),
            "against_compile": compiled and compiled.to_dict(),
            "compile_error": self.compile_error or None,
            "against_others": {name: i.to_dict() for name, i in self.against_others.items()},
            "unavailable": dict(self.unavailable),
            f"share_of_{ceiling}": self.share,
            "gbps": self.gbps,
            "gflops": self.gflops,
            "right": not self.check,
            "check": self.check or None,
            "error_share_of_bound": self.margin,
            "unchecked": self.unchecked or None,
            "goal": self.goal.to_dict(),
            **asdict(self.load),
        }


def measure(
    case: Case,
    *,
    seconds: float,
    compiled: bool,
    places: int = PLACES,
    rounds: int = MIN_ROUNDS,
    limits: Ceilings | CudaCeilings | None = None,
    goal: Goal | None = None,
) -> Row:
    """Checks the case's results, then times its variants in turn for about `seconds`.

    The time is divided among several places in memory, with at least `rounds` rounds each; see
    `harness`. A case with flops has a share of the ceiling only if `limits` has that ceiling.
    """
    torch.manual_seed(SEED)
    check, margin = _check(case)
    unchecked = ""
    if not check and case.device == "cuda" and case.make_checked is not None:
        check, unchecked = _check_timed(case)
    functions = {
        "ours": case.operator.ours,
        "eager": case.operator.stock,
        **case.operator.others,
    }
    error = ""
    if compiled and case.compiles:
        # Compiled functions of one source share a cache of few entries; a full one means eager.
        torch._dynamo.reset()
        stock = torch.compile(case.operator.stock, dynamic=False, fullgraph=True)
        try:
            with _graphs_kept(case.backward_alone):
                _call(case, stock, _stock_inputs(case) or _Ring([_tensors(case)]))()
            functions["compile"] = stock
        except Exception as problem:  # no compiler on this machine, for one
            error = _first_line(problem)
    found, unavailable = _available(case, compiled)
    functions |= found
    on_cpu = case.device == "cpu"
    clock = clock_of(case.device)
    batch_seconds = COLD_BATCH_SECONDS if case.cold and on_cpu else BATCH_SECONDS
    timings, held, moved_bytes = [], [], 0
    for place in range(places):
        if on_cpu:
            _malloc.trim()
            # Takes the last returned pages, which the new tensors would otherwise get again.
            held.append(torch.ones(SPACER_BYTES * place // 4, device="cpu"))
        inputs = _inputs(case)
        of_stock = _stock_inputs(case) or inputs
        calls = {
            name: _call(case, function, of_stock if name in ("eager", "compile") else inputs)
            for name, function in functions.items()
        }
        if case.moved is not None:
            calls["update"] = _update(case.device)
            moved_bytes = case.moved
        elif case.reads is not None:
            calls["read"] = torch.ones(READ_BYTES // 4, device=case.device).sum
            moved_bytes = case.reads
        elif case.tensors is not None:
            calls["copy"] = _copy(inputs)
            bytes_of_first = inputs.sets[0][0][0].nbytes
            moved_bytes = case.tensors * bytes_of_first
        if on_cpu and not case.fresh and (case.tensors or case.flops):
            held.extend(fill_holes(inputs.sets[0][0][0].nbytes))
        timings.append(
            measure_pairs(
                calls,
                rounds=rounds,
                seconds=seconds / places,
                batch_seconds=batch_seconds,
                clock=clock,
            )
        )
    arithmetic = None
    if limits is not None and case.flops is not None:
        arithmetic = limits.arithmetic_gflops(case.unit)
    return Row(
        case,
        pool(timings),
        check,
        margin,
        error,
        moved_bytes,
        arithmetic,
        unavailable,
        goal or Goal(),
        unchecked=unchecked,
    )


def _available(case: Case, compiled: bool) -> tuple[dict[str, Function], dict[str, str]]:
    """(the optional variants that run here, the reasons of the others)."""
    found, unavailable = {}, {}
    variants = {
        name: function
        for name, function in case.operator.optional.items()
        if compiled or name not in case.operator.compiled
    }
    inputs = _Ring([_tensors(case)] if variants else [])
    for name, function in variants.items():
        try:
            with _graphs_kept(case.backward_alone):
                _call(case, function, inputs)()
            found[name] = function
        except Exception as problem:
            unavailable[name] = _first_line(problem)
    return found, unavailable


def _first_line(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0] or type(problem).__name__


class _Ring:
    """Sets of inputs that the calls of all variants take, one after the other."""

    def __init__(self, sets: list[Inputs]):
        self.sets = sets
        self._turn = itertools.cycle(sets)

    def __next__(self) -> Inputs:
        return next(self._turn)


def _inputs(case: Case) -> _Ring:
    first = _tensors(case)
    if not case.cold:
        return _Ring([first])
    tensors, upstream = first
    size = sum(tensor.nbytes for tensor in (*tensors, *(upstream or ())))
    return _Ring([first, *(_tensors(case) for _ in range(COLD_BYTES // size))])


def _stock_inputs(case: Case) -> _Ring | None:
    """The inputs of the stock variant, if it has its own."""
    if case.make_stock is None:
        return None
    return _Ring([_with_upstream(case, case.make_stock(), case.operator.stock)])


def _copy(inputs: _Ring) -> Callable[[], Tensor]:
    target = torch.empty_like(next(inputs)[0][0])
    return lambda: target.copy_(next(inputs)[0][0].detach())


def _update(device: str) -> Callable[[], Tensor]:
    target = torch.ones(UPDATE_BYTES // 4, device=device)
    return lambda: target.mul_(1.0)


def _tensors(case: Case, make: Callable[[], list[Tensor]] | None = None) -> Inputs:
    """The operator's tensors and, with a backward, one upstream gradient for each output."""
    return _with_upstream(case, (make or case.make)(), case.operator.ours)


def _with_upstream(case: Case, tensors: list[Tensor], function: Function) -> Inputs:
    if not case.backward:
        return tensors, None
    return tensors, [torch.randn_like(output) for output in function(*tensors)]


def _graphs_kept(wanted: bool) -> contextlib.AbstractContextManager:
    """Compiled inside, a backward does not overwrite tensors that the next one on its graph
    needs."""
    if not wanted:
        return contextlib.nullcontext()
    from torch._functorch import config

    return config.patch(donated_buffer=False)


def _call(case: Case, function: Function, inputs: _Ring) -> Callable[[], tuple[Tensor, ...]]:
    """The timed function: without a backward the forward alone."""
    if case.graphs and case.device == "cuda":
        return _replayed(function, inputs)
    if not case.backward:
        return lambda: function(*next(inputs)[0])

    def forward_and_backward() -> tuple[Tensor, ...]:
        tensors, upstream = next(inputs)
        return torch.autograd.grad(function(*tensors), _trained(tensors), upstream)

    if not case.backward_alone:
        return forward_and_backward
    outputs = {id(tensors): function(*tensors) for tensors, _ in inputs.sets}

    def backward() -> tuple[Tensor, ...]:
        tensors, upstream = next(inputs)
        wanted = _trained(tensors)
        return torch.autograd.grad(outputs[id(tensors)], wanted, upstream, retain_graph=True)

    return backward


def _trained(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _replayed(function: Function, inputs: _Ring) -> Callable[[], None]:
    """The function on each set of inputs, each captured in its own CUDA graph."""
    graphs = {}
    for tensors, _ in inputs.sets:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # one-time work, as compiling, is not captured
            function(*tensors)
        torch.cuda.current_stream().wait_stream(aside)
        graph = graphs[id(tensors)] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(*tensors)
    return lambda: graphs[id(next(inputs)[0])].replay()


def _check(case: Case) -> tuple[str, float]:
    """(the error's text, worst error over bound): outputs and gradients by the numerics rule."""
    return _compare(case, case.make_checked, case.operator.formula, torch.float64)


def _check_timed(case: Case) -> tuple[str, str]:
    """(the error's text, why there was no check): of the timed tensors themselves, against torch's
    function in float32, or in float64 for float32.

    Float32 is exact enough for results of 16 bits, and the formula would need more memory.
    """
    try:
        text, _ = _compare(case, None, case.operator.base, None)
    except torch.OutOfMemoryError:
        return "", "out of memory"
    except RuntimeError as error:
        # torch's function may have no kernel for that dtype. A fault of ours is no secret: after
        # it, nothing can be timed.
        return "", _first_line(error)
    return text and f"at the timed shape, {text}", ""


def _compare(
    case: Case, make: Callable[[], list[Tensor]] | None, exact: Function, wide: torch.dtype | None
) -> tuple[str, float]:
    tensors, upstream = _tensors(case, make)
    if wide is None:
        narrow = {tensor.dtype for tensor in tensors} & {torch.bfloat16, torch.float16}
        wide = torch.float32 if narrow else torch.float64
    operator = case.operator

    def results(function: Function, dtype: torch.dtype | None = None) -> list[Tensor]:
        inputs = [
            tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_(grad)
            for tensor, grad in zip(tensors, (t.requires_grad for t in tensors), strict=True)
        ]
        torch.manual_seed(SEED)  # every variant that draws a seed draws this one
        outputs = function(*inputs)
        if upstream is None:
            return list(outputs)
        gradients = torch.autograd.grad(
            outputs,
            _trained(inputs),
            [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)],
        )
        return [*outputs, *gradients]

    wrong, margin = "", 0.0
    triples = zip(
        results(operator.ours),
        [result.double() for result in results(exact, wide)],
        results(operator.base),
        strict=True,
    )
    for number, triple in enumerate(triples):
        comparison = numerics.compare(*triple)
        margin = max(margin, comparison.max_error / comparison.bound if comparison.bound else 0.0)
        if not comparison.ok and not wrong:
            wrong = f"result {number}: {comparison.text}"
    return wrong, margin
