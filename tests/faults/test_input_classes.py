"""Every operator with every class of input, one argument at a time: a result equals that of
ordinary tensors, or the call is refused in our words and nothing was written. Tensors of torch.func
and without data are in tests/all_families (test_func_transforms.py, test_messages.py)."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass import _negative
from tests.faults.input_classes import (
    BROKEN,
    CLASSES,
    FOREIGN,
    REAL,
    InputClass,
    plain_of,
    single_process,
)
from tests.support import isolated
from tests.support.calls import CALLS, Call

OURS = re.compile(r"^[\w. ]+: .+ must .+", re.DOTALL)
# Messages of torch, before an operator sees a tensor.
TORCHS = re.compile(
    r"Expected a value of type '.*' for argument '\w+' but instead found type"
    "|fallback doesn't currently support mutable TensorLists"
    "|There were no tensor arguments to this function"
    "|is not an instance of torch.Tensor"
    "|only supports 2D parameters"
)
# Messages that no user should see.
INTERNAL = re.compile("internal (assert|error)|torch_call_dispatcher|file an issue", re.IGNORECASE)


def attempt(run: Callable, tensors: dict) -> tuple[list[Tensor] | None, Exception | None]:
    torch.manual_seed(5)
    try:
        return run(**tensors), None
    except Exception as error:
        return None, error


def memory_of(tensor) -> bytes | None:
    """The memory of a tensor, as bytes."""
    inner = getattr(tensor, "held", getattr(tensor, "_local_tensor", tensor))
    if not isinstance(inner, Tensor) or inner.layout is not torch.strided or inner.is_meta:
        return None
    if inner.is_nested:
        inner = inner._base if inner._base is not None else inner.values()
    storage = inner.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def same(one: Tensor, other: Tensor, exact: bool) -> bool:
    if one.dtype != other.dtype:
        return False
    if one.is_meta:
        return one.shape == other.shape
    one, other = plain_of(one), plain_of(other)
    if one.shape != other.shape:
        return False
    if exact:
        return torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    return torch.allclose(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


def is_refusal(call: Call, cls: InputClass, error: Exception) -> bool:
    """In our words, or in torch's if torch sees the tensor first."""
    text = str(error)
    if call.composed:
        return True
    told = isinstance(error, (IndexError, RuntimeError, TypeError, ValueError))
    if not told or INTERNAL.search(text):
        return False
    if OURS.match(text) or (
        call.name.startswith(("ops.", "nn.", "optim.")) and TORCHS.search(text)
    ):
        return True
    return cls.kind == FOREIGN and not (cls.name == "meta" and call.name.startswith("ops."))


def error_of_torch(call: Call, argument: str, cls: InputClass) -> Exception | None:
    if call.stock is None:
        return None
    tensors = call.tensors()
    return attempt(call.stock, tensors | {argument: cls.make(tensors[argument])})[1]


def judge(call: Call, argument: str, cls: InputClass) -> str | None:
    """The error of the call, or None."""
    tensors = call.tensors()
    special = cls.make(tensors[argument])
    of_none = cls.name == "None"
    if (special is None) != of_none or (of_none and argument in call.optional):
        return None
    if cls.name == "freed" and call.composed:
        return None  # some of torch's own products abort the process
    written = argument in call.written
    if written and not cls.written:
        return None
    reference = call.tensors()
    if cls.kind == REAL:
        reference[argument] = plain_of(special)
    tensors[argument] = special
    before = {name: memory_of(t) for name, t in tensors.items()}
    found, error = attempt(call.run, tensors)
    after = {name: memory_of(t) for name, t in tensors.items()}
    may_write = call.written if error is None else ()
    changed = [n for n in before if before[n] != after[n] and n not in may_write]
    if changed:
        return f"{', '.join(changed)} changed; {error!r}"
    if error is not None:
        if is_refusal(call, cls, error):
            must = cls.accepted and not written and not call.name.startswith("ops.")
            needless = must and attempt(call.run, reference)[1] is None
            return f"refused: {error}" if needless else None
        if str(error) == str(error_of_torch(call, argument, cls)):
            return None  # torch saw the tensor first
        return f"refused, not in our words: {error!r}"
    if cls.kind == BROKEN:
        by_torch = of_none and call.stock and error_of_torch(call, argument, cls) is None
        return None if by_torch else "accepted"
    if cls.kind == FOREIGN and call.composed:
        return None  # torch's own operators took it
    expected, expected_error = attempt(call.run, reference)
    if cls.kind == REAL and expected_error is not None:
        return f"accepted, while an ordinary tensor is not: {expected_error!r}"
    if len(found) != len(expected):
        return f"{len(found)} results, expected {len(expected)}"
    pairs = [("result", *pair) for pair in zip(found, expected, strict=True)]
    pairs += [(name, tensors[name], reference[name]) for name in call.written]
    wrong = [what for what, one, other in pairs if not same(one, other, not call.composed)]
    return f"{', '.join(wrong)} differs" if wrong else None


# Operators for tracing and export, which are reached through the public functions.
TRACED = {
    "norm", "modulated_norm", "dropout", "branch", "gate", "group_norm", "loss", "linear",
    "linear_epilogue", "linear_cross_entropy", "attention", "causal_conv1d", "rotary",
    "quantized_linear", "selective_scan", "mamba_chunk_scan", "delta_rule",
}  # fmt: skip


