"""Version of dsx-launch, read by the build."""

__version__ = "0.1.0"
