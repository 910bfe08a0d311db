"""The norm family under one signature, so that a test body serves all four functions."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, numerics, reference
from tests.support.seeds import drawn_seed, set_seed
from tests.support.threads import one_thread

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KINDS = list(itertools.product((False, True), (False, True)))
kinds = pytest.mark.parametrize(
    "rms, residual", KINDS, ids=["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"]
)

# Columns for each CUDA kernel: one, two and four packs per thread in a warp, a block, several warps
# that do not fill, tails that no pack divides; and rows too long for registers.
ALIGNED = [8, 256, 264, 1000, 1024, 2056, 4104]
UNALIGNED = [1, 7, 33, 1023, 2049, 16383]
LONG = {torch.float32: 16392, torch.bfloat16: 16392, torch.float16: 16392, torch.float64: 8200}


@dataclass
class Case:
    """One call: which norm, its tensors, and the upstream gradients."""

    rms: bool
    input: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    shape: tuple[int, ...] | None = None
    eps: float = 1e-5
    weight_offset: float = 0.0
    residual_dtype: torch.dtype | None = None
    dropout_p: float = 0.0
    gradients: tuple[Tensor | None, ...] = field(default=(), repr=False)

    def __post_init__(self):
        self.shape = self.shape or tuple(self.input.shape[-1:])

    @property
    def name(self) -> str:
        return ("add_" if self.residual is not None else "") + (
            "rms_norm" if self.rms else "layer_norm"
        )

    @property
    def text(self) -> str:
        def describe(tensor):
            return "-" if tensor is None else f"{str(tensor.dtype)[6:]}{tuple(tensor.shape)}"

        parts = ("input", "residual", "weight", "bias")
        return f"{self.name} " + " ".join(f"{p}={describe(getattr(self, p))}" for p in parts)

    def tensors(self) -> dict[str, Tensor]:
        named = {p: getattr(self, p) for p in ("input", "residual", "weight", "bias")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def ours(self, input, residual=None, weight=None, bias=None):
        keywords = {"weight_offset": self.weight_offset} if self.rms else {}
        rest = (weight, self.eps) if self.rms else (weight, bias, self.eps)
        if residual is None:
            return (getattr(functional, self.name)(input, self.shape, *rest, **keywords),)
        keywords |= {"dropout_p": self.dropout_p, "residual_dtype": self.residual_dtype}
        set_seed(5)
        return getattr(functional, self.name)(input, residual, self.shape, *rest, **keywords)

    def dropped(self, input):
        if not self.dropout_p:
            return input
        return reference.dropout.dropout(input, self.dropout_p, drawn_seed(5, input.device))

    def definition(self, input, residual=None, weight=None, bias=None):
        """The reference in float64; residual_out is rounded as the operator rounds it."""
        x = input
        if residual is not None:
            x = residual + self.dropped(input)
            # The norm is that of the rounded sum; its gradient passes through the rounding.
            dtype = self.residual_dtype or self.residual.dtype
            x = x + (x.detach().to(dtype).double() - x.detach())
        if self.rms:
            y = reference.norm.rms_norm(
                x, self.shape, weight, self.eps, weight_offset=self.weight_offset
            )
        else:
            y = reference.norm.layer_norm(x, self.shape, weight, bias, self.eps)
        return (y,) if residual is None else (y, x)

    def stock(self, input, residual=None, weight=None, bias=None):
        """torch's own functions in the call's dtypes."""
        x = input
        if residual is not None:
            x = (residual + self.dropped(input)).to(self.residual_dtype or residual.dtype)
        if self.rms:
            scaled = weight + self.weight_offset if weight is not None else None
            y = F.rms_norm(x, self.shape, scaled, self.eps)
        else:
            # F.layer_norm on CPU wants 16-bit weights to have the input's dtype, or float32.
            plain = all(t is None or t.dtype == x.dtype for t in (weight, bias))
            wide = x.dtype if plain or x.dtype.itemsize > 2 else torch.float32
            weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
            if weight is None and bias is not None and wide != x.dtype:
                weight = torch.ones_like(bias)  # its backward mistakes the dtype without one
            of = x.to(wide) if x.is_cuda else x  # on CUDA it takes no mix at all
            y = F.layer_norm(of, self.shape, weight, bias, self.eps)
        y = y.to(input.dtype)
        return (y,) if residual is None else (y, x)


def outputs_and_gradients(function, case: Case, *, double: bool = False, wrt=None):
    """({output name: value}, {argument name: gradient}) of one of a Case's three functions."""

    def leaf(name, tensor):
        tensor = tensor.detach()
        tensor = tensor.double() if double else tensor
        return tensor.requires_grad_(wrt is None or name in wrt)

    # Strided inputs stay strided: only a change of dtype copies.
    leaves = {name: leaf(name, tensor) for name, tensor in case.tensors().items()}
    outputs = function(**leaves)
    upstream = case.gradients or tuple(torch.ones_like(output) for output in outputs)
    pairs = [
        (output, gradient.to(output.dtype))
        for output, gradient in zip(outputs, upstream, strict=True)
        if gradient is not None and output.requires_grad
    ]
    asked = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    gradients = torch.autograd.grad(
        [output for output, _ in pairs],
        list(asked.values()),
        [gradient for _, gradient in pairs],
        allow_unused=True,
    )
    named = dict(zip(("y", "residual_out"), outputs, strict=False))
    return {k: v.detach() for k, v in named.items()}, dict(zip(asked, gradients, strict=True))


