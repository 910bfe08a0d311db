"""Swapped modules take every argument as stock does: odd ones too.

Each case runs through the stock and the swapped module. Both raise the same type of error, or both
give results of the same shapes, dtypes, memory order and need of a gradient, with values and
gradients by the numerics rule. `DIFFERENT` lists the cases where they rightly differ.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass import _dispatch_log, numerics
from onepass._policy import small_calls
from tests.swap import linear_calls, odd_attention
from tests.swap.odd_attention import EMBED, HEADS, LAYERS, MHA
from tests.swap.odd_modules import MODULES, WITH_CONTEXTS, Case, cases

pytestmark = pytest.mark.usefixtures("probed_once")

CONTEXTS: dict[str, Callable] = {
    "": contextlib.nullcontext,
    "inference_mode": torch.inference_mode,
    "autocast bfloat16": functools.partial(torch.autocast, "cpu", torch.bfloat16),
}

# (modules, cases): the reason. docs/limits.md tells the user of these.
FOR_THE_NEXT = "as the code after it reads it without a copy"
AS_TORCHS = "as torch's layer norm, which this one does not call"
OTHER_ORDER = {  # the memory order of the results is not compared
    ("batch_first", "*"): FOR_THE_NEXT,
    ("add_zero_attn", "*"): FOR_THE_NEXT,
    ("*", "batch_first: *"): FOR_THE_NEXT,
    **{
        (label, pattern): FOR_THE_NEXT
        for label in ("attention", "rotary", "encoder, norm first")
        for pattern in ("turned", "*transposed", "*dimensions swapped", "*channels last*")
    },
    ("GammaBeta", "*dimensions swapped"): AS_TORCHS,
    ("GammaBeta", "transposed"): AS_TORCHS,
    ("GammaBeta", "channels last*"): AS_TORCHS,
}
BROADCASTS = "ours takes a size or a combination for which one of torch's kernels has no code"
NOT_VIEWED = "the original asks for an input that `view` takes"
NO_KEY = "rows without a key are 0, not NaN"
OVERFLOWS = "squares overflow: 0 as by the formula; torch's algorithm gives NaN"
INFINITE_SUMS = "sums of infinite numbers depend on their order"
DIFFERENT = {
    ("MHA*", "*of all*"): NO_KEY,
    ("MHA*", "infinite *"): NO_KEY,
    ("attention", "*attn_mask 1-D*"): BROADCASTS,
    ("attention", "*attn_mask one*"): BROADCASTS,
    ("attention", "*attn_mask 3-D, causal"): BROADCASTS,
    ("attention", "value: n*"): "torch's kernel looks at the key alone",
    ("attention", "value: * without samples"): "torch's kernel looks at the key alone",
    ("rotary", "*: a subclass"): "both results have the class that one argument has",
    ("rotary", "*: sparse"): "there is no kernel for it, as in torch, which says so in other words",
    ("MHA*", "large"): INFINITE_SUMS,
    ("batch_first", "large"): INFINITE_SUMS,
    ("encoder, norm first", "large"): OVERFLOWS,
    ("attention", "enable_gqa, 2-D"): BROADCASTS,
    ("attention", "scale=nan"): "the scores are NaN, and so is the result; torch's kernel gives 0",
    ("rotary", "*torch.float16"): "under autocast torch's cat refuses float16",
    ("Layer*", "large"): OVERFLOWS,
    ("GroupNorm*", "large"): OVERFLOWS,
    ("adaptive norm", "large"): OVERFLOWS,
    ("gated block", "large"): INFINITE_SUMS,
    ("attention by hand", "large"): INFINITE_SUMS,
    ("GroupNorm*", "no column"): "gradients of weights that saw nothing are 0, not 0 / 0",
    ("Conv1D", "*dimensions swapped"): NOT_VIEWED,
    ("Conv1D", "transposed"): NOT_VIEWED,
    ("Conv1D", "expanded rows"): NOT_VIEWED,
    ("Conv1D", "overlapping"): NOT_VIEWED,
    ("Conv1D", "channels last*"): NOT_VIEWED,
    ("Conv1D", "*sparse*"): "torch's other product takes it, or raises another type",
    ("adaptive norm", "no *"): "the attribute, which is None, is not read",
    ("LayerNormOverridden", "normalized_shape: (8.0,)*"): "it is equal to what was proven",
}


class Outcome(NamedTuple):
    error: Exception | None
    facts: list  # of results and gradients
    tensors: list[Tensor]


def tensors_in(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, (list, tuple)) or type(value) is type({}.values()):
        return [x for item in value for x in tensors_in(item)]
    return []


def facts_of(x: Tensor, given: list[Tensor], ordered: bool) -> tuple:
    """What is compared exactly. Strides of size 1, or of no elements, address nothing."""
    strides = None
    if ordered and x.layout is torch.strided and not x.is_nested and x.numel():
        strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    same = next((i for i, y in enumerate(given) if y is x), None)
    return type(x), tuple(x.shape), x.dtype, strides, x.requires_grad, x.device, x.layout, same


def outcome(case: Case, module: nn.Module, args: list, named: dict, context: Callable) -> Outcome:
    """What a call of a module does: its error, or its results and gradients."""
    given = tensors_in((args, named))
    torch.default_generator.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with context():
                results = tensors_in(module(*args, **named))
            facts = [facts_of(x, given, case.ordered) for x in results]
            wanted = [x for x in results if x.requires_grad]
            leaves = [x for x in (*given, *module.parameters()) if x.requires_grad and x.is_leaf]
            if wanted and leaves:
                torch.default_generator.manual_seed(6)
                upstream = [torch.randn(x.shape, dtype=x.dtype, device=x.device) for x in wanted]
                gradients = torch.autograd.grad(wanted, leaves, upstream, allow_unused=True)
                facts += [x if x is None else (tuple(x.shape), x.dtype) for x in gradients]
                results += [x for x in gradients if x is not None]
        except Exception as error:
            return Outcome(error, [], [])
    return Outcome(None, facts, [x.detach() for x in results])


def in_float64(module: nn.Module) -> nn.Module:
    """A module whose tensors, attributes that are no parameters too, are of float64."""
    for part in module.double().modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                setattr(part, name, doubled(value))
    return module


@functools.lru_cache(maxsize=1)
def twin_in_float64(module: nn.Module) -> nn.Module:
    """Of a module that cases leave as it is: to copy it takes longer than to call it."""
    return in_float64(copy.deepcopy(module))


def doubled(value):
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return [doubled(x) for x in value]
    if isinstance(value, dict):
        return {name: doubled(x) for name, x in value.items()}
    return value


def difference(case: Case, stock: nn.Module, swapped: nn.Module, context: Callable) -> str | None:
    """How the swapped module differs from stock in a case."""
    base, ours = (run(case, module, context, 3) for module in (stock, swapped))
    if type(base.error) is not type(ours.error):
        texts = ("computes" if x.error is None else repr(x.error)[:150] for x in (base, ours))
        return "stock {}, swapped {}".format(*texts)
    if base.facts != ours.facts:
        pairs = zip(base.facts, ours.facts, strict=False)
        return "; ".join(f"stock {a}, swapped {b}" for a, b in pairs if a != b)
    if case.random:
        return None
    if all(map(is_same, ours.tensors, base.tensors)):
        return None
    exact = run(case, stock, contextlib.nullcontext, 3, exact=True)
    draws = [(ours, exact, base)]
    found = verdict(draws)
    if found is not None:  # of few elements: the rule is for several draws then
        for seed in range(4, 10):
            drawn = [run(case, module, context, seed) for module in (swapped, stock)]
            exact = run(case, stock, contextlib.nullcontext, seed, exact=True)
            draws.append((drawn[0], exact, drawn[1]))
        found = verdict(draws)
    return found


def is_same(ours: Tensor, base: Tensor) -> bool:
    """Whether the numerics rule holds for any reference: they differ by an ulp at most."""
    if ours.device.type == "meta" or torch.equal(ours, base):
        return True
    if not ours.is_floating_point() or ours.dtype.itemsize == 1 or not base.isfinite().all():
        return False
    ulp = numerics.ulp(ours.dtype, float(base.abs().max()) / 2)
    return float((ours - base).abs().max()) <= ulp


def verdict(draws: list[tuple[Outcome, Outcome, Outcome]]) -> str | None:
    """What the numerics rule says against draws of (ours, the exact one, stock's)."""
    for i, first in enumerate(draws[0][0].tensors):
        ours, refs, bases = ([x.tensors[i : i + 1] for x in of] for of in zip(*draws, strict=True))
        ours, bases = [x for (x,) in ours], [x for (x,) in bases]
        if all(map(is_same, ours, bases)):
            continue
        if not first.is_floating_point() or first.dtype.itemsize == 1:
            return f"result {i} is not equal"
        refs = [x for (x,) in refs] if all(refs) else bases  # in float64 stock raises
        if not all(x.isfinite().all() for x in bases) or refs[0].shape != first.shape:
            refs = bases
        elif not numerics.compare(bases, refs, bases).ok:  # float64 results of float32 inputs
            ours, refs, bases = ([x.float() for x in draw] for draw in (ours, refs, bases))
        result = numerics.compare(ours, refs, bases)
        if not result.ok:
            return f"result {i}: {result.text}"
    return None


def run(case: Case, module, context: Callable, seed: int, exact: bool = False) -> Outcome:
    """The outcome of a case, `exact` in float64."""
    if case.change is not None:
        module = copy.deepcopy(module)
    torch.default_generator.manual_seed(seed)
    args, named = case.arguments()
    if case.change is not None:
        case.change(module)
    if exact:
        try:
            module = in_float64(module) if case.change is not None else twin_in_float64(module)
            args, named = doubled(args), doubled(named)
        except Exception as error:
            return Outcome(error, [], [])
    return outcome(case, module, args, named, context)


# ---- tests ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def ours_compute(swapped_run_ours, monkeypatch):
    """No call is too small, and torch's products are slow."""
    linear_calls.set_facts(monkeypatch, linear_calls.SLOW)
    monkeypatch.setattr(small_calls, "LEAST_ROWS", 1)


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A stock module and a swapped copy."""
    torch.default_generator.manual_seed(1)
    stock = make()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    swapped = copy.deepcopy(stock)
    assert onepass.swap(swapped).swapped
    return stock, swapped


def check(label: str, make: Callable[[], nn.Module], tried: list[Case], context: str = "") -> None:
    modules, found = pair(make), {}
    for case in tried:

        def is_in(table: dict, name: str = case.name) -> bool:
            return any(all(map(fnmatchcase, (label, name), key)) for key in table)

        case = case._replace(ordered=not is_in(OTHER_ORDER))
        text = difference(case, *modules, CONTEXTS[context])
        if text is not None and not is_in(DIFFERENT):
            found[case.name] = text
    assert not found, "\n" + "\n".join(f"{name}: {text}" for name, text in found.items())


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_one_tensor(name, context):
    odd, tried = MODULES[name], cases(MODULES[name])
    if context:
        tried = [case for case in tried if case.name in WITH_CONTEXTS]
    check(name, odd.make, tried, context)


@pytest.mark.parametrize("name", MODULES)
def test_ours_computes_the_usual_input(name):
    odd = MODULES[name]
    _, swapped = pair(odd.make)
    x = torch.randn(odd.shape).to(odd.dtype)
    with _dispatch_log.record() as calls:
        swapped(x)
    assert any(call["level"] != _dispatch_log.TORCH for call in calls)


@pytest.mark.parametrize(
    ("name", "context", "weights"),
    [
        *((name, "", False) for name in MHA),
        *((name, "", True) for name in ("MHA", "bias_k")),
        *(
            ("MHA", context, weights)
            for context in CONTEXTS
            for weights in (False, True)
            if context
        ),
    ],
)
def test_multihead_attention(name, context, weights):
    options = MHA[name]
    tried = odd_attention.mha_cases(options.get("batch_first", False), weights)
    if context or name not in ("MHA", "bias_k"):
        tried = [case for case in tried if case.change is None and ":" not in case.name]
    check(name, lambda: nn.MultiheadAttention(EMBED, HEADS, **options), tried, context)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    cls, options = LAYERS[name]
    tried = odd_attention.layer_cases(cls is nn.TransformerDecoderLayer)
    check(name, lambda: cls(EMBED, HEADS, 12, dropout=0.0, **options), tried)


@pytest.mark.parametrize("context", ["", "autocast bfloat16"])
def test_calls_of_attention(context):
    check("attention", odd_attention.Attends, odd_attention.attention_cases(), context)


@pytest.mark.parametrize("context", ["", "autocast bfloat16"])
def test_calls_of_rotary_functions(context):
    check("rotary", odd_attention.Rotates, odd_attention.rotary_cases(), context)


def test_a_refused_call_is_logged():
    norm = nn.RMSNorm(8)
    onepass.swap(norm)
    with _dispatch_log.record() as calls:
        norm(torch.randn(3, 8, dtype=torch.complex64))
    (call,) = calls
    assert call["level"] == _dispatch_log.TORCH and "rms_norm" in call["kernel"]
    assert "must have dtype" in call["reason"]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64], ids=str)
def test_compiled_calls_of_other_dtypes_are_torchs(dtype):
    stock, swapped = pair(lambda: nn.RMSNorm(8))
    x = torch.randn(3, 8, dtype=dtype)
    compiled = torch.compile(swapped, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), stock(x))
