"""The exceptions of dsx-data. Each message says what was given, what was expected and how to fix it. Warnings that ask
something of the user have a code.
"""

from __future__ import annotations

__all__ = ["AnalysisError", "DataArgumentError", "DataError", "DataStateError", "IndexFileError"]


class DataError(Exception):
    """Base of all errors of this package."""


class DataArgumentError(DataError, ValueError):
    """An argument, a dataset or a configuration is not what the call needs."""


class DataStateError(DataError, ValueError):
    """A saved state does not belong to the loader or sampler it is loaded into."""


class IndexFileError(DataError, ValueError):
    """A file on disk is not an index, is truncated, or is damaged."""


class AnalysisError(DataError, RuntimeError):
    """The analysis of a dataset failed. The message names the process, the samples and the cause."""
