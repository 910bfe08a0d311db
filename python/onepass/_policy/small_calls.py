"""Calls of swapped modules that are too small to gain: torch's own kernel computes them, as before.

A call of ours has more overhead than one of torch's, whose autograd is in C++; from some size on
the kernel makes up for it. RMS norms gain at every size: torch has no kernel for them. The bounds
are measured by benchmarks/small_calls.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from onepass import _C, _dispatch_log
from onepass._compiling import constant_where_traced
from onepass._imported import is_dtensor
from onepass._ops import linear_loss, tracing
from onepass._policy import products
from onepass._policy.precision import only_torch_rounds, precision_of

_FLOATS = torch.float32, torch.bfloat16, torch.float16
# Per thread, (in training, in inference): elements of a layer norm (Zen 3, AVX2; training in
# float32: Zen 4, AVX-512, inputs not in the cache).
LEAST_NORM = {
    torch.float32: (1 << 19, 1 << 16),
    torch.float64: (1 << 19, 1 << 16),
    torch.bfloat16: (1 << 16, 1 << 16),
    torch.float16: (1 << 16, 1 << 16),
}
# Elements of a group norm that nothing follows, which gains in 16 bits alone, and of one that silu
# follows (Xeon, AVX-512, channels first; with channels last they gain from fewer on).
ALONE = torch.bfloat16, torch.float16
LEAST_GROUP_NORM = dict.fromkeys(ALONE, (1 << 17, 1 << 16))
LEAST_ACTIVATED = {
    torch.float32: (1 << 16, 1 << 15),
    torch.float64: (1 << 16, 1 << 15),
    torch.bfloat16: (1 << 15, 1 << 15),
    torch.float16: (1 << 15, 1 << 15),
}
# Elements of the input of a module that calls attention, times its tokens (Zen 4, AVX-512 with
# bfloat16): each torch function of a redirected forward takes longer too.
LEAST_ATTENTION = {
    torch.float32: (1 << 23, 1 << 23),
    torch.float64: (1 << 23, 1 << 23),
    torch.bfloat16: (0, 1 << 20),
    torch.float16: (0, 1 << 20),
}
# The same of a module that computes attention by hand (Zen 4, AVX-512 with bfloat16): its calls are
# recorded one by one. With masks, or not known yet, it gains from fewer on.
LEAST_BY_HAND = {
    torch.float32: (1 << 25, 1 << 25),
    torch.bfloat16: (1 << 27, 1 << 25),
    torch.float16: (1 << 27, 1 << 25),
}
LEAST_MASKED_BY_HAND = {
    torch.float32: (1 << 24, 1 << 24),
    torch.bfloat16: (1 << 25, 1 << 25),
    torch.float16: (1 << 25, 1 << 25),
}
# Keys of its calls, by the columns of a head: with fewer, scores are smaller than the query.
LEAST_KEYS = 1
# Multiply-adds of a linear layer (Zen 4; float32 at AVX-512, 16 bits at AVX2, where torch's are
# slow).
LEAST_LINEAR = {
    torch.float32: (1 << 22, 1 << 22),
    torch.bfloat16: (1 << 16, 1 << 14),
    torch.float16: (1 << 16, 1 << 14),
}
# The same for 2 to 12 rows in float32, where the weight is read in place; with a single row torch
# is as fast while the weight is in a cache.
LEAST_IN_PLACE = 1 << 20
ROWS_IN_PLACE = range(2, 13)
# Rows in float32 where both have AVX2 alone: of 64x384x384 torch takes 0.88 of our time, of 512
# rows and more about as long (Zen 4 held to AVX2, linear-avx2.json).
LEAST_ROWS = 1 if _C.cpu_level().startswith("avx512") else 256
# Multiply-adds of the largest weight of a module that calls F.linear (Zen 4, as above): each torch
# function of a redirected forward takes longer too.
LEAST_LINEAR_CALLS = {
    torch.float32: (1 << 26, 1 << 26),
    torch.bfloat16: (1 << 18, 1 << 16),
    torch.float16: (1 << 18, 1 << 16),
}
# Logits of a loss (Zen 4, AVX-512): of a call, and of a module that calls F.cross_entropy.
LEAST_LOSS = dict.fromkeys(_FLOATS, (1 << 16, 1 << 15))
LEAST_LOSS_CALLS = 1 << 20
# Bytes per class of a chunk of logits in `linear_cross_entropy` on the CPU: kChunkBytes of
# csrc/ops/loss.cpp.
CHUNK_OF_WORD = 1 << 10
# Elements of a gated activation (Zen 4, AVX-512).
LEAST_GATE = dict.fromkeys(_FLOATS, (1 << 18, 1 << 16))
# Elements of an activation by its name in transformers, where torch has it in few passes (Xeon,
# AVX-512). Exact gelu never gains.
LEAST_ACTIVATION = {
    "SiLU": dict.fromkeys(_FLOATS, (1 << 20, 1 << 18)),
    "GeluTanh": dict.fromkeys(_FLOATS, (1 << 14, 1 << 14)),
    "QuickGELU": dict.fromkeys(_FLOATS, (1 << 14, 1 << 14)),
}
# Elements of query and key whose neighbouring columns are rotated and then stored half a head apart
# (Zen 4, AVX-512): they are moved first. Other rotations gain at every size.
LEAST_ROTARY = dict.fromkeys(_FLOATS, (1 << 14, 1 << 15))
# More threads do not raise a bound: by then they share the memory's bandwidth.
MOST_THREADS = 8
NORM_NOTE = (
    "layer norms on the CPU run torch's own kernel in small calls, where it takes less time; those "
    f"of fewer elements than {LEAST_NORM[torch.float32][0]} per thread (16-bit, or inference: "
    f"{LEAST_NORM[torch.float32][1]})"
)
ATTENTION_NOTE = (
    "modules that call F.scaled_dot_product_attention run their own forward on the CPU, without "
    "dropout, in calls of three dimensions whose elements times tokens are fewer than "
    f"{1 << 23} per thread (16-bit inference: {1 << 20}; 16-bit training: none)"
)

GROUP_NORM_NOTE = (
    "group norms with silu after them are computed in one pass, without a call of their modules; "
    "on the CPU torch's own run in calls of fewer elements than "
    f"{LEAST_ACTIVATED[torch.float32][0]} per thread (16-bit, or inference: "
    f"{LEAST_ACTIVATED[torch.float32][1]}); norms alone are ours in 16 bits on the CPU, from "
    f"{LEAST_GROUP_NORM[torch.bfloat16][0]} elements on (inference: "
    f"{LEAST_GROUP_NORM[torch.bfloat16][1]})"
)
LINEAR_CALLS_NOTE = (
    "they run unchanged where all rows of an input times the largest of the module's own "
    f"weights are fewer multiply-adds per thread than {LEAST_LINEAR_CALLS[torch.float32][0]} "
    f"(16-bit: {LEAST_LINEAR_CALLS[torch.bfloat16][0]}, in inference "
    f"{LEAST_LINEAR_CALLS[torch.bfloat16][1]})"
)
GATE_NOTE = (
    "gated feed-forward blocks call their linear layers and no module of the activation; they run "
    "their own forward if that has hooks or is replaced, and on the CPU for fewer elements between "
    f"the layers than {LEAST_GATE[torch.float32][0]} per thread (inference: "
    f"{LEAST_GATE[torch.float32][1]})"
)
ROTARY_NOTE = (
    "functions that rotate as DeepSeek's run unchanged on the CPU in small calls; they move "
    "neighbouring columns half a head apart, and small is fewer elements than "
    f"{LEAST_ROTARY[torch.float32][0]} per thread (inference: {LEAST_ROTARY[torch.float32][1]})"
)
LOSS_NOTE = (
    "losses run torch's own cross entropy on the CPU in small calls; of fewer logits than "
    f"{LEAST_LOSS[torch.float32][0]} per thread (inference: {LEAST_LOSS[torch.float32][1]}), and "
    "for probabilities as targets and logits of more than two dimensions"
)
LOSS_CALLS_NOTE = (
    f"they run unchanged where tokens times vocabulary are fewer per thread than {LEAST_LOSS_CALLS}"
)
LINEAR_NOTE = (
    "linear layers run torch's own products in calls that would not gain; on a GPU, in dtypes in "
    "which torch is as fast (under autocast in its own), in calls of fewer multiply-adds per "
    f"thread than {1 << 22} (with 2 to 12 rows {LEAST_IN_PLACE}, 16-bit {1 << 16}), of 13 to 255 "
    "rows in float32 without AVX-512, or of a single row where torch has a fast product with a "
    "vector. "
    "In bfloat16 beside oneDNN, on AMD, they gain in small calls alone. explain(model, batch) "
    "counts both"
)


@contextlib.contextmanager
def all_gain() -> Iterator[None]:
    """Inside, no call is too small: ours compute what they would compute of larger ones."""
    global MOST_THREADS, LEAST_ROWS
    before = MOST_THREADS, LEAST_ROWS
    MOST_THREADS, LEAST_ROWS = 0, 1  # every bound is a multiple of the threads
    try:
        yield
    finally:
        MOST_THREADS, LEAST_ROWS = before


def norm_is_small(input: Tensor) -> bool:
    """Whether torch's own layer norm takes less time on this input; logged."""
    bound = _least(LEAST_NORM, input, torch.is_grad_enabled())
    if not bound or input.numel() >= bound:
        return False
    if _dispatch_log.is_recording():
        cols = input.shape[-1] if input.dim() else 1
        arguments = f"{input.numel() // max(cols, 1)} x {cols}"
        _tell("layer_norm", arguments, input, f"fewer elements than {bound}")
    return True


