"""Along which dimensions the calls of each family's entry may be split between processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from onepass._dtensor import losses
from onepass._dtensor.layout import Layout, Names, Parts
from onepass._ops import linear_loss, loss
from onepass._ops.differentiation import constant
from onepass._ops.rotary import rotary

Given = dict[str, object]


def _dims(tensor: Tensor, count: int | None = None) -> Names:
    """Names for the first dimensions, or all, but those of size 1."""
    count = tensor.dim() if count is None else max(count, 0)
    return tuple(str(d) if tensor.shape[d] > 1 else None for d in range(min(count, tensor.dim())))


def _choices(*names: Names) -> list[tuple[str, ...]]:
    """Each name alone, in order."""
    return [(name,) for name in dict.fromkeys(n for some in names for n in some) if name]


def _row_dims(given: Given) -> Names:
    """Dimensions of input before the normalized ones."""
    shape, input = given["normalized_shape"], given["input"]
    return _dims(input, input.dim() - (1 if isinstance(shape, int) else len(shape)))


def _norm(given: Given) -> Layout:
    rows = _row_dims(given)
    all_dims = rows + (None,) * (given["input"].dim() - len(rows))
    return Layout({"input": rows, "residual": rows}, (all_dims, all_dims), _choices(rows))


def _scaled_add_norm(given: Given) -> Layout:
    layout = _norm(given)
    return _with(layout, row_scale=_row_dims(given)[:1])


def _modulated_norm(given: Given) -> Layout:
    layout, rows, input = _norm(given), _row_dims(given), given["input"]
    inputs = {}
    for name in ("scale", "shift", "gate"):
        of = given[name]
        if of is not None:  # one for each sample, or each row; some dimensions may be 1
            inputs[name] = tuple(
                row if size > 1 else None for row, size in zip(rows, of.shape, strict=False)
            )
            if of.dim() < input.dim():
                inputs[name] = inputs[name][:1]
    layout = _with(layout, **inputs)
    if given["residual"] is None:
        layout.outputs = (layout.outputs[0], (None,))  # which is empty
    return layout


def _with(layout: Layout, **inputs: Names) -> Layout:
    layout.inputs = {**layout.inputs, **inputs}
    return layout


def _elementwise(given: Given) -> Layout:
    """Dropout, alone or with the residual add and the norm around it."""
    dims = _dims(given["input"])
    inputs = {"input": dims, "residual": dims, "column_scale": dims[-1:], "row_scale": dims[:1]}
    return Layout(inputs, (dims,), _choices(dims))


def _gate(given: Given) -> Layout:
    dims = _dims(given["gate"])
    if given["up"] is None:  # both halves of a row are in one tensor
        dims = (*dims[:-1], None)
    return Layout({"gate": dims, "up": dims}, (dims,), _choices(dims))


def _causal_conv1d(given: Given) -> Layout:
    samples = _dims(given["x"], 1)
    channels = ("channels",)
    dims = (*samples, *channels)
    inputs = {"x": dims, "initial_state": dims, "seq_idx": samples}
    inputs |= {"weight": channels, "bias": channels}
    return Layout(inputs, ((*dims, None),), _choices(dims))


def _selective_scan(given: Given) -> Layout:
    samples = _dims(given["u"], 1)
    # Channels of one group; of several, each process would need some of B's and C's alone.
    channels = ("channels",) if given["B"].dim() == 3 else (None,)
    dims, rows = (*samples, *channels), {"B": samples, "C": samples}
    inputs = dict.fromkeys(("u", "delta", "z", "initial_state"), dims) | rows
    inputs |= dict.fromkeys(("A", "D", "delta_bias"), channels)
    return Layout(inputs, ((*dims, None), (*dims, None)), _choices(dims))


def _mamba_chunk_scan(given: Given) -> Layout:
    samples = _dims(given["x"], 1)
    # Heads of one group, as channels in _selective_scan.
    heads = ("heads",) if given["B"].shape[2] == 1 else (None,)
    dims = (*samples, None, *heads)
    inputs = dict.fromkeys(("x", "z", "dt"), dims) | {"B": samples, "C": samples}
    inputs |= {"initial_states": (*samples, *heads)}
    inputs |= dict.fromkeys(("A", "D", "dt_bias"), heads)
    results = ((*dims, None), (*samples, *heads, None, None))
    return Layout(inputs, results, _choices((*samples, *heads)))


def _delta_rule(given: Given) -> Layout:
    q, v = given["q"], given["v"]
    samples = _dims(q, 1) if given["cu_seqlens"] is None else (None,)
    # A head of keys and the heads that it serves stay together.
    heads = ("heads",) if q.shape[2] == v.shape[2] else (None,)
    dims, of_state = (*samples, None, *heads), (*samples, *heads)
    inputs = dict.fromkeys(("q", "k", "v", "g", "beta"), dims)
    inputs |= dict.fromkeys(("initial_state", "state"), of_state)
    results = ((*dims, None), (*of_state, None, None))
    return Layout(inputs, results, _choices((*samples, *heads)))


def _delta_rule_update(given: Given) -> Layout:
    layout = _delta_rule(given)
    layout.outputs, layout.written = layout.outputs[:1], frozenset({"state"})
    return layout


def _causal_conv1d_update(given: Given) -> Layout:
    channels = ("channels",)
    dims = (*_dims(given["x"], 1), *channels)
    inputs = {"x": dims, "conv_state": dims, "weight": channels, "bias": channels}
    results = (*dims, *(None,) * (given["x"].dim() - 2))
    return Layout(inputs, (results,), _choices(dims), written=frozenset({"conv_state"}))


def _selective_state_update(given: Given) -> Layout:
    samples, groups = _dims(given["x"], 1), given["B"].shape[1:-1]
    own = ("heads", "channels") if groups == (1,) else (None, "channels")  # as in _selective_scan
    own = own[2 - (given["x"].dim() - 1) :]
    dims = (*samples, *own)
    inputs = dict.fromkeys(("state", "x", "dt", "z"), dims) | {"B": samples, "C": samples}
    inputs |= dict.fromkeys(("A", "D", "dt_bias"), own)
    return Layout(inputs, (dims,), _choices(dims), written=frozenset({"state"}))


def _group_norm(given: Given) -> Layout:
    input = given["input"]
    # Channels by whole groups, which stand for them.
    dims = (*_dims(input, 1), "channels")
    groups = given["num_groups"]

    def localize(given: Given, parts: Parts) -> None:
        given["num_groups"] = groups // parts.count("channels")

    return Layout(
        {"input": dims, "weight": ("channels",), "bias": ("channels",)},
        ((*dims, *(None,) * (input.dim() - 2)),),
        _choices(dims),
        even={"channels": groups},
        localize=localize,
        special=frozenset({"channels"}),
    )


def _linear(given: Given) -> Layout:
    """Splits by rows, by columns of the output, or by the columns that are summed over. Results are
    parts of a sum then, and the bias is added to the first part."""
    input = given["input"]
    rows = _dims(input, input.dim() - 1)

    def localize(given: Given, parts: Parts) -> None:
        bias = given["bias"]
        if bias is not None and parts.begin("in"):  # this is a later part, where its gradient is 0
            given["bias"] = bias.masked_fill(bias.new_ones((), dtype=torch.bool), 0.0)

    return Layout(
        {"input": (*rows, "in"), "weight": ("out", "in"), "bias": ("out",)},
        ((*rows, "out"),),
        [*_choices(rows), ("out",), ("in",)],
        summed=frozenset({"in"}),
        localize=localize,
        special=frozenset() if given["bias"] is None else frozenset({"in"}),
    )


def _quantized_linear(given: Given) -> Layout:
    """Splits by rows alone: words hold codes of several columns and rows of the weight."""
    rows = _dims(given["input"], given["input"].dim() - 1)
    dims = (*rows, None)
    return Layout({"input": dims, "residual": dims}, (dims,), _choices(rows))


def _linear_epilogue(given: Given) -> Layout:
    """The same, but for parts of a sum, to which no activation can be applied."""
    layout = _linear(given)
    layout.choices = layout.choices[:-1]
    return _with(layout, residual=layout.outputs[0])


def _rotary(given: Given) -> Layout:
    """Splits by sequences, heads or tokens. Tables that are looked up in stay whole."""
    query, key, cos, positions = (given[name] for name in ("query", "key", "cos", "positions"))
    of_query, of_key = ("batch", "heads", "tokens", None), ("batch", "kv_heads", "tokens", None)
    tokens = ("batch", "tokens")[-cos.dim() + 1 :] if positions is None else ()
    inputs = {"query": of_query, "key": of_key}
    inputs |= {name: _over(given[name], tokens) for name in ("cos", "sin")}
    if positions is not None:
        inputs["positions"] = _over(positions, ("batch", "tokens")[-positions.dim() :])
    return Layout(
        inputs,
        (of_query, () if key is None else of_key),
        [("batch",), _heads(query.shape[1], None if key is None else key.shape[1]), ("tokens",)],
        even=_even(query.shape[1], None if key is None else key.shape[1]),
    )


def _rotary_inplace(given: Given) -> Layout:
    """Computed elsewhere and assigned, so that torch's autograd sees it."""
    layout = _rotary(given)
    layout.outputs = layout.outputs[: 1 if given["key"] is None else 2]
    whole = [given[name] for name in ("query", "key") if given[name] is not None]

    def compute(*args, **kwargs):
        return tuple(x for x in rotary(*args, **kwargs) if x is not None)

    def finish(*rotated: DTensor) -> None:
        for x, output in zip(whole, rotated, strict=True):
            x.copy_(output)

    layout.compute, layout.finish = compute, finish
    return layout


