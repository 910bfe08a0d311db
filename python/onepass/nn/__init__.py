"""Drop-in modules: subclasses of torch's, with the same constructors and state_dict keys."""

from onepass.nn.dropout import Dropout
from onepass.nn.norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm

__all__ = ["AddLayerNorm", "AddRMSNorm", "Dropout", "LayerNorm", "RMSNorm"]
