"""Drop-in modules: subclasses of torch's, with the same constructors and state_dict keys."""

from onepass.nn.attention import MultiheadAttention
from onepass.nn.dropout import Dropout
from onepass.nn.norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from onepass.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "Dropout",
    "LayerNorm",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
]
