"""The raw ops of the attention family on the emulated CUDA back end.

`on_emulated_cuda(monkeypatch)` puts them in the place of torch.ops.onepass.attention_* and under
the public functions, so that a test of the CPU kernels becomes one of the CUDA kernels by one line.
What csrc/ops/attention.cpp and attention_decode.cpp do around a kernel is done here: arguments are
checked by the ops' own checks, layouts become strides, results are allocated.

Tensors go over as they lie in memory, each storage once and as a whole. Results are poisoned (NaN)
where ops/ does not fill them, and lie between guard bands; nothing but results and caches may
change.
"""

from __future__ import annotations

from dataclasses import dataclass

import emulated
import torch
from emulated_ops import Calls, run_case
from torch import Tensor

from onepass._ops import attention, attention_decode

FOLDER = emulated.ROOT / "csrc" / "cuda" / "attention"
KERNELS = tuple(f"attention/{file.name}" for file in sorted(FOLDER.glob("*.cu")))
# The back end's choice needs all that it chooses from.
PARTS = ("forward.cu", "backward.cu", "plain_forward.cu", "plain_backward.cu")
if not all((FOLDER / part).exists() for part in PARTS):
    KERNELS = tuple(name for name in KERNELS if name != "attention/backend.cu")
PROGRAM = ("attention", *KERNELS)
PATHS = {None: 0, "tiled": 1, "plain": 2}
FAR = {None: 0, "sequences": 1, "heads": 2, "rows": 3}
NO_LIMIT = (2**63 - 1) // 4
GUARD = 256  # bytes on both sides of a result
# Bits of grad_mask by what is differentiated.
BITS = dict(query=1, key=2, value=4, bias=8, sinks=16, alibi_slopes=32)
# The ops as they were before anything took their place.
FORWARD = torch.ops.onepass.attention_forward
FORWARD_CHECK = torch.ops.onepass.attention_forward_check
DECODE_CHECK = torch.ops.onepass.attention_decode_check
APPEND_CHECK = torch.ops.onepass.attention_decode_append_check


@dataclass
class AttentionCalls(Calls):
    """`misalign` moves storages of floats, or of the tensors that `misaligned` names as structs do.

    `path` is who takes the calls: "tiled" kernels, "plain" ones, or None, which the back end
    decides. `deterministic` is that of every backward, or None, as its caller says. `far` is what
    lies beyond the reach of 32 bits in every tensor of dense rows.
    """

    program: tuple[str, ...] = PROGRAM
    path: str | None = None
    deterministic: bool | None = None
    far: str | None = None
    allow_tf32: bool = False  # also where the caller does not


def on_emulated_cuda(
    monkeypatch, ops=("forward", "backward", "decode", "append"), **options
) -> AttentionCalls:
    """Of the ops that are named; the others stay what they are.

    But for a forward in TF32, which comes with the backward: that wants the LSE of such scores.
    """
    calls = AttentionCalls(**options)
    of_forward = calls if "forward" in ops else AttentionCalls(allow_tf32=calls.allow_tf32)
    if "backward" in ops:
        ops = {*ops, "forward"}

    def forward(*arguments, **keywords):
        if of_forward is not calls and not (calls.allow_tf32 or keywords.get("allow_tf32")):
            return FORWARD(*arguments, **keywords)
        return attention_forward(of_forward, *arguments, **keywords)

    def backward(*arguments, **keywords):
        return attention_backward(calls, *arguments, **keywords)

    def decode(*arguments, **keywords):
        return decoded(calls, *arguments, **keywords)

    places = dict(
        forward=(attention, "_forward", "attention_forward", forward),
        backward=(attention, "_backward", "attention_backward", backward),
        decode=(attention_decode, "_decode", "attention_decode", decode),
        append=(attention_decode, "_append", "attention_decode_append", decode),
    )
    for module, inside, name, function in (places[op] for op in ops):
        monkeypatch.setattr(module, inside, function)
        monkeypatch.setattr(torch.ops.onepass, name, function)
    return calls