def group_norm_is_small(input: Tensor, num_groups: int, activated: bool = False) -> bool:
    """Whether torch's own group norm, and silu if that follows, takes less time; logged."""
    bounds = LEAST_ACTIVATED if activated else LEAST_GROUP_NORM
    if not activated and not (input.device.type in ("cpu", "meta") and input.dtype in ALONE):
        return True
    if not torch.compiler.is_compiling() and input.numel() == num_groups:
        return True  # torch refuses it
    return _has_fewer_elements(bounds, input, "group_norm")


def linear_is_small(input: Tensor, weight: Tensor, precision: str | None = None) -> bool:
    """Whether torch's own product takes less time, and has the module's precision; logged."""
    if not input.is_cpu or only_torch_rounds(precision):
        return False
    if torch.compiler.is_compiling():
        return _is_small_as_compiled(input, weight)
    if torch._C._is_tracing():
        return False
    # A small call takes a few microseconds, so this code must be cheap.
    dtype, training = products.dtype_of(input), torch.is_grad_enabled()
    bounds, size, threads = LEAST_LINEAR.get(dtype), weight.numel(), _threads()
    if bounds is None or not size:
        return False
    rows = input.numel() // weight.shape[1]
    bound = bounds[not training]
    if dtype is torch.float32 and rows in ROWS_IN_PLACE:
        bound = min(bound, LEAST_IN_PLACE)
    bound *= threads
    single = rows == 1 and _is_fast_with_a_row(dtype, training, weight.stride(1) != 1)
    few = single or _are_few_rows(dtype, rows)
    if not few and rows * size >= bound:
        return False
    if _dispatch_log.is_recording():
        out_features, in_features = weight.shape
        least = 2 if single else LEAST_ROWS
        reason = f"rows than {least}" if few else f"multiply-adds than {bound}"
        _tell("linear", f"{rows} x {in_features} by {out_features}", input, f"fewer {reason}")
    return True


