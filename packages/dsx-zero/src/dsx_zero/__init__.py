"""ZeRO stages 0-3 for any PyTorch model and optimizer."""

from ._version import __version__

__all__ = ["__version__"]
