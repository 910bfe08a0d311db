"""Random calls of the public functions and raw operators, right ones and wrong ones.

A right call has to agree with the definition in float64 by the rule of onepass.numerics, read its
inputs from inside larger buffers and leave their borders, and the inputs, as they were. A wrong one
(an argument of another shape, dtype, class or value) must give a result or raise an error, in time,
and may not change its arguments either.

    python -m tests.faults.fuzz --seed 0 --cases 2000
    python -m tests.faults.fuzz --seed 0 --only 17      # one of them, in this process
"""

import argparse
import os
import resource
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import torch
import torch._dynamo  # optimizers need it: imported here once, not in each child
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onepass import functional, numerics, reference
from tests.attention import cases as attention_cases
from tests.attention_decode import cases as attention_decode_cases
from tests.faults.input_classes import CLASSES, REAL
from tests.faults.test_input_classes import INTERNAL, memory_of
from tests.gate import cases as gate_cases
from tests.group_norm import cases as group_norm_cases
from tests.linear import cases as linear_cases
from tests.loss import cases as loss_cases
from tests.norm import cases as norm_cases
from tests.norm import forms
from tests.rotary import cases as rotary_cases
from tests.support import isolated
from tests.support.calls import CALLS
from tests.support.seeds import drawn_seed

CHUNK = 50  # cases of a forked child
SECONDS = 60  # for one of them
MEMORY = 4 << 30  # that a case may take beyond what the process has
F32, F64 = torch.float32, torch.float64
DTYPES = (F32, torch.bfloat16, torch.float16, F64)


# ---- borders -------------------------------------------------------------------------------------

BORDER = 64  # elements on each side


class Border:
    """Tensors carved from larger buffers, with copies of the borders and of the values."""

    def __init__(self, rng: Random):
        self.rng = rng
        self.buffers: dict[str, tuple[Tensor, Tensor]] = {}

    def carve(self, name: str, tensor: Tensor) -> Tensor:
        """The values in other strides, inside a buffer of random bits."""
        rng = self.rng
        order = list(range(tensor.dim()))
        if rng.random() < 0.3:
            rng.shuffle(order)
        permuted = tensor.permute(order)
        sizes, gaps = list(permuted.shape), [0] * permuted.dim()
        if sizes:
            gaps[-1] = rng.choice((0, 0, 0, 1, 3))
        padded = [size + gap for size, gap in zip(sizes, gaps, strict=True)]
        count = torch.Size(padded).numel()
        offset = BORDER + rng.randrange(8)
        buffer = torch.empty(count + offset + BORDER, dtype=tensor.dtype)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        size = (buffer.numel() * buffer.element_size(),)
        noise = torch.randint(0, 2, size, dtype=torch.uint8, generator=generator)
        buffer.view(torch.uint8).copy_(noise if tensor.dtype is torch.bool else 255 * noise)
        view = buffer[offset : offset + count].view(padded)
        for dim, size in enumerate(sizes):
            view = view.narrow(dim, 0, size)
        carved = view.copy_(permuted).permute([order.index(d) for d in range(tensor.dim())])
        self.buffers[name] = buffer, buffer.clone()
        return carved

    def check(self) -> None:
        for name, (buffer, before) in self.buffers.items():
            same = torch.equal(buffer.view(torch.uint8), before.view(torch.uint8))
            assert same, f"{name}, or what lies around it, was written"


# ---- right calls ---------------------------------------------------------------------------------


def check_draws(border: Border, make: Callable, check: Callable, few: int, many: int) -> None:
    """Checks cases of the draws 0, 1, ... together: real errors remain with more draws."""
    cases = [make(draw) for draw in range(few)]
    try:
        check(*cases)
    except AssertionError:
        check(*cases, *map(make, range(few, many)))
    border.check()


def carved(border: Border, draw: int, case, tensors: dict[str, Tensor]):
    """The case with these tensors inside larger buffers."""
    for name, tensor in tensors.items():
        setattr(case, name, border.carve(f"{name} {draw}", tensor))
    return case


