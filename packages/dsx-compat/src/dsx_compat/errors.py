"""The errors of a program that uses the `deepspeed` module of dsx."""

from __future__ import annotations

from dsx.errors import DsxError

__all__ = ["CompatError", "CompatWarning", "NotSupportedError", "WrongDeepSpeedError"]


class CompatError(DsxError):
    """Base of the errors of dsx-compat."""


class NotSupportedError(CompatError, ImportError):
    """A name of DeepSpeed that dsx does not have; the text says what to use."""

    code = "DSX604"


class WrongDeepSpeedError(CompatError, RuntimeError):
    """Files of another `deepspeed` are in the way."""

    code = "DSX603"


class CompatWarning(UserWarning):
    """Something that a program asked for has no effect here, or another one than its author may expect."""
