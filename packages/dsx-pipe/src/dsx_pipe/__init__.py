"""Pipeline parallelism with schedules as data, and tensor slicing, for PyTorch."""

from ._version import __version__

__all__ = ["__version__"]
