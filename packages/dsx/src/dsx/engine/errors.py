"""The errors of the engine."""

from __future__ import annotations

from ..errors import DsxError


class EngineError(DsxError, RuntimeError):
    """An engine was used in a way, or at a moment, that is not possible."""


class EngineArgumentError(DsxError, ValueError):
    """An argument of `initialize` or of an engine method cannot be used."""