def _over(tensor: Tensor, names: Names) -> Names:
    """Names of the dimensions of a tensor that broadcasts; those of size 1 have none."""
    return tuple(n if size > 1 else None for n, size in zip(names, tensor.shape, strict=False))


def _heads(heads: int, kv_heads: int | None) -> tuple[str, ...]:
    """A single head of key stays whole beside any part of query's."""
    return ("heads",) if kv_heads in (None, 1) else ("heads", "kv_heads")


def _even(heads: int, kv_heads: int | None) -> dict[str, int]:
    """Gives each process whole groups, where several heads of query share one of key."""
    together = kv_heads not in (None, 1, heads)
    return {"heads": heads, "kv_heads": kv_heads} if together else {}


def _attention(given: Given) -> Layout:
    """Splits by sequences, heads, or queries of dense tensors; packed sequences by heads alone."""
    query, key, options = given["query"], given["key"], given["options"]
    packed = query.dim() == 3
    batch, rows = (None, None) if packed else ("batch", "queries")
    of_scores = ("batch" if not packed else None, "heads", rows, None)
    blocks = "block_mask" in options  # whose tiles, the mask, every process has
    masks = ("bias",) if blocks else ("bias", "mask")
    inputs = {name: _over(options[name], of_scores) for name in masks if name in options}
    if blocks:
        inputs["block_mask"] = _over(options["block_mask"], (batch, "heads", None, None))
        inputs["mask"] = (None, None, None)
    if "alibi_slopes" in options:
        inputs["alibi_slopes"] = (batch, "heads")[-options["alibi_slopes"].dim() :]
    inputs["sinks"] = ("heads",)
    if packed:
        kv_dim = key.dim() - 2
        of_query, of_lse = (None, "heads", None), ("heads", None)
        of_key = (*(None,) * kv_dim, "kv_heads", None)
        heads, kv_heads = query.shape[1], key.shape[kv_dim]
    else:
        of_query, of_lse = (batch, "heads", rows, None), (batch, "heads", rows)
        of_key = (batch, "kv_heads", None, None)
        heads, kv_heads = query.shape[1], key.shape[1]
        inputs["seqused_k"] = (batch,)
    inputs |= {"query": of_query, "key": of_key, "value": of_key}

    def localize(given: Given, parts: Parts) -> None:
        if parts.count("queries") > 1:
            options, at = given["options"], parts.begin("queries")
            if options.pop("bottom_right", False):
                at += key.shape[2] - query.shape[2]
            at += options.get("query_offset", 0) - options.get("key_offset", 0)
            # Only the difference counts, and neither may be negative.
            options["query_offset"], options["key_offset"] = max(at, 0), max(-at, 0)

    by_heads = _heads(heads, kv_heads)
    choices = [by_heads] if packed else [("batch",), by_heads]
    if not (packed or blocks or "seqused_k" in options):
        choices.append(("queries",))
    outputs = (of_query, of_lse)
    return Layout(
        inputs,
        outputs,
        choices,
        even=_even(heads, kv_heads),
        localize=localize,
        special=frozenset({"queries"}),
    )


