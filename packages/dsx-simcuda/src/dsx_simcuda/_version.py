"""Version of dsx-simcuda, read by the build."""

__version__ = "0.1.0"
