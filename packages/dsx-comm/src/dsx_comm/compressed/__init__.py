"""Collectives that send fewer bytes: the 1-bit all-reduce with error feedback, and quantised gathers and reductions.

layout     where elements, scales and bits of a 1-bit message lie     (arithmetic)
signs      packing signs, measuring scales                            (one tensor)
codec      compressing messages, in torch or by kernels               (one rank)
feedback   the errors                                                 (one rank)
onebit     the 1-bit all-reduce                                       (all ranks)
blocks     int8, int4 and 2 bits by blocks                            (rows of tensors)
residuals  the errors of messages of blocks                           (one rank)
hierarchy  nodes and devices                                          (groups)
quantized  quantised all-gather, and reduce-scatter in two hops       (all ranks)
"""

from .codec import codec_status
from .feedback import ErrorFeedback
from .hierarchy import Hierarchy, make_hierarchy
from .layout import OneBitLayout
from .onebit import compressed_all_reduce, compressed_allreduce
from .quantized import quantized_all_gather, quantized_reduce_scatter
from .residuals import QuantizationFeedback

__all__ = [
    "ErrorFeedback",
    "Hierarchy",
    "OneBitLayout",
    "QuantizationFeedback",
    "codec_status",
    "compressed_all_reduce",
    "compressed_allreduce",
    "make_hierarchy",
    "quantized_all_gather",
    "quantized_reduce_scatter",
]