def norm(rng: Random) -> None:
    dtype = rng.choice(DTYPES)
    add = rng.random() < 0.5
    narrow = (*norm_cases.FLOATS,) if dtype is not F64 else (F64,)
    rows = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
    options = {
        "weight": rng.random() < 0.8,
        "bias": rng.random() < 0.7,
        "residual": add,
        "weight_dtype": rng.choice(narrow),
        "residual_in": rng.choice(narrow) if add else None,
        "eps": rng.choice((1e-5, 1e-12, 0.1)),
    }
    if add and rng.random() < 0.5:
        options |= {"dropout_p": rng.choice((0.1, 0.5)), "residual_dtype": rng.choice(narrow)}
    rms = rng.random() < 0.5
    if rms and options["weight"]:
        options["weight_offset"] = rng.choice((0.0, 1.0))
    cols, border = rng.choice((8, 33, 64, 100, 257, 1000)), Border(rng)
    factor = rng.choice((1.0, 1.0, 1e-2, 30.0))

    def make(draw: int) -> norm_cases.Case:
        case = norm_cases.make(rms, rows, cols, dtype, seed=draw, **options)
        tensors = case.tensors()
        tensors |= {n: factor * t for n, t in tensors.items() if n in ("input", "residual")}
        return carved(border, draw, case, tensors)

    check_draws(border, make, norm_cases.check, 4, 20)


def modulated_norm(rng: Random) -> None:
    dtype, border = rng.choice(DTYPES), Border(rng)
    narrow = norm_cases.FLOATS if dtype is not F64 else (F64,)
    tokens = [rng.choice((1, 2, 3, 40)) for _ in range(rng.randint(1, 2))]
    size = rng.choice((1, 3)), *tokens, rng.choice((8, 33, 100, 257))
    form, per = rng.choice(forms.MODULATED), rng.choice(forms.PER)
    options = {"scale_dtype": rng.choice(narrow), "residual_dtype": rng.choice(narrow)}
    options |= {"rms": rng.random() < 0.5, "shift": rng.random() < 0.8}
    check_form(border, form, size, dtype, per, **options)


def check_form(border: Border, *arguments, **options) -> None:
    cases = []
    for draw in range(12):
        case = forms.make(*arguments, seed=draw, **options)
        case.tensors = {n: border.carve(f"{n} of {draw}", t) for n, t in case.tensors.items()}
        cases.append(case)
    forms.check(*cases)
    border.check()


def branch(rng: Random) -> None:
    dtype, border = rng.choice(DTYPES), Border(rng)
    narrow = norm_cases.FLOATS if dtype is not F64 else (F64,)
    tokens = [rng.choice((1, 2, 3, 40)) for _ in range(rng.randint(0, 2))]
    size = rng.choice((1, 3, 5)), *tokens, rng.choice((8, 33, 100, 257))
    form, scale = rng.choice(forms.BRANCHES), rng.choice(forms.SCALES)
    options = {"scale_dtype": rng.choice(narrow), "residual_dtype": rng.choice(narrow)}
    options |= {"p": rng.choice((0.0, 0.3)), "affine": rng.random() < 0.8}
    if form == "alone":
        del options["residual_dtype"]
    check_form(border, form, size, dtype, scale, **options)


def dropout(rng: Random) -> None:
    dtype, border, p = rng.choice(DTYPES), Border(rng), rng.choice((0.0, 0.1, 0.4, 1.0))
    shape = [rng.randint(0, 40) for _ in range(rng.randint(0, 3))]
    input, residual = (
        border.carve(name, torch.randn(shape).to(dtype)) for name in ("input", "residual")
    )
    seed = drawn_seed(7)
    torch.manual_seed(7)
    if rng.random() < 0.5:
        found, of = functional.dropout(input, p), reference.dropout.dropout
        ref, base = (of(t, p, seed) if p else t for t in (input.double(), input))
    else:
        found, of = functional.add_dropout(input, residual, p), reference.dropout.add_dropout
        pairs = (input.double(), residual.double()), (input, residual)
        ref, base = (of(*pair, p, seed) for pair in pairs)
    numerics.assert_close(found, ref, base, f"dropout {shape} {dtype} {p}")
    border.check()


