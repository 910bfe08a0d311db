"""Linear layers that bitsandbytes or torchao quantised in memory, for `onepass.swap`: their codes,
by which `onepass.functional.quantized_linear` multiplies.

Those whose products quantise the input too stay as they are: each library does that in its own way,
and a swap changes no numbers beyond rounding.
"""

from __future__ import annotations

from torch import nn

from onepass._imported import is_a
from onepass.nn import QuantizedLinear
from onepass.quantizing import checkpoints


def words(module: nn.Module) -> str | None:
    """The words for the quantised weight of a module; None if it has none."""
    if is_a(module, "bitsandbytes.nn.modules", "Linear4bit"):
        return f"{module.weight.quant_type} of bitsandbytes"
    if is_a(module, "bitsandbytes.nn.modules", "Linear8bitLt"):
        return "int8 of bitsandbytes"
    weight = module._parameters.get("weight")
    if type(module) is nn.Linear and type(weight).__module__.startswith("torchao."):
        return f"{type(weight).__name__} of torchao"
    return None


def refusal(module: nn.Module) -> str | None:
    """Why a layer with a quantised weight stays as it is; None if it does not."""
    weight = module.weight
    if is_a(module, "bitsandbytes.nn.modules", "Linear4bit"):
        state = getattr(weight, "quant_state", None)
        if state is None:
            return "is not quantised yet: bitsandbytes does that when it is moved to a device"
        if weight.quant_type != "nf4":
            return f"its weight is {weight.quant_type} of bitsandbytes, not nf4"
        if getattr(state, "packing_format_for_cpu", False) or module.support_avx512bf16_for_cpu:
            return "bitsandbytes has a kernel of its own for this CPU, which was not measured"
        group = checkpoints.group_of_blocks(state.blocksize, state.shape[1])
        return f"groups of {group} do not fit the kernels" if group % 8 else None
    if is_a(module, "bitsandbytes.nn.modules", "Linear8bitLt"):
        return "its products quantise the input too"
    if type(weight).__name__ != "Int8Tensor":
        return f"its weight is a {type(weight).__name__} of torchao, not an Int8Tensor"
    zeros = weight.zero_point
    if weight.act_quant_kwargs is not None or weight.act_pre_scale is not None:
        return "its products quantise the input too"
    return "its codes have zero points" if zeros is not None and bool(zeros.any()) else None


def layer_of(module: nn.Module) -> QuantizedLinear:
    """The layer of the weight that a module holds, without its bias."""
    weight = module.weight
    if is_a(module, "bitsandbytes.nn.modules", "Linear4bit"):
        tensors = {f"weight.{name}": of for name, of in weight.quant_state.as_dict(True).items()}
        stored = checkpoints.read_bitsandbytes_4bit({"weight": weight.data, **tensors}, {})
    else:
        tensors = {"_weight_qdata": weight.qdata, "_weight_scale": weight.scale}
        stored = checkpoints.read_torchao(tensors, {"tensor": "Int8Tensor"})
    return checkpoints.layer_of(stored, None, weight.dtype)
