"""Layers of checkpoints that other libraries quantised, read without quantising again: each code is
the checkpoint's own.

A reader takes a layer's tensors by their names in the checkpoint, without the layer's own, and
gives its codes, scales and shifts. `READERS` has the names that each method stores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onepass.nn.quantized_linear import QuantizedLinear
from onepass.reference import quantized_linear as reference
from onepass.reference.quantized_linear import Format

Tensors = Mapping[str, Tensor]
_MOST_BNB_CODE = 127  # of bitsandbytes' int8, whose scales are largest magnitudes


class Stored(NamedTuple):
    """A weight: `scale * value(code) + shift`.

    Attributes:
        weights: "int8", "int4", "nf4" or "mxfp4".
        codes: (out_features, in_features), whole numbers of a byte; in `input_order`, if given.
        scales, shifts: (groups, out_features), of numbers that float32 holds.
        activations: None or "int8".
    """

    weights: str
    codes: Tensor
    scales: Tensor
    shifts: Tensor | None = None
    input_order: Tensor | None = None
    activations: str | None = None


def layer_of(stored: Stored, bias: nn.Parameter | None, dtype: torch.dtype) -> QuantizedLinear:
    """The layer of a stored weight; scales are bfloat16 if these hold all of them.

    Raises:
        ValueError: the groups are none that the kernels take.
    """
    out_features, in_features = stored.codes.shape
    parts = [part.float() for part in (stored.scales, stored.shifts) if part is not None]
    halves = [part.bfloat16() for part in parts]
    same = all(torch.equal(half.float(), part) for half, part in zip(halves, parts, strict=True))
    scales, *shifts = halves if same and stored.weights != "int8" else parts
    layer = QuantizedLinear(
        in_features,
        out_features,
        False,
        weights=stored.weights,
        group_size=in_features // len(scales),
        activations=stored.activations,
        device="meta",
        dtype=dtype,
        input_order=stored.input_order,
    )
    codes = stored.codes if stored.codes.itemsize == 1 else stored.codes.to(torch.int8)
    layer.codes = reference.pack(codes, layer.format)
    layer.scales = scales.contiguous()
    if stored.input_order is not None:
        layer.input_order = stored.input_order.to(torch.int32)
    if stored.weights == "int4":
        layer.shifts = shifts[0].contiguous() if shifts else torch.zeros_like(layer.scales)
    layer.bias = bias
    return layer


def read_bitsandbytes_4bit(tensors: Tensors, config: Mapping) -> Stored:
    """nf4 of bitsandbytes, with plain or doubly quantised scales: codes in the order of the
    weight's elements, two in a byte, the first in the high half."""
    state = next(
        (name for name in tensors if name.startswith("weight.quant_state.bitsandbytes__")), ""
    )
    kind = state.rpartition("__")[2]
    _check(kind == "nf4", f"bnb_4bit_quant_type must be 'nf4', got {kind!r}")
    facts = json.loads(bytes(tensors[state].cpu().tolist()))
    codebook = tensors["weight.quant_map"].float().cpu()
    _check(
        torch.equal(codebook, reference.values_of(Format.NF4)),
        "weight.quant_map must be nf4's, got another one",
    )
    out_features, in_features = facts["shape"]
    scales = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        nested = (tensors[f"weight.nested_{name}"] for name in ("quant_map", "absmax"))
        offset, block = facts["nested_offset"], facts["nested_blocksize"]
        scales = reference.scales_of_codes(scales, *nested, offset, block)
    codes = _nibbles(tensors["weight"].flatten(), high_first=True)
    codes = codes[: out_features * in_features].view(out_features, in_features)
    return Stored("nf4", codes, _scales_of_blocks(scales, facts["blocksize"], codes.shape))


def group_of_blocks(block: int, in_features: int) -> int:
    """The size of a group: the most that lies in one block and in one row."""
    return math.gcd(block, in_features)


def _scales_of_blocks(scales: Tensor, block: int, shape: torch.Size) -> Tensor:
    """Scales (groups, out_features) of blocks of a weight's elements, which may go on in its next
    row."""
    out_features, in_features = shape
    group = group_of_blocks(block, in_features)
    in_row = in_features // group
    block_of = torch.arange(out_features * in_row, device=scales.device) * group // block
    return scales.float()[block_of].view(out_features, in_row).t()


def read_bitsandbytes_8bit(tensors: Tensors, config: Mapping) -> Stored:
    """int8 of bitsandbytes: a scale for each row, 127 times as large as ours. Input is not
    quantised, so the columns that bitsandbytes multiplies in 16 bits need no care."""
    return Stored("int8", tensors["weight"], (tensors["SCB"].float() / _MOST_BNB_CODE)[None])


