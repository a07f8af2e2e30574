"""Version of dsx-plan, read by the build."""

__version__ = "0.1.0"