class Arguments:
    """An argument struct in the making: numbers, and tensors by the storages that they lie in."""

    def __init__(self, calls: AttentionCalls):
        self.calls = calls
        self.numbers: dict = dict(path=PATHS[calls.path], far=FAR[calls.far])
        self.storages: dict[str, Tensor] = {}  # a tensor of each
        self.names: dict[int, str] = {}  # of storages, by address
        self.views: dict[str, tuple[str, int]] = {}
        self.written: set[str] = set()  # storages of results and caches
        self.results: list[Tensor] = []

    def add(self, name: str, tensor: Tensor | None, written: bool = False) -> None:
        """A pointer to the tensor's first element; null where it has none."""
        address = 0 if tensor is None else tensor.untyped_storage().data_ptr()
        if not address:
            return
        if address not in self.names:
            self.names[address] = f"storage{len(self.storages)}"
            self.storages[self.names[address]] = tensor
        of = self.names[address]
        self.views[name] = (of, tensor.storage_offset() * tensor.element_size())
        if written:
            self.written.add(of)

    def rows(self, name: str, tensor: Tensor | None, layout: str, written: bool = False) -> None:
        """A Strided; a last dimension that is not dense is copied."""
        if tensor is None:
            return
        tensor = tensor.detach()
        if tensor.shape[-1] != 1 and tensor.stride(-1) != 1:
            assert not written
            tensor = tensor.contiguous()
        strides = [0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        if layout == "packed":
            batch, (row, head, _) = 0, strides
        elif layout == "paged":
            batch, row, head, _ = strides
        else:
            batch, head, row, _ = strides
        of = dict(batch_stride=batch, head_stride=head, row_stride=row)
        self.numbers |= {f"{name}_{what}": stride for what, stride in of.items()}
        self.add(name, tensor, written)

    def elements(self, name: str, tensor: Tensor | None) -> None:
        self.add(name, None if tensor is None else tensor.detach().contiguous())

    def result(self, shape, dtype: torch.dtype, fill: float | None = None, bshd=False) -> Tensor:
        """An output: poison, or what ops/ fills it with, between guard bands of poison.

        There are none for the address sanitizer, whose own begin where the storage ends.
        """
        guard = 0 if self.calls.build == "address" else GUARD // dtype.itemsize
        buffer = torch.full((torch.Size(shape).numel() + 2 * guard,), float("nan"), dtype=dtype)
        inside = buffer[guard : buffer.numel() - guard]
        if fill is not None:
            inside.fill_(fill)
        self.results.append(inside)
        if bshd and len(shape) == 4:
            batch, heads, seq, dim = shape
            return inside.view(batch, seq, heads, dim).transpose(1, 2)
        return inside.view(shape)

    def run(self, op: str) -> None:
        before = {
            name: _whole(tensor).clone()
            for name, tensor in self.storages.items()
            if name not in self.written
        }
        run_case(self.calls, op, self.numbers, self.storages, self._moved(), self.views)
        for name, storage in before.items():
            written = [view for view, (of, _) in self.views.items() if of == name]
            assert torch.equal(_whole(self.storages[name]), storage), f"{op} wrote {written}"
        for inside in self.results:
            buffer = _whole(inside).view(inside.dtype)
            outside = buffer.numel() - inside.numel()
            border = torch.cat([buffer[: outside // 2], buffer[buffer.numel() - outside // 2 :]])
            assert border.isnan().all(), f"{op} wrote beside a result of {len(inside)} elements"

    def _moved(self) -> dict[str, int]:
        """Bytes beyond a multiple of 16 by storage."""
        pattern = self.calls.misaligned
        moved = dict.fromkeys(self.storages, 0)
        for name, (of, _) in self.views.items():
            tensor = self.storages[of]
            if name in pattern.split() if pattern else tensor.is_floating_point():
                moved[of] = self.calls.misalign // tensor.element_size() * tensor.element_size()
        return moved


def _whole(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _empty(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype)


def _attention(calls: AttentionCalls, query, key, value, o: dict) -> Arguments:
    """What both directions have, from the keyword arguments of the schema."""
    args = Arguments(calls)
    packed, paged = o.get("cu_seq_q") is not None, o.get("block_table") is not None
    rows = "packed" if packed else "dense"
    keys = "paged" if paged else rows
    args.rows("query", query, rows)
    args.rows("key", key, keys)
    args.rows("value", value, keys)
    for name in ("bias", "mask"):
        args.rows(name, o.get(name), "dense")
    for name in (
        "alibi_slopes", "sinks", "cu_seq_q", "cu_seq_k", "seqused_k", "block_table", "seed",
    ):  # fmt: skip
        args.elements(name, o.get(name))
    max_q, max_k = o.get("max_q", 0), o.get("max_k", 0)
    slopes, table = o.get("alibi_slopes"), o.get("block_table")
    batch = len(o["cu_seq_q"]) - 1 if packed else query.shape[0]
    heads = query.shape[1]
    seq_q, seq_k = (max_q, max_k) if packed else (query.shape[2], key.shape[2])

    def limit(name):
        window = o.get(name, -1)
        return NO_LIMIT if window < 0 else min(window, NO_LIMIT)

    args.numbers |= dict(
        alibi_batch_stride=heads if slopes is not None and slopes.dim() == 2 else 0,
        block_table_stride=table.shape[1] if paged else 0,
        page_size=key.shape[1] if paged else 0,
        key_blocks=key.shape[0], key_rows=key.shape[1 if paged else -2],
        batch=batch, heads=heads, kv_heads=key.shape[2 if paged else 1], seq_q=seq_q, seq_k=seq_k,
        total_q=query.shape[0] if packed else batch * seq_q,
        head_dim=query.shape[-1], value_dim=value.shape[-1],
        window_left=limit("window_left"), window_right=limit("window_right"),
        query_offset=o.get("query_offset", 0), key_offset=o.get("key_offset", 0),
        bottom_right=o.get("bottom_right", False),
        whole_q=max_q or seq_q, whole_k=max_k or seq_k, scale=float(o["scale"]),
        softcap=float(o.get("softcap", 0.0)), dropout_p=float(o.get("dropout_p", 0.0)),
        allow_tf32=calls.allow_tf32 or o.get("allow_tf32", False),
        dtype=query.dtype, bias_dtype=(query if o.get("bias") is None else o["bias"]).dtype,
        sinks_dtype=(query if o.get("sinks") is None else o["sinks"]).dtype,
    )  # fmt: skip
    return args


def _statistic_shape(args: Arguments, query: Tensor) -> tuple[int, ...]:
    return query.shape[:3] if query.dim() == 4 else (query.shape[1], query.shape[0])


def attention_forward(calls: AttentionCalls, query, key, value, **options):
    """(output, lse, lse_rest)"""
    FORWARD_CHECK(query, key, value, **options)
    args = _attention(calls, query, key, value, options)
    shape = (*query.shape[:-1], value.shape[-1])
    output = args.result(shape, query.dtype, bshd=options.get("out_bshd", False))
    accumulator, statistic = _accumulator(query.dtype), _statistic_shape(args, query)
    lse, lse_rest = args.result(statistic, accumulator), args.result(statistic, accumulator)
    args.rows("output", output, "dense" if query.dim() == 4 else "packed", written=True)
    args.add("lse", lse, written=True)
    args.add("lse_rest", lse_rest, written=True)
    if args.numbers["total_q"] * args.numbers["heads"] > 0:
        args.run("attention_forward")
    return output, lse, lse_rest


def attention_backward(
    calls: AttentionCalls, doutput, dlse, query, key, value, output, lse, lse_rest=None, *,
    grad_mask, deterministic=False, **options,
):  # fmt: skip
    """(dquery, dkey, dvalue, [dbias, dsinks, dslopes])"""
    FORWARD_CHECK(query, key, value, **options)
    args = _attention(calls, query, key, value, options)
    layout = "dense" if query.dim() == 4 else "packed"
    bshd = options.get("out_bshd", False)
    empty = args.numbers["total_q"] * args.numbers["heads"] == 0
    of = dict(query=query, key=key, value=value)
    of |= {name: options.get(name) for name in ("bias", "sinks", "alibi_slopes")}
    gradients = {}
    for name, tensor in of.items():
        if not grad_mask & BITS[name]:
            gradients[name] = _empty(query.dtype if tensor is None else tensor.dtype)
            continue
        zero = empty or (options.get("seqused_k") is not None and name in ("key", "value"))
        gradients[name] = args.result(
            tensor.shape, tensor.dtype, 0 if zero else None, bshd and name in "query key value"
        )
    if not empty:
        upstream = torch.zeros(output.shape, dtype=output.dtype) if doutput is None else doutput
        args.rows("doutput", upstream, layout)
        args.rows("output", output, layout)
        for name, tensor in (("lse", lse), ("lse_rest", lse_rest), ("dlse", dlse)):
            args.elements(name, tensor)
        for name in ("query", "key", "value"):
            if grad_mask & BITS[name]:
                args.rows(f"d{name}", gradients[name], layout, written=True)
        if grad_mask & BITS["bias"]:
            args.rows("dbias", gradients["bias"], "dense", written=True)
        if grad_mask & BITS["sinks"]:
            args.add("dsinks", gradients["sinks"], written=True)
        if grad_mask & BITS["alibi_slopes"]:
            args.add("dslopes", gradients["alibi_slopes"], written=True)
        if calls.deterministic is not None:
            deterministic = calls.deterministic
        args.numbers |= dict(dbias_numel=gradients["bias"].numel(), deterministic=deterministic)
        args.run("attention_backward")
    *of_inputs, dbias, dsinks, dslopes = gradients.values()
    return *of_inputs, [dbias, dsinks, dslopes]


def decoded(calls: AttentionCalls, query, k_cache, v_cache, key=None, value=None, **options):
    """(output, lse) of attention_decode, or with a key of attention_decode_append."""
    if key is None:
        DECODE_CHECK(query, k_cache, v_cache, **options)
    else:
        APPEND_CHECK(query, k_cache, v_cache, key, value, **options)
    renamed = dict(options, bottom_right=True, seqused_k=options.get("cache_seqlens"))
    args = _attention(calls, query, k_cache, v_cache, renamed)
    new_rows = 0 if key is None else key.shape[2]
    caches = {cache.untyped_storage().data_ptr() for cache in (k_cache, v_cache)}
    table = options.get("block_table")
    if table is not None:
        args.numbers["seq_k"] = args.numbers["whole_k"] = table.shape[1] * k_cache.shape[1]

    def outside(name, tensor):  # what lies in a cache is copied before that is written
        if tensor is not None and new_rows and tensor.untyped_storage().data_ptr() in caches:
            tensor = tensor.clone()
        args.rows(name, tensor, "dense")

    layout = "dense" if table is None else "paged"
    args.rows("key", k_cache, layout, written=new_rows > 0)
    args.rows("value", v_cache, layout, written=new_rows > 0)
    outside("query", query)
    outside("new_key", key)
    outside("new_value", value)
    for name in ("cache_batch_idx", "cache_leftpad", "rotary_cos", "rotary_sin"):
        args.elements(name, options.get(name))
    cos = options.get("rotary_cos")
    windowed = max(options.get("window_left", -1), options.get("window_right", -1)) >= 0
    args.numbers |= dict(
        new_rows=new_rows, rotary_dim=0 if cos is None else 2 * cos.shape[1],
        rotary_dtype=query.dtype if cos is None else cos.dtype,
        rotary_interleaved=options.get("rotary_interleaved", True),
        rotary_by_row=cos is not None and windowed,
    )  # fmt: skip
    shape = (*query.shape[:3], v_cache.shape[-1])
    output = args.result(shape, query.dtype, bshd=options.get("out_bshd", False))
    lse = args.result(query.shape[:3], torch.float32)
    args.rows("output", output, "dense", written=True)
    args.add("lse", lse, written=True)
    if query.shape[0] * query.shape[1] > 0 and query.shape[2] + new_rows > 0:
        args.run("attention_decode")
    return output, lse