def check(*cases: Case, wrt=None) -> None:
    """Every output and gradient of the cases, pooled, by the numerics rule."""
    results = []
    for case in cases:
        if not case.gradients:
            generator = torch.Generator().manual_seed(7)
            dtypes = [case.input.dtype]
            if case.residual is not None:
                dtypes.append(case.residual_dtype or case.residual.dtype)
            case.gradients = tuple(
                torch.randn(case.input.shape, generator=generator).to(case.input.device, dtype)
                for dtype in dtypes
            )
        before = {name: tensor.clone() for name, tensor in case.tensors().items()}
        ours = outputs_and_gradients(case.ours, case, wrt=wrt)
        with one_thread():  # torch adds up a few rows in as many parts as it has threads
            exact = outputs_and_gradients(case.definition, case, double=True, wrt=wrt)
            results.append([ours, exact, outputs_and_gradients(case.stock, case, wrt=wrt)])
        for name, tensor in case.tensors().items():
            assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), (
                f"{name} was written"
            )
    first = cases[0]
    for part, kind in enumerate(("", "gradient of ")):
        for name in results[0][0][part]:
            ours, ref, base = ([r[i][part][name] for r in results] for i in range(3))
            if ours[0] is None:
                assert ref[0] is None or not ref[0].any(), f"{first.text}: no {kind}{name}"
                continue
            expected = {"residual_out": first.residual_dtype or _dtype(first.residual)}
            dtype = expected.get(name, _dtype(getattr(first, name, first.input)))
            assert ours[0].dtype == dtype, f"{first.text}: {kind}{name} is {ours[0].dtype}"
            numerics.assert_close(ours, ref, base, f"{first.text}: {kind}{name}")


def check_draws(*arguments, draws: int, wrt=None, **keywords) -> None:
    """Several draws of one case, pooled."""
    check(*(make(*arguments, seed=seed, **keywords) for seed in range(draws)), wrt=wrt)


def results(case: Case) -> list[Tensor]:
    """Outputs and gradients of one call."""
    return [value for of in outputs_and_gradients(case.ours, case) for value in of.values()]


def _dtype(tensor: Tensor | None):
    return None if tensor is None else tensor.dtype


def make(
    rms: bool,
    rows,
    cols: int,
    dtype=torch.float32,
    *,
    weight=True,
    bias=True,
    residual=False,
    weight_dtype=None,
    residual_in=None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **keywords,
) -> Case:
    """A random Case of shape (*rows, cols), the same on every device; dtypes as asked."""
    generator = torch.Generator().manual_seed(seed)
    size = (*((rows,) if isinstance(rows, int) else rows), cols)

    def random(shape, dtype):
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight_dtype = weight_dtype or dtype
    return Case(
        rms,
        random(size, dtype),
        random(size, residual_in or dtype) if residual else None,
        random((cols,), weight_dtype) if weight else None,
        random((cols,), weight_dtype) if bias and not rms else None,
        **keywords,
    )


def mixes(residual: bool):
    """(input, weight, residual) dtypes: all pairs of each two, not the full product."""
    if not residual:
        return [(i, w, None) for i, w in itertools.product(FLOATS, FLOATS)]
    return [
        (i, w, r)
        for i, w, r in itertools.product(FLOATS, FLOATS, FLOATS)
        if (FLOATS.index(i) + FLOATS.index(w) + FLOATS.index(r)) % 3 == 0
    ]


def raw_forward(input: Tensor, **arguments):
    """The op itself; missing tensors are left out, the row is the last dimension."""
    defaults = dict.fromkeys(("residual", "weight", "bias", "seed", "out_dtype", "residual_dtype"))
    defaults |= dict(normalized_shape=list(input.shape[-1:]), kind=0, eps=0.0)
    defaults |= dict(weight_offset=0.0, dropout_p=0.0, save_statistics=False)
    return torch.ops.onepass.norm_forward(**defaults | {"input": input} | arguments)


def raw_backward(x: Tensor, **arguments):
    """As :func:`raw_forward`, with every gradient."""
    defaults = dict.fromkeys(("doutput", "dresidual_out", "weight", "bias", "seed"))
    defaults |= dict.fromkeys(("input_dtype", "residual_dtype"))
    defaults |= dict(normalized_shape=list(x.shape[-1:]), kind=0)
    defaults |= dict(weight_offset=0.0, dropout_p=0.0, grad_mask=15)
    return torch.ops.onepass.norm_backward(**defaults | {"x": x} | arguments)
