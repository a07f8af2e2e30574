"""Collectives, topology and traffic accounting for PyTorch."""

from ._version import __version__

__all__ = ["__version__"]
