"""Version of dsx-monitor, read by the build."""

__version__ = "0.1.0"
