"""Version of dsx, read by the build."""

__version__ = "0.1.0"
DISTRIBUTION = "dsx"  # the name on a package index; `tools/dev.py wheels --meta-name` writes another one