def read_gptq(tensors: Tensors, config: Mapping) -> Stored:
    """GPTQ: words of 32 bits along in_features; `g_idx` has the group of each feature. Zeros are
    stored less one, but for checkpoints of format "gptq_v2"."""
    g_idx, words = tensors.get("g_idx"), tensors["qweight"]
    bits = config.get("bits", 4) if g_idx is None else 32 * len(words) // len(g_idx)
    codes = _codes_of_words(words.t(), bits)  # (out_features, in_features)
    scales = tensors["scales"].float()
    zeros = _codes_of_words(tensors["qzeros"], bits)[:, : scales.shape[1]]
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    order = None
    if g_idx is not None:
        sizes = torch.bincount(g_idx.long(), minlength=len(scales))
        _check(
            len(sizes) == len(scales) and bool((sizes == sizes[0]).all()),
            f"g_idx must have {len(scales)} groups of one size, got {sizes.tolist()[:8]}",
        )
        if bool((g_idx.diff() < 0).any()):
            order = g_idx.argsort(stable=True)
            codes = codes.index_select(1, order)
    return _of_unsigned(codes, scales, zeros, bits)._replace(input_order=order)


def read_awq(tensors: Tensors, config: Mapping) -> Stored:
    """AWQ: words of 32 bits along out_features, whose codes lie as 0, 2, 4, 6, 1, 3, 5, 7."""
    bits = config.get("bits", 4)
    _check(bits == 4, f"bits must be 4, got {bits}")
    order = [0, 4, 1, 5, 2, 6, 3, 7]

    def codes_of(words):
        return _codes_of_words(words, bits).unflatten(1, (-1, 8))[..., order].flatten(1)

    zeros = codes_of(tensors["qzeros"])
    return _of_unsigned(codes_of(tensors["qweight"]).t(), tensors["scales"].float(), zeros, bits)


def read_compressed_tensors(tensors: Tensors, config: Mapping) -> Stored:
    """compressed-tensors: int4 and int8 in words ("pack-quantized"), and int8 ("int-quantized"),
    whose input is quantised too if the scheme says so."""
    scheme = config["scheme"]
    bits, of_input = scheme["weights"]["num_bits"], scheme.get("input_activations")
    scales = tensors["weight_scale"].float()
    if "weight_packed" in tensors:
        rows, columns = tensors["weight_shape"].tolist()
        codes = _codes_of_words(tensors["weight_packed"], bits)[:, :columns] - 2 ** (bits - 1)
    else:
        codes = tensors["weight"]
        rows, columns = codes.shape
    scales = scales.reshape(scales.shape[0] if scales.dim() else 1, -1).expand(rows, -1).t()
    zeros, shifts, order = tensors.get("weight_zero_point"), None, tensors.get("weight_g_idx")
    if zeros is not None:
        if zeros.dtype == torch.int32:
            zeros = _codes_of_words(zeros.t(), bits)[:, :rows] - 2 ** (bits - 1)
        else:
            zeros = zeros.reshape(zeros.shape[0] if zeros.dim() else 1, -1).expand(rows, -1).t()
        if bool(zeros.any()):
            _check(bits == 4, "weights of 8 bits must be symmetric, got zero points")
            shifts = -scales * zeros
    if order is not None and bool((order < 0).any()):
        order = None
    if order is not None:
        order = order.argsort(stable=True)
        codes = codes.index_select(1, order)
    activations = None if of_input is None else "int8"
    return Stored("int8" if bits == 8 else "int4", codes, scales, shifts, order, activations)


def _check_scheme(scheme: Mapping) -> None:
    """
    Raises:
        ValueError: layers of such a scheme cannot be read.
    """
    args, of_input = scheme.get("weights") or {}, scheme.get("input_activations")
    kind, bits, strategy = args.get("type", "int"), args.get("num_bits"), args.get("strategy")
    _check(
        kind == "int" and bits in (4, 8),
        f"weights of compressed-tensors must be int of 4 or 8 bits, got {kind} of {bits}",
    )
    is_known = of_input is None or (
        (bits, strategy) == (8, "channel")
        and (of_input.get("type", "int"), of_input.get("num_bits")) == ("int", 8)
        and (of_input.get("strategy"), of_input.get("dynamic")) == ("token", True)
    )
    _check(
        is_known,
        "input_activations of compressed-tensors must be dynamic int8 of each token beside int8 "
        f"weights of strategy 'channel', got {dict(of_input or {})} beside {bits} bits of "
        f"{strategy!r}",
    )


