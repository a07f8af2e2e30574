"""The HTML report of a run directory: one file that holds everything it shows and asks nothing of the network."""

from .write import write_report

__all__ = ["write_report"]
