"""Makes quantised weights out of a model's own, calibrated on text."""

from paged_infer.models.quantize.methods import METHODS, Method, make_method
from paged_infer.models.quantize.quantizer import quantized_weights

__all__ = ["METHODS", "Method", "make_method", "quantized_weights"]