def gate(rng: Random) -> None:
    dtype, border = rng.choice(DTYPES), Border(rng)
    narrow = gate_cases.DTYPES[:3] if dtype is not F64 else (F64,)
    rows = [rng.choice((1, 2, 3, 7)) for _ in range(rng.randint(0, 3))]
    cols, activation = rng.choice((7, 16, 33, 200)), rng.choice(gate_cases.ACTIVATIONS)
    form, up_dtype = rng.choice(gate_cases.FORMS), rng.choice(narrow)
    cases = []
    for draw in range(20):
        case = gate_cases.make(rows, cols, dtype, activation, form, up_dtype=up_dtype, seed=draw)
        tensors = (*case.factors, case.doutput)
        carved = [border.carve(f"{n} of {draw}", tensor) for n, tensor in enumerate(tensors)]
        case.factors, case.doutput = carved[:-1], carved[-1]
        cases.append(case)
    gate_cases.check(*cases)
    border.check()


def group_norm(rng: Random) -> None:
    dtype, border = rng.choice(DTYPES), Border(rng)
    groups, size = rng.choice((1, 2, 5)), rng.choices((3, 7, 33), k=rng.randint(1, 3))
    shape = (rng.choice((1, 3)), groups * rng.choice((2, 3, 16)), *size)
    options = {key: rng.random() < 0.8 for key in ("last", "weight", "bias")}

    def make(draw: int) -> group_norm_cases.Case:
        case = group_norm_cases.make(shape, groups, dtype, seed=draw, **options)
        case.tensors[0] = border.carve(f"input {draw}", case.input)
        return carved(border, draw, case, {"doutput": case.doutput})

    check_draws(border, make, group_norm_cases.check, 6, 30)


def loss(rng: Random) -> None:
    dtype, border = rng.choice(DTYPES), Border(rng)
    rows, cols = rng.choice((1, 2, 3, 7)), rng.choice((2, 7, 16, 33, 200))
    options = dict(loss_cases.OPTIONS[rng.choice(list(loss_cases.OPTIONS))])
    cases = []
    for draw in range(20):
        case = loss_cases.make(rows, cols, dtype, seed=draw, **options)
        cases.append(carved(border, draw, case, {"input": case.input, "target": case.target}))
    for few in (cases[:10], cases[10:]) if dtype.itemsize == 2 else (cases,):
        loss_cases.check(*few)
    border.check()


def linear_loss(rng: Random) -> None:
    dtype, border = rng.choice(DTYPES), Border(rng)
    sizes = rng.choice((1, 7, 20, 300)), rng.choice((1, 8, 33)), rng.choice((2, 16, 33, 200))
    options = dict(loss_cases.OPTIONS[rng.choice(list(loss_cases.OPTIONS))])
    options["bias"] = rng.random() < 0.5

    def make(draw: int) -> loss_cases.Case:
        case = loss_cases.make_linear(*sizes, dtype, seed=draw, **options)
        return carved(border, draw, case, case.operands | {"target": case.target})

    check_draws(border, make, loss_cases.check, 6, 100)


