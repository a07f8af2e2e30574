"""What can go wrong while an engine is used, by name."""

from __future__ import annotations

from ..errors import DsxError


class EngineError(DsxError, RuntimeError):
    """An engine was used in a way or at a moment that cannot work."""


class EngineArgumentError(DsxError, ValueError):
    """An argument of `initialize` or of an engine method cannot be used."""
