"""Version of dsx-sparse-attn, read by the build."""

__version__ = "0.1.0"
