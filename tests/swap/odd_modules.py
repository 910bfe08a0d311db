"""Odd arguments of modules that take one tensor: inputs, changes after the swap, and modules."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.swap.foreign_linear import Plain
from tests.swap.foreign_norms import RMS, GammaBeta, LayerNormOverridden
from tests.swap.small_models import adaptive, conv1d
from tests.swap.test_mlp import WIDTH, Llamas

COLS = 8


class Case(NamedTuple):
    """A call: its arguments, made anew for each module; a change of the module before it."""

    name: str
    arguments: Callable[[], tuple[list, dict]]
    change: Callable[[nn.Module], None] | None = None
    random: bool = False  # values are not compared
    ordered: bool = True  # the results' memory order is compared


class Odd(NamedTuple):
    """A module, its usual input's shape and dtype, and the part of it that changes are made to."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    part: str = ""


class Subclass(Tensor):
    pass


def strided(shape, dtype, leap: int = 2) -> Tensor:
    """Every second element of the last dimension."""
    return torch.randn(*shape[:-1], leap * shape[-1]).to(dtype)[..., ::leap]


def turned(x: Tensor) -> Tensor:
    """With its dimensions in the reverse order."""
    return x.permute(*range(x.dim() - 1, -1, -1))


def of_dtype(dtype: torch.dtype, wanted: bool = False) -> Callable:
    return lambda s, _: torch.randn(s).mul(3).to(dtype).requires_grad_(wanted)


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
INPUTS: dict[str, Callable] = {
    "usual": lambda s, d: torch.randn(s).to(d),
    "with a gradient": lambda s, d: torch.randn(s).to(d).requires_grad_(),
    "0-d": lambda s, d: torch.randn(()).to(d),
    "one row": lambda s, d: torch.randn(s[-1]).to(d).requires_grad_(),
    "one wrong row": lambda s, d: torch.randn(s[-1] + 1).to(d),
    "wrong columns": lambda s, d: torch.randn(*s[:-1], s[-1] + 1).to(d),
    "one column": lambda s, d: torch.randn(*s[:-1], 1).to(d),
    "no sample": lambda s, d: torch.randn(0, *s[1:]).to(d).requires_grad_(),
    "nothing in the middle": lambda s, d: torch.randn(s[0], 0, *s[2:]).to(d).requires_grad_(),
    "no column": lambda s, d: torch.randn(*s[:-1], 0).to(d),
    "nothing": lambda s, d: torch.randn(0).to(d),
    "one more dimension": lambda s, d: torch.randn(2, *s).to(d).requires_grad_(),
    "one dimension fewer": lambda s, d: torch.randn(s[1:]).to(d).requires_grad_(),
    "six dimensions": lambda s, d: torch.randn(*(1,) * (6 - len(s)), *s).to(d).requires_grad_(),
    "all sizes one but the last": lambda s, d: torch.randn(*(1,) * (len(s) - 1), s[-1]).to(d),
    "odd strides of size 1": lambda s, d: (
        torch.randn(s).to(d)[:1].as_strided((1, *s[1:]), (7, *torch.randn(s).stride()[1:]))
    ),
    "transposed": lambda s, d: turned(torch.randn(s[::-1]).to(d)).requires_grad_(),
    "first dimensions swapped": lambda s, d: (
        torch.randn(s[1], s[0], *s[2:]).to(d).transpose(0, 1).requires_grad_()
    ),
    "last dimensions swapped": lambda s, d: (
        torch.randn(*s[:-2], s[-1], s[-2]).to(d).transpose(-1, -2).requires_grad_()
    ),
    "every second column": lambda s, d: strided(s, d).requires_grad_(),
    "an offset": lambda s, d: torch.randn(s[0] + 1, *s[1:]).to(d)[1:],
    "expanded rows": lambda s, d: torch.randn(1, *s[1:]).to(d).expand(s).requires_grad_(),
    "expanded columns": lambda s, d: torch.randn(*s[:-1], 1).to(d).expand(s).requires_grad_(),
    "overlapping": lambda s, d: torch.randn(200).to(d).as_strided(s, tuple(range(len(s), 0, -1))),
    "channels last": lambda s, d: (
        torch.randn(s[0], *s[2:], s[1]).to(d).movedim(-1, 1).requires_grad_()
    ),
    # With a gradient: else torch 2.13's group norm reads memory that is not its own.
    "channels last without samples": lambda s, d: (
        torch.randn(0, *s[2:], s[1]).to(d).movedim(-1, 1).requires_grad_()
    ),
    "channels last, one sample": lambda s, d: (
        torch.randn(1, *s[2:], s[1]).to(d).movedim(-1, 1).requires_grad_()
    ),
    **{str(dtype).rpartition(".")[2]: of_dtype(dtype) for dtype in DTYPES},
    **{
        f"{str(dtype).rpartition('.')[2]} with a gradient": of_dtype(dtype, wanted=True)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64)
    },
    "conjugate": lambda s, d: torch.randn(s, dtype=torch.cfloat).conj(),
    "negative view": lambda s, d: torch._neg_view(torch.randn(s).to(d)),
    "meta": lambda s, d: torch.randn(s, device="meta", dtype=d),
    "meta with a gradient": lambda s, d: torch.randn(s, device="meta", dtype=d).requires_grad_(),
    "sparse": lambda s, d: torch.randn(s).to(d).to_sparse(),
    "a parameter": lambda s, d: nn.Parameter(torch.randn(s).to(d)),
    "a subclass": lambda s, d: torch.randn(s).to(d).as_subclass(Subclass),
    "made in inference mode": lambda s, d: torch.inference_mode()(torch.randn)(s).to(d),
    "a list": lambda s, d: torch.randn(s).tolist(),
    "none": lambda s, d: None,
    "a number": lambda s, d: 1.5,
    "infinite": lambda s, d: torch.full(s, float("inf")).to(d).requires_grad_(),
    "nan": lambda s, d: torch.full(s, float("nan")).to(d).requires_grad_(),
    "zeros": lambda s, d: torch.zeros(s).to(d).requires_grad_(),
    "large": lambda s, d: torch.randn(s).mul(1e30).to(d).requires_grad_(),
    "small": lambda s, d: torch.randn(s).mul(1e-30).to(d).requires_grad_(),
}

