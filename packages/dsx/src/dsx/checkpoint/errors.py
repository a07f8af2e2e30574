"""What can go wrong with a checkpoint, by name."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. Raised with the same text on every rank."""


class CheckpointCorruptError(CheckpointError):
    """The bytes on disk are not the bytes that were written."""
