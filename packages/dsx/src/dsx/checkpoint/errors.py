"""The errors of checkpoints."""

from __future__ import annotations

from ..errors import DsxError

_MAX_CHARACTERS = 200


class CheckpointError(DsxError, RuntimeError):
    """A checkpoint cannot be written or read. Raised with the same text on every rank."""


class CheckpointCorruptError(CheckpointError):
    """The bytes on disk are not the bytes that were written."""

    code = "DSX501"


class CheckpointArgumentError(CheckpointError, ValueError):
    """A folder, a tag or a state that no checkpoint can have."""


def nothing_committed(text: str) -> CheckpointError:
    """The error for a folder without the checkpoint that is asked for."""
    return CheckpointError(text, code="DSX502")


def shown(value: object) -> str:
    """`repr` of a value from a file or a caller, cut to a length that fits into an error message."""
    text = repr(value[: _MAX_CHARACTERS + 1] if isinstance(value, (str, bytes)) else value)
    return (
        text
        if len(text) <= _MAX_CHARACTERS
        else f"{text[:_MAX_CHARACTERS]}... ({len(value) if isinstance(value, str) else 'long'})"
    )
