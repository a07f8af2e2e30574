"""Large-model training for PyTorch: engine, launcher, checkpoints."""

from ._version import __version__

__all__ = ["__version__"]
