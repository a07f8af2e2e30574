"""Version of dsx-activations, read by the build."""

__version__ = "0.1.0"
