"""Fused optimizers and kernels for PyTorch, on CPU and CUDA."""

from ._version import __version__

__all__ = ["__version__"]