def raw_schemas():
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("onepass::")]
    return [s for s in schemas if s.name.removeprefix("onepass::") not in TRACED]


KINDS = {cls.name: cls for cls in CLASSES}


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Imports that each forked child would otherwise repeat."""
    single_process()
    for name in ("wrapper subclass", "DTensor", "nested", "nested jagged"):
        judge(CALLS["functional.layer_norm"], "input", KINDS[name])
    yield
    torch.distributed.destroy_process_group()


INPUTS = ("input", "second", "third", "target")  # of modules; the others are parameters


def groups() -> list:
    """The quick and the slow cases of each module. One forked child runs a whole group, because
    starting a child takes a fifth of a second.

    Slow are calls of modules whose many parameters mostly go to torch's code, and of variants of
    what is tested anyway: of calls, and of the parameters of modules, which are arguments of the
    functions.
    """
    found, seen = {}, set()
    for call in CALLS.values():
        kind = call.name.split()[0].removesuffix("_check")
        is_variant = kind in seen or call.name.startswith(("nn.Transformer", "nn.Multihead"))
        seen.add(kind)
        module = call.name.partition(".")[0]
        for argument in call.tensors():
            is_slow = is_variant or (module == "nn" and argument not in INPUTS)
            found.setdefault((module, is_slow), []).append((call.name, argument))
    return [
        pytest.param(
            cases,
            id=f"{module}, variants" if is_slow else module,
            marks=pytest.mark.slow if is_slow else (),
        )
        for (module, is_slow), cases in found.items()
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of", groups())
def test_a_tensor_of_any_class_is_computed_as_by_torch_or_refused(of):
    cases = {
        f"{name}, {argument}: {kind}": (CALLS[name], argument, KINDS[kind])
        for name, argument in of
        for kind in KINDS
    }
    complaints = isolated.each(lambda case: judge(*cases[case]), cases)
    assert len(complaints) == len(cases)
    wrong = [f"{case}: {text}" for case, text in complaints.items() if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("call", CALLS.values(), ids=lambda call: call.name)
def test_the_call_is_right_with_ordinary_tensors(call):
    call.run(**call.tensors())


def required_tensors(schema) -> list[str]:
    """Tensors for which torch passes None as an undefined tensor. If a call has one tensor alone,
    torch finds no operator without it; in a list it refuses None itself."""
    names = [argument.name for argument in schema.arguments if str(argument.type) == "Tensor"]
    return names if len([a for a in schema.arguments if "Tensor" in str(a.type)]) > 1 else []


@pytest.mark.parametrize("schema", raw_schemas(), ids=lambda schema: schema.name)
def test_a_raw_operator_names_the_required_tensor_that_is_none(schema):
    name = "ops." + schema.name.removeprefix("onepass::")
    for call in [call for call in CALLS.values() if call.name.split()[0] == name]:
        for argument in set(required_tensors(schema)) & call.tensors().keys():
            error = attempt(call.run, call.tensors() | {argument: None})[1]
            text = rf"\w+: {argument} must be given, got none"
            assert re.fullmatch(text, str(error)), (call.name, argument, error)


def test_every_public_name_and_raw_operator_has_a_call():
    wanted = {"ops." + schema.name.removeprefix("onepass::") for schema in raw_schemas()}
    for module in (onepass.functional, onepass.nn, onepass.optim):
        wanted |= {f"{module.__name__.removeprefix('onepass.')}.{name}" for name in module.__all__}
    wanted -= {"optim.muon_groups", "optim.fused_accumulate"}  # a module's, an optimizer's
    assert wanted == {name.split()[0] for name in CALLS}


def test_every_tensor_argument_of_a_raw_operator_is_tried():
    for schema in raw_schemas():
        wanted = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
        name = "ops." + schema.name.removeprefix("onepass::")
        tried = {
            a for call in CALLS.values() if call.name.split()[0] == name for a in call.tensors()
        }
        if name.startswith("ops.attention_backward"):  # refused in any case
            wanted -= {"block_table"}
        wanted -= {"device_hyper"}  # CUDA's
        assert wanted <= tried, (name, wanted - tried)


def test_every_operator_that_writes_has_a_kernel_that_refuses_negative_views():
    writing = {
        schema.name.removeprefix("onepass::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("onepass::")
        and any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    }
    assert writing == _negative.registered


def test_optimizers_of_tensors_without_values_are_refused():
    def refusal(name: str) -> str:
        with FakeTensorMode() as mode:
            fakes = {n: mode.from_tensor(t) for n, t in CALLS[name].tensors().items()}
            return str(attempt(CALLS[name].run, fakes)[1])

    names = [name for name in CALLS if name.startswith("optim.") and "clip" not in name]
    for name, text in isolated.each(refusal, names).items():
        assert text.endswith(": params must have values, got fake tensors"), (name, text)


def test_a_step_of_tensors_on_meta_alone_is_refused():
    """The fake would do nothing, and the missing step would go unnoticed."""
    on_meta, hyper = torch.empty(4, device="meta"), torch.empty(1, 11, device="meta")
    layout = torch.zeros(1, 18, dtype=torch.int64, device="meta")
    for run in (
        lambda: torch.ops.onepass.optimizer_step(0, 1, [on_meta], hyper),
        lambda: torch.ops.onepass.optimizer_table([on_meta], [on_meta], layout),
    ):
        with pytest.raises(RuntimeError, match=r"_\w+: \w+ must be on the CPU or a CUDA device"):
            run()
