"""What ends a search before it has a result. The message says what was got, what was expected and what to do."""

from __future__ import annotations

from ..errors import DsxError

__all__ = ["AutotuningError"]


class AutotuningError(DsxError, RuntimeError):
    """A search that cannot begin, cannot go on or found nothing that works. What was measured stays on disk."""