SIGNATURES: dict[str, Callable] = {
    "by its name": lambda x: ([], {"input": x}),
    "by the name x": lambda x: ([], {"x": x}),
    "by an unknown name": lambda x: ([], {"unknown": x}),
    "twice": lambda x: ([x, x], {}),
    "by position and name": lambda x: ([x], {"input": x}),
    "nothing given": lambda x: ([], {}),
}

_A_TENSOR = torch.tensor(1e-3)
NUMBERS = {
    "zero": 0,
    "one": 1,
    "True": True,
    "negative": -100.0,
    "large": 1.5,
    "huge": 1e300,
    "tiny": 1e-300,
    "nan": float("nan"),
    "infinite": float("inf"),
    "none": None,
    "text": "x",
    "a tensor": _A_TENSOR,
    "a tensor with a gradient": _A_TENSOR.clone().requires_grad_(),
    "a tensor of one element": _A_TENSOR[None],
    "complex": 1j,
}
TENSORS: dict[str, Callable] = {
    "none": lambda w: None,
    "float64": lambda w: w.double(),
    "float32": lambda w: w.float(),
    "float16": lambda w: w.half(),
    "bfloat16": lambda w: w.bfloat16(),
    "complex": lambda w: w.to(torch.cfloat),
    "meta": lambda w: w.to("meta"),
    "one element": lambda w: w.flatten()[:1],
    "0-d": lambda w: w.flatten()[0],
    "no element": lambda w: w[:0],
    "one element fewer": lambda w: w[:-1],
    "one more dimension": lambda w: w[None],
    "strided": lambda w: w.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda w: w[..., :1].expand(w.shape),
    "transposed": lambda w: turned(turned(w).contiguous()),
    "sparse": lambda w: w.to_sparse(),
}


