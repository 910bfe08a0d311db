"""Layers as other libraries' checkpoints hold them, written by their documented layouts, element by
element, each with the weight that it stands for."""

import json
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.reference import quantized_linear as reference
from onepass.reference.quantized_linear import Format

F64 = torch.float64


class Written(NamedTuple):
    """A method's tensors of a layer by name, its config, and the weight in float64."""

    method: str
    tensors: dict[str, Tensor]
    config: dict
    weight: Tensor


def words_of(codes: Tensor, bits: int) -> Tensor:
    """(rows, columns) codes from 0 in words along columns, the first in the lowest bits."""
    rows, columns = codes.shape
    in_word = 32 // bits
    words = torch.zeros(rows, -(-columns // in_word), dtype=torch.int64)
    for column in range(columns):
        words[:, column // in_word] += codes[:, column].long() << bits * (column % in_word)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq(shape, bits=4, group=32, act_order=False, version="gptq", symmetric=False) -> Written:
    out_features, in_features = shape
    groups = in_features // group
    codes = torch.randint(0, 2**bits, shape)
    symmetric |= bits == 8
    zeros = torch.randint(1, 2**bits, (out_features, groups))
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    scales = (torch.rand(groups, out_features) + 0.1).half()
    g_idx = torch.arange(in_features) // group
    if act_order:
        g_idx = g_idx[torch.randperm(in_features)]
    stored = zeros if version == "gptq_v2" else zeros - 1
    tensors = {
        "qweight": words_of(codes, bits).t().contiguous(),
        "qzeros": words_of(stored.t(), bits),
        "scales": scales,
        "g_idx": g_idx.to(torch.int32),
    }
    weight = (codes - zeros[:, g_idx]) * scales.t()[:, g_idx].to(F64)
    config = {
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "checkpoint_format": version,
    }
    return Written("gptq", tensors, {"quant_method": "gptq", **config}, weight)


def awq(shape, group=32) -> Written:
    out_features, in_features = shape
    codes = torch.randint(0, 16, shape)
    zeros = torch.randint(0, 16, (in_features // group, out_features))
    scales = (torch.rand(in_features // group, out_features) + 0.1).half()
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def packed(codes):
        return words_of(codes.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    tensors = {"qweight": packed(codes.t()), "qzeros": packed(zeros), "scales": scales}
    of_group = torch.arange(in_features) // group
    weight = (codes - zeros[of_group].t()) * scales[of_group].t().to(F64)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Written("awq", tensors, config, weight)


def bitsandbytes_4bit(shape, block=64, nested=False) -> Written:
    count = shape[0] * shape[1]
    codes = torch.randint(0, 16, (count,), dtype=torch.uint8)
    blocks = -(-count // block)
    codebook = reference.values_of(Format.NF4).clone()
    facts = {"quant_type": "nf4", "blocksize": block, "shape": list(shape), "dtype": "float32"}
    tensors = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "weight.quant_map": codebook}
    if nested:
        of_scales = torch.linspace(-1, 1, 256)
        nested_codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        nested_scales = torch.rand(-(-blocks // 256)) + 0.1
        facts |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1.5}
        tensors |= {
            "weight.absmax": nested_codes,
            "weight.nested_absmax": nested_scales,
            "weight.nested_quant_map": of_scales,
        }
        of_block = nested_scales[torch.arange(blocks) // 256]
        scales = of_scales[nested_codes.long()] * of_block + 1.5  # in float32, as bitsandbytes does
    else:
        tensors["weight.absmax"] = scales = torch.rand(blocks) + 0.1
    state = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = state
    numbers = codebook.to(F64)[codes.long()] * scales.to(F64)[torch.arange(count) // block]
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}
    return Written("bitsandbytes_4bit", tensors, config, numbers.view(shape))


def bitsandbytes_8bit(shape) -> Written:
    codes = torch.randint(-127, 128, shape, dtype=torch.int8)
    largest = torch.rand(shape[0]) + 0.1
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"load_in_8bit": True, "quant_method": "bitsandbytes"}
    weight = codes * (largest / 127).to(F64)[:, None]
    return Written("bitsandbytes_8bit", tensors, config, weight)


def compressed_tensors(
    shape, bits=4, group=32, symmetric=True, act_order=False, packed=True, of_input=None
) -> Written:
    out_features, in_features = shape
    group = group or in_features
    groups, half = in_features // group, 2 ** (bits - 1)
    codes = torch.randint(-half, half, shape)
    scales = (torch.rand(out_features, groups) + 0.1).bfloat16()
    zeros = torch.randint(-half, half, (out_features, groups)) * (not symmetric)
    g_idx = torch.arange(in_features) // group
    if act_order:
        g_idx = g_idx[torch.randperm(in_features)]
    tensors = {"weight_scale": scales}
    if packed:
        tensors |= {"weight_packed": words_of(codes + half, bits)}
        tensors |= {"weight_shape": torch.tensor(shape)}
    else:
        tensors["weight"] = codes.to(torch.int8)
    if not symmetric:
        tensors["weight_zero_point"] = words_of(zeros.t() + half, bits).t().contiguous()
    if act_order:
        tensors["weight_g_idx"] = g_idx.to(torch.int32)
    args = {
        "num_bits": bits, "type": "int", "symmetric": symmetric,
        "strategy": "channel" if groups == 1 else "group", "group_size": group,
    }  # fmt: skip
    scheme = {"targets": ["Linear"], "weights": args, "input_activations": of_input}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}}
    config |= {"format": "pack-quantized" if packed else "int-quantized", "ignore": ["lm_head"]}
    weight = (codes - zeros[:, g_idx]) * scales.to(F64)[:, g_idx]
    return Written("compressed-tensors", tensors, config, weight)


OF_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def torchao(shape, bits=8, group=32, of_input=False) -> Written:
    out_features, in_features = shape
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, shape)
    if bits == 8:
        scales = torch.rand(out_features, 1) + 0.1
        tensors = {"_weight_qdata": codes.to(torch.int8), "_weight_scale": scales}
        weight, kind = codes * scales.to(F64), "Int8Tensor"
        data = {"block_size": [1, in_features], "act_quant_kwargs": {} if of_input else None}
    else:
        groups = in_features // group
        scales, zeros = (torch.rand(groups, out_features).bfloat16() + 0.1 for _ in range(2))
        pairs = (codes[:, 1::2] << 4 | codes[:, ::2] & 15).to(torch.uint8)
        tensors = {"_weight_qdata": pairs, "_weight_scale": scales, "_weight_zero_point": zeros}
        of_each = (x.to(F64).repeat_interleave(group, 0).t() for x in (scales, zeros))
        scale, zero = of_each
        weight, kind, data = codes * scale + zero, "Int4Tensor", {"block_size": [1, group]}
    names = [name.removeprefix("_weight_") for name in tensors]
    facts = {"_type": kind, "_data": data, "_tensor_data_names": names}
    return Written("torchao", tensors, {"quant_method": "torchao", "facts": facts}, weight)


def mxfp4_experts(experts: int, shape) -> Written:
    """weight: (experts, out_features, in_features)."""
    out_features, in_features = shape
    codes = torch.randint(0, 16, (experts, out_features, in_features // 32, 32), dtype=torch.uint8)
    exponents = torch.randint(118, 124, codes.shape[:-1], dtype=torch.uint8)
    tensors = {"blocks": codes[..., 1::2] << 4 | codes[..., ::2], "scales": exponents}
    numbers = reference.values_of(Format.MXFP4).to(F64)[codes.long()]
    weight = numbers * 2.0 ** (exponents.to(F64) - 127)[..., None]
    return Written("mxfp4", tensors, {"quant_method": "mxfp4"}, weight.flatten(2))


LAYOUTS = {
    "gptq": gptq,
    "gptq, act-order": lambda shape: gptq(shape, act_order=True),
    "gptq v2": lambda shape: gptq(shape, version="gptq_v2", group=64),
    "gptq, 8 bits": lambda shape: gptq(shape, bits=8, act_order=True),
    "gptq, one group": lambda shape: gptq(shape, group=shape[1], symmetric=True),
    "awq": awq,
    "nf4": bitsandbytes_4bit,
    "nf4, nested": lambda shape: bitsandbytes_4bit(shape, nested=True),
    "bitsandbytes int8": bitsandbytes_8bit,
    "W4A16": compressed_tensors,
    "W4A16, asymmetric": lambda shape: compressed_tensors(shape, symmetric=False, group=64),
    "W4A16, act-order": lambda shape: compressed_tensors(shape, act_order=True),
    "W4A16, channel": lambda shape: compressed_tensors(shape, group=None),
    "W8A16": lambda shape: compressed_tensors(shape, bits=8),
    "W8A8": lambda shape: compressed_tensors(
        shape, bits=8, group=None, packed=False, of_input=OF_TOKENS
    ),
    "torchao int8": torchao,
    "torchao int8 by int8": lambda shape: torchao(shape, of_input=True),
    "torchao int4": lambda shape: torchao(shape, bits=4),
}
