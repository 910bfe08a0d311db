"""The numeric proof that a function of another library rotates as `rotary_embedding` does.

The function is called on the CPU in float64 with random numbers for query, key, cos and sin, all
columns different: a function that pairs other columns, reads another number of cos or sin, or drops
something is off by far more than rounding, even that of float32, in which some compute. The calls
that succeed show how it pairs columns, what cos and sin hold, whether columns beyond them stay, and
the dimensions of heads and tokens. Then every combination of dtypes must satisfy two conditions, as
for norms (`probe.py`), in results and gradients: the function is that formula, and onepass is not
worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onepass import numerics
from onepass.reference import rotary as reference
from onepass.swapping import rotary, trials
from onepass.swapping.rotary import Called
from onepass.swapping.specs import Form, RotarySpec
from onepass.swapping.trials import Refused

_TABLES = ("columns", "pairs", "half")
_FORMS = [
    *itertools.starmap(Form, itertools.product((False, True), _TABLES)),
    *(Form(True, table, apart=True) for table in _TABLES),
]
_UNSQUEEZE = (1, 2)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Relative to the largest number. Some always compute in float32, which rounds at 6e-8.
_MOST_ERROR = 1e-6
_BATCH, _TOKENS, _HEADS = 2, 5, (3, 4)  # all different, to tell them apart
_SIZE, _POOLED_TOKENS = 16, 65  # enough for a meaningful largest error
# Allowed error against float64, relative to plain PyTorch's: below that of any other formula.
_SLACK = 8.0
# Functions that autocast on some device gives another dtype.
_CAST = {
    "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "einsum", "linear", "sum", "prod", "cumsum",
    "cumprod", "pow", "__pow__", "exp", "log", "norm", "outer", "dot", "mv", "addcmul", "rsqrt",
}  # fmt: skip


class _Layout(NamedTuple):
    """The dimensions of heads and tokens, and the dimension that is unsqueezed."""

    dims: int  # of query and key
    cos_dims: int
    seq_first: bool
    unsqueeze_dim: int | None  # as it is passed; None: is no argument

    def key(self) -> tuple[int, int, int | None]:
        return self.dims, self.cos_dims, self.unsqueeze_dim


def prove(called: Called, sizes: tuple[int, ...]) -> RotarySpec | str:
    """The rotation that a function computes, or the reason why it is not redirected."""
    count = rotary.tensors_of(called)
    if isinstance(count, str):
        return f"{called.name} {count}"
    with trials.isolated():
        try:
            return _Proof(called, count).spec(sizes)
        except Refused as refusal:
            return f"{called.name} {refusal}"


class _Draw(NamedTuple):
    inputs: list[Tensor]
    cos: Tensor
    sin: Tensor


class _Proof:
    def __init__(self, called: Called, count: int):
        self.called, self.count = called, count
        self.normal = trials.normals(22)
        names = {parameter.name: parameter for parameter in called.parameters}
        unsqueezing = names.get("unsqueeze_dim")
        self.unsqueeze_dim = unsqueezing.default if unsqueezing else None
        self.unsqueeze_dims = {self.unsqueeze_dim, *_UNSQUEEZE} if unsqueezing else {None}
        self.failure = ""  # of the last call, until one runs
        self.has_run = False

    def spec(self, sizes: tuple[int, ...]) -> RotarySpec:
        form, layouts = self._find(sizes[0])
        layout = layouts[0]
        for size in sizes:
            if not self._holds(form, layout, size, size):
                raise Refused(f"rotates heads of {size} columns in another way")
        self._check_pure(form, layout)
        return RotarySpec(
            name=self.called.name,
            parameters=tuple(parameter.name for parameter in self.called.parameters),
            tensors=self.count,
            unsqueeze_dim=self.unsqueeze_dim,
            form=form,
            partial=not form.apart
            and all(
                self._holds(form, layout, size, head_dim)
                for size in sizes
                for head_dim in (size + 6, 2 * size)
            ),
            layouts=tuple((layout.key(), layout.seq_first) for layout in layouts),
            dtypes=tuple(self._dtypes(form, layout)),
            autocast=self._is_the_same_under_autocast(form, layout),
        )

    def _find(self, size: int) -> tuple[Form, list[_Layout]]:
        """Finds its kind of rotation, and its layouts."""
        for form in _FORMS:
            # cos and sin are those of a row of the batch, or of all.
            found = [
                layout
                for layout in self._layouts()
                if self._holds(form, layout, size, size, _BATCH)
                and self._holds(form, layout, size, size)
            ]
            if found:
                return form, found
        raise Refused(f"is no rotation of columns that onepass computes{self.failure}")

    def _layouts(self) -> Iterator[_Layout]:
        for dims, seq_first, unsqueeze_dim in itertools.product(
            ((4, 3), (4, 2), (3, 2)), (False, True), sorted(self.unsqueeze_dims, key=str)
        ):
            yield _Layout(*dims, seq_first, unsqueeze_dim)

    def _draw(
        self,
        form: Form,
        layout: _Layout,
        size: int,
        head_dim: int,
        rows: int = 1,
        tokens: int = _TOKENS,
        dtype: torch.dtype = torch.float64,
        table_dtype: torch.dtype = torch.float64,
    ) -> _Draw:
        """Tensors with head_dim columns, of which `size` are rotated; cos and sin have that many
        rows of the batch."""

        batch = (_BATCH,) * (layout.dims - 3)
        inputs = []
        for heads in _HEADS[: self.count]:
            inner = (tokens, heads) if layout.seq_first else (heads, tokens)
            inputs.append(self.normal(*batch, *inner, head_dim, dtype=dtype))
        width = size // 2 if form.table == "pairs" else size
        leading = (rows,) * (layout.cos_dims - 2)
        cos, sin = (self.normal(*leading, tokens, width, dtype=table_dtype) for _ in range(2))
        return _Draw(inputs, cos, sin)

    def _holds(self, form: Form, layout: _Layout, size: int, head_dim: int, rows: int = 1) -> bool:
        """Whether the function is this rotation, with its gradients."""
        draw = self._draw(form, layout, size, head_dim, rows)
        try:
            found = self._theirs(layout, draw)
        except Refused as refusal:
            self.failure = "" if self.has_run else f": {refusal}"
            return False
        self.has_run, self.failure = True, ""
        expected = self._formula(form, layout, draw)
        return all(
            ours.shape == theirs.shape and trials.distance(theirs, ours) < _MOST_ERROR
            for theirs, ours in zip(found, expected, strict=True)
        )

    def _check_pure(self, form: Form, layout: _Layout) -> None:
        """The results must be a function of the arguments alone, and new tensors."""
        draw = self._draw(form, layout, _SIZE, _SIZE)
        tensors = [*draw.inputs, draw.cos, draw.sin]
        before, state = [tensor.clone() for tensor in tensors], torch.get_rng_state()
        with torch.no_grad():
            first, second = (self._call(layout, draw, draw.inputs) for _ in range(2))
        if not torch.equal(torch.get_rng_state(), state):
            raise Refused("draws random numbers")
        if not all(map(torch.equal, tensors, before)):
            raise Refused("changes its arguments")
        if not all(map(torch.equal, first, second)):
            raise Refused("keeps state: two calls differ")

    def _dtypes(self, form: Form, layout: _Layout) -> Iterator[tuple[torch.dtype, ...]]:
        """(input dtype, dtype of cos and sin, output dtype) of those that are proven."""
        for dtypes in itertools.product(_DTYPES, _DTYPES):
            try:
                yield *dtypes, self._judge(form, layout, *dtypes)
            except Refused as refusal:
                if dtypes == (torch.float32, torch.float32):
                    raise Refused(f"{refusal} in float32") from None

    def _judge(
        self, form: Form, layout: _Layout, dtype: torch.dtype, table_dtype: torch.dtype
    ) -> torch.dtype:
        """The function's output dtype, if it is the formula and onepass is not worse."""
        draw = self._draw(form, layout, _SIZE, _SIZE, 1, _POOLED_TOKENS, dtype, table_dtype)
        theirs = self._theirs(layout, draw)
        output_dtype = theirs[0].dtype
        if theirs[self.count - 1].dtype != output_dtype:
            raise Refused("returns two dtypes")
        exact = _Draw([x.double() for x in draw.inputs], draw.cos.double(), draw.sin.double())
        ref = self._formula(form, layout, exact, output_dtype, torch.float64)
        base = self._formula(form, layout, draw, output_dtype)
        try:
            ours = _with_gradients(
                lambda inputs: rotary.rotate(
                    form, [x.to(output_dtype) for x in inputs], draw.cos, draw.sin, layout.seq_first
                ),
                draw.inputs,
                output_dtype,
            )
        except RuntimeError as error:
            raise Refused(f"is nothing that onepass computes: {error}") from None
        for found, mine, right, stock in zip(theirs, ours, ref, base, strict=True):
            verdict = numerics.compare(found, right, stock)
            if not verdict.max_error <= _SLACK * verdict.bound:
                raise Refused("is another formula")
            if not numerics.compare(mine, right, found).ok:
                raise Refused("is more exact than onepass")
        return output_dtype

    def _is_the_same_under_autocast(self, form: Form, layout: _Layout) -> bool:
        names = set()

        class Listening(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                names.add(getattr(func, "__name__", ""))
                return func(*args, **(kwargs or {}))

        with Listening():
            self._theirs(layout, self._draw(form, layout, _SIZE, _SIZE))
        return not names & _CAST

    def _theirs(self, layout: _Layout, draw: _Draw) -> list[Tensor]:
        """The function's results, and the gradients of the rotated tensors."""
        with trials.foreign_code("fails"):
            return _with_gradients(lambda inputs: self._call(layout, draw, inputs), draw.inputs)

    def _call(self, layout: _Layout, draw: _Draw, inputs: list[Tensor]) -> list[Tensor]:
        named = {} if layout.unsqueeze_dim is None else {"unsqueeze_dim": layout.unsqueeze_dim}
        outputs = self.called.function(*inputs, cos=draw.cos, sin=draw.sin, **named)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        if not isinstance(outputs, (tuple, list)) or len(outputs) != self.count:
            raise Refused(f"does not return {self.count} tensors")
        return list(outputs)

    def _formula(
        self,
        form: Form,
        layout: _Layout,
        draw: _Draw,
        upstream_dtype: torch.dtype = torch.float64,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Our formula's results and gradients, computed in a dtype or in that of the results."""
        cos, sin, width = draw.cos, draw.sin, draw.cos.shape[-1]
        if form.table == "half":
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        options = {
            "interleaved": form.interleaved,
            "rotary_dim": 2 * width if form.table == "pairs" else width,
            "seq_first": layout.seq_first,
        }

        def call(inputs: list[Tensor]) -> list[Tensor]:
            inputs = [x.to(dtype or upstream_dtype) for x in inputs]
            rotated = (reference.rotary_embedding(x, None, cos, sin, **options) for x in inputs)
            return [_set_apart(x) if form.apart else x for x, _ in rotated]

        return _with_gradients(call, draw.inputs, upstream_dtype)


def _set_apart(x: Tensor) -> Tensor:
    """Pairs of neighbouring columns, as (i, i + half)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _with_gradients(
    call: Callable, inputs: list[Tensor], upstream_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The results of a call, and the gradients of its inputs for fixed numbers, rounded to a dtype
    or to that of the results."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    normal = trials.normals(23)
    return trials.outcome(
        lambda: call(leaves), leaves, lambda y: normal(*y.shape, dtype=upstream_dtype or y.dtype)
    )
