"""Data loading that resumes exactly, curricula, random-LTD, layer dropping and token-budget batches for PyTorch."""

from ._version import __version__

__all__ = ["__version__"]
