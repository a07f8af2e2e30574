"""Errors of audits."""

from __future__ import annotations

from dsx_core import CodedError

__all__ = ["AuditError"]


class AuditError(CodedError, ValueError):
    """An audit cannot be made as it was asked for: says what was given, what is expected, and what to do."""