def _is_small_as_compiled(input: Tensor, weight: Tensor) -> bool:
    """Whether the graph is for a single row; all larger numbers of rows may share one graph."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # not without the compiler

    if not LEAST_LINEAR or not guard_or_false(math.prod(input.shape[:-1]) == 1):
        return False
    transposed = weight.stride(1) != 1
    return _is_fast_with_a_row(products.dtype_of(input), torch.is_grad_enabled(), transposed)


def linear_calls_are_small(module: nn.Module, args: tuple, named: dict) -> bool:
    """Whether a module that calls F.linear takes less time unswapped; logged.

    Judged by its largest weight and the rows of its largest input: (batch, tokens, width), or token
    ids. As for attention, the answer does not depend on gradients in training.
    """
    if torch.compiler.is_compiling() or tracing.is_tracing():
        return False
    weight, size = None, 0
    for one in linear_weights(module):
        out_features, in_features = one.size(-2), one.size(-1)
        if out_features * in_features > size:
            weight, size, columns = one, out_features * in_features, in_features
    if weight is None:
        return False
    rows, input = -1, None
    for x in (*args, *named.values()) if named else args:
        if isinstance(x, Tensor) and not x.is_nested:
            count = x.numel() // (columns if x.is_floating_point() else 1)
            if count > rows:
                rows, input = count, x
    if input is None:
        return False
    if weight.dim() > 2:  # a stack of experts, two for each row
        rows = rows * 2 // max(2, weight.numel() // size)
    dtype = products.dtype_of(weight)
    training = module.training or torch.is_grad_enabled()
    shape, precision = (rows, columns), precision_of(module)
    if input.is_cpu and products.is_as_fast(dtype, shape, precision=precision):
        return True
    if only_torch_rounds(precision):
        return False
    bound = _least(LEAST_LINEAR_CALLS, input, training, dtype)
    few = _are_few_rows(dtype, rows) or (rows == 1 and _is_fast_with_a_row(dtype, training))
    if not bound or (rows * size >= bound and not few):
        return False
    if _dispatch_log.is_recording():
        arguments = f"{rows} x {columns} by {size // columns}"
        _tell("linear", arguments, weight, f"fewer multiply-adds than {bound}, or rows")
    return True


def _are_few_rows(dtype: torch.dtype, rows: int) -> bool:
    """Whether rows are too many to read the weight in place, and too few for ours to be as fast."""
    return dtype is torch.float32 and ROWS_IN_PLACE[-1] < rows < LEAST_ROWS


_HOLDERS = (nn.Embedding, nn.ParameterList, nn.ParameterDict)


def linear_weights(module: nn.Module) -> list[Tensor]:
    """The weights that a module may pass to F.linear: its own matrices, stacked ones too, and those
    of embeddings and lists of parameters that it holds."""
    weights = matrices(module._parameters.values())
    for part in module._modules.values():
        if isinstance(part, _HOLDERS):
            weights += matrices(part._parameters.values())
    return weights


def has_float32_weights(module: nn.Module) -> bool:
    """Whether a module may pass weights in float32 to F.linear."""
    return any(weight.dtype is torch.float32 for weight in linear_weights(module))


def matrices(parameters: Iterable[Tensor | None]) -> list[Tensor]:
    """Possible factors of a product, stacks of matrices included."""
    return [p for p in parameters if p is not None and p.dim() >= 2 and p.is_floating_point()]


def gate_is_small(input: Tensor, project: nn.Module) -> bool:
    """Whether torch's own functions take less time on a linear layer's output for this input;
    logged."""
    bound = _least(LEAST_GATE, input, torch.is_grad_enabled())
    rows, cols = input.numel() // max(input.shape[-1], 1), getattr(project, "out_features", 0)
    if not bound or rows * cols >= bound:
        return False
    if _dispatch_log.is_recording():
        reason = f"fewer elements than {bound}"
        _tell("gate", f"{rows} x {cols}", input, reason, "the block's own forward")
    return True


def activation_is_small(input: Tensor, name: str) -> bool:
    """Whether the activation of transformers with a layer's name takes less time; logged."""
    bounds = LEAST_ACTIVATION.get(name, {})
    return _has_fewer_elements(bounds, input, name, "the activation's own forward")


