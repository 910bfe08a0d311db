"""How well the lanes of warps access memory together, in the main loop of every kernel.

Four numbers for each kernel: wavefronts of reads and of writes of shared memory, and sectors of
reads and of writes of global memory, divided by the least possible (csrc's kernels as they ship,
tests/cuda_emulator/accesses.h). Where one is not 1, a comment says why.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from onepass import functional
from tests.attention import cases as attention
from tests.attention.cuda_cases import DECODE_KERNELS, KERNELS, TILED_KERNELS
from tests.attention_decode import cases as decode
from tests.emulator.executors import all_instances, kernel_of
from tests.gate import cases as gate
from tests.group_norm import cases as group_norm
from tests.loss import cases as loss
from tests.norm import cases as norm
from tests.norm import forms
from tests.optimizer import cases as optimizer
from tests.rotary import cases as rotary

F32, BF16 = torch.float32, torch.bfloat16
BEST = (1.0, 1.0, 1.0, 1.0)


@dataclass
class Loop:
    run: Callable
    kernels: tuple[str, ...]  # that are compiled
    expected: dict[str, tuple[float, float, float, float]]
    settings: dict[str, int] = field(default_factory=dict)


def of_norm(rms: bool, rows: int, cols: int, dtype) -> None:
    case = norm.make(rms, rows, cols, dtype, residual=True)
    norm.outputs_and_gradients(case.ours, case)


def of_form(form: str, size: tuple[int, ...]) -> None:
    case = forms.make(form, size, BF16)
    forms.results(case.ours, case)


def of_family(family, *arguments, **options) -> None:
    case = family.make(*arguments, **options)
    family.results(case.ours, case)


def of_image(last: bool) -> None:
    of_family(group_norm, (2, 64, 16, 16), 4, BF16, last=last)


def of_rotary(**fields) -> None:
    rotary.check(rotary.Case(dtype=BF16, head_dim=128, tokens=8, heads=4, key_heads=4, **fields))


def of_step(*mix) -> None:
    tensors = [optimizer.make(2 * optimizer.PIECE, *mix)]
    optimizer.on_cpu(optimizer.Step(optimizer.ADAM, tensors, optimizer.hyper({})))


def clip() -> None:
    gradients = [torch.randn(2 * optimizer.PIECE), torch.randn(2 * optimizer.PIECE).to(BF16)]
    torch.ops.onepass.clip_grad_norm(gradients, 1.0, 2.0, False)


def of_attention(**fields) -> None:
    attention.ours(attention.Case(**dict(batch=1, heads=1, seq_q=256, seq_k=256) | fields))


def of_bias(dtype) -> None:
    """A bias for each query, and one for all queries, whose gradient is added up in parts."""
    for bias in ("q", "h"):
        of_attention(bias=bias, dtype=dtype, head_dim=64, batch=2, sinks=F32)


def of_decode(**fields) -> None:
    decode.ours(decode.Case(**dict(lengths=(512,)) | fields))


NORM = ("norm/forward.cu", "norm/backward.cu")
ROTARY = ("rotary/forward.cu", "rotary/backward.cu")
GROUP_NORM = ("group_norm/forward.cu", "group_norm/backward.cu")

# Eight elements of float32 are two accesses of 16 bytes, side by side: a warp touches each sector
# twice, the second time in the L1 (reads) or the L2 (writes).
PACKS_OF_FLOATS = 2.0
# Sums of each column that a block writes once, as packs of float32, among outputs in bfloat16.
FEW_SUMS = 1.2
MORE_SUMS = 1.33


def reads(ratio: float, writes: float = 1.0) -> tuple[float, float, float, float]:
    """Reads of global memory; there are no bank conflicts."""
    return (1.0, 1.0, ratio, writes)


def best(*kernels: str) -> dict[str, tuple]:
    return dict.fromkeys(kernels, BEST)


GROUP_NORM_SMALL = ("means_kernel", "statistics_kernel", "weight_kernel")
GROUP_NORM_BEST = best(*(f"group_norm_{name}" for name in GROUP_NORM_SMALL))
# A lane has 32 columns of a row, in four accesses: each is half of a sector of its own, the other
# half of which the next one finds in the L1.
DELTA = {"attention_delta_kernel": reads(2.0)}
TILED = DELTA | best(
    "attention_forward_kernel", "attention_backward_kernel", "attention_dquery_kernel"
)  # fmt: skip
# Blocks write what they have, four columns to a lane, an element at a time. Once for each row.
JOIN_WRITES = 3.67
LOOPS = {
    "rms norm, bf16": Loop(partial(of_norm, True, 8, 1024, BF16), NORM, {
        **best("norm_forward_kernel", "norm_backward_reduce_kernel"),
        "norm_backward_kernel": reads(1.0, writes=FEW_SUMS),
    }),
    "layer norm, bf16": Loop(partial(of_norm, False, 8, 1024, BF16), NORM, {
        **best("norm_forward_kernel", "norm_backward_reduce_kernel"),
        "norm_backward_kernel": reads(1.0, writes=MORE_SUMS),
    }),
    "layer norm, f32": Loop(partial(of_norm, False, 8, 1024, F32), NORM, {
        **best("norm_backward_reduce_kernel"),
        "norm_forward_kernel": reads(PACKS_OF_FLOATS, writes=1.99),  # and the statistics
        "norm_backward_kernel": reads(PACKS_OF_FLOATS, writes=PACKS_OF_FLOATS),
    }),
    "layer norm, long, bf16": Loop(partial(of_norm, False, 2, 16640, BF16), NORM, {
        **best("norm_forward_long_kernel", "norm_backward_means_kernel"),
        **best("norm_backward_reduce_kernel"),
        "norm_backward_columns_kernel": reads(1.0, writes=1.67),  # of two rows: mostly sums
    }),
    "modulated norm, bf16": Loop(partial(of_form, "gated", (2, 8, 1024)), NORM, {
        **best("norm_forward_kernel", "norm_backward_reduce_kernel"),
        "norm_backward_kernel": reads(1.0, writes=1.6),  # eight rows to a sum
    }),
    "dropout, bf16": Loop(
        lambda: functional.dropout(torch.randn(8192).to(BF16), 0.3), ("dropout.cu",),
        best("dropout_forward_kernel"),
    ),
    "branch, bf16": Loop(partial(of_form, "add", (3, 16, 1024)), ("dropout.cu",), {
        **best("branch_forward_kernel", "branch_backward_reduce_kernel"),
        "branch_backward_kernel": reads(1.0, writes=1.5),  # a sum of few rows
    }),
    "gate, bf16": Loop(
        partial(of_family, gate, 8, 2048, BF16), ("gate.cu",),
        best("gate_forward_kernel", "gate_backward_kernel"),
    ),
    "loss, bf16": Loop(partial(of_family, loss, 8, 1024, BF16), ("loss.cu",), {
        **best("loss_forward_kernel", "loss_backward_kernel", "loss_reduce_kernel"),
    }),
    "loss, f32": Loop(partial(of_family, loss, 8, 1024, F32), ("loss.cu",), {
        **best("loss_reduce_kernel"),
        "loss_forward_kernel": reads(1.98),  # packs of floats, and a target of each row
        "loss_backward_kernel": reads(1.95, writes=PACKS_OF_FLOATS),
    }),
    "rotary, halves": Loop(of_rotary, ROTARY, best("rotary_forward_kernel")),
    "rotary, interleaved": Loop(
        partial(of_rotary, interleaved=True), ROTARY, best("rotary_forward_kernel")
    ),
    "rotary, normed": Loop(partial(of_rotary, norms=("query", "key")), ROTARY, {
        **best("rotary_normed_forward_kernel", "rotary_backward_reduce_kernel"),
        "rotary_backward_kernel": reads(1.0, writes=1.11),  # sums of each column
    }),
    "group norm": Loop(partial(of_image, False), GROUP_NORM, GROUP_NORM_BEST | {
        **best("group_norm_moments_kernel", "group_norm_sums_kernel"),
        **best("group_norm_forward_kernel", "group_norm_backward_kernel"),
    }),
    # Before its pixels, a thread reads the weight and bias of its channels, and after them writes
    # their sums, an element at a time of eight neighbours: 16 x 16 pixels are few beside that.
    "group norm, channels last": Loop(partial(of_image, True), GROUP_NORM, GROUP_NORM_BEST | {
        "group_norm_pixel_moments_kernel": reads(1.0, writes=8.0),
        "group_norm_pixel_sums_kernel": reads(1.75, writes=8.0),
        "group_norm_pixel_forward_kernel": reads(2.0),
        "group_norm_pixel_backward_kernel": reads(1.6),
    }),
    # Packs of floats throughout, in bfloat16 one access, of codes one of 8 bytes.
    "adam, f32": Loop(partial(of_step, F32), optimizer.KERNELS, {
        "optimizer_step_kernel": reads(1.99, writes=2.0),
    }),
    "adam, bf16 and f32": Loop(partial(of_step, BF16, BF16, F32, F32), optimizer.KERNELS, {
        "optimizer_step_kernel": reads(1.85, writes=1.86),
    }),
    "adam, int8": Loop(partial(of_step, BF16, BF16, optimizer.INT8, F32), optimizer.KERNELS, {
        "optimizer_step_kernel": reads(1.48, writes=1.48),
    }),
    "clipping": Loop(clip, optimizer.KERNELS, {  # one tensor of float32, one of bfloat16
        "gradient_norm_kernel": reads(1.67),
        "scale_gradients_kernel": reads(1.66, writes=1.67),
    }),
    "attention, 128": Loop(partial(of_attention, dtype=BF16, head_dim=128), TILED_KERNELS, TILED),
    "attention, 64": Loop(partial(of_attention, dtype=BF16, head_dim=64), TILED_KERNELS, TILED),
    "attention, 256": Loop(partial(of_attention, dtype=BF16, head_dim=256), TILED_KERNELS, TILED),
    # Where a reduction adds one number, the sums of dQ lie otherwise.
    "attention, 128, before the H100": Loop(
        partial(of_attention, dtype=BF16, head_dim=128), TILED_KERNELS, TILED, dict(capability=86)
    ),
    # A warp reads and writes eight rows of a bias at once, 16 bytes of each: halves of sectors, as
    # fragments are.
    "attention, bias": Loop(partial(of_bias, BF16), TILED_KERNELS, TILED | {
        **best("attention_dbias_sums_kernel", "attention_sums_kernel"),
        "attention_backward_kernel": reads(1.24),
        "attention_dbias_kernel": reads(1.14, writes=1.97),
        "attention_delta_kernel": reads(1.96),
    }),
    # A thread writes its scores an element at a time, two rows of a warp to the same banks; they
    # are read eight times as often, without conflicts.
    "attention, f32": Loop(partial(of_attention, dtype=F32), KERNELS, DELTA | {
        "attention_forward_plain_kernel": (1.0, 1.25, 1.0, 1.0),
        "attention_backward_plain_kernel": (1.0, 1.25, 1.0, 1.0),
        "attention_dquery_plain_kernel": (1.0, 1.17, 1.0, 1.0),
    }),
    # Terms of scores go through shared memory as well, by the same banks.
    "attention, bias, f32": Loop(
        partial(of_attention, dtype=F32, batch=2, bias="q"), KERNELS, DELTA | {
        "attention_forward_plain_kernel": (1.03, 1.5, 1.0, 1.0),
        "attention_backward_plain_kernel": (1.0, 1.25, 1.0, 1.0),
        "attention_dquery_plain_kernel": (1.0, 1.17, 1.0, 1.0),
        **best("attention_dbias_plain_kernel"),
    }),
    # As tensor cores give them, a lane has two neighbours of one row: four of eight columns are two
    # accesses that share sectors.
    "attention, tf32": Loop(partial(of_attention, dtype=F32, tf32=True), KERNELS, DELTA | {
        "attention_forward_plain_kernel": (1.0, 1.06, 1.0, 1.97),
        "attention_backward_plain_kernel": (1.0, 1.25, 1.0, 2.0),
        "attention_dquery_plain_kernel": (1.0, 1.17, 1.0, 2.0),
    }),
    # The loop over keys is at its best; queries are read and put into shared memory by the element
    # before it, and the warps' values after it in the order of the products: for a chunk of 512
    # keys that is little where a warp has one query, and a third of everything where it has 16.
    "decode, bf16": Loop(
        partial(of_decode, dtype=BF16, head_dim=128, kv_heads=4), DECODE_KERNELS, {
        "attention_decode_kernel": (1.0, 1.1, 1.03, 1.0),
        "attention_decode_join_kernel": reads(1.01, writes=JOIN_WRITES),
    }),
    "decode, more new rows than are a tile": Loop(
        partial(of_decode, dtype=BF16, head_dim=128, heads=4, kv_heads=4, seq_q=32, new_rows=32),
        DECODE_KERNELS, {
        **best("attention_decode_append_kernel"),
        "attention_decode_kernel": (1.0, 2.02, 1.48, 1.0),
        "attention_decode_join_kernel": reads(1.04, writes=JOIN_WRITES),
    }),
    "decode, grouped": Loop(
        partial(of_decode, dtype=BF16, head_dim=128, heads=16, kv_heads=1), DECODE_KERNELS, {
        "attention_decode_kernel": (1.0, 1.95, 1.41, 1.0),
        "attention_decode_join_kernel": reads(1.05, writes=JOIN_WRITES),
    }),
    "decode, f32": Loop(partial(of_decode, dtype=F32, head_dim=128), DECODE_KERNELS, {
        "attention_decode_kernel": (1.0, 1.05, 1.05, 1.0),
        "attention_decode_join_kernel": reads(1.02, writes=3.82),
    }),
}  # fmt: skip


# One of the tiles is quick; the kernels without tiles take long to compile.
SLOW = {
    "decode, more new rows than are a tile", "attention, bias", "attention, bias, f32",
    "attention, 64", "attention, 256", "attention, f32", "attention, tf32",
}  # fmt: skip


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, loop in LOOPS.items()
    ],
)
def test_main_loops(cuda, loop):
    cuda.set(**loop.settings)
    with cuda.seen(*loop.kernels) as found:
        loop.run()
    ratios = {name: accesses.ratios for name, accesses in found.items()}
    if ratios != loop.expected:
        pytest.fail("\n".join(f"{name}: {accesses}" for name, accesses in found.items()))


def test_every_kernel_has_a_main_loop_here():
    told = {kernel for loop in LOOPS.values() for kernel in loop.expected}
    assert told == {kernel_of(instance) for instance in all_instances()}
