"""Collectives that send fewer bytes: the 1-bit all-reduce with error feedback, and quantised gathers and reductions.

layout   where elements, scales and bits of a 1-bit message lie        (arithmetic)
signs    packing signs, measuring scales                              (one tensor)
feedback the errors, and compressing with them                        (one rank)
onebit   the all-reduce                                               (all ranks)
"""

from .feedback import ErrorFeedback
from .layout import OneBitLayout
from .onebit import compressed_all_reduce

__all__ = ["ErrorFeedback", "OneBitLayout", "compressed_all_reduce"]