def _attention_decode(given: Given) -> Layout:
    """Splits by heads; by sequences where each has a cache of its own."""
    options, key = given["options"], given["key"]
    paged, chosen = "block_table" in options, "cache_batch_idx" in options
    query = ("batch", "heads", None, None)
    if paged:
        cache, kv_heads = (None, None, "kv_heads", None), given["k_cache"].shape[2]
    else:
        cache = (None if chosen else "batch", "kv_heads", None, None)
        kv_heads = given["k_cache"].shape[1]
    new = ("batch", "kv_heads", None, None)
    inputs = {"query": query, "k_cache": cache, "v_cache": cache, "key": new, "value": new}
    for name in ("cache_seqlens", "block_table", "cache_batch_idx", "cache_leftpad"):
        inputs[name] = ("batch",)
    inputs["k_scale"] = inputs["v_scale"] = cache[:3]
    scales = [name for name in ("k_scale", "v_scale") if name in options]
    if "alibi_slopes" in options:
        inputs["alibi_slopes"] = ("batch", "heads")[-options["alibi_slopes"].dim() :]
    inputs["sinks"] = ("heads",)
    heads = given["query"].shape[1]
    choices = [_heads(heads, kv_heads)]
    if key is None or not (paged or chosen):  # what one process writes, another would not have
        choices.insert(0, ("batch",))
    return Layout(
        inputs,
        (query, query[:3]),
        choices,
        even=_even(heads, kv_heads),
        written=frozenset(() if key is None else ("k_cache", "v_cache", *scales)),
    )


