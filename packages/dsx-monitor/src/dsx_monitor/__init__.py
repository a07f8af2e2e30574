"""Events, writers, timers and profilers for PyTorch training."""

from ._version import __version__

__all__ = ["__version__"]
