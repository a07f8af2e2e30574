"""Errors that end a search before it has a result. A message says what was got, what was expected and what to do."""

from __future__ import annotations

from dsx_core import CodedError

__all__ = ["AutotuningError"]


class AutotuningError(CodedError, RuntimeError):
    """A search that cannot begin, cannot go on or found nothing that works. What was measured stays on disk."""
