"""Mixture-of-experts layers and expert parallelism for any PyTorch model."""

from ._version import __version__

__all__ = ["__version__"]
