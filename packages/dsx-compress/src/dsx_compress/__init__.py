"""Quantisation-aware training, pruning, layer reduction and distillation for PyTorch."""

from ._version import __version__

__all__ = ["__version__"]
