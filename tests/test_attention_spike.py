"""The attention spike under the emulator: the schemas and the Philox layout hold for tile kernels.

What is tested here does not ship; tests/cuda_emulator/attention_spike.cuh says what it is for.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

import emulated
import emulated_ops
import nvcc
import pytest
import torch
from emulated_ops import Calls
from torch import Tensor

from onepass import numerics
from onepass.reference.dropout import philox4x32

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WORD = 0xFFFFFFFF
QUERIES = 64  # of a block
FORWARD_KEYS = {32: 64, 64: 32}  # of a block, by head_dim
BACKWARD_KEYS = 64


@dataclass(frozen=True)
class Case:
    """One attention. Its offsets say where it begins within a larger one."""

    dtype: torch.dtype = BF16
    head_dim: int = 64
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    seq_q: int = 70
    seq_k: int = 100
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False
    bias: str | None = None  # which of b(atch), h(eads), q(ueries) are not broadcast
    dropout_p: float = 0.0
    strided: bool = False
    query_offset: int = 0
    key_offset: int = 0
    batch_offset: int = 0
    head_offset: int = 0
    total_heads: int = 0
    seed: Tensor = field(default=torch.tensor([-0x0123456789ABCDEF, 2**40 + 5]), repr=False)

    @property
    def scale(self) -> float:
        return 1.3 / math.sqrt(self.head_dim)  # not the default

    @property
    def keep_scale(self) -> float:
        threshold = math.floor(65536 * self.dropout_p + 0.5)
        return 65536 / (65536 - threshold) if threshold < 65536 else 0.0

    def allowed(self) -> Tensor:
        """(seq_q, seq_k) whether a query sees a key."""
        query = torch.arange(self.seq_q)[:, None] + self.query_offset
        key = torch.arange(self.seq_k) + self.key_offset
        if self.bottom_right:
            query = query + self.seq_k - self.seq_q
        seen = torch.ones(self.seq_q, self.seq_k, dtype=torch.bool)
        if self.window_left >= 0:
            seen &= key >= query - self.window_left
        if self.window_right >= 0:
            seen &= key <= query + self.window_right
        return seen

    def drawn(self) -> Tensor:
        """(batch, heads, seq_q, seq_k) the 16 bits of each score, as DESIGN.md freezes them."""
        batch = torch.arange(self.batch)[:, None, None, None] + self.batch_offset
        head = torch.arange(self.heads)[:, None, None] + self.head_offset
        query = torch.arange(self.seq_q)[:, None] + self.query_offset
        key = torch.arange(self.seq_k) + self.key_offset
        sequence = batch * (self.total_heads or self.heads) + head
        first, second = self.seed.tolist()
        offset = torch.tensor(second & WORD)
        counter = torch.broadcast_tensors(query, key // 8, sequence, offset)
        words = philox4x32((first & WORD, first >> 32 & WORD), counter)
        halves = torch.stack([word >> shift & 0xFFFF for word in words for shift in (0, 16)], -1)
        return halves.gather(-1, (key % 8).expand(counter[0].shape)[..., None])[..., 0]

    def kept(self) -> Tensor:
        return self.drawn() >= math.floor(65536 * self.dropout_p + 0.5)

    def tensors(self) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(0)

        def random(heads, rows):
            shape = (self.batch, heads, rows, self.head_dim)
            if self.strided:
                shape = (self.batch, rows, heads, self.head_dim)
            tensor = torch.randn(shape, generator=generator).to(self.dtype)
            return tensor.transpose(1, 2) if self.strided else tensor

        query, doutput = random(self.heads, self.seq_q), random(self.heads, self.seq_q)
        key, value = random(self.kv_heads, self.seq_k), random(self.kv_heads, self.seq_k)
        dlse = torch.randn(query.shape[:3], generator=generator)
        bias = None
        if self.bias is not None:
            full = dict(b=self.batch, h=self.heads, q=self.seq_q)
            shape = [size if name in self.bias else 1 for name, size in full.items()]
            # Exact in 16 bits, so that its rounding is no part of what stock PyTorch may err by.
            bias = torch.randn(*shape, self.seq_k, generator=generator).to(BF16).float()
        return dict(query=query, key=key, value=value, bias=bias, doutput=doutput, dlse=dlse)


# ---- ours ----------------------------------------------------------------------------------------


def call(calls: Calls, case: Case, op: str, tensors: dict[str, Tensor | None]) -> None:
    names = "batch heads kv_heads seq_q seq_k head_dim window_left window_right query_offset "
    names += "key_offset batch_offset head_offset scale dropout_p dtype bottom_right"
    numbers = {name: getattr(case, name) for name in names.split()}
    numbers["total_heads"] = case.total_heads or case.heads
    tensors = dict(tensors)
    if tensors["bias"] is not None:
        full = (case.batch, case.heads, case.seq_q, case.seq_k)
        tensors["bias"] = tensors["bias"].expand(full)
    for name, tensor in tensors.items():
        if tensor is None or tensor.dim() < 4:
            continue
        for of, stride, size in zip(
            ("batch", "head", "row"), tensor.stride(), tensor.shape, strict=False
        ):  # 0 where there is one: a dbias of one batch is summed over all
            numbers[f"{name}_{of}_stride"] = stride if size > 1 else 0
    tensors["seed"] = case.seed if case.dropout_p else None
    emulated_ops.run(calls, op, numbers, tensors)


def spike(**options) -> Calls:
    return Calls(program=("attention_spike",), **options)


def forward(calls: Calls, case: Case, tensors) -> dict[str, Tensor]:
    output = torch.full_like(tensors["query"], float("nan"))
    lse = torch.full(output.shape[:3], float("nan"))
    inputs = {name: tensors[name] for name in ("query", "key", "value", "bias")}
    call(calls, case, "attention_forward", dict(inputs, output=output, lse=lse))
    return dict(output=output, lse=lse)


def backward(calls: Calls, case: Case, tensors, outputs) -> dict[str, Tensor]:
    nan = float("nan")
    gradients = {
        f"d{name}": torch.full_like(tensors[name], nan) for name in ("query", "key", "value")
    }
    if tensors["bias"] is not None:
        batch = tensors["bias"].shape[0]
        gradients["dbias"] = torch.full((batch, case.heads, case.seq_q, case.seq_k), nan)
    call(calls, case, "attention_backward", tensors | outputs | gradients)
    if tensors["bias"] is not None:  # the kernel sums over a broadcast batch alone
        gradients["dbias"] = gradients["dbias"].sum_to_size(tensors["bias"].shape)
    return gradients


def both(calls: Calls, case: Case) -> dict[str, Tensor]:
    tensors = case.tensors()
    outputs = forward(calls, case, tensors)
    return outputs | backward(calls, case, tensors, outputs)


# ---- the definition ------------------------------------------------------------------------------


def definition(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs and gradients by torch's own operations in `dtype`."""
    tensors = {name: t if t is None else t.to(dtype) for name, t in case.tensors().items()}
    names = ["query", "key", "value"] + ["bias"] * (case.bias is not None)
    wrt = [tensors[name].requires_grad_() for name in names]
    group = case.heads // case.kv_heads
    key, value = (tensors[name].repeat_interleave(group, 1) for name in ("key", "value"))
    score = tensors["query"] @ key.mT * case.scale
    if case.bias is not None:
        score = score + tensors["bias"]
    masked = ~case.allowed()
    score = score.masked_fill(masked, -math.inf)
    lse = score.logsumexp(-1)
    p = score.softmax(-1).masked_fill(masked, 0)  # not NaN in a row without keys
    if case.dropout_p:
        p = p * (case.kept().to(dtype) * case.keep_scale)
    output = p @ value
    gradients = torch.autograd.grad((output, lse), wrt, (tensors["doutput"], tensors["dlse"]))
    named = {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    return dict(output=output.detach(), lse=lse.detach(), **named)


def check(case: Case, ours: dict[str, Tensor]) -> None:
    ref, base = definition(case, F64), definition(case, case.dtype)
    base["lse"] = definition(case, F32)["lse"]  # a float32 result of exact products
    assert ours.keys() == ref.keys()
    for name, result in ours.items():
        numerics.assert_close(result, ref[name], base[name], f"{case}: {name}")


# ---- values and gradients ------------------------------------------------------------------------

CASES = {
    "full": Case(),
    "causal": Case(F16, seq_q=100, seq_k=100, window_right=0),
    "causal, few keys": Case(F16, 32, seq_q=100, seq_k=30, window_right=0),
    "bottom right": Case(head_dim=32, seq_q=40, seq_k=110, window_right=0, bottom_right=True),
    "rows without keys": Case(
        F16, 32, seq_q=90, seq_k=30, window_right=0, bottom_right=True, bias="bhq"
    ),
    "window": Case(seq_q=150, seq_k=140, window_left=20, window_right=10),
    "window, bottom right": Case(
        F16, seq_q=65, seq_k=150, window_left=37, window_right=0, bottom_right=True, bias="hq"
    ),
    "window beyond the keys": Case(
        F16, 32, seq_q=130, seq_k=30, window_left=5, bias="bhq", dropout_p=0.2
    ),
    "bias": Case(F16, 32, batch=2, bias="bhq"),
    "bias of all batches": Case(batch=3, heads=1, kv_heads=1, seq_q=20, bias="hq"),
    "bias of all heads": Case(F16, batch=2, bias="bq", seq_q=30),
    "bias of all queries": Case(head_dim=32, batch=2, bias="b"),
    "dropout": Case(dropout_p=0.3),
    "dropout, narrow": Case(F16, 32, batch=2, dropout_p=0.1),
    "everything dropped": Case(head_dim=32, seq_q=9, seq_k=20, dropout_p=1.0),
    "groups": Case(head_dim=32, heads=4, kv_heads=2, dropout_p=0.2),
    "one key head": Case(F16, batch=2, heads=3, kv_heads=1, seq_q=33, seq_k=66),
    "odd lengths": Case(seq_q=33, seq_k=77, dropout_p=0.5),
    "one key": Case(F16, seq_q=5, seq_k=1),
    "one score": Case(head_dim=32, seq_q=1, seq_k=1),
    "strided": Case(F16, batch=2, heads=4, kv_heads=2, seq_k=70, window_right=0, strided=True),
    "offsets": Case(
        seq_q=80, seq_k=90, window_left=30, window_right=0, query_offset=1000, key_offset=1003,
        batch_offset=2, head_offset=3, total_heads=7, dropout_p=0.25, bias="bhq",
    ),
    "everything": Case(
        batch=2, heads=2, kv_heads=1, seq_q=66, seq_k=110, window_left=90, window_right=0,
        bottom_right=True, bias="hq", dropout_p=0.25, strided=True, query_offset=5, key_offset=5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    check(CASES[name], both(spike(), CASES[name]))


def test_rows_without_keys():
    case = CASES["rows without keys"]
    ours = both(spike(), case)
    empty = ~case.allowed().any(-1)
    assert empty.sum() == case.seq_q - case.seq_k
    assert (ours["output"][..., empty, :] == 0).all() and (
        ours["lse"][..., empty] == -math.inf
    ).all()
    assert (ours["dquery"][..., empty, :] == 0).all() and (ours["dbias"][..., empty, :] == 0).all()


def test_keys_that_no_query_of_a_block_sees_are_not_read():
    case = Case(seq_q=40, seq_k=100, window_right=0)
    tensors = case.tensors()
    clean = forward(spike(), case, tensors)
    tensors["key"][:, :, 40:], tensors["value"][:, :, 40:] = float("nan"), float("inf")
    for name, result in forward(spike(), case, tensors).items():
        assert torch.equal(result, clean[name])


# ---- dropout -------------------------------------------------------------------------------------


def with_threshold(case: Case) -> Case:
    """dropout_p is so that the threshold is just what one of the kept scores has drawn."""
    return replace(case, dropout_p=int(case.drawn()[0, 1, 2, 3]) / 65536)


FATES = [
    with_threshold(Case(batch=2, seq_k=150)),
    with_threshold(
        Case(F16, 32, seq_k=90, query_offset=2**31 - 20, key_offset=8 * 2**20 + 3,
             batch_offset=3, head_offset=5, total_heads=12)
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", FATES, ids=["whole", "a shard"])
def test_forward_drops_what_the_reference_drops(case):
    """All P are alike, and value is the identity on one run of head_dim keys after another."""
    tensors = case.tensors()
    tensors["query"].zero_()
    for first in range(0, case.seq_k, case.head_dim):
        keys = range(first, min(first + case.head_dim, case.seq_k))
        tensors["value"].zero_()
        tensors["value"][:, :, list(keys), list(range(len(keys)))] = 1
        output = forward(spike(), case, tensors)["output"][..., : len(keys)]
        kept = case.kept()[..., keys.start : keys.stop]
        assert torch.equal(output != 0, kept)
        one = torch.tensor(case.keep_scale / case.seq_k, dtype=F32).to(case.dtype)
        assert torch.equal(output, kept.to(case.dtype) * one)


@pytest.mark.parametrize("case", FATES, ids=["whole", "a shard"])
def test_backward_drops_what_the_reference_drops(case):
    """P is 1, dP is head_dim and delta is 0: dbias is the scaled mask, bit for bit."""
    case = replace(case, bias="bhq")
    tensors = case.tensors() | dict(dlse=None)
    tensors["query"].zero_(), tensors["bias"].zero_()
    tensors["value"].fill_(1), tensors["doutput"].fill_(1)
    shape = (case.batch, case.heads, case.seq_q)
    outputs = dict(output=torch.zeros_like(tensors["query"]), lse=torch.zeros(shape))
    dbias = backward(spike(), case, tensors, outputs)["dbias"]
    one = torch.tensor(case.keep_scale, dtype=F32) * case.head_dim
    assert torch.equal(dbias, case.kept() * one)


def tiles(case: Case, keys: int) -> int:
    """How many (query block, key block) tiles of one (batch, head) have a score to compute."""
    seen = case.allowed()
    lead = torch.zeros(case.seq_q, case.key_offset % 8, dtype=torch.bool)
    seen = torch.cat([lead, seen], 1)
    blocks = (part for rows in seen.split(QUERIES) for part in rows.split(keys, 1))
    return sum(bool(block.any()) for block in blocks)


@pytest.mark.parametrize(
    "name", ["dropout", "dropout, narrow", "window beyond the keys", "offsets", "everything"]
)
def test_one_philox_call_for_eight_scores(name):
    calls, case = spike(), CASES[name]
    both(calls, case)
    sequences = case.batch * case.heads
    for done, keys in zip(calls.done, (FORWARD_KEYS[case.head_dim], BACKWARD_KEYS), strict=True):
        assert 8 * done["philox_calls"] == sequences * tiles(case, keys) * QUERIES * keys


# ---- shards --------------------------------------------------------------------------------------

WHOLE = Case(F16, 32, batch=2, heads=4, kv_heads=4, seq_q=90, seq_k=90, window_right=0,
             dropout_p=0.3)  # fmt: skip


def test_a_shard_of_batch_heads_and_queries_is_the_wholes():
    """Data, tensor and context parallel: bit for bit, whatever another device does."""
    whole = both(spike(), WHOLE)
    tensors = WHOLE.tensors()
    shard = replace(WHOLE, batch=1, batch_offset=1, heads=2, kv_heads=2, head_offset=2,
                    total_heads=4, seq_q=26, query_offset=64)  # fmt: skip
    heads = (slice(1, 2), slice(2, 4))
    part = {name: tensors[name][heads].clone() for name in ("key", "value")}
    part |= {name: tensors[name][heads][:, :, 64:].clone() for name in ("query", "doutput", "dlse")}
    part["bias"] = None
    ours = forward(spike(), shard, part)
    ours |= {"dquery": backward(spike(), shard, part, ours)["dquery"]}
    for name, result in ours.items():
        assert torch.equal(result, whole[name][heads][:, :, 64:]), name


def test_shards_of_keys_merge_by_their_lse():
    """A ring: parts of the keys that begin anywhere, also within what one Philox call covers."""
    tensors = WHOLE.tensors()
    parts = []
    for first, last in itertools.pairwise((0, 45, 90)):
        shard = replace(WHOLE, seq_k=last - first, key_offset=first)
        part = {name: tensors[name][:, :, first:last].clone() for name in ("key", "value")}
        parts.append(forward(spike(), shard, tensors | part))
    lses = torch.stack([part["lse"] for part in parts])
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp()[..., None]
    output = sum(
        weight * part["output"].float() for weight, part in zip(weights, parts, strict=True)
    )
    ref, base = definition(WHOLE, F64), definition(WHOLE, F16)
    numerics.assert_close(output.half(), ref["output"], base["output"])
    numerics.assert_close(lse, ref["lse"], definition(WHOLE, F32)["lse"])


# ---- order, traffic, sanitizers, the compiler ----------------------------------------------------


def test_the_order_of_blocks_and_threads_does_not_matter():
    case = replace(CASES["everything"], heads=4, kv_heads=2)
    first, *others = (both(spike(seed=seed), case) for seed in range(3))
    for other in others:
        for name, result in first.items():
            assert torch.equal(result, other[name]), name


@pytest.mark.parametrize(
    "name", ["full", "causal", "window", "bias", "rows without keys", "everything"]
)
def test_forward_reads_each_byte_once_per_block_of_queries(name):
    calls, case = spike(), CASES[name]
    forward(calls, case, case.tensors())
    row = case.head_dim * case.dtype.itemsize
    read = 0
    for seen in case.allowed().split(QUERIES):
        read += seen.any().int() * len(seen) * row  # the queries
        read += seen.any(0).sum() * 2 * row  # the keys and values that any of them sees
        if case.bias is not None:
            read += seen.sum() * F32.itemsize
    sequences = case.batch * case.heads
    (done,) = calls.done
    assert done["read"] == sequences * read
    assert done["written"] == sequences * case.seq_q * (row + F32.itemsize)


@pytest.mark.parametrize("build", emulated.BUILDS)
def test_all_builds_are_silent(build):
    check(CASES["everything"], both(spike(build=build), CASES["everything"]))


KERNELS = """
#include "cuda_emulator/attention_spike.cuh"
namespace onepass::cuda::attention_spike {
template __global__ void attention_forward_kernel<BFloat16, 64>(AttentionForward);
template __global__ void attention_forward_kernel<Float16, 64>(AttentionForward);
template __global__ void attention_backward_kernel<BFloat16, 64>(AttentionBackward, const float*,
                                                                 float*);
template __global__ void attention_backward_kernel<Float16, 64>(AttentionBackward, const float*,
                                                                float*);
}  // namespace onepass::cuda::attention_spike
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention_spike")
    (folder / "kernels.cu").write_text(KERNELS)
    return nvcc.compile_cubin(folder / "kernels.cu", folder / "kernels.cubin", "sm_80")


def test_compiled_forward_does_not_spill(compiled):
    """The backward as it is here takes all registers there are, with no promise to stay there."""
    forward = {name: used for name, used in nvcc.resources(compiled).items() if "forward" in name}
    assert len(forward) == 2
    assert all(used["STACK"] == used["LOCAL"] == 0 for used in forward.values()), forward


def test_compiled_kernels_multiply_on_tensor_cores_and_copy_asynchronously(compiled):
    kernels = nvcc.machine_code(compiled)
    assert len(kernels) == 4
    for name, text in kernels.items():
        for instruction in ("HMMA.16816.F32", "LDSM.16", "LDGSTS"):
            assert instruction in text, f"{instruction} is not in {name}"