def set_number(name: str, value) -> Callable:
    def change(part):
        getattr(part, name)
        setattr(part, name, value)

    return change


def set_tensor(name: str, make: Callable) -> Callable:
    def change(part):
        weight = getattr(part, name)
        if weight is None:
            return
        made = make(weight.detach().clone())
        setattr(part, name, made if made is None else nn.Parameter(made))

    return change


def set_plain(name: str) -> Callable:
    """A tensor in place of the parameter, as functional code sets it."""

    def change(part):
        weight = getattr(part, name).detach().clone()
        delattr(part, name)
        setattr(part, name, weight)

    return change


def delete(name: str) -> Callable:
    return lambda part: delattr(part, name)


def freeze(name: str) -> Callable:
    return lambda part: getattr(part, name).requires_grad_(False)


def on_part(name: str, change: Callable) -> Callable:
    return lambda module: change(module.get_submodule(name))


def keyed(*values) -> dict:
    return {str(value): value for value in values}


ATTRIBUTES = {
    **dict.fromkeys(("label_smoothing", "eps", "p"), NUMBERS),
    "reduction": keyed("none", "sum", "x", None, 1),
    "ignore_index": keyed(0, 3, -1, 1.0, None, 10**30, torch.tensor(2)),
    "normalized_shape": keyed(
        8, (8,), [8], (4, 8), (8.0,), 8.0, (), (9,), (0,), (-1,), None, "8", (1, 8)
    ),
    "num_groups": keyed(1, 3, 8, 0, -1, 2.0, 2.5, True, None, "2", 16, torch.tensor(2)),
    "inplace": keyed(True, 1, 0, None, "x", []),
    "training": keyed(False, 1, 0, None, "x", torch.tensor(True)),
}
CHANGES = {
    **{
        f"{name}: {key}": set_number(name, value)
        for name, values in ATTRIBUTES.items()
        for key, value in values.items()
    },
    **{
        f"{name}: {key}": set_tensor(name, make)
        for name in ("weight", "bias")
        for key, make in TENSORS.items()
    },
    **{f"{name}: a tensor": set_plain(name) for name in ("weight", "bias")},
    **{f"no {name}": delete(name) for name in ("weight", "bias")},
    **{f"{name} without a gradient": freeze(name) for name in ("weight", "bias")},
    "in eval mode": lambda part: part.eval(),
    "in float64": lambda part: part.double(),
    "in bfloat16": lambda part: part.bfloat16(),
    "in float16": lambda part: part.half(),
    "on meta": lambda part: part.to("meta"),
    "without gradients": lambda part: part.requires_grad_(False),
}
# The inputs with which changes are tried; of numbers and flags the first alone.
WITH_CHANGES = ("with a gradient", "bfloat16 with a gradient")
# The inputs of other contexts than the usual one.
WITH_CONTEXTS = (
    "usual",
    "with a gradient",
    "no sample",
    "float64",
    "float16 with a gradient",
    "bfloat16 with a gradient",
    "complex64 with a gradient",
    "int64",
    "made in inference mode",
    "channels last",
    "every second column",
    "wrong columns",
)


class Conditioned(nn.Module):
    """An adaptive norm with a conditioning of its own."""

    def __init__(self):
        super().__init__()
        self.norm = adaptive()

    def forward(self, input):
        return self.norm(input, torch.ones(input.shape[0], 64, dtype=self.norm.linear.weight.dtype))


class ByHand(nn.Module):
    """Attention of one head, written by hand."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(COLS, 3 * COLS)

    def forward(self, input):
        query, key, value = self.qkv(input).unsqueeze(-3).chunk(3, -1)
        scores = query @ key.transpose(-2, -1) * COLS**-0.5
        return (scores.softmax(-1) @ value).squeeze(-3)


class WithLoss(nn.Module):
    """A criterion with targets."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, input):
        return self.loss(input, torch.arange(input.shape[0]))