def read_torchao(tensors: Tensors, config: Mapping) -> Stored:
    """torchao's Int8Tensor, and Int4Tensor, whose codes lie two in a byte, the first in the low
    half."""
    kind = config["tensor"]
    codes, scales = tensors["_weight_qdata"], tensors["_weight_scale"].float()
    zeros = tensors.get("_weight_zero_point")
    _check("_weight_act_pre_scale" not in tensors, "act_pre_scale must be None, got a tensor")
    if kind == "Int8Tensor":
        _check(zeros is None or not bool(zeros.any()), "int8 weights must be symmetric, got zeros")
        scales = scales.reshape(scales.shape[0], -1).expand(codes.shape[0], -1).t()
        activations = "int8" if config.get("quantizes_input") else None
        return Stored("int8", codes, scales, activations=activations)
    _check(kind == "Int4Tensor", f"tensors must be Int8Tensor or Int4Tensor, got {kind}")
    codes = (_nibbles(codes, high_first=False).to(torch.int8) << 4) >> 4  # with their signs
    # Its zero points are the numbers of code 0.
    return Stored("int4", codes, scales, zeros.float())


def read_mxfp4(tensors: Tensors, config: Mapping) -> list[Stored]:
    """mxfp4 of gpt-oss, of each expert: blocks (experts, out_features, groups, 16) of codes, two in
    a byte, the first in the low half, and scales 2^(byte - 127)."""
    blocks, exponents = tensors["blocks"], tensors["scales"]
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)
    return [
        Stored("mxfp4", _nibbles(codes.flatten(1), high_first=False), of_groups.t())
        for codes, of_groups in zip(blocks, scales, strict=True)
    ]


class Reader(NamedTuple):
    """A method's names of a layer's tensors, without the layer's, the function that reads them, and
    what its config must say: names with the values that can be read."""

    names: tuple[str, ...]
    read: Callable[[Tensors, Mapping], Stored]
    known: Mapping[str, tuple] = {}


def check_config(method: str, config: Mapping) -> None:
    """
    Raises:
        ValueError: a method's checkpoints of this config cannot be read.
    """
    for name, values in READERS[method].known.items():
        given = config.get(name)
        given = given.lower() if isinstance(given, str) else given
        if given is not None and given not in values:
            names = " or ".join(map(repr, values))
            raise ValueError(f"quantize: {name} of {method} must be {names}, got {given!r}")
    for scheme in config.get("config_groups", {}).values():
        _check_scheme(scheme)


_GPTQ = {name: ("gptq", "gptq_v2") for name in ("format", "checkpoint_format")}
READERS = {
    "bitsandbytes_4bit": Reader(
        (
            "weight",
            "weight.absmax",
            "weight.quant_map",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            "weight.quant_state.bitsandbytes__nf4",
            "weight.quant_state.bitsandbytes__fp4",
        ),
        read_bitsandbytes_4bit,
        {"bnb_4bit_quant_type": ("nf4",)},
    ),
    "bitsandbytes_8bit": Reader(("weight", "SCB", "weight_format"), read_bitsandbytes_8bit),
    "gptq": Reader(("qweight", "qzeros", "scales", "g_idx"), read_gptq, {"bits": (4, 8), **_GPTQ}),
    "awq": Reader(("qweight", "qzeros", "scales"), read_awq, {"bits": (4,), "version": ("gemm",)}),
    "compressed-tensors": Reader(
        (
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
        ),
        read_compressed_tensors,
    ),
    "torchao": Reader(
        (
            "_weight_qdata",
            "_weight_scale",
            "_weight_zero_point",
            "_weight_act_pre_scale",
        ),
        read_torchao,
    ),
}


def _of_unsigned(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Stored:
    """A weight ``scale * (code - zero)`` of codes from 0."""
    middle = 2 ** (bits - 1)
    off = middle - zeros.int()
    signed = codes.sub_(middle).to(torch.int8) if bits < 8 else (codes - middle).to(torch.int8)
    if bits == 8:
        _check(not bool(off.any()), "weights of 8 bits must be symmetric, got zero points")
        return Stored("int8", signed, scales)
    _check(bits == 4, f"bits must be 4 or 8, got {bits}")
    return Stored("int4", signed, scales, scales * off)


def _codes_of_words(words: Tensor, bits: int) -> Tensor:
    """The codes (rows, columns) of words of 32 bits along columns, the first in the low bits:
    int8 of 4 bits, int16 of 8."""
    _check(bits in (4, 8), f"bits must be 4 or 8, got {bits}")
    in_word = 32 // bits
    dtype = torch.int8 if bits == 4 else torch.int16
    codes = torch.empty(*words.shape, in_word, dtype=dtype, device=words.device)
    for i in range(in_word):
        codes[..., i] = (words >> (bits * i)) & (2**bits - 1)
    return codes.flatten(-2)


def _nibbles(pairs: Tensor, high_first: bool) -> Tensor:
    """The codes of pairs in bytes, along the last dimension; uint8."""
    pairs = pairs.view(torch.uint8)
    halves = (pairs >> 4, pairs & 15) if high_first else (pairs & 15, pairs >> 4)
    return torch.stack(halves, -1).flatten(-2)


def _check(condition: bool, sentence: str) -> None:
    """
    Raises:
        ValueError: with the sentence, if the condition does not hold.
    """
    if not condition:
        raise ValueError(f"quantize: {sentence}")
