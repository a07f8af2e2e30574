"""The HTML report of a run directory: one file that contains everything it shows and needs no network."""

from .write import write_report

__all__ = ["write_report"]
