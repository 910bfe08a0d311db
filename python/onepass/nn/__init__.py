"""Drop-in modules: subclasses of torch's, with the same constructors and state_dict keys."""

import onepass.functional  # noqa: F401, first: it reports a broken installation
from onepass._compiling import refuse_script
from onepass.nn.attention import MultiheadAttention
from onepass.nn.dropout import Dropout, DropPath, LayerScale
from onepass.nn.gate import GatedMLP
from onepass.nn.group_norm import GroupNorm
from onepass.nn.linear import Linear
from onepass.nn.loss import CrossEntropyLoss, LinearCrossEntropyLoss
from onepass.nn.norm import (
    AddLayerNorm,
    AddRMSNorm,
    LayerNorm,
    ModulatedLayerNorm,
    ModulatedRMSNorm,
    RMSNorm,
)
from onepass.nn.quantized_linear import QuantizedLinear
from onepass.nn.rotary import RotaryEmbedding
from onepass.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "CrossEntropyLoss",
    "DropPath",
    "Dropout",
    "GatedMLP",
    "GroupNorm",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "LinearCrossEntropyLoss",
    "ModulatedLayerNorm",
    "ModulatedRMSNorm",
    "MultiheadAttention",
    "QuantizedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
]

for _name in __all__:
    globals()[_name].__prepare_scriptable__ = refuse_script