# ---- losses --------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = (loss.REDUCTIONS[name] for name in ("none", "mean", "sum"))


def _loss(entry: Callable, of_classes: Callable) -> Callable[[Given], Layout]:
    """Splits by rows or by classes. Losses and weights of rows are summed up over processes
    together: one number each. `of_classes` computes losses of rows whose classes are split."""

    def rule(given: Given) -> Layout:
        input, reduction = given["input"], given["reduction"]
        if input.dim() not in (1, 2):
            return Layout({}, (), ())  # the entry refuses it
        dtype = _loss_dtype(given)
        wide = torch.float64 if input.dtype is torch.float64 else torch.float32
        rows = ("rows",) if input.dim() == 2 else ()
        inputs = {"input": (*rows, "classes"), "target": rows}
        if "linear_weight" in given:
            inputs["input"] = rows
            inputs |= {"linear_weight": ("classes",), "linear_bias": ("classes",)}
        split: list[losses.Classes] = []

        def localize(given: Given, parts: Parts) -> None:
            if parts.count("classes") > 1:
                begin, length = parts.begin("classes"), parts.lengths["classes"]
                total, groups = parts.sizes["classes"], parts.groups["classes"]
                split.append(losses.Classes(begin, length, total, groups))

        def compute(*args) -> Tensor:
            call = dict(zip(given, args, strict=True))
            if split:
                of_rows = of_classes(call, split[0])
                if reduction == _NONE:
                    return of_rows.reshape(call["target"].shape).to(dtype)
                total = linear_loss._sum_in_order(of_rows).to(wide)
            elif reduction == _NONE:
                return entry(*args)
            else:
                call |= {"reduction": _SUM, "out_dtype": wide}
                total = entry(*call.values())
            return torch.stack([total, _weight_of(call).to(total)])

        def finish(sums: DTensor) -> DTensor:
            whole = [Replicate()] * sums.device_mesh.ndim
            total, weight = sums.redistribute(placements=whole).to_local().unbind()
            result = (total / weight if reduction == _MEAN else total).to(dtype)
            return DTensor.from_local(result, sums.device_mesh, whole, run_check=False)

        return Layout(
            inputs,
            (rows,) if reduction == _NONE else ((None,),),
            [*_choices(rows), ("classes",)],
            summed=frozenset() if reduction == _NONE else frozenset({"rows"}),
            overwritten=_overwritten(given),
            localize=localize,
            compute=compute,
            finish=None if reduction == _NONE else finish,
            special=frozenset({"classes"}) if reduction == _NONE else None,
        )

    return rule


