"""`quantize` and `dequantize`: the linear layers of a model, in place."""

from onepass.quantizing.engine import dequantize, quantize
from onepass.quantizing.report import QuantizationReport

__all__ = ["QuantizationReport", "dequantize", "quantize"]