ROWS = (3, 4, COLS)
IMAGE = (3, COLS, 4, 5)
MODULES = {
    "LayerNorm": Odd(lambda: nn.LayerNorm(COLS), ROWS),
    "LayerNorm of two dimensions": Odd(lambda: nn.LayerNorm(ROWS[1:]), ROWS),
    "LayerNorm without weight": Odd(lambda: nn.LayerNorm(5, elementwise_affine=False), IMAGE),
    "RMSNorm": Odd(lambda: nn.RMSNorm(COLS), ROWS),
    "RMSNorm of two dimensions": Odd(lambda: nn.RMSNorm(ROWS[1:], eps=1e-3), ROWS),
    "RMSNorm without weight": Odd(lambda: nn.RMSNorm(5, elementwise_affine=False), IMAGE),
    "GroupNorm in bfloat16": Odd(lambda: nn.GroupNorm(2, COLS).bfloat16(), IMAGE, torch.bfloat16),
    "GroupNorm in float16": Odd(
        lambda: nn.GroupNorm(2, COLS, affine=False).half(), (3, COLS), torch.float16
    ),
    "GroupNorm, SiLU": Odd(
        lambda: nn.Sequential(nn.GroupNorm(2, COLS), nn.SiLU()), IMAGE, part="0"
    ),
    "GroupNorm, SiLU in bfloat16": Odd(
        lambda: nn.Sequential(nn.GroupNorm(2, COLS), nn.SiLU()).bfloat16(),
        (3, COLS, 4),
        torch.bfloat16,
        part="0",
    ),
    "RMS": Odd(lambda: RMS(COLS), ROWS),
    "GammaBeta": Odd(lambda: GammaBeta(COLS), ROWS),
    "LayerNormOverridden": Odd(lambda: LayerNormOverridden(COLS), ROWS),
    "Dropout": Odd(lambda: nn.Dropout(0.5), IMAGE),
    "Dropout of all": Odd(lambda: nn.Dropout(1.0), IMAGE),
    "Dropout in place": Odd(lambda: nn.Dropout(0.5, inplace=True), ROWS),
    "Linear": Odd(lambda: nn.Linear(COLS, 6), ROWS),
    "Linear in bfloat16": Odd(lambda: nn.Linear(COLS, 6).bfloat16(), ROWS, torch.bfloat16),
    "F.linear": Odd(lambda: Plain(COLS), ROWS),
    "Conv1D": Odd(conv1d, (3, 4, 16)),
    "CrossEntropyLoss": Odd(WithLoss, (6, COLS), part="loss"),
    "adaptive norm": Odd(Conditioned, (3, 4, 64), part="norm.norm"),
    "attention by hand": Odd(ByHand, ROWS, part="qkv"),
    "gated block": Odd(Llamas, (3, 4, WIDTH), part="gate_proj"),
}


def cases(odd: Odd) -> list[Case]:
    """All cases of a module."""

    def on_input(make: Callable):
        return lambda: ([make(odd.shape, odd.dtype)], {})

    random = isinstance(odd.make(), nn.Dropout)
    found = [Case(name, on_input(make), None, random) for name, make in INPUTS.items()]
    usual = INPUTS["usual"]
    for name, arguments in SIGNATURES.items():
        found.append(Case(name, lambda a=arguments: a(usual(odd.shape, odd.dtype)), None, random))
    part = odd.make().get_submodule(odd.part)
    for name, change in CHANGES.items():
        try:
            change(copy.deepcopy(part))
        except AttributeError:  # it has no such attribute
            continue
        except Exception:  # it is the change that is refused, in both modules
            pass
        for of in WITH_CHANGES if name.startswith(("weight", "bias", "in ")) else WITH_CHANGES[:1]:
            found.append(
                Case(f"{name}, {of}", on_input(INPUTS[of]), on_part(odd.part, change), random)
            )
    return found