def rotary(rng: Random) -> None:
    dtype, border = rng.choice(DTYPES), Border(rng)
    head_dim, batch = rng.choice((6, 16, 45, 64, 80)), rng.randint(0, 3)
    positions = rng.choice(("", "tokens", "batch"))
    case = rotary_cases.Case(
        dtype, rng.choice(DTYPES[:3]) if dtype is not F64 else F64, batch=batch,
        heads=rng.randint(0, 9), key_heads=rng.randint(0, 3), tokens=rng.choice((0, 1, 2, 7, 90)),
        head_dim=head_dim, rotary_dim=rng.choice((head_dim // 2 * 2, head_dim // 4 * 2)),
        half_width=rng.random() < 0.5, interleaved=rng.random() < 0.5, positions=positions,
        table_batch=0 if positions else rng.choice((0, 1, batch)), tokens_first=rng.random() < 0.5,
        seq_first=rng.random() < 0.5,
        norms=rng.choice(((), ("query",), ("key",), ("query", "key"))),
        weight_dtype=rng.choice(DTYPES[:3]) if dtype is not F64 else F64,
        eps=rng.choice((None, 1e-6, 0.1)), weight_offset=rng.choice((0.0, 1.0)),
        seed=rng.randrange(2**31),
    )  # fmt: skip
    if not case.key_heads:
        case = replace(case, norms=tuple(name for name in case.norms if name == "query"))

    def make(draw: int) -> dict[str, torch.Tensor]:
        tensors = replace(case, seed=case.seed + draw).tensors()
        return {name: border.carve(f"{name} {draw}", t) for name, t in tensors.items()}

    check_draws(border, make, partial(rotary_cases.check_tensors, case), 1, 20)


def linear(rng: Random) -> None:
    dtype = rng.choice(DTYPES)
    narrow = linear_cases.FLOATS if dtype is not F64 else (F64,)
    rows = [rng.choice((1, 2, 3, 9, 20)) for _ in range(rng.randint(1, 3))]
    rows[1:] = (min(count, 4) for count in rows[1:])
    sizes = [rng.choice((7, 16, 33, 100, 200)) for _ in range(2)]
    more = {f"{name}_dtype": rng.choice(narrow) for name in ("weight", "bias")}
    more["bias"] = rng.random() < 0.7
    border = Border(rng)

    def make(draw: int) -> linear_cases.Case:
        # Of few rows or columns torch's product sums lane by lane.
        case = linear_cases.make((8 + rows[0], *rows[1:]), *sizes, dtype, seed=draw, **more)
        return carved(border, draw, case, case.tensors() | {"doutput": case.doutput})

    check_draws(border, make, linear_cases.check, 8, 80)


def lengths(rng: Random, count: int, longest: int) -> tuple[tuple[int, int], ...]:
    return tuple((rng.randint(16, longest), rng.randint(16, longest)) for _ in range(count))


def attention(rng: Random) -> None:
    kv_heads = rng.randint(1, 2)
    dtype = rng.choice(DTYPES)
    storage = rng.choice(("dense", "dense", "used", "packed", "packed used", "paged"))
    patterns = ("", "b", "h", "q", "bh", "bq", "hq", "bhq")
    case = attention_cases.Case(
        dtype=dtype, head_dim=rng.choice((8, 16, 24, 40, 64)), value_dim=rng.choice((0, 0, 16, 33)),
        batch=rng.randint(1, 2), heads=kv_heads * rng.randint(1, 2), kv_heads=kv_heads,
        seq_q=rng.randint(16, 70), seq_k=rng.randint(16, 70),
        # A row of one key has little meaning: its gradients are rounding errors.
        window_left=rng.choice((-1, -1, 5, 9, 40)), window_right=rng.choice((-1, 0, 0, 7)),
        bottom_right=rng.random() < 0.5, bias=rng.choice((None, None, *patterns)),
        mask=rng.choice((None, None, *patterns)), alibi=rng.choice((None, None, "", "b")),
        sinks=rng.choice((None, None, dtype)), softcap=rng.choice((0.0, 0.0, 1.5, 30.0)),
        # Not 0.2: 1.249998 times few bits is always a bit below a tie, and all roundings go down.
        dropout_p=rng.choice((0.0, 0.0, 0.3)), dlse=rng.random() < 0.5, storage=storage,
        lengths=() if storage == "dense" else lengths(rng, rng.randint(1, 3), 60),
        page_size=rng.choice((1, 3, 16)), factor=rng.choice((0.3, 1.0, 1.3)),
    )  # fmt: skip

    def compute(case):
        border, plain = Border(rng), case.tensors()
        found = attention_cases.ours(
            case, {name: border.carve(name, tensor) for name, tensor in plain.items()}
            | {n: t for n, t in plain.items() if n == "seed"}
        )  # fmt: skip
        border.check()
        ref = attention_cases.definition(case, plain, F64)
        return found, ref, ref if case.dtype is F64 else attention_cases.base(case, plain)

    attention_cases.check(case, compute)


def decode(rng: Random) -> None:
    kv_heads = rng.randint(1, 2)
    dtype = rng.choice(attention_decode_cases.DTYPES)
    page = rng.choice((0, 0, 1, 4, 16))
    window = rng.choice((-1, -1, 0, 3, 20)), rng.choice((-1, 0))
    case = attention_decode_cases.Case(
        dtype=dtype, head_dim=rng.choice((8, 16, 24, 64)), value_dim=rng.choice((0, 0, 16, 33)),
        heads=kv_heads * rng.randint(1, 4), kv_heads=kv_heads, seq_q=rng.randint(1, 5),
        lengths=tuple(rng.randint(0, 60) for _ in range(rng.randint(1, 3))),
        new_rows=rng.choice((-1, 1, 1, 3)), page_size=page,
        pads=() if page or rng.random() < 0.5 else (0, 2),
        scattered=not page and rng.random() < 0.5, window_left=window[0], window_right=window[1],
        softcap=rng.choice((0.0, 0.0, 5.0)), alibi=rng.choice((None, None, "", "b")),
        sinks=rng.choice((None, None, dtype)),
        rotary=rng.choice((None, None, "interleaved", "halves")), out_bshd=rng.random() < 0.5,
    )  # fmt: skip
    attention_decode_cases.check(case)


# ---- wrong calls ---------------------------------------------------------------------------------

NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 1, 3, 1000, 2**31, 2**40, 2**62, 2**63 - 1)
FLOATS = (0.0, 1.0, -1.0, 1e300, -1e300, 1e-300, float("inf"), -float("inf"), float("nan"))
# Errors that a call with wrong arguments may raise.
OTHERS = (RuntimeError, TypeError, ValueError, IndexError, MemoryError, OverflowError)


class OtherNumbers(TorchDispatchMode):
    """Replaces a number among the arguments of our operators."""

    def __init__(self, rng: Random):
        super().__init__()
        self.rng = rng

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace != "onepass" or "table" in str(function):
            return function(*args, **kwargs)
        args, kwargs = list(args), dict(kwargs)
        schema = function._schema.arguments
        numbers = [
            (index, argument)
            for index, argument in enumerate(schema)
            if str(argument.type) in ("int", "float", "bool", "Optional[float]")
            and argument.name not in ("table", "dropout_p")
        ]
        for index, argument in self.rng.sample(numbers, min(len(numbers), 2)):
            values = (True, False) if str(argument.type) == "bool" else (
                NUMBERS if str(argument.type) == "int" else FLOATS
            )  # fmt: skip
            value = self.rng.choice(values)
            if index < len(args):
                args[index] = value
            else:
                kwargs[argument.name] = value
        return function(*args, **kwargs)


def altered(rng: Random, tensor: Tensor, written: bool) -> object:
    """An unexpected tensor, of any class that has memory."""
    how = rng.randrange(6)
    if how == 0:
        classes = [c for c in CLASSES if c.kind == REAL and (c.written or not written)]
        made = rng.choice(classes).make(tensor)
        return tensor if made is None else made
    if how == 1:
        dtypes = (*DTYPES, torch.int32, torch.int64, torch.bool, torch.uint8, torch.complex64)
        return tensor.to(rng.choice(dtypes))
    if how == 2 and tensor.dim():
        dim = rng.randrange(tensor.dim())
        size = max(0, tensor.shape[dim] + rng.choice((-1, 1, 5, -tensor.shape[dim])))
        shape = [size if d == dim else n for d, n in enumerate(tensor.shape)]
        return torch.resize_as_(tensor.clone(), tensor.new_zeros(shape)).zero_()
    if how == 3:
        return tensor.unsqueeze(0) if rng.random() < 0.5 else tensor.flatten()
    values = (
        (0.0, float("nan"), float("inf"), -float("inf"), 3e38, 1e-45)
        if tensor.is_floating_point()
        else (0, 1, -1, 5, 2**31 - 1, -(2**31))
    )
    if tensor.dtype is torch.bool:
        values = (0, 1)
    other = tensor.clone()
    if other.numel():
        flat = other.view(-1)
        for _ in range(rng.choice((1, 1, flat.numel()))):
            flat[rng.randrange(flat.numel())] = rng.choice(values)
    return other


def wrong(rng: Random) -> None:
    name = rng.choice(sorted(CALLS))
    call = CALLS[name]
    tensors = dict(call.tensors())
    for argument in rng.sample(sorted(tensors), min(len(tensors), rng.choice((0, 1, 1, 2, 3)))):
        tensors[argument] = altered(rng, tensors[argument], argument in call.written)
    before = {key: memory_of(tensor) for key, tensor in tensors.items()}
    error = None
    try:
        if name.startswith("ops.") or (call.differentiable and rng.random() < 0.5):
            with OtherNumbers(rng):
                call.run(**tensors)
        else:
            call.run(**tensors)
    except OTHERS as raised:
        error = raised
    except AssertionError as raised:  # torch's multi-head attention checks by assert
        if not call.composed:
            raise
        error = raised
    assert error is None or call.composed or not INTERNAL.search(str(error)), repr(error)
    after = {key: memory_of(tensor) for key, tensor in tensors.items()}
    may = call.written if error is None else ()
    changed = [key for key in before if before[key] != after[key] and key not in may]
    assert not changed, f"{name}: {changed} changed; {error!r}"


# ---- all of them ---------------------------------------------------------------------------------

FUNCTIONS = (
    norm, dropout, attention, decode, wrong, group_norm, rotary, gate, linear, modulated_norm,
    loss, branch, linear_loss,
)  # fmt: skip
KINDS = {function.__name__: function for function in FUNCTIONS}
WEIGHTS = dict.fromkeys(KINDS, 6) | {"norm": 8, "attention": 5, "wrong": 57, "linear_loss": 4}


def kind_of(rng: Random) -> str:
    return rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]


