"""The `compression_training` and `quantize_training` sections: those of dsx_compress, with the eigenvalue section."""

from __future__ import annotations

from dsx_compress.config import CompressionTraining
from dsx_compress.config import QuantizeTraining as Quantization
from dsx_monitor.config import EigenvalueConfig

from .base import nested

__all__ = ["CompressionTraining", "QuantizeTraining"]


class QuantizeTraining(Quantization):
    """Mixture of Quantisation (MoQ): all weights of two dimensions or more lose their bits one by one."""

    eigenvalue: EigenvalueConfig = nested(EigenvalueConfig, "curvature for the schedule, if `eigenvalue` is off")