def _overwritten(call: Given) -> frozenset[str]:
    overwrites = call.get("inplace", False) and not torch.compiler.is_compiling()
    return frozenset({"input"}) if overwrites else frozenset()


def _options(call: Mapping[str, object]) -> losses.Options:
    numbers = [call[name] for name in ("label_smoothing", "softcap", "z_loss")]
    if torch.compiler.is_compiling():  # they choose what is computed
        numbers = map(constant, numbers)
    return losses.Options(call["ignore_index"], *numbers)


def _of_logits(call: Mapping[str, object], classes: losses.Classes) -> Tensor:
    """Losses of rows."""
    tensors = (call["input"], call["target"], call["weight"])
    return losses.cross_entropy(*tensors, classes, _options(call), call["inplace"])


def _of_product(call: Mapping[str, object], classes: losses.Classes) -> Tensor:
    names = ("input", "linear_weight", "linear_bias", "target", "weight")
    casts = (call["cast"], call["cast_weight"])
    tensors = (call[name] for name in names)
    return losses.linear_cross_entropy(*tensors, classes, _options(call), casts)


def _loss_dtype(given: Given) -> torch.dtype:
    input = given["input"]
    if given["out_dtype"] is None and input.dtype.itemsize == 2:
        if torch.is_autocast_enabled(input.device.type):
            return torch.float32
    return given["out_dtype"] or input.dtype


def _weight_of(call: Mapping[str, object]) -> Tensor:
    """Sum of the weights of rows that are not ignored."""
    target, weight = call["target"], call["weight"]
    counts = target != call["ignore_index"]
    if weight is None:
        return counts.sum()
    of_class = target.where(counts, 0).clamp(0, weight.shape[0] - 1)  # it may be no class
    return (weight.double()[of_class] * counts).sum()


RULES: dict[str, Callable[[Given], Layout]] = {
    "add_dropout": _elementwise,
    "add_scaled": _elementwise,
    "attention": _attention,
    "attention_decode": _attention_decode,
    "causal_conv1d": _causal_conv1d,
    "causal_conv1d_update": _causal_conv1d_update,
    "cross_entropy": _loss(loss.cross_entropy, _of_logits),
    "delta_rule": _delta_rule,
    "delta_rule_update": _delta_rule_update,
    "dropout": _elementwise,
    "gated_activation": _gate,
    "group_norm": _group_norm,
    "linear": _linear,
    "linear_cross_entropy": _loss(linear_loss.linear_cross_entropy, _of_product),
    "linear_epilogue": _linear_epilogue,
    "modulated_norm": _modulated_norm,
    "norm": _norm,
    "quantized_linear": _quantized_linear,
    "recurrent_delta_rule": _delta_rule,
    "rotary": _rotary,
    "rotary_inplace": _rotary_inplace,
    "scaled_add_norm": _scaled_add_norm,
    "mamba_chunk_scan": _mamba_chunk_scan,
    "selective_scan": _selective_scan,
    "selective_state_update": _selective_state_update,
}