def run(seed: int, index: int) -> None:
    """Raises if a case goes wrong."""
    rng = Random(f"{seed}/{index}")
    torch.default_generator.manual_seed(rng.randrange(2**31))
    KINDS[kind_of(rng)](rng)


def complaint(seed: int, index: int) -> str | None:
    try:
        run(seed, index)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]
    return None


def prepare() -> None:
    """Sets up a child: one thread, no warnings, and a limit to its memory."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):  # which reserves terabytes
        return
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limit))


def fuzz(seed: int, first: int, last: int) -> dict[int, str]:
    """{case: error} for the cases [first, last); each runs in a forked child."""
    found = {}
    for begin in range(first, last, CHUNK):
        numbers = [str(n) for n in range(begin, min(last, begin + CHUNK))]
        results = isolated.each(lambda n: complaint(seed, int(n)), numbers, SECONDS, prepare)
        found |= {int(n): text for n, text in results.items() if text is not None}
    return found


def command(seed: int, index: int) -> str:
    return f"python -m tests.faults.fuzz --seed {seed} --only {index}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    if arguments.only is not None:
        torch.set_num_threads(1)
        run(arguments.seed, arguments.only)
        print("right")
        return 0
    last = arguments.first + arguments.cases
    print(f"seed {arguments.seed}, cases {arguments.first} to {last - 1}", flush=True)
    found = fuzz(arguments.seed, arguments.first, last)
    for index, text in found.items():
        print(f"{index}: {text}\n    {command(arguments.seed, index)}")
    print(f"{len(found)} of {arguments.cases} are wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