def rotary_is_small(inputs: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether a model's own function takes less time to rotate these in a dtype and move columns
    apart; logged."""
    bound = _least(LEAST_ROTARY, inputs[0], torch.is_grad_enabled(), dtype)
    if not bound or sum(x.numel() for x in inputs) >= bound:
        return False
    if _dispatch_log.is_recording():
        arguments = " and ".join(" x ".join(map(str, x.shape)) for x in inputs)
        reason = f"fewer elements than {bound}"
        _tell("rotary", arguments, inputs[0], reason, "the model's own function")
    return True


def loss_is_small(input: Tensor) -> bool:
    """Whether torch's own cross entropy takes less time on these logits; logged.

    Not on DTensors, on which each of its operators is dispatched in Python.
    """
    if is_dtensor(input):
        return False
    return _has_fewer_elements(LEAST_LOSS, input, "cross_entropy")


def loss_calls_are_small(module: nn.Module, args: tuple, named: dict) -> bool:
    """Whether a module that calls F.cross_entropy takes less time unswapped; logged.

    Judged by its tokens, its largest integer input, and its vocabulary.
    """
    if torch.compiler.is_compiling() or tracing.is_tracing():
        return False
    rows, tokens = 0, None
    for x in (*args, *named.values()):
        if isinstance(x, Tensor) and not x.is_floating_point() and not x.is_nested:
            if x.numel() > rows:
                rows, tokens = x.numel(), x
    if tokens is None or not tokens.is_cpu:
        return False
    logits, bound = rows * vocabulary(module), LEAST_LOSS_CALLS * _threads()
    if logits >= bound:
        return False
    if _dispatch_log.is_recording():
        _tell("cross_entropy", f"{rows} x {logits // rows}", tokens, f"fewer logits than {bound}")
    return True


def logits_are_few(input: Tensor, linear_weight: Tensor) -> bool:
    """Whether whole logits take no more memory than `linear_cross_entropy`; logged.

    So do logits of one chunk. The gradient of a 16-bit weight is summed in float32, twice the
    weight's bytes, and then rounded, three times in all; whole logits and their gradient take twice
    the logits' bytes.
    """
    words, width = linear_weight.shape
    rows = input.numel() // max(width, 1)
    bound = CHUNK_OF_WORD * words if input.is_cpu else linear_loss.CHUNK_BYTES
    if linear_weight.requires_grad and linear_weight.itemsize == 2:
        gradient = words * width * 2
        bound = max(bound + 2 * gradient, 3 * gradient) // 2
    if rows * words * input.itemsize > bound:
        return False
    if _dispatch_log.is_recording():
        arguments = f"{rows} x {width} by {words}"
        _tell("linear_cross_entropy", arguments, input, f"no more bytes of logits than {bound}")
    return True


def vocabulary(module: nn.Module) -> int:
    """The number of a language model's logits: the common number of rows of an embedding and of the
    largest linear layer or weight for F.linear in it; 0 if these are few."""
    known = _VOCABULARIES.get(module)
    if known is None:
        embedded, computed = {0}, {0}
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                embedded.add(part.num_embeddings)
            else:
                computed.update(weight.shape[0] for weight in matrices(part._parameters.values()))
        shared = max(embedded & computed)
        known = _VOCABULARIES[module] = shared if shared >= _LEAST_VOCABULARY else 0
    return known


_LEAST_VOCABULARY = 512  # fewer logits of a token cost nothing beside the model
_VOCABULARIES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


@constant_where_traced
def _is_fast_with_a_row(dtype: torch.dtype, training: bool, transposed: bool = False) -> bool:
    """Whether torch's product of a single row takes less time, with a transposed weight or one in
    torch's order."""
    if dtype is torch.float32:
        return training or transposed
    return not (training or transposed or products.as_fast(dtype))


def attention_calls_are_small(module: nn.Module, args: tuple, named: dict) -> bool:
    """Whether a module that calls attention takes less time unswapped; its first argument must be
    (batch, tokens, width); logged.

    The answer is the same when a checkpoint recomputes the module: it does not depend on gradients
    in training.
    """
    return _attention_is_small(LEAST_ATTENTION, module, args)


def attention_by_hand_is_small(module: nn.Module, args: tuple, is_masked: bool) -> bool:
    """The same of a module that computes attention by hand."""
    return _attention_is_small(LEAST_MASKED_BY_HAND if is_masked else LEAST_BY_HAND, module, args)


def _attention_is_small(bounds: dict, module: nn.Module, args: tuple) -> bool:
    input = args[0] if args else None
    if not isinstance(input, Tensor) or input.dim() != 3:
        return False
    bound = _least(bounds, input, module.training or torch.is_grad_enabled())
    if not bound or input.numel() * input.shape[1] >= bound:
        return False
    if module.training and _drops(module):
        return False
    if _dispatch_log.is_recording():
        arguments = " x ".join(map(str, input.shape))
        reason = f"fewer elements times tokens than {bound}"
        _tell("scaled_dot_product_attention", arguments, input, reason)
    return True


def _drops(module: nn.Module) -> bool:
    """Whether an attribute of the module, or of a part of it, is a dropout probability above 0.

    Attention with dropout gains at smaller sizes. Missing such an attribute only costs time.
    """
    for part in (module, *module._modules.values()):
        for name, value in vars(part).items() if part is not None else ():
            if ("drop" in name or name == "p") and isinstance(value, (int, float)) and value > 0:
                return True
    return False


def _least(bounds: dict, input: Tensor, training: bool, dtype: torch.dtype | None = None) -> int:
    """The least size of a call that gains in `dtype`, by default input's; 0 if every call does, or
    if sizes may change."""
    if not input.is_cpu or torch.compiler.is_compiling() or tracing.is_tracing():
        return 0
    bound = bounds.get(dtype or input.dtype, (0, 0))[not training]
    return bound * _threads()


def _has_fewer_elements(
    bounds: dict, input: Tensor, function: str, kernel: str | None = None
) -> bool:
    """Whether a call has fewer elements than the least that gains; logged."""
    bound = _least(bounds, input, torch.is_grad_enabled())
    if not bound or input.numel() >= bound:
        return False
    if _dispatch_log.is_recording():
        arguments = " x ".join(map(str, input.shape))
        _tell(function, arguments, input, f"fewer elements than {bound}", kernel)
    return True


def _threads() -> int:
    return min(torch.get_num_threads(), MOST_THREADS)


def _tell(
    function: str, arguments: str, input: Tensor, reason: str, kernel: str | None = None
) -> None:
    _dispatch_log.record_fallback(
        op=function,
        arguments=f"{arguments}, {str(input.dtype)[6:]}",
        kernel=kernel or f"torch.nn.functional.{function}",
        threads=torch.get_num_threads(),
        reason=f"{_dispatch_log.TOO_SMALL}: {reason}",
    )
